"""Packed weights as bytes: four neighbours along k of a column in each lane of 32 bits, as byte dot products need.

Four quants of one or several lanes are moved to the bytes of a lane. Their order minimizes instructions: 2- and 4-bit
quants need only a shift, and VPMULTISHIFTQB moves four quants of a lane. The left operand's bytes are stored in the
same order (`byte_order`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tvm import tirx

from ...encoding.block_formats import BlockFormat
from ...encoding.block_panels import GROUPS
from ...target.cpu_target import CpuTarget
from ..core.builder import Expr, constant, lane_indices, let, vector_type
from .weight_unpacking import PanelReader

_PICK = "llvm.x86.avx512.pmultishift.qb.512"  # eight bytes from any bits of every 64 (Intel SDM: VPMULTISHIFTQB)

_LOOKUP = {
    "avx512": "llvm.x86.avx512.pshuf.b.512",
    "avx2": "llvm.x86.avx2.pshuf.b",
    "sse": "llvm.x86.ssse3.pshuf.b.128",
    "neon": "llvm.aarch64.neon.tbl1.v16i8",
}
"""Look-up in a table of 16 bytes, repeated in each 128 bits, by the low four bits of every byte (Intel SDM: PSHUFB; Arm
ARM: TBL); keys are instruction sets."""

_OFFSET = 128  # 8-bit quants are stored as signed bytes, and multiplied as unsigned bytes

_TAIL_MOVES = {
    5: [(0, 30, 2, 16), (1, 30, 2, 18), (2, 30, 1, 20), (2, 31, 1, 24), (3, 30, 2, 25), (4, 30, 2, 27)],
    6: [(0, 30, 2, 24), (1, 30, 2, 26), (2, 30, 2, 28)],
}
"""Moves (lane, from bit, bits, to bit) of the last quants of a group, by bits of a quant."""


def byte_order(bits: int) -> list[int]:
    """Positions in a group of the weights in byte order, four of each lane at a time."""
    if bits == 8:
        return list(range(GROUPS[8]))
    if bits == 3:
        return byte_order(2)
    if bits < 5:
        per, step = 32 // bits, 8 // bits
        firsts = [word * per + quad for word in range(GROUPS[bits] // per) for quad in range(step)]
        return [first + step * at for first in firsts for at in range(4)]
    if bits == 5:
        quads = [6 * word + at for word in range(5) for at in range(4)]
        return [*quads, 4, 5, 10, 11, 16, 17, 22, 23, 28, 29, 30, 31]
    return [*(5 * word + at for word in range(3) for at in range(4)), 4, 9, 14, 15]


def max_code(form: BlockFormat) -> int:
    """The largest of the unsigned bytes of a format's weights."""
    return max(form.codes) - form.min_code if form.codes else (1 << form.bits) - 1


@dataclass(frozen=True)
class ByteReader:
    """Reads a panel's weights as bytes."""

    panel: PanelReader
    picks: bool  # whether the CPU moves four quants of a lane with one instruction
    lookup: str  # LLVM intrinsic that looks bytes up in a table
    shifts_bytes: bool  # whether the CPU shifts each byte of a vector, as NEON does and x86 does not
    # Whether bytes are signed codes, of formats of 8 bits or with a table; else they are codes less `min_code`.
    is_signed: bool = False

    @staticmethod
    def of(panel: PanelReader, cpu: CpuTarget, is_signed: bool = False) -> ByteReader:
        """The reader for a CPU."""
        picks = "avx512vbmi" in cpu.features and panel.lanes == 16
        return ByteReader(panel, picks, _LOOKUP[cpu.isa.name], cpu.isa.name == "neon", is_signed)

    @property
    def min_code(self) -> int:
        """Code of a byte of zero."""
        return 0 if self.is_signed else self.panel.plan.form.min_code

    def group(self, superblock: Expr, number: Expr, vector: Expr) -> Iterator[Expr]:
        """The bytes of a group of a superblock for a vector of columns, four of each column at a time."""
        plan, lanes, columns = self.panel.plan, self.panel.lanes, self.panel.plan.columns
        if plan.form.bits == 8:
            yield from self._read_bytes(superblock, number * plan.group, vector)
            return
        first = superblock + plan.offsets["codes"] // 4 + number * (plan.group_bytes // 4) + vector * lanes
        memory = self.panel.elements["int32"]
        words = [let(memory[lane_indices(first + word * columns, lanes)]) for word in range(plan.words)]
        if plan.form.bits == 3:
            yield from self._unpack_3_bits(words[0], self.panel.high_halves(superblock, number, vector))
            return
        yield from {
            1: self._unpack_whole_fields,
            2: self._unpack_whole_fields,
            4: self._unpack_whole_fields,
            5: self._unpack_5_bits,
            6: self._unpack_6_bits,
        }[plan.form.bits](words)

    def _unpack_whole_fields(self, words: list[Expr]) -> Iterator[Expr]:
        bits = self.panel.plan.form.bits
        for word in words:
            for quad in range(8 // bits):
                if self.shifts_bytes and (quad + 1) * bits == 8:
                    yield self._codes(self._highest_fields(word))
                    continue
                shifted = tirx.shift_right(word, self._bits(quad * bits)) if quad else word
                yield self._codes(let(tirx.bitwise_and(shifted, self._splat_byte((1 << bits) - 1))))

    def _highest_fields(self, word: Expr) -> Expr:
        """The highest quant of each byte, which needs no mask if bytes are shifted."""
        kind, bits = f"uint8x{4 * self.panel.lanes}", self.panel.plan.form.bits
        shifted = tirx.shift_right(tirx.reinterpret(kind, word), constant(8 - bits, "uint8", 4 * self.panel.lanes))
        return let(tirx.reinterpret(f"int32x{self.panel.lanes}", shifted))

    def _unpack_3_bits(self, word: Expr, high: Expr) -> Iterator[Expr]:
        # In the low bits of each byte are those of the weights that share a byte of the low plane.
        apart = let(tirx.bitwise_or(high, tirx.shift_left(high, self._bits(12))))
        for quad in range(4):
            low_bits = tirx.bitwise_and(tirx.shift_right(word, self._bits(2 * quad)), self._splat_byte(3))
            shifted = tirx.shift_right(tirx.shift_left(apart, self._bits(2)), self._bits(quad))
            yield self._codes(let(tirx.bitwise_or(low_bits, tirx.bitwise_and(shifted, self._splat_byte(4)))))

    def _codes(self, quants: Expr) -> Expr:
        """Codes of quants less the smallest one, where codes are from a table."""
        form, lanes = self.panel.plan.form, self.panel.lanes
        kind = f"int8x{4 * lanes}"
        if not form.codes:
            return quants
        table = bytes(code - self.min_code & 255 for code in form.codes) * (16 // len(form.codes))
        halves = [tirx.const(int.from_bytes(table[i : i + 8], "little", signed=True), "int64") for i in (0, 8)]
        table_vector = tirx.reinterpret(kind, tirx.Shuffle(halves * (lanes // 4), list(range(lanes // 2))))
        picked = tirx.call_llvm_pure_intrin(kind, self.lookup, table_vector, tirx.reinterpret(kind, quants))
        return let(tirx.reinterpret(f"int32x{lanes}", picked))

    def _unpack_5_bits(self, words: list[Expr]) -> Iterator[Expr]:
        for word in words:
            yield self._low_four(word, 5)
        for first in (0, 2):
            moves = [(word, bit, 5, to) for word, bit, to in ((0, 20, 0), (0, 25, 8), (1, 20, 16), (1, 25, 24))]
            yield self._move_bits(words[first : first + 2], moves)
        yield self._move_bits(words, [(4, 20, 5, 0), (4, 25, 5, 8), *_TAIL_MOVES[5]])

    def _unpack_6_bits(self, words: list[Expr]) -> Iterator[Expr]:
        for word in words:
            yield self._low_four(word, 6)
        yield self._move_bits(words, [(0, 24, 6, 0), (1, 24, 6, 8), (2, 24, 6, 16), *_TAIL_MOVES[6]])

    def _low_four(self, word: Expr, bits: int) -> Expr:
        """The four lowest quants of a lane."""
        if not self.picks:
            return self._move_bits([word], [(0, bits * at, bits, 8 * at) for at in range(4)])
        kind = "int8x64"
        from_bits = [32 * half + bits * at for half in range(2) for at in range(4)]
        order = tirx.Broadcast(tirx.const(int.from_bytes(bytes(from_bits), "little"), "int64"), 8)
        picked = tirx.call_llvm_pure_intrin(kind, _PICK, tirx.reinterpret(kind, order), tirx.reinterpret(kind, word))
        return let(tirx.bitwise_and(tirx.reinterpret("int32x16", picked), self._splat_byte((1 << bits) - 1)))

    def _move_bits(self, words: list[Expr], moves: list[tuple[int, int, int, int]]) -> Expr:
        """A lane of bits moved from other lanes."""
        joined = None
        for word, bit, count, to in moves:
            lane = words[word]
            if bit > to:
                lane = tirx.shift_right(lane, self._bits(bit - to))
            elif to > bit:
                lane = tirx.shift_left(lane, self._bits(to - bit))
            bits = tirx.bitwise_and(lane, self._bits(((1 << count) - 1) << to))
            joined = bits if joined is None else tirx.bitwise_or(joined, bits)
        return let(joined)

    def _read_bytes(self, superblock: Expr, k: Expr, vector: Expr) -> Iterator[Expr]:
        """8-bit quants: four rows of a panel's columns interleaved to a vector of lanes."""
        plan, lanes, columns = self.panel.plan, self.panel.lanes, self.panel.plan.columns
        memory = self.panel.elements["int8"]
        first = superblock * 4 + plan.offsets["codes"] + k * columns + vector * lanes
        run = columns + lanes  # from the first lane of one row to the last lane of the next
        order = [half * run + row * columns + lane for lane in range(lanes) for half in (0, 1) for row in (0, 1)]
        for quad in range(plan.group // 4):
            halves = [memory[lane_indices(first + (4 * quad + row) * columns, run)] for row in (0, 2)]
            mixed = tirx.reinterpret(vector_type("int32", lanes), tirx.Shuffle(halves, order))
            yield let(mixed if self.is_signed else tirx.bitwise_xor(mixed, self._splat_byte(_OFFSET)))

    def _splat_byte(self, value: int) -> Expr:
        """A constant in each byte."""
        return self._bits(int.from_bytes(bytes([value] * 4), "little", signed=True))

    def _bits(self, value: int) -> Expr:
        return constant(value - (1 << 32) if value >= 1 << 31 else value, "int32", self.panel.lanes)
