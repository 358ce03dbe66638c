"""Tiles of a convolution along one spatial dimension, and the taps that read data for them, without code.

A tile is a run of neighbouring pixels of the result. Next to the padding, some taps lie outside of the data for some
pixels of the tile; kernels leave these multiplications out, so that data need no padding. Tiles with the same taps
share code.

Numbers are plain integers, and some of them expressions for rows of symbolic length (`row_segments`). There, pixels at
both ends of a row whose windows reach into padding are single tiles, whose taps are determined at run time. Between
them all windows are whole: wide tiles as far as possible, then narrower ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.problem import Window
from ..core.builder import Expr, int64, materialize


@dataclass(frozen=True)
class Taps:
    """Neighbouring taps of the window that read data for the same pixels of a tile."""

    # First tap, and number of taps.
    first: Expr
    count: Expr
    # Range of the tile's pixels.
    begin: int
    end: int


@dataclass(frozen=True)
class Segment:
    """Neighbouring tiles of one width with the same taps."""

    start: Expr  # first pixel of the result
    width: int  # pixels of a tile
    count: Expr  # number of tiles
    taps: tuple[Taps, ...]  # taps that read data, in order; empty if each tile determines its own at run time


def segments_of(
    window: Window,
    extent: int,  # extent of the data
    places: int,  # extent of the result
    max_width: int,  # maximum number of pixels of a tile
) -> list[Segment]:
    """The minimum number of tiles that cover a result, with even widths."""
    segments: list[Segment] = []
    for start, width in _even_parts(places, max_width):
        taps = taps_of(window, extent, start, width)
        last = segments[-1] if segments else None
        if last is not None and last.width == width and last.taps == taps:
            segments[-1] = Segment(last.start, width, last.count + 1, taps)
        else:
            segments.append(Segment(start, width, 1, taps))
    return segments


def _even_parts(places: int, max_width: int) -> Iterator[tuple[int, int]]:
    if places == 0:
        return
    width = -(-places // -(-places // max_width))
    for start in range(0, places, width):
        yield start, min(width, places - start)


def taps_of(window: Window, extent: int, start: int, width: int) -> tuple[Taps, ...]:
    """The taps of a tile of `width` pixels from `start` on."""
    runs: list[Taps] = []
    for tap in range(window.size):
        offset = start * window.stride + tap * window.dilation - window.before
        begin = min(width, max(0, -(offset // window.stride)))
        end = min(width, max(0, -((offset - extent) // window.stride)))
        if begin >= end:
            continue
        last = runs[-1] if runs else None
        if last is not None and (last.begin, last.end) == (begin, end) and last.first + last.count == tap:
            runs[-1] = Taps(last.first, last.count + 1, begin, end)
        else:
            runs.append(Taps(tap, 1, begin, end))
    return tuple(runs)


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
