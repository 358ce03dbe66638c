"""Attention of a unit's rows to a page: scores, powers of e, sums of values; softmax runs on from page to page.

Rows of a unit are queries times heads of a group, the heads of a query next to each other. Sums so far are rescaled by
the maximum that grew (Milakov and Gimelshein, "Online normalizer calculation for softmax"), within a block of pages and
from block to block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.pages import PAGE
from ....target.element_types import bytes_of
from ...core.builder import (
    CACHE_LINE_BYTES,
    Expr,
    Registers,
    broadcast,
    ceil_div,
    either,
    let,
    loop,
    materialize,
    over_lanes,
    zeros,
)
from ...math.vector_math import exp_nonpositive, tanh
from ...matmul import amx
from .spec import MIN_SCORE, Page, Unit

_WRITTEN_OUT = 4
"""Vectors of a page's scores that are kept in registers; more are read again."""


@dataclass(frozen=True)
class Span:
    """Tokens of a page that a unit's rows see.

    Attributes
    ----------
    first : PrimExpr
        Position of the page's first token.
    count : PrimExpr
        Tokens of the page up to the last that any row sees.
    tiles : PrimExpr
        Tiles of rows, the last filled up.
    queries : PrimExpr
        How many there are.
    limits : Callable
        The first and the last position that a query sees, by its number in the unit.
    is_whole : PrimExpr
        Whether every query sees all of the page.
    following : PrimExpr
        Where the next page's keys begin, in elements; to be fetched ahead.
    """

    page: Page
    first: Expr
    count: Expr
    tiles: Expr
    queries: Expr
    limits: Callable[[Expr], tuple[Expr, Expr]]
    is_whole: Expr
    following: Expr


def emit_start(unit: Unit, rows: Expr) -> None:
    """The state of rows that have seen nothing of a block; of the rows that fill the last tile, too."""
    _emit_empty(unit, "", rows, unit.plan.rows * unit.problem.size // unit.plan.width_lanes)


def start_blocks(unit: Unit, rows: Expr) -> None:
    """The state of rows that have seen no block."""
    _emit_empty(unit, "all_", rows, materialize(rows * (unit.problem.size // unit.plan.width_lanes)))


def _emit_empty(unit: Unit, prefix: str, rows: Expr, vectors: Expr) -> None:
    """The state of rows that have seen nothing, in the parts of the scratch whose names have a prefix."""
    with loop(rows) as row:
        unit.store(f"{prefix}maxima", row, tirx.const(MIN_SCORE, "float32"))
        unit.store(f"{prefix}totals", row, tirx.const(0.0, "float32"))
    lanes = unit.plan.width_lanes
    with loop(vectors) as vector:
        unit.store(f"{prefix}sums", vector * lanes, zeros("float32", lanes), lanes)


def add_block(
    unit: Unit,
    row: Expr,
    state: tuple[Expr, Expr],
    each: Callable[[Callable[[Expr, Expr, int], None]], None],
) -> None:
    """Add a block to a row's state of the blocks before: its maximum and total, and the sums that `each` gives."""
    before, row_max = let(unit.load("all_maxima", row)), let(state[0])
    now = let(T.Select(before > row_max, before, row_max))
    old, new = let(exp_nonpositive(before - now)), let(exp_nonpositive(row_max - now))
    unit.store("all_totals", row, unit.load("all_totals", row) * old + state[1] * new)
    unit.store("all_maxima", row, now)

    def add(column: Expr, value: Expr, lanes: int) -> None:
        index = materialize(row * unit.problem.size + column)
        factors = [broadcast(factor, lanes) for factor in (old, new)]
        unit.store("all_sums", index, unit.load("all_sums", index, lanes) * factors[0] + value * factors[1], lanes)

    each(add)


def emit_page(unit: Unit, span: Span) -> None:
    """The rows' attention to a page, added to their state."""
    if unit.plan.is_widened:
        _widen(unit, span)
    _emit_scores(unit, span)
    _emit_softmax(unit, span)
    _emit_values(unit, span)


def _widen(unit: Unit, span: Span) -> None:
    """A page's keys and values as floats in scratch, in the panels that many rows read."""
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
                place = first * PAGE + token * width + vector * plan.width_lanes
                unit.store("values", place, value, plan.width_lanes)


def _products(
    rows: int,
    vectors: int,
    lanes: int,
    steps: Expr,
    left: Callable[..., Expr],
    right: Callable[..., Expr],
    beside: Callable[[Expr], None] | None = None,
) -> Registers:
    """Sums over steps of ``left(k, row) * right(k, vector)``, row by row; `beside` writes what else a step does."""
    sums = Registers(rows * vectors, "float32", lanes)
    for number in range(rows * vectors):
        sums[number] = zeros("float32", lanes)
    with loop(steps) as k:
        if beside is not None:
            beside(k)
        factors = [let(right(k, vector)) for vector in range(vectors)]
        for row in range(rows):
            factor = let(broadcast(left(k, row), lanes))
            for vector in range(vectors):
                number = row * vectors + vector
                sums[number] = sums[number] + factor * factors[vector]
    return sums


def _fetching(unit: Unit, page: Page, start: Expr, each: int) -> Callable[[Expr], None] | None:
    """Function that prefetches `each` elements in each step, from `start` on; None where rows are many.

    Few rows compute no longer than memory takes to give them a page.
    """
    line = CACHE_LINE_BYTES // bytes_of(page.dtype)
    is_few = not unit.plan.is_widened and unit.plan.rows == unit.plan.tile_rows
    if unit.plan.lanes == 1 or not is_few or each < line:
        return None
    start, data = materialize(start), unit.tensors.data["pages"]

    def fetch(k: Expr) -> None:
        for number in range(each // line):
            amx.fetch(T.address_of(data[start + k * each + number * line]))

    return fetch


def _emit_scores(unit: Unit, span: Span) -> None:
    plan = unit.plan
    panels = materialize(ceil_div(span.count, plan.columns))
    # A panel of keys stays in the first-level cache for all tiles.
    with loop(panels) as panel, loop(span.tiles) as tile:
        _emit_score_tile(unit, span, panel, tile)


def _emit_score_tile(unit: Unit, span: Span, panel: Expr, tile: Expr) -> None:
    plan, problem, page = unit.plan, unit.problem, span.page
    column = materialize(panel * plan.columns)
    rows = materialize(unit.at("queries", tile * (plan.tile_rows * problem.size)))
    keys = materialize(unit.at("keys", column * problem.size) if plan.is_widened else page.start + column)

    def key(k: Expr, vector: int) -> Expr:
        if plan.is_widened:
            return unit.room[_run(keys + k * plan.columns + vector * plan.lanes, plan.lanes)]
        return page.load(keys + k * PAGE + vector * plan.lanes, plan.lanes)

    def query(k: Expr, row: int) -> Expr:
        return unit.room[rows + row * problem.size + k]

    # Keys are read from the first to the last, which the processor sees ahead; values are not, page by page.
    ahead = _fetching(unit, page, page.values + column * problem.size, plan.columns)
    sums = _products(plan.tile_rows, plan.tile_vectors, plan.lanes, problem.size, query, key, ahead)
    for row in range(plan.tile_rows):
        for vector in range(plan.tile_vectors):
            score = sums[row * plan.tile_vectors + vector]
            if page.dtype == "int8":
                score = score * page.scales(0, column + vector * plan.lanes, plan.lanes)
            if problem.softcap:
                cap = broadcast(tirx.const(problem.softcap, "float32"), plan.lanes)
                score = tanh(let(score * broadcast(tirx.const(1.0 / problem.softcap, "float32"), plan.lanes))) * cap
            index = (tile * plan.tile_rows + row) * PAGE + column + vector * plan.lanes
            unit.store("scores", index, score, plan.lanes)


def _run(index: Expr, lanes: int) -> Expr:
    return T.ramp(index, tirx.const(1, "int64"), lanes) if lanes > 1 else index


def _emit_softmax(unit: Unit, span: Span) -> None:
    """Scores become powers of e; maxima, totals and factors of what was before."""

    def rows(hides: bool) -> None:
        with loop(span.queries) as query:
            low, high = (materialize(position - span.first) for position in span.limits(query)) if hides else (0, 0)
            with loop(unit.problem.group) as head:
                _emit_softmax_row(
                    unit, span, materialize(query * unit.problem.group + head), (low, high) if hides else None
                )

    either(span.is_whole, lambda: rows(False), lambda: rows(True))


def _emit_softmax_row(unit: Unit, span: Span, row: Expr, seen: tuple[Expr, Expr] | None) -> None:
    """A row of scores; `seen` has the first and the last token that it sees, None: all."""
    lanes = unit.plan.lanes
    columns = range(0, PAGE, lanes) if PAGE // lanes <= _WRITTEN_OUT else None

    def each(body: Callable[[Expr, int], None]) -> None:
        if columns is not None:
            for number, column in enumerate(columns):
                body(tirx.const(column, "int64"), number)
            return
        with loop(PAGE // lanes) as vector:
            body(materialize(vector * lanes), 0)

    kept: dict[int, Expr] = {}

    def score_at(column: Expr, number: int) -> Expr:
        if number in kept and columns is not None:
            return kept[number]
        score = unit.load("scores", row * PAGE + column, lanes)
        kept[number] = let(score) if seen is None else _hidden(score, column, *seen, lanes)
        return kept[number]

    before = let(unit.load("maxima", row))
    row_max = Registers(1, "float32", lanes)
    row_max[0] = broadcast(before, lanes)

    def look(column: Expr, number: int) -> None:
        row_max[0] = T.max(row_max[0], score_at(column, number))

    each(look)
    now = let(over_lanes(row_max[0], T.max, lanes))
    factor = let(exp_nonpositive(before - now))
    total = Registers(1, "float32", lanes)
    total[0] = zeros("float32", lanes)

    def power_of(column: Expr, number: int) -> None:
        power = let(exp_nonpositive(score_at(column, number) - broadcast(now, lanes)))
        total[0] = total[0] + power
        if span.page.dtype == "int8":
            power = power * span.page.scales(1, column, lanes)
            if seen is not None:  # what was never written has no scale
                power = T.Select(_is_seen(column, *seen, lanes), power, zeros("float32", lanes))
        unit.store("scores", row * PAGE + column, power, lanes)

    each(power_of)
    added = over_lanes(total[0], lambda left, right: left + right, lanes)
    unit.store("totals", row, unit.load("totals", row) * factor + added)
    unit.store("maxima", row, now)
    unit.store("factors", row, factor)


def _is_seen(column: Expr, low: Expr, high: Expr, lanes: int) -> Expr:
    numbers = tirx.Cast("int32", column) if lanes == 1 else T.ramp(tirx.Cast("int32", column), 1, lanes)
    bounds = [broadcast(tirx.Cast("int32", bound), lanes) for bound in (low, high)]
    return tirx.And(numbers >= bounds[0], numbers <= bounds[1])


def _hidden(score: Expr, column: Expr, low: Expr, high: Expr, lanes: int) -> Expr:
    """Scores, the least of all where a key is not seen."""
    least = broadcast(tirx.const(MIN_SCORE, "float32"), lanes)
    return let(T.Select(_is_seen(column, low, high, lanes), score, least))


def _emit_values(unit: Unit, span: Span) -> None:
    """Values weighted by the powers of e, added to what was before; sums lie in panels, row by row."""
    plan = unit.plan
    whole = [(first, vectors) for first, vectors in plan.value_panels if vectors == plan.tile_vectors]
    if whole:
        with loop(len(whole)) as panel, loop(span.tiles) as tile:
            _emit_value_tile(
                unit, span, materialize(panel * (plan.tile_vectors * plan.width_lanes)), plan.tile_vectors, tile
            )
    for first, vectors in plan.value_panels[len(whole) :]:
        with loop(span.tiles) as tile:
            _emit_value_tile(unit, span, tirx.const(first, "int64"), vectors, tile)


def _emit_value_tile(unit: Unit, span: Span, column: Expr, vectors: int, tile: Expr) -> None:
    plan, page, size = unit.plan, span.page, unit.problem.size
    lanes, width = plan.width_lanes, vectors * plan.width_lanes
    values = materialize(unit.at("values", column * PAGE) if plan.is_widened else page.values + column)
    weights = materialize(unit.at("scores", tile * (plan.tile_rows * PAGE)))

    def value(k: Expr, vector: int) -> Expr:
        if plan.is_widened:
            return unit.room[_run(values + k * width + vector * lanes, lanes)]
        return page.load(values + k * size + vector * lanes, lanes)

    def weight(k: Expr, row: int) -> Expr:
        return unit.room[weights + row * PAGE + k]

    ahead = _fetching(unit, page, span.following + column * PAGE, width)
    sums = _products(plan.tile_rows, vectors, lanes, span.count, weight, value, ahead)
    for row in range(plan.tile_rows):
        number = tile * plan.tile_rows + row
        factor = let(broadcast(unit.load("factors", number), lanes))
        for vector in range(vectors):
            index = column * plan.rows + number * width + vector * lanes
            before = unit.load("sums", index, lanes)
            unit.store("sums", index, before * factor + sums[row * vectors + vector], lanes)


def each_sum(unit: Unit, row: Expr, body: Callable[[Expr, Expr, int], None]) -> None:
    """Run `body` with the first column of each vector of a row's sums, the sums, and their number."""
    plan, lanes = unit.plan, unit.plan.width_lanes
    for first, vectors in plan.value_panels:
        for vector in range(vectors):
            index = first * plan.rows + row * (vectors * lanes) + vector * lanes
            body(tirx.const(first + vector * lanes, "int64"), let(unit.load("sums", index, lanes)), lanes)


def tiles_of(unit: Unit, queries: Expr) -> Expr:
    """How many tiles the rows of some queries fill."""
    return materialize(ceil_div(queries * unit.problem.group, unit.plan.tile_rows))
