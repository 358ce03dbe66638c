"""A server in this process: uvicorn with limits on connections."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ...errors import HeteroError
from ...system import open_files_limit
from ..chat_template import ChatTemplate
from ..encoder import Encoder
from ..engine import Engine
from .api_errors import ApiError
from .app import Settings, make_app
from .limits import Limits

_OTHER_FILES = 128  # open files of the process besides connections
GRACE_SECONDS = 10  # time that answers get to end when the server stops


class Connections:
    """Open connections of a server, least recently answered first. `limits`: limits of the server."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._max_connections = min(limits.connections or max(1024, 4 * limits.in_flight), _file_limit())
        self._max_address_connections = limits.address_connections or max(256, 2 * limits.in_flight)
        self._all: dict[Connection, None] = {}
        self._by_address: dict[str, dict[Connection, None]] = {}

    def add(self, connection: Connection) -> ApiError | None:
        """Add a connection; if there are too many, close the one idle longest, or return an error."""
        of_address = self._by_address.setdefault(connection.address, {})
        self._all[connection] = of_address[connection] = None
        for group, limit in ((of_address, self._max_address_connections), (self._all, self._max_connections)):
            if len(group) > limit:
                idle = next(each for each in group if each.is_idle)
                if idle is connection:  # no older one is idle
                    return ApiError(503, f"found {limit} connections with requests, expected at most so many")
                self.remove(idle)
                idle.transport.abort()
        return None

    def renew(self, connection: Connection) -> None:
        """Move a connection to the end, as the most recently answered."""
        if connection in self._all:
            for group in (self._all, self._by_address[connection.address]):
                del group[connection]
                group[connection] = None

    def remove(self, connection: Connection) -> None:
        """Remove a connection, if it is there."""
        if connection in self._all:
            of_address = self._by_address[connection.address]
            del self._all[connection], of_address[connection]
            if not of_address:
                del self._by_address[connection.address]


class Connection(H11Protocol):
    """HTTP connection with timeouts for clients that do not send a request or do not read the answer.

    `connections`: all connections of the server; `options`: options of uvicorn's class; `address`: address of the
    client, or its /64 network with IPv6, all of whose addresses belong to one client.
    """

    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self.address = ""
        self._connections = connections
        self._header_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """True while there is no complete request to answer."""
        return self._awaits_headers or self.cycle.more_body or self.transport.is_closing()

    @property
    def _awaits_headers(self) -> bool:
        """True until the headers of the next request are complete."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer for headers, or refuse the connection if there are too many."""
        super().connection_made(transport)
        self.address = _client_address(self.client)
        error = self._connections.add(self)
        if error is None:
            self._expect_headers()
        else:
            self._refuse(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """Clean up."""
        self._connections.remove(self)
        _stop(self._header_timer)
        _stop(self._read_timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Handle data; stop the timer once the headers are complete."""
        if self.transport.is_closing():
            return
        if self._awaits_headers and self._header_timer is None:
            self._expect_headers()
        super().data_received(data)
        if not self._awaits_headers:
            _stop(self._header_timer)
            self._header_timer = None

    def on_response_complete(self) -> None:
        """Mark the connection as recently used."""
        self._connections.renew(self)
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Start the timer for a client that does not read."""
        super().pause_writing()
        self._read_timer = self.loop.call_later(self._connections.limits.read_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the timer, since the client has read."""
        _stop(self._read_timer)
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answer a malformed request."""
        self._refuse(ApiError(400, msg))

    def _expect_headers(self) -> None:
        self._header_timer = self.loop.call_later(self._connections.limits.header_seconds, self._time_out)

    def _time_out(self) -> None:
        """Close the connection, with an error if some of the headers have come."""
        if self.conn.trailing_data[0]:
            seconds = self._connections.limits.header_seconds
            self._refuse(ApiError(408, f"headers: found no end of them within {seconds:g} s"))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer with an error, and close the connection."""
        # Not in the middle of an answer, nor after one that was sent before its request was read.
        started = self.cycle is not None and self.cycle.response_started
        if not started or (self.cycle.response_complete and self.conn.their_state is not h11.SEND_BODY):
            body = json.dumps(error.body).encode()
            head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\nContent-Type: application/json\r\n"
            self.transport.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _client_address(client: tuple[str, int] | None) -> str:
    """Address, or IPv6 network, whose connections are counted together."""
    host = client[0] if client else ""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:  # Unix socket
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return host
    return str(address.ipv4_mapped or ipaddress.ip_network((int(address), 64), strict=False))


def _file_limit() -> int:
    """Maximum number of connections that the process can open."""
    limit = open_files_limit()
    return 1 << 20 if limit is None else max(limit - _OTHER_FILES, 1)


def make_server(
    engine: Engine | None,
    settings: Settings,
    template: ChatTemplate | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    log_level: str = "info",
    encoder: Encoder | None = None,
) -> uvicorn.Server:
    """Make a server; its ``run`` listens, and setting ``should_exit`` stops it from another thread."""
    config = uvicorn.Config(
        make_app(engine, settings, template, encoder),
        host=host,
        port=port,
        log_level=log_level,
        access_log=False,  # see the metrics
        timeout_graceful_shutdown=GRACE_SECONDS,
        http=partial(Connection, Connections(settings.limits)),  # type: ignore[arg-type]  # any callable works
        timeout_keep_alive=settings.limits.idle_seconds,  # type: ignore[arg-type]  # a float works
        server_header=False,
        ws="none",
        lifespan="off",
    )
    return uvicorn.Server(config)


def serve(
    engine: Engine | None,  # engine; not closed. None for an encoder alone.
    settings: Settings,
    template: ChatTemplate | None = None,  # chat template of the model
    # Address to listen on; port 0 for any free port.
    host: str = "127.0.0.1",
    port: int = 8000,
    on_ready: Callable[[str], None] | None = None,  # called with the URL once the server listens
    encoder: Encoder | None = None,  # model of ``/v1/embeddings``
) -> None:
    """Serve until Ctrl-C or SIGTERM. Raises HeteroError if it cannot listen on the address."""
    with _listen(host, port) as listener:
        address, actual_port = listener.getsockname()[:2]
        if on_ready is not None:
            on_ready(f"http://{f'[{address}]' if ':' in address else address}:{actual_port}")
        make_server(engine, settings, template, host, port, encoder=encoder).run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise HeteroError(f"{host}: found no such host: {error.strerror or error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise HeteroError(f"{host}:{port}: cannot listen there: {error.strerror or error}") from error
    return listener
