"""A server in a thread of this process, on a port that is free."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from relax_hetero.llm import ChatTemplate, Engine
from relax_hetero.llm.server.app import Settings
from relax_hetero.llm.server.limits import Limits
from relax_hetero.llm.server.serve import serve

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tool speaks') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
)


@dataclass
class Server:
    """Address of a running server, and its engine."""

    url: str
    engine: Engine | None


@contextmanager
def running(engine: Engine | None, **settings) -> Iterator[Server]:
    """A server over an engine, which is closed at the end, or over an encoder alone."""
    import relax_hetero.llm.server.serve as module

    servers, ready = [], threading.Event()
    address: list[str] = []

    def on_ready(url: str) -> None:
        address.append(url)
        ready.set()

    original = module.make_server

    def make(*arguments, **options):
        servers.append(original(*arguments, **{**options, "log_level": "critical"}))
        return servers[-1]

    limits = settings.pop("limits", Limits())
    module.make_server = make
    template = None if engine is None else ChatTemplate(settings.pop("template", TEMPLATE))
    encoder = settings.pop("encoder", None)
    work = threading.Thread(
        target=serve,
        args=(engine, Settings("toy", limits=limits, **settings), template, "127.0.0.1", 0, on_ready, encoder),
    )
    try:
        work.start()
        assert ready.wait(30)
        yield Server(address[0], engine)
    finally:
        module.make_server = original
        servers[0].should_exit = True
        work.join(30)
        if engine is not None:
            engine.close()
        assert not work.is_alive()
