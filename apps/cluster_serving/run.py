"""Serve sentence embeddings over HTTP, by replicas of all-MiniLM-L6-v2 in a Ray cluster.

python apps/cluster_serving/run.py
python apps/cluster_serving/run.py --replicas 4 --port 8000 --metrics-port 8090
python apps/cluster_serving/run.py --address auto
"""

from __future__ import annotations

# isort: off
import app

# isort: on
import argparse
import contextlib
import json
import signal
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray import serve
from rich.console import Console

app.find_modules()

from embeddings import Embedder  # noqa: E402 (its folders are found now)
from minilm import default_cache  # noqa: E402

import relax_hetero as rh  # noqa: E402

SENTENCES = ("How can I get a new password?", "To reset your login, open the settings.", "The cat sleeps.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until interrupted; returns the exit code."""
    options = _parse(arguments)
    screen = Console(highlight=False)
    engine = Embedder(cache=options.cache, most_items=options.max_sentences, batch_items=options.batch)
    start = time.perf_counter()
    with screen.status("Compiling the model, or finding it in the compile cache"):
        executable = engine.compile()
    state = executable.metadata.cache.state
    screen.print(f"Executable: {state} in the compile cache, {time.perf_counter() - start:.1f} s")
    _connect(options)
    try:
        with screen.status("Starting replicas"):
            app.start([engine], _settings(options), options.host, options.port)
        url = f"http://{options.host}:{options.port}"
        screen.print(f"{options.replicas} replicas answer at {url}/embed, {url}/healthz", soft_wrap=True)
        _ask(url, screen)
        if not options.smoke:
            _wait_until_interrupted()
    finally:
        serve.shutdown()
        ray.shutdown()
    return 0


def _wait_until_interrupted() -> None:
    """Return after Ctrl+C; SIGTERM ends the process through Ray's own handler, which runs ``finally`` blocks."""
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            signal.pause()


def _connect(options: argparse.Namespace) -> None:
    quiet = {"log_to_driver": False, "logging_level": "warning"}
    if options.address:
        ray.init(options.address, **quiet)
        return
    # A CPU for each replica, whatever this machine has: more replicas than cores share them.
    ray.init(
        "local", num_cpus=options.replicas, include_dashboard=False, _metrics_export_port=options.metrics_port, **quiet
    )


def _settings(options: argparse.Namespace) -> app.Settings:
    return app.Settings(
        replicas=options.replicas,
        gateways=options.gateways,
        wait_s=options.wait_ms / 1e3,
        queued=options.queued,
        limits=app.Limits(seconds=options.seconds),
    )


def _ask(url: str, screen: Console) -> None:
    """Call the service once, as any client would, and show the similarities."""
    first, *rows = np.array(post(f"{url}/embed", {"sentences": SENTENCES})["embeddings"], "float32")
    for sentence, row in zip(SENTENCES[1:], rows, strict=True):
        screen.print(f"{float(first @ row):.3f}  {sentence}")


def post(url: str, body: dict[str, Any]) -> Any:
    """The JSON answer to a POST."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    summary, _, usage = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--address", help="address of a running Ray cluster (default: start one here)")
    parser.add_argument("--host", default="127.0.0.1", help="address of HTTP (default 127.0.0.1; see README)")
    parser.add_argument("--port", type=int, default=8000, help="port of the HTTP server (default 8000)")
    parser.add_argument("--metrics-port", type=int, default=8090, help="port of its metrics (default 8090)")
    parser.add_argument("--replicas", type=int, default=2, help="replicas of the model, one thread each (default 2)")
    parser.add_argument("--gateways", type=int, default=2, help="processes that read and write HTTP (default 2)")
    parser.add_argument("--batch", type=int, default=16, help="sentences of a full batch (default 16)")
    parser.add_argument("--wait-ms", type=float, default=2, help="waiting time of a batch (default 2)")
    parser.add_argument("--max-sentences", type=int, default=64, help="sentences of a request (default 64)")
    parser.add_argument("--queued", type=int, default=256, help="waiting requests of a gateway (default 256)")
    parser.add_argument("--seconds", type=float, default=30, help="time limit of a request (default 30)")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="folder of the model's files")
    parser.add_argument("--smoke", action="store_true", help="one replica answers one request: does the command work?")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.replicas = options.gateways = 1
    return options


if __name__ == "__main__":
    try:
        sys.exit(main())
    except rh.HeteroError as error:
        sys.exit(f"error: {error}")
