"""``torch.compile(model, backend="relax_hetero")`` against PyTorch's own compiler, and PyTorch without one.

python apps/bench/torch_compile_models.py                           # an hour, most of it inductor's
python apps/bench/torch_compile_models.py lstm_tagger gpt2

The networks are those of `torch_bench.networks` with random weights. Times are CPU time of calls on one thread, in
turns; a network of which PyTorch runs a part is marked.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import click
import numpy as np
from peers.packages import is_installed
from rich.console import Console
from rich.table import Table
from smoke import smoke
from torch_bench.networks import NETWORKS, build
from turns import Timing, take_turn

DEFAULTS = (
    "resnet50", "mobilenet_v3_large", "efficientnet_b0", "vit_b_16", "mobilevitv2_050", "mixer_s32_224", "distilbert",
    "gpt2", "llama_small", "t5_small", "whisper_tiny", "segformer_b0", "lstm_tagger", "gru_forecaster",
    "transformer_encoder",
)  # fmt: skip
OWN, INDUCTOR, EAGER = "relax_hetero", "inductor", "eager"
TURN_SECONDS = 0.2
ALLOWED = 1e-3
"""Allowed error of an output, relative to its largest number."""


class _Reasons(logging.Handler):
    """The reasons for which graphs run in PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def measure(name: str, rounds: int, backends: list[str]) -> dict[str, Any]:
    """Errors and times of one network in this process."""
    import torch

    import relax_hetero as rh

    torch.set_num_threads(1)
    target = {**dict(rh.native("llvm").export()), "num-cores": 1}
    reasons = _Reasons()
    logging.getLogger("relax_hetero.torch_compile").addHandler(reasons)
    module, arguments = build(name)
    row: dict[str, Any] = {"network": name}
    with torch.no_grad():
        expected = _leaves(module(*arguments))
        calls = {}
        for backend in backends:
            options = {"options": {"vdevices": [target]}} if backend == OWN else {}
            torch.compiler.reset()
            call = module if backend == EAGER else torch.compile(module, backend=backend, **options)
            begin = time.perf_counter()
            actual = _leaves(call(*arguments))
            row[f"{backend}, s to the first result"] = time.perf_counter() - begin
            row[f"{backend}, error"] = float(np.max([_error(*pair) for pair in zip(actual, expected, strict=True)]))
            calls[backend] = call
        timings = {backend: Timing() for backend in calls}
        for _ in range(rounds):
            for backend, call in calls.items():
                take_turn(lambda call=call: call(*arguments), timings[backend], TURN_SECONDS, time.process_time)
    row |= {f"{backend}, ms": 1e3 * timing.median for backend, timing in timings.items()}
    return {**row, "in PyTorch": reasons.texts}


def wrong_networks(rows: list[dict[str, Any]]) -> list[str]:
    """The networks whose errors are too large, or not numbers."""
    return [row["network"] for row in rows if not row[f"{OWN}, error"] <= ALLOWED]


def _leaves(result: Any) -> list[Any]:
    return [part for value in result for part in _leaves(value)] if isinstance(result, (tuple, list)) else [result]


def _error(actual: Any, expected: Any) -> float:
    return float((actual - expected).abs().max() / max(expected.abs().max(), 1e-9))


@click.command()
@click.argument("names", nargs=-1)
@click.option("--rounds", default=7, show_default=True, type=click.IntRange(1), help="Turns of each.")
@click.option("--backends", default=f"{OWN},{INDUCTOR},{EAGER}", show_default=True)
@click.option("--in-process", is_flag=True, hidden=True)
@smoke(names=("gru_forecaster",), rounds=1, backends=f"{OWN},{EAGER}")
def main(names: tuple[str, ...], rounds: int, backends: str, in_process: bool) -> None:
    """Compile the networks NAMES, by default fifteen, compare results with PyTorch's, and measure calls."""
    if in_process:
        print(json.dumps(measure(names[0], rounds, backends.split(","))))
        return
    rows = []
    for name in names or DEFAULTS:
        if name not in NETWORKS:
            raise click.BadParameter(f"{name!r} is none of {', '.join(NETWORKS)}")
        if not is_installed(NETWORKS[name].package):
            click.echo(f"{name}: needs {NETWORKS[name].package}", err=True)
            continue
        command = [sys.executable, __file__, name, "--rounds", str(rounds), "--backends", backends, "--in-process"]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "TVM_NUM_THREADS": "1"}, check=False
        )
        if done.returncode:
            raise SystemExit(f"{name}: failed, see above")
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        click.echo(json.dumps(rows[-1]), err=True)
    _print(rows, [backend for backend in backends.split(",") if backend != OWN])
    if wrong := wrong_networks(rows):
        raise SystemExit(f"errors over {ALLOWED}: {', '.join(wrong)}")


def _print(rows: list[dict[str, Any]], peers: list[str]) -> None:
    table = Table("network", "error", f"{OWN}, ms", *(f"{peer} / {OWN}" for peer in peers), "in PyTorch")
    for row in rows:
        ratios = (row[f"{peer}, ms"] / row[f"{OWN}, ms"] for peer in peers)
        numbers = (f"{row[f'{OWN}, error']:.1g}", f"{row[f'{OWN}, ms']:.3g}", *(f"{ratio:.2f}" for ratio in ratios))
        table.add_row(row["network"], *numbers, f"{len(row['in PyTorch'])} graphs" if row["in PyTorch"] else "")
    Console().print(table)
    for peer in peers if rows else []:
        mean = statistics.geometric_mean(row[f"{peer}, ms"] / row[f"{OWN}, ms"] for row in rows)
        print(f"geometric mean over {peer}, {len(rows)} networks: {mean:.2f}")


if __name__ == "__main__":
    main()
