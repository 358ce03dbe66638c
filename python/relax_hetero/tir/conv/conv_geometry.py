"""Tiles of a convolution along one spatial dimension, and the taps that read data for them: plain integers, no code.

For rows of symbolic length, some numbers are expressions (`dynamic_height`).

A tile is a run of neighbouring pixels of the result. Next to the padding, some taps lie outside of the data for some
pixels of the tile; kernels leave these multiplications out, so that data need no padding. Tiles with the same taps
share code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...encoding.problem import Window
from ..core.builder import Expr


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
