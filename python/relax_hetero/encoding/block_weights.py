"""Weights in blocks that share a scale: as models have them, and as kernels read them.

A model's are rows of bytes, a row for each column of the product: of a file's format (`block_formats`), or of weights
of 2, 4 or 8 bits, the first of a byte in its lowest bits, with ``(n, blocks)`` scales and zero points. Kernels of CPUs
read panels of columns (`block_panels`). Kernels of GPUs read fragments: what each lane of a warp gives to an
instruction of tensor cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..target.cpu_target import CpuTarget
from ..target.tiles import tile_columns
from .block_formats import BlockFormat, weights_of_rows
from .block_panels import BlockSource, Panels, RecordPlan

GROUP = 8
"""Blocks are multiples of so many weights."""


def middle_of(bits: int) -> int:
    """The zero point where none is given."""
    return 1 << (bits - 1)


def bytes_of_row(depth: int, bits: int) -> int:
    """Number of bytes of `depth` weights."""
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
        Bits of a weight: 4 or 8.

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
    both = parts[:, 0] | parts[:, 1] << np.uint8(4)  # a byte is a weight of each column
    lanes = np.ascontiguousarray(both.transpose(0, 2, 1, 4, 3, 5, 7, 6))
    return lanes.reshape(tiles, chunks, 32, 16).view("<i4").astype(np.int32, copy=False)


def pack_fragment_blocks(values: np.ndarray) -> np.ndarray:
    """Scales or zero points, ``(n, blocks)``, as ``(ceil(n / 16), blocks, 8, 2)``: a lane's two columns together."""
    rows, blocks = values.shape
    tiles = -(-rows // FRAGMENT_COLUMNS)
    padded = np.zeros((tiles * FRAGMENT_COLUMNS, blocks), values.dtype)
    padded[:rows] = values
    return np.ascontiguousarray(padded.reshape(tiles, 2, 8, blocks).transpose(0, 3, 2, 1))


_MAX_ZERO_POINT = 127
"""The highest zero point that kernels take from weights of 4 bits before they multiply."""


@dataclass(frozen=True)
class Fragments:
    """Weights in fragments of GPUs' tensor cores; scales and minimums are float16 where that is exact.

    Of a file's formats, those of 4 bits stay 4 bits; codes of 5, 6 and 8 bits are bytes, of which 128 is the code 0. K
    formats have scales, and minimums, of float32: the products of integers and float16 that they are.
    """

    lhs_types = ("float32", "float16", "bfloat16")
    index_map = ("tile", "chunk", "lane", "word")

    weight_type = "int32"

    def fits(self, form: BlockFormat, depth: int) -> bool:
        """Return whether kernels multiply weights of a format."""
        bits = (4, 5, 6, 8) if form.record_bytes else (4, 8)
        return form.bits in bits and form.block % 16 == 0

    def pack(self, source: BlockSource) -> list[np.ndarray]:
        """Weights, scales and perhaps zero points of a model as kernels read them; `fits` must hold."""
        if source.form.record_bytes:
            return _packed_records(source)
        data, scales, *zeros = source.arrays
        is_high = source.form.bits == 4 and any(one.max(initial=0) > _MAX_ZERO_POINT for one in zeros)
        points = [one.astype("float32") if is_high else one for one in zeros]
        weights = pack_fragments(data, source.depth, source.form.block, source.form.bits)
        return [weights, *map(pack_fragment_blocks, [_halved(scales), *points])]

    def shapes(self, n: int, form: BlockFormat, depth: int) -> list[list[int]]:
        """Shapes of the weights, and of scales and zero points."""
        tiles = -(-n // FRAGMENT_COLUMNS)
        blocks = [tiles, -(-depth // form.block), 8, 2]
        return [[tiles, -(-depth // chunk_of(stored_bits(form))), 32, 4], *[blocks] * (1 + bool(form.minimum))]


def stored_bits(form: BlockFormat) -> int:
    """Bits of a weight of a format in fragments."""
    return 4 if form.bits == 4 else 8


def _packed_records(source: BlockSource) -> list[np.ndarray]:
    """Rows of a file's bytes as fragments, scales, and minimums where the format has them."""
    form, depth = source.form, source.depth
    weights = weights_of_rows(source.arrays[0], form, depth)
    assert weights.scales is not None, "weights that are plain numbers have no fragments"
    if form.bits == 4:
        fields = (weights.codes - np.int8(form.low)).view(np.uint8)
        data = fields[:, 0::2] | fields[:, 1::2] << np.uint8(4)
    else:
        data = weights.codes.view(np.uint8) ^ np.uint8(128)
    found = [pack_fragments(data, depth, form.block, stored_bits(form)), pack_fragment_blocks(_halved(weights.scales))]
    return found if weights.minimums is None else [*found, pack_fragment_blocks(_halved(weights.minimums))]


def _halved(values: np.ndarray) -> np.ndarray:
    """Numbers of float32 as float16, where all of them are such."""
    with np.errstate(over="ignore"):
        half = values.astype("float16")
    return half if np.array_equal(half.astype("float32"), values) else values


BlockLayout = Panels | Fragments
"""How the weights of a product are stored."""


def layout_of(weight: Sequence[Any], form: BlockFormat, depth: int) -> BlockLayout:
    """The layout of packed weights of a shape."""
    if len(weight) == len(Fragments.index_map):
        return Fragments()
    # A panel of no whole columns is none that `Panels.pack` makes: its shape differs from what is expected.
    return Panels(max(1, int(weight[-1]) // RecordPlan(form, depth, 1).panel_bytes))


def panel_columns(cpu: CpuTarget) -> int:
    """Columns of a panel on a CPU."""
    return tile_columns(cpu, "float32")
