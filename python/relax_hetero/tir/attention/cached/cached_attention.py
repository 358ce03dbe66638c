"""The kernel of attention with a paged cache, for CPUs.

Of one token for each of several sequences ("decode"), a unit of work is a row and a head of keys, or a part of the
pages that it reads, where there are fewer of these than cores; parts are merged in their order. Of a run of tokens of
one sequence ("chunk"), it is a head of keys and some queries. New keys and values are written before anything reads
them: in the unit itself where nothing else reads them, else in a loop of its own.

Scores of a chunk's unit are products of many rows: it widens each page once, for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.pages import PAGE
from ....encoding.problem import CachedAttentionProblem
from ....errors import EncodingError
from ....target.cpu_target import CpuTarget
from ...core.builder import (
    Expr,
    Function,
    Registers,
    broadcast,
    ceil_div,
    int64,
    let,
    loop,
    minimum,
    opaque,
    when,
)
from ...core.work_split import part, tasks_for
from ...math.casts import cast
from ...math.vector_math import exp_nonpositive
from .append import emit_append
from .heads import emit_head
from .spec import LEAST_SCORE, Plan, Tensors, Unit, page_of, plan_for, slot_position, table_entry
from .tile import Span, each_sum, emit_page, emit_start, tiles_of

_ACTIVATIONS = ("float32", "float16")
_PAGES = ("float16", "float32", "int8")


def cached_attention_kernel(problem: CachedAttentionProblem, cpu: CpuTarget) -> tirx.PrimFunc:
    """The kernel of an attention with a cache.

    Parameters
    ----------
    problem : CachedAttentionProblem
        With activations of float32 or float16, and pages of float16, float32 or int8, whose keys lie in "lanes".
    cpu : CpuTarget

    Returns
    -------
    tirx.PrimFunc
        Its parameters are those that `CachedAttentionProblem` says, then scratch; pages are written in place.

    Raises
    ------
    EncodingError
        If a tensor is of another type, or keys lie in another order.
    """
    types = (problem.out.dtype, problem.page_type, problem.order)
    if types[0] not in _ACTIVATIONS or types[1] not in _PAGES or types[2] != "lanes":
        raise EncodingError(
            f"attention of {types[0]} with pages of {types[1]} and keys in {types[2]} on {cpu.isa.name}: expected "
            f"one of {', '.join(_ACTIVATIONS)}, pages of {', '.join(_PAGES)}, and keys in lanes"
        )
    function = Function("cached_attention")
    with function:
        _Kernel(problem, cpu, function).emit()
    return function.result


class _Kernel:
    def __init__(self, problem: CachedAttentionProblem, cpu: CpuTarget, function: Function) -> None:
        self.problem, self.cpu, self.function = problem, cpu, function
        self.plan: Plan = plan_for(problem, cpu)
        self.tensors = Tensors(function, problem)
        rows = self.tensors.rows
        self.parts = rows * problem.heads * self.plan.splits if self.plan.splits > 1 else 0
        self.room_size = self.plan.tasks * self.plan.offsets["end"]
        total = self.room_size + self.parts * (problem.size + 2)
        self._scratch = function.argument("scratch", (int64(total),), "float32")
        self.room: Any = None

    def emit(self) -> None:
        """The body."""
        with self.function.body():
            self.tensors.open()
            self.room = T.decl_buffer(self._scratch.shape, "float32", data=self._scratch.data)
            if self.problem.rows == "chunk":
                self._append_all()
                self._chunk()
            elif self.plan.splits > 1:
                self._append_all()
                self._decode()
                self._merge()
            else:
                self._decode()

    # -- writing

    def _append_all(self) -> None:
        """New keys and values of all rows, before any are read."""
        problem, rows = self.problem, self.tensors.rows
        units = rows * problem.kv_heads
        work = units * problem.size * 2 * 4 if isinstance(units, int) else None
        tasks = tasks_for(self.cpu.cores, "bytes", work)
        sequence = self.tensors.integer("sequences", int64(0)) if problem.rows == "chunk" else None
        with loop(tasks, parallel=tasks > 1) as task:
            begin, end = part(units, tasks, task)
            with loop(opaque(end - begin)) as number:
                unit = opaque(begin + number)
                row, head = opaque(unit // problem.kv_heads), opaque(unit % problem.kv_heads)
                self._append(row, head, *self._place(row, sequence))

    def _append(self, row: Expr, head: Expr, slot: Expr, position: Expr) -> None:
        emit_append(self.problem, self.plan, self.tensors, row, head, slot, position)

    def _place(self, row: Expr, sequence: Expr | None) -> tuple[Expr, Expr]:
        """Slot and position of a row; no position where it is not of the chunk's sequence."""
        own = self.tensors.integer("sequences", row)
        if sequence is not None:
            own = opaque(tirx.Select(own.equal(sequence), own, int64(-1)))
        return slot_position(self.tensors, row, own)

    # -- one token of each sequence

    def _decode(self) -> None:
        problem, plan = self.problem, self.plan
        units = opaque(self.tensors.rows * (problem.kv_heads * plan.splits))
        with loop(plan.tasks, parallel=plan.tasks > 1) as task:
            place = self._unit(task)
            begin, end = part(units, plan.tasks, task)
            with loop(opaque(end - begin)) as number:
                self._decode_unit(place, opaque(begin + number))

    def _decode_unit(self, place: Unit, number: Expr) -> None:
        problem, plan = self.problem, self.plan
        split = opaque(number % plan.splits)
        pair = opaque(number // plan.splits)
        row, head = opaque(pair // problem.kv_heads), opaque(pair % problem.kv_heads)
        slot, position = self._place(row, None)
        if plan.splits == 1:
            self._append(row, head, slot, position)
        self._prepare(place, row, head, int64(1))
        least = self._least_seen(position)
        first = opaque(least // PAGE)
        pages = opaque((position + PAGE) // PAGE - first)
        begin, end = part(pages, plan.splits, split)
        span, bounds = (opaque(first + begin), opaque(first + end)), (least, position)
        self._attend(place, slot, head, *span, position, int64(1), lambda _: bounds, bounds)
        if plan.splits == 1:
            self._finish(place, row, head, int64(1))
        else:
            self._keep(place, opaque((row * problem.heads + head * problem.group) * plan.splits + split))

    # -- a run of tokens of one sequence

    def _chunk(self) -> None:
        problem, plan, tensors = self.problem, self.plan, self.tensors
        tiles = opaque(ceil_div(tensors.rows, plan.queries))
        units = opaque(tiles * problem.kv_heads)
        sequence = tensors.integer("sequences", int64(0))
        with loop(plan.tasks, parallel=plan.tasks > 1) as task:
            place = self._unit(task)
            # Late queries see more keys: neighbours go to different tasks.
            with loop(opaque((units - task + (plan.tasks - 1)) // plan.tasks)) as number:
                unit = opaque(task + number * plan.tasks)
                self._chunk_unit(place, opaque(unit // tiles), opaque(unit % tiles * plan.queries), sequence)

    def _chunk_unit(self, place: Unit, head: Expr, first: Expr, sequence: Expr) -> None:
        plan, tensors = self.plan, self.tensors
        count = opaque(minimum(tensors.rows - first, int64(plan.queries)))
        self._prepare(place, first, head, count)
        slot, _ = slot_position(tensors, int64(0), sequence)
        ends = [T.alloc_buffer((1,), "int64", scope="global") for _ in range(2)]
        zero = tirx.const(0, "int64")
        T.buffer_store(ends[0], tensors.extent("table", 1) * PAGE, [zero])
        T.buffer_store(ends[1], int64(-1), [zero])
        with loop(count) as query:
            _, position = self._place(opaque(first + query), sequence)
            with when(position >= 0):
                T.buffer_store(ends[0], T.min(ends[0][zero], self._least_seen(position)), [zero])
                T.buffer_store(ends[1], T.max(ends[1][zero], position), [zero])
        last = opaque(ends[1][zero] + 0)
        begin = opaque(ends[0][zero] // PAGE)
        end = opaque((last + PAGE) // PAGE)

        def limits(query: Expr) -> tuple[Expr, Expr]:
            _, position = self._place(opaque(first + query), sequence)
            return self._least_seen(position), position

        _, earliest = self._place(first, sequence)
        self._attend(place, slot, head, begin, end, last, count, limits, (self._least_seen(last), earliest))
        self._finish(place, first, head, count)

    # -- both

    def _unit(self, task: Expr) -> Unit:
        start = opaque(task * self.plan.offsets["end"])
        return Unit(self.problem, self.plan, self.tensors, self.room, start)

    def _least_seen(self, position: Expr) -> Expr:
        """The first position that a query at a position sees."""
        if not self.problem.window:
            return int64(0)
        return opaque(T.max(position - (self.problem.window - 1), int64(0)))

    def _prepare(self, place: Unit, first: Expr, head: Expr, count: Expr) -> None:
        """Queries of a unit, normalized, rotated and scaled, into scratch; nothing seen yet."""
        problem, plan = self.problem, self.plan
        width = (problem.heads + 2 * problem.kv_heads) * problem.size
        with loop(count) as query, loop(problem.group) as number:
            row = opaque(first + query)
            start = opaque(row * width + (head * problem.group + number) * problem.size)
            target = opaque((query * problem.group + number) * problem.size)

            def store(index: Expr, value: Expr, lanes: int, target: Expr = target) -> None:
                scale = broadcast(tirx.const(problem.scale, "float32"), lanes)
                place.store("queries", opaque(target + index), value * scale, lanes)

            emit_head(problem, self.tensors, plan.width_lanes, row, start, "q_norm", store)
        emit_start(place, opaque(count * problem.group))

    def _attend(
        self,
        place: Unit,
        slot: Expr,
        head: Expr,
        begin: Expr,
        end: Expr,
        last: Expr,
        queries: Expr,
        limits: Callable[[Expr], tuple[Expr, Expr]],
        bounds: tuple[Expr, Expr],
    ) -> None:
        """The unit's rows to the pages from `begin` to before `end` of a slot.

        `last` is the last position that any row sees; all rows see what lies within `bounds`.
        """
        tiles = tiles_of(place, queries)
        with loop(opaque(T.max(end - begin, int64(0)))) as number:
            index = opaque(begin + number)
            entry = table_entry(self.tensors, slot, index)
            with when(entry >= 0):
                page = page_of(self.tensors, self.problem, entry, head)
                first = opaque(index * PAGE)
                count = opaque(T.min(last - first + 1, int64(PAGE)))
                is_whole = tirx.all(first >= bounds[0], first + (PAGE - 1) <= bounds[1])
                emit_page(place, Span(page, first, count, tiles, queries, limits, is_whole))

    def _finish(self, place: Unit, first: Expr, head: Expr, count: Expr) -> None:
        """The rows' averages into the result."""
        problem = self.problem
        with loop(count) as query, loop(problem.group) as number:
            row = opaque(query * problem.group + number)
            average = let(_inverse(place.load("totals", row)))
            target = opaque(((first + query) * problem.heads + head * problem.group + number) * problem.size)

            def write(column: Expr, value: Expr, lanes: int, target: Expr = target, average: Expr = average) -> None:
                self._write(target + column, let(value * broadcast(average, lanes)), lanes)

            each_sum(place, row, write)

    def _write(self, index: Expr, value: Expr, lanes: int) -> None:
        where = T.ramp(index, tirx.const(1, "int64"), lanes) if lanes > 1 else index
        T.buffer_store(self.tensors.data["out"], cast(value, self.problem.out.dtype), [where])

    # -- parts of a sequence's keys

    def _part(self, number: Expr) -> tuple[Expr, Expr]:
        """Where the sums of a part are kept, and its maximum and total behind all sums."""
        return (
            opaque(self.room_size + number * self.problem.size),
            opaque(self.room_size + self.parts * self.problem.size + number * 2),
        )

    def _keep(self, place: Unit, first: Expr) -> None:
        problem, splits = self.problem, self.plan.splits
        with loop(problem.group) as number:
            sums, state = self._part(opaque(first + number * splits))
            T.buffer_store(self.room, place.load("maxima", number), [state])
            T.buffer_store(self.room, place.load("totals", number), [state + 1])

            def keep(column: Expr, value: Expr, lanes: int, sums: Expr = sums) -> None:
                T.buffer_store(self.room, value, [_run(sums + column, lanes)])

            each_sum(place, number, keep)

    def _merge(self) -> None:
        """The parts of each row and head, in their order."""
        problem, lanes, splits = self.problem, self.plan.width_lanes, self.plan.splits
        with loop(opaque(self.tensors.rows * problem.heads)) as head:
            greatest, total = Registers(1, "float32", 1), Registers(1, "float32", 1)
            greatest[0], total[0] = tirx.const(LEAST_SCORE, "float32"), tirx.const(0.0, "float32")
            places = [self._part(opaque(head * splits + number)) for number in range(splits)]
            for _, state in places:
                greatest[0] = T.max(greatest[0], self.room[state])
            weights = Registers(splits, "float32", 1)
            for number, (_, state) in enumerate(places):
                weights[number] = exp_nonpositive(self.room[state] - greatest[0])
                total[0] = total[0] + weights[number] * self.room[state + 1]
            average = let(_inverse(total[0]))
            with loop(problem.size // lanes) as vector:
                column = opaque(vector * lanes)
                value: Expr = None
                for number, (sums, _) in enumerate(places):
                    factor = broadcast(weights[number] * average, lanes)
                    added = self.room[_run(sums + column, lanes)] * factor
                    value = added if value is None else let(value + added)
                self._write(opaque(head * problem.size + column), value, lanes)


def _run(index: Expr, lanes: int) -> Expr:
    return T.ramp(index, tirx.const(1, "int64"), lanes) if lanes > 1 else index


def _inverse(total: Expr) -> Expr:
    """One through a sum of powers of e; finite where nothing was seen."""
    return tirx.const(1.0, "float32") / T.max(total, tirx.const(1e-30, "float32"))
