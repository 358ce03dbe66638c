"""Products with block-quantized weights: random weights of every format, their problems, and expected results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tvm

from encoding.random_blocks import random_rows
from relax_hetero.encoding.block_formats import BlockFormat, block_format, dequantize_rows, integer_format
from relax_hetero.encoding.block_panels import BlockSource, Panels
from relax_hetero.encoding.packed_layout import PackedLayout
from relax_hetero.encoding.problem import Operand, QuantizedMatmulProblem
from relax_hetero.target.dot_instructions import block_dot_instruction
from tir.kernel_runs import NAMES, cpu_named

FLOAT_NAMES = [name for name in NAMES if block_dot_instruction(cpu_named(name), 15, 8, False) is None]
"""Machines that multiply weights as float32; the others round activations, see test_block_dots."""


@dataclass(frozen=True)
class Weights:
    """Random weights of a product, as models have them."""

    source: BlockSource

    @property
    def form(self) -> BlockFormat:
        return self.source.form

    @property
    def columns(self) -> int:
        return self.source.rows

    @property
    def numbers(self) -> np.ndarray:
        """(n, k) in float64."""
        arrays, form, depth = self.source.arrays, self.form, self.source.depth
        if form.superblock_bytes:
            return dequantize_rows(arrays[0], form, depth).astype("float64")
        data, bits = arrays[0], form.bits
        fields = np.stack([data >> at & ((1 << bits) - 1) for at in range(0, 8, bits)], -1)
        points = arrays[2] if len(arrays) > 2 else np.full(arrays[1].shape, 1 << (bits - 1))
        by_weight = [
            np.repeat(values.astype("float64"), form.block, axis=1)[:, :depth] for values in (points, arrays[1])
        ]
        return (fields.reshape(len(data), -1)[:, :depth] - by_weight[0]) * by_weight[1]

    def packed(self, panel: int) -> list[np.ndarray]:
        return Panels(panel).pack(self.source)


def integers(rng: np.random.Generator, columns: int, depth: int, block: int, zeros: str = "", bits: int = 4) -> Weights:
    """Weights of some bits, with scales of float32 and perhaps zero points."""
    blocks = -(-depth // block)
    data = rng.integers(0, 256, (columns, -(-depth * bits // 8)), dtype=np.uint8)
    arrays = [data, rng.standard_normal((columns, blocks), "float32")]
    if zeros == "uint8":
        arrays.append(rng.integers(0, 1 << max(bits, 4), (columns, blocks), dtype=np.uint8))
    elif zeros == "float32":
        arrays.append(rng.uniform(0, (1 << bits) - 1, (columns, blocks)).astype("float32"))
    return Weights(BlockSource(tuple(arrays), integer_format(bits, block, bool(zeros)), depth))


def of_file(name: str, columns: int, depth: int, seed: int = 5) -> Weights:
    """Weights of a file's format."""
    return Weights(BlockSource((random_rows(name, columns, depth, seed),), block_format(name), depth))


def plain(shape: tuple[int | str, ...], dtype: str, index_map: tuple[str, ...]) -> Operand:
    return Operand(shape, dtype, index_map, PackedLayout.identity(len(shape)))


def problem_of(weights: Weights, rows: int | str, panel: int, activation_bits: int = 16) -> QuantizedMatmulProblem:
    packed = tuple(plain(array.shape, str(array.dtype), Panels.index_map) for array in weights.packed(panel))
    depth, form = weights.source.depth, weights.form
    lhs, result = plain((rows, depth), "float32", ("m", "k")), plain((rows, weights.columns), "float32", ("m", "n"))
    return QuantizedMatmulProblem(
        lhs, packed, result, form.block, None, form.bits, form, activation_bits=activation_bits
    )


def as_bytes(x: np.ndarray, chain: int, name: str) -> np.ndarray:
    """Numbers rounded to bytes with a scale for each chain, as float64, as the machine `name` rounds them."""
    padded = np.zeros((len(x), -(-x.shape[1] // chain), chain), "float32")
    padded.reshape(len(x), -1)[:, : x.shape[1]] = x
    largest = np.abs(padded).max(-1, keepdims=True)
    factor = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    # LLVM fuses the product with what rounds it, where the CPU has fused multiply-adds: it is exact there.
    product = padded.astype("float32" if cpu_named(name).isa.name == "sse" else "float64") * factor
    return (np.rint(product) * largest.astype("float64") / 127).reshape(len(x), -1)[:, : x.shape[1]]


def call(function: Callable[..., None], x: np.ndarray, packed: list[np.ndarray], columns: int, dtype: str = "float32"):
    """The result, whose memory was poisoned."""
    result = tvm.runtime.tensor(np.full((*x.shape[:-1], columns), np.nan, dtype))
    function(*map(tvm.runtime.tensor, [x, *packed]), result)
    return result.numpy()


def assert_close(got: np.ndarray, x: np.ndarray, numbers: np.ndarray, rounding: float = 1e-6) -> None:
    """Compare within the rounding of float32 sums of these terms, or within `rounding`."""
    want = x.astype("float64") @ numbers.T
    size = np.abs(x).astype("float64") @ np.abs(numbers).T
    np.testing.assert_array_less(np.abs(got - want), rounding * size + 1e-30)
