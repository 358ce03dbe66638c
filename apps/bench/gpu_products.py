"""Matrix products on an NVIDIA GPU against cuBLAS (torch.mm, torch._scaled_mm, torch._int_mm), in device time.

python apps/bench/gpu_products.py                                # f16 and bf16 in all shapes, other types in two
python apps/bench/gpu_products.py --types f16 --shapes 4096,128x4096x4096
python apps/bench/gpu_products.py --types f16 --gelu             # with bias and GELU, against torch.compile
python apps/bench/gpu_products.py --types f32 --shapes 64 --gpu llvm      # a CPU stands for the GPU

A program is one module of several products with operands of their own, compiled by rh.compile and called through the
virtual machine: one CUDA graph. PyTorch runs as many as a CUDA graph, with right operands by rows and by columns; the
faster of the two counts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
from bars import Check, geometric_mean
from gpu_bench import torch_peers
from gpu_bench.contest import Row, contest, end, gpu_options, ratio, show, write
from gpu_bench.programs import parsed_gpu
from gpu_bench.workloads import KINDS, Products
from peers.shape import Shape
from smoke import smoke

SHAPES = ("8192", "4096", "2048", "4096x4096x1024", "512x4096x4096", "128x4096x4096", "127x255x511", "12*128x64x128")
"""M × K × N."""
LARGE = ("4096", "8192")
GELU_SHAPES = SHAPES[1:6]
ALL_SHAPES = ("f16", "bf16")
MEAN_BAR, MIN_BAR, GELU_BAR, LARGE_BAR = 1.02, 0.90, 1.10, 0.95
_BUDGET = 3e11
"""Approximate operations of one launch of a program."""


def count_of(shape: Shape) -> int:
    """The number of products of a program: just enough to be timed."""
    return int(min(16, max(2, _BUDGET / shape.operations)))


def workloads(types: Sequence[str], shapes: Sequence[str], gelu: bool) -> list[Products]:
    """The products to time; types other than f16 and bf16 in large shapes only, unless `shapes` are given."""
    products = []
    for kind in types:
        default = GELU_SHAPES if gelu else SHAPES if kind in ALL_SHAPES else LARGE
        for text in shapes or default:
            shape = Shape.parse(text)
            if not (shape.batch and (gelu or kind in ("e4m3", "s8"))):
                products.append(Products(shape, kind, gelu, count_of(shape)))
    return products


def wanted(work: Products) -> list[np.ndarray]:
    """Right results by numpy, used without PyTorch."""
    results = []
    arrays, count = work.inputs(), work.count
    right = arrays[count:] if work.shape.batch else work.weights()
    for index, (x, w) in enumerate(zip(arrays[:count], right, strict=True)):
        y = np.matmul(x.astype("float32"), w.astype("float32"))
        if work.gelu:
            y = y + work.biases()[index].astype("float32")
            y = y * (1 + np.vectorize(math.erf)(y / 2**0.5)) / 2
        results.append(y)
    return results


def checks(rows: Sequence[Row], gelu: bool) -> list[Check]:
    """The bars of the measured rows."""
    bars = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        ratios = {row["title"]: value for row in rows if row["kind"] == kind and (value := ratio(row))}
        if not ratios:
            continue
        if gelu:
            bars += [Check(f"{kind}, {title} over torch.compile", value, GELU_BAR) for title, value in ratios.items()]
        elif kind in ALL_SHAPES:
            bars.append(Check(f"{kind}: geometric mean over cuBLAS", geometric_mean(list(ratios.values())), MEAN_BAR))
            bars += [Check(f"{kind}, {title} over cuBLAS", value, MIN_BAR) for title, value in ratios.items()]
        else:
            bars += [Check(f"{kind}, {title} over cuBLAS", value, LARGE_BAR) for title, value in ratios.items()]
    return bars


def _listed(_context: click.Context, _parameter: click.Parameter, text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",") if item.strip())


@click.command()
@click.option("--types", default="f16,bf16,e4m3,s8,tf32", show_default=True, callback=_listed)
@click.option("--shapes", default="", callback=_listed, help="MxKxN, N for a cube, B*MxKxN for a batch; a list.")
@click.option("--gelu", is_flag=True, help="With a bias and GELU after each product.")
@click.option("--autotune", is_flag=True, help="Let torch.compile search the fastest kernels: minutes.")
@gpu_options
@smoke(types=("f16",), shapes=("128",), rounds=1, workers=1)
def main(
    types: tuple[str, ...],
    shapes: tuple[str, ...],
    gelu: bool,
    autotune: bool,
    gpu: str,
    rounds: int,
    workers: int,
    json_file: Path | None,
) -> None:
    """Time matrix products on a GPU, here and in PyTorch."""
    unknown = [kind for kind in types if kind not in KINDS]
    if unknown:
        raise click.BadParameter(f"{', '.join(unknown)}: types are {', '.join(KINDS)}")
    chosen = workloads(types, shapes, gelu)

    def peers(clock: object, work: Products) -> object:
        return torch_peers.products(clock, work, autotune)

    def say(row: Row) -> None:
        click.echo(json.dumps(row), err=True)

    rows = contest(chosen, parsed_gpu(gpu), peers, wanted, rounds, workers, say)
    operations = {(work.title, work.kind): work.shape.operations for work in chosen}

    def rate(row: Row, us: float) -> str:
        return f"{operations[row['title'], row['kind']] / us / 1e6:.0f} T"

    write(json_file, rows)
    show("device time of one product; T is 10¹² operations a second", rows, rate, checks(rows, gelu))
    end(rows, lambda row: 5e-2 if gelu else KINDS[row["kind"]].allowed)


if __name__ == "__main__":
    main()
