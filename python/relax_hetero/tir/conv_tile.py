"""The direct convolution: a register tile of neighbouring places and output channels, the whole reduction in registers.

The loops, from outside: tasks, panels of output channels, rows, tiles, places of the window, input channels. Data is
read where it lies, one element in every lane; the weight as it is packed, panel by panel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..element_types import bytes_of
from .builder import (
    CACHE_LINE_BYTES,
    Expr,
    Registers,
    broadcast,
    ceil_div,
    either,
    held,
    lane_indices,
    loop,
    prefetch,
    settled,
    smaller,
    vector_type,
    zeros,
)
from .conv_geometry import Segment, Taps, segments_of
from .conv_place import (
    Convolution,
    Row,
    channel_masks,
    data_position,
    make_row,
    prefetch_operands,
    split_rows,
    store_places,
)
from .work_split import part

# More places a tile gain nothing: with two vectors each, this many fill the registers of AVX-512.
MOST_PLACES = 14
# Elements that are a multiple of this apart fall into one set of the first-level cache, of 8 to 12 ways.
CACHE_WAY_BYTES = 4096
PLACES_IN_ONE_SET = 8
# Up to so many input channels, the loop over them is written out.
FEW_CHANNELS = 4
# Weights of more bytes are prefetched, panel by panel: whoever ran before has most likely put them out of the caches.
PREFETCH_BYTES = 1 << 16


@dataclass(frozen=True)
class Panel:
    """A panel of output channels, all or the last.

    Attributes
    ----------
    column : PrimExpr
        Its first channel.
    vectors : int
        That hold channels that exist.
    masks : tuple of (PrimExpr or None)
        Lanes that exist of each vector.
    channel : PrimExpr
        The first input channel of its group.
    following : PrimExpr or None
        Address of the panel that is computed next, None where panels are not prefetched.
    """

    column: Expr
    vectors: int
    masks: tuple[Expr | None, ...]
    channel: Expr
    following: Expr | None


@dataclass(frozen=True)
class Ahead:
    """What a tile prefetches of the next panel: a part for each of its steps.

    Attributes
    ----------
    start : PrimExpr
        Address of the tile's share.
    step : int
        Elements of one step.
    """

    start: Expr
    step: int


@dataclass(frozen=True)
class Place:
    """The tile that is being written.

    Attributes
    ----------
    row : Row
    panel : Panel
    segment : Segment
    first : PrimExpr
        Its first place along the innermost dimension.
    ahead : Ahead or None
    """

    row: Row
    panel: Panel
    segment: Segment
    first: Expr
    ahead: Ahead | None


def emit_direct(conv: Convolution) -> None:
    """Write the body of the kernel."""
    width = conv.weight.layout.tile(0)
    panels = ceil_div(conv.channels, width)
    widest = _most_places(conv, ceil_div(width, conv.lanes))
    segments = segments_of(conv.windows[-1], conv.data.extents[-1], conv.result.extents[-1], widest)
    split = split_rows(conv, panels, conv.result.extents[-1] * width * _reduction(conv))
    rows: Expr = 1
    for extent in conv.rows:
        rows = rows * extent
    rows = settled(rows)
    sweep = Sweep(ceil_div(rows, split.rows), sum(segment.count for segment in segments))
    vectors = ceil_div(min(width, conv.channels), conv.lanes)
    with loop(split.tasks, parallel=split.tasks > 1) as task:
        accs = Registers(max(segment.width for segment in segments) * vectors, conv.problem.acc_dtype, conv.lanes)
        _, row_part, panel_part = split.place(task)
        first_row, last_row = part(rows, split.rows, row_part)
        first_panel, last_panel = part(panels, split.columns, panel_part)
        with loop(last_panel - first_panel) as number:
            panel_number = settled(first_panel + number)
            following = settled(smaller(panel_number + 1, last_panel - 1) * (width * _reduction(conv)))

            def rows_of(existing: int, number: Expr = panel_number, following: Expr = following) -> None:
                panel = _make_panel(conv, number, existing, following)
                with loop(last_row - first_row) as r:
                    _emit_row(conv, make_row(conv, settled(first_row + r)), panel, segments, accs, (r, sweep))

            left = conv.channels % width
            if left == 0 or panels == 1:
                rows_of(min(width, conv.channels))
            else:
                either(panel_number < panels - 1, lambda: rows_of(width), lambda: rows_of(left))


@dataclass(frozen=True)
class Sweep:
    """The tiles that go over one panel.

    Attributes
    ----------
    rows : PrimExpr or int
    tiles : int
        Of a row.
    """

    rows: Expr
    tiles: int


def _reduction(conv: Convolution) -> int:
    """Multiply-adds of one element of the result."""
    count = conv.depth
    for window in conv.windows:
        count *= window.size
    return count


def _most_places(conv: Convolution, vectors: int) -> int:
    """The widest tile: accumulators, a vector of weights each, and one register for the data, within the registers."""
    registers = conv.machine.isa.registers - 1
    most = max(1, min(MOST_PLACES, (registers - vectors) // vectors))
    apart = conv.data.stride(f"x{len(conv.windows) - 1}") * conv.windows[-1].stride * bytes_of(conv.data.dtype)
    return min(most, PLACES_IN_ONE_SET) if apart % CACHE_WAY_BYTES == 0 else most


def _make_panel(conv: Convolution, number: Expr, existing: int, following: Expr) -> Panel:
    width = conv.weight.layout.tile(0)
    column = settled(number * width)
    vectors = ceil_div(existing, conv.lanes)
    channel: Expr = tirx.const(0, "int64")
    if conv.problem.groups > 1:
        channel = settled(column // (conv.channels // conv.problem.groups) * conv.depth)
    size = conv.channels * _reduction(conv) * bytes_of(conv.weight.dtype)
    return Panel(
        column, vectors, channel_masks(conv, vectors, existing), channel, following if size > PREFETCH_BYTES else None
    )


def _emit_row(
    conv: Convolution,
    row: Row,
    panel: Panel,
    segments: Sequence[Segment],
    accs: Registers,
    sweep: tuple[Expr, Sweep],
) -> None:
    number, whole = sweep
    before = 0
    for segment in segments:
        with loop(segment.count) as tile:
            first = settled(tile * segment.width + segment.start)
            ahead = _make_ahead(conv, panel, number * whole.tiles + before + tile, whole)
            _emit_tile(conv, Place(row, panel, segment, first, ahead), accs)
        before += segment.count


def _make_ahead(conv: Convolution, panel: Panel, number: Expr, sweep: Sweep) -> Ahead | None:
    if panel.following is None or not isinstance(sweep.rows, int):
        return None
    tiles, width = sweep.rows * sweep.tiles, conv.weight.layout.tile(0)
    share = ceil_div(width * _reduction(conv), tiles)
    return Ahead(settled(panel.following + number * share), ceil_div(width, tiles))


def _emit_tile(conv: Convolution, place: Place, accs: Registers) -> None:
    panel, width = place.panel, place.segment.width
    prefetch_operands(conv, place.row, place.first, panel.column, (width, panel.vectors))
    for number in range(width * panel.vectors):
        accs[number] = zeros(conv.problem.acc_dtype, conv.lanes)
    _over_taps(conv, place, accs, [])
    size = (width, panel.vectors)
    store_places(
        conv, place.row, place.first, panel.column, size, panel.masks, lambda t, j: accs[t * panel.vectors + j]
    )


def _over_taps(conv: Convolution, place: Place, accs: Registers, taps: list[Expr]) -> None:
    """The loops over the outer places of the window, and inside them those along the innermost dimension."""
    if len(taps) < len(place.row.taps):
        first, count = place.row.taps[len(taps)]
        with loop(count) as tap:
            _over_taps(conv, place, accs, [*taps, settled(first + tap)])
        return
    window = conv.windows[-1]
    at = data_position(conv, place.row, taps, place.panel.channel, place.first * window.stride - window.before)
    data = settled(conv.data.address(at))
    zero = tirx.const(0, "int64")
    tap_at = {f"w{d}": tap for d, tap in enumerate(taps)} | {f"w{len(taps)}": zero}
    weight = settled(conv.weight.address({"n": place.panel.column, "k": zero, **tap_at}))
    ahead = None
    if place.ahead is not None:
        done = conv.weight.address({"n": zero, "k": zero, **tap_at})
        steps = tirx.floordiv(done, conv.weight.layout.tile(0))
        ahead = Ahead(settled(place.ahead.start + steps * place.ahead.step), place.ahead.step)
    for run in place.segment.taps:
        _accumulate(conv, place.panel.vectors, run, (data, weight), ahead, accs)


def _accumulate(
    conv: Convolution, vectors: int, run: Taps, start: tuple[Expr, Expr], ahead: Ahead | None, accs: Registers
) -> None:
    """Multiply and add what a run of the window's places finds in one row of the data."""
    window, depth = conv.windows[-1], conv.depth
    along, across = conv.data.stride(f"x{len(conv.windows) - 1}"), conv.data.stride("c")
    width = conv.weight.layout.tile(0)

    def step(tap: Expr, k: Expr) -> None:
        data, weight = start
        data = data + (run.first + tap) * (window.dilation * along) + k * across
        number = (run.first + tap) * depth + k
        weight = weight + number * width
        if ahead is not None:
            _prefetch(conv, ahead.start + number * ahead.step, ahead.step)
        right = [held(_weights(conv, weight, j)) for j in range(vectors)]
        for t in range(run.begin, run.end):
            left = held(conv.data.data[data + t * window.stride * along])
            for j in range(vectors):
                accs[t * vectors + j] = accs[t * vectors + j] + broadcast(left, conv.lanes) * right[j]

    if along * window.dilation == depth * across or run.count == 1:
        # From the last channel of one place, the same step leads to the first channel of the next.
        with loop(run.count * depth) as s:
            step(0, s)
        return
    with loop(run.count) as tap:
        if depth <= FEW_CHANNELS:
            for k in range(depth):
                step(tap, k)
            return
        with loop(depth) as s:
            step(tap, s)


def _weights(conv: Convolution, start: Expr, vector: int) -> Expr:
    """Vector number `vector` of a panel's factors; lanes beyond the panel are zero."""
    lanes, width = conv.lanes, conv.weight.layout.tile(0)
    index = lane_indices(start + vector * lanes, lanes)
    mask = channel_masks(conv, vector + 1, width)[vector]
    if mask is None:
        return conv.weight.data[index]
    dtype = conv.weight.dtype
    loaded = T.masked_load(vector_type(dtype, lanes), conv.weight.data, index, mask)
    return T.Select(mask, held(loaded), zeros(dtype, lanes))


def _prefetch(conv: Convolution, start: Expr, count: int) -> None:
    """Ask for `count` elements of the weight."""
    for ahead in range(0, count, CACHE_LINE_BYTES // bytes_of(conv.weight.dtype)):
        prefetch(conv.weight.data, start + ahead)
