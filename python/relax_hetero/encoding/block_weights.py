"""Weights of 4 or 8 bits, in blocks that share a scale: as models have them, and as kernels read them.

A model's are rows of bytes, a row for each column of the product; of 4 bits two weights a byte, the first in the low
half: ``(n, k / 2)`` or ``(n, k)`` with ``(n, blocks)`` scales and zero points. Kernels of CPUs read panels of columns:
a lane of 32 bits is eight weights (of 4 bits) of one column that follow each other along k, and a vector of lanes is as
many columns. Kernels of GPUs read fragments: what each lane of a warp gives to an instruction of tensor cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..target.cpu_target import CpuTarget
from ..target.tiles import tile_columns

GROUP = 8
"""Weights in a lane of 32 bits."""


def panel_columns(cpu: CpuTarget) -> int:
    """Columns of a panel on a CPU."""
    return tile_columns(cpu, "float32")


def pack_weights(data: np.ndarray, depth: int, panel: int) -> np.ndarray:
    """Rows of bytes as panels of lanes.

    Parameters
    ----------
    data : array of uint8, (n, bytes)
        At least ``depth / 2`` bytes a row.
    depth : int
        Weights of a row.
    panel : int
        Columns of a panel.

    Returns
    -------
    array of int32, (panels, groups, panel)
        Zeros where columns and weights are not there.
    """
    rows, groups = data.shape[0], -(-depth // GROUP)
    padded = np.zeros((-(-rows // panel) * panel, groups * GROUP // 2), np.uint8)
    kept = min(padded.shape[1], data.shape[1])
    padded[:rows, :kept] = data[:, :kept]
    lanes = padded.view("<i4").astype(np.int32, copy=False).reshape(-1, panel, groups)
    return np.ascontiguousarray(lanes.transpose(0, 2, 1))


def pack_blocks(values: np.ndarray, panel: int) -> np.ndarray:
    """Scales or zero points, ``(n, blocks)``, as ``(panels, blocks, panel)``; zeros where columns are not there."""
    rows, blocks = values.shape
    padded = np.zeros((-(-rows // panel) * panel, blocks), values.dtype)
    padded[:rows] = values
    return np.ascontiguousarray(padded.reshape(-1, panel, blocks).transpose(0, 2, 1))


def middle_of(bits: int) -> int:
    """The zero point where none is given."""
    return 1 << (bits - 1)


def bytes_of_row(depth: int, bits: int) -> int:
    """Of so many weights."""
    return -(-depth * bits // 8)


def chunk_of(bits: int) -> int:
    """Values of k in a fragment block: 16 bytes of a lane are 32 weights of 4 bits, of 16 columns by 32 lanes."""
    return 256 // bits


FRAGMENT_COLUMNS = 16
"""Columns in a fragment block."""


def pack_fragments(data: np.ndarray, depth: int, block: int, bits: int = 4) -> np.ndarray:
    """Rows of bytes as tensor cores of GPUs take them: 16 columns by a chunk of k, 16 bytes for each of 32 lanes.

    Lane l has the columns ``l // 4`` and 8 more. Of k it has, of each run of a chunk (or fewer, where fewer share a
    scale), the quarter ``l % 4``. A word of 32 bits is four of these, of both columns: bits 0 and 16 are the first two
    of the first column, bits 4 and 20 of the second, bits 8 and 24, and 12 and 28, the next two. Of 8 bits it is two:
    the first and the second of the first column, then those of the other.

    Parameters
    ----------
    data : array of uint8, (n, bytes)
        At least as many bytes a row as its weights need.
    depth, block : int
        Weights of a row, and how many share a scale: a multiple of 16.
    bits : int
        Of a weight: 4 or 8.

    Returns
    -------
    array of int32, (ceil(n / 16), ceil(depth / chunk), 32, 4)
        Zeros where columns and weights are not there; ``chunk = chunk_of(bits)``.
    """
    chunk = chunk_of(bits)
    rows, chunks = data.shape[0], -(-depth // chunk)
    tiles = -(-rows // FRAGMENT_COLUMNS)
    padded = np.zeros((tiles * FRAGMENT_COLUMNS, chunks * chunk * bits // 8), np.uint8)
    kept = bytes_of_row(depth, bits)
    padded[:rows, :kept] = data[:, :kept]
    if bits == 4 and depth % 2:
        padded[:rows, depth // 2] &= 15
    weights = np.stack([padded & 15, padded >> 4], axis=-1) if bits == 4 else padded
    run = np.gcd(block, chunk)
    # tile, half, column, chunk, run, quarter, word, pair, one of a pair
    parts = weights.reshape(tiles, 2, 8, chunks, chunk // run, 4, run // 16, 2, 2)
    if bits == 8:
        lanes = np.ascontiguousarray(parts.transpose(0, 3, 2, 5, 4, 6, 7, 1, 8))
        return lanes.reshape(tiles, chunks, 32, 16).view("<i4").astype(np.int32, copy=False)
    order = parts.transpose(0, 3, 2, 5, 4, 6, 8, 7, 1).reshape(tiles, chunks, 32, 4, 8).astype(np.uint32)
    words = (order << np.arange(0, 32, 4, dtype=np.uint32)).sum(axis=-1, dtype=np.uint32)
    return np.ascontiguousarray(words.view(np.int32))


def pack_fragment_blocks(values: np.ndarray) -> np.ndarray:
    """Scales or zero points, ``(n, blocks)``, as ``(ceil(n / 16), blocks, 8, 2)``: a lane's two columns together."""
    rows, blocks = values.shape
    tiles = -(-rows // FRAGMENT_COLUMNS)
    padded = np.zeros((tiles * FRAGMENT_COLUMNS, blocks), values.dtype)
    padded[:rows] = values
    return np.ascontiguousarray(padded.reshape(tiles, 2, 8, blocks).transpose(0, 3, 2, 1))


_MOST_POINT = 127
"""The highest zero point that kernels take from weights of 4 bits before they multiply."""


@dataclass(frozen=True)
class Panels:
    """Weights in panels of columns.

    Attributes
    ----------
    columns : int
        Of a panel.
    """

    columns: int

    lhs_types = ("float32",)
    """Element types of the left operand."""
    index_map = ("panel", "row", "column")

    def fits(self, block: int, bits: int) -> bool:
        """Whether kernels multiply weights of so many bits, of which so many share a scale."""
        return bits == 4 and block % GROUP == 0

    def pack(
        self, data: np.ndarray, scales: np.ndarray, *zeros: np.ndarray, depth: int, block: int, bits: int = 4
    ) -> list[np.ndarray]:
        """Weights, scales and perhaps zero points of a model as kernels read them; `fits` must hold."""
        return [pack_weights(data, depth, self.columns), *(pack_blocks(one, self.columns) for one in (scales, *zeros))]

    def shapes(self, n: int, depth: int, block: int, bits: int = 4) -> tuple[list[int], list[int]]:
        """Of the weights, and of scales and zero points."""
        panels = -(-n // self.columns)
        return [panels, -(-depth // GROUP), self.columns], [panels, -(-depth // block), self.columns]


@dataclass(frozen=True)
class Fragments:
    """Weights in fragments of GPUs' tensor cores; scales are float16 where that is exact."""

    lhs_types = ("float32", "float16", "bfloat16")
    index_map = ("tile", "chunk", "lane", "word")

    def fits(self, block: int, bits: int) -> bool:
        """Whether kernels multiply weights of so many bits, of which so many share a scale."""
        return bits in (4, 8) and block % 16 == 0

    def pack(
        self, data: np.ndarray, scales: np.ndarray, *zeros: np.ndarray, depth: int, block: int, bits: int = 4
    ) -> list[np.ndarray]:
        """Weights, scales and perhaps zero points of a model as kernels read them; `fits` must hold."""
        with np.errstate(over="ignore"):
            half = scales.astype("float16")
        exact = np.array_equal(half.astype("float32"), scales)
        is_high = bits == 4 and any(one.max(initial=0) > _MOST_POINT for one in zeros)
        points = [one.astype("float32") if is_high else one for one in zeros]
        kept = [half if exact else scales, *points]
        return [pack_fragments(data, depth, block, bits), *map(pack_fragment_blocks, kept)]

    def shapes(self, n: int, depth: int, block: int, bits: int = 4) -> tuple[list[int], list[int]]:
        """Of the weights, and of scales and zero points."""
        tiles = -(-n // FRAGMENT_COLUMNS)
        return [tiles, -(-depth // chunk_of(bits)), 32, 4], [tiles, -(-depth // block), 8, 2]


BlockLayout = Panels | Fragments
"""How the weights of a product are stored."""


def layout_of(weight: Sequence[Any]) -> BlockLayout:
    """The layout of packed weights of a shape."""
    return Fragments() if len(weight) == len(Fragments.index_map) else Panels(weight[-1])
