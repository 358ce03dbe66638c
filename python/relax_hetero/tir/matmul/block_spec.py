"""Facts shared by the kernels of products with block-quantized weights, stores of their results, and sums of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.block_panels import PanelPlan
from ...encoding.problem import QuantizedMatmulProblem
from ..core.builder import Expr, Masks, ceil_div, lane_mask, let, loop, materialize, over_columns, over_lanes
from ..core.view import OperandView
from ..elementwise.expression_code import EpilogueCode
from .weight_unpacking import PanelReader

# Weights without a scale that one accumulator adds up: the error of a sum of random numbers grows with their count,
# that of a sum of shorter sums with its square root. Few rows add up several such sums in parallel.
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
        Registers for accumulators, without those for unpacking and the broadcast factor.
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
    def plan(self) -> PanelPlan:
        """The layout of a panel."""
        return self.problem.plan

    @cached_property
    def chain(self) -> int:
        """Weights of one scale that an accumulator adds up; a long block is several chains."""
        block = self.plan.block
        if block <= MAX_CHAIN:
            return block
        return MAX_CHAIN if self.plan.form.is_plain else gcd(block, MAX_CHAIN)

    @property
    def chains(self) -> int:
        """Number of chains of a row."""
        return ceil_div(self.problem.depth, self.chain)


@dataclass(frozen=True)
class BlockTile:
    """A register tile: `rows` rows of a panel from `row` on; rows from `end` on (None: no end) are not stored.

    Attributes
    ----------
    panel : PrimExpr
        Panel of the result's columns.
    first : PrimExpr
        First row of the left operand whose sums are stored.
    lefts, results : tuple of PrimExpr
        For each row its number in the left operand and in the result, if they differ from the tile's.
    packed : PrimExpr or None
        Number of the panel in the packed weights, if it differs from `panel`.
    """

    row: Expr
    rows: int
    end: Expr
    panel: Expr
    first: Expr
    lefts: tuple[Expr, ...] = ()
    results: tuple[Expr, ...] = ()
    packed: Expr = None

    @property
    def row_numbers(self) -> list[Expr]:
        """The tile's rows, clamped to the last one that exists."""
        return clamped_rows(self.row, self.rows, self.end)


def clamped_rows(row: Expr, rows: int, end: Expr) -> list[Expr]:
    """The numbers of `rows` rows from `row` on, clamped to the last one before `end` (None: no end)."""
    return [row + i if end is None or i == 0 else T.min(row + i, end - 1) for i in range(rows)]


def for_columns(spec: BlockSpec, panel: Expr, body: Callable[[Masks], None]) -> None:
    """Write code for the columns of a panel; `body` takes a mask for each existing vector (None: whole)."""
    problem = spec.problem
    over_columns(panel * problem.panel, problem.panel, problem.columns, spec.lanes, body)


def store_row(spec: BlockSpec, row: Expr, panel: Expr, masks: Masks, total: Callable[[int], Expr]) -> None:
    """Apply the epilogue to the sums of a row, a vector for each mask, and store them."""
    for j, mask in enumerate(masks):
        at = {"m": row, "n": panel * spec.problem.panel + j * spec.lanes}
        spec.result.store(at, "n", spec.epilogue.result_at(total(j), at, mask), spec.lanes, mask)


def emit_row_sums(
    lhs: OperandView,
    row: Expr,
    depth: int,
    chain: int,
    lanes: int,
    target: tuple[Any, Expr],
    rounded: Callable[[Expr], Expr] = lambda value: value,
) -> None:
    """Write the sums of each `chain` elements of a row, which the minimums of weights multiply.

    Parameters
    ----------
    lhs : OperandView
    row : PrimExpr
    depth, chain : int
        Elements of the row and of a chain.
    lanes : int
        Lanes of a vector.
    target : tuple of Buffer and PrimExpr
        Buffer of float32 and the offset of the first sum.
    rounded : callable
        Rounding of elements in the product; with the same rounding here, errors multiply weights, which are smaller
        than quants.
    """
    buffer, start = target

    def chain_sum(first: Expr, size: int) -> Expr:
        total = None
        for at in range(0, size, lanes):
            mask = lane_mask(size - at, lanes)
            value = let(rounded(lhs.load({"m": row, "k": first + at}, "k", lanes, mask)))
            total = value if total is None else let(total + value)
        return over_lanes(total, lambda a, b: a + b, lanes) if lanes > 1 else total

    whole, rest = divmod(depth, chain)
    with loop(whole) as number:
        first = materialize(number * chain)
        T.buffer_store(buffer, chain_sum(first, chain), [start + number])
    if rest:
        T.buffer_store(buffer, chain_sum(tirx.const(whole * chain, "int64"), rest), [start + whole])
