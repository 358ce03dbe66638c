"""Tiles and taps along one dimension, against what every place of a result reads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from relax_hetero.encoding.problem import Window
from relax_hetero.tir.conv.conv_geometry import Segment, Taps, segments_of, taps_of

windows = st.builds(
    Window,
    size=st.integers(1, 7),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 4),
    before=st.integers(0, 9),
    after=st.integers(0, 9),
)


def _reads(window: Window, extent: int, places: int) -> set[tuple[int, int]]:
    """(place of the result, place of the window) of every element of the data that is read."""
    return {
        (place, tap)
        for place in range(places)
        for tap in range(window.size)
        if 0 <= place * window.stride + tap * window.dilation - window.before < extent
    }


@given(window=windows, extent=st.integers(1, 70), max_width=st.integers(1, 14))
def test_tiles_read_what_exists(window: Window, extent: int, max_width: int) -> None:
    places = max(0, window.output_extent(extent))
    covered: list[int] = []
    reads: list[tuple[int, int]] = []
    for segment in segments_of(window, extent, places, max_width):
        assert segment.width <= max_width
        for tile in range(segment.count):
            start = segment.start + tile * segment.width
            covered += range(start, start + segment.width)
            reads += [
                (start + t, tap)
                for run in segment.taps
                for tap in range(run.first, run.first + run.count)
                for t in range(run.begin, run.end)
            ]
    assert covered == list(range(places))
    assert len(reads) == len(set(reads))
    assert set(reads) == _reads(window, extent, places)


def test_few_even_tiles() -> None:
    widths = [(segment.width, segment.count) for segment in segments_of(Window(1), extent=55, places=55, max_width=14)]
    assert widths == [(14, 3), (13, 1)]


def test_tiles_between_the_edges_share_their_code() -> None:
    window = Window(3, before=1, after=1)
    assert segments_of(window, 56, 56, 14) == [
        Segment(0, 14, 1, (Taps(0, 1, 1, 14), Taps(1, 2, 0, 14))),
        Segment(14, 14, 2, (Taps(0, 3, 0, 14),)),
        Segment(42, 14, 1, (Taps(0, 2, 0, 14), Taps(2, 1, 0, 13))),
    ]


def test_taps_in_padding_alone_are_left_out() -> None:
    assert taps_of(Window(3, dilation=4, before=4, after=4), extent=3, start=0, width=3) == (Taps(1, 1, 0, 3),)


def test_nothing_to_compute() -> None:
    assert segments_of(Window(3), 2, 0, 14) == []
