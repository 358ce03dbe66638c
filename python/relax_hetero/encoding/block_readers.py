"""Readers of the superblocks of GGUF files: where the bits of quants, scales and minimums are.

Each format has one reader, written with a few array operations (`ArrayOps`). They are numpy's in `block_formats`, and
Relax ops in FormQuantizedMatmuls, which dequantizes weights of products without a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

import numpy as np


class ArrayOps(Protocol):
    """Operations on arrays of bytes that the readers of superblocks need."""

    def slice(self, x: Any, begin: int, end: int) -> Any:
        """Elements from `begin` to `end` of the last axis."""

    def reshape(self, x: Any, shape: Sequence[int]) -> Any:
        """The elements in another shape; one extent may be -1."""

    def stack(self, arrays: Sequence[Any], axis: int) -> Any:
        """Arrays of one shape along a new axis."""

    def concat(self, arrays: Sequence[Any], axis: int) -> Any:
        """Arrays one after the other along an axis."""

    def bits(self, x: Any, first: int, count: int) -> Any:
        """Bits `first` to ``first + count - 1`` of each byte, shifted to bit 0."""

    def or_shifted(self, x: Any, high: Any, shift: int) -> Any:
        """``x | high << shift``."""

    def flip_bit(self, x: Any, bit: int) -> Any:
        """Bytes with one bit inverted."""

    def joined(self, low: Any, high: Any) -> Any:
        """``low | high << 8`` as int32."""

    def look_up(self, x: Any, table: np.ndarray) -> Any:
        """The row of a table, or the number, for each index (uint8 or int32); the row is a further axis."""

    def f16(self, x: Any) -> Any:
        """Pairs of bytes along the last axis, each a float16, as float32 without that axis."""

    def bf16(self, x: Any) -> Any:
        """Pairs of bytes along the last axis, each a bfloat16, as float32 without that axis."""


@dataclass(frozen=True)
class QuantizedRows:
    """Rows of weights, separated into quants, scales and minimums as they are stored."""

    quants: Any  # uint8 ``(n, depth)``; for plain formats the numbers themselves, float32
    # ``(n, blocks)`` of float32, or None; bytes, where the format's kind is ``e8m0`` or ``int8``: integers, to be
    # multiplied by `superblock_scales` and `superblock_minimums`.
    scales: Any = None
    minimums: Any = None
    # ggml's ``d`` and ``dmin``, ``(n, superblocks)`` of float32, or None. The minimum of a block is
    # ``-superblock_minimum * minimum``.
    superblock_scales: Any = None
    superblock_minimums: Any = None

    def joined_scales(self) -> QuantizedRows:
        """The same with the minimums in the high bits of the scales' bytes."""
        return replace(self, scales=self.scales | self.minimums << np.uint8(4), minimums=None)


@dataclass(frozen=True)
class SuperblockReader:
    """Helpers of the functions below, whose `data` has the shape ``(rows, superblocks, bytes of a superblock)``."""

    ops: ArrayOps
    rows: int
    superblocks: int

    def by_row(self, x: Any) -> Any:
        """An array with the elements of each row along one axis."""
        return self.ops.reshape(x, [self.rows, -1])

    def by_superblock(self, x: Any, *extents: int) -> Any:
        """An array with the elements of each superblock in the shape `extents`."""
        return self.ops.reshape(x, [self.rows, self.superblocks, *extents])

    def f16(self, data: Any, offset: int) -> Any:
        """The float16 at a byte offset of each superblock."""
        return self.ops.f16(self.ops.slice(data, offset, offset + 2))

    def fields(self, data: Any, run: int, bits: int) -> Any:
        """Fields of 1, 2 or 4 bits: for each run of `run` bytes first the lowest fields of all, then the next ones."""
        fields = [self.by_superblock(self.ops.bits(data, first, bits), -1, run) for first in range(0, 8, bits)]
        return self.by_row(self.ops.stack(fields, 3))

    def bit_field(self, words: Any, first: int, count: int) -> Any:
        """Bits `first` to ``first + count - 1`` of words of bytes, the last axis; they span at most two bytes."""
        (byte, bit), ops = divmod(first, 8), self.ops
        size = min(count, 8 - bit)
        field = ops.bits(ops.slice(words, byte, byte + 1), bit, size)
        if size == count:
            return field
        return ops.or_shifted(field, ops.bits(ops.slice(words, byte + 1, byte + 2), 0, count - size), size)

    def bit_fields(self, words: Any, firsts: Sequence[int], count: int) -> Any:
        """Several fields of each word, as one row."""
        return self.by_row(self.ops.stack([self.bit_field(words, first, count) for first in firsts], 4))


def _read_q8_0(data: Any, reader: SuperblockReader) -> QuantizedRows:
    quants = reader.ops.flip_bit(reader.ops.slice(data, 2, 34), 7)  # int8 to uint8, plus 128
    return QuantizedRows(reader.by_row(quants), reader.f16(data, 0))


def _read_q4(has_minimum: bool) -> Callable[[Any, SuperblockReader], QuantizedRows]:
    def read(data: Any, reader: SuperblockReader) -> QuantizedRows:
        offset = 4 if has_minimum else 2
        quants = reader.fields(reader.ops.slice(data, offset, offset + 16), 16, 4)
        return QuantizedRows(quants, reader.f16(data, 0), reader.f16(data, 2) if has_minimum else None)

    return read


def _read_q5(has_minimum: bool) -> Callable[[Any, SuperblockReader], QuantizedRows]:
    def read(data: Any, reader: SuperblockReader) -> QuantizedRows:
        ops, offset = reader.ops, 4 if has_minimum else 2
        low_bits = reader.fields(ops.slice(data, offset + 4, offset + 20), 16, 4)
        high_bits = reader.fields(ops.slice(data, offset, offset + 4), 1, 1)
        quants = ops.or_shifted(low_bits, high_bits, 4)
        return QuantizedRows(quants, reader.f16(data, 0), reader.f16(data, 2) if has_minimum else None)

    return read


def _read_k_scales(data: Any, reader: SuperblockReader) -> tuple[Any, Any]:
    """Eight scales and eight minimums of 6 bits, in 12 bytes from byte 4 on.

    The last four of each have their low bits in the third group of 4 bytes, and their high bits above the first four.
    """
    ops = reader.ops
    scale_bytes, minimum_bytes, low_bytes = (ops.slice(data, offset, offset + 4) for offset in (4, 8, 12))
    factors = []
    for first_bytes, low_bit in ((scale_bytes, 0), (minimum_bytes, 4)):
        last_four = ops.or_shifted(ops.bits(low_bytes, low_bit, 4), ops.bits(first_bytes, 6, 2), 4)
        factors.append(reader.by_row(ops.stack([ops.bits(first_bytes, 0, 6), last_four], 2)))
    return factors[0], factors[1]


def _read_q4_k(data: Any, reader: SuperblockReader) -> QuantizedRows:
    quants = reader.fields(reader.ops.slice(data, 16, 144), 32, 4)
    return QuantizedRows(quants, *_read_k_scales(data, reader), reader.f16(data, 0), reader.f16(data, 2))


def _read_q5_k(data: Any, reader: SuperblockReader) -> QuantizedRows:
    ops = reader.ops
    low_bits = reader.fields(ops.slice(data, 48, 176), 32, 4)
    quants = ops.or_shifted(low_bits, reader.fields(ops.slice(data, 16, 48), 32, 1), 4)
    return QuantizedRows(quants, *_read_k_scales(data, reader), reader.f16(data, 0), reader.f16(data, 2))


def _read_q6_k(data: Any, reader: SuperblockReader) -> QuantizedRows:
    ops = reader.ops
    low_bits = reader.fields(ops.slice(data, 0, 128), 64, 4)
    high_bits = reader.fields(ops.slice(data, 128, 192), 32, 2)
    scales = reader.by_row(ops.slice(data, 192, 208))
    quants = ops.or_shifted(low_bits, high_bits, 4)
    return QuantizedRows(quants, scales, superblock_scales=reader.f16(data, 208))


def _read_mxfp4(data: Any, reader: SuperblockReader) -> QuantizedRows:
    scales = reader.by_row(reader.ops.slice(data, 0, 1))
    return QuantizedRows(reader.fields(reader.ops.slice(data, 1, 17), 16, 4), scales)


# Formats of small integers.


def _read_q2_k(data: Any, reader: SuperblockReader) -> QuantizedRows:
    ops, factors = reader.ops, reader.ops.slice(data, 0, 16)
    scales, minimums = (reader.by_row(ops.bits(factors, first, 4)) for first in (0, 4))
    quants = reader.fields(ops.slice(data, 16, 80), 32, 2)
    return QuantizedRows(quants, scales, minimums, reader.f16(data, 80), reader.f16(data, 82))


def _read_q3_k(data: Any, reader: SuperblockReader) -> QuantizedRows:
    ops = reader.ops
    quants = ops.or_shifted(
        reader.fields(ops.slice(data, 32, 96), 32, 2), reader.fields(ops.slice(data, 0, 32), 32, 1), 2
    )
    low_bits = reader.fields(ops.slice(data, 96, 104), 8, 4)
    scales = ops.or_shifted(low_bits, reader.fields(ops.slice(data, 104, 108), 4, 2), 4)
    return QuantizedRows(quants, ops.look_up(scales, _SIGNED_SCALES), superblock_scales=reader.f16(data, 108))


def _read_iq4_xs(data: Any, reader: SuperblockReader) -> QuantizedRows:
    ops = reader.ops
    low_bits = reader.fields(ops.slice(data, 4, 8), 1, 4)
    scales = ops.or_shifted(low_bits, reader.fields(ops.slice(data, 2, 4), 1, 2), 4)
    quants = reader.fields(ops.slice(data, 8, 136), 16, 4)
    return QuantizedRows(quants, ops.look_up(scales, _SIGNED_SCALES), superblock_scales=reader.f16(data, 0))


_SIGNED_SCALES = np.arange(-32, 32, dtype=np.int8).view(np.uint8)  # scales of 6 bits, which are stored plus 32


def _read_nvfp4(data: Any, reader: SuperblockReader) -> QuantizedRows:
    scales = reader.ops.look_up(reader.by_row(reader.ops.slice(data, 0, 4)), _E4M3_WITHOUT_NAN)
    return QuantizedRows(reader.fields(reader.ops.slice(data, 4, 36), 8, 4), scales)


_E4M3_WITHOUT_NAN = np.where(np.arange(256) == 127, 0, np.arange(256)).astype(np.uint8)
"""Bytes of e4m3, which lack a sign; ggml reads NaN as 0."""


def _read_neighbours(bits: int) -> Callable[[Any, SuperblockReader], QuantizedRows]:
    def read(data: Any, reader: SuperblockReader) -> QuantizedRows:
        return QuantizedRows(reader.fields(reader.ops.slice(data, 2, 18), 1, bits), reader.f16(data, 0))

    return read


def _read_tq2_0(data: Any, reader: SuperblockReader) -> QuantizedRows:
    return QuantizedRows(reader.fields(reader.ops.slice(data, 0, 64), 32, 2), reader.f16(data, 64))


def _read_tq1_0(data: Any, reader: SuperblockReader) -> QuantizedRows:
    """Five digits of base 3 in each byte, the last four bytes of a superblock have four."""
    ops, parts = reader.ops, []
    for begin, end, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        packed = ops.slice(data, begin, end)
        parts.append(reader.by_superblock(ops.stack([ops.look_up(packed, _DIGITS[i]) for i in range(digits)], 2), -1))
    return QuantizedRows(reader.by_row(ops.concat(parts, 2)), reader.f16(data, 52))


_DIGITS = [((np.arange(256) * 3**digit & 255) * 3 >> 8).astype(np.uint8) for digit in range(5)]
"""Digits of a byte, which is a fraction of base 3 times 256."""


# Formats with codebooks: an index selects four or eight magnitudes from a grid. A quant is the number of a magnitude
# and, above its bits, a sign. Kernels read quants, not indices. (Measured with kernels that look entries up in memory,
# one row, Zen 5: IQ2_XXS in 0.70 of the bytes takes 2.3 times as long, IQ3_XXS in 0.77 of the bytes 6 times.)


@cache
def _grid(name: str) -> np.ndarray:
    """The magnitudes of a codebook as numbers of uint8, (entries, 4 or 8); the package gguf has the codebooks."""
    from gguf import quants

    codebook = getattr(quants, name)
    codebook.init_grid()
    return np.searchsorted(codebook.grid_map, codebook.grid[0, 0]).astype(np.uint8)


_BYTE_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
"""Bits of a byte: signs of eight weights."""

_EVEN_BITS = np.concatenate([_BYTE_BITS[:128, :7], _BYTE_BITS[:128, :7].sum(1, dtype=np.uint8)[:, None] & 1], axis=1)
"""Signs of eight weights by seven bits: an even number of them are negative."""

_ODD = np.arange(1, 32, 2, dtype=np.uint8)  # scales of 3 or 4 bits, which are one half more, doubled


def _codebook_quants(grid: str, index: Any, signs: Any, reader: SuperblockReader) -> Any:
    """Quants by the indices of their magnitudes and one bit of signs for each weight."""
    ops, table = reader.ops, _grid(grid)
    bits = int(table.max()).bit_length()
    return ops.or_shifted(reader.by_row(ops.look_up(index, table)), reader.by_row(signs), bits)


def _read_iq2_xxs(data: Any, reader: SuperblockReader) -> QuantizedRows:
    ops, words = reader.ops, reader.by_superblock(reader.ops.slice(data, 2, 66), 8, 8)
    scales, signs = _read_signs(ops.slice(words, 4, 8), reader)
    quants = _codebook_quants("IQ2_XXS", ops.slice(words, 0, 4), signs, reader)
    return QuantizedRows(quants, scales, superblock_scales=reader.f16(data, 0))


def _read_iq3_xxs(data: Any, reader: SuperblockReader) -> QuantizedRows:
    ops, words = reader.ops, reader.by_superblock(reader.ops.slice(data, 66, 98), 8, 4)
    scales, signs = _read_signs(words, reader)
    quants = _codebook_quants("IQ3_XXS", ops.slice(data, 2, 66), signs, reader)
    return QuantizedRows(quants, scales, superblock_scales=reader.f16(data, 0))


def _read_signs(words: Any, reader: SuperblockReader) -> tuple[Any, Any]:
    """Scale and signs of the 32 weights of a word: 4 bits, and four times 7."""
    signs = reader.ops.look_up(reader.bit_fields(words, (0, 7, 14, 21), 7), _EVEN_BITS)
    return reader.ops.look_up(reader.bit_fields(words, (28,), 4), _ODD), signs


def _read_iq2_xs(data: Any, reader: SuperblockReader) -> QuantizedRows:
    ops, words = reader.ops, reader.by_superblock(reader.ops.slice(data, 2, 66), 32, 2)
    index = ops.joined(ops.slice(words, 0, 1), reader.bit_field(words, 8, 1))
    signs = ops.look_up(reader.bit_field(words, 9, 7), _EVEN_BITS)
    quants = _codebook_quants("IQ2_XS", index, signs, reader)
    return QuantizedRows(quants, _read_odd_scales(data, 66, 74, reader), superblock_scales=reader.f16(data, 0))


def _read_iq2_s(data: Any, reader: SuperblockReader) -> QuantizedRows:
    ops = reader.ops
    index = ops.joined(reader.by_row(ops.slice(data, 2, 34)), reader.fields(ops.slice(data, 66, 74), 1, 2))
    quants = _codebook_quants("IQ2_S", index, reader.fields(ops.slice(data, 34, 66), 1, 1), reader)
    return QuantizedRows(quants, _read_odd_scales(data, 74, 82, reader), superblock_scales=reader.f16(data, 0))


def _read_iq3_s(data: Any, reader: SuperblockReader) -> QuantizedRows:
    ops = reader.ops
    index = ops.joined(reader.by_row(ops.slice(data, 2, 66)), reader.fields(ops.slice(data, 66, 74), 1, 1))
    quants = _codebook_quants("IQ3_S", index, reader.fields(ops.slice(data, 74, 106), 1, 1), reader)
    return QuantizedRows(quants, _read_odd_scales(data, 106, 110, reader), superblock_scales=reader.f16(data, 0))


def _read_odd_scales(data: Any, begin: int, end: int, reader: SuperblockReader) -> Any:
    return reader.ops.look_up(reader.fields(reader.ops.slice(data, begin, end), 1, 4), _ODD)


def _read_iq1_s(data: Any, reader: SuperblockReader) -> QuantizedRows:
    """The minimum of a block is an eighth of its scale, which a bit adds or subtracts; eighths are the unit of both."""
    ops, words = reader.ops, reader.by_superblock(reader.ops.slice(data, 34, 50), 8, 2)
    index = ops.joined(reader.by_row(ops.slice(data, 2, 34)), reader.bit_fields(words, (0, 3, 6, 9), 3))
    quants = reader.by_row(ops.look_up(index, _grid("IQ1_S")))
    fields, factors = reader.bit_fields(words, (12,), 4), reader.f16(data, 0)
    scales, minimums = (ops.look_up(fields, table) for table in _IQ1_SCALES)
    return QuantizedRows(quants, scales, minimums, factors, factors)


_IQ1_SCALES = np.tile(8 * _ODD[:8], 2), np.concatenate([-_ODD[:8], _ODD[:8]])
"""Scales and minimums of 3 bits and a sign; minimums, which are subtracted, as bytes of int8."""


def _read_iq1_m(data: Any, reader: SuperblockReader) -> QuantizedRows:
    """A bit for 8 weights adds or subtracts an eighth; the float16 is in the highest bits of four words of scales."""
    ops, words = reader.ops, reader.by_superblock(reader.ops.slice(data, 48, 56), 4, 2)
    high_bits = reader.fields(ops.slice(data, 32, 48), 1, 4)
    index = ops.joined(reader.by_row(ops.slice(data, 0, 32)), ops.bits(high_bits, 0, 3))
    quants = _codebook_quants("IQ1_M", index, ops.look_up(ops.bits(high_bits, 3, 1), _EIGHT_TIMES), reader)
    nibbles = reader.by_superblock(reader.bit_field(words, 12, 4), 2, 2)
    halves = ops.or_shifted(ops.slice(nibbles, 0, 1), ops.slice(nibbles, 1, 2), 4)
    scales = ops.look_up(reader.bit_fields(words, (0, 3, 6, 9), 3), _ODD)
    return QuantizedRows(quants, scales, superblock_scales=ops.f16(reader.by_superblock(halves, 2)))


_EIGHT_TIMES = np.array([[0] * 8, [1] * 8], np.uint8)  # a bit that eight weights share


def _read_f16(data: Any, reader: SuperblockReader) -> QuantizedRows:
    return QuantizedRows(reader.ops.f16(data))


def _read_bf16(data: Any, reader: SuperblockReader) -> QuantizedRows:
    return QuantizedRows(reader.ops.bf16(data))


READERS: dict[str, Callable[[Any, SuperblockReader], QuantizedRows]] = {
    "q8_0": _read_q8_0,
    "q4_0": _read_q4(has_minimum=False),
    "q4_1": _read_q4(has_minimum=True),
    "q5_0": _read_q5(has_minimum=False),
    "q5_1": _read_q5(has_minimum=True),
    "q4_k": _read_q4_k,
    "q5_k": _read_q5_k,
    "q6_k": _read_q6_k,
    "q2_k": _read_q2_k,
    "q3_k": _read_q3_k,
    "iq4_nl": _read_q4(has_minimum=False),
    "iq4_xs": _read_iq4_xs,
    "iq3_s": _read_iq3_s,
    "iq3_xxs": _read_iq3_xxs,
    "iq2_s": _read_iq2_s,
    "iq2_xs": _read_iq2_xs,
    "iq2_xxs": _read_iq2_xxs,
    "iq1_m": _read_iq1_m,
    "iq1_s": _read_iq1_s,
    "tq2_0": _read_tq2_0,
    "tq1_0": _read_tq1_0,
    "q2_0": _read_neighbours(2),
    "q1_0": _read_neighbours(1),
    "mxfp4": _read_mxfp4,
    "nvfp4": _read_nvfp4,
    "f16": _read_f16,
    "bf16": _read_bf16,
}
