"""Facts shared by the register tiles of a matrix product, and those of one tile: rows, columns, range of k, tails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import sym, tirx
from tvm.script.ir_builder import tirx as T

from ...target.dot_instructions import DotInstruction
from ..core.builder import (
    Expr,
    broadcast,
    either,
    lane_mask,
    let,
    materialize,
    minimum,
    plain_extent,
    vector_type,
    zeros,
)
from ..core.view import Coordinates, OperandView
from ..elementwise.expression_code import EpilogueCode
from ..microkernel.microkernel import VectorTile

# K-steps between prefetches: maximum, maximum in fp16 chains, and the number for a symbolic number of tiles.
MAX_PREFETCH_STEPS = 8
MAX_CHAIN_PREFETCH_STEPS = 4  # with more, LLVM loads factors of later steps first and runs out of registers
SYMBOLIC_PREFETCH_STEPS = 2


@dataclass(frozen=True)
class MatmulSpec:
    """Facts that every tile of a kernel shares."""

    lhs: OperandView
    rhs: OperandView
    result: OperandView
    init: OperandView | None
    epilogue: EpilogueCode
    dot: DotInstruction
    lanes: int  # lanes of an accumulator
    registers: int  # number of registers that are left for accumulators and the right operand's vectors
    # Iteration sizes; m and n are rounded up to tiles if every operand is padded.
    m: Expr
    n: Expr
    k: Expr


@dataclass(frozen=True)
class Sweep:
    """The tiles that use a panel of the right operand, and together prefetch the next panel."""

    number: Expr  # number of the tile
    tiles: Expr  # number of tiles
    panel: Expr  # first column of the next panel

    def prefetch_steps(self, unroll: int, vectors: int, in_chains: bool) -> int:
        """K-steps from one prefetch of a tile to the next; `in_chains`, a divisor of the steps of an fp16 chain."""
        shared = self.tiles // vectors if isinstance(self.tiles, int) else SYMBOLIC_PREFETCH_STEPS
        if in_chains:
            return max(unroll, next(steps for steps in (MAX_CHAIN_PREFETCH_STEPS, 2, 1) if steps <= max(1, shared)))
        return max(unroll, min(MAX_PREFETCH_STEPS, shared))

    def lines(self, steps: int, vectors: int) -> Expr:
        """Cache lines of a prefetch, such that the tiles together fetch the whole panel."""
        if isinstance(self.tiles, int):
            return max(1, steps * vectors // self.tiles)
        return materialize(tirx.floordiv(self.tiles + (steps * vectors - 1), self.tiles))


PanelProducts = Callable[[VectorTile, "KRange", Coordinates], None]


@dataclass(frozen=True)
class Tile:
    """A register tile at a position that is known at run time."""

    batch: Coordinates  # coordinates of the batch dimensions
    # Coordinates of the first element.
    row: Expr
    column: Expr
    # Size.
    rows: int
    vectors: int
    existing_rows: tuple[Expr, ...] | None  # rows, clamped to the last existing one; None: all exist
    masks: tuple[Expr | None, ...]  # existing lanes of each vector; None: all
    rows_end: Expr | None  # first row that does not exist
    sweep: Sweep | None  # prefetching of the next panel, if any
    # Function of accumulators, a range of k and a position, which adds the products of the range's whole k-steps from
    # packed panels; None: operands are read in place.
    multiply: PanelProducts | None = None


def make_tile(
    spec: MatmulSpec,
    batch: Coordinates,
    place: tuple[Expr, Expr],
    size: tuple[int, int],
    ends: tuple[Expr, Expr],
    sweep: Sweep | None,
    multiply: PanelProducts | None = None,
) -> Tile:
    """The tile of `size` (rows, vectors) at `place` (row, column).

    `ends` are the first row and the first column that do not exist: None if the whole tile exists; an int counts
    columns from the tile's first one.
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
    return Tile(batch, row, column, *size, rows, masks, rows_end, sweep, multiply)


@dataclass(frozen=True)
class KRange:
    """A range of k. Between ranges, partial sums are stored in the result, which then has the accumulator's type."""

    # Bounds; multiples of the product's k0, except for the end of k.
    begin: Expr
    end: Expr
    # Whether it is the first or the last range.
    first: Expr
    last: Expr

    @property
    def whole(self) -> bool:
        """True if this is all of k."""
        return self.first is True and self.last is True

    @property
    def size(self) -> Expr:
        """Length of the range, an int if static."""
        size = self.end - self.begin
        return size if isinstance(size, int) else plain_extent(sym.Analyzer().simplify(size))

    @staticmethod
    def of(k: Expr, count: Expr, block: int, number: Expr) -> KRange:
        """Range `number` of `count` ranges of length `block`; the last may be shorter."""
        if isinstance(count, int) and count == 1:
            return KRange(0, k, True, True)
        begin = materialize(number) * block
        return KRange(begin, materialize(minimum(begin + block, k)), number < 1, number >= count - 1)


def row_in(tile: Tile, view: OperandView, i: int) -> Expr:
    """Row i of the tile, clamped to an existing row of the view."""
    if tile.existing_rows is None or view.is_padded("m", tile.rows):
        return tile.row + i
    return tile.existing_rows[i]


def position_in(spec: MatmulSpec, tile: Tile, view: OperandView, i: int, j: int) -> Coordinates:
    """Coordinates of vector j of row i in the view, with the row clamped to an existing one."""
    return {**tile.batch, "m": row_in(tile, view, i), "n": tile.column + j * spec.lanes}


def mask_in(spec: MatmulSpec, tile: Tile, view: OperandView, j: int) -> Expr | None:
    """Accessible lanes of vector j in the view; None: all."""
    if not view.runs_along("n") or view.is_padded("n", tile.vectors * spec.lanes):
        return None
    return tile.masks[j]


Case = tuple[Expr, int, Expr]
"""A variant of a tile: its condition (None: else), its rows or vectors, and where existing ones end (None: no end)."""


def row_cases(m: Expr, row: Expr, rows: int) -> list[Case]:
    """The cases of a tile of `rows` rows from `row` on: whole, and the tail of `m`."""
    if isinstance(m, int):
        left = m % rows
        return [(None, rows, None)] if left == 0 else [(row + rows <= m, rows, None), (None, left, None)]
    tail_sizes = [size for size in (8, 4, 2, 1) if size < rows]
    cases: list[Case] = [
        (row + fewer < m, size, m) for size, fewer in zip([rows, *tail_sizes], tail_sizes, strict=False)
    ]
    return [*cases, (None, 1, None)]


def emit_cases(cases: Sequence[Case], emit: Callable[[int, Expr], None]) -> None:
    """Write branches for all cases; `emit` takes the rows or vectors of a case, and where existing ones end."""
    condition, size, end = cases[0]
    either(True if condition is None else condition, lambda: emit(size, end), lambda: emit_cases(cases[1:], emit))


def left_factors(spec: MatmulSpec, at: Coordinates, k_left: Expr | None, k0: int | None = None) -> Expr | list[Expr]:
    """The k0 left factors from a position on; zeros after the first `k_left` ones (None: all remain)."""
    k0 = spec.dot.k0 if k0 is None else k0
    if k_left is None and spec.lhs.stride("k") == 1 and spec.lhs.layout.tile(spec.lhs.index_map.index("k")) in (1, k0):
        return spec.lhs.load(at, "k", k0)
    return [element_or_zero(spec.lhs, at, i, k_left, 1) for i in range(k0)]


def element_or_zero(
    view: OperandView, at: Coordinates, i: int, k_left: Expr | None, lanes: int, mask: Expr | None = None
) -> Expr:
    """The element at k + i of every lane, or zero from i = `k_left` on."""
    if k_left is None or i == 0:
        return view.load({**at, "k": at["k"] + i}, "n", lanes, mask)
    if isinstance(k_left, int):
        return view.load({**at, "k": at["k"] + i}, "n", lanes, mask) if i < k_left else zeros(view.dtype, lanes)
    # Without a branch: the last existing element is read in place of a missing one.
    value = view.load({**at, "k": at["k"] + T.min(k_left - 1, i)}, "n", lanes, mask)
    if view.dtype != "bfloat16":
        return tirx.Select(broadcast(k_left > i, lanes), let(value), zeros(view.dtype, lanes))
    # Selected as bits: TVM's legalization would select between float32 values.
    bits = let(tirx.reinterpret(vector_type("uint16", lanes), value))
    selected = tirx.Select(broadcast(k_left > i, lanes), bits, zeros("uint16", lanes))
    return tirx.reinterpret(vector_type(view.dtype, lanes), selected)
