"""Tiles of rows whose length only a call knows.

Places whose window meets padding are tiles of their own, at both ends of a row, and find the places of the window that
read data when the kernel runs. Between them all windows are whole: wide tiles as far as they go, then narrower ones.
"""

from __future__ import annotations

from dataclasses import replace

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.problem import Window
from ...target.dot_instructions import DotInstruction
from ..core.builder import Expr, int64, materialize
from .conv_geometry import Segment, Taps, segments_of

NARROW = 4
"""Places of the tiles between the wide ones and single places."""


def can_have_dynamic_height(dot: DotInstruction) -> bool:
    """Return whether images of any size can be multiplied so: their channels one at a time, sums in one type."""
    return dot.k0 == 1 and dot.compensation == 0 and not dot.short


def row_segments(window: Window, extent: Expr, places: Expr, widest: int) -> list[Segment]:
    """The tiles that cover a row of the result; write this inside a kernel's body.

    Parameters
    ----------
    extent, places : int or PrimExpr
        Extents of the data and of the result, along the innermost dimension.
    widest : int
        The most places of a tile.
    """
    if isinstance(extent, int) and isinstance(places, int):
        return segments_of(window, extent, places, widest)
    zero, places = int64(0), int64(places)
    # The first place whose window begins behind the padding, and the first whose window ends in it.
    begin = materialize(T.min(int64(-(-window.before // window.stride)), places))
    ends = tirx.floordiv(int64(extent) - window.dilated_extent + window.before, int64(window.stride)) + 1
    end = materialize(T.max(begin, T.min(ends, places)))
    found = [Segment(zero, 1, begin, ())]
    start = begin
    for width in sorted({widest, min(widest, NARROW), 1}, reverse=True):
        count = materialize(tirx.floordiv(end - start, int64(width)))
        found.append(Segment(start, width, count, (Taps(0, window.size, 0, width),)))
        start = materialize(start + count * width)
    return [*found, Segment(end, 1, materialize(places - end), ())]


def at_place(segment: Segment, window: Window, extent: Expr, place: Expr) -> Segment:
    """The segment with the taps of its tile at `place`, where only the run knows them."""
    if segment.taps or isinstance(segment.count, int):
        return segment
    first, count = taps_at(window, extent, place)
    return replace(segment, taps=(Taps(first, count, 0, 1),))


def taps_at(window: Window, extent: Expr, place: Expr) -> tuple[Expr, Expr]:
    """The first place of the window that finds data for a place of the result, and how many do."""
    start = materialize(place * window.stride - window.before)
    first = materialize(T.max(int64(0), tirx.floordiv(window.dilation - 1 - start, int64(window.dilation))))
    end = T.min(int64(window.size), tirx.floordiv(extent - start + (window.dilation - 1), int64(window.dilation)))
    return first, materialize(T.max(int64(0), end - first))
