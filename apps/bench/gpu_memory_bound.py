"""Memory-bound kernels on an NVIDIA GPU, against the device's copy bandwidth and torch.compile.

python apps/bench/gpu_memory_bound.py                                # float32 and float16
python apps/bench/gpu_memory_bound.py --names softmax,transpose --types float16

A program computes eight pieces of work with inputs of their own, as one CUDA graph.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
from bars import Check
from gpu_bench import torch_peers
from gpu_bench.contest import OURS, Row, contest, end, gpu_options, ratio, show, write
from gpu_bench.device_time import Clock, microseconds, torch_on_gpu
from gpu_bench.programs import device_of, parsed_gpu
from gpu_bench.workloads import Rows
from smoke import smoke

SIZES = {
    "chain": (4096, 4096),
    "softmax": (4096, 4096),
    "layer norm": (8192, 1024),
    "transpose": (4096, 4096),
    "reduction": (4096, 4096),
}
COPY_BAR, PEER_BAR = 0.85, 1.0


def wanted(work: Rows) -> list[np.ndarray]:
    """Right results by numpy."""
    arrays = [array.astype("float32") for array in work.inputs()]
    results = []
    for x, other in zip(arrays[: work.count], arrays[-work.count :], strict=True):
        if work.name == "softmax":
            e = np.exp(x - x.max(-1, keepdims=True))
            results.append(e / e.sum(-1, keepdims=True))
        elif work.name == "layer norm":
            results.append((x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * 1.5 + 0.25)
        elif work.name == "chain":
            y = x * 1.5 + other
            results.append(np.where(x > 0, y / (1 + np.exp(-y)), np.tanh(other)))
        else:
            results.append(x.T if work.name == "transpose" else x.sum(-1))
    return results


def checks(rows: Sequence[Row], sizes: dict[tuple[str, str], int], copied: float | None) -> list[Check]:
    """The bars over the copy bandwidth, in bytes per microsecond, and over torch.compile."""
    bars = []
    for row in rows:
        name = f"{row['title']} {row['kind']}"
        if copied and OURS in row["us"]:
            share = sizes[row["title"], row["kind"]] / row["us"][OURS] / copied
            bars.append(Check(f"{name} over a copy's bandwidth", share, COPY_BAR))
        if value := ratio(row):
            bars.append(Check(f"{name} over torch.compile", value, PEER_BAR))
    return bars


def _listed(_context: click.Context, _parameter: click.Parameter, text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",") if item.strip())


@click.command()
@click.option("--names", default=",".join(SIZES), show_default=True, callback=_listed)
@click.option("--types", default="float32,float16", show_default=True, callback=_listed)
@click.option("--divide", default=1, hidden=True)
@gpu_options
@smoke(names=("softmax",), types=("float32",), divide=32, rounds=1, workers=1)
def main(
    names: tuple[str, ...],
    types: tuple[str, ...],
    divide: int,
    gpu: str,
    rounds: int,
    workers: int,
    json_file: Path | None,
) -> None:
    """Time memory-bound kernels on a GPU, here and in PyTorch."""
    unknown = [name for name in names if name not in SIZES]
    if unknown:
        raise click.BadParameter(f"{', '.join(unknown)}: names are {', '.join(SIZES)}")
    chosen = [Rows(name, SIZES[name][0] // divide, SIZES[name][1], dtype) for dtype in types for name in names]

    def say(row: Row) -> None:
        click.echo(json.dumps(row), err=True)

    rows = contest(
        chosen, parsed_gpu(gpu), torch_peers.rows, wanted, rounds, workers, say, together=True, rehearsed=True
    )
    sizes = {(work.title, work.dtype): work.bytes for work in chosen}
    copied = None
    if torch_on_gpu():
        clock = Clock.of(device_of(parsed_gpu(gpu)))
        launch, size = torch_peers.copy_bandwidth(clock)
        copied = size / microseconds(clock, {"copy": launch}, rounds)["copy"]
        copy = {"title": "copy of 1 GB", "kind": "", "us": {"torch copy_": size / copied}}
        rows.append({**copy, "error": 0.0, "graphs": 1})
        sizes["copy of 1 GB", ""] = size

    def rate(row: Row, us: float) -> str:
        return f"{sizes[row['title'], row['kind']] / us / 1e6:.2f} TB/s"

    write(json_file, rows)
    show("device time; TB/s read and written", rows, rate, checks(rows, sizes, copied))
    end(rows, lambda row: 1e-4 if row["kind"] == "float32" else 5e-3)


if __name__ == "__main__":
    main()
