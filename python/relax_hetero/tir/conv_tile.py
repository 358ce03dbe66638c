"""The direct convolution: a register tile of neighbouring places and output channels, the whole reduction in registers.

The loops, from outside: tasks, panels of output channels, rows, tiles, places of the window, input channels. Data is
read where it lies, one element in every lane; the weight as it is packed, panel by panel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx

from ..element_types import bytes_of
from .builder import Expr, Registers, broadcast, ceil_div, either, held, lane_indices, loop, settled, zeros
from .conv_geometry import Segment, Taps, segments_of
from .conv_place import Convolution, Row, channel_masks, data_position, make_row, split_rows, store_places
from .operand_view import Coordinates
from .work_split import part

# More places a tile gain nothing: with two vectors each, this many fill the registers of AVX-512.
MOST_PLACES = 14
# Elements that are a multiple of this apart fall into one set of the first-level cache, of 8 to 12 ways.
CACHE_WAY_BYTES = 4096
PLACES_IN_ONE_SET = 8
# Up to so many input channels, the loop over them is written out.
FEW_CHANNELS = 4
# Weights of more bytes are prefetched, panel by panel.
PREFETCH_BYTES = 1 << 20
CACHE_LINE_BYTES = 64
MAX_TURN = 32


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
    """

    column: Expr
    vectors: int
    masks: tuple[Expr | None, ...]
    channel: Expr


def emit_direct(conv: Convolution) -> None:
    """Write the body of the kernel."""
    width = conv.weight.layout.tile(0)
    panels = ceil_div(conv.channels, width)
    segments = segments_of(
        conv.windows[-1],
        conv.data.extents[-1],
        conv.result.extents[-1],
        _most_places(conv, ceil_div(width, conv.lanes)),
    )
    reduction = conv.depth
    for window in conv.windows:
        reduction *= window.size
    split = split_rows(conv, panels, conv.result.extents[-1] * width * reduction)
    rows: Expr = 1
    for extent in conv.rows:
        rows = rows * extent
    rows = settled(rows)
    tiles = sum(segment.count for segment in segments)
    with loop(split.tasks, parallel=split.tasks > 1) as task:
        vectors = ceil_div(min(width, conv.channels), conv.lanes)
        accs = Registers(max(segment.width for segment in segments) * vectors, conv.problem.acc_dtype, conv.lanes)
        _, row_part, panel_part = split.place(task)
        first_row, last_row = part(rows, split.rows, row_part)
        first_panel, last_panel = part(panels, split.columns, panel_part)
        with loop(last_panel - first_panel) as number:
            panel_number = settled(first_panel + number)
            column = settled(panel_number * width)

            def rows_of(existing: int, column: Expr = column) -> None:
                panel = _make_panel(conv, column, width, existing)
                with loop(last_row - first_row) as r:
                    _emit_row(conv, make_row(conv, settled(first_row + r)), panel, segments, accs, (r, tiles))

            left = conv.channels % width
            if left == 0 or panels == 1:
                rows_of(min(width, conv.channels))
            else:
                either(panel_number < panels - 1, lambda: rows_of(width), lambda: rows_of(left))


def _most_places(conv: Convolution, vectors: int) -> int:
    """The widest tile: accumulators, a vector of weights each, and one register for the data, within the registers."""
    registers = conv.machine.isa.registers - 1
    most = max(1, min(MOST_PLACES, (registers - vectors) // vectors))
    apart = conv.data.stride(f"x{len(conv.windows) - 1}") * conv.windows[-1].stride * bytes_of(conv.data.dtype)
    return min(most, PLACES_IN_ONE_SET) if apart % CACHE_WAY_BYTES == 0 else most


def _make_panel(conv: Convolution, column: Expr, width: int, existing: int) -> Panel:
    vectors = ceil_div(existing, conv.lanes)
    channel: Expr = tirx.const(0, "int64")
    if conv.problem.groups > 1:
        channel = settled(column // (conv.channels // conv.problem.groups) * conv.depth)
    return Panel(column, vectors, channel_masks(conv, vectors, existing), channel)


def _emit_row(
    conv: Convolution,
    row: Row,
    panel: Panel,
    segments: Sequence[Segment],
    accs: Registers,
    sweep: tuple[Expr, int],
) -> None:
    first_tile = 0
    for segment in segments:
        with loop(segment.count) as tile:
            place = settled(tile * segment.width + segment.start)
            _emit_tile(conv, row, panel, segment, place, accs)
        first_tile += segment.count


def _emit_tile(conv: Convolution, row: Row, panel: Panel, segment: Segment, place: Expr, accs: Registers) -> None:
    vectors = panel.vectors
    for number in range(segment.width * vectors):
        accs[number] = zeros(conv.problem.acc_dtype, conv.lanes)
    _over_taps(conv, row, panel, segment, place, accs, [])
    store_places(
        conv, row, place, panel.column, (segment.width, vectors), panel.masks, lambda t, j: accs[t * vectors + j]
    )


def _over_taps(
    conv: Convolution,
    row: Row,
    panel: Panel,
    segment: Segment,
    place: Expr,
    accs: Registers,
    taps: list[Expr],
) -> None:
    """The loops over the outer places of the window, and inside them those along the innermost dimension."""
    if len(taps) < len(row.taps):
        first, count = row.taps[len(taps)]
        with loop(count) as tap:
            _over_taps(conv, row, panel, segment, place, accs, [*taps, settled(first + tap)])
        return
    window = conv.windows[-1]
    at = data_position(conv, row, taps, panel.channel, place * window.stride - window.before)
    data = settled(conv.data.address(at))
    weight = settled(conv.weight.address(_weight_position(conv, panel, taps)))
    for run in segment.taps:
        _accumulate(conv, panel.vectors, run, (data, weight), accs)


def _weight_position(conv: Convolution, panel: Panel, taps: Sequence[Expr]) -> Coordinates:
    zero = tirx.const(0, "int64")
    return {
        "n": panel.column,
        "k": zero,
        **{f"w{d}": tap for d, tap in enumerate(taps)},
        f"w{len(conv.windows) - 1}": zero,
    }


def _accumulate(conv: Convolution, vectors: int, run: Taps, start: tuple[Expr, Expr], accs: Registers) -> None:
    """Multiply and add what a run of the window's places finds in one row of the data."""
    last = f"x{len(conv.windows) - 1}"
    window, depth = conv.windows[-1], conv.depth
    along, across = conv.data.stride(last), conv.data.stride("c")
    width = conv.weight.layout.tile(0)
    data, weight = start
    data = data + run.first * window.dilation * along
    weight = weight + run.first * depth * width

    def step(data: Expr, weight: Expr) -> None:
        right = [held(conv.weight.data[lane_indices(weight + j * conv.lanes, conv.lanes)]) for j in range(vectors)]
        for t in range(run.begin, run.end):
            left = held(conv.data.data[data + t * window.stride * along])
            for j in range(vectors):
                accs[t * vectors + j] = accs[t * vectors + j] + broadcast(left, conv.lanes) * right[j]

    if along * window.dilation == depth * across or run.count == 1:
        # From the last channel of one place, the same step leads to the first channel of the next.
        with loop(run.count * depth) as s:
            step(data + s * across, weight + s * width)
        return
    with loop(run.count) as tap:
        data, weight = data + tap * (window.dilation * along), weight + tap * (depth * width)
        if depth <= FEW_CHANNELS:
            for k in range(depth):
                step(data + k * across, weight + k * width)
            return
        with loop(depth) as s:
            step(data + s * across, weight + s * width)
