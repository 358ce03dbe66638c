"""Attention of a unit's rows to a page: scores, powers of e, sums of values; softmax runs on from page to page.

Rows of a unit are queries times heads of a group, the heads of a query next to each other. Sums so far are rescaled by
the maximum that grew (Milakov and Gimelshein, "Online normalizer calculation for softmax").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.pages import PAGE
from ...core.builder import (
    Expr,
    Registers,
    broadcast,
    ceil_div,
    let,
    loop,
    opaque,
    over_lanes,
    vector_type,
    zeros,
)
from ...math.vector_math import exp_nonpositive, tanh
from .spec import LEAST_SCORE, Page, Unit


@dataclass(frozen=True)
class Span:
    """What a unit's rows see of a page.

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
    """

    page: Page
    first: Expr
    count: Expr
    tiles: Expr
    queries: Expr
    limits: Callable[[Expr], tuple[Expr, Expr]]


def emit_start(unit: Unit, rows: Expr) -> None:
    """The state of rows that have seen nothing."""
    with loop(rows) as row:
        unit.store("maxima", row, tirx.const(LEAST_SCORE, "float32"))
        unit.store("totals", row, tirx.const(0.0, "float32"))
        lanes = unit.plan.width_lanes
        with loop(unit.problem.size // lanes) as vector:
            unit.store("sums", row * unit.problem.size + vector * lanes, zeros("float32", lanes), lanes)


def emit_page(unit: Unit, span: Span) -> None:
    """The rows' attention to a page, added to their state."""
    if unit.plan.is_widened:
        _widen(unit, span)
    _emit_scores(unit, span)
    _emit_softmax(unit, span)
    _emit_values(unit, span)


def _widen(unit: Unit, span: Span) -> None:
    """A page's keys and values as floats in scratch, for the many rows that read them."""
    page, lanes, size = span.page, unit.plan.lanes, unit.problem.size
    with loop(size) as row:
        for vector in range(PAGE // lanes):
            value = page.load(page.start + row * PAGE + vector * lanes, lanes)
            unit.store("keys", row * PAGE + vector * lanes, value, lanes)
    width = unit.plan.width_lanes
    with loop(span.count) as token:
        with loop(size // width) as vector:
            index = opaque(token * size + vector * width)
            unit.store("values", index, page.load(page.values + index, width), width)


def _products(
    rows: int, vectors: int, lanes: int, steps: Expr, left: Callable[..., Expr], right: Callable[..., Expr]
) -> Registers:
    """Sums over steps of ``left(k, row) * right(k, vector)``, row by row."""
    sums = Registers(rows * vectors, "float32", lanes)
    for number in range(rows * vectors):
        sums[number] = zeros("float32", lanes)
    with loop(steps) as k:
        factors = [let(right(k, vector)) for vector in range(vectors)]
        for row in range(rows):
            factor = let(broadcast(left(k, row), lanes))
            for vector in range(vectors):
                number = row * vectors + vector
                sums[number] = sums[number] + factor * factors[vector]
    return sums


def _emit_scores(unit: Unit, span: Span) -> None:
    plan, problem, page = unit.plan, unit.problem, span.page
    columns = plan.tile_vectors * plan.lanes
    with loop(span.tiles) as tile, loop(PAGE // columns) as part:
        column = opaque(part * columns)
        rows = opaque(unit.at("queries", tile * (plan.tile_rows * problem.size)))
        keys = opaque(unit.at("keys", column) if plan.is_widened else page.start + column)

        def key(k: Expr, vector: int, keys: Expr = keys) -> Expr:
            index = keys + k * PAGE + vector * plan.lanes
            if plan.is_widened:
                return unit.room[_run(index, plan.lanes)]
            return page.load(index, plan.lanes)

        def query(k: Expr, row: int, rows: Expr = rows) -> Expr:
            return unit.room[rows + row * problem.size + k]

        sums = _products(plan.tile_rows, plan.tile_vectors, plan.lanes, problem.size, query, key)
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
    plan, group = unit.plan, unit.problem.group
    vectors = PAGE // plan.lanes
    with loop(span.queries) as query:
        least, last = span.limits(query)
        low, high = (opaque(position - span.first) for position in (least, last))
        with loop(group) as head:
            row = opaque(query * group + head)
            greatest = Registers(1, "float32", plan.lanes)
            greatest[0] = broadcast(unit.load("maxima", row), plan.lanes)
            with loop(vectors) as vector:
                column = opaque(vector * plan.lanes)
                score = _hidden(unit.load("scores", row * PAGE + column, plan.lanes), column, low, high, plan.lanes)
                unit.store("scores", row * PAGE + column, score, plan.lanes)
                greatest[0] = T.max(greatest[0], score)
            before = let(unit.load("maxima", row))
            now = let(over_lanes(greatest[0], T.max, plan.lanes))
            factor = let(exp_nonpositive(before - now))
            total = Registers(1, "float32", plan.lanes)
            total[0] = zeros("float32", plan.lanes)
            with loop(vectors) as vector:
                column = opaque(vector * plan.lanes)
                index = row * PAGE + column
                power = let(exp_nonpositive(unit.load("scores", index, plan.lanes) - broadcast(now, plan.lanes)))
                total[0] = total[0] + power
                if span.page.dtype == "int8":
                    scales = span.page.scales(1, column, plan.lanes)
                    seen = _is_seen(column, low, high, plan.lanes)
                    power = T.Select(seen, power * scales, zeros("float32", plan.lanes))
                unit.store("scores", index, power, plan.lanes)
            added = over_lanes(total[0], lambda left, right: left + right, plan.lanes)
            unit.store("totals", row, unit.load("totals", row) * factor + added)
            unit.store("maxima", row, now)
            unit.store("factors", row, factor)


def _is_seen(column: Expr, low: Expr, high: Expr, lanes: int) -> Expr:
    numbers = tirx.Cast("int32", column) if lanes == 1 else T.ramp(tirx.Cast("int32", column), 1, lanes)
    bounds = [broadcast(tirx.Cast("int32", bound), lanes) for bound in (low, high)]
    return tirx.And(numbers >= bounds[0], numbers <= bounds[1])


def _hidden(score: Expr, column: Expr, low: Expr, high: Expr, lanes: int) -> Expr:
    """Scores, the least of all where a key is not seen."""
    least = broadcast(tirx.const(LEAST_SCORE, "float32"), lanes)
    return let(T.Select(_is_seen(column, low, high, lanes), score, least))


def _emit_values(unit: Unit, span: Span) -> None:
    plan, problem, page = unit.plan, unit.problem, span.page
    lanes, size = plan.width_lanes, problem.size
    whole, rest = divmod(size // lanes, plan.tile_vectors)

    def panel(tile: Expr, column: Expr, vectors: int) -> None:
        values = opaque(unit.at("values", column) if plan.is_widened else page.values + column)
        weights = opaque(unit.at("scores", tile * (plan.tile_rows * PAGE)))

        def value(k: Expr, vector: int) -> Expr:
            index = values + k * size + vector * lanes
            return unit.room[_run(index, lanes)] if plan.is_widened else page.load(index, lanes)

        def weight(k: Expr, row: int) -> Expr:
            return unit.room[weights + row * PAGE + k]

        sums = _products(plan.tile_rows, vectors, lanes, span.count, weight, value)
        for row in range(plan.tile_rows):
            number = tile * plan.tile_rows + row
            factor = let(broadcast(unit.load("factors", number), lanes))
            for vector in range(vectors):
                index = number * size + column + vector * lanes
                before = unit.load("sums", index, lanes)
                unit.store("sums", index, before * factor + sums[row * vectors + vector], lanes)

    with loop(span.tiles) as tile:
        if whole:
            with loop(whole) as part:
                panel(tile, opaque(part * (plan.tile_vectors * lanes)), plan.tile_vectors)
        if rest:
            panel(tile, tirx.const(whole * plan.tile_vectors * lanes, "int64"), rest)


def tiles_of(unit: Unit, queries: Expr) -> Expr:
    """How many tiles the rows of some queries fill."""
    return opaque(ceil_div(queries * unit.problem.group, unit.plan.tile_rows))


def float_vector(lanes: int) -> str:
    """The type of a vector of floats."""
    return vector_type("float32", lanes)
