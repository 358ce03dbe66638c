"""A server under clients that stay, vanish and send nonsense keeps its memory, once it has warmed up."""

from __future__ import annotations

import asyncio
import random
import signal

import pytest

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

from llm.gguf_files import MODELS, _load, write_gguf  # noqa: E402

soak = _load("soak")

CLIENTS, WARM_UP, REQUESTS, TOKENS = 32, 1500, 5000, 2


async def ask(url: str, count: int, outcomes: soak.Seen) -> None:
    """So many requests from all clients together."""
    left = iter(range(count))

    async def client(http: httpx.AsyncClient, number: int, draw: random.Random) -> None:
        for _ in left:
            kind = draw.random()
            if kind < 0.05:
                await soak.send_nonsense(http, draw, outcomes)
            else:
                await soak.read_answer(number, http, draw, TOKENS, 0 if kind < 0.15 else TOKENS, outcomes)

    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        await asyncio.gather(*(client(http, number, random.Random(count + number)) for number in range(CLIENTS)))


@pytest.mark.timing
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["toy", "gemma3"])
def test_thousands_of_requests_take_no_memory(model, tmp_path):
    path, arguments = soak.TOY, []
    if model != soak.TOY:
        path = str(write_gguf(tmp_path / "model.gguf", MODELS[model]))
        arguments = ["--context", "256", "--slots", "8"]
    server, url = soak.start(path, arguments)
    outcomes = soak.Seen()
    try:
        asyncio.run(ask(url, WARM_UP, outcomes))
        before = soak.resident(server.pid)
        asyncio.run(ask(url, REQUESTS, outcomes))
        grown = soak.resident(server.pid) - before
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)
    assert not outcomes.lost, outcomes.lost[:3]
    assert sum(outcomes.answers.values()) == WARM_UP + REQUESTS
    # A leak of one kilobyte per request would be 5 MB.
    assert grown < 4, f"{grown:.1f} MB more after {REQUESTS} requests"
