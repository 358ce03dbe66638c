"""Few rows by large weights on an NVIDIA GPU: eight products with eight weights as one CUDA graph, ours and cuBLAS.

python apps/bench/gpu_few_rows.py                                   # 1, 8, 16 and 64 rows in f16; 4-bit weights
python apps/bench/gpu_few_rows.py --rows 1,4 --weights 4096x4096 --no-four-bits

The eight weights do not fit the caches, so each is read from memory. Weights of 4 bits are compared with our own
products of the same shape in f16.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
from bars import Check, geometric_mean
from gpu_bench import torch_peers
from gpu_bench.contest import NOTHING, OURS, Row, contest, end, gpu_options, ratio, show, write
from gpu_bench.programs import parsed_gpu
from gpu_bench.workloads import Products
from peers.shape import Shape
from smoke import smoke

COUNT = 8
MEAN_BAR, MIN_BAR, FOUR_BITS_BAR = 1.10, 0.95, 2.5


def wanted(work: Products) -> list[np.ndarray]:
    """Right results by numpy."""
    right = work.four_bit_numbers() if work.kind == "q4" else work.weights()
    return [x.astype("float32") @ w.astype("float32") for x, w in zip(work.inputs(), right, strict=True)]


def peers(clock: object, work: Products) -> object:
    """cuBLAS, which lacks 4-bit weights."""
    return NOTHING if work.kind == "q4" else torch_peers.products(clock, work)


def checks(rows: Sequence[Row]) -> list[Check]:
    """The bars over cuBLAS, and of 4-bit weights over our f16."""
    ratios = {row["title"]: value for row in rows if (value := ratio(row))}
    bars = [Check(f"{title} over cuBLAS", value, MIN_BAR) for title, value in ratios.items()]
    if ratios:
        bars.insert(0, Check("geometric mean over cuBLAS", geometric_mean(list(ratios.values())), MEAN_BAR))
    own = {(row["title"], row["kind"]): row["us"][OURS] for row in rows if OURS in row["us"]}
    return bars + [
        Check(f"4-bit weights, {title} over our f16", own[title, "f16"] / us, FOUR_BITS_BAR)
        for (title, kind), us in own.items()
        if kind == "q4" and title.startswith("1x") and (title, "f16") in own
    ]


def _listed(_context: click.Context, _parameter: click.Parameter, text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",") if item.strip())


@click.command()
@click.option("--rows", "numbers", default="1,8,16,64", show_default=True, callback=_listed)
@click.option("--weights", default="4096x4096,4096x14336", show_default=True, callback=_listed, help="KxN; a list.")
@click.option("--four-bits/--no-four-bits", default=True, help="Also time one row by weights of 4 bits.")
@gpu_options
@smoke(numbers=("1",), weights=("256x128",), rounds=1, workers=1)
def main(
    numbers: tuple[str, ...],
    weights: tuple[str, ...],
    four_bits: bool,
    gpu: str,
    rounds: int,
    workers: int,
    json_file: Path | None,
) -> None:
    """Time few rows by large weights on a GPU, here and in PyTorch."""
    shapes = [Shape.parse(f"{number}x{weight}") for weight in weights for number in numbers]
    chosen = [Products(shape, "f16", count=COUNT) for shape in shapes]
    if four_bits:
        chosen += [Products(Shape.parse(f"1x{weight}"), "q4", count=COUNT) for weight in weights]

    def say(row: Row) -> None:
        click.echo(json.dumps(row), err=True)

    rows = contest(chosen, parsed_gpu(gpu), peers, wanted, rounds, workers, say)
    each = {"f16": 2, "q4": (16 + 2) / 32}  # bytes of a number; a block of 32 has a scale
    sizes = {(work.title, work.kind): work.shape.k * work.shape.n * each[work.kind] for work in chosen}

    def rate(row: Row, us: float) -> str:
        return f"{sizes[row['title'], row['kind']] / us / 1e6:.2f} TB/s"

    write(json_file, rows)
    show("device time of one product; TB/s of its weight", rows, rate, checks(rows))
    end(rows, lambda row: 3e-3)


if __name__ == "__main__":
    main()
