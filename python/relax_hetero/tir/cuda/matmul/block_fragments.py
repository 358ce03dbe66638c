"""Weights of 4 or 8 bits as fragments of tensor cores: a lane's words from memory, unpacked in registers.

Bits of a weight become those of a 16-bit float as the last ones of a power of two, which is taken away with the zero
point: 1024 and w is the float16 of exponent 10 with the bits of w at its end.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.block_weights import FRAGMENT_COLUMNS, middle_of
from ....target.gpu_target import WARP
from ...core.builder import Expr, int64, minimum
from ..core import ptx
from ..core.launch import local
from ..core.operand import GpuOperand
from .block_plan import STEP, BlockWork

_ONE = {"float16": 0x3C003C00, "bfloat16": 0x3F803F80}
"""A pair of ones."""
_POWER = {"float16": 0x64006400, "bfloat16": 0x43004300}
"""A pair of 1024, or of 128."""
_MINUS_POWER = {"float16": 0xE400, "bfloat16": 0xC300}
_SIXTEENTH = 0x2C002C00  # a pair of float16
_BYTE_POWER, _MINUS_BYTE_POWER = 0x4B000000, 0xCB000000  # 2 ** 23 as a float32


class WeightFragments:
    """The weights of a warp's lane, while its kernel is written.

    Parameters
    ----------
    work : BlockWork
    packed : list of GpuOperand
        Weights, scales and perhaps zero points, opened.
    lane, high : PrimExpr
        Number of the lane in its warp, and which of eight columns it has.
    """

    def __init__(self, work: BlockWork, packed: list[GpuOperand], lane: Expr, high: Expr) -> None:
        self.work, self.lane, self.high = work, lane, high
        self.type, self.is_bytes = work.type, work.problem.bits == 8
        self.weight, self.scales = packed[0].data, packed[1].data
        self.zeros = packed[2].data if len(packed) > 2 else None
        held = work.plan.ahead * work.plan.fragments
        self.bits = local(held * 4, "uint32")
        self.scale_bits = local(held * work.scaled * 2, str(self.scales.dtype))
        self.point_bits: Any = None
        if self.zeros is not None:
            self.point_bits = local(held * work.scaled * 2, str(self.zeros.dtype))
        self.fragment, self.points, self.wide = local(4, "uint32"), local(4, "uint32"), local(2, "float32")

    @property
    def has_minimums(self) -> bool:
        """True if a block's minimum is added to its weights, times their scale."""
        form = self.work.problem.form
        return form is not None and bool(form.minimum)

    @property
    def has_any_points(self) -> bool:
        """True if zero points, or minimums, are any numbers: they are multiplied by the sums of the left operand."""
        return self.zeros is not None and str(self.zeros.dtype) != "uint8"

    @property
    def ones(self) -> list[Expr]:
        """The fragment whose product with the left operand is its sums."""
        return [T.uint32(_ONE[self.type])] * 4

    def load(self, slot: int, tile_of_block: Expr, chunk: Expr) -> None:
        """Ask for the weights of a chunk, and for their scales and zero points."""
        work = self.work
        for fragment in range(work.plan.fragments):
            tile = tile_of_block * work.plan.fragments + fragment
            if work.tiles % work.plan.fragments:
                tile = minimum(tile, int64(work.tiles - 1))
            at = ((tile * work.chunks + chunk) * WARP + self.lane) * 4
            number_of_fragment = slot * work.plan.fragments + fragment
            targets = [self.bits[number_of_fragment * 4 + i] for i in range(4)]
            ptx.stream_global(targets, T.address_of(self.weight[at]))
            for number in range(work.scaled):
                scale = tirx.floordiv(chunk * work.chunk + number * work.steps * STEP, work.problem.block)
                if work.chunks * work.chunk > work.blocks * work.problem.block:
                    scale = minimum(scale, int64(work.blocks - 1))
                at = ((tile * work.blocks + scale) * (FRAGMENT_COLUMNS // 2) + self.high) * 2
                first = (number_of_fragment * work.scaled + number) * 2
                for held, data in ((self.scale_bits, self.scales), (self.point_bits, self.zeros)):
                    if data is not None:
                        where = T.ramp(tirx.const(first, "int32"), 1, 2)
                        T.buffer_store(held, data[T.ramp(at, int64(1), 2)], [where])

    def scale(self, slot: int, fragment: int, number: int, half: int) -> Expr:
        """The scale of one of a lane's two columns, float32, for the steps `number` of a chunk."""
        return T.bind(T.cast(self._scale(self._place(slot, fragment, number) + half), "float32"))

    def point(self, slot: int, fragment: int, number: int, half: int) -> Expr:
        """Rest of a zero point that is any number, once `unpack` has taken the middle from the weights."""
        point = self._point(self._place(slot, fragment, number) + half)
        return point - T.float32(middle_of(self.work.problem.bits))

    def minimum(self, slot: int, fragment: int, number: int, half: int, scale: Expr) -> Expr:
        """Minimum that every weight of a block has beside its scaled code, which `unpack` counts from the middle on."""
        form, bits = self.work.problem.form, self.work.problem.bits
        assert form is not None, "only formats of files have minimums"
        value = T.cast(self._point(self._place(slot, fragment, number) + half), "float32")
        lowest = middle_of(bits) + form.min_code if bits == form.bits else 0
        return T.bind(value + scale * T.float32(lowest) if lowest else value)

    def _place(self, slot: int, fragment: int, number: int) -> int:
        return ((slot * self.work.plan.fragments + fragment) * self.work.scaled + number) * 2

    def _scale(self, at: int) -> Expr:
        """A scale that was loaded, of its own type."""
        return self.scale_bits[at]

    def _point(self, at: int) -> Expr:
        """A zero point or minimum that was loaded, of its own type."""
        return self.point_bits[at]

    def begin(self, slot: int, fragment: int, number: int) -> None:
        """Make what `unpack` adds to the weights of both columns of a lane: minus the power of two and zero point."""
        middle, is_half = middle_of(self.work.problem.bits), self.type == "float16"
        at = self._place(slot, fragment, number)
        for half in range(2):
            point: Expr = T.uint32(middle)
            if self.zeros is not None and not self.has_any_points:
                point = T.cast(self._point(at + half), "uint32")
            if self.is_bytes and not is_half:
                T.buffer_store(self.points, T.uint32(_MINUS_BYTE_POWER) | point, [half])
                continue
            pair = T.uint32(_MINUS_POWER[self.type] * 0x10001) | point | (point << T.uint32(16))
            T.buffer_store(self.points, pair, [half])
            if is_half and not self.is_bytes:  # -(1024 + z) + 960
                ptx.add_pair(self.points[half + 2], self.points[half], T.uint32(0x63806380))

    def unpack(self, slot: int, fragment: int, step: int) -> list[Expr]:
        """The fragment of a lane's eight weights of a step: those of both columns, less their zero points."""
        work = self.work
        first = (slot * work.plan.fragments + fragment) * 4 + step * work.words
        words = [self.bits[first + i] for i in range(work.words)]
        for i in range(4):
            half, pair = i % 2, i // 2
            if self.is_bytes:
                self._of_bytes(i, words[pair], half)
            elif self.type == "float16":
                # Those of the second column stay four bits further up: the weight is 16 times as much beside 1024, and
                # a sixteenth of both is 64 and it.
                if half == 0:
                    word = words[0] if pair == 0 else T.bind(words[0] >> T.uint32(8))
                self._of_nibbles(i, word, 0x00F000F0 if half else 0x000F000F, half + 2 if half else 0)
            else:
                self._of_nibbles(i, words[0] if i == 0 else words[0] >> T.uint32(4 * i), 0x000F000F, half)
        return [self.fragment[i] for i in range(4)]

    def _of_nibbles(self, i: int, word: Expr, mask: int, point: int) -> None:
        target, factor = self.fragment[i], _ONE[self.type] if mask == 0x000F000F else _SIXTEENTH
        ptx.and_or(target, word, mask, _POWER[self.type])
        ptx.multiply_add_pair(target, target, T.uint32(factor), self.points[point], self.type)

    def _of_bytes(self, i: int, word: Expr, half: int) -> None:
        target = self.fragment[i]
        if self.type == "float16":
            ptx.pick_bytes(target, word, T.uint32(_POWER["float16"]), 0x5352 if half else 0x5150)
            ptx.add_pair(target, target, self.points[half])
            return
        for one in range(2):  # a bfloat16 beside its power has no room for eight bits
            ptx.pick_bytes(target, word, T.uint32(_BYTE_POWER), 0x7650 + 2 * half + one)
            number = T.reinterpret("float32", target) + T.reinterpret("float32", self.points[half])
            T.buffer_store(self.wide, number, [one])
        ptx.pack_pair(target, self.wide[0], self.wide[1], "bfloat16")
