"""Seconds until the first token of a model in a new process: with an empty compile cache, again, with another context.

Usage: ``python first_token.py MODEL [--vdevice cuda]``. Seconds of the CPUs are those of this process until then, which
other work on the computer changes less.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time

RUNS = (("empty cache", 4096), ("again", 4096), ("another context", 2048))


def main() -> None:
    """Run each case in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--vdevice", action="append", default=[])
    parser.add_argument("--context", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.context is not None:
        measure(options.model, options.vdevice or None, options.context)
        return
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "RELAX_HETERO_CACHE": folder}
        for name, context in RUNS:
            print(f"{name:16}", end="", flush=True)
            arguments = [*sys.argv, "--context", str(context)]
            subprocess.run([sys.executable, *arguments], env=environment, check=True)


def measure(path: str, vdevices: list[str] | None, context: int) -> None:
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
