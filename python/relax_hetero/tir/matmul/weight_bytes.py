"""Weights in panels as bytes: four neighbours along k of a column in each lane of 32 bits, as dot products take them.

Four fields of a lane, or of several, are moved to its bytes. Which four is chosen so that few instructions do it:
fields of 2 and 4 bits lie right already but for a shift, and one instruction moves four fields of one lane where the
CPU has it. The left operand's bytes are put in the same order once (`byte_order`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tvm import tirx

from ...encoding.block_panels import GROUPS
from ...target.cpu_target import CpuTarget
from ..core.builder import Expr, constant, lane_indices, let, vector_type
from .weight_unpacking import PanelReader

_PICK = "llvm.x86.avx512.pmultishift.qb.512"
"""Eight bytes from any bits of every 64 (Intel SDM: VPMULTISHIFTQB)."""

_OFFSET = 128
"""Codes of 8 bits are stored as signed bytes, and multiplied as unsigned ones."""

_LEFT_OVER = {
    5: [(0, 30, 2, 16), (1, 30, 2, 18), (2, 30, 1, 20), (2, 31, 1, 24), (3, 30, 2, 25), (4, 30, 2, 27)],
    6: [(0, 30, 2, 24), (1, 30, 2, 26), (2, 30, 2, 28)],
}
"""The last fields of a group, by bits: from which lane, its bits from which on, how many, and to which bit."""


def byte_order(bits: int) -> list[int]:
    """Positions in a group of the weights that stand in bytes, four of a lane after four."""
    if bits == 8:
        return list(range(GROUPS[8]))
    if bits < 5:
        per, step = 32 // bits, 8 // bits
        firsts = [word * per + quad for word in range(GROUPS[bits] // per) for quad in range(step)]
        return [first + step * at for first in firsts for at in range(4)]
    if bits == 5:
        quads = [6 * word + at for word in range(5) for at in range(4)]
        return [*quads, 4, 5, 10, 11, 16, 17, 22, 23, 28, 29, 30, 31]
    return [*(5 * word + at for word in range(3) for at in range(4)), 4, 9, 14, 15]


@dataclass(frozen=True)
class ByteReader:
    """Reads a panel's weights as bytes.

    Attributes
    ----------
    panel : PanelReader
    picks : bool
        Whether the CPU moves four fields of a lane by one instruction.
    """

    panel: PanelReader
    picks: bool

    @staticmethod
    def of(panel: PanelReader, cpu: CpuTarget) -> ByteReader:
        """For a CPU."""
        return ByteReader(panel, "avx512vbmi" in cpu.features and panel.lanes == 16)

    def group(self, record: Expr, number: Expr, vector: Expr) -> Iterator[Expr]:
        """The bytes of a group of a record, for a vector of columns: four of each column after four."""
        plan, lanes, columns = self.panel.plan, self.panel.lanes, self.panel.plan.columns
        if plan.form.bits == 8:
            yield from self._of_rows(record, number * plan.group, vector)
            return
        first = record + plan.places["codes"] // 4 + number * (plan.words * columns) + vector * lanes
        memory = self.panel.elements["int32"]
        words = [let(memory[lane_indices(first + word * columns, lanes)]) for word in range(plan.words)]
        yield from {2: self._shifted, 4: self._shifted, 5: self._of_5_bits, 6: self._of_6_bits}[plan.form.bits](words)

    def _shifted(self, words: list[Expr]) -> Iterator[Expr]:
        bits = self.panel.plan.form.bits
        for word in words:
            for quad in range(8 // bits):
                moved = tirx.shift_right(word, self._bits(quad * bits)) if quad else word
                yield let(tirx.bitwise_and(moved, self._in_bytes((1 << bits) - 1)))

    def _of_5_bits(self, words: list[Expr]) -> Iterator[Expr]:
        for word in words:
            yield self._first_four(word, 5)
        for first in (0, 2):
            moves = [(word, bit, 5, to) for word, bit, to in ((0, 20, 0), (0, 25, 8), (1, 20, 16), (1, 25, 24))]
            yield self._moved(words[first : first + 2], moves)
        yield self._moved(words, [(4, 20, 5, 0), (4, 25, 5, 8), *_LEFT_OVER[5]])

    def _of_6_bits(self, words: list[Expr]) -> Iterator[Expr]:
        for word in words:
            yield self._first_four(word, 6)
        yield self._moved(words, [(0, 24, 6, 0), (1, 24, 6, 8), (2, 24, 6, 16), *_LEFT_OVER[6]])

    def _first_four(self, word: Expr, bits: int) -> Expr:
        """The four lowest fields of a lane."""
        if not self.picks:
            return self._moved([word], [(0, bits * at, bits, 8 * at) for at in range(4)])
        kind = "int8x64"
        from_bits = [32 * half + bits * at for half in range(2) for at in range(4)]
        order = tirx.Broadcast(tirx.const(int.from_bytes(bytes(from_bits), "little"), "int64"), 8)
        picked = tirx.call_llvm_pure_intrin(kind, _PICK, tirx.reinterpret(kind, order), tirx.reinterpret(kind, word))
        return let(tirx.bitwise_and(tirx.reinterpret("int32x16", picked), self._in_bytes((1 << bits) - 1)))

    def _moved(self, words: list[Expr], moves: list[tuple[int, int, int, int]]) -> Expr:
        """Bits of some lanes, moved to others of one lane."""
        found = None
        for word, bit, count, to in moves:
            lane = words[word]
            if bit > to:
                lane = tirx.shift_right(lane, self._bits(bit - to))
            elif to > bit:
                lane = tirx.shift_left(lane, self._bits(to - bit))
            part = tirx.bitwise_and(lane, self._bits(((1 << count) - 1) << to))
            found = part if found is None else tirx.bitwise_or(found, part)
        return let(found)

    def _of_rows(self, record: Expr, k: Expr, vector: Expr) -> Iterator[Expr]:
        """Codes of 8 bits: rows of a panel's columns, four of which make one vector of lanes."""
        plan, lanes, columns = self.panel.plan, self.panel.lanes, self.panel.plan.columns
        memory = self.panel.elements["int8"]
        first = record * 4 + plan.places["codes"] + k * columns + vector * lanes
        run = columns + lanes  # of one row, what lies between, and of the next one
        order = [half * run + row * columns + lane for lane in range(lanes) for half in (0, 1) for row in (0, 1)]
        for quad in range(plan.group // 4):
            halves = [memory[lane_indices(first + (4 * quad + row) * columns, run)] for row in (0, 2)]
            mixed = tirx.reinterpret(vector_type("int32", lanes), tirx.Shuffle(halves, order))
            yield let(tirx.bitwise_xor(mixed, self._in_bytes(_OFFSET)))

    def _in_bytes(self, value: int) -> Expr:
        """A number in each byte."""
        return self._bits(int.from_bytes(bytes([value] * 4), "little", signed=True))

    def _bits(self, value: int) -> Expr:
        return constant(value - (1 << 32) if value >= 1 << 31 else value, "int32", self.panel.lanes)
