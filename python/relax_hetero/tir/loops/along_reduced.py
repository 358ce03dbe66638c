"""Reductions in which every lane accumulates a part of one result."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...target.cpu_target import Machine
from ..core.builder import Expr, int64
from .combining import Combined, parts_of
from .flat import FlatBox
from .loop_code import nested, run, spread
from .stages import replaced
from .vector_code import LANE, slot, store, write_point
from .vectors import lanes_of

# Vectors that are accumulated at once: an addition takes about so many cycles.
_TOGETHER = 4


class AlongReduced:
    """Every lane accumulates a part of one result; the parts are combined at the end."""

    def __init__(self, box: FlatBox, machine: Machine, along: int) -> None:
        self.box, self.along = box, box.reduced[along]
        self.others = [loop for loop in box.reduced if loop is not self.along]
        self.lanes = lanes_of(box.nest, machine)
        count = self.along.count
        while isinstance(count, int) and self.lanes > 1 and self.lanes > count:
            self.lanes //= 2
        self.together = _TOGETHER if not isinstance(count, int) else max(1, min(_TOGETHER, count // self.lanes))

    def write(self, tasks: int) -> None:
        def write(part: FlatBox) -> None:
            with nested(part.spatial) as position:
                self._row(part.at(position))

        spread(self.box, tasks, 1, write)

    def _row(self, box: FlatBox) -> None:
        parts = parts_of(box)
        wide = [[slot(p.sum.buffer.dtype, self.lanes) for p in parts] for _ in range(self.together)]
        narrow = [slot(p.sum.buffer.dtype, 1) for p in parts]
        zero = int64(0)
        for registers in wide:
            for p, register in zip(parts, registers, strict=True):
                store(register, p.neutral, LANE, self.lanes)
        for p, single in zip(parts, narrow, strict=True):
            T.buffer_store(single, p.sum.initial, [zero])
        with nested(self.others) as position:
            inner = parts_of(box.at(position))

            def visit(start: Expr, lanes: int, count: int) -> None:
                for i in range(count):
                    if lanes == self.lanes:
                        self._accumulate(inner, start + i * lanes, lanes, wide[i])
                    else:
                        self._few(inner, start, lanes, narrow)

            run(self.along, self.lanes, self.together, False, visit)
        for n, (p, single) in enumerate(zip(parts, narrow, strict=True)):
            self._combine(p, [registers[n] for registers in wide], single)
        write_point(box, None, zero, 1, {p.sum.buffer: s for p, s in zip(parts, narrow, strict=True)})

    def _accumulate(self, parts: list[Combined], start: Expr, lanes: int, registers: list[tirx.Buffer]) -> None:
        for p, register in zip(parts, registers, strict=True):
            term = replaced(p.term, {self.along.var: start + LANE})
            store(register, p.combine(tirx.BufferLoad(register, [LANE]), term), LANE, lanes)

    def _few(self, parts: list[Combined], start: Expr, lanes: int, narrow: list[tirx.Buffer]) -> None:
        """Fewer terms than a vector holds, combined one after another."""
        terms = [slot(p.sum.buffer.dtype, lanes) for p in parts]
        for p, term in zip(parts, terms, strict=True):
            store(term, replaced(p.term, {self.along.var: start + LANE}), LANE, lanes)
        for p, term, single in zip(parts, terms, narrow, strict=True):
            self._fold(p, term, lanes, single)

    def _combine(self, p: Combined, registers: list[tirx.Buffer], single: tirx.Buffer) -> None:
        while len(registers) > 1:
            half = (len(registers) + 1) // 2
            for one, other in zip(registers, registers[half:], strict=False):
                both = p.combine(tirx.BufferLoad(one, [LANE]), tirx.BufferLoad(other, [LANE]))
                store(one, both, LANE, self.lanes)
            registers = registers[:half]
        self._fold(p, registers[0], self.lanes, single)

    def _fold(self, p: Combined, register: tirx.Buffer, lanes: int, single: tirx.Buffer) -> None:
        while lanes > 1:
            lanes //= 2
            both = p.combine(tirx.BufferLoad(register, [LANE]), tirx.BufferLoad(register, [LANE + lanes]))
            store(register, both, LANE, lanes)
        zero = int64(0)
        T.buffer_store(single, p.combine(tirx.BufferLoad(single, [zero]), tirx.BufferLoad(register, [zero])), [zero])
