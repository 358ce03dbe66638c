"""A server in this process."""

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
from ..chat_template import ChatTemplate
from ..engine import Engine
from .api_errors import ApiError
from .app import Settings, make_app
from .guard import Limits

# Connections of clients: their deadlines and how many there may be, both of which uvicorn lacks.

_OPEN_FILES = 128
"""Files of the process besides connections."""


class Connections:
    """The open connections of a server, in the order in which they began or were answered last.

    Parameters
    ----------
    limits : Limits
        How many there may be.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._max_connections = min(limits.connections or max(1024, 4 * limits.in_flight), _file_limit())
        self._max_address_connections = limits.address_connections or max(256, 2 * limits.in_flight)
        self._all: dict[Connection, None] = {}
        self._of_address: dict[str, dict[Connection, None]] = {}

    def add(self, connection: Connection) -> ApiError | None:
        """Count a connection; where there are too many, close one without a request, or return an error."""
        of_address = self._of_address.setdefault(connection.address, {})
        self._all[connection] = of_address[connection] = None
        for some, limit in ((of_address, self._max_address_connections), (self._all, self._max_connections)):
            if len(some) > limit:
                idle = next(each for each in some if each.waits)  # the new one waits, too
                if idle is connection:
                    return ApiError(503, f"found {limit} connections with requests, expected at most so many")
                self.remove(idle)
                idle.transport.abort()
        return None

    def renew(self, connection: Connection) -> None:
        """Count a connection as the one that was answered last."""
        if connection in self._all:
            for some in (self._all, self._of_address[connection.address]):
                del some[connection]
                some[connection] = None

    def remove(self, connection: Connection) -> None:
        """Count a connection no longer; nothing if it is not counted."""
        if connection in self._all:
            of_address = self._of_address[connection.address]
            del self._all[connection], of_address[connection]
            if not of_address:
                del self._of_address[connection.address]


class Connection(H11Protocol):
    """A connection that is closed if its client does not send a request, or does not read an answer.

    Parameters
    ----------
    connections : Connections
        All connections of the server.
    options : object
        As uvicorn gives them.

    Attributes
    ----------
    address : str
        Address of the client; with IPv6 its network, since a client that has one address of it has all.
    """

    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self.address = ""
        self._all = connections
        self._header_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None

    @property
    def waits(self) -> bool:
        """True while the server works on no request of it: none has come whole, or all were answered."""
        return self._is_between or self.cycle.more_body or self.transport.is_closing()

    @property
    def _is_between(self) -> bool:
        """True until the headers of the next request have come."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, unless there are too many."""
        super().connection_made(transport)
        self.address = _address(self.client)
        error = self._all.add(self)
        if error is None:
            self._expect_headers()
        else:
            self._refuse(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._all.remove(self)
        _stop(self._header_timer)
        _stop(self._read_timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read a part of a request."""
        if self.transport.is_closing():
            return
        if self._is_between and self._header_timer is None:
            self._expect_headers()
        super().data_received(data)
        if not self._is_between:
            _stop(self._header_timer)
            self._header_timer = None

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._all.renew(self)
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Wait for a client that does not read."""
        super().pause_writing()
        self._read_timer = self.loop.call_later(self._all.limits.read_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on, since the client has read."""
        _stop(self._read_timer)
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not a request."""
        self._refuse(ApiError(400, msg))

    def _expect_headers(self) -> None:
        self._header_timer = self.loop.call_later(self._all.limits.header_seconds, self._give_up)

    def _give_up(self) -> None:
        """Close the connection; with an answer if a part of a request's headers has come."""
        if self.conn.trailing_data[0]:
            seconds = self._all.limits.header_seconds
            self._refuse(ApiError(408, f"headers: found no end of them within {seconds:g} s"))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer with an error, and close the connection."""
        # Not while an answer is written, nor behind one that came before its request had been read.
        started = self.cycle is not None and self.cycle.response_started
        if not started or (self.cycle.response_complete and self.conn.their_state is not h11.SEND_BODY):
            body = json.dumps(error.body).encode()
            head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\nContent-Type: application/json\r\n"
            self.transport.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _address(client: tuple[str, int] | None) -> str:
    """The address, or network, whose connections are counted together."""
    host = client[0] if client else ""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:  # of a Unix socket
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return host
    return str(address.ipv4_mapped or ipaddress.ip_network((int(address), 64), strict=False))


def _file_limit() -> int:
    """The most connections that the process can open."""
    try:
        import resource
    except ImportError:  # of another system than Unix
        return 1 << 20
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else max(soft - _OPEN_FILES, 1)


GRACE_SECONDS = 10
"""Seconds that answers get to end when the server is told to stop."""


def make_server(
    engine: Engine,
    settings: Settings,
    template: ChatTemplate | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    log_level: str = "info",
) -> uvicorn.Server:
    """A server that listens when its ``run`` is called; set ``should_exit`` to stop it from another thread."""
    config = uvicorn.Config(
        make_app(engine, settings, template),
        host=host,
        port=port,
        log_level=log_level,
        access_log=False,  # metrics count answers
        timeout_graceful_shutdown=GRACE_SECONDS,
        http=partial(Connection, Connections(settings.limits)),  # type: ignore[arg-type]  # it takes any callable
        timeout_keep_alive=settings.limits.idle_seconds,  # type: ignore[arg-type]  # nor need it be whole
        server_header=False,
        ws="none",
        lifespan="off",
    )
    return uvicorn.Server(config)


def serve(
    engine: Engine,
    settings: Settings,
    template: ChatTemplate | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Answer requests until Ctrl-C or SIGTERM.

    Parameters
    ----------
    engine : Engine
        Closed by its owner.
    settings : Settings
    template : ChatTemplate, optional
        Template of conversations.
    host, port
        Where it listens; port 0 for any that is free.
    on_ready : callable, optional
        Told the address when it listens.

    Raises
    ------
    HeteroError
        If it cannot listen there.
    """
    listening = _listen(host, port)
    with listening:
        name, number = listening.getsockname()[:2]
        if on_ready is not None:
            on_ready(f"http://{f'[{name}]' if ':' in name else name}:{number}")
        make_server(engine, settings, template, host, port).run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
    except OSError as error:
        raise HeteroError(f"{host}: found no such host: {error.strerror or error}") from error
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(2048)
    except OSError as error:
        made.close()
        raise HeteroError(f"{host}:{port}: cannot listen there: {error.strerror or error}") from error
    return made
