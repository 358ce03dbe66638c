"""Dequantization of weights of 1 to 6 or 8 bits to fragments of tensor cores, in registers.

The bits of a weight w are inserted into the mantissa of a power of two, which is subtracted together with the zero
point: the float16 1024 with the bits of w in its lowest bits is 1024 + w. The bits of an fp4 number are those of a
16-bit float, the exponent's lowest bits, and are multiplied by the difference of the exponents' biases. Other codes of
tables are looked up by permutations of bytes (``prmt``): low and high bytes of the codes as 16-bit floats are in
registers. Words of weights of less than 4 bits become words of 4 bits first. 16-bit floats are fragments as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.block_weights import NARROW_PLANES, middle_of
from ....target.element_types import numpy_dtype
from ....target.gpu_target import WARP
from ...core.builder import Expr, int64, minimum
from ..core import ptx
from ..core.launch import SharedMemory, local
from ..core.operand import GpuOperand
from .block_plan import BlockWork
from .weight_parts import has_factors

_ONES_PAIR = {"float16": 0x3C003C00, "bfloat16": 0x3F803F80}
"""A pair of ones."""
_POWER_PAIR = {"float16": 0x64006400, "bfloat16": 0x43004300}
"""A pair of 1024, or of 128."""
_MINUS_POWER = {"float16": 0xE400, "bfloat16": 0xC300}
_FLOAT4_FACTOR = {"float16": (9, 0x78007800), "bfloat16": (6, 0x7F007F00)}
"""Shift of an fp4 number's magnitude, and a pair of factors: 2 ** 15 and 2 ** 127, which double the number."""
_SIXTEENTH = 0x2C002C00  # a pair of float16
_BYTE_POWER, _MINUS_BYTE_POWER = 0x4B000000, 0xCB000000  # 2 ** 23 as a float32


class WeightFragments:
    """Writer of the loads and the dequantization of a lane's weights.

    Parameters
    ----------
    packed : list of GpuOperand
        Weights, scales and perhaps zero points or factors, opened; those of several products follow each other, which
        have equal numbers of the block's fragments.
    lane, high : PrimExpr
        Index of the lane in its warp, and of its column among eight.
    """

    def __init__(self, work: BlockWork, packed: list[GpuOperand], lane: Expr, high: Expr) -> None:
        self.work, self.lane, self.high = work, lane, high
        self.type, self.is_bytes = work.type, work.problem.bits == 8
        count = len(packed) // work.problem.products
        self.products = [[view.data for view in packed[i : i + count]] for i in range(0, len(packed), count)]
        self.weight, *self.part_data = self.products[0]
        num_fragments = work.plan.ahead * work.plan.fragments
        self.bits = local(num_fragments * work.lane_words, "uint32")
        self.part_words = [
            local(num_fragments * work.units_of_chunk(part) * part.words, part.word_type) for part in work.part_list
        ]
        self.fragment, self.points, self.wide = local(4, "uint32"), local(4, "uint32"), local(2, "float32")
        form = work.problem.form
        self.tables = _bytes_of_codes(form.codes, self.type) if form is not None and not form.is_float4 else []
        self.bytes = local(6, "uint32") if self.tables else None

    @property
    def has_minimums(self) -> bool:
        """True if a block's minimum is added to its weights, times their scale."""
        form = self.work.problem.form
        return form is not None and bool(form.minimum)

    @property
    def is_float4(self) -> bool:
        """True if weights are fp4 numbers."""
        form = self.work.problem.form
        return form is not None and form.is_float4

    @property
    def has_any_points(self) -> bool:
        """True if zero points, or minimums, are arbitrary numbers: they are multiplied by sums of the left operand."""
        return self.has_minimums or self._has_zeros("float32")

    def _has_zeros(self, dtype: str) -> bool:
        """True if there are zero points of a type."""
        parts = self.work.part_list
        return self.work.problem.form is None and len(parts) > 1 and parts[1].dtype == dtype

    @property
    def ones(self) -> list[Expr]:
        """Fragment of ones, whose product with the left operand is its sums over k."""
        return [T.uint32(_ONES_PAIR[self.type])] * 4

    def load(self, slot: int, tile_of_block: Expr, chunk: Expr) -> None:
        """Load the weights of a chunk, their scales, and zero points or factors."""
        work = self.work
        for fragment in range(work.plan.fragments):
            product, of_product = divmod(fragment, work.product_fragments)
            weight, *part_data = self.products[product]
            tile = tile_of_block * work.product_fragments + of_product
            if work.tiles % work.product_fragments:
                tile = minimum(tile, int64(work.tiles - 1))
            number = slot * work.plan.fragments + fragment
            begin = T.bind((tile * work.chunks + chunk) * (WARP * work.lane_words))
            for first, count in work.planes:
                targets = [self.bits[number * work.lane_words + first + i] for i in range(count)]
                address = T.address_of(weight[begin + (first * WARP + self.lane * count)])
                ptx.load_global_streaming(targets, address)
            for data, part, words in zip(part_data, work.part_list, self.part_words, strict=True):
                units = work.units_of_chunk(part)
                for of_chunk in range(units):
                    unit = tirx.floordiv(chunk * work.chunk + of_chunk * (work.chunk // units), part.unit)
                    if work.chunks * work.chunk > part.units * part.unit:
                        unit = minimum(unit, int64(part.units - 1))
                    first = (number * units + of_chunk) * part.words
                    address = T.address_of(data[((tile * part.units + unit) * 8 + self.high) * part.width])
                    ptx.load_global([words[first + i] for i in range(part.words)], address, part.load_type)

    def _number(self, part: int, slot: int, fragment: int, number: int, index: int) -> Expr:
        """Number `index` of a lane, of the part's unit at scale `number` of a chunk, in the part's type."""
        of_part, work = self.work.part_list[part], self.work
        units = work.units_of_chunk(of_part)
        unit = (slot * work.plan.fragments + fragment) * units + number * units // work.scaled
        return of_part.number(self.part_words[part], unit * of_part.words, index)

    def scale(self, slot: int, fragment: int, number: int, half: int) -> Expr:
        """Scale `number` of a chunk for one of a lane's two columns, float32."""
        value, form = self._number(0, slot, fragment, number, half), self.work.problem.form
        if form is not None and form.scale == "e4m3":
            bits = (T.Cast("uint32", value) & T.uint32(0x7F)) << T.uint32(7)  # a float16 of another bias
            number = T.Cast("float32", T.reinterpret("float16", T.Cast("uint16", bits)))
            return T.bind(number * T.float32(128))
        if form is not None and form.scale == "e8m0":
            # Scales of 2 ** -127 and less become 0.
            exponent = T.max(T.Cast("int32", value) - 1, 0)
            return T.bind(T.reinterpret("float32", exponent << T.int32(23)))
        if form is not None and form.shares_bytes:
            value = T.Cast("int32", value) & 15
        return T.bind(self._times_factor(value, slot, fragment, number, half))

    def _times_factor(self, value: Expr, slot: int, fragment: int, number: int, index: int) -> Expr:
        """A scale or minimum as float32, times the factor of its superblock if there are factors."""
        value = T.cast(value, "float32")
        if not has_factors(self.work.problem):
            return value
        factor, form = T.cast(self._number(1, slot, fragment, number, index), "float32"), self.work.problem.form
        return value * (factor if form is None or form.factor == 1 else factor * T.float32(form.factor))

    def point(self, slot: int, fragment: int, number: int, half: int) -> Expr:
        """Arbitrary zero point, less the middle that `unpack` subtracts."""
        return self._number(1, slot, fragment, number, half) - T.float32(middle_of(self.work.problem.bits))

    def minimum(self, slot: int, fragment: int, number: int, half: int, scale: Expr) -> Expr:
        """Minimum of a block of weights, corrected for the middle that `unpack` subtracts from the quants."""
        form = self.work.problem.form
        assert form is not None, "only GGUF formats have minimums"
        part, index = (0, 2 + half) if has_factors(self.work.problem) else (1, half)
        value = self._number(part, slot, fragment, number, half if form.shares_bytes else index)
        if form.shares_bytes:
            value = (T.Cast("int32", value) >> 4) & 15
        value = self._times_factor(value, slot, fragment, number, index)
        lowest = self._middle + form.min_code
        return T.bind(value + scale * T.float32(lowest) if lowest else value)

    def addend(self, slot: int, fragment: int, number: int, half: int, scale: Expr) -> Expr | None:
        """Number that is added to scaled weights of `unpack`, from a minimum or an arbitrary zero point; None for 0."""
        if self.has_minimums:
            return self.minimum(slot, fragment, number, half, scale)
        if self.has_any_points:
            return T.bind(T.float32(0) - self.point(slot, fragment, number, half) * scale)
        return None

    def number(self, pair: Expr, i: int) -> Expr:
        """First or second number of a register of `unpack`, float32."""
        bits = T.Cast("uint16", pair >> T.uint32(16)) if i else T.Cast("uint16", pair & T.uint32(0xFFFF))
        if self.type == "float16":
            return T.Cast("float32", T.reinterpret("float16", bits))
        return T.reinterpret("float32", T.Cast("uint32", bits) << T.uint32(16))

    @property
    def _middle(self) -> int:
        """Quant that `unpack` subtracts: that of code 0, so that rounded minimums are as small as they can be."""
        form, bits = self.work.problem.form, self.work.problem.bits
        return -form.min_code if form is not None and form.min_code else middle_of(bits)

    def begin(self, slot: int, fragment: int, number: int) -> None:
        """Compute the addend of `unpack` for both columns of a lane: minus the power of two and the zero point."""
        form = self.work.problem.form
        if self.work.is_plain or (form is not None and form.codes):
            return
        is_half = self.type == "float16"
        for half in range(2):
            point: Expr = T.uint32(self._middle)
            if self._has_zeros("uint8"):
                point = T.cast(self._number(1, slot, fragment, number, half), "uint32")
            if self.is_bytes and not is_half:
                T.buffer_store(self.points, T.uint32(_MINUS_BYTE_POWER) | point, [half])
                continue
            pair = T.uint32(_MINUS_POWER[self.type] * 0x10001) | point | (point << T.uint32(16))
            T.buffer_store(self.points, pair, [half])
            if is_half and not self.is_bytes:  # -(1024 + z) + 960
                ptx.add_pair(self.points[half + 2], self.points[half], T.uint32(0x63806380))

    def unpack(self, slot: int, fragment: int, step: int) -> list[Expr]:
        """Fragment of a lane's eight weights of a step, for both columns, less their zero points."""
        work = self.work
        begin = (slot * work.plan.fragments + fragment) * work.lane_words
        words = [self.bits[begin + step * work.words + i] for i in range(work.words)]
        if work.problem.bits < 4:
            words = [self.widened([self.bits[begin + first + step * count // 4] for first, count in work.planes], step)]
        if work.is_plain:
            return words
        high = []
        if work.high_bits:
            first = [(4 * step + 2 * pair) * work.high_bits for pair in range(2)]
            high = [(self.bits[begin + 4 + bit // 16], bit % 16) for bit in first]
        self.unpack_words(words if self.is_bytes else words * 2, (0, 0) if self.is_bytes else (0, 8), high)
        return [self.fragment[i] for i in range(4)]

    def widened(self, words: Sequence[Expr], number: int) -> Expr:
        """Word `number` of weights of 4 bits of a lane, from the words of the planes that have its bits."""
        fields, first = [], 0
        for word, bits in zip(words, NARROW_PLANES[self.work.problem.bits], strict=True):
            mask = T.uint32(((1 << bits) - 1) * 0x11111111 << first)
            fields.append(_shifted(word, first - number * bits % 4) & mask)
            first += bits
        return T.bind(reduce(T.bitwise_or, fields))

    def unpack_words(
        self, words: Sequence[Expr], bits: Sequence[int], high: Sequence[tuple[Expr, int]] = (), begin: int = 0
    ) -> None:
        """Unpack weights of two pairs of k, each in a word from a bit on, to registers from `begin` on.

        `high` has the word and the first bit of each pair's high bits, if weights have 5 or 6.
        """
        if self.tables:
            for pair in range(2):
                self._look_up(begin + 2 * pair, words[pair], bits[pair])
            return
        for i in range(4):
            half, pair = i % 2, i // 2
            word, at = words[pair], bits[pair]
            if self.is_float4:
                self._unpack_float4(begin + i, word, at + 4 * half)
            elif self.is_bytes:
                self._unpack_bytes(begin + i, word, half)
            elif self.type == "float16":
                # Nibbles of the second column are not shifted down: 1024 + 16 w is multiplied by 1/16 to 64 + w.
                if half == 0:
                    shifted = T.bind(word >> T.uint32(at)) if at else word
                self._unpack_nibbles(begin + i, shifted, 4 * half, half + 2 if half else 0, high[pair : pair + 1])
            else:
                at += 4 * half
                self._unpack_nibbles(begin + i, word >> T.uint32(at) if at else word, 0, half, high[pair : pair + 1])

    def _unpack_nibbles(self, i: int, word: Expr, at: int, point: int, high: Sequence[tuple[Expr, int]]) -> None:
        """Two weights whose low bits are at bits `at` of both halves of a word, and perhaps their high bits."""
        target, factor = self.fragment[i], _SIXTEENTH if at else _ONES_PAIR[self.type]
        ptx.and_or(target, word, 0x000F000F << at, _POWER_PAIR[self.type])
        count = self.work.high_bits
        for high_word, first in high:
            shifted = _shifted(high_word, at + 4 - first - i % 2 * count)
            mask = ((1 << count) - 1) * 0x00100010 << at
            T.buffer_store(self.fragment, T.bitwise_or(target, T.bitwise_and(shifted, T.uint32(mask))), [i])
        ptx.multiply_add_pair(target, target, T.uint32(factor), self.points[point], self.type)

    def _look_up(self, begin: int, word: Expr, at: int) -> None:
        """Codes of two weights of both columns, whose quants are the bytes at bits `at` of both halves of a word."""
        assert self.bytes is not None
        selector, low, high, first, second, halves = (self.bytes[i] for i in range(6))
        ptx.permute_bytes(selector, word, word, 0x2020 + 0x1111 * (at // 8))
        is_long = len(self.tables[0]) == 4  # words; an instruction has two
        if is_long:
            ptx.and_or(halves, selector >> T.uint32(1), 0x4444, 0x3210)
            T.buffer_store(self.bytes, selector & T.uint32(0x7777), [0])
        for target, table in zip((low, high), self.tables, strict=True):
            ptx.permute_bytes(first if is_long else target, T.uint32(table[0]), T.uint32(table[1]), selector)
            if is_long:
                ptx.permute_bytes(second, T.uint32(table[2]), T.uint32(table[3]), selector)
                ptx.permute_bytes(target, first, second, halves)
        for half, digits in enumerate((0x6240, 0x7351)):
            ptx.permute_bytes(self.fragment[begin + half], low, high, digits)

    def _unpack_float4(self, i: int, word: Expr, at: int) -> None:
        """Fp4 numbers from bits `at` of both halves of a word on, doubled."""
        target, (shift, factor) = self.fragment[i], _FLOAT4_FACTOR[self.type]
        magnitude = T.bitwise_and(_shifted(word, shift - at), T.uint32((7 << shift) * 0x10001))
        sign = T.bitwise_and(_shifted(word, 12 - at), T.uint32(0x80008000))
        T.buffer_store(self.fragment, T.bitwise_or(sign, magnitude), [i])
        ptx.multiply_add_pair(target, target, T.uint32(factor), T.uint32(0x80008000), self.type)

    def _unpack_bytes(self, i: int, word: Expr, half: int) -> None:
        target = self.fragment[i]
        if self.type == "float16":
            ptx.permute_bytes(target, word, T.uint32(_POWER_PAIR["float16"]), 0x5352 if half else 0x5150)
            ptx.add_pair(target, target, self.points[half])
            return
        for one in range(2):  # eight bits do not fit the mantissa of bfloat16
            ptx.permute_bytes(target, word, T.uint32(_BYTE_POWER), 0x7650 + 2 * half + one)
            number = T.reinterpret("float32", target) + T.reinterpret("float32", self.points[half])
            T.buffer_store(self.wide, number, [one])
        ptx.pack_pair(target, self.wide[0], self.wide[1], "bfloat16")


def _bytes_of_codes(codes: tuple[int, ...], dtype: str) -> list[list[int]]:
    """Low and high bytes of codes as 16-bit floats, as words; empty without codes."""
    bits = np.array(codes * max(1, 8 // max(len(codes), 1)), numpy_dtype(dtype)).view(np.uint16)
    return [(bits >> shift).astype(np.uint8).view("<u4").tolist() for shift in (0, 8)] if codes else []


def _shifted(word: Expr, bits: int) -> Expr:
    """A word shifted left, or right by the opposite of a negative number."""
    return word << T.uint32(bits) if bits >= 0 else word >> T.uint32(-bits)


class StagedFragments(WeightFragments):
    """Writer of loads of a chunk's weights from a stage in shared memory; `ahead` is 1."""

    def load_staged(self, shared: SharedMemory, fragment: int, weights: Expr, parts: Sequence[Sequence[Expr]]) -> None:
        """Load a fragment of a chunk.

        Parameters
        ----------
        weights : PrimExpr
            Offset in shared memory of the chunk's weights.
        parts : sequence of sequences of PrimExpr
            Offsets of the scales, and of the zero points or factors, of 16 columns: one per unit of the chunk.
        """
        work = self.work
        for first, count in work.planes:
            targets = [self.bits[fragment * work.lane_words + first + i] for i in range(count)]
            ptx.load_shared(targets, shared.at(weights + (first * WARP + self.lane * count) * 4))
        self.load_parts(shared, fragment, parts)

    def load_chunk(self, shared: SharedMemory, stage: Expr, chunk: Expr, part_offsets: Sequence[int]) -> None:
        """Load a chunk of a complete stage of one fragment.

        Parameters
        ----------
        stage : PrimExpr
            Offset in shared memory of the stage, which begins with the weights of its chunks.
        chunk : PrimExpr
            Number of the chunk in the stage.
        part_offsets : sequence of int
            Offsets in the stage of the scales, and of the zero points or factors, of all chunks.
        """
        work, parts = self.work, []
        for part, offset in zip(work.part_list, part_offsets, strict=True):
            units = work.units_of_chunk(part)
            numbers = (tirx.floordiv(chunk * work.chunk + i * (work.chunk // units), part.unit) for i in range(units))
            parts.append([stage + (offset + number * part.unit_bytes) for number in numbers])
        self.load_staged(shared, 0, stage + chunk * work.chunk_bytes, parts)

    def load_parts(
        self, shared: SharedMemory, fragment: int, parts: Sequence[Sequence[Expr]], first_scale: int = 0
    ) -> None:
        """Load scales, zero points and factors of a chunk's fragment; `parts` as in `load_staged`, from a scale on."""
        work = self.work
        for words, part, offsets in zip(self.part_words, work.part_list, parts, strict=True):
            units = work.units_of_chunk(part)
            for number, offset in enumerate(offsets, first_scale if units > 1 else 0):
                begin = (fragment * units + number) * part.words
                targets = [words[begin + i] for i in range(part.words)]
                ptx.load_shared(targets, shared.at(offset + self.high * part.lane_bytes), part.load_type)
