"""Compare the service over HTTP with its replicas without HTTP, and count lost requests while processes are killed.

python apps/cluster_serving/measure.py
python apps/cluster_serving/measure.py --sentences 1 --encoding base64
python apps/cluster_serving/measure.py --kills 3
python apps/cluster_serving/measure.py --kills 3 --victims gateways --json
"""

from __future__ import annotations

# isort: off
import app

# isort: on
import argparse
import asyncio
import base64
import json
import os
import signal
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import aiohttp
import numpy as np
import ray
from load import Load, Send, drive, until
from ray import serve
from rich.console import Console
from rich.table import Table

app.find_modules()

from embeddings import Embedder  # noqa: E402 (its folders are found now)

WORDS = "the a cat dog house river sings walks over under quickly green old new train password window opens key".split()
PORT = 8517
# Largest difference by rounding: batches of other sizes add in another order.
CLOSE = 1e-4


def requests_of(count: int, sentences: int, words: int, seed: int = 0) -> list[list[str]]:
    """Requests of random words."""
    random = np.random.default_rng(seed)
    return [[" ".join(random.choice(WORDS, words)) for _ in range(sentences)] for _ in range(count)]


class Contest:
    """Calls of the same replicas with and without HTTP; answers are compared with results of this process."""

    def __init__(self, session: aiohttp.ClientSession, options: argparse.Namespace) -> None:
        self._session = session
        self._url = f"http://127.0.0.1:{PORT}/embed"
        self._requests = requests_of(64, options.sentences, options.words)
        self._encoding = options.encoding
        self._bodies = [
            json.dumps({"sentences": request, "encoding": self._encoding}).encode() for request in self._requests
        ]
        model = options.engine.load()
        self._expected = [model.run(request) for request in self._requests]
        self._replicas = app.replicas_of(options.engine)

    async def by_handle(self, number: int) -> str:
        """Call a replica without HTTP."""
        rows = await self._replicas.answer.remote(self._requests[number % 64])
        return self._judge(number, rows)

    async def by_http(self, number: int) -> str:
        """Call over a connection that is kept, and check the status only."""
        status, content = await self._post(number)
        return "ok" if status == 200 else f"status {status}: {content[:100]!r}"

    async def by_http_compared(self, number: int) -> str:
        """Call over HTTP, and compare the numbers."""
        status, content = await self._post(number)
        if status != 200:
            return f"status {status}: {content[:100]!r}"
        rows = json.loads(content)["embeddings"]
        if self._encoding == "base64":
            rows = [np.frombuffer(base64.b64decode(row), "<f4") for row in rows]
        return self._judge(number, rows)

    async def _post(self, number: int) -> tuple[int, bytes]:
        async with self._session.post(self._url, data=self._bodies[number % 64]) as answer:
            return answer.status, await answer.read()

    def _judge(self, number: int, answer: Any) -> str:
        expected = self._expected[number % 64]
        rows = np.asarray(answer)
        same = rows.shape == expected.shape and np.abs(rows - expected).max() < CLOSE
        return "ok" if same else "wrong result"


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All figures, by name; the service is shut down afterwards."""
    try:
        return await _measure(options)
    finally:
        # Shutdown needs the event loop in which the handles were used, while that loop runs.
        await serve.shutdown_async()


async def _measure(options: argparse.Namespace) -> dict[str, Any]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(60)) as session:
        contest = Contest(session, options)
        figures: dict[str, Any] = {"sentences": options.sentences, "callers": options.callers}
        figures |= await _rates({"handle": contest.by_handle, "http": contest.by_http}, options)
        if options.kills:
            figures["kills"] = await _kills(contest, options)
    return figures


async def _rates(senders: dict[str, Send], options: argparse.Namespace) -> dict[str, Any]:
    loads: dict[str, list[Load]] = {name: [] for name in senders}
    for send in senders.values():  # opens connections and looks up routes
        await drive(send, options.callers, until(options.seconds / 4))
    for turn in range(options.rounds):
        for name in sorted(senders, reverse=turn % 2 == 1):
            loads[name].append(await drive(senders[name], options.callers, until(options.seconds)))
    summaries = {name: _summary(turns, options.sentences) for name, turns in loads.items()}
    return {**summaries, "ratio": summaries["http"]["rate"] / summaries["handle"]["rate"]}


def _summary(turns: Sequence[Load], sentences: int) -> dict[str, Any]:
    all_turns = Load(latencies=[seconds for turn in turns for seconds in turn.latencies])
    return {
        "rate": statistics.median(turn.rate for turn in turns) * sentences,
        "rates": [round(turn.rate * sentences, 1) for turn in turns],
        "p50_ms": all_turns.percentile(0.5) * 1e3,
        "p99_ms": all_turns.percentile(0.99) * 1e3,
        "lost": sum(turn.lost for turn in turns),
    }


async def _kills(contest: Contest, options: argparse.Namespace) -> dict[str, Any]:
    """Kill processes under load, one after the other, each when the last one is replaced."""
    killing = asyncio.create_task(_kill(options))
    load = await drive(contest.by_http_compared, options.callers, lambda: not killing.done())
    return {
        "killed": await killing,
        "requests": load.endings.total(),
        "lost": load.lost,
        "endings": dict(load.endings),
        "p50_ms": load.percentile(0.5) * 1e3,
        "p99_ms": load.percentile(0.99) * 1e3,
        "longest_ms": load.percentile(1) * 1e3,
    }


async def _kill(options: argparse.Namespace) -> int:
    gateways = options.victims == "gateways"
    handle = app.gateways() if gateways else app.replicas_of(options.engine)
    count = options.gateways if gateways else options.replicas
    dead: set[int] = set()
    random = np.random.default_rng(0)
    for _ in range(options.kills):
        await asyncio.sleep(options.seconds * random.random())  # at any time of a batch
        alive = await _processes(handle, count, dead)
        victim = alive[int(random.integers(len(alive)))]
        os.kill(victim, signal.SIGKILL)
        dead.add(victim)
    await _processes(handle, count, dead)
    return len(dead)


async def _processes(handle: Any, count: int, dead: set[int]) -> list[int]:
    """The ids of a deployment's processes that are not in `dead`, once there are `count`."""
    alive: set[int] = set()
    while len(alive) < count:
        try:
            alive |= {await handle.process.remote()} - dead
        except ray.exceptions.RayActorError:
            pass  # this one had just been killed
    return sorted(alive)


def table(figures: dict[str, Any]) -> Table:
    """The rates with and without HTTP."""
    title = f"{figures['sentences']} sentences a request, {figures['callers']} callers"
    shown = Table(title=title, title_justify="left")
    for column in ("", "sentences/s", "p50 ms", "p99 ms", "lost"):
        shown.add_column(column, justify="right" if column else "left")
    for name in ("handle", "http"):
        row = figures[name]
        shown.add_row(name, f"{row['rate']:.0f}", f"{row['p50_ms']:.1f}", f"{row['p99_ms']:.1f}", str(row["lost"]))
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurement; returns the exit code: 0 if nothing was lost."""
    options = _parse(arguments)
    options.engine = Embedder()
    options.engine.compile()
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "warning"}
    # A cluster of its own, whatever else runs on this machine.
    ray.init("local", num_cpus=options.replicas, **quiet)
    try:
        settings = app.Settings(replicas=options.replicas, gateways=options.gateways)
        app.start([options.engine], settings, "127.0.0.1", PORT)
        figures = asyncio.run(measure(options))
    finally:
        ray.shutdown()
    if options.json:
        print(json.dumps(figures))
    else:
        screen = Console(highlight=False)
        screen.print(table(figures))
        screen.print(f"http / handle: {figures['ratio']:.2f}")
        if options.kills:
            kills = figures["kills"]
            screen.print(
                f"{kills['killed']} {options.victims} killed: {kills['lost']} of {kills['requests']} requests lost, "
                f"p99 {kills['p99_ms']:.0f} ms, longest {kills['longest_ms']:.0f} ms"
            )
            screen.print(str(kills["endings"]), markup=False)
    return 0 if figures["http"]["lost"] + figures.get("kills", {}).get("lost", 0) == 0 else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    summary, _, usage = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sentences", type=int, default=8, help="sentences of a request (default 8)")
    parser.add_argument("--words", type=int, default=24, help="words of a sentence (default 24)")
    parser.add_argument("--callers", type=int, default=16, help="callers, each with a connection (default 16)")
    parser.add_argument("--encoding", choices=("float", "base64"), default="float", help="encoding of embeddings")
    parser.add_argument("--replicas", type=int, default=2, help="number of replicas, one thread each (default 2)")
    parser.add_argument("--gateways", type=int, default=2, help="processes that read and write HTTP (default 2)")
    parser.add_argument("--seconds", type=float, default=4, help="seconds of a turn; most between kills (default 4)")
    parser.add_argument("--rounds", type=int, default=4, help="turns with and without HTTP (default 4)")
    parser.add_argument("--kills", type=int, default=0, help="processes to kill under load afterwards (default 0)")
    parser.add_argument("--victims", choices=("replicas", "gateways"), default="replicas", help="processes to kill")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    parser.add_argument("--smoke", action="store_true", help="a moment of load and one kill: does the command work?")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.callers, options.seconds, options.rounds, options.kills = 4, 0.2, 1, min(options.kills, 1)
    return options


if __name__ == "__main__":
    sys.exit(main())
