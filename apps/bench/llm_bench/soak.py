"""A server of a language model under load for minutes: texts, schemas and tools, clients that vanish or send nonsense.

    python apps/bench/llm_bench/soak.py MODEL.gguf --clients 64 --minutes 10
    python apps/bench/llm_bench/soak.py toy --minutes 1        a model that computes nothing, for the server alone

Prints the number of lost answers, the time to the first token and per token, the clients' shares, and the growth of
the server's memory. Exits with 1 if an answer was lost or wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
import numpy as np

ROOT = Path(__file__).resolve().parents[3]
TOY = "toy"
BAD_BODIES = (
    b"{",
    b"[]",
    b'{"prompt": 7}',
    b'{"prompt": "a", "temperature": "hot"}',
    b'{"prompt": "a", "max_tokens": -1}',
    b'{"prompt": "a", "logit_bias": {"--1": 1}}',
    b'{"prompt": "a", "n": 1000000000000}',
    b'{"prompt": "' + b"word " * 200_000 + b'"}',
    b'{"prompt": "a", "guided_json": {"type": "no"}}',
    b'{"prompt": "a", "grammar": "root ::= ("}',
    b'{"prompt": "a", "tools": [{"type": "function"}]}',
)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bonn", "Ulm", "Rome"]}, "days": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FORMED = {
    "schemas": {"response_format": {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}},
    "tools": {
        "tools": [{"type": "function", "function": {"name": "travel", "parameters": SCHEMA}}],
        "tool_choice": "required",
    },
}
"""Fields of conversations whose answers have a form."""
TEMPLATE = """{% if tools %}{{ tools | tojson }}
A call is <tool_call>{"name": <function-name>, "arguments": <args-json-object>}</tool_call>.
{% endif %}{% for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}assistant: """
"""Chat template of the server, which shows tools whatever the model's own does."""


@dataclass
class Seen:
    """Observations of the clients; times in seconds."""

    answers: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    token: list[float] = field(default_factory=list)
    shares: Counter[int] = field(default_factory=Counter)
    memory: list[tuple[float, float]] = field(default_factory=list)  # seconds, MB


@dataclass(frozen=True)
class Load:
    """Behaviour of clients: `vanish`, `bad` and `formed` (schemas and tools) are shares of their requests."""

    clients: int
    seconds: float
    vanish: float
    bad: float
    formed: float
    tokens: int


async def soak(url: str, process: int, load: Load) -> Seen:
    """Run all clients until the time is over."""
    observed = Seen()
    end = time.monotonic() + load.seconds
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
        watching = asyncio.ensure_future(watch(process, observed, load.seconds))
        await asyncio.gather(*(client(n, http, load, end, observed) for n in range(load.clients)))
        watching.cancel()
    observed.memory.append((load.seconds, resident(process)))
    return observed


async def client(number: int, http: httpx.AsyncClient, load: Load, end: float, observed: Seen) -> None:
    """Send one request after the other."""
    draw = random.Random(number)
    while time.monotonic() < end:
        kind = draw.random()
        try:
            if kind < load.bad:
                await send_nonsense(http, draw, observed)
            elif draw.random() < load.formed:
                await read_formed(http, draw, kind < load.bad + load.vanish, observed)
            else:
                stays = load.tokens if kind >= load.bad + load.vanish else draw.randrange(load.tokens)
                await read_answer(number, http, draw, load.tokens, stays, observed)
        except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
            observed.lost.append(f"client {number}: {type(error).__name__}: {error}")


async def send_nonsense(http: httpx.AsyncClient, draw: random.Random, observed: Seen) -> None:
    """Send a body that is not a request; the answer must say what is wrong."""
    headers = {"Content-Type": "application/json"}
    answer = await http.post("/v1/completions", content=draw.choice(BAD_BODIES), headers=headers)
    if answer.status_code == 400 and "message" in answer.json()["error"]:
        observed.answers["refused"] += 1
    else:
        observed.lost.append(f"nonsense was answered with {answer.status_code}")


async def read_formed(http: httpx.AsyncClient, draw: random.Random, leaves: bool, observed: Seen) -> None:
    """Ask for an answer with a form, which must have it, or leave before its end."""
    name = draw.choice(list(FORMED))
    messages = [{"role": "user", "content": f"Where to, and for how many days? ({draw.random()})"}]
    body = {"messages": messages, "max_tokens": 100, "temperature": 1.0, **FORMED[name]}
    try:
        timeout = draw.uniform(0.01, 0.3) if leaves else 600
        answer = await http.post("/v1/chat/completions", json=body, timeout=timeout)
    except httpx.TimeoutException:
        observed.answers["left"] += leaves
        if not leaves:
            raise
        return
    if answer.status_code != 200:
        observed.lost.append(f"{name} were answered with {answer.status_code}: {answer.text[:200]}")
        return
    choice = answer.json()["choices"][0]
    message = choice["message"]
    if choice["finish_reason"] != "length":
        value = json.loads(message["tool_calls"][0]["function"]["arguments"] if name == "tools" else message["content"])
        if value.keys() != {"city", "days"} or value["city"] not in SCHEMA["properties"]["city"]["enum"]:  # type: ignore[index]
            observed.lost.append(f"{name} have the value {value}")
            return
    observed.answers[name] += 1


async def read_answer(
    number: int, http: httpx.AsyncClient, draw: random.Random, tokens: int, stays: int, observed: Seen
) -> None:
    """Read a stream, or leave it after `stays` events."""
    prompt = f"Client {number} asks: " + " ".join(
        draw.choices(("why", "who", "when", "what", "where"), k=draw.randint(1, 40))
    )
    body = {"prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True, "seed": number}
    body["stream_options"] = {"include_usage": True}
    begin, first, count, usage, ended = time.perf_counter(), 0.0, 0, 0, False
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            observed.lost.append(f"a request was answered with {answer.status_code}: {(await answer.aread())[:200]!r}")
            return
        async for event in events(answer):
            if event == "[DONE]":
                ended = True
                break
            part = json.loads(event)
            if "error" in part:
                observed.lost.append(str(part["error"]))
                return
            usage = part.get("usage", {}).get("completion_tokens", usage)
            count += 1
            first = first or time.perf_counter()
            if count > stays and stays < tokens:
                observed.answers["left"] += 1
                return
    if not ended or usage != tokens:
        observed.lost.append(f"a stream ended after {usage} of {tokens} tokens")
        return
    observed.answers["whole"] += 1
    observed.shares[number] += usage
    observed.first.append(first - begin)
    observed.token.append((time.perf_counter() - first) / max(1, usage - 1))


async def events(answer: httpx.Response) -> AsyncIterator[str]:
    """The data of each event."""
    async for line in answer.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


async def watch(process: int, observed: Seen, seconds: float) -> None:
    """Sample the server's memory; the first samples show its warm-up."""
    begin = time.monotonic()
    while True:
        observed.memory.append((time.monotonic() - begin, resident(process)))
        await asyncio.sleep(max(0.5, seconds / 20))


def resident(process: int) -> float:
    """Resident memory of a process, in MB."""
    text = Path(f"/proc/{process}/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0]) / 1024


def start(model: str, arguments: list[str]) -> tuple[subprocess.Popen[str], str]:
    """A server in a process of its own, and its URL."""
    command = [sys.executable, __file__, "--serve-toy"]
    if model != TOY:
        with tempfile.NamedTemporaryFile("w", suffix=".jinja", delete=False) as file:
            file.write(TEMPLATE)
        words = ["--chat-template", file.name, "--port", "0", *arguments]
        command = [sys.executable, "-m", "relax_hetero", "serve", model, *words]
    paths = [str(ROOT / "python"), str(ROOT / "tests" / "python"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert server.stderr is not None
    for line in server.stderr:
        print(line, end="", file=sys.stderr)
        if "http://" in line:
            return server, "http://" + line.split("http://")[1].split("/v1")[0].strip()
    raise SystemExit(f"the server ended with {server.wait()}")


def serve_toy() -> None:
    """Serve the model of the tests."""
    from llm.toy_model import ToyCodec, ToyModel
    from relax_hetero.llm import ChatTemplate, Engine
    from relax_hetero.llm.server.app import Settings
    from relax_hetero.llm.server.serve import serve

    model = ToyModel(slots=16, context=2000, pages=800)
    with Engine(model, ToyCodec()) as engine:
        announce = partial(print, file=sys.stderr, flush=True)
        serve(engine, Settings(TOY), ChatTemplate(TEMPLATE), port=0, on_ready=announce)


def report(observed: Seen, seconds: float) -> bool:
    """Print the observations; False if an answer was lost."""
    print(f"answers: {dict(observed.answers)}; lost: {len(observed.lost)}")
    for line in observed.lost[:5]:
        print(f"  {line}")
    if observed.first:
        for name, times in (("first token", observed.first), ("per token", observed.token)):
            middle, late = (1e3 * float(np.percentile(times, part)) for part in (50, 99))
            print(f"time {name}: p50 {middle:.1f} ms, p99 {late:.1f} ms")
        shares = list(observed.shares.values())
        print(f"tokens per client: {min(shares)} to {max(shares)}; all: {sum(shares) / seconds:.1f} tokens/s")
    begin = next((size for time, size in observed.memory if time >= seconds / 4), observed.memory[0][1])
    first, last = observed.memory[0][1], observed.memory[-1][1]
    print(f"memory: {first:.0f} MB at first, {begin:.0f} MB after a quarter, {last:.0f} MB at last")
    return not observed.lost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=TOY, help="a GGUF file, or toy")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--vanish", type=float, default=0.1, help="share of requests whose client leaves")
    parser.add_argument("--bad", type=float, default=0.05, help="share of invalid requests")
    parser.add_argument("--formed", type=float, default=0.3, help="share of requests with a schema or tools")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--smoke", action="store_true", help="eight clients for two seconds")
    parser.add_argument("--serve-toy", action="store_true", help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args()
    if options.serve_toy:
        serve_toy()
        return
    load = Load(options.clients, 60 * options.minutes, options.vanish, options.bad, options.formed, options.tokens)
    if options.smoke:
        load = Load(8, 2, 0.2, 0.1, 0.5, 16)
    server, url = start(options.model, rest)
    try:
        complete = report(asyncio.run(soak(url, server.pid, load)), load.seconds)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)
    sys.exit(0 if complete else 1)


if __name__ == "__main__":
    main()
