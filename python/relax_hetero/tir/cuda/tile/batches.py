"""Batches of products, and the rasterization of their tiles over thread blocks."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...core.builder import Expr, int64
from ...core.view import Coordinates
from ..core.launch import at_least_one

_RASTERIZATION_GROUP_M = 8  # row tiles of neighbouring blocks before the next column tile, for reuse of L2


@dataclass(frozen=True)
class Batches:
    """The batch dimensions of a product."""

    extents: dict[str, Expr]  # extents by name, outermost first

    @property
    def count(self) -> Expr:
        """Number of products."""
        return prod(self.extents.values())

    @property
    def exists(self) -> Expr | None:
        """Predicate that there is a product; None if that is known."""
        return None if isinstance(self.count, int) and self.count > 0 else int64(self.count) > 0

    def place(self, number: Expr) -> Coordinates:
        """Batch coordinates of a product, given its number."""
        at: dict[str, Expr] = {}
        for name, extent in reversed(self.extents.items()):
            positive_extent = at_least_one(extent)
            at[name] = T.bind(tirx.floormod(number, positive_extent))
            number = tirx.floordiv(number, positive_extent)
        return at

    def tile(self, block: Expr, row_tiles: Expr, column_tiles: Expr) -> tuple[Coordinates, Expr, Expr]:
        """Batch coordinates, row tile and column tile of a block, rasterized in groups of rows."""
        tiles, group_m = row_tiles * column_tiles, _RASTERIZATION_GROUP_M
        number = T.bind(tirx.floormod(block, tiles))
        at = self.place(tirx.floordiv(block, tiles))
        group = tirx.floordiv(number, column_tiles * group_m)
        index_in_group = T.bind(number - group * (column_tiles * group_m))
        height = T.bind(tirx.min(int64(group_m), row_tiles - group * group_m))
        return at, group * group_m + tirx.floormod(index_in_group, height), tirx.floordiv(index_in_group, height)
