"""Reductions in which every lane accumulates a result of its own."""

from __future__ import annotations

from tvm import tirx

from ...target.cpu_target import Machine
from ..core.builder import Expr, either, int64, when
from .boxes import is_choice
from .combining import combined, is_number
from .flat import FlatBox, Loop, is_step
from .loop_code import nested, run, spread
from .nests import Sum
from .stages import replaced, variables
from .vector_code import LANE, reading, slot, store, write_point
from .vectors import chooses, lanes_of, varies_inside

# Vectors of results that are accumulated at once.
_TOGETHER = 4
# Reductions of up to so many terms are written out.
_WRITTEN_OUT = 32
# Rows that are computed together where they read the same vectors, from so many terms on.
_ROWS, _WORTH_ROWS = 4, 8

Row = tuple[FlatBox, list[dict[tirx.Buffer, tirx.Buffer]]]
"""A row of results: what is computed, and for each of its vectors the slots of the sums."""


class AlongResults:
    """Every lane accumulates a result of its own.

    Where rows share what they read, as those of a matrix product do, several are computed together.
    """

    def __init__(self, box: FlatBox, machine: Machine) -> None:
        self.box = box
        self.var = box.spatial[-1].var if box.spatial else None
        scalar = self.var is None or varies_inside(box, self.var)
        self.lanes = 1 if scalar else lanes_of(box.nest, machine)
        self.rows = self._shared_rows()
        self.together = _TOGETHER if self.rows is None or machine.isa.registers >= 32 else _TOGETHER // 2

    def _shared_rows(self) -> tirx.Var | None:
        """The variable of rows that read the same vectors and are long enough to gain from it."""
        values = [s.value for s in self.box.nest.sums]
        if self.lanes == 1 or any(map(chooses, values)) or _terms(self.box) < _WORTH_ROWS:
            return None
        for loop in reversed(self.box.spatial[:-1]):
            by_row = [step for value in values for step in self.box.strides(value, loop.var)]
            along = [step for value in values for step in self.box.strides(value, self.var)]
            shares = any(is_step(row, 0) and is_step(step, 1) for row, step in zip(by_row, along, strict=True))
            if shares and not all(is_step(row, 0) for row in by_row):
                return loop.var
        return None

    def write(self, tasks: int) -> None:
        """Write the loops, shared among tasks."""

        def write(part: FlatBox) -> None:
            if self.var is None:
                self._visit([part], tirx.IntImm("int64", 0), 1, 1)
                return
            rows = next((loop for loop in part.spatial[:-1] if loop.var is self.rows), None)
            with nested([loop for loop in part.spatial[:-1] if loop is not rows]) as position:
                here = part.at(position)
                if rows is None:
                    self._row_of_vectors([here])
                else:
                    self._several_rows(here, rows)

        spread(self.box, tasks, self.lanes * self.together, write)

    def _several_rows(self, box: FlatBox, rows: Loop) -> None:
        def at(first: Expr, count: int) -> None:
            self._row_of_vectors([box.at({rows.var: first + i}) for i in range(count)])

        run(rows, 1, _ROWS, False, lambda first, _lanes, count: at(first, count))

    def _row_of_vectors(self, rows: list[FlatBox]) -> None:
        overlap = not self.box.nest.in_place
        run(rows[0].spatial[-1], self.lanes, self.together, overlap, lambda *at: self._visit(rows, *at))

    def _visit(self, rows: list[FlatBox], start: Expr, lanes: int, count: int) -> None:
        sums = self.box.nest.sums
        group: list[Row] = [
            (row, [{s.buffer: slot(s.buffer.dtype, lanes) for s in sums} for _ in range(count)]) for row in rows
        ]
        for row, slots in group:
            for held in slots:
                for s in row.nest.sums:
                    store(held[s.buffer], s.initial, LANE, lanes)
        # The borders of an image, where terms are left out, are not worth code of their own for every term.
        few = _terms(self.box) * count * len(rows) <= 2 * _WRITTEN_OUT and not any(chooses(s.value) for s in sums)
        self._reduce(group, list(self.box.reduced), few, start, lanes)
        for row, slots in group:
            for i, held in enumerate(slots):
                write_point(row, self.var, start + i * lanes, lanes, held)

    def _reduce(self, group: list[Row], loops: list[Loop], written_out: bool, start: Expr, lanes: int) -> None:
        if loops:
            if written_out and _is_known(loops[0]):
                for i in range(loops[0].begin, loops[0].end):
                    inner = [(row.at({loops[0].var: int64(i)}), slots) for row, slots in group]
                    self._reduce(inner, loops[1:], written_out, start, lanes)
            else:
                with nested(loops[:1]) as position:
                    inner = [(row.at(position), slots) for row, slots in group]
                    self._reduce(inner, loops[1:], written_out, start, lanes)
            return
        for row, slots in group:
            sums = row.nest.sums
            if len(sums) == 1 and self._by_choice(sums[0], start, lanes, slots):
                continue
            for i, held in enumerate(slots):
                self._accumulate([s.value for s in sums], sums, start + i * lanes, lanes, held)

    def _by_choice(self, s: Sum, start: Expr, lanes: int, slots: list[dict[tirx.Buffer, tirx.Buffer]]) -> bool:
        """Have all vectors choose at once where a term is one of two."""
        parts = combined(s)
        if parts is None or not is_choice(parts.term) or (self.var in variables(parts.term.args[0])):
            return False
        condition, then, otherwise = parts.term.args
        own = tirx.BufferLoad(s.buffer, [int64(0)])

        def accumulate(term: Expr) -> None:
            for i, held in enumerate(slots):
                self._accumulate([parts.combine(own, term)], [s], start + i * lanes, lanes, held)

        if is_number(otherwise, parts.neutral):
            with when(condition):
                accumulate(then)
        else:
            either(condition, lambda: accumulate(then), lambda: accumulate(otherwise))
        return True

    def _accumulate(
        self, values: list[Expr], sums: list[Sum], start: Expr, lanes: int, held: dict[tirx.Buffer, tirx.Buffer]
    ) -> None:
        new = [slot(s.buffer.dtype, lanes) for s in sums] if len(sums) > 1 else []
        for i, (s, value) in enumerate(zip(sums, values, strict=True)):
            at = replaced(value, {self.var: start + LANE}) if self.var is not None else value
            store(new[i] if new else held[s.buffer], reading(at, held, {}), LANE, lanes)
        for s, fresh in zip(sums, new, strict=False):
            store(held[s.buffer], tirx.BufferLoad(fresh, [LANE]), LANE, lanes)


def _terms(box: FlatBox) -> int:
    """How many terms a result has; many where that is unknown."""
    terms = 1
    for loop in box.reduced:
        terms *= loop.count if isinstance(loop.count, int) else _WRITTEN_OUT
    return terms


def _is_known(loop: Loop) -> bool:
    return isinstance(loop.begin, int) and isinstance(loop.end, int)
