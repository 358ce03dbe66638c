"""Block-quantized weights in the form that kernels read: fragments on GPUs; `block_panels` has the panels of CPUs.

A model's weights are rows of bytes, a row for each column of the product: in a file's format (`block_formats`), or with
2, 4 or 8 bits each, the first of a byte in its lowest bits, and ``(n, blocks)`` scales and zero points. A fragment is
what each lane of a warp gives to an instruction of tensor cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..target.cpu_target import CpuTarget
from ..target.tiles import tile_columns
from .block_formats import BlockFormat, read_block_weights, split_numpy_rows
from .block_panels import BlockSource, PanelPlan, Panels, Zeros, in_chunks, padded_to

GROUP = 8
"""Weights that the size of a block is a multiple of."""


def middle_of(bits: int) -> int:
    """The zero point of weights without one."""
    return 1 << (bits - 1)


def bytes_of_row(depth: int, bits: int) -> int:
    """Number of bytes of `depth` weights."""
    return -(-depth * bits // 8)


def chunk_of(bits: int) -> int:
    """Extent of k in a fragment block of 16 columns by 32 lanes: a lane's 16 bytes are 32 weights of 4 bits."""
    return 256 // bits


FRAGMENT_COLUMNS = 16
"""Columns in a fragment block."""


def pack_fragments(data: np.ndarray, depth: int, block: int, bits: int = 4) -> np.ndarray:
    """Pack rows of bytes into fragments of tensor cores: 16 columns by a chunk of k, 16 bytes for each of 32 lanes.

    Lane l holds columns ``l // 4`` and ``l // 4 + 8``, and along k the quarter ``l % 4`` of each run (a chunk, or less
    where fewer weights share a scale). A 32-bit word has four 4-bit weights of each column: bits 0 and 16 are the first
    two of the first column, bits 4 and 20 of the second; bits 8 and 24, and 12 and 28, the next two. It has two 8-bit
    weights of each: the first and the second of the first column, then those of the other.

    Parameters
    ----------
    data : array of uint8, (n, bytes)
        Rows of weights; further bytes of a row are ignored.
    depth, block : int
        Weights of a row, and number of weights that share a scale, a multiple of 16.
    bits : int
        Bits of a weight: 4 or 8.

    Returns
    -------
    array of int32, (ceil(n / 16), ceil(depth / chunk), 32, 4)
        Fragments, padded with zeros; ``chunk = chunk_of(bits)``.
    """
    weights = np.stack([data & 15, data >> 4], axis=-1).reshape(len(data), 2 * data.shape[1]) if bits == 4 else data
    return _fragments(weights[:, :depth], block, bits)


def _fragments(weights: np.ndarray, block: int, bits: int) -> np.ndarray:
    """Fragments of `pack_fragments` from one byte for each weight, (n, depth)."""
    (rows, depth), chunk = weights.shape, chunk_of(bits)
    tiles, chunks = -(-rows // FRAGMENT_COLUMNS), -(-depth // chunk)
    padded = padded_to(weights, tiles * FRAGMENT_COLUMNS, chunks * chunk, "uint8")
    halves = np.ascontiguousarray(padded).reshape(tiles, 2, 8, chunks * chunk)
    if bits == 8:
        pairs = halves.view("<u2")
        words = pairs[:, 0] | pairs[:, 1].astype("<u4") << np.uint32(16)
    else:  # a byte holds a weight of each column, and the inner two bytes of a word change places
        words = (halves[:, 0] | halves[:, 1] << np.uint8(4)).view("<u4")
        inner = words << np.uint32(8) & np.uint32(0xFF0000) | words >> np.uint32(8) & np.uint32(0xFF00)
        words = words & np.uint32(0xFF0000FF) | inner
    run = np.gcd(block, chunk)
    # Axes: tile, column, chunk, run, quarter, word.
    groups = words.reshape(tiles, 8, chunks, chunk // run, 4, int(run) * bits // 64)
    return groups.transpose(0, 2, 1, 4, 3, 5).reshape(tiles, chunks, 32, 4).astype(np.int32, copy=False)


def pack_fragment_blocks(values: np.ndarray) -> np.ndarray:
    """Scales or zero points, ``(n, blocks)``, as ``(ceil(n / 16), blocks, 8, 2)``: a lane's two columns together."""
    rows, blocks = values.shape
    tiles = -(-rows // FRAGMENT_COLUMNS)
    padded = np.zeros((tiles * FRAGMENT_COLUMNS, blocks), values.dtype)
    padded[:rows] = values
    return np.ascontiguousarray(padded.reshape(tiles, 2, 8, blocks).transpose(0, 3, 2, 1))


_MAX_ZERO_POINT = 127
"""The highest zero point that kernels subtract from 4-bit weights before they multiply."""


@dataclass(frozen=True)
class Fragments:
    """Weights in fragments of GPUs' tensor cores; scales and minimums are float16 where that is exact.

    Formats of 4 bits stay 4 bits; codes of 5, 6 and 8 bits, and codes of tables except those of fp4, are stored as
    bytes, code + 128. Scales and minimums of K formats are float32: products of their integers and float16.
    """

    lhs_types = ("float32", "float16", "bfloat16")
    index_map = ("tile", "chunk", "lane", "word")

    weight_type = "int32"

    def fits(self, form: BlockFormat, depth: int) -> bool:
        """Return whether kernels multiply weights of a format."""
        bits = (4, 5, 6, 8) if form.superblock_bytes else (4, 8)
        return form.bits in bits and form.block % 16 == 0

    def fits_matrices(self, n: int) -> bool:
        """Return whether kernels multiply each row by one of several matrices of n columns."""
        return n % FRAGMENT_COLUMNS == 0

    def pack(self, source: BlockSource, matrices: int = 1, zeros: Zeros = np.zeros) -> list[np.ndarray]:
        """Weights, scales and perhaps zero points of a model as kernels read them; `fits` must hold.

        Several matrices are packed as one: no two share a fragment if `fits_matrices` holds. `zeros` allocates the
        results.
        """
        shape = self.shapes(source.rows, source.form, source.depth)[0]
        fragments = zeros(shape, "int32")

        def pack_tiles(begin: int, end: int) -> list[np.ndarray]:
            part = slice(begin * FRAGMENT_COLUMNS, end * FRAGMENT_COLUMNS)
            rows = replace(source, arrays=tuple(array[part] for array in source.arrays))
            fragments[begin:end], *factors = self._pack_rows(rows)
            return factors

        factors = in_chunks(shape[0], FRAGMENT_COLUMNS * source.depth, pack_tiles)
        return [fragments, *(_joined(parts, zeros) for parts in zip(*factors, strict=True))]

    def _pack_rows(self, source: BlockSource) -> list[np.ndarray]:
        if source.form.superblock_bytes:
            return _pack_superblocks(source)
        data, scales, *zeros = source.arrays
        is_high = source.form.bits == 4 and any(points.max(initial=0) > _MAX_ZERO_POINT for points in zeros)
        zeros = [points.astype("float32") if is_high else points for points in zeros]
        weights = pack_fragments(data, source.depth, source.form.block, source.form.bits)
        return [weights, *map(pack_fragment_blocks, [_as_float16_if_exact(scales), *zeros])]

    def shapes(self, n: int, form: BlockFormat, depth: int, matrices: int = 1) -> list[list[int]]:
        """Shapes of the weights, and of scales and zero points, of matrices with n columns each."""
        tiles = matrices * -(-n // FRAGMENT_COLUMNS)
        blocks = [tiles, -(-depth // form.block), 8, 2]
        return [[tiles, -(-depth // chunk_of(stored_bits(form))), 32, 4], *[blocks] * (1 + bool(form.minimum))]


def _joined(parts: Sequence[np.ndarray], zeros: Zeros) -> np.ndarray:
    """All parts, in a type that has the numbers of each: only some may be exact as float16."""
    shape = (sum(map(len, parts)), *parts[0].shape[1:])
    return np.concatenate(parts, out=zeros(shape, str(np.result_type(*parts))))


def stored_bits(form: BlockFormat) -> int:
    """Bits of a weight of a format in fragments."""
    return 4 if form.bits == 4 and (form.is_float4 or not form.codes) else 8


def _pack_superblocks(source: BlockSource) -> list[np.ndarray]:
    """Pack rows of a file's bytes as fragments, scales, and minimums where the format has them."""
    form, depth = source.form, source.depth
    weights = read_block_weights(source.arrays[0], form, depth)
    assert weights.scales is not None, "plain numbers cannot be stored in fragments"
    bits = stored_bits(form)
    if form.is_float4:
        quants = split_numpy_rows(source.arrays[0], form, depth).quants
    else:
        quants = weights.codes.view(np.uint8) - np.uint8((form.min_code if bits == 4 else -128) & 255)
    factors = [array for array in (weights.scales, weights.minimums) if array is not None]
    fragments = _fragments(quants, form.block, bits)
    return [fragments, *(pack_fragment_blocks(_as_float16_if_exact(array)) for array in factors)]


def _as_float16_if_exact(values: np.ndarray) -> np.ndarray:
    """Numbers of float32 as float16, if float16 represents all of them."""
    with np.errstate(over="ignore"):
        half = values.astype("float16")
    return half if np.array_equal(half.astype("float32"), values) else values


BlockLayout = Panels | Fragments
"""Storage of the weights of a product."""


def layout_of(weight: Sequence[Any], form: BlockFormat, depth: int) -> BlockLayout:
    """The layout of packed weights, by the shape of the first operand."""
    if len(weight) == len(Fragments.index_map):
        return Fragments()
    # Bytes that are not whole columns get any layout: their shape then differs from the expected one.
    return Panels(max(1, int(weight[-1]) // PanelPlan(form, depth, 1).panel_bytes))


def panel_columns(cpu: CpuTarget) -> int:
    """Columns of a panel on a CPU."""
    return tile_columns(cpu, "float32")
