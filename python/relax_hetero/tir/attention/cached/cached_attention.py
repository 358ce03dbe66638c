"""The kernel of attention with a paged cache, for CPUs.

Of one token for each of several sequences ("decode"), a unit of work is a row and a head of keys, or a part of the
pages that it reads, where there are fewer of these than cores. Of a run of tokens of one sequence ("chunk"), it is a
head of keys and some queries. New keys and values are written before anything reads them: in the unit itself where
nothing else reads them, else in a loop of its own.

The pages of a sequence are cut into blocks by their positions. The sums of a block begin with its first page, and
blocks are merged from the first to the last, whichever units they are in: a row's numbers depend on its sequence alone,
not on other rows, on where a chunk begins, or on how many cores there are.

Scores of a chunk's unit are products of many rows: it widens each page once, for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
    broadcast,
    ceil_div,
    int64,
    lane_indices,
    let,
    loop,
    materialize,
    minimum,
    when,
)
from ...core.work_split import part, tasks_for
from ...math.casts import cast
from .append import emit_append
from .heads import emit_head
from .spec import BLOCK_PAGES, Plan, Tensors, Unit, page_of, plan_for, slot_position, table_entry
from .tile import Span, add_block, each_sum, emit_page, emit_start, start_blocks, tiles_of

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
        # Blocks of pages whose sums are kept, where several units have those of a row.
        self.kept = self.tensors.rows * problem.heads * self.plan.max_blocks if self.plan.splits > 1 else 0
        self.room_size = self.plan.tasks * self.plan.offsets["end"]
        total = self.room_size + self.kept * (problem.size + 2)
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
            with loop(materialize(end - begin)) as number:
                unit = materialize(begin + number)
                row, head = materialize(unit // problem.kv_heads), materialize(unit % problem.kv_heads)
                self._append(row, head, *self._place(row, sequence))

    def _append(self, row: Expr, head: Expr, slot: Expr, position: Expr) -> None:
        emit_append(self.problem, self.plan, self.tensors, row, head, slot, position)

    def _place(self, row: Expr, sequence: Expr | None) -> tuple[Expr, Expr]:
        """Slot and position of a row; no position where it is not of the chunk's sequence."""
        own = self.tensors.integer("sequences", row)
        if sequence is not None:
            own = materialize(tirx.Select(own.equal(sequence), own, int64(-1)))
        return slot_position(self.tensors, row, own)

    # -- one token of each sequence

    def _decode(self) -> None:
        problem, plan = self.problem, self.plan
        units = materialize(self.tensors.rows * (problem.kv_heads * plan.splits))
        with loop(plan.tasks, parallel=plan.tasks > 1) as task:
            place = self._unit(task)
            begin, end = part(units, plan.tasks, task)
            with loop(materialize(end - begin)) as number:
                self._decode_unit(place, materialize(begin + number))

    def _decode_unit(self, place: Unit, number: Expr) -> None:
        problem, plan = self.problem, self.plan
        split = materialize(number % plan.splits)
        pair = materialize(number // plan.splits)
        row, head = materialize(pair // problem.kv_heads), materialize(pair % problem.kv_heads)
        slot, position = self._place(row, None)
        if plan.splits == 1:
            self._append(row, head, slot, position)
        self._prepare(place, row, head, int64(1))
        least = self._least_seen(position)
        first, end = materialize(least // PAGE), materialize((position + PAGE) // PAGE)
        bounds = (least, position)
        pages = _Pages(slot, head, first, end, position, int64(1), lambda _: bounds, bounds)
        first_block, last_block = _blocks(first, end)
        if plan.splits == 1:
            self._attend(place, pages, (first_block, last_block), lambda _: self._add(place, int64(1)))
            self._finish(place, row, head, int64(1))
            return
        begin_part, end_part = part(materialize(last_block - first_block), plan.splits, split)
        first_head = materialize(row * problem.heads + head * problem.group)
        self._attend(
            place,
            pages,
            (materialize(first_block + begin_part), materialize(first_block + end_part)),
            lambda block: self._keep(place, first_head, materialize(block - first_block)),
        )

    # -- a run of tokens of one sequence

    def _chunk(self) -> None:
        problem, plan, tensors = self.problem, self.plan, self.tensors
        tiles = materialize(ceil_div(tensors.rows, plan.queries))
        units = materialize(tiles * problem.kv_heads)
        sequence = tensors.integer("sequences", int64(0))
        with loop(plan.tasks, parallel=plan.tasks > 1) as task:
            place = self._unit(task)
            # Late queries see more keys: neighbours go to different tasks.
            with loop(materialize((units - task + (plan.tasks - 1)) // plan.tasks)) as number:
                unit = materialize(task + number * plan.tasks)
                self._chunk_unit(place, materialize(unit // tiles), materialize(unit % tiles * plan.queries), sequence)

    def _chunk_unit(self, place: Unit, head: Expr, first: Expr, sequence: Expr) -> None:
        plan, tensors = self.plan, self.tensors
        count = materialize(minimum(tensors.rows - first, int64(plan.queries)))
        self._prepare(place, first, head, count)
        slot, _ = slot_position(tensors, int64(0), sequence)
        ends = [T.alloc_buffer((1,), "int64", scope="global") for _ in range(2)]
        zero = tirx.const(0, "int64")
        T.buffer_store(ends[0], tensors.extent("table", 1) * PAGE, [zero])
        T.buffer_store(ends[1], int64(-1), [zero])
        with loop(count) as query:
            _, position = self._place(materialize(first + query), sequence)
            with when(position >= 0):
                T.buffer_store(ends[0], T.min(ends[0][zero], self._least_seen(position)), [zero])
                T.buffer_store(ends[1], T.max(ends[1][zero], position), [zero])
        last = materialize(ends[1][zero] + 0)
        begin = materialize(ends[0][zero] // PAGE)
        end = materialize((last + PAGE) // PAGE)

        def limits(query: Expr) -> tuple[Expr, Expr]:
            _, position = self._place(materialize(first + query), sequence)
            return self._least_seen(position), position

        _, earliest = self._place(first, sequence)
        pages = _Pages(slot, head, begin, end, last, count, limits, (self._least_seen(last), earliest))
        self._attend(place, pages, _blocks(begin, end), lambda _: self._add(place, count))
        self._finish(place, first, head, count)

    # -- both

    def _unit(self, task: Expr) -> Unit:
        start = materialize(task * self.plan.offsets["end"])
        return Unit(self.problem, self.plan, self.tensors, self.room, start)

    def _least_seen(self, position: Expr) -> Expr:
        """The first position that a query at a position sees."""
        if not self.problem.window:
            return int64(0)
        return materialize(T.max(position - (self.problem.window - 1), int64(0)))

    def _prepare(self, place: Unit, first: Expr, head: Expr, count: Expr) -> None:
        """Queries of a unit, normalized, rotated and scaled, into scratch; nothing seen yet."""
        problem, plan = self.problem, self.plan
        width = (problem.heads + 2 * problem.kv_heads) * problem.size
        with loop(count) as query, loop(problem.group) as number:
            row = materialize(first + query)
            start = materialize(row * width + (head * problem.group + number) * problem.size)
            target = materialize((query * problem.group + number) * problem.size)

            def store(index: Expr, value: Expr, lanes: int, target: Expr = target) -> None:
                scale = broadcast(tirx.const(problem.scale, "float32"), lanes)
                place.store("queries", materialize(target + index), value * scale, lanes)

            emit_head(problem, self.tensors, plan.width_lanes, row, start, "q_norm", store)
        start_blocks(place, materialize(count * problem.group))

    def _attend(self, place: Unit, pages: _Pages, blocks: tuple[Expr, Expr], end_block: Callable[[Expr], None]) -> None:
        """Attend from the unit's rows to its pages, in the blocks from the first to before the second.

        `end_block` takes the sums of each block.
        """
        rows, (first_block, last_block) = materialize(pages.queries * self.problem.group), blocks
        with loop(materialize(T.max(last_block - first_block, int64(0)))) as number:
            block = materialize(first_block + number)
            emit_start(place, rows)
            begin = materialize(T.max(pages.begin, block * BLOCK_PAGES))
            end = materialize(T.min(pages.end, block * BLOCK_PAGES + BLOCK_PAGES))
            with loop(materialize(end - begin)) as page:
                self._attend_page(place, pages, materialize(begin + page))
            end_block(block)

    def _attend_page(self, place: Unit, pages: _Pages, index: Expr) -> None:
        entry = table_entry(self.tensors, pages.slot, index)
        with when(entry >= 0):
            page = page_of(self.tensors, self.problem, entry, pages.head)
            first = materialize(index * PAGE)
            count = materialize(T.min(pages.last - first + 1, int64(PAGE)))
            is_whole = tirx.all(first >= pages.bounds[0], first + (PAGE - 1) <= pages.bounds[1])
            # Any where there is none behind it.
            number = table_entry(self.tensors, pages.slot, T.min(index + 1, pages.end - 1))
            following = page_of(self.tensors, self.problem, T.max(number, int64(0)), pages.head).start
            tiles = tiles_of(place, pages.queries)
            emit_page(place, Span(page, first, count, tiles, pages.queries, pages.limits, is_whole, following))

    def _add(self, place: Unit, queries: Expr) -> None:
        """The sums of a block, added to those of the blocks before."""
        with loop(materialize(queries * self.problem.group)) as row:
            add_block(
                place,
                materialize(row + 0),
                (place.load("maxima", row), place.load("totals", row)),
                lambda body: each_sum(place, row, body),
            )

    def _finish(self, place: Unit, first: Expr, head: Expr, count: Expr) -> None:
        """The rows' averages into the result."""
        problem = self.problem
        with loop(count) as query, loop(problem.group) as number:
            row = materialize(query * problem.group + number)
            self._finish_row(place, row, materialize((first + query) * problem.heads + head * problem.group + number))

    def _finish_row(self, place: Unit, row: Expr, number: Expr) -> None:
        """A row's average into one of the result's."""
        size, lanes = self.problem.size, self.plan.width_lanes
        average = let(tirx.const(1.0, "float32") / T.max(place.load("all_totals", row), tirx.const(1e-30, "float32")))
        with loop(size // lanes) as vector:
            column = materialize(vector * lanes)
            value = place.load("all_sums", row * size + column, lanes)
            self._write(materialize(number * size + column), let(value * broadcast(average, lanes)), lanes)

    def _write(self, index: Expr, value: Expr, lanes: int) -> None:
        where = T.ramp(index, tirx.const(1, "int64"), lanes) if lanes > 1 else index
        T.buffer_store(self.tensors.data["out"], cast(value, self.problem.out.dtype), [where])

    # -- blocks of a row in several units

    def _kept(self, head: Expr, block: Expr) -> tuple[Expr, Expr]:
        """Where the sums of a block are kept, and its maximum and total behind all sums."""
        number = materialize(head * self.plan.max_blocks + block)
        return (
            materialize(self.room_size + number * self.problem.size),
            materialize(self.room_size + self.kept * self.problem.size + number * 2),
        )

    def _keep(self, place: Unit, first_head: Expr, block: Expr) -> None:
        with loop(self.problem.group) as number:
            sums, state = self._kept(materialize(first_head + number), block)
            T.buffer_store(self.room, place.load("maxima", number), [state])
            T.buffer_store(self.room, place.load("totals", number), [state + 1])

            def keep(column: Expr, value: Expr, lanes: int, sums: Expr = sums) -> None:
                T.buffer_store(self.room, value, [lane_indices(sums + column, lanes)])

            each_sum(place, number, keep)

    def _merge(self) -> None:
        """The blocks of each row and head, in their order, into the result."""
        plan, units = self.plan, materialize(self.tensors.rows * self.problem.heads)
        with loop(plan.tasks, parallel=plan.tasks > 1) as task:
            place = self._unit(task)
            begin, end = part(units, plan.tasks, task)
            with loop(materialize(end - begin)) as number:
                self._merge_unit(place, materialize(begin + number))

    def _merge_unit(self, place: Unit, head: Expr) -> None:
        size, lanes, row = self.problem.size, self.plan.width_lanes, int64(0)
        start_blocks(place, int64(1))
        _, position = self._place(materialize(head // self.problem.heads), None)
        first, last = _blocks(materialize(self._least_seen(position) // PAGE), materialize((position + PAGE) // PAGE))
        with loop(materialize(T.max(last - first, int64(0)))) as block:
            sums, state = self._kept(head, block)

            def each(body: Callable[[Expr, Expr, int], None], sums: Expr = sums) -> None:
                with loop(size // lanes) as vector:
                    column = materialize(vector * lanes)
                    body(column, let(self.room[lane_indices(sums + column, lanes)]), lanes)

            add_block(place, row, (self.room[state], self.room[state + 1]), each)
        self._finish_row(place, row, head)


@dataclass(frozen=True)
class _Pages:
    """Pages that a unit's rows attend to: those from `begin` to before `end` of a slot, of a head of keys.

    Attributes
    ----------
    last : PrimExpr
        The last position that any row sees.
    queries : PrimExpr
        How many there are.
    limits : Callable
        The first and the last position that a query sees, by its number in the unit.
    bounds : tuple of PrimExpr
        The first and the last position that all rows see.
    """

    slot: Expr
    head: Expr
    begin: Expr
    end: Expr
    last: Expr
    queries: Expr
    limits: Callable[[Expr], tuple[Expr, Expr]]
    bounds: tuple[Expr, Expr]


def _blocks(begin: Expr, end: Expr) -> tuple[Expr, Expr]:
    """The first block of some pages, and the one behind their last."""
    return materialize(begin // BLOCK_PAGES), materialize((end + (BLOCK_PAGES - 1)) // BLOCK_PAGES)
