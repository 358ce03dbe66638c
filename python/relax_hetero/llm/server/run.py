"""A server in this process."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial

import uvicorn

from ...errors import HeteroError
from ..chat_template import ChatTemplate
from ..engine import Engine
from .app import Settings, make_app
from .connections import Connection, Connections

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
