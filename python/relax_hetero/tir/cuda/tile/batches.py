"""Batches of products, and the rasterization of their tiles over thread blocks."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from ...core.builder import Expr, int64, materialize
from ...core.view import Coordinates
from ...core.work_split import unravel
from ..core.launch import at_least_one

_RASTERIZATION_GROUP_M = 8


@dataclass(frozen=True)
class Batches:
    """The batch dimensions of a product.

    Attributes
    ----------
    extents : dict of str to (PrimExpr or int)
        Extents by name, outermost first.
    """

    extents: dict[str, Expr]

    @property
    def count(self) -> Expr:
        """Number of products."""
        count: Expr = 1
        for extent in self.extents.values():
            count = count * extent
        return count

    @property
    def exists(self) -> Expr | None:
        """Predicate that there is a product; None if that is known."""
        return None if isinstance(self.count, int) and self.count > 0 else int64(self.count) > 0

    def place(self, number: Expr) -> Coordinates:
        """Batch coordinates of a product, given its number, int64."""
        extents = [at_least_one(extent) for extent in self.extents.values()]
        # Materialized, as TVM would repeat the divisions at every use, in each k-step.
        return dict(zip(self.extents, unravel(number, extents, place=materialize, rest=materialize), strict=True))

    def tile(
        self, number: Expr, row_tiles: Expr, column_tiles: Expr, group_m: int = _RASTERIZATION_GROUP_M
    ) -> tuple[Coordinates, Expr, Expr]:
        """Batch coordinates, row tile and column tile of a tile, given its number, int32.

        Parameters
        ----------
        row_tiles, column_tiles : PrimExpr or int
            Tiles of a product, int32.
        group_m : int
            Row tiles that are rasterized together over the column tiles, for reuse of L2.
        """
        at: Coordinates = {}
        if self.extents:
            tiles = row_tiles * column_tiles
            at, number = self.place(T.Cast("int64", T.truncdiv(number, tiles))), T.truncmod(number, tiles)
        if isinstance(row_tiles, int) and row_tiles <= group_m:
            return at, number % row_tiles, number // row_tiles
        first = T.truncdiv(number, column_tiles * group_m) * group_m
        index_in_group = T.truncmod(number, column_tiles * group_m)
        height = T.min(row_tiles - first, group_m)
        return at, first + T.truncmod(index_in_group, height), T.truncdiv(index_in_group, height)
