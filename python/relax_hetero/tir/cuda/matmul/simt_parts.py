"""Batches, extents that may be empty, and the barrier, which products without tensor cores share."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...core.builder import Expr, int64
from ...core.view import Coordinates
from ..core.launch import at_least_one

SHARED = "shared.dyn"
"""Where tiles are: one allocation, of a size that the launch says, since 48 KB are all that others may have."""

_RASTER_ROWS = 8
"""Tiles of rows that neighbouring blocks take before the next tile of columns: what they read stays in the cache."""


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
        """How many products there are."""
        count: Expr = 1
        for extent in self.extents.values():
            count = count * extent
        return count

    @property
    def exists(self) -> Expr | None:
        """True if there is any product; None where that is known."""
        return None if isinstance(self.count, int) and self.count > 0 else int64(self.count) > 0

    def place(self, number: Expr) -> Coordinates:
        """Coordinates of a product by its number."""
        at: dict[str, Expr] = {}
        for name, extent in reversed(self.extents.items()):
            whole = at_least_one(extent)
            at[name] = T.bind(tirx.floormod(number, whole))
            number = tirx.floordiv(number, whole)
        return at

    def tile(self, block: Expr, row_tiles: Expr, column_tiles: Expr) -> tuple[Coordinates, Expr, Expr]:
        """Coordinates of the product, and numbers of the tile among its rows and its columns, by a block's number."""
        tiles = row_tiles * column_tiles
        number = T.bind(tirx.floormod(block, tiles))
        at = self.place(tirx.floordiv(block, tiles))
        band = tirx.floordiv(number, column_tiles * _RASTER_ROWS)
        within = T.bind(number - band * (column_tiles * _RASTER_ROWS))
        height = T.bind(tirx.min(int64(_RASTER_ROWS), row_tiles - band * _RASTER_ROWS))
        return at, band * _RASTER_ROWS + tirx.floormod(within, height), tirx.floordiv(within, height)


def barrier() -> None:
    """All threads of the block meet, and see what the others wrote to shared memory.

    TVM's own barrier, which it takes into account where it adds barriers between accesses to shared memory.
    """
    T.evaluate(T.tvm_storage_sync(SHARED))


def known(extent: Expr) -> int | None:
    """An extent, None where it is symbolic."""
    return extent if isinstance(extent, int) else None


def divides(extent: Expr, size: int) -> bool:
    """Return whether tiles of a size are known to be whole, and that there are any."""
    return isinstance(extent, int) and extent > 0 and extent % size == 0
