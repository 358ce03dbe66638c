"""Dequantization of weights of 4 or 8 bits to fragments of tensor cores, in registers.

The bits of a weight w are inserted into the mantissa of a power of two, which is subtracted together with the zero
point: the float16 1024 with the bits of w in its lowest bits is 1024 + w. The bits of an fp4 number are those of a
16-bit float, the exponent's lowest bits, and are multiplied by the difference of the exponents' biases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.block_weights import FRAGMENT_COLUMNS, middle_of
from ....target.element_types import bytes_of
from ....target.gpu_target import WARP
from ...core.builder import Expr, int64, minimum
from ..core import ptx
from ..core.launch import SharedMemory, local
from ..core.operand import GpuOperand
from .block_plan import STEP, BlockWork

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
    work : BlockWork
    packed : list of GpuOperand
        Weights, scales and perhaps zero points, opened.
    lane, high : PrimExpr
        Index of the lane in its warp, and of its column among eight.
    """

    def __init__(self, work: BlockWork, packed: list[GpuOperand], lane: Expr, high: Expr) -> None:
        self.work, self.lane, self.high = work, lane, high
        self.type, self.is_bytes = work.type, work.problem.bits == 8
        self.weight, self.scales = packed[0].data, packed[1].data
        self.zeros = packed[2].data if len(packed) > 2 else None
        num_fragments = work.plan.ahead * work.plan.fragments
        self.bits = local(num_fragments * 4, "uint32")
        self.scale_bits = local(num_fragments * work.scaled * 2, str(self.scales.dtype))
        self.point_bits: Any = None
        if self.zeros is not None:
            self.point_bits = local(num_fragments * work.scaled * 2, str(self.zeros.dtype))
        self.fragment, self.points, self.wide = local(4, "uint32"), local(4, "uint32"), local(2, "float32")

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
        return self.zeros is not None and str(self.zeros.dtype) != "uint8"

    @property
    def ones(self) -> list[Expr]:
        """Fragment of ones, whose product with the left operand is its sums over k."""
        return [T.uint32(_ONES_PAIR[self.type])] * 4

    def load(self, slot: int, tile_of_block: Expr, chunk: Expr) -> None:
        """Load the weights of a chunk, their scales and zero points."""
        work = self.work
        for fragment in range(work.plan.fragments):
            tile = tile_of_block * work.plan.fragments + fragment
            if work.tiles % work.plan.fragments:
                tile = minimum(tile, int64(work.tiles - 1))
            offset = ((tile * work.chunks + chunk) * WARP + self.lane) * 4
            number_of_fragment = slot * work.plan.fragments + fragment
            targets = [self.bits[number_of_fragment * 4 + i] for i in range(4)]
            ptx.load_global_streaming(targets, T.address_of(self.weight[offset]))
            for number in range(work.scaled):
                scale = tirx.floordiv(chunk * work.chunk + number * work.steps * STEP, work.problem.block)
                if work.chunks * work.chunk > work.blocks * work.problem.block:
                    scale = minimum(scale, int64(work.blocks - 1))
                offset = ((tile * work.blocks + scale) * (FRAGMENT_COLUMNS // 2) + self.high) * 2
                first = (number_of_fragment * work.scaled + number) * 2
                for target, data in ((self.scale_bits, self.scales), (self.point_bits, self.zeros)):
                    if data is not None:
                        registers = T.ramp(tirx.const(first, "int32"), 1, 2)
                        T.buffer_store(target, data[T.ramp(offset, int64(1), 2)], [registers])

    def scale(self, slot: int, fragment: int, number: int, half: int) -> Expr:
        """Scale `number` of a chunk for one of a lane's two columns, float32."""
        return T.bind(T.cast(self._scale(self._scale_index(slot, fragment, number) + half), "float32"))

    def point(self, slot: int, fragment: int, number: int, half: int) -> Expr:
        """Arbitrary zero point, less the middle that `unpack` subtracts."""
        point = self._point(self._scale_index(slot, fragment, number) + half)
        return point - T.float32(middle_of(self.work.problem.bits))

    def minimum(self, slot: int, fragment: int, number: int, half: int, scale: Expr) -> Expr:
        """Minimum of a block of weights, corrected for the middle that `unpack` subtracts from the quants."""
        form, bits = self.work.problem.form, self.work.problem.bits
        assert form is not None, "only GGUF formats have minimums"
        value = T.cast(self._point(self._scale_index(slot, fragment, number) + half), "float32")
        lowest = middle_of(bits) + form.min_code if bits == form.bits else 0
        return T.bind(value + scale * T.float32(lowest) if lowest else value)

    def addend(self, slot: int, fragment: int, number: int, half: int, scale: Expr) -> Expr | None:
        """Number that is added to scaled weights of `unpack`, from a minimum or an arbitrary zero point; None for 0."""
        if self.has_minimums:
            return self.minimum(slot, fragment, number, half, scale)
        if self.has_any_points:
            return T.bind(T.float32(0) - self.point(slot, fragment, number, half) * scale)
        return None

    def _scale_index(self, slot: int, fragment: int, number: int) -> int:
        return ((slot * self.work.plan.fragments + fragment) * self.work.scaled + number) * 2

    def _scale(self, index: int) -> Expr:
        """Loaded scale, in its own type."""
        return self.scale_bits[index]

    def _point(self, index: int) -> Expr:
        """Loaded zero point or minimum, in its own type."""
        return self.point_bits[index]

    def begin(self, slot: int, fragment: int, number: int) -> None:
        """Compute the addend of `unpack` for both columns of a lane: minus the power of two and the zero point."""
        if self.is_float4:
            return
        middle, is_half = middle_of(self.work.problem.bits), self.type == "float16"
        index = self._scale_index(slot, fragment, number)
        for half in range(2):
            point: Expr = T.uint32(middle)
            if self.zeros is not None and not self.has_any_points:
                point = T.cast(self._point(index + half), "uint32")
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
        first = (slot * work.plan.fragments + fragment) * 4 + step * work.words
        words = [self.bits[first + i] for i in range(work.words)]
        self.unpack_words(words if self.is_bytes else words * 2, (0, 0) if self.is_bytes else (0, 8))
        return [self.fragment[i] for i in range(4)]

    def unpack_words(self, words: Sequence[Expr], bits: Sequence[int], begin: int = 0) -> None:
        """Unpack weights of two pairs of k, each in a word from a bit on, to registers from `begin` on."""
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
                self._unpack_nibbles(begin + i, shifted, 0x00F000F0 if half else 0x000F000F, half + 2 if half else 0)
            else:
                at += 4 * half
                self._unpack_nibbles(begin + i, word >> T.uint32(at) if at else word, 0x000F000F, half)

    def _unpack_nibbles(self, i: int, word: Expr, mask: int, point: int) -> None:
        target, factor = self.fragment[i], _ONES_PAIR[self.type] if mask == 0x000F000F else _SIXTEENTH
        ptx.and_or(target, word, mask, _POWER_PAIR[self.type])
        ptx.multiply_add_pair(target, target, T.uint32(factor), self.points[point], self.type)

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


def _shifted(word: Expr, bits: int) -> Expr:
    """A word shifted left, or right by the opposite of a negative number."""
    return word << T.uint32(bits) if bits >= 0 else word >> T.uint32(-bits)


class StagedFragments(WeightFragments):
    """Writer of loads of a chunk's weights from a stage in shared memory; `ahead` is 1."""

    def __init__(self, work: BlockWork, packed: list[GpuOperand], lane: Expr, high: Expr) -> None:
        super().__init__(work, packed, lane, high)
        self.types = [operand.nominal for operand in packed[1:]]
        count = work.plan.fragments * work.scaled
        self.words = [
            local(count * max(1, bytes_of(dtype) // 2), "uint32" if bytes_of(dtype) > 1 else "uint16")
            for dtype in self.types
        ]

    def load_staged(self, shared: SharedMemory, fragment: int, weights: Expr, parts: Sequence[Sequence[Expr]]) -> None:
        """Load a fragment of a chunk.

        Parameters
        ----------
        weights : PrimExpr
            Offset in shared memory of the chunk's weights.
        parts : sequence of sequences of PrimExpr
            Offsets of the scales, and of the zero points, of 16 columns: one per scale of the chunk.
        """
        ptx.load_shared([self.bits[fragment * 4 + i] for i in range(4)], shared.at(weights + self.lane * 16))
        self.load_parts(shared, fragment, parts)

    def load_parts(
        self, shared: SharedMemory, fragment: int, parts: Sequence[Sequence[Expr]], first_scale: int = 0
    ) -> None:
        """Load scales, and zero points, of a fragment of a chunk; `parts` as in `load_staged`, from a scale on."""
        scaled = self.work.scaled
        for words, dtype, offsets in zip(self.words, self.types, parts, strict=True):
            size = bytes_of(dtype)
            words_per_value = max(1, size // 2)
            for number, offset in enumerate(offsets, first_scale):
                first = (fragment * scaled + number) * words_per_value
                targets = [words[first + i] for i in range(words_per_value)]
                address = shared.at(offset + self.high * (2 * size))
                ptx.load_shared(targets, address, "u16" if size == 1 else "u32")

    def _loaded_value(self, part: int, index: int) -> Expr:
        dtype, words = self.types[part], self.words[part]
        if bytes_of(dtype) == 4:
            return T.reinterpret(dtype, words[index])
        word, half = words[index // 2], index % 2
        if bytes_of(dtype) == 1:
            return T.Cast("uint8", word >> T.uint16(8)) if half else T.Cast("uint8", word & T.uint16(255))
        bits = T.Cast("uint16", word >> T.uint32(16)) if half else T.Cast("uint16", word & T.uint32(0xFFFF))
        return T.reinterpret(dtype, bits)

    def _scale(self, index: int) -> Expr:
        return self._loaded_value(0, index)

    def _point(self, index: int) -> Expr:
        return self._loaded_value(1, index)
