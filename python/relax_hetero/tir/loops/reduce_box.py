"""Boxes with reductions: accumulators in registers, vectors along the results or along the reduced axis.

Along the results, every lane accumulates a result of its own (`AlongResults`); along the reduced axis, every lane
accumulates a part of one result, and the parts are combined at the end (`AlongReduced`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...target.cpu_target import CpuTarget
from ..core.builder import Expr, either, int64, when
from ..core.walks import replaced
from ..math.extremes import is_maximum, maximum, minimum, operands
from .boxes import is_choice
from .flat import FlatBox, Loop, is_step
from .loop_code import nested, share_among_tasks, vectorize_loop
from .nests import Sum
from .stages import Load, loads, variables
from .vector_code import LANE, chooses, lanes_of, reading, slot, store, varies_inside, write_point


def write_reduction(box: FlatBox, cpu: CpuTarget, tasks: int) -> None:
    """Write the loops of a box."""
    along = _reduced_vector(box, cpu)
    if along is not None:
        AlongReduced(box, cpu, along).write(tasks)
    else:
        AlongResults(box, cpu).write(tasks)


def _reduced_vector(box: FlatBox, cpu: CpuTarget) -> int | None:
    """The reduced loop to vectorize; None for vectors along the results."""
    if any(combined(s) is None or s.buffer.dtype == "bool" for s in box.nest.sums):
        return None
    values = [s.value for s in box.nest.sums]
    if box.spatial:
        var = box.spatial[-1].var
        contiguous = any(is_step(step, 1) for value in values for step in box.strides(value, var))
        wide = not isinstance(box.spatial[-1].count, int) or box.spatial[-1].count >= 4
        if contiguous and wide:
            return None
    for d, loop in enumerate(box.reduced):
        long = not isinstance(loop.count, int) or loop.count >= 8
        if long and any(is_step(step, 1) for value in values for step in box.strides(value, loop.var)):
            return None if varies_inside(box, loop.var) else d
    return None


_COMBINERS: dict[type, Callable[[Expr, Expr], Expr]] = {
    tirx.Add: lambda a, b: a + b,
    tirx.Mul: lambda a, b: a * b,
    # A comparison and a selection of the second where it fails: NaN among the terms is ignored.
    tirx.Max: lambda a, b: tirx.max(b, a),
    tirx.Min: lambda a, b: tirx.min(b, a),
}


@dataclass(frozen=True)
class Combined:
    """``buffer = combine(own, term)``, in any order of terms; `own` reads the buffer."""

    sum: Sum
    combine: Callable[[Expr, Expr], Expr]
    own: Expr
    term: Expr
    neutral: Expr


def combined(s: Sum) -> Combined | None:
    """The combination of a reduction, if it combines one term with the accumulator, or None."""
    kind = type(s.value)
    is_float_max = is_maximum(s.value)
    if kind not in _COMBINERS and is_float_max is None:
        return None
    one, other = (s.value.a, s.value.b) if is_float_max is None else operands(s.value)
    combine = _COMBINERS[kind] if is_float_max is None else maximum if is_float_max else minimum
    for own, term in ((one, other), (other, one)):
        if isinstance(own, Load) and own.source.same_as(s.buffer):
            if any(load.source.same_as(s.buffer) for load in loads(term)):
                return None
            dtype = s.buffer.dtype
            neutral = {tirx.Add: tirx.const(0, dtype), tirx.Mul: tirx.const(1, dtype)}.get(kind, s.initial)
            return Combined(s, combine, own, term, neutral)
    return None


def value_of(s: Sum) -> Expr:
    """The value that a reduction stores, with the operands of max and min in the order that ignores NaN."""
    parts = combined(s) if isinstance(s.value, (tirx.Max, tirx.Min)) else None
    return s.value if parts is None else parts.combine(parts.own, parts.term)


def parts_of(box: FlatBox) -> list[Combined]:
    """The combinations of a box's reductions."""
    return [c for c in (combined(s) for s in box.nest.sums) if c is not None]


def is_number(value: Expr, number: Expr) -> bool:
    """Return whether an expression is the constant `number`."""
    numbers = (tirx.IntImm, tirx.FloatImm)
    return isinstance(value, numbers) and isinstance(number, numbers) and value.value == number.value


_CHAINS = 4  # independent accumulators of one result; the latency of an addition in cycles


class AlongReduced:
    """Every lane accumulates a part of one result; the parts are combined at the end."""

    def __init__(self, box: FlatBox, cpu: CpuTarget, along: int) -> None:
        self.box, self.along = box, box.reduced[along]
        self.others = [loop for loop in box.reduced if loop is not self.along]
        self.lanes = lanes_of(box.nest, cpu)
        count = self.along.count
        while isinstance(count, int) and self.lanes > 1 and self.lanes > count:
            self.lanes //= 2
        self.together = _CHAINS if not isinstance(count, int) else max(1, min(_CHAINS, count // self.lanes))

    def write(self, tasks: int) -> None:
        """Write the loops over all rows, in `tasks` parallel parts."""

        def write(part: FlatBox) -> None:
            with nested(part.spatial) as position:
                self._row(part.at(position))

        share_among_tasks(self.box, tasks, 1, write)

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
                        self._accumulate_tail(inner, start, lanes, narrow)

            vectorize_loop(self.along, self.lanes, self.together, False, visit)
        for n, (p, single) in enumerate(zip(parts, narrow, strict=True)):
            self._combine(p, [registers[n] for registers in wide], single)
        write_point(box, None, zero, 1, {p.sum.buffer: s for p, s in zip(parts, narrow, strict=True)})

    def _accumulate(self, parts: list[Combined], start: Expr, lanes: int, registers: list[tirx.Buffer]) -> None:
        for p, register in zip(parts, registers, strict=True):
            term = replaced(p.term, {self.along.var: start + LANE})
            store(register, p.combine(tirx.BufferLoad(register, [LANE]), term), LANE, lanes)

    def _accumulate_tail(self, parts: list[Combined], start: Expr, lanes: int, narrow: list[tirx.Buffer]) -> None:
        """Combine the terms of a tail, in sequence."""
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


_TILE_VECTORS = 4  # vectors of results of a register tile
_MAX_UNROLLED_TERMS = 32  # reductions of at most so many terms are unrolled
# Rows of a register tile where they read the same vectors, and the minimum number of terms for it.
_TILE_ROWS, _MIN_TILE_TERMS = 4, 8

ResultRow = tuple[FlatBox, list[dict[tirx.Buffer, tirx.Buffer]]]
"""A row of results: its computation, and the accumulators of each of its vectors."""


class AlongResults:
    """Every lane accumulates a result of its own.

    Rows that read the same vectors, as in a matrix product, are computed together as a register tile.
    """

    def __init__(self, box: FlatBox, cpu: CpuTarget) -> None:
        self.box = box
        self.var = box.spatial[-1].var if box.spatial else None
        scalar = self.var is None or varies_inside(box, self.var)
        self.lanes = 1 if scalar else lanes_of(box.nest, cpu)
        self.rows = self._shared_rows()
        self.together = _TILE_VECTORS if self.rows is None or cpu.isa.registers >= 32 else _TILE_VECTORS // 2

    def _shared_rows(self) -> tirx.Var | None:
        """The variable of rows that read the same vectors, if they have enough terms."""
        values = [s.value for s in self.box.nest.sums]
        if self.lanes == 1 or any(map(chooses, values)) or _terms(self.box) < _MIN_TILE_TERMS:
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
                    self._row_tiles(here, rows)

        share_among_tasks(self.box, tasks, self.lanes * self.together, write)

    def _row_tiles(self, box: FlatBox, rows: Loop) -> None:
        def at(first: Expr, count: int) -> None:
            self._row_of_vectors([box.at({rows.var: first + i}) for i in range(count)])

        vectorize_loop(rows, 1, _TILE_ROWS, False, lambda first, _lanes, count: at(first, count))

    def _row_of_vectors(self, rows: list[FlatBox]) -> None:
        overlap = not self.box.nest.in_place
        vectorize_loop(rows[0].spatial[-1], self.lanes, self.together, overlap, lambda *at: self._visit(rows, *at))

    def _visit(self, rows: list[FlatBox], start: Expr, lanes: int, count: int) -> None:
        sums = self.box.nest.sums
        group: list[ResultRow] = [
            (row, [{s.buffer: slot(s.buffer.dtype, lanes) for s in sums} for _ in range(count)]) for row in rows
        ]
        for row, slots in group:
            for accumulators in slots:
                for s in row.nest.sums:
                    store(accumulators[s.buffer], s.initial, LANE, lanes)
        # Borders of an image, which leave terms out, are not worth unrolled code.
        terms = _terms(self.box) * count * len(rows) * len(sums)
        is_short = terms <= 2 * _MAX_UNROLLED_TERMS and not any(chooses(s.value) for s in sums)
        self._reduce(group, list(self.box.reduced), is_short, start, lanes)
        for row, slots in group:
            for i, accumulators in enumerate(slots):
                write_point(row, self.var, start + i * lanes, lanes, accumulators)

    def _reduce(self, group: list[ResultRow], loops: list[Loop], unrolled: bool, start: Expr, lanes: int) -> None:
        if loops:
            if unrolled and _is_static(loops[0]):
                for i in range(loops[0].begin, loops[0].end):
                    inner = [(row.at({loops[0].var: int64(i)}), slots) for row, slots in group]
                    self._reduce(inner, loops[1:], unrolled, start, lanes)
            else:
                with nested(loops[:1]) as position:
                    inner = [(row.at(position), slots) for row, slots in group]
                    self._reduce(inner, loops[1:], unrolled, start, lanes)
            return
        for row, slots in group:
            sums = row.nest.sums
            if len(sums) == 1 and self._accumulate_selected(sums[0], start, lanes, slots):
                continue
            for i, accumulators in enumerate(slots):
                self._accumulate([value_of(s) for s in sums], sums, start + i * lanes, lanes, accumulators)

    def _accumulate_selected(
        self, s: Sum, start: Expr, lanes: int, slots: list[dict[tirx.Buffer, tirx.Buffer]]
    ) -> bool:
        """Branch once for all vectors if the term is an if_then_else; return whether it is."""
        parts = combined(s)
        if parts is None or not is_choice(parts.term) or (self.var in variables(parts.term.args[0])):
            return False
        condition, then, otherwise = parts.term.args
        own = tirx.BufferLoad(s.buffer, [int64(0)])

        def accumulate(term: Expr) -> None:
            for i, accumulators in enumerate(slots):
                self._accumulate([parts.combine(own, term)], [s], start + i * lanes, lanes, accumulators)

        if is_number(otherwise, parts.neutral):
            with when(condition):
                accumulate(then)
        else:
            either(condition, lambda: accumulate(then), lambda: accumulate(otherwise))
        return True

    def _accumulate(
        self, values: list[Expr], sums: list[Sum], start: Expr, lanes: int, accumulators: dict[tirx.Buffer, tirx.Buffer]
    ) -> None:
        new = [slot(s.buffer.dtype, lanes) for s in sums] if len(sums) > 1 else []
        for i, (s, value) in enumerate(zip(sums, values, strict=True)):
            term = replaced(value, {self.var: start + LANE}) if self.var is not None else value
            store(new[i] if new else accumulators[s.buffer], reading(term, accumulators, {}), LANE, lanes)
        for s, new_value in zip(sums, new, strict=False):
            store(accumulators[s.buffer], tirx.BufferLoad(new_value, [LANE]), LANE, lanes)


def _terms(box: FlatBox) -> int:
    """Number of terms of a result; a symbolic extent counts as many."""
    return prod(loop.count if isinstance(loop.count, int) else _MAX_UNROLLED_TERMS for loop in box.reduced)


def _is_static(loop: Loop) -> bool:
    return isinstance(loop.begin, int) and isinstance(loop.end, int)
