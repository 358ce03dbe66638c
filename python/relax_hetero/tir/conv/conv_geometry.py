"""Elements of the data that the tiles of a convolution touch along one spatial dimension: plain integers, no code.

Rows whose length only a call knows have expressions in these places (`unknown_rows`).

A tile is a run of neighbouring places of the result. Where padding reaches into it, some places of the window find no
data for some places of the tile; a kernel leaves these multiplications out, so that nothing is padded. Tiles for which
the same are left out share their code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...encoding.problem import Window
from ..core.builder import Expr


@dataclass(frozen=True)
class Taps:
    """Neighbouring places of the window that find data for the same places of a tile.

    Attributes
    ----------
    first, count : int or PrimExpr
        First tap of the window, and number of taps.
    begin, end : int
        The places of the tile, counted from its first.
    """

    first: Expr
    count: Expr
    begin: int
    end: int


@dataclass(frozen=True)
class Segment:
    """Neighbouring tiles of one width that touch the same taps.

    Attributes
    ----------
    start : int or PrimExpr
        The first place of the result.
    width : int
        Places of one tile.
    count : int or PrimExpr
        Tiles.
    taps : tuple of Taps
        In order; taps that find no data at all are left out. None at all where each tile has to find its own.
    """

    start: Expr
    width: int
    count: Expr
    taps: tuple[Taps, ...]


def segments_of(window: Window, extent: int, places: int, widest: int) -> list[Segment]:
    """The tiles that cover the places of a result, as few as can be and as even as can be.

    Parameters
    ----------
    extent : int
        Extent of the data.
    places : int
        Extent of the result.
    widest : int
        The most places of a tile.
    """
    found: list[Segment] = []
    for start, width in _even_parts(places, widest):
        taps = taps_of(window, extent, start, width)
        last = found[-1] if found else None
        if last is not None and last.width == width and last.taps == taps:
            found[-1] = Segment(last.start, width, last.count + 1, taps)
        else:
            found.append(Segment(start, width, 1, taps))
    return found


def _even_parts(places: int, widest: int) -> Iterator[tuple[int, int]]:
    if places == 0:
        return
    width = -(-places // -(-places // widest))
    for start in range(0, places, width):
        yield start, min(width, places - start)


def taps_of(window: Window, extent: int, start: int, width: int) -> tuple[Taps, ...]:
    """The taps of a tile of `width` places from `start` on."""
    found: list[Taps] = []
    for place in range(window.size):
        offset = start * window.stride + place * window.dilation - window.before
        begin = min(width, max(0, -(offset // window.stride)))
        end = min(width, max(0, -((offset - extent) // window.stride)))
        if begin >= end:
            continue
        last = found[-1] if found else None
        if last is not None and (last.begin, last.end) == (begin, end) and last.first + last.count == place:
            found[-1] = Taps(last.first, last.count + 1, begin, end)
        else:
            found.append(Taps(place, 1, begin, end))
    return tuple(found)
