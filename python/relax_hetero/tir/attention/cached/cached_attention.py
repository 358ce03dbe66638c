"""The CPU kernel of attention with a paged KV cache.

For one token of each of several sequences ("decode"), a unit of work is a row and a key head, or a part of its pages
if there are fewer such pairs than cores. For several tokens of one sequence ("chunk"), it is a key head and some
queries. New keys and values are appended before they are read: in the unit itself if no other unit reads them, else in
a separate loop.

The pages of a sequence are divided into blocks by position. The sums of a block start at its first page, and blocks are
merged in order, whichever units compute them: a row's result depends only on its sequence, not on other rows, on the
start of a chunk, or on the number of cores.

A unit of a chunk has many rows, and widens each page to float32 once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T

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
    Registers,
    broadcast,
    ceil_div,
    either,
    int64,
    lane_indices,
    lane_of,
    let,
    loop,
    materialize,
    minimum,
    over_lanes,
    vector_type,
    when,
    zeros,
)
from ...core.work_split import part, tasks_for
from ...math.casts import cast
from ...math.vector_math import ROUNDER, clamp, constant, exp_nonpositive, tanh
from ...microkernel import amx
from ...microkernel.microkernel import VectorTile
from .heads import emit_head
from .spec import BLOCK_PAGES, MIN_SCORE, Page, Plan, Tensors, Unit, page_of, plan_for, slot_position, table_entry

# Attention of a unit's rows to a page: scores, online softmax, sums of values.
#
# Rows of a unit are queries times heads of a group, with the heads of a query next to each other. A larger row maximum
# rescales earlier sums (Milakov and Gimelshein, "Online normalizer calculation for softmax"), within a block of pages
# and from block to block.

_MAX_REGISTER_VECTORS = 4
"""Maximum number of vectors of a row's scores that stay in registers; more are loaded again."""


@dataclass(frozen=True)
class Pages:
    """Pages from `begin` up to `end` of a slot and a key head, which a unit's rows attend to.

    Attributes
    ----------
    last : PrimExpr
        Last position that is visible to any row.
    queries : PrimExpr
        Number of queries.
    limits : Callable
        Function from a query of the unit to the first and the last position visible to it.
    bounds : tuple of PrimExpr
        First and last position that are visible to all rows.
    """

    slot: Expr
    head: Expr
    begin: Expr
    end: Expr
    last: Expr
    queries: Expr
    limits: Callable[[Expr], tuple[Expr, Expr]]
    bounds: tuple[Expr, Expr]


@dataclass(frozen=True)
class Span:
    """Tokens of a page that are visible to a unit's rows.

    Attributes
    ----------
    first : PrimExpr
        Position of the page's first token.
    count : PrimExpr
        Tokens of the page up to the last that is visible to any row.
    tiles : PrimExpr
        Number of tiles of rows, the last one padded.
    is_whole : PrimExpr
        Whether the whole page is visible to every query.
    following : PrimExpr
        Offset of the next page's keys, in elements, for prefetching.
    """

    pages: Pages
    page: Page
    first: Expr
    count: Expr
    tiles: Expr
    is_whole: Expr
    following: Expr


def start_rows(unit: Unit, rows: Expr, prefix: str = "") -> None:
    """Initialize the softmax state of rows for a block, with padding rows of the last tile; "all_": over all blocks."""
    lanes, row_vectors = unit.plan.width_lanes, unit.problem.size // unit.plan.width_lanes
    vectors = materialize(rows * row_vectors) if prefix else unit.plan.rows * row_vectors
    with loop(rows) as row:
        unit.store(f"{prefix}maxima", row, tirx.const(MIN_SCORE, "float32"))
        unit.store(f"{prefix}totals", row, tirx.const(0.0, "float32"))
    with loop(vectors) as vector:
        unit.store(f"{prefix}sums", vector * lanes, zeros("float32", lanes), lanes)


def add_block(
    unit: Unit,
    row: Expr,
    state: tuple[Expr, Expr],
    each: Callable[[Callable[[Expr, Expr, int], None]], None],
) -> None:
    """Merge a block into a row's state over all blocks: its maximum and total, and the sums that `each` visits."""
    before, block_max = let(unit.load("all_maxima", row)), let(state[0])
    row_max = let(T.Select(before > block_max, before, block_max))
    old, new = let(exp_nonpositive(before - row_max)), let(exp_nonpositive(block_max - row_max))
    unit.store("all_totals", row, unit.load("all_totals", row) * old + state[1] * new)
    unit.store("all_maxima", row, row_max)

    def add(column: Expr, value: Expr, lanes: int) -> None:
        index = materialize(row * unit.problem.size + column)
        factors = [broadcast(factor, lanes) for factor in (old, new)]
        unit.store("all_sums", index, unit.load("all_sums", index, lanes) * factors[0] + value * factors[1], lanes)

    each(add)


def emit_page(unit: Unit, span: Span) -> None:
    """Write the rows' attention to a page, which updates their state."""
    if unit.plan.is_widened:
        _widen(unit, span)
    _emit_scores(unit, span)
    _emit_softmax(unit, span)
    _emit_values(unit, span)


def _widen(unit: Unit, span: Span) -> None:
    """Convert a page's keys and values to floats in scratch, in panels."""
    plan, page, size = unit.plan, span.page, unit.problem.size
    with loop(plan.key_panels) as panel, loop(size) as row:
        for vector in range(plan.tile_vectors):
            column = panel * plan.columns + vector * plan.lanes
            value = page.load(materialize(page.start + row * PAGE + column), plan.lanes)
            unit.store("keys", (panel * size + row) * plan.columns + vector * plan.lanes, value, plan.lanes)
    for first, vectors in plan.value_panels:
        width = vectors * plan.width_lanes
        with loop(span.count) as token:
            for vector in range(vectors):
                column = first + vector * plan.width_lanes
                value = page.load(materialize(page.values + token * size + column), plan.width_lanes)
                index = first * PAGE + token * width + vector * plan.width_lanes
                unit.store("values", index, value, plan.width_lanes)


def _tile(unit: Unit, vectors: int, lanes: int) -> VectorTile:
    """The accumulators of a tile of rows, cleared."""
    rows = unit.plan.tile_rows
    tile = VectorTile(FLOAT32_FMA, Registers(rows * vectors, "float32", lanes), rows, vectors, lanes)
    tile.clear()
    return tile


def _prefetcher(unit: Unit, page: Page, start: Expr, each: int) -> Callable[[Expr], None] | None:
    """Function that prefetches `each` elements in each step, from `start` on; None for many rows.

    The computation of few rows takes no longer than reading a page from memory.
    """
    line = CACHE_LINE_BYTES // bytes_of(page.dtype)
    has_few_rows = not unit.plan.is_widened and unit.plan.rows == unit.plan.tile_rows
    if unit.plan.lanes == 1 or not has_few_rows or each < line:
        return None
    start, data = materialize(start), unit.tensors.data["pages"]

    def prefetch_step(k: Expr) -> None:
        for number in range(each // line):
            amx.prefetch(T.address_of(data[start + k * each + number * line]))

    return prefetch_step


def _emit_scores(unit: Unit, span: Span) -> None:
    plan = unit.plan
    panels = materialize(ceil_div(span.count, plan.columns))
    # A panel of keys stays in the L1 cache for all tiles.
    with loop(panels) as panel, loop(span.tiles) as tile:
        _emit_score_tile(unit, span, panel, tile)


def _emit_score_tile(unit: Unit, span: Span, panel: Expr, tile: Expr) -> None:
    plan, problem, page = unit.plan, unit.problem, span.page
    column = materialize(panel * plan.columns)
    rows = materialize(unit.at("queries", tile * (plan.tile_rows * problem.size)))
    keys = materialize(unit.at("keys", column * problem.size) if plan.is_widened else page.start + column)

    def key(k: Expr, vector: int) -> Expr:
        if plan.is_widened:
            return unit.scratch[lane_indices(keys + k * plan.columns + vector * plan.lanes, plan.lanes)]
        return page.load(keys + k * PAGE + vector * plan.lanes, plan.lanes)

    def query(k: Expr, row: int) -> Expr:
        return unit.scratch[rows + row * problem.size + k]

    # The CPU prefetches keys by itself, because they are read sequentially; values are prefetched here.
    ahead = _prefetcher(unit, page, page.values + column * problem.size, plan.columns)
    products = _tile(unit, plan.tile_vectors, plan.lanes)
    products.multiply(problem.size, query, key, prefetch_step=ahead)
    for row in range(plan.tile_rows):
        for vector in range(plan.tile_vectors):
            score = products.sums[row * plan.tile_vectors + vector]
            if page.dtype == "int8":
                score = score * page.scales(0, column + vector * plan.lanes, plan.lanes)
            if problem.softcap:
                cap = broadcast(tirx.const(problem.softcap, "float32"), plan.lanes)
                score = tanh(let(score * broadcast(tirx.const(1.0 / problem.softcap, "float32"), plan.lanes))) * cap
            index = (tile * plan.tile_rows + row) * PAGE + column + vector * plan.lanes
            unit.store("scores", index, score, plan.lanes)


def _emit_softmax(unit: Unit, span: Span) -> None:
    """Replace scores by softmax weights, and update maxima, totals and rescaling factors."""

    def rows(hides: bool) -> None:
        with loop(span.pages.queries) as query:
            limits = span.pages.limits(query) if hides else ()
            visible = tuple(materialize(position - span.first) for position in limits)
            with loop(unit.problem.group) as head:
                _emit_softmax_row(unit, span, materialize(query * unit.problem.group + head), visible or None)

    either(span.is_whole, lambda: rows(False), lambda: rows(True))


def _emit_softmax_row(unit: Unit, span: Span, row: Expr, visible: tuple[Expr, Expr] | None) -> None:
    """Write the softmax of a row; `visible` has its first and last visible token (None: all)."""
    lanes = unit.plan.lanes
    columns = range(0, PAGE, lanes) if PAGE // lanes <= _MAX_REGISTER_VECTORS else None

    def each(body: Callable[[Expr, int], None]) -> None:
        if columns is not None:
            for number, column in enumerate(columns):
                body(tirx.const(column, "int64"), number)
            return
        with loop(PAGE // lanes) as vector:
            body(materialize(vector * lanes), 0)

    scores: dict[int, Expr] = {}

    def score_at(column: Expr, number: int) -> Expr:
        if number in scores and columns is not None:
            return scores[number]
        score = unit.load("scores", row * PAGE + column, lanes)
        scores[number] = let(score) if visible is None else _mask_scores(score, column, *visible, lanes)
        return scores[number]

    before = let(unit.load("maxima", row))
    row_max = Registers(1, "float32", lanes)
    row_max[0] = broadcast(before, lanes)

    def update_max(column: Expr, number: int) -> None:
        row_max[0] = T.max(row_max[0], score_at(column, number))

    each(update_max)
    new_max = let(over_lanes(row_max[0], T.max, lanes))
    factor = let(exp_nonpositive(before - new_max))
    total = Registers(1, "float32", lanes)
    total[0] = zeros("float32", lanes)

    def store_weights(column: Expr, number: int) -> None:
        token_weights = let(exp_nonpositive(score_at(column, number) - broadcast(new_max, lanes)))
        total[0] = total[0] + token_weights
        if span.page.dtype == "int8":
            token_weights = token_weights * span.page.scales(1, column, lanes)
            if visible is not None:  # scales of tokens that were never written are undefined
                token_weights = T.Select(_is_visible(column, *visible, lanes), token_weights, zeros("float32", lanes))
        unit.store("scores", row * PAGE + column, token_weights, lanes)

    each(store_weights)
    page_total = over_lanes(total[0], lambda left, right: left + right, lanes)
    unit.store("totals", row, unit.load("totals", row) * factor + page_total)
    unit.store("maxima", row, new_max)
    unit.store("factors", row, factor)


def _is_visible(column: Expr, low: Expr, high: Expr, lanes: int) -> Expr:
    numbers = tirx.Cast("int32", column) if lanes == 1 else T.ramp(tirx.Cast("int32", column), 1, lanes)
    bounds = [broadcast(tirx.Cast("int32", bound), lanes) for bound in (low, high)]
    return tirx.And(numbers >= bounds[0], numbers <= bounds[1])


def _mask_scores(score: Expr, column: Expr, low: Expr, high: Expr, lanes: int) -> Expr:
    """Scores with `MIN_SCORE` for masked keys."""
    min_score = broadcast(tirx.const(MIN_SCORE, "float32"), lanes)
    return let(T.Select(_is_visible(column, low, high, lanes), score, min_score))


def _emit_values(unit: Unit, span: Span) -> None:
    """Accumulate values with their softmax weights; sums are stored in panels, row by row."""
    plan = unit.plan
    whole_panels = [(first, vectors) for first, vectors in plan.value_panels if vectors == plan.tile_vectors]
    if whole_panels:
        with loop(len(whole_panels)) as panel, loop(span.tiles) as tile:
            _emit_value_tile(
                unit, span, materialize(panel * (plan.tile_vectors * plan.width_lanes)), plan.tile_vectors, tile
            )
    for first, vectors in plan.value_panels[len(whole_panels) :]:
        with loop(span.tiles) as tile:
            _emit_value_tile(unit, span, tirx.const(first, "int64"), vectors, tile)


def _emit_value_tile(unit: Unit, span: Span, column: Expr, vectors: int, tile: Expr) -> None:
    plan, page, size = unit.plan, span.page, unit.problem.size
    lanes, width = plan.width_lanes, vectors * plan.width_lanes
    values = materialize(unit.at("values", column * PAGE) if plan.is_widened else page.values + column)
    weights = materialize(unit.at("scores", tile * (plan.tile_rows * PAGE)))

    def value(k: Expr, vector: int) -> Expr:
        if plan.is_widened:
            return unit.scratch[lane_indices(values + k * width + vector * lanes, lanes)]
        return page.load(values + k * size + vector * lanes, lanes)

    def weight(k: Expr, row: int) -> Expr:
        return unit.scratch[weights + row * PAGE + k]

    ahead = _prefetcher(unit, page, span.following + column * PAGE, width)
    products = _tile(unit, vectors, lanes)
    products.multiply(span.count, weight, value, prefetch_step=ahead)
    for row in range(plan.tile_rows):
        number = tile * plan.tile_rows + row
        factor = let(broadcast(unit.load("factors", number), lanes))
        for vector in range(vectors):
            index = column * plan.rows + number * width + vector * lanes
            before = unit.load("sums", index, lanes)
            unit.store("sums", index, before * factor + products.sums[row * vectors + vector], lanes)


def for_sums(unit: Unit, row: Expr, body: Callable[[Expr, Expr, int], None]) -> None:
    """Run `body` with the first column of each vector of a row's sums, the sums, and the number of lanes."""
    plan, lanes = unit.plan, unit.plan.width_lanes
    for first, vectors in plan.value_panels:
        for vector in range(vectors):
            index = first * plan.rows + row * (vectors * lanes) + vector * lanes
            body(tirx.const(first + vector * lanes, "int64"), let(unit.load("sums", index, lanes)), lanes)


# Appending a row's new key and value to the page of its position.

_MAX_FLOAT16 = 65504.0


def emit_append(
    problem: CachedAttentionProblem, plan: Plan, tensors: Tensors, row: Expr, head: Expr, slot: Expr, position: Expr
) -> None:
    """Write a row's key and value of one head, unless it lacks a page."""
    number = materialize(T.max(position, int64(0)) // PAGE)
    entry = table_entry(tensors, slot, number)
    with when(tirx.all(position >= 0, entry >= 0)):
        page = page_of(tensors, problem, entry, head)
        token = materialize(position % PAGE)
        width = (problem.heads + 2 * problem.kv_heads) * problem.size
        key = materialize(row * width + (problem.heads + head) * problem.size)
        _write(problem, plan, page, row, key, "k_norm", token)
        _write(problem, plan, page, row, materialize(key + problem.kv_heads * problem.size), "", token)


def _write(
    problem: CachedAttentionProblem, plan: Plan, page: Page, row: Expr, start: Expr, norm: str, token: Expr
) -> None:
    """Write a key (with a norm's name) or a value (without) to its page."""
    key_or_value = 0 if norm else 1
    first = materialize(page.start + token) if norm else materialize(page.values + token * problem.size)
    step = PAGE if norm and problem.order == "lanes" else 1
    if norm and problem.order != "lanes":
        first = materialize(page.start + token * problem.size)
    tensors = page.tensors
    inverse = None
    if page.dtype == "int8":
        row_max = Registers(1, "float32", 1)
        row_max[0] = zeros("float32", 1)

        def update_max(_index: Expr, value: Expr, lanes: int) -> None:
            vector_max = let(over_lanes(let(T.max(value, zeros("float32", lanes) - value)), T.max, lanes))
            # Not T.max: TVM's C code would use the register's first value for all later ones.
            row_max[0] = T.Select(row_max[0] > vector_max, row_max[0], vector_max)

        emit_head(problem, tensors, plan.width_lanes, row, start, norm, update_max)
        scale = let(row_max[0] * tirx.const(1.0 / 127.0, "float32"))
        T.buffer_store(tensors.data["scales"], scale, [page.scale_at(key_or_value, token)])
        zero, min_max = tirx.const(0.0, "float32"), tirx.const(1e-35, "float32")
        inverse = let(T.Select(scale > zero, tirx.const(127.0, "float32") / T.max(row_max[0], min_max), zero))

    def store(index: Expr, value: Expr, lanes: int) -> None:
        encoded = _encode(value, page.dtype, lanes, inverse)
        _store(tensors.data["pages"], materialize(first + index * step), encoded, lanes, step)

    emit_head(problem, tensors, plan.width_lanes, row, start, norm, store)


def _encode(value: Expr, dtype: str, lanes: int, inverse: Expr | None) -> Expr:
    """Elements in the type of a page: float16 clamped to its range, int8 rounded to the nearest."""
    if inverse is not None:
        # The sum is rounded to the nearest integer, which is then in the low bits.
        shifted = let(value * broadcast(inverse, lanes) + constant(value, ROUNDER))
        return T.cast(T.reinterpret(vector_type("int32", lanes), shifted), vector_type("int8", lanes))
    return cast(clamp(value, -_MAX_FLOAT16, _MAX_FLOAT16), dtype) if dtype == "float16" else value


def _store(data: Any, index: Expr, value: Expr, lanes: int, step: int) -> None:
    if lanes == 1:
        T.buffer_store(data, value, [index])
    elif step == 1:
        T.buffer_store(data, value, [lane_indices(index, lanes)])
    else:
        slot = Registers(1, str(tvm.DataType(data.dtype)), lanes)
        slot[0] = value
        for lane in range(lanes):
            T.buffer_store(data, lane_of(slot[0], lane), [index + lane * step])


_ACTIVATIONS = ("float32", "float16")
_PAGES = ("float16", "float32", "int8")


def cached_attention_kernel(problem: CachedAttentionProblem, cpu: CpuTarget) -> tirx.PrimFunc:
    """The kernel of an attention with a cache.

    Parameters
    ----------
    problem : CachedAttentionProblem
        Attention with activations of float32 or float16, and pages of float16, float32 or int8 with keys in "lanes".
    cpu : CpuTarget

    Returns
    -------
    tirx.PrimFunc
        Kernel with the parameters of `CachedAttentionProblem`, then scratch; pages are written in place.

    Raises
    ------
    EncodingError
        If a tensor has another type, or keys another order.
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
        # Blocks of pages whose sums are stored, if several units share a row.
        self.stored_blocks = self.tensors.rows * problem.heads * self.plan.max_blocks if self.plan.splits > 1 else 0
        self.task_scratch_size = self.plan.tasks * self.plan.offsets["end"]
        total = self.task_scratch_size + self.stored_blocks * (problem.size + 2)
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
            elif self.plan.splits > 1:
                self._append_all()
                self._decode()
                self._merge()
            else:
                self._decode()

    # -- writing

    def _append_all(self) -> None:
        """Append the keys and values of all rows, before any is read."""
        problem, rows = self.problem, self.tensors.rows
        units = rows * problem.kv_heads
        work = units * problem.size * 2 * 4 if isinstance(units, int) else None
        tasks = tasks_for(self.cpu.cores, "bytes", work)
        sequence = self.tensors.integer("sequences", int64(0)) if problem.rows == "chunk" else None
        with loop(tasks, parallel=tasks > 1) as task:
            begin, end = part(units, tasks, task)
            with loop(materialize(end - begin)) as number:
                pair = materialize(begin + number)
                row, head = materialize(pair // problem.kv_heads), materialize(pair % problem.kv_heads)
                slot, position = self._slot_and_position(row, sequence)
                emit_append(problem, self.plan, self.tensors, row, head, slot, position)

    def _slot_and_position(self, row: Expr, sequence: Expr | None) -> tuple[Expr, Expr]:
        """Slot and position of a row; position -1 if it does not belong to the chunk's sequence."""
        row_sequence = self.tensors.integer("sequences", row)
        if sequence is not None:
            row_sequence = materialize(tirx.Select(row_sequence.equal(sequence), row_sequence, int64(-1)))
        return slot_position(self.tensors, row, row_sequence)

    # -- one token of each sequence

    def _decode(self) -> None:
        problem, plan = self.problem, self.plan
        units = materialize(self.tensors.rows * (problem.kv_heads * plan.splits))
        with loop(plan.tasks, parallel=plan.tasks > 1) as task:
            unit = self._unit(task)
            begin, end = part(units, plan.tasks, task)
            with loop(materialize(end - begin)) as number:
                self._decode_unit(unit, materialize(begin + number))

    def _decode_unit(self, unit: Unit, number: Expr) -> None:
        problem, plan = self.problem, self.plan
        split = materialize(number % plan.splits)
        pair = materialize(number // plan.splits)
        row, head = materialize(pair // problem.kv_heads), materialize(pair % problem.kv_heads)
        slot, position = self._slot_and_position(row, None)
        if plan.splits == 1:
            emit_append(problem, plan, self.tensors, row, head, slot, position)
        self._prepare(unit, row, head, int64(1))
        first_visible = self._first_visible(position)
        first, end = materialize(first_visible // PAGE), materialize((position + PAGE) // PAGE)
        bounds = (first_visible, position)
        pages = Pages(slot, head, first, end, position, int64(1), lambda _: bounds, bounds)
        first_block, last_block = _blocks(first, end)
        if plan.splits == 1:
            self._attend(unit, pages, (first_block, last_block), lambda _: self._add(unit, int64(1)))
            self._finish(unit, row, head, int64(1))
            return
        begin_part, end_part = part(materialize(last_block - first_block), plan.splits, split)
        first_head = materialize(row * problem.heads + head * problem.group)
        self._attend(
            unit,
            pages,
            (materialize(first_block + begin_part), materialize(first_block + end_part)),
            lambda block: self._store_block(unit, first_head, materialize(block - first_block)),
        )

    # -- a run of tokens of one sequence

    def _chunk(self) -> None:
        problem, plan, tensors = self.problem, self.plan, self.tensors
        tiles = materialize(ceil_div(tensors.rows, plan.queries))
        units = materialize(tiles * problem.kv_heads)
        sequence = tensors.integer("sequences", int64(0))
        with loop(plan.tasks, parallel=plan.tasks > 1) as task:
            unit = self._unit(task)
            # Later queries see more keys, so that neighbours go to different tasks.
            with loop(materialize((units - task + (plan.tasks - 1)) // plan.tasks)) as number:
                pair = materialize(task + number * plan.tasks)
                self._chunk_unit(unit, materialize(pair // tiles), materialize(pair % tiles * plan.queries), sequence)

    def _chunk_unit(self, unit: Unit, head: Expr, first: Expr, sequence: Expr) -> None:
        plan, tensors = self.plan, self.tensors
        count = materialize(minimum(tensors.rows - first, int64(plan.queries)))
        self._prepare(unit, first, head, count)
        slot, _ = slot_position(tensors, int64(0), sequence)
        ends = [T.alloc_buffer((1,), "int64", scope="global") for _ in range(2)]
        zero = tirx.const(0, "int64")
        T.buffer_store(ends[0], tensors.extent("table", 1) * PAGE, [zero])
        T.buffer_store(ends[1], int64(-1), [zero])
        with loop(count) as query:
            _, position = self._slot_and_position(materialize(first + query), sequence)
            with when(position >= 0):
                T.buffer_store(ends[0], T.min(ends[0][zero], self._first_visible(position)), [zero])
                T.buffer_store(ends[1], T.max(ends[1][zero], position), [zero])
        last = materialize(ends[1][zero] + 0)
        begin = materialize(ends[0][zero] // PAGE)
        end = materialize((last + PAGE) // PAGE)

        def limits(query: Expr) -> tuple[Expr, Expr]:
            _, position = self._slot_and_position(materialize(first + query), sequence)
            return self._first_visible(position), position

        _, earliest = self._slot_and_position(first, sequence)
        pages = Pages(slot, head, begin, end, last, count, limits, (self._first_visible(last), earliest))
        self._attend(unit, pages, _blocks(begin, end), lambda _: self._add(unit, count))
        self._finish(unit, first, head, count)

    # -- both

    def _unit(self, task: Expr) -> Unit:
        start = materialize(task * self.plan.offsets["end"])
        return Unit(self.problem, self.plan, self.tensors, self.scratch, start)

    def _first_visible(self, position: Expr) -> Expr:
        """The first position that is visible to a query at a position."""
        if not self.problem.window:
            return int64(0)
        return materialize(T.max(position - (self.problem.window - 1), int64(0)))

    def _prepare(self, unit: Unit, first: Expr, head: Expr, count: Expr) -> None:
        """Write a unit's queries, normalized, rotated and scaled, to scratch, and initialize the state of its rows."""
        problem, plan = self.problem, self.plan
        width = (problem.heads + 2 * problem.kv_heads) * problem.size
        with loop(count) as query, loop(problem.group) as number:
            row = materialize(first + query)
            start = materialize(row * width + (head * problem.group + number) * problem.size)
            target = materialize((query * problem.group + number) * problem.size)

            def store(index: Expr, value: Expr, lanes: int, target: Expr = target) -> None:
                scale = broadcast(tirx.const(problem.scale, "float32"), lanes)
                unit.store("queries", materialize(target + index), value * scale, lanes)

            emit_head(problem, self.tensors, plan.width_lanes, row, start, "q_norm", store)
        start_rows(unit, materialize(count * problem.group), "all_")

    def _attend(self, unit: Unit, pages: Pages, blocks: tuple[Expr, Expr], end_block: Callable[[Expr], None]) -> None:
        """Attend from the unit's rows to its pages, in the blocks from the first up to the second.

        `end_block` handles the sums of each block.
        """
        rows, (first_block, last_block) = materialize(pages.queries * self.problem.group), blocks
        with loop(materialize(T.max(last_block - first_block, int64(0)))) as number:
            block = materialize(first_block + number)
            start_rows(unit, rows)
            begin = materialize(T.max(pages.begin, block * BLOCK_PAGES))
            end = materialize(T.min(pages.end, block * BLOCK_PAGES + BLOCK_PAGES))
            with loop(materialize(end - begin)) as page:
                self._attend_page(unit, pages, materialize(begin + page))
            end_block(block)

    def _attend_page(self, unit: Unit, pages: Pages, index: Expr) -> None:
        entry = table_entry(self.tensors, pages.slot, index)
        with when(entry >= 0):
            page = page_of(self.tensors, self.problem, entry, pages.head)
            first = materialize(index * PAGE)
            count = materialize(T.min(pages.last - first + 1, int64(PAGE)))
            is_whole = tirx.all(first >= pages.bounds[0], first + (PAGE - 1) <= pages.bounds[1])
            # The last page prefetches itself.
            number = table_entry(self.tensors, pages.slot, T.min(index + 1, pages.end - 1))
            following = page_of(self.tensors, self.problem, T.max(number, int64(0)), pages.head).start
            tiles = materialize(ceil_div(pages.queries * self.problem.group, self.plan.tile_rows))
            emit_page(unit, Span(pages, page, first, count, tiles, is_whole, following))

    def _add(self, unit: Unit, queries: Expr) -> None:
        """Merge the sums of a block into those of the blocks before."""
        with loop(materialize(queries * self.problem.group)) as row:
            add_block(
                unit,
                materialize(row + 0),
                (unit.load("maxima", row), unit.load("totals", row)),
                lambda body: for_sums(unit, row, body),
            )

    def _finish(self, unit: Unit, first: Expr, head: Expr, count: Expr) -> None:
        """Write the rows' averages to the result."""
        problem = self.problem
        with loop(count) as query, loop(problem.group) as number:
            row = materialize(query * problem.group + number)
            self._finish_row(unit, row, materialize((first + query) * problem.heads + head * problem.group + number))

    def _finish_row(self, unit: Unit, row: Expr, number: Expr) -> None:
        """Write a row's average to a row of the result."""
        size, lanes = self.problem.size, self.plan.width_lanes
        average = let(tirx.const(1.0, "float32") / T.max(unit.load("all_totals", row), tirx.const(1e-30, "float32")))
        with loop(size // lanes) as vector:
            column = materialize(vector * lanes)
            value = unit.load("all_sums", row * size + column, lanes)
            self._write(materialize(number * size + column), let(value * broadcast(average, lanes)), lanes)

    def _write(self, index: Expr, value: Expr, lanes: int) -> None:
        T.buffer_store(self.tensors.data["out"], cast(value, self.problem.out.dtype), [lane_indices(index, lanes)])

    # -- blocks of a row in several units

    def _block_offsets(self, head: Expr, block: Expr) -> tuple[Expr, Expr]:
        """Offsets of a block's stored sums, and of its maximum and total, which are stored after all sums."""
        number = materialize(head * self.plan.max_blocks + block)
        return (
            materialize(self.task_scratch_size + number * self.problem.size),
            materialize(self.task_scratch_size + self.stored_blocks * self.problem.size + number * 2),
        )

    def _store_block(self, unit: Unit, first_head: Expr, block: Expr) -> None:
        with loop(self.problem.group) as number:
            sums, state = self._block_offsets(materialize(first_head + number), block)
            T.buffer_store(self.scratch, unit.load("maxima", number), [state])
            T.buffer_store(self.scratch, unit.load("totals", number), [state + 1])

            def keep(column: Expr, value: Expr, lanes: int, sums: Expr = sums) -> None:
                T.buffer_store(self.scratch, value, [lane_indices(sums + column, lanes)])

            for_sums(unit, number, keep)

    def _merge(self) -> None:
        """Merge the blocks of each row and head, in order, and write the result."""
        plan, units = self.plan, materialize(self.tensors.rows * self.problem.heads)
        with loop(plan.tasks, parallel=plan.tasks > 1) as task:
            unit = self._unit(task)
            begin, end = part(units, plan.tasks, task)
            with loop(materialize(end - begin)) as number:
                self._merge_unit(unit, materialize(begin + number))

    def _merge_unit(self, unit: Unit, head: Expr) -> None:
        size, lanes, row = self.problem.size, self.plan.width_lanes, int64(0)
        start_rows(unit, int64(1), "all_")
        _, position = self._slot_and_position(materialize(head // self.problem.heads), None)
        first, last = _blocks(
            materialize(self._first_visible(position) // PAGE), materialize((position + PAGE) // PAGE)
        )
        with loop(materialize(T.max(last - first, int64(0)))) as block:
            sums, state = self._block_offsets(head, block)

            def each(body: Callable[[Expr, Expr, int], None], sums: Expr = sums) -> None:
                with loop(size // lanes) as vector:
                    column = materialize(vector * lanes)
                    body(column, let(self.scratch[lane_indices(sums + column, lanes)]), lanes)

            add_block(unit, row, (self.scratch[state], self.scratch[state + 1]), each)
        self._finish_row(unit, row, head)


def _blocks(begin: Expr, end: Expr) -> tuple[Expr, Expr]:
    """The first block of some pages, and the block after their last."""
    return materialize(begin // BLOCK_PAGES), materialize((end + (BLOCK_PAGES - 1)) // BLOCK_PAGES)
