"""Sums of the left factors that meet the weights of a chain: what minimums of weights are multiplied by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..core.builder import Expr, lane_mask, let, loop, materialize, over_lanes
from ..core.view import OperandView


def emit_row_sums(
    lhs: OperandView,
    row: Expr,
    depth: int,
    chain: int,
    lanes: int,
    target: tuple[Any, Expr],
    rounded: Callable[[Expr], Expr] = lambda value: value,
) -> None:
    """Write the sums of each `chain` elements of a row, float32, to a buffer from a place on.

    Parameters
    ----------
    lhs : OperandView
    row : PrimExpr
    depth, chain : int
        Elements of the row, and how many of them are added up.
    lanes : int
        Lanes of a vector.
    target : tuple of Buffer and PrimExpr
    rounded : callable
        Function that the product applies to a vector of elements: its error then meets weights, smaller than fields.
    """
    buffer, start = target

    def sum_of(first: Expr, size: int) -> Expr:
        total = None
        for at in range(0, size, lanes):
            mask = lane_mask(size - at, lanes)
            value = let(rounded(lhs.load({"m": row, "k": first + at}, "k", lanes, mask)))
            total = value if total is None else let(total + value)
        return over_lanes(total, lambda a, b: a + b, lanes) if lanes > 1 else total

    whole, rest = divmod(depth, chain)
    with loop(whole) as number:
        first = materialize(number * chain)
        T.buffer_store(buffer, sum_of(first, chain), [start + number])
    if rest:
        T.buffer_store(buffer, sum_of(tirx.const(whole * chain, "int64"), rest), [start + whole])
