"""The server of a GGUF file against llama.cpp's, with clients that ask at the same time.

python apps/bench/llm_bench/servers.py gemma --llama-server build/bin/llama-server
python apps/bench/llm_bench/servers.py MODEL.gguf --clients 16 --prompt 256 --answer 128

In each round each server starts, answers the same requests (streamed, greedy, a prompt of tokens each, no two alike),
and ends before the other starts. Figures are medians over rounds.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import create_server
from typing import Any

import click
import httpx
import numpy as np
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[2] / "python")]
from bars import Check, verdict  # noqa: E402
from compare import NOVELS, model_path  # noqa: E402
from smoke import smoke  # noqa: E402
from soak import events  # noqa: E402

SAYS = Console(highlight=False, width=120)
OURS, PEER = "ours", "llama.cpp"
START_SECONDS = 900


@dataclass(frozen=True)
class Load:
    """Requests of a round: each of the clients sends `requests`, one after the other; sizes are tokens."""

    clients: int
    requests: int
    prompt: int
    answer: int
    threads: int

    @property
    def context(self) -> int:
        """Tokens of a sequence."""
        return self.prompt + self.answer + 8


@dataclass(frozen=True)
class Answer:
    """Times of an answer in seconds: to its first token, and to its end."""

    first: float
    end: float


FIGURES = {
    "throughput, tokens/s": lambda answers, seconds, load: len(answers) * load.answer / seconds,
    "first token, median, s": lambda answers, seconds, load: float(np.median([each.first for each in answers])),
    "first token, p95, s": lambda answers, seconds, load: float(np.percentile([each.first for each in answers], 95)),
    "per token, median, ms": lambda answers, seconds, load: float(
        np.median([1e3 * (each.end - each.first) / max(load.answer - 1, 1) for each in answers])
    ),
}
"""Figures of a round, by name."""
BARS = {"throughput, tokens/s": (1.5, False), "first token, p95, s": (1.0, True)}
"""Our figure over llama.cpp's, and whether it is a maximum."""


def command_of(library: str, path: Path, port: int, load: Load, llama_server: Path | None) -> list[str]:
    """The command of a server."""
    if library == OURS:
        words = ["serve", str(path), "--slots", str(load.clients), "--context", str(load.context)]
        return [sys.executable, "-m", "relax_hetero", *words, "--port", str(port)]
    sizes = ["-np", str(load.clients), "-c", str(load.clients * load.context)]
    threads = ["-t", str(load.threads), "-tb", str(load.threads)]
    return [str(llama_server), "-m", str(path), "--port", str(port), *sizes, *threads]


@contextmanager
def running(library: str, path: Path, load: Load, llama_server: Path | None, log: Path) -> Iterator[str]:
    """URL of a server, which has answered a request and has nothing to do."""
    with create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "TVM_NUM_THREADS": str(load.threads),
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[2] / "python"), os.environ.get("PYTHONPATH", "")]),
    }
    url = f"http://127.0.0.1:{port}"
    with log.open("a") as output:
        words = command_of(library, path, port, load, llama_server)
        server = subprocess.Popen(words, env=environment, stdout=output, stderr=output)
    try:
        end = time.monotonic() + START_SECONDS
        while not is_healthy(url):
            if server.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"{library} does not answer; the end of {log}:\n{log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        server.wait(60)


def is_healthy(url: str) -> bool:
    """True once a server has loaded and compiled its model."""
    try:
        return bool(httpx.get(f"{url}/health", timeout=5).json()["status"] == "ok")
    except (httpx.HTTPError, ValueError, KeyError):
        return False


async def measure(url: str, prompts: Sequence[list[int]], load: Load) -> tuple[list[Answer], float]:
    """Let all clients ask; answers, and seconds until the last one."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=3600, limits=limits) as http:
        await ask(http, prompts[-1][: load.prompt // 2], load.answer // 2)  # warms up
        begin = time.perf_counter()

        async def client(number: int) -> list[Answer]:
            own = prompts[number :: load.clients][: load.requests]
            return [await ask(http, prompt, load.answer) for prompt in own]

        answers = await asyncio.gather(*map(client, range(load.clients)))
        return [answer for each in answers for answer in each], time.perf_counter() - begin


async def ask(http: httpx.AsyncClient, prompt: list[int], count: int) -> Answer:
    """Read the stream of one answer, which must have `count` tokens."""
    body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    begin, first, usage = time.perf_counter(), 0.0, {}
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise SystemExit(f"a request was answered with {answer.status_code}: {(await answer.aread())!r:.500}")
        async for event in events(answer):
            if event == "[DONE]":
                break
            part: dict[str, Any] = json.loads(event)
            usage = part.get("usage") or usage
            if not first and part.get("choices"):
                first = time.perf_counter()
    found = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if found != (len(prompt), count):
        raise SystemExit(f"an answer has {found} tokens of prompt and text, expected {(len(prompt), count)}")
    return Answer(first - begin, time.perf_counter() - begin)


def prompts_of(path: Path, load: Load, turn: int) -> list[list[int]]:
    """Prompts of a round: pieces of the novels, each after another beginning, so that no prefixes are shared."""
    from relax_hetero.llm import Tokenizer

    tokenizer = Tokenizer.from_gguf(path)
    text = tokenizer.encode(NOVELS.read_text(encoding="utf-8"), begin=False)
    begin = tokenizer.encode("", begin=True)
    draw = np.random.default_rng(turn)
    rows = []
    for _ in range(load.clients * load.requests + 1):
        piece = np.roll(text, -int(draw.integers(len(text))))
        rows.append([*begin, *np.resize(piece, load.prompt - len(begin)).tolist()])
    return rows


def show(rounds: dict[str, list[dict[str, float]]], load: Load) -> list[Check]:
    """Print the table of medians over rounds; checks of the ratios."""
    table = Table(title=f"{load.clients} clients, prompts of {load.prompt}, answers of {load.answer} tokens")
    for column in ("", *rounds, *(["ratio"] if len(rounds) > 1 else [])):
        table.add_column(column, justify="left" if not column else "right")
    checks = []
    for name in FIGURES:
        medians = {library: statistics.median(each[name] for each in turns) for library, turns in rounds.items()}
        cells = [f"{value:.3g}" if value < 100 else f"{value:.0f}" for value in medians.values()]
        if len(medians) > 1:
            ratio = statistics.median(
                own[name] / other[name] for own, other in zip(rounds[OURS], rounds[PEER], strict=True)
            )
            cells.append(f"{ratio:.2f}")
            if name in BARS:
                checks.append(Check(f"{name}: over llama.cpp", ratio, *BARS[name]))
        table.add_row(name, *cells)
    SAYS.print(table)
    return checks


@click.command(help=__doc__)
@click.argument("model")
@click.option("--llama-server", type=click.Path(path_type=Path, exists=True), help="The command of llama.cpp.")
@click.option("--clients", default=16, show_default=True)
@click.option("--requests", default=4, show_default=True, help="Requests of each client in a round.")
@click.option("--prompt", default=256, show_default=True, help="Tokens of a prompt.")
@click.option("--answer", default=128, show_default=True, help="Tokens of an answer.")
@click.option("--threads", default=2, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--cache", type=click.Path(path_type=Path), default=Path(".cache/language_models"), show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures to this file.")
@smoke(model="tiny", clients=3, requests=2, prompt=24, answer=8, rounds=1)
def main(
    model: str,
    llama_server: Path | None,
    clients: int,
    requests: int,
    prompt: int,
    answer: int,
    threads: int,
    rounds: int,
    cache: Path,
    json_file: Path | None,
) -> None:
    """Compare, and exit with 1 if a bar is missed."""
    cache.mkdir(parents=True, exist_ok=True)
    path, load = model_path(model, cache), Load(clients, requests, prompt, answer, threads)
    found: dict[str, list[dict[str, float]]] = {OURS: [], **({PEER: []} if llama_server else {})}
    for turn in range(rounds):
        prompts = prompts_of(path, load, turn)
        for library in found if turn % 2 else reversed(found):
            with running(library, path, load, llama_server, cache / f"{library}.log") as url:
                answers, seconds = asyncio.run(measure(url, prompts, load))
            found[library].append({name: function(answers, seconds, load) for name, function in FIGURES.items()})
            SAYS.print(f"round {turn + 1}, {library}:", *(f"{n} {v:.4g};" for n, v in found[library][-1].items()))
    checks = show(found, load)
    for check in checks:
        SAYS.print(f"{verdict(check)}: {check}", markup=False)
    if json_file:
        json_file.write_text(json.dumps(found))
    sys.exit(0 if all(check.passed for check in checks) else 1)


if __name__ == "__main__":
    main()
