"""Attention on an NVIDIA GPU against PyTorch's kernels (cuDNN, FlashAttention 2, efficient attention), in device time.

python apps/bench/gpu_attention.py                                  # f16: long sequences, short ones, few queries
python apps/bench/gpu_attention.py --shapes 12x128x64,32x8/8192x128 --types bfloat16
python apps/bench/gpu_attention.py --shapes 2x16x8 --gpu llvm       # a CPU stands for the GPU

A program is one module of several attentions with operands of their own, compiled by rh.compile and called through the
virtual machine: one CUDA graph. PyTorch runs as many as a CUDA graph; the fastest of its kernels counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
from bars import Check, geometric_mean
from gpu_bench import torch_peers
from gpu_bench.contest import Row, contest, end, gpu_options, ratio, show, write
from gpu_bench.programs import parsed_gpu
from gpu_bench.workloads import Attentions
from smoke import smoke

SHAPES = (
    *(f"{text}{causal}" for text in ("16x16384x128", "64x4096x128", "64x4096x64") for causal in ("", "c")),
    "16x8/8192x128",
    "32x8/8192x128",
    "12x128x64",
    "6x197x64",
    "12x128x64c",
)
"""Heads x queries (/ keys) x width, "c": causal. The bars are for long sequences and for few queries."""
MEAN_BAR, MIN_BAR, LONG = 1.00, 0.93, 4096
_BUDGET = 3e11
"""Approximate operations of one launch of a program."""


def workload(text: str, dtype: str) -> Attentions:
    """The workload of a text of `SHAPES`."""
    match = re.fullmatch(r"(\d+)x(\d+)(?:/(\d+))?x(\d+)(c?)", text)
    if match is None:
        raise click.BadParameter(f"{text!r}: expected HEADSxQUERIESxWIDTH, HEADSxQUERIES/KEYSxWIDTH, c for causal")
    heads, queries, keys, width = (int(number) for number in (*match.groups(match[2])[:4],))
    one = Attentions(heads, queries, keys, width, bool(match[5]), dtype, 1)
    count = int(min(16, max(1, _BUDGET / one.operations)))
    return Attentions(heads, queries, keys, width, bool(match[5]), dtype, count)


def wanted(work: Attentions) -> list[np.ndarray]:
    """Right results by numpy, used without PyTorch."""
    results = []
    arrays = [array.astype("float32") for array in work.inputs()]
    for i in range(0, len(arrays), 3):
        q, k, v = arrays[i : i + 3]
        scores = q @ k.swapaxes(-1, -2) * work.width**-0.5
        if work.causal:
            scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        results.append(powers / powers.sum(-1, keepdims=True) @ v)
    return results


def checks(rows: Sequence[Row], lengths: dict[str, int]) -> list[Check]:
    """The bars of the measured long sequences."""
    bars = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        of_kind = [row for row in rows if row["kind"] == kind and lengths[row["title"]] >= LONG]
        ratios = {row["title"]: value for row in of_kind if (value := ratio(row))}
        if ratios:
            bars.append(Check(f"{kind}: geometric mean over PyTorch", geometric_mean(list(ratios.values())), MEAN_BAR))
            bars += [Check(f"{kind}, {title} over PyTorch", value, MIN_BAR) for title, value in ratios.items()]
    return bars


def _listed(_context: click.Context, _parameter: click.Parameter, text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",") if item.strip())


@click.command()
@click.option("--shapes", default=",".join(SHAPES), callback=_listed, help="HEADSxQUERIES/KEYSxWIDTH, c for causal.")
@click.option("--types", default="float16", show_default=True, callback=_listed)
@gpu_options
@smoke(shapes=("2x16x8c",), types=("float32",), rounds=1, workers=1)
def main(
    shapes: tuple[str, ...], types: tuple[str, ...], gpu: str, rounds: int, workers: int, json_file: Path | None
) -> None:
    """Time attention on a GPU, here and in PyTorch."""
    unknown = [dtype for dtype in types if dtype not in ("float16", "bfloat16", "float32")]
    if unknown:
        raise click.BadParameter(f"{', '.join(unknown)}: types are float16, bfloat16, float32")
    chosen = [workload(text, dtype) for dtype in types for text in shapes]

    def say(row: Row) -> None:
        click.echo(json.dumps(row), err=True)

    rows = contest(chosen, parsed_gpu(gpu), torch_peers.attentions, wanted, rounds, workers, say, together=True)
    operations = {work.title: work.operations for work in chosen}

    def rate(row: Row, us: float) -> str:
        return f"{operations[row['title']] / us / 1e6:.0f} T"

    write(json_file, rows)
    lengths = {work.title: work.keys for work in chosen}
    show("device time of one attention; T is 10¹² operations a second", rows, rate, checks(rows, lengths))
    end(rows, lambda row: {"float32": 1e-5, "float16": 5e-3}.get(row["kind"], 3e-2))


if __name__ == "__main__":
    main()
