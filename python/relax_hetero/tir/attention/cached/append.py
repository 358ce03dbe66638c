"""New keys and values of a row into the page of its position."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.pages import PAGE
from ....encoding.problem import CachedAttentionProblem
from ...core.builder import (
    Expr,
    Registers,
    broadcast,
    int64,
    lane_indices,
    lane_of,
    let,
    materialize,
    over_lanes,
    vector_type,
    when,
    zeros,
)
from ...math.casts import cast
from ...math.vector_math import ROUNDER, clamp, constant
from .heads import emit_head
from .spec import Page, Plan, Tensors, page_of, table_entry

_MAX_HALF = 65504.0


def emit_append(
    problem: CachedAttentionProblem, plan: Plan, tensors: Tensors, row: Expr, head: Expr, slot: Expr, position: Expr
) -> None:
    """Write a row's key and value of one head; nothing where it has no page."""
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
    """A key (with a norm's name) or a value (without) into its page."""
    which = 0 if norm else 1
    first = materialize(page.start + token) if norm else materialize(page.values + token * problem.size)
    step = PAGE if norm and problem.order == "lanes" else 1
    if norm and problem.order != "lanes":
        first = materialize(page.start + token * problem.size)
    tensors = page.tensors
    inverse = None
    if page.dtype == "int8":
        row_max = Registers(1, "float32", 1)
        row_max[0] = zeros("float32", 1)

        def look(_index: Expr, value: Expr, lanes: int) -> None:
            most = let(over_lanes(let(T.max(value, zeros("float32", lanes) - value)), T.max, lanes))
            # No T.max: TVM's C code would take the register's first value for all later ones.
            row_max[0] = T.Select(row_max[0] > most, row_max[0], most)

        emit_head(problem, tensors, plan.width_lanes, row, start, norm, look)
        scale = let(row_max[0] * tirx.const(1.0 / 127.0, "float32"))
        T.buffer_store(tensors.data["scales"], scale, [page.scale_at(which, token)])
        none = tirx.const(0.0, "float32")
        inverse = let(T.Select(scale > none, tirx.const(127.0, "float32") / T.max(row_max[0], _least()), none))

    def store(index: Expr, value: Expr, lanes: int) -> None:
        stored = _as_stored(value, page.dtype, lanes, inverse)
        _store(tensors.data["pages"], materialize(first + index * step), stored, lanes, step)

    emit_head(problem, tensors, plan.width_lanes, row, start, norm, store)


def _least() -> Expr:
    return tirx.const(1e-35, "float32")


def _as_stored(value: Expr, dtype: str, lanes: int, inverse: Expr | None) -> Expr:
    """Numbers as a page has them: float16 within its range, int8 rounded to the nearest."""
    if inverse is not None:
        # The sum is rounded to the nearest integer, which is in the low bits then.
        shifted = let(value * broadcast(inverse, lanes) + constant(value, ROUNDER))
        return T.cast(T.reinterpret(vector_type("int32", lanes), shifted), vector_type("int8", lanes))
    return cast(clamp(value, -_MAX_HALF, _MAX_HALF), dtype) if dtype == "float16" else value


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
