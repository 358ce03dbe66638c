"""Seconds until the first token of a model in a new process: with an empty compile cache, again, with another context.

Seconds of the CPUs are those of this process until then, which other work on the computer changes less.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from smoke import smoke  # noqa: E402


@click.command(help=__doc__)
@click.argument("model")
@click.option("--vdevice", multiple=True)
@click.option(
    "--contexts",
    default="4096,2048",
    show_default=True,
    help="Tokens that the first two processes and the third allow.",
)
@click.option("--only", type=int, hidden=True, help="Load the model in this process, with this context.")
@smoke(contexts="128,64")
def main(model: str, vdevice: tuple[str, ...], contexts: str, only: int | None) -> None:
    """Run each case in a process of its own."""
    if only is not None:
        _measure(model, list(vdevice) or None, only)
        return
    first, other = contexts.split(",")
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "RELAX_HETERO_CACHE": folder}
        for name, context in (("empty cache", first), ("again", first), ("another context", other)):
            print(f"{name:16}", end="", flush=True)
            subprocess.run([sys.executable, *sys.argv, "--only", context], env=environment, check=True)


def _measure(path: str, vdevices: list[str] | None, context: int) -> None:
    """Load a model, and generate one token; then wait, so that the next process finds all functions."""
    start = time.perf_counter()
    import relax_hetero as rh

    model, tokenizer = rh.llm.load(path, vdevices, context=context)
    loaded = time.perf_counter()
    with rh.llm.Engine(model, tokenizer) as engine:
        engine.generate("The sky is", rh.llm.SamplingParams(max_tokens=1, temperature=0))
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time()
    print(
        f"loaded {loaded - start:6.2f} s, first token {seconds:6.2f} s, CPUs {cpu_seconds:6.2f} s", end="", flush=True
    )
    model.wait()
    print(f", all functions {time.perf_counter() - start:6.2f} s")


if __name__ == "__main__":
    main()
