"""The micro-kernel: a tile of accumulators, and the k-steps that add products to it.

Both back ends have the same interface. `clear` sets the accumulators to zero, and `step` adds one k-step, the outer
product of the factors of the tile's rows and of its vectors of columns. The kernel says how factors are addressed, with
``left(i)`` for row i and ``right(j)`` for vector j::

    tile.clear()
    tile.multiply(steps, left, right)  # a loop of tile.step(lambda i: left(k, i), lambda j: right(k, j))

`VectorTile` accumulates in vector registers, and factors are values; `AmxTile` in AMX tiles, and factors are addresses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from tvm.script.ir_builder import tirx as T

from ...target.amx_instructions import TILE_BYTES, TILE_ROWS, AmxInstruction
from ...target.dot_instructions import DotInstruction, widened_instruction
from ..core.builder import Expr, Masks, Registers, ceil_div, lane_of, let, loop, materialize, when, zeros
from . import amx
from .fp16_partial_sums import MIN_SQUARE, is_out_of_range
from .k_step import add_step, deinterleave_rows, rows_group

FMAS_IN_FLIGHT = 8
"""Multiply-adds that fill the pipelines: 4 cycles of latency times 2 per cycle on all supported cores."""


class AccumulatorTile(ABC):
    """A tile of accumulators."""

    @abstractmethod
    def clear(self) -> None:
        """Set the accumulators to zero."""

    @abstractmethod
    def step(self, left: Callable[[int], Any], right: Callable[[int], Any]) -> None:
        """Add a k-step, given the factors of a row and of a vector of columns."""

    def multiply(
        self,
        steps: Expr,
        left: Callable[[Expr, int], Any],
        right: Callable[[Expr, int], Any],
        first: Expr = 0,
        prefetch_step: Callable[[Expr], None] | None = None,
    ) -> None:
        """Add `steps` k-steps from `first` on, in a loop; `prefetch_step` writes the prefetches of a step."""
        with loop(steps) as number:
            k = first + number
            if prefetch_step is not None:
                prefetch_step(k)
            self.step(lambda i: left(k, i), lambda j: right(k, j))


@dataclass(frozen=True)
class VectorTile(AccumulatorTile):
    """Accumulators in vector registers: number ``i * vectors + j`` is vector j of row i."""

    dot: DotInstruction  # instruction that multiplies
    sums: Registers  # accumulators; several banks of them may alternate between steps
    # Size of the tile; rows are a multiple of `DotInstruction.rows`.
    rows: int
    vectors: int
    lanes: int  # lanes of an accumulator

    @property
    def count(self) -> int:
        """Accumulators of a bank."""
        return self.rows * self.vectors

    def clear(self, first_bank: int = 0, banks: int = 1) -> None:
        """Set the accumulators of some banks to zero."""
        for number in range(first_bank * self.count, (first_bank + banks) * self.count):
            self.sums[number] = zeros(self.dot.types[2], self.lanes)

    def multiply_by_lanes(
        self,
        steps: Expr,
        count: int,
        left: Callable[[Expr, int, int], Expr],
        right: Callable[[Expr, int], Expr],
        prefetch_step: Callable[[Expr], None] | None = None,
    ) -> None:
        """Add `steps` k-steps, `count` of which share a load of each row's factors; `left` takes a number of lanes."""
        blocks = materialize(steps // count)
        with loop(blocks) as number:
            first = number * count
            lefts = [let(left(first, i, count)) for i in range(self.rows)]

            def add(s: int) -> None:
                if prefetch_step is not None:
                    prefetch_step(first + s)
                self.step(lambda i: lane_of(lefts[i], s), lambda j: right(first + s, j))

            for s in range(count):
                add(s)
        if not isinstance(steps, int) or steps % count:
            rest, first = materialize(steps % count), materialize(blocks * count)
            self.multiply(rest, lambda k, i: left(k, i, 1), right, first, prefetch_step)

    def step(
        self,
        left: Callable[[int], Expr],  # function from a row to its factor, as `k_step.lhs_group` returns it
        right: Callable[[int], Expr],  # function from a vector to its factors, as `k_step.rhs_groups` returns them
        bank: int = 0,  # bank of accumulators
        # First rows of the groups of `DotInstruction.rows` that take part; by default all.
        rows: Iterable[int] | None = None,
    ) -> None:
        """Add a k-step."""
        rights = [let(right(j)) for j in range(self.vectors)]
        for first in range(0, self.rows, self.dot.rows) if rows is None else rows:
            group = rows_group([let(left(first + i)) for i in range(self.dot.rows)])
            for j in range(self.vectors):
                numbers = [bank * self.count + (first + i) * self.vectors + j for i in range(self.dot.rows)]
                add_step(self.dot, self.sums, numbers, group, rights[j], self.lanes)

    def add_banks(self, banks: int) -> None:
        """Add the accumulators of all other banks to the first."""
        for number in range(self.count, self.count * banks):
            self.sums[number % self.count] = self.sums[number % self.count] + self.sums[number]

    def deinterleave(self) -> None:
        """Reorder accumulators to vectors of rows, after the last step."""
        deinterleave_rows(self.dot, self.sums, self.rows, self.vectors)

    def again_if_out_of_range(
        self,
        terms: Expr,  # number of products in each accumulator
        # Function that accumulates all of them in a tile with a wider instruction.
        accumulate: Callable[[VectorTile], None],
        masks: Masks | None = None,  # relevant lanes of each vector; None: all
        # Minimum mean square of products; 0 if the loss of small products does not matter.
        min_square: float = MIN_SQUARE,
    ) -> None:
        """Accumulate again in float32, if fp16 partial sums left the range of their type."""
        existing = []
        for number in range(self.count):
            mask = masks[number % self.vectors] if masks else None
            total = self.sums[number]
            existing.append(total if mask is None else T.Select(mask, total, zeros("float32", self.lanes)))
        with when(is_out_of_range(existing, terms, self.lanes, min_square)):
            self.clear()
            accumulate(replace(self, dot=widened_instruction(self.dot)))


def pair_heights(rows: int) -> tuple[int, int]:
    """Rows of the two tiles of a pair; 0 for the second if one tile is enough."""
    return (ceil_div(rows, 2), rows // 2) if rows > TILE_ROWS else (rows, 0)


@dataclass(frozen=True)
class AmxTile(AccumulatorTile):
    """Accumulators in AMX tiles: a pair of tiles of rows, or one, by one or two tiles of columns."""

    instruction: AmxInstruction
    heights: tuple[Expr, Expr]  # rows of the two tiles of a pair; 0 for the second if there is only one
    vectors: int  # number of tiles of columns
    streamed: bool = False  # whether loads of rows bypass the L1 cache

    @property
    def row_tiles(self) -> tuple[int, ...]:
        """The tiles of a pair that exist."""
        return (0,) if isinstance(self.heights[1], int) and self.heights[1] == 0 else (0, 1)

    @property
    def sums(self) -> list[tuple[int, int, int]]:
        """Accumulators: the number of each, of its tile of rows and of its tile of columns."""
        return [(2 * i + j, i, j) for j in range(self.vectors) for i in self.row_tiles]

    def first_row(self, i: int) -> Expr:
        """First row of tile i of the pair."""
        return self.heights[0] if i else 0

    def configure(self, right_rows: int = TILE_ROWS, left_bytes: int = TILE_BYTES) -> None:
        """Configure the tiles, for a task; `right_rows` of a tile of columns, `left_bytes` of a row's factors."""
        first, second = self.heights[0], self.heights[1] if len(self.row_tiles) > 1 else 1
        rows = [first, first, second, second, first, second, right_rows, right_rows]
        amx.configure(rows, [TILE_BYTES] * 4 + [left_bytes] * 2 + [TILE_BYTES] * 2)

    def clear(self) -> None:
        """Set the accumulators to zero."""
        for tile, _, _ in self.sums:
            amx.clear(tile)

    def step(
        self, left: Callable[[int], tuple[Expr, Expr]], right: Callable[[int], tuple[Expr, Expr]] | None = None
    ) -> None:
        """Add a k-step: all loads, then all products.

        `left`, `right`: function from a tile of rows or of columns to the address of its factors, and the distance of
        their rows in bytes. Without `right`, factors of columns are those of the step before.
        """
        for j in range(self.vectors):
            if right is not None:
                amx.load(amx.RIGHT_TILES[j], *right(j))
            for i in self.row_tiles if j == 0 else ():
                amx.load(amx.LEFT_TILES[i], *left(i), streamed=self.streamed)
        for tile, i, j in self.sums:
            amx.multiply(self.instruction, tile, amx.LEFT_TILES[i], amx.RIGHT_TILES[j])

    def store(self, memory: Any, start: Expr, distance: Expr) -> None:
        """Store the accumulators as rows of 4-byte numbers, `distance` numbers apart."""
        self._move(amx.store, memory, start, distance)

    def load(self, memory: Any, start: Expr, distance: Expr) -> None:
        """Load the accumulators from where `store` wrote them."""
        self._move(amx.load, memory, start, distance)

    def _move(self, move: Callable[[int, Expr, Expr], None], memory: Any, start: Expr, distance: Expr) -> None:
        for tile, i, j in self.sums:
            at = start + (self.first_row(i) * distance + j * amx.LANES)
            move(tile, amx.address(memory, at), distance * 4)
