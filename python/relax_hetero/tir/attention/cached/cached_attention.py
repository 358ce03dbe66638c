"""The CPU kernel of attention with a paged KV cache.

For one token of each of several sequences ("decode"), a unit of work is a row and a key head, or a part of its pages
if there are fewer such pairs than cores. For several tokens of one sequence ("chunk"), it is a key head and some
queries. New keys and values are appended before they are read: in the unit itself if the call has no other, else in
a separate loop.

The pages of a sequence are divided into blocks by position. The sums of a block start at its first page, and blocks are
merged in order, whichever units compute them: a row's result depends only on its sequence, not on other rows, on the
start of a chunk, or on the number of cores.

A unit of a chunk has many rows, and widens each page to float32 once for all of them.

Pages of a cache as a source of keys and values, and appending a row's new key and value to its page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.expression import Expression
from ....encoding.pages import PAGE
from ....encoding.problem import CachedAttentionProblem
from ....errors import EncodingError
from ....target.cpu_target import CpuTarget
from ....target.dot_instructions import FLOAT32_FMA
from ....target.element_types import bytes_of
from ...core.builder import (
    CACHE_LINE_BYTES,
    Expr,
    Function,
    Masks,
    Registers,
    broadcast,
    ceil_div,
    int64,
    lane_indices,
    lane_mask,
    lane_of,
    let,
    loop,
    materialize,
    minimum,
    over_lanes,
    stored,
    vector_type,
    when,
    zeros,
)
from ...core.work_split import part, tasks_for
from ...math.casts import cast
from ...math.vector_math import ROUNDER, clamp, constant, exp_nonpositive
from ...microkernel import amx
from ...pack.tile_transpose import riffle
from ..attention_tile import LOWEST, VectorRows
from ..key_values import Factors, KeyValueSource
from .heads import emit_head
from .spec import BLOCK_PAGES, CachedPlan, CachedSpec, Tensors, cached_plan


def cached_attention_kernel(problem: CachedAttentionProblem, cpu: CpuTarget) -> tirx.PrimFunc:
    """The kernel of an attention with a cache.

    `problem`: attention with keys of pages in "lanes". Returns the kernel with the parameters of
    `CachedAttentionProblem`, then scratch; pages are written in place. Raises EncodingError if keys have another order.
    """
    if problem.order != "lanes":
        raise EncodingError(f"attention with keys of pages in {problem.order} on {cpu.isa.name}: expected lanes")
    with Function("cached_attention") as function:
        _Kernel(problem, cpu, function).emit()
    return function.result


@dataclass(frozen=True)
class _Pages:
    """Pages from `begin` up to `end` of a slot and a key head, which a unit's queries attend to."""

    slot: Expr
    head: Expr
    begin: Expr
    end: Expr
    last: Expr  # last position that is visible to any row
    queries: Expr  # number of queries
    # Function from a row of the unit to the first and the last position that it sees.
    positions: Callable[[Expr], tuple[Expr, Expr]]


class _Kernel:
    def __init__(self, problem: CachedAttentionProblem, cpu: CpuTarget, function: Function) -> None:
        self.problem, self.cpu, self.function = problem, cpu, function
        self.plan: CachedPlan = cached_plan(problem, cpu)
        self.tensors = Tensors(function, problem, self.plan.lanes)
        # Blocks of pages whose sums are stored, if several units share a row.
        self.stored_blocks = self.tensors.rows * problem.heads * self.plan.max_blocks if self.plan.splits > 1 else 0
        self.task_scratch_size = self.plan.tasks * self.plan.scratch
        total = self.task_scratch_size + self.stored_blocks * (self.plan.value_distance + 2)
        self._scratch = function.argument("scratch", (int64(total),), "float32")
        self.scratch: Any = None

    def emit(self) -> None:
        """Write the body of the kernel."""
        with self.function.body():
            self.tensors.open()
            self.scratch = T.decl_buffer(self._scratch.shape, "float32", data=self._scratch.data)
            if self.problem.rows == "chunk":
                self._append_all()
                self._chunk()
                return
            # Rows may be of one sequence.
            with when(tirx.Not(self._is_single_unit)):
                self._append_all()
            self._decode()
            if self.plan.splits > 1:
                self._merge()

    # -- writing

    @property
    def _is_single_unit(self) -> Expr:
        """True if no other unit of a decode step reads the keys that a unit appends."""
        return tirx.all(tirx.const(self.plan.splits == 1, "bool"), int64(self.tensors.rows) <= int64(1))

    def _append_all(self) -> None:
        """Append the keys and values of all rows, before any is read."""
        problem, rows = self.problem, self.tensors.rows
        units = rows * problem.kv_heads
        work = units * problem.size * 2 * 4 if isinstance(units, int) else None
        tasks = tasks_for(self.cpu.cores, "bytes", work)
        sequence = self.tensors.integer("sequences", int64(0)) if problem.rows == "chunk" else None
        with loop(tasks, parallel=tasks > 1) as task:
            spec = self._spec(task)
            begin, end = part(units, tasks, task)
            with loop(materialize(end - begin)) as number:
                pair = materialize(begin + number)
                row, head = materialize(pair // problem.kv_heads), materialize(pair % problem.kv_heads)
                slot, position = self._slot_and_position(row, sequence)
                emit_append(spec, row, head, slot, position)

    def _slot_and_position(self, row: Expr, sequence: Expr | None) -> tuple[Expr, Expr]:
        """Slot and position of a row; position -1 if it does not belong to the chunk's sequence."""
        row_sequence = self.tensors.integer("sequences", row)
        if sequence is not None:
            row_sequence = materialize(tirx.Select(row_sequence.equal(sequence), row_sequence, int64(-1)))
        return self.tensors.slot_position(row, row_sequence)

    # -- units: one token of each sequence, or a run of tokens of one sequence

    def _decode(self) -> None:
        problem, plan = self.problem, self.plan
        units = materialize(self.tensors.rows * (problem.kv_heads * plan.splits))
        with loop(plan.tasks, parallel=plan.tasks > 1) as task:
            spec = self._spec(task)
            begin, end = part(units, plan.tasks, task)
            with loop(materialize(end - begin)) as index:
                number = materialize(begin + index)
                pair, split = materialize(number // plan.splits), materialize(number % plan.splits)
                row, head = materialize(pair // problem.kv_heads), materialize(pair % problem.kv_heads)
                with when(self._is_single_unit):
                    emit_append(spec, row, head, *self._slot_and_position(row, None))
                self._emit_unit(spec, row, int64(1), head, None, split)

    def _chunk(self) -> None:
        plan, tensors = self.plan, self.tensors
        tiles = materialize(ceil_div(tensors.rows, plan.unit_queries))
        units = materialize(tiles * self.problem.kv_heads)
        sequence = tensors.integer("sequences", int64(0))
        with loop(plan.tasks, parallel=plan.tasks > 1) as task:
            spec = self._spec(task)
            # Later queries see more keys, so that neighbours go to different tasks.
            with loop(materialize((units - task + (plan.tasks - 1)) // plan.tasks)) as number:
                pair = materialize(task + number * plan.tasks)
                first = materialize(pair % tiles * plan.unit_queries)
                count = materialize(minimum(tensors.rows - first, int64(plan.unit_queries)))
                self._emit_unit(spec, first, count, materialize(pair // tiles), sequence, int64(0))

    def _emit_unit(
        self, spec: CachedSpec, first: Expr, count: Expr, head: Expr, sequence: Expr | None, split: Expr
    ) -> None:
        """Write the attention of `count` queries from row `first` on with a key head, or of a part of their blocks."""
        problem, plan = self.problem, self.plan
        self._prepare(spec, first, head, count)
        slot, _ = self._slot_and_position(first, sequence)
        first_seen, last_seen = self._positions(first, count, sequence)

        def positions(row: Expr) -> tuple[Expr, Expr]:
            if plan.unit_queries == 1:
                return first_seen, last_seen
            # Padding rows of the last tile are like the last query's.
            query = minimum(first + row // problem.group, first + count - 1)
            return self._positions(materialize(query), int64(1), sequence)

        begin, end = materialize(first_seen // PAGE), materialize((last_seen + PAGE) // PAGE)
        pages = _Pages(slot, head, begin, end, last_seen, count, positions)
        first_block, last_block = _blocks(begin, end)
        if plan.splits == 1:
            self._attend(spec, pages, (first_block, last_block), lambda _: self._add(spec, count))
            self._finish(spec, first, head, count)
            return
        begin_part, end_part = part(materialize(last_block - first_block), plan.splits, split)
        first_head = materialize(first * problem.heads + head * problem.group)
        self._attend(
            spec,
            pages,
            (materialize(first_block + begin_part), materialize(first_block + end_part)),
            lambda block: self._store_block(spec, first_head, materialize(block - first_block)),
        )

    def _positions(self, first: Expr, count: Expr, sequence: Expr | None) -> tuple[Expr, Expr]:
        """First and last position that any of `count` rows sees; the last is -1 if they see none."""
        _, position = self._slot_and_position(first, sequence)
        if isinstance(count, tirx.IntImm) and int(count) == 1:
            return self._first_visible(position), position
        ends = Registers(2, "int64", 1)
        ends[0], ends[1] = self._first_visible(position), position
        with loop(materialize(count - 1)) as number:
            _, position = self._slot_and_position(materialize(first + number + 1), sequence)
            with when(position >= 0):
                ends[0], ends[1] = T.min(ends[0], self._first_visible(position)), T.max(ends[1], position)
        return materialize(ends[0] + 0), materialize(ends[1] + 0)

    def _spec(self, task: Expr) -> CachedSpec:
        problem, plan, cap = self.problem, self.plan, self.problem.softcap
        scores = f"multiply(tanh(multiply(x0, {1 / cap})), {cap})" if cap else "x0"
        registers = Registers(plan.rows * plan.vectors, "float32", plan.lanes)
        start, sizes = materialize(task * plan.scratch), {"d": problem.size, "e": problem.value_size}
        kernel = (Expression.parse(scores), (), sizes, plan, self.scratch, start, registers, FLOAT32_FMA)
        return CachedSpec(*kernel, problem, self.tensors)

    def _first_visible(self, position: Expr) -> Expr:
        """The first position that is visible to a query at a position."""
        if not self.problem.window:
            return int64(0)
        return materialize(T.max(position - (self.problem.window - 1), int64(0)))

    def _prepare(self, spec: CachedSpec, first: Expr, head: Expr, count: Expr) -> None:
        """Write a unit's queries, normalized, rotated and scaled, to scratch, and initialize the state of its rows."""
        problem = self.problem
        with loop(count) as query, loop(problem.group) as number:
            row, query_head = materialize(first + query), materialize(head * problem.group + number)
            start = materialize(row * self.tensors.row_elements + query_head * problem.size)
            unit_row = materialize(query * problem.group + number)
            target = materialize(unit_row * problem.size)

            def store(index: Expr, value: Expr, lanes: int, target: Expr = target) -> None:
                scale = broadcast(tirx.const(problem.scale, "float32"), lanes)
                spec.store("queries", materialize(target + index), value * scale, lanes)

            emit_head(problem, self.tensors, row, start, "q_norm", store)
            self._start_row(spec, unit_row, query_head)

    def _start_row(self, spec: CachedSpec, row: Expr, head: Expr) -> None:
        """Initialize the state of a row over all blocks; a sink is a score without a value."""
        lanes, distance, has_sink = self.plan.lanes, self.plan.value_distance, self.problem.sinks
        row_max = self.tensors.number("sinks", head, 1) if has_sink else constant(zeros("float32", 1), LOWEST)
        spec.store("all_maxima", row, row_max)
        spec.store("all_sums", row, tirx.const(float(has_sink), "float32"))
        with loop(distance // lanes) as vector:
            spec.store("all_partial", row * distance + vector * lanes, zeros("float32", lanes), lanes)

    def _attend(
        self, spec: CachedSpec, pages: _Pages, blocks: tuple[Expr, Expr], end_block: Callable[[Expr], None]
    ) -> None:
        """Attend from the unit's rows to its pages, in the blocks from the first up to the second.

        `end_block` handles the sums of each block.
        """
        first_block, last_block = blocks
        with loop(materialize(T.max(last_block - first_block, int64(0)))) as number:
            block = materialize(first_block + number)
            begin = materialize(T.max(pages.begin, block * BLOCK_PAGES))
            end = materialize(T.min(pages.end, block * BLOCK_PAGES + BLOCK_PAGES))
            with loop(materialize(end - begin)) as page:
                self._attend_page(spec, pages, materialize(begin + page), page < 1)
            end_block(block)

    def _attend_page(self, spec: CachedSpec, pages: _Pages, index: Expr, is_first: Expr) -> None:
        entry, zero = self.tensors.table_entry(pages.slot, index), int64(0)
        page = page_of(spec, T.max(entry, zero), pages.head)
        first = materialize(index * PAGE)
        # A page that is not there has no tokens.
        size = materialize(tirx.Select(entry >= 0, T.min(pages.last - first + 1, int64(PAGE)), zero))
        # The last page prefetches itself.
        number = self.tensors.table_entry(pages.slot, T.min(index + 1, pages.end - 1))
        following = page_of(spec, T.max(number, zero), pages.head).start
        source = PagedKeyValues(spec, first, size, is_first, page, following, pages.positions)
        source.pack()
        rows = self.plan.rows
        with loop(materialize(ceil_div(pages.queries * self.problem.group, rows))) as tile:
            row = materialize(tile * rows)
            VectorRows(spec, source, row, row, rows).emit()

    def _add(self, spec: CachedSpec, queries: Expr) -> None:
        """Merge the sums of a block into those of the blocks before."""
        with loop(materialize(queries * self.problem.group)) as row:
            state, start = (spec.load("maxima", row), spec.load("sums", row)), row * self.plan.value_distance
            self._add_block(spec, row, state, lambda column: spec.load("partial", start + column, self.plan.lanes))

    def _add_block(
        self, spec: CachedSpec, row: Expr, state: tuple[Expr, Expr], partial: Callable[[Expr], Expr]
    ) -> None:
        """Merge a block into a row's state over all blocks: its maximum, its sum of weights, and its sums of values."""
        before, block_max, lanes = let(spec.load("all_maxima", row)), let(state[0]), self.plan.lanes
        row_max = let(T.Select(before > block_max, before, block_max))
        old, new = let(exp_nonpositive(before - row_max)), let(exp_nonpositive(block_max - row_max))
        spec.store("all_sums", row, spec.load("all_sums", row) * old + state[1] * new)
        spec.store("all_maxima", row, row_max)
        with loop(self.plan.value_distance // lanes) as vector:
            column = materialize(vector * lanes)
            index = materialize(row * self.plan.value_distance + column)
            total = spec.load("all_partial", index, lanes) * broadcast(old, lanes)
            spec.store("all_partial", index, total + partial(column) * broadcast(new, lanes), lanes)

    def _finish(self, spec: CachedSpec, first: Expr, head: Expr, count: Expr) -> None:
        """Write the rows' averages to the result."""
        problem = self.problem
        with loop(count) as query, loop(problem.group) as number:
            row = materialize(query * problem.group + number)
            self._finish_row(spec, row, materialize((first + query) * problem.heads + head * problem.group + number))

    def _finish_row(self, spec: CachedSpec, row: Expr, number: Expr) -> None:
        """Write a row's average to a row of the result."""
        size, lanes, min_sum = self.problem.value_size, self.plan.lanes, tirx.const(1e-30, "float32")
        average = let(tirx.const(1.0, "float32") / T.max(spec.load("all_sums", row), min_sum))
        for j, mask in enumerate(spec.value_masks):
            sums = spec.load("all_partial", row * self.plan.value_distance + j * lanes, lanes)
            value = let(sums * broadcast(average, lanes))
            self.tensors.store("out", materialize(number * size + j * lanes), value, lanes, mask)

    # -- blocks of a row in several units

    def _block_offsets(self, head: Expr, block: Expr) -> tuple[Expr, Expr]:
        """Offsets of a block's stored sums of values, and of its maximum and sum of weights, which follow all those."""
        number, distance = materialize(head * self.plan.max_blocks + block), self.plan.value_distance
        return (
            materialize(self.task_scratch_size + number * distance),
            materialize(self.task_scratch_size + self.stored_blocks * distance + number * 2),
        )

    def _store_block(self, spec: CachedSpec, first_head: Expr, block: Expr) -> None:
        distance, lanes = self.plan.value_distance, self.plan.lanes
        with loop(self.problem.group) as number:
            partial, state = self._block_offsets(materialize(first_head + number), block)
            T.buffer_store(self.scratch, spec.load("maxima", number), [state])
            T.buffer_store(self.scratch, spec.load("sums", number), [state + 1])
            with loop(distance // lanes) as vector:
                sums = spec.load("partial", number * distance + vector * lanes, lanes)
                T.buffer_store(self.scratch, sums, [lane_indices(partial + vector * lanes, lanes)])

    def _merge(self) -> None:
        """Merge the blocks of each row and head, in order, and write the result."""
        plan, units = self.plan, materialize(self.tensors.rows * self.problem.heads)
        with loop(plan.tasks, parallel=plan.tasks > 1) as task:
            spec = self._spec(task)
            begin, end = part(units, plan.tasks, task)
            with loop(materialize(end - begin)) as number:
                self._merge_unit(spec, materialize(begin + number))

    def _merge_unit(self, spec: CachedSpec, head: Expr) -> None:
        self._start_row(spec, int64(0), materialize(head % self.problem.heads))
        _, position = self._slot_and_position(materialize(head // self.problem.heads), None)
        first, last = _blocks(
            materialize(self._first_visible(position) // PAGE), materialize((position + PAGE) // PAGE)
        )
        with loop(materialize(T.max(last - first, int64(0)))) as block:
            start, state = self._block_offsets(head, block)

            def partial(column: Expr, start: Expr = start) -> Expr:
                return self.scratch[lane_indices(start + column, self.plan.lanes)]

            self._add_block(spec, int64(0), (self.scratch[state], self.scratch[state + 1]), partial)
        self._finish_row(spec, int64(0), head)


def _blocks(begin: Expr, end: Expr) -> tuple[Expr, Expr]:
    """The first block of some pages, and the block after their last."""
    return materialize(begin // BLOCK_PAGES), materialize((end + (BLOCK_PAGES - 1)) // BLOCK_PAGES)


_MAX_FLOAT16 = 65504.0


@dataclass(frozen=True)
class Page:
    """A head of a page: the offset of its keys in elements, and how many elements of these are values, too."""

    tensors: Tensors
    start: Expr
    size: int
    shared_values: int

    @property
    def values(self) -> Expr:
        """Offset of the values."""
        return self.start + (self.size - self.shared_values if self.shared_values else PAGE * self.size)

    def load(self, index: Expr, lanes: int, mask: Expr | None = None) -> Expr:
        """Elements from an index on, as float32, not yet scaled."""
        return let(self.tensors.number("pages", index, lanes, mask))

    def scale_at(self, key_or_value: int, token: Expr) -> Expr:
        """Offset in floats of the scale of a token's key (0) or value (1)."""
        if self.shared_values:
            return tirx.floordiv(self.start, 4) + PAGE * self.size // 4 + token
        return tirx.floordiv(self.start, 4) + (2 * PAGE * self.size // 4 + key_or_value * PAGE) + token

    def scales(self, key_or_value: int, token: Expr, lanes: int) -> Expr:
        """The scales of keys (0) or values (1) from a token on."""
        return self.tensors.scales[lane_indices(self.scale_at(key_or_value, token), lanes)]


def page_of(spec: CachedSpec, number: Expr, head: Expr) -> Page:
    """A head of the page with a number."""
    start = materialize((number * spec.problem.kv_heads + head) * spec.tensors.page_elements)
    return Page(spec.tensors, start, spec.problem.size, spec.problem.shared_values)


@dataclass(frozen=True)
class PagedKeyValues(KeyValueSource):
    """A page of keys and values, widened to scratch for many rows. Keys that no row sees may be undefined."""

    spec: CachedSpec
    page: Page
    following: Expr  # offset of the next page's keys, in elements, for prefetching
    # Function from a row to the first and the last position that it sees.
    positions: Callable[[Expr], tuple[Expr, Expr]]

    is_padded = True

    def limits(self, row: Expr) -> tuple[Expr | None, Expr | None]:
        """Tokens of the page before the first that a row sees, and up to the last."""
        first, last = self.positions(row)
        begin = materialize(first - self.first) if self.spec.problem.window else None
        return begin, materialize(last - self.first + 1)

    def count(self, row: Expr, rows: Expr) -> Expr:
        """Number of tokens of the page up to the last that any row sees."""
        return self.size

    def pack(self) -> None:
        """Convert the page to floats in scratch for many rows."""
        spec, plan = self.spec, self.spec.plan
        if plan.is_in_place:
            return
        columns, lanes = plan.columns, plan.lanes
        if self.page.shared_values:
            self._transpose_keys()
        else:
            with loop(PAGE // columns) as panel, loop(plan.width) as row:
                load = self._keys_in_place(panel)
                for j in range(plan.vectors):
                    spec.store("keys", (panel * plan.width + row) * columns + j * lanes, load(row, j), lanes)
        masks = spec.value_masks
        with loop(self.size) as token:
            for j, mask in enumerate(masks):
                panel, column = divmod(j, plan.vectors)
                value = self.page.load(materialize(self.page.values + token * plan.width + j * lanes), lanes, mask)
                spec.store("values", (panel * PAGE + token) * columns + column * lanes, value, lanes)

    def _transpose_keys(self) -> None:
        """Convert keys in the order of values to floats in scratch, in lanes."""
        spec, plan = self.spec, self.spec.plan
        columns, lanes, width = plan.columns, plan.lanes, plan.width
        mask = lane_mask(width, lanes)
        with loop(materialize(ceil_div(self.size, lanes))) as group, loop(ceil_div(width, lanes)) as number:
            token = materialize(group * lanes)
            # The last vector ends with the key: elements in common with the one before are copied twice.
            k = materialize(minimum(number * lanes, max(width - lanes, 0)))
            start = materialize(self.page.start + token * width + k)
            rows = [self.page.load(start + lane * width, lanes, mask) for lane in range(lanes)]
            key = materialize((token // columns * width + k) * columns + token % columns)
            for i, values in enumerate(riffle(rows, lanes)[:width]):
                spec.store("keys", key + i * columns, values, lanes)

    def keys(self, panel: Expr) -> Factors:
        """Factors of a panel of keys, in scratch or in the page."""
        return self._keys_in_place(panel) if self.spec.plan.is_in_place else super().keys(panel)

    def _keys_in_place(self, panel: Expr) -> Factors:
        plan = self.spec.plan
        start = materialize(self.page.start + panel * plan.columns)
        return lambda k, j: self.page.load(start + k * PAGE + j * plan.lanes, plan.lanes)

    def values(self, panel: Expr, masks: Masks) -> Factors:
        """Factors of a panel of elements of values, in scratch or in the page."""
        plan = self.spec.plan
        if not plan.is_in_place:
            return super().values(panel, masks)
        start = materialize(self.page.values + panel * plan.columns)
        return lambda k, j: self.page.load(start + k * plan.width + j * plan.lanes, plan.lanes, masks[j])

    def scaled_scores(self, scores: Expr, column: Expr) -> Expr:
        """Products times the scales of int8 keys."""
        lanes, is_scaled = self.spec.plan.lanes, self.spec.problem.page_type == "int8"
        return scores * self.page.scales(0, column, lanes) if is_scaled else scores

    def scaled_weights(self, weights: Expr, column: Expr) -> Expr:
        """Softmax weights times the scales of int8 values."""
        lanes = self.spec.plan.lanes
        if self.spec.problem.page_type != "int8":
            return weights
        # Scales of tokens that were never written are undefined.
        zero = zeros("float32", lanes)
        return T.Select(weights > zero, weights * self.page.scales(1, column, lanes), zero)

    def prefetch(self, panel: Expr, vectors: int, is_keys: bool) -> Callable[[Expr], None] | None:
        """Prefetches of the page's values while keys are multiplied, and of the next page's keys after that.

        The CPU prefetches keys by itself, because they are read sequentially. The computation of few rows takes no
        longer than reading a page from memory.
        """
        plan, data = self.spec.plan, self.spec.tensors.views["pages"].data
        each, line = vectors * plan.lanes, CACHE_LINE_BYTES // bytes_of(self.spec.problem.page_type)
        if not plan.is_in_place or plan.lanes == 1 or plan.queries > plan.rows or each < line:
            return None
        distance = plan.columns * (plan.width if is_keys else PAGE)
        start = materialize((self.page.values if is_keys else self.following) + panel * distance)

        def prefetch_step(k: Expr) -> None:
            for number in range(each // line):
                amx.prefetch(T.address_of(data[start + k * each + number * line]))

        return prefetch_step


def emit_append(spec: CachedSpec, row: Expr, head: Expr, slot: Expr, position: Expr) -> None:
    """Write a row's key and value of one head, unless it lacks a page."""
    problem = spec.problem
    number = materialize(T.max(position, tirx.const(0, "int64")) // PAGE)
    entry = spec.tensors.table_entry(slot, number)
    with when(tirx.all(position >= 0, entry >= 0)):
        page = page_of(spec, entry, head)
        token = materialize(position % PAGE)
        key = materialize(row * spec.tensors.row_elements + (problem.heads + head) * problem.size)
        _write(spec, page, row, key, "k_norm", token)
        if not problem.shared_values:
            _write(spec, page, row, materialize(key + problem.kv_heads * problem.size), "", token)


def _write(spec: CachedSpec, page: Page, row: Expr, start: Expr, norm: str, token: Expr) -> None:
    """Write a key (with a norm's name) or a value (without) to its page."""
    tensors, key_or_value, is_column = spec.tensors, 0 if norm else 1, bool(norm) and not page.shared_values
    step = PAGE if is_column else 1
    begin = page.start if norm else page.values
    first = materialize(begin + token * (1 if is_column else page.size))
    inverse = None
    if tensors.page_type == "int8":
        row_max = Registers(1, "float32", 1)
        row_max[0] = zeros("float32", 1)

        def update_max(_index: Expr, value: Expr, lanes: int) -> None:
            vector_max = let(over_lanes(let(T.max(value, zeros("float32", lanes) - value)), T.max, lanes))
            # Not T.max: TVM's C code would use the register's first value for all later ones.
            row_max[0] = T.Select(row_max[0] > vector_max, row_max[0], vector_max)

        emit_head(spec.problem, tensors, row, start, norm, update_max)
        scale = let(row_max[0] * tirx.const(1.0 / 127.0, "float32"))
        T.buffer_store(tensors.scales, scale, [page.scale_at(key_or_value, token)])
        zero, min_max = tirx.const(0.0, "float32"), tirx.const(1e-35, "float32")
        inverse = let(T.Select(scale > zero, tirx.const(127.0, "float32") / T.max(row_max[0], min_max), zero))

    def store(index: Expr, value: Expr, lanes: int) -> None:
        encoded, index = _encode(value, tensors.page_type, lanes, inverse), materialize(first + index * step)
        if lanes == 1 or step == 1:
            tensors.store("pages", index, encoded, lanes)
            return
        elements = stored(tensors.views["pages"].bits(cast(encoded, tensors.page_type)))
        for lane in range(lanes):
            T.buffer_store(tensors.views["pages"].data, lane_of(elements, lane), [index + lane * step])

    emit_head(spec.problem, tensors, row, start, norm, store)


def _encode(value: Expr, dtype: str, lanes: int, inverse: Expr | None) -> Expr:
    """Elements in the range of a page's type: float16 clamped, int8 rounded to the nearest."""
    if inverse is not None:
        # The sum is rounded to the nearest integer, which is then in the low bits.
        shifted = let(value * broadcast(inverse, lanes) + constant(value, ROUNDER))
        return T.cast(T.reinterpret(vector_type("int32", lanes), shifted), vector_type("int8", lanes))
    return clamp(value, -_MAX_FLOAT16, _MAX_FLOAT16) if dtype == "float16" else value
