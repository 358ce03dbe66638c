"""Products with weights of every block format on the CPU: GB/s of weights for few rows, Gop/s for many.

``TVM_NUM_THREADS`` sets the number of threads. Every result is first compared with a product in float64.
For few rows, weights are copied so often that they do not fit in a cache, like a model's.
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
import sys
import time
from pathlib import Path

import click
import numpy as np
import tvm
from tvm import relax

import relax_hetero as rh
from relax_hetero.encoding.block_formats import FILE_FORMATS, dequantize_rows

sys.path.insert(0, str(Path(__file__).parent.parent))
from smoke import smoke  # noqa: E402

_MEMORY = 1 << 27
"""Bytes of weights that calls of few rows read in turn."""

_ROUNDING = {8: 1.5e-2, 16: 3e-5}
"""Allowed error relative to the sum of the magnitudes of a result's terms, by bits of activations."""

_ROWS_OF_MEMORY = 16
"""Number of rows up to which the time is that of reading weights."""


def random_rows(name: str, rows: int, depth: int) -> np.ndarray:
    """Random rows in a file's format, with small scales."""
    form, rng = FILE_FORMATS[name], np.random.default_rng(3)
    raw = rng.integers(0, 256, (rows, depth // form.superblock_size, form.superblock_bytes), dtype=np.uint8)
    if form.scale == "e8m0":
        raw[:, :, 0] = rng.integers(118, 124, raw.shape[:2])
        return raw.reshape(rows, -1)
    places = [208] if name == "q6_k" else [0, 2] if form.minimum else [0]
    for offset in places:
        small = rng.uniform(0.01, 0.02, raw.shape[:2])
        words = (small.astype("<f4").view("<u4") >> 16) if name == "bf16" else small.astype("<f2").view("<u2")
        raw[:, :, offset : offset + 2] = words.astype("<u2")[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


def product(name: str, copies: list[np.ndarray], rows: int, depth: int, activation_bits: int) -> rh.vm.VirtualMachine:
    """A machine whose functions ``f0``, ``f1``, ... multiply by the copies of a weight."""
    builder = relax.BlockBuilder()
    for number, raw in enumerate(copies):
        x = relax.Var("x", relax.TensorType([rows, depth], "float32"))
        with builder.function(f"f{number}", [x]):
            with builder.dataflow():
                sizes = {"depth": depth, "format": name, "activation_bits": activation_bits}
                weight = builder.emit(rh.op.dequantize_blocks(relax.const(raw), **sizes))
                result = builder.emit_output(relax.op.matmul(x, relax.op.permute_dims(weight)))
            builder.emit_func_output(result)
    return rh.vm.VirtualMachine(rh.compile(builder.get()))


def measure(name: str, rows: int, activation_bits: int, columns: int, depth: int, rounds: int) -> tuple[float, float]:
    """Median seconds of a product, and the bytes of its weights in the file; exits if a result is wrong."""
    raw = random_rows(name, columns, depth)
    count = max(1, _MEMORY // raw.nbytes) if rows <= _ROWS_OF_MEMORY and rounds > 1 else 1
    machine = product(name, [raw.copy() for _ in range(count)], rows, depth, activation_bits)
    data = np.random.default_rng(0).standard_normal((rows, depth), "float32")
    x = tvm.runtime.tensor(data)
    numbers = dequantize_rows(raw, FILE_FORMATS[name], depth).astype("float64")
    error = np.abs(machine["f0"](x).numpy() - data @ numbers.T)
    if not (error <= _ROUNDING[activation_bits] * (np.abs(data) @ np.abs(numbers).T)).all():
        raise SystemExit(f"{name}: the error is {error.max()}")
    calls = [machine[f"f{number}"] for number in range(count)]
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for call in calls:
            call(x)
        times.append((time.perf_counter() - start) / count)
    return statistics.median(times), float(raw.nbytes)


@click.command(help=__doc__)
@click.option("--format", "formats", multiple=True, type=click.Choice(list(FILE_FORMATS)), help="Default: all formats.")
@click.option("--rows", multiple=True, type=int, default=(1, 8, 512), show_default=True)
@click.option("--activations", multiple=True, type=click.Choice([8, 16]), default=(8, 16), show_default=True)
@click.option("--columns", default=4096, show_default=True)
@click.option("--depth", default=2048, show_default=True)
@click.option("--rounds", default=7, show_default=True)
@smoke(formats=("q5_0", "q6_k"), rows=(1, 20), columns=64, depth=256, rounds=1)
def main(
    formats: tuple[str, ...], rows: tuple[int, ...], activations: tuple[int, ...], columns: int, depth: int, rounds: int
) -> None:
    """Measure each format for each number of rows, in a shuffled order."""
    print(f"threads: {os.environ.get('TVM_NUM_THREADS', 'all')}; products of (rows, {depth}) by ({depth}, {columns})")
    cases = list(itertools.product(formats or FILE_FORMATS, rows, activations))
    random.Random(1).shuffle(cases)
    figures = {case: measure(*case, columns, depth, rounds) for case in cases}
    print(f"{'format':8}{'rows':>6}{'bits':>6}{'us':>12}{'GB/s':>8}{'Gop/s':>8}")
    for (name, count, bits), (seconds, size) in sorted(figures.items()):
        work = 2 * count * columns * depth / seconds / 1e9
        print(f"{name:8}{count:6}{bits:6}{seconds * 1e6:12.1f}{size / seconds / 1e9:8.1f}{work:8.1f}")


if __name__ == "__main__":
    main()
