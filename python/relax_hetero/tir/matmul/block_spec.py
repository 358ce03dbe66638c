"""Facts that the code of a product with weights in blocks shares, and stores of its results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.block_panels import RecordPlan
from ...encoding.problem import QuantizedMatmulProblem
from ..core.builder import Expr, ceil_div, either, lane_mask, let, loop, materialize, over_lanes
from ..core.view import OperandView
from ..elementwise.expression_code import EpilogueCode
from .weight_unpacking import PanelReader

# Weights without a scale that are added up in one accumulator: the error of a sum of random numbers grows with their
# count, that of shorter sums added up with its square root. Few rows add up several such sums at once.
MAX_CHAIN = 256


@dataclass(frozen=True)
class BlockSpec:
    """Facts that every tile of a kernel shares.

    Attributes
    ----------
    reader : PanelReader
        Reader of the weights.
    lanes, vectors : int
        Lanes and vectors of a panel.
    free : int
        Registers for accumulators, beside what unpacking takes and what is broadcast.
    """

    problem: QuantizedMatmulProblem
    lhs: OperandView
    result: OperandView
    epilogue: EpilogueCode
    reader: PanelReader
    lanes: int
    vectors: int
    free: int
    m: Expr

    @cached_property
    def plan(self) -> RecordPlan:
        """Where everything lies in a panel."""
        return self.problem.plan

    @cached_property
    def chain(self) -> int:
        """Weights of one scale that are added up at once; a long block is several of these."""
        block = self.plan.block
        if block <= MAX_CHAIN:
            return block
        return MAX_CHAIN if self.plan.form.is_plain else gcd(block, MAX_CHAIN)

    @property
    def chains(self) -> int:
        """Number of chains of a row."""
        return ceil_div(self.problem.depth, self.chain)


def for_columns(spec: BlockSpec, panel: Expr, body: Callable[[list[Expr]], None]) -> None:
    """Write code for the columns of a panel; `body` gets a mask for each of its vectors that exist (None: whole)."""
    lanes, problem = spec.lanes, spec.problem
    whole: list[Expr] = [None] * spec.vectors
    left = problem.columns % problem.panel
    if left == 0:
        body(whole)
        return
    masks = [lane_mask(left - j * lanes, lanes) for j in range(ceil_div(left, lanes))]
    either(panel < problem.columns // problem.panel, lambda: body(whole), lambda: body(masks))


def store_row(spec: BlockSpec, row: Expr, panel: Expr, masks: list[Expr], total: Callable[[int], Expr]) -> None:
    """Apply the epilogue to the sums of a row, a vector for each mask, and store them."""
    for j, mask in enumerate(masks):
        at = {"m": row, "n": panel * spec.problem.panel + j * spec.lanes}
        spec.result.store(at, "n", spec.epilogue.result_at(total(j), at, mask), spec.lanes, mask)


# Sums of the left factors that meet the weights of a chain: what minimums of weights are multiplied by.


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
