"""Facts shared by the kernels of products with block-quantized weights, stores of their results, and sums of rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.block_panels import PanelPlan
from ...encoding.problem import QuantizedMatmulProblem
from ..core.builder import Expr, Masks, ceil_div, lane_mask, let, loop, materialize, over_columns, over_lanes, when
from ..core.view import OperandView
from ..elementwise.expression_code import EpilogueCode
from .matmul_spec import emit_cases, row_cases
from .weight_unpacking import PanelReader

# Weights without a scale that one accumulator adds up: the error of a sum of random numbers grows with their count,
# that of a sum of shorter sums with its square root. Few rows add up several such sums in parallel.
MAX_CHAIN = 256

ROW_BLOCK_BYTES = 1 << 19  # bytes of a block of rows of the left operand (mc): half of an L2 cache


@dataclass(frozen=True)
class BlockSpec:
    """Facts that every tile of a kernel shares."""

    problem: QuantizedMatmulProblem
    lhs: OperandView
    result: OperandView
    epilogue: EpilogueCode
    reader: PanelReader  # reader of the weights
    # Lanes and vectors of a panel.
    lanes: int
    vectors: int
    free: int  # registers for accumulators, without those for unpacking and the broadcast factor
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
    def max_rows(self) -> Expr:
        """Maximum number of rows that a matrix is multiplied by, if all experts of a token differ."""
        return self.m if self.problem.index is None else self.m // self.problem.index.shape[1]

    @property
    def rows_of_matrix(self) -> Expr:
        """Number of rows that a matrix is multiplied by, on average."""
        return self.m // max(1, self.problem.experts)

    @property
    def chains(self) -> int:
        """Number of chains of a row."""
        return ceil_div(self.problem.depth, self.chain)


def _same_row(row: Expr) -> Expr:
    return row


@dataclass(frozen=True)
class RowBlock:
    """Rows that are prepared once, and multiplied by several panels of a matrix."""

    begin: Expr
    end: Expr
    limit: Expr  # end of all rows of the matrix: tiles before it are whole
    panels: Expr = 0  # number of packed panels before those of the matrix
    # Number in the left operand, and in the result, of a row of the block.
    lhs_row: Callable[[Expr], Expr] = _same_row
    result_row: Callable[[Expr], Expr] = _same_row

    def packed_panel(self, panel: Expr) -> Expr:
        """Number in the packed weights of a panel of the matrix."""
        return panel if isinstance(self.panels, int) and self.panels == 0 else materialize(self.panels + panel)

    def tiles(self, panel: Expr, rows: int, emit: Callable[[BlockTile], None]) -> None:
        """Write a loop over tiles of `rows` rows, with the cases of a tile: whole, or the remaining rows."""
        packed = self.packed_panel(panel)
        with loop(ceil_div(self.end - self.begin, rows)) as number:
            row = materialize(self.begin + number * rows)

            def emit_case(count: int, end: Expr) -> None:
                numbers = [row + i if end is None or i == 0 else T.min(row + i, end - 1) for i in range(count)]
                emit(BlockTile(self, panel, packed, row, end, numbers, list(map(self.result_row, numbers))))

            emit_cases(row_cases(self.limit, row, rows), emit_case)


@dataclass(frozen=True)
class BlockTile:
    """A register tile of a panel of the result's columns."""

    block: RowBlock
    # Number of the panel in the result, and in the packed weights.
    panel: Expr
    packed_panel: Expr
    # First row, and where rows end that are stored (None: no end).
    row: Expr
    end: Expr
    # The tile's rows, clamped to the last one that exists, and their numbers in the result.
    row_numbers: list[Expr]
    result_rows: list[Expr]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.row_numbers)

    def for_rows(self, body: Callable[[int], None]) -> None:
        """Write code for each row that is stored."""
        for i in range(self.rows):
            with when(True if self.end is None or i == 0 else self.row + i < self.end):
                body(i)


class PanelProduct(ABC):
    """Interface of a product of blocks of rows by panels, which has its own scratch."""

    spec: BlockSpec
    tile_rows: int  # rows of a tile
    # row_bytes, block_bytes: bytes of a prepared row, and of all rows of a block.
    row_bytes: int
    block_bytes: int
    work: int  # work of a column in a row, in multiply-adds of float32

    @abstractmethod
    def allocate(self, rows: int) -> None:
        """Allocate scratch of a task, for blocks of at most `rows` rows."""

    @abstractmethod
    def prepare(self, row: Expr, number: Expr) -> None:
        """Prepare a row of the left operand, which is row `number` of its block."""

    @abstractmethod
    def multiply(self, block: RowBlock, count: Expr, first: Expr, last: Expr) -> None:
        """Multiply a block by panels `first` to `last` of its matrix, which is multiplied by `count` rows in all."""

    def release(self) -> None:  # noqa: B027 - most have nothing to release
        """Write the end of a task, after all of its products."""


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
    # depth, chain: elements of the row and of a chain.
    depth: int,
    chain: int,
    lanes: int,  # lanes of a vector
    target: tuple[Any, Expr],  # buffer of float32 and the offset of the first sum
) -> None:
    """Write the sums of each `chain` elements of a row, which the minimums of weights multiply."""
    buffer, start = target

    def chain_sum(first: Expr, size: int) -> Expr:
        total = None
        for at in range(0, size, lanes):
            value = let(lhs.load({"m": row, "k": first + at}, "k", lanes, lane_mask(size - at, lanes)))
            total = value if total is None else let(total + value)
        return over_lanes(total, lambda a, b: a + b, lanes) if lanes > 1 else total

    whole, rest = divmod(depth, chain)
    with loop(whole) as number:
        first = materialize(number * chain)
        T.buffer_store(buffer, chain_sum(first, chain), [start + number])
    if rest:
        T.buffer_store(buffer, chain_sum(tirx.const(whole * chain, "int64"), rest), [start + whole])
