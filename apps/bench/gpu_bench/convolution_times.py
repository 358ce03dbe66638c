"""Convolutions with bias and ReLU on an NVIDIA GPU against cuDNN's convolutions alone, in device time.

python apps/bench/gpu_bench/convolution_times.py                            # ResNet-50's, f16, batch 16
python apps/bench/gpu_bench/convolution_times.py --types f32 --batches 1,16
python apps/bench/gpu_bench/convolution_times.py --layers 14x32x64x3x1 --gpu llvm      # a CPU stands for the GPU

A program is one module of several convolutions with operands of their own, channels last, compiled by rh.compile and
called through the virtual machine: one CUDA graph. PyTorch runs as many as a CUDA graph.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bars import Check, geometric_mean
from smoke import smoke

from gpu_bench.contest import Row, contest, end, gpu_options, ratio, show, write
from gpu_bench.convolutions import Convolutions, cudnn, wanted
from gpu_bench.programs import parsed_gpu
from gpu_bench.workloads import KINDS

LAYERS = (
    "56x64x64x1x1", "56x64x64x3x1", "56x64x256x1x1", "56x256x64x1x1", "56x256x128x1x1", "56x128x128x3x2",
    "56x256x512x1x2", "28x128x512x1x1", "28x512x128x1x1", "28x128x128x3x1", "28x512x256x1x1", "28x256x256x3x2",
    "28x512x1024x1x2", "14x256x1024x1x1", "14x1024x256x1x1", "14x256x256x3x1", "14x1024x512x1x1", "14x512x512x3x2",
    "14x1024x2048x1x2", "7x512x2048x1x1", "7x2048x512x1x1", "7x512x512x3x1",
)  # fmt: skip
"""Map extent × channels × result channels × filter × stride: the layers of ResNet-50 except the first."""
TYPES = ("f16", "bf16", "f32", "tf32")
MEAN_BAR, MIN_BAR = 1.15, 0.90


def checks(rows: Sequence[Row]) -> list[Check]:
    """The bars of the measured rows with f16 and several images."""
    ratios = {row["title"]: value for row in rows if row["kind"] == "f16" and (value := ratio(row))}
    ratios = {title: value for title, value in ratios.items() if not title.startswith("1x")}
    if not ratios:
        return []
    bars = [Check("f16: geometric mean over cuDNN alone", geometric_mean(list(ratios.values())), MEAN_BAR)]
    return bars + [Check(f"f16, {title} over cuDNN alone", value, MIN_BAR) for title, value in ratios.items()]


def _listed(_context: click.Context, _parameter: click.Parameter, text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",") if item.strip())


@click.command()
@click.option("--types", default="f16", show_default=True, callback=_listed)
@click.option("--batches", default="16", show_default=True, callback=_listed)
@click.option("--layers", default="", callback=_listed, help="extent x channels x made x window x stride; a list.")
@gpu_options
@smoke(layers=("6x8x16x3x1",), batches=("1",), rounds=1, workers=1)
def main(
    types: tuple[str, ...],
    batches: tuple[str, ...],
    layers: tuple[str, ...],
    gpu: str,
    rounds: int,
    workers: int,
    json_file: Path | None,
) -> None:
    """Time convolutions on a GPU, here and in PyTorch."""
    unknown = [kind for kind in types if kind not in TYPES]
    if unknown:
        raise click.BadParameter(f"{', '.join(unknown)}: types are {', '.join(TYPES)}")
    sizes = [[int(size) for size in layer.split("x")] for layer in layers or LAYERS]
    wrong = [layer for layer, fields in zip(layers, sizes, strict=False) if len(fields) != 5]
    if wrong:
        raise click.BadParameter(f"{', '.join(wrong)}: a layer has five sizes, as {LAYERS[0]}")
    chosen = [Convolutions(*layer, int(batch), kind) for kind in types for batch in batches for layer in sizes]
    operations = {(work.title, work.kind): work.operations for work in chosen}

    def say(row: Row) -> None:
        click.echo(json.dumps(row), err=True)

    def rate(row: Row, us: float) -> str:
        return f"{operations[row['title'], row['kind']] / us / 1e6:.0f} T"

    rows = contest(chosen, parsed_gpu(gpu), cudnn, wanted, rounds, workers, say)
    write(json_file, rows)
    show("device time of one convolution; T is 10¹² operations a second", rows, rate, checks(rows))
    end(rows, lambda row: KINDS[row["kind"]].allowed)


if __name__ == "__main__":
    main()
