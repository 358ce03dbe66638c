"""Facts that the tiles of a matrix product share, and those of one tile: its rows and columns, its range of k."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import sym, tirx
from tvm.script.ir_builder import tirx as T

from ...target.dot_instructions import DotInstruction
from ..core.builder import Expr, either, lane_mask, materialize, minimum, plain_extent
from ..core.view import Coordinates, OperandView
from ..elementwise.expression_code import EpilogueCode

# Steps along k between prefetches: at most, and where only the run knows how many tiles share them.
MAX_TURN = 8
MAX_CHAIN_TURN = 4  # with more, LLVM loads factors of later steps first and runs out of registers
RUN_TIME_TURN = 2


@dataclass(frozen=True)
class MatmulSpec:
    """Facts that every tile of a kernel shares.

    Attributes
    ----------
    lanes : int
        Lanes of an accumulator.
    registers : int
        Number of registers that are left for accumulators and the right operand's vectors.
    m, n, k : PrimExpr or int
        Iteration sizes; m and n rounded up where no operand needs them exact.
    """

    lhs: OperandView
    rhs: OperandView
    result: OperandView
    init: OperandView | None
    epilogue: EpilogueCode
    dot: DotInstruction
    lanes: int
    registers: int
    m: Expr
    n: Expr
    k: Expr


@dataclass(frozen=True)
class Sweep:
    """The tiles that go over one panel of the right operand, and between them prefetch the next panel.

    Attributes
    ----------
    number : PrimExpr
        Number of the tile.
    tiles : PrimExpr or int
        How many there are.
    panel : PrimExpr
        The first column of the next panel.
    """

    number: Expr
    tiles: Expr
    panel: Expr

    def turn(self, unroll: int, vectors: int, in_chains: bool) -> int:
        """Steps along k from one prefetch of a tile to the next; `in_chains`, a divisor of a chain of short sums."""
        wanted = self.tiles // vectors if isinstance(self.tiles, int) else RUN_TIME_TURN
        if in_chains:
            return max(unroll, next(turn for turn in (MAX_CHAIN_TURN, 2, 1) if turn <= max(1, wanted)))
        return max(unroll, min(MAX_TURN, wanted))

    def lines(self, turn: int, vectors: int) -> Expr:
        """Cache lines that a tile prefetches at once, so that all tiles do the panel's."""
        if isinstance(self.tiles, int):
            return max(1, turn * vectors // self.tiles)
        return materialize(tirx.floordiv(self.tiles + (turn * vectors - 1), self.tiles))


@dataclass(frozen=True)
class Tile:
    """One tile, at a place that is known when the kernel runs.

    Attributes
    ----------
    batch : Coordinates
        Coordinates of the batch dimensions.
    row, column : PrimExpr
        Coordinates of its first element.
    rows, vectors : int
        Its size.
    existing_rows : tuple of PrimExpr or None
        Row i, or the last one that exists where it does not; None: all exist.
    masks : tuple of (PrimExpr or None)
        Which lanes of vector j exist; None: all.
    rows_end : PrimExpr or None
        Rows from here on do not exist.
    sweep : Sweep or None
        Where prefetching pays.
    """

    batch: Coordinates
    row: Expr
    column: Expr
    rows: int
    vectors: int
    existing_rows: tuple[Expr, ...] | None
    masks: tuple[Expr | None, ...]
    rows_end: Expr | None
    sweep: Sweep | None


def make_tile(
    spec: MatmulSpec,
    batch: Coordinates,
    place: tuple[Expr, Expr],
    size: tuple[int, int],
    ends: tuple[Expr, Expr],
    sweep: Sweep | None,
) -> Tile:
    """The tile of some rows and vectors at a place (row, column).

    `ends` are the row from which on none exist, and the column: a PrimExpr, or an int that counts from the tile's own
    first column; None where all of the tile exists.
    """
    row, column = place
    rows_end, columns_end = ends
    rows = None
    if rows_end is not None:
        rows = tuple(materialize(T.min(row + i, rows_end - 1)) for i in range(size[0]))
    if not isinstance(columns_end, int) and columns_end is not None:
        columns_end = materialize(columns_end - column)
    masks = tuple(
        None if columns_end is None else lane_mask(columns_end - j * spec.lanes, spec.lanes) for j in range(size[1])
    )
    return Tile(batch, row, column, *size, rows, masks, rows_end, sweep)


@dataclass(frozen=True)
class KRange:
    """A range of k. Between ranges, partial sums wait in the result, which then has the accumulator's type.

    Attributes
    ----------
    begin, end : PrimExpr or int
        `begin` is a multiple of the product's k0, and `end` too unless it is the end of k.
    first, last : bool or PrimExpr
        Whether it is the first, and the last range.
    """

    begin: Expr
    end: Expr
    first: Expr
    last: Expr

    @property
    def whole(self) -> bool:
        """True if this is all of k."""
        return self.first is True and self.last is True

    @property
    def size(self) -> Expr:
        """How much of k it is, a number where that is known."""
        size = self.end - self.begin
        return size if isinstance(size, int) else plain_extent(sym.Analyzer().simplify(size))

    @staticmethod
    def of(k: Expr, count: Expr, block: int, number: Expr) -> KRange:
        """Range `number` of `count`, each of `block` but the last."""
        if isinstance(count, int) and count == 1:
            return KRange(0, k, True, True)
        begin = materialize(number) * block
        return KRange(begin, materialize(minimum(begin + block, k)), number < 1, number >= count - 1)


def row_in(tile: Tile, view: OperandView, i: int) -> Expr:
    """Row i of the tile, one that exists in the view."""
    if tile.existing_rows is None or view.is_padded("m", tile.rows):
        return tile.row + i
    return tile.existing_rows[i]


def position_in(spec: MatmulSpec, tile: Tile, view: OperandView, i: int, j: int) -> Coordinates:
    """Where row i of vector j begins in the view; a row that does not exist is the last that does."""
    return {**tile.batch, "m": row_in(tile, view, i), "n": tile.column + j * spec.lanes}


def mask_in(spec: MatmulSpec, tile: Tile, view: OperandView, j: int) -> Expr | None:
    """Which lanes of vector j may be read or written in the view; None: all of them."""
    if not view.runs_along("n") or view.is_padded("n", tile.vectors * spec.lanes):
        return None
    return tile.masks[j]


Case = tuple[Expr, int, Expr]
"""When a form of the tile is used (None: otherwise), its rows or vectors, where existing ones end (None: no end)."""


def row_cases(m: Expr, row: Expr, rows: int) -> list[Case]:
    """The forms of a tile of `rows` rows from `row` on: whole, and for what is left at the end of `m`."""
    if isinstance(m, int):
        left = m % rows
        return [(None, rows, None)] if left == 0 else [(row + rows <= m, rows, None), (None, left, None)]
    forms = [form for form in (4, 2, 1) if form < rows]
    cases: list[Case] = [(row + fewer < m, form, m) for form, fewer in zip([rows, *forms], forms, strict=False)]
    return [*cases, (None, 1, None)]


def choose(cases: Sequence[Case], emit: Callable[[int, Expr], None]) -> None:
    """Write the code of every form; `emit` gets its rows or vectors, and where existing ones end."""
    condition, size, end = cases[0]
    either(True if condition is None else condition, lambda: emit(size, end), lambda: choose(cases[1:], emit))
