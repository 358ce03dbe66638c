"""Tiles of rows of symbolic length.

Pixels at both ends of a row whose windows reach into padding are single tiles, whose taps are determined at run time.
Between them all windows are whole: wide tiles as far as possible, then narrower ones.
"""

from __future__ import annotations

from dataclasses import replace

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.problem import Window
from ..core.builder import Expr, int64, materialize
from .conv_geometry import Segment, Taps, segments_of

NARROW = 4  # pixels of the tiles between the wide ones and single pixels


def row_segments(window: Window, extent: Expr, places: Expr, max_width: int) -> list[Segment]:
    """The tiles that cover a row of the result; called inside of a kernel's body.

    `extent`, `places`: extents of the data and of the result, along the innermost dimension. `max_width`: maximum
    number of pixels of a tile.
    """
    if isinstance(extent, int) and isinstance(places, int):
        return segments_of(window, extent, places, max_width)
    zero, places = int64(0), int64(places)
    # The first pixel whose window begins after the padding, and the first whose window ends in it.
    begin = materialize(T.min(int64(-(-window.before // window.stride)), places))
    ends = tirx.floordiv(int64(extent) - window.dilated_extent + window.before, int64(window.stride)) + 1
    end = materialize(T.max(begin, T.min(ends, places)))
    segments = [Segment(zero, 1, begin, ())]
    start = begin
    for width in sorted({max_width, min(max_width, NARROW), 1}, reverse=True):
        count = materialize(tirx.floordiv(end - start, int64(width)))
        segments.append(Segment(start, width, count, (Taps(0, window.size, 0, width),)))
        start = materialize(start + count * width)
    return [*segments, Segment(end, 1, materialize(places - end), ())]


def resolve_taps(segment: Segment, window: Window, extent: Expr, place: Expr) -> Segment:
    """The segment with the taps of its tile at `place`, computed at run time if needed."""
    if segment.taps or isinstance(segment.count, int):
        return segment
    first, count = taps_at(window, extent, place)
    return replace(segment, taps=(Taps(first, count, 0, 1),))


def taps_at(window: Window, extent: Expr, place: Expr) -> tuple[Expr, Expr]:
    """The first tap that reads data for a pixel of the result, and the number of such taps."""
    start = materialize(place * window.stride - window.before)
    first = materialize(T.max(int64(0), tirx.floordiv(window.dilation - 1 - start, int64(window.dilation))))
    end = T.min(int64(window.size), tirx.floordiv(extent - start + (window.dilation - 1), int64(window.dilation)))
    return first, materialize(T.max(int64(0), end - first))
