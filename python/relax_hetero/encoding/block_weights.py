"""Block-quantized weights in the form that kernels read: fragments on GPUs; `block_panels` has the panels of CPUs.

A model's weights are rows of bytes, a row for each column of the product: in a file's format (`block_formats`), or with
2, 4 or 8 bits each, the first of a byte in its lowest bits, and ``(n, blocks)`` scales and zero points. A fragment is
what each lane of a warp gives to an instruction of tensor cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from ..target.cpu_target import CpuTarget
from ..target.element_types import bytes_of
from ..target.tiles import tile_columns
from .block_formats import BlockFormat, split_numpy_rows
from .block_panels import BlockSource, PanelPlan, Panels, Zeros, in_chunks, padded_to

GROUP = 8  # weights that the size of a block is a multiple of


def middle_of(bits: int) -> int:
    """The zero point of weights without one."""
    return 1 << (bits - 1)


def bytes_of_row(depth: int, bits: int) -> int:
    """Number of bytes of `depth` weights."""
    return -(-depth * bits // 8)


def chunk_of(bits: int) -> int:
    """Extent of k in a fragment block of 16 columns by 32 lanes: 16 bytes of a lane, and its plane of high bits."""
    return 64 if bits < 8 else 256 // bits


def lane_words(bits: int) -> int:
    """Words of a lane in a fragment block: four, and one or two of the high bits of 5 or 6; one to three of fewer."""
    return chunk_of(bits) * bits // 64


NARROW_PLANES = {1: (1,), 2: (2,), 3: (2, 1)}
"""Bits of the planes of weights of less than 4 bits, lowest first; a lane has as many words of a plane."""


MAX_FUSED_PAIRS, MAX_SUMMED_EXPERTS = 255, 16
"""Maximum pairs of a token and an expert, and experts of a token, of kernels of two products and of weighted sums."""

FRAGMENT_COLUMNS = 16  # columns in a fragment block


def pack_fragments(
    data: np.ndarray,  # uint8, (n, bytes): rows of weights; further bytes of a row are ignored
    # depth, block: weights of a row, and number of weights that share a scale, a multiple of 16.
    depth: int,
    block: int,
    bits: int = 4,  # bits of a weight: 4 or 8
) -> np.ndarray:
    """Pack rows of bytes into fragments of tensor cores: 16 columns by a chunk of k, 16 bytes for each of 32 lanes.

    Lane l holds columns ``l // 4`` and ``l // 4 + 8``, and along k the quarter ``l % 4`` of each run (a chunk, or less
    where fewer weights share a scale). A 32-bit word has four 4-bit weights of each column: bits 0 and 16 are the first
    two of the first column, bits 4 and 20 of the second; bits 8 and 24, and 12 and 28, the next two. It has two 8-bit
    weights of each: the first and the second of the first column, then those of the other. Returns the fragments,
    padded with zeros; ``chunk = chunk_of(bits)``.
    """
    weights = np.stack([data & 15, data >> 4], axis=-1).reshape(len(data), 2 * data.shape[1]) if bits == 4 else data
    return _fragments(weights[:, :depth], block, bits)


def _fragments_of_quants(quants: np.ndarray, block: int, bits: int) -> np.ndarray:
    """Fragments from one byte for each weight, (n, depth), of 1 to 6 or 8 bits.

    The last axis of a chunk of 5 or 6 bits is one in name only: the low 4 bits of all lanes come first, as for 4 bits,
    then their high bits, a word or two of each lane: bits 0 and 16 (0-1 and 16-17) are the first two weights of the
    first column, the next those of the second, then the next two, as the instructions read them. Those of less than 4
    bits are planes of 1 or 2 bits: words of 4 bits that share a word, two or four of them.
    """
    if bits in (4, 8):
        return _fragments(quants, block, bits)
    if bits > 4:
        planes = [_fragments(quants & np.uint8(15), block, 4), _high_bits(quants >> np.uint8(4), block, bits - 4)]
    else:
        planes, first = [], 0
        for width in NARROW_PLANES[bits]:
            words = _fragments(quants >> np.uint8(first) & np.uint8((1 << width) - 1), block, 4)
            sharing = words.reshape(*words.shape[:3], width, -1)
            shifts = np.arange(0, 4, width, dtype=np.int32)
            planes.append(np.bitwise_or.reduce(sharing << shifts, 4))
            first += width
    joined = np.concatenate([plane.reshape(*plane.shape[:2], -1) for plane in planes], 2)
    return joined.reshape(*planes[0].shape[:3], lane_words(bits))


def _high_bits(values: np.ndarray, block: int, bits: int) -> np.ndarray:
    """Words of one or two high bits, (tiles, chunks, 32, bits); see `_fragments_of_quants`."""
    (rows, depth), chunk = values.shape, chunk_of(4)
    tiles, chunks, run = -(-rows // FRAGMENT_COLUMNS), -(-depth // chunk), int(np.gcd(block, chunk))
    padded = padded_to(values, tiles * FRAGMENT_COLUMNS, chunks * chunk, "uint8")
    # Axes: tile, half of the columns, column, chunk, run, quarter, step, pair, weight of the pair.
    split = padded.reshape(tiles, 2, 8, chunks, chunk // run, 4, run // 16, 2, 2)
    if bits == 1:
        ordered = split.transpose(0, 3, 2, 5, 8, 4, 6, 7, 1).reshape(tiles, chunks, 32, 32)
        return np.packbits(ordered, axis=-1, bitorder="little").view("<i4")
    ordered = split.transpose(0, 3, 2, 5, 4, 6, 8, 7, 1).reshape(tiles, chunks, 32, 2, 2, 2, 4)
    fours = np.ascontiguousarray(ordered.swapaxes(4, 5)).view("<u4")[..., 0]
    pairs = fours | fours >> np.uint32(6)
    return (pairs | pairs >> np.uint32(12)).astype(np.uint8).reshape(tiles, chunks, 32, 8).view("<i4")


def _plain_fragments(numbers: np.ndarray) -> np.ndarray:
    """Fragments of 16-bit floats, (n, depth) of uint16: words are the registers of an instruction."""
    (rows, depth), chunk = numbers.shape, chunk_of(16)
    tiles, chunks = -(-rows // FRAGMENT_COLUMNS), -(-depth // chunk)
    padded = padded_to(numbers, tiles * FRAGMENT_COLUMNS, chunks * chunk, "uint16")
    # Axes: tile, half of the columns, column, chunk, quarter, pair.
    words = np.ascontiguousarray(padded).view("<i4").reshape(tiles, 2, 8, chunks, 4, 2)
    return words.transpose(0, 3, 2, 4, 5, 1).reshape(tiles, chunks, 32, 4)


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


_MAX_ZERO_POINT = 127  # the highest zero point that kernels subtract from 4-bit weights before they multiply


_PART_TYPES = {"float16": "float16", "float32": "float32", "e8m0": "uint8", "e4m3": "uint8", "int8": "int8"}
"""Element types of scales in fragments, by their kinds in a file."""


@dataclass(frozen=True)
class Fragments:
    """Weights in fragments of GPUs' tensor cores, in as many bits as a file has.

    Scales and minimums are those of the file: float16, or bytes of e8m0 or e4m3. Integers stay so, (blocks, 8, 2 or 4),
    a lane's scales and then minimums, which may share bytes, beside the factors of superblocks, float16, in the same
    form; minimums' are negative. Scales of separate arrays are float16 where that is exact. Plain numbers have none.
    """

    lhs_types = ("float32", "float16", "bfloat16")
    index_map = ("tile", "chunk", "lane", "word")

    weight_type = "int32"

    def fits(self, form: BlockFormat, depth: int) -> bool:
        """Return whether kernels multiply weights of a format."""
        if form.is_plain:
            return True
        return form.block % 16 == 0 and (form.superblock_bytes > 0 or form.bits in (4, 8))

    def multiplies(self, form: BlockFormat, dtype: str) -> bool:
        """Return whether kernels multiply a left operand of a type by weights that `fits` accepts."""
        return not form.is_plain or dtype in PLAIN_LHS_TYPES[form.name]

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
        if source.form.is_plain:
            return [_plain_fragments(source.arrays[0].view("<u2"))]
        if source.form.superblock_bytes:
            return _pack_superblocks(source)
        data, scales, *zeros = source.arrays
        is_high = source.form.bits == 4 and any(points.max(initial=0) > _MAX_ZERO_POINT for points in zeros)
        zeros = [points.astype("float32") if is_high else points for points in zeros]
        weights = pack_fragments(data, source.depth, source.form.block, source.form.bits)
        return [weights, *map(pack_fragment_blocks, [_as_float16_if_exact(scales), *zeros])]

    def shapes(self, n: int, form: BlockFormat, depth: int, matrices: int = 1) -> list[list[int]]:
        """Shapes of the weights, and of scales and zero points or factors, of matrices with n columns each."""
        tiles = matrices * -(-n // FRAGMENT_COLUMNS)
        weights = [tiles, -(-depth // chunk_of(form.bits)), 32, lane_words(form.bits)]
        if form.is_plain:
            return [weights]
        blocks = [tiles, -(-depth // form.block), 8, 2]
        if form.scale == "int8":
            factors = [tiles, -(-depth // form.superblock_size), 8, 4 if form.minimum else 2]
            return [weights, blocks if form.shares_bytes else [*blocks[:3], factors[3]], factors]
        return [weights, *[blocks] * (1 + bool(form.minimum))]

    def part_types(self, form: BlockFormat) -> list[str]:
        """Element types of `shapes` for a format of a file."""
        return [self.weight_type, _PART_TYPES.get(form.scale, ""), "float16"]

    def packed_bytes(self, n: int, form: BlockFormat, depth: int, matrices: int = 1) -> int:
        """Bytes of matrices of a file with n columns each."""
        shapes = self.shapes(n, form, depth, matrices)
        return sum(prod(shape) * bytes_of(dtype) for shape, dtype in zip(shapes, self.part_types(form), strict=False))


PLAIN_LHS_TYPES = {"f16": ("float16",), "bf16": ("bfloat16", "float32")}
"""Types of left operands that kernels multiply by 16-bit floats; float32 is a sum of bfloat16."""


def _joined(parts: Sequence[np.ndarray], zeros: Zeros) -> np.ndarray:
    """All parts, in a type that has the numbers of each: only some may be exact as float16."""
    shape = (sum(map(len, parts)), *parts[0].shape[1:])
    return np.concatenate(parts, out=zeros(shape, str(np.result_type(*parts))))


def _pack_superblocks(source: BlockSource) -> list[np.ndarray]:
    """Pack rows of a file's bytes as fragments, scales, and minimums or factors where the format has them."""
    form = source.form
    rows = split_numpy_rows(source.arrays[0], form, source.depth)
    fragments = _fragments_of_quants(rows.quants, form.block, form.bits)
    if form.scale != "int8":
        dtype = _PART_TYPES[form.scale]
        parts = [array.astype(dtype) for array in (rows.scales, rows.minimums) if array is not None]
        return [fragments, *map(pack_fragment_blocks, parts)]
    rows = rows.joined_scales() if form.shares_bytes else rows
    scales, factors = [rows.scales.view(np.int8)], [rows.superblock_scales]
    if rows.minimums is not None:
        scales.append(rows.minimums.view(np.int8))
    if rows.superblock_minimums is not None:
        factors.append(-rows.superblock_minimums)
    joined = [np.concatenate([*map(pack_fragment_blocks, arrays)], 3) for arrays in (scales, factors)]
    return [fragments, joined[0], joined[1].astype("float16")]


def _as_float16_if_exact(values: np.ndarray) -> np.ndarray:
    """Numbers of float32 as float16, if float16 represents all of them."""
    with np.errstate(over="ignore"):
        half = values.astype("float16")
    return half if np.array_equal(half.astype("float32"), values) else values


BlockLayout = Panels | Fragments  # storage of the weights of a product


def layout_of(weight: Sequence[Any], form: BlockFormat, depth: int) -> BlockLayout:
    """The layout of packed weights, by the shape of the first operand."""
    if len(weight) == len(Fragments.index_map):
        return Fragments()
    # Bytes that are not whole columns get any layout: their shape then differs from the expected one.
    return Panels(max(1, int(weight[-1]) // PanelPlan(form, depth, 1).panel_bytes))


def is_streamable(form: BlockFormat, source: BlockLayout | None, target: BlockLayout | None) -> bool:
    """Return whether a kernel turns experts in the layout of a CPU into that of a GPU."""
    return isinstance(source, Panels) and isinstance(target, Fragments) and form.superblock_bytes > 0


def panel_columns(cpu: CpuTarget) -> int:
    """Columns of a panel on a CPU."""
    return tile_columns(cpu, "float32")
