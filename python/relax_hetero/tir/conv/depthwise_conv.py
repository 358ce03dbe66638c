"""Convolutions with few channels per group, such as depthwise ones: a vector's lanes are channels of several groups.

The loops, outermost first: tasks, rows, tiles of neighbouring pixels, vectors of channels, outer taps. Data are read in
the order of storage. If a group has several input channels, a shuffle moves each to the lanes of its group, once for
all taps that read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..core.builder import (
    Expr,
    Registers,
    ceil_div,
    lane_indices,
    lane_mask,
    let,
    loop,
    materialize,
    vector_type,
    zeros,
)
from ..math.casts import cast
from .conv_geometry import Segment, row_segments, taps_at
from .conv_spec import (
    Convolution,
    ConvRow,
    data_position,
    make_conv_row,
    over_taps,
    split_rows,
    store_pixels,
)

# Pixels of a register tile, by the number of registers; data that neighbours share are read once.
TILE_PIXELS = {32: 8, 16: 4}


@dataclass(frozen=True)
class Channels:
    """A vector of output channels."""

    column: Expr  # first channel
    existing: int  # number of channels


def emit_depthwise(conv: Convolution) -> None:
    """Write the body of the kernel."""
    vectors = ceil_div(conv.channels, conv.lanes)
    max_width = TILE_PIXELS[conv.cpu.isa.registers] if conv.lanes > 1 else 1
    segments = row_segments(conv.windows[-1], conv.data.extents[-1], conv.result.extents[-1], max_width)
    macs = conv.depth * conv.lanes * prod(window.size for window in conv.windows)
    split = split_rows(conv, vectors, macs)
    rows = conv.row_count()
    whole = conv.channels // conv.lanes
    with loop(split.tasks, parallel=split.tasks > 1) as task:
        accs = Registers(max(segment.width for segment in segments), conv.problem.acc_dtype, conv.lanes)
        _, (first_row, last_row), (first, last) = split.ranges(task, 1, rows, vectors)
        full = materialize(T.min(last, tirx.const(whole, "int64"))) if split.columns > 1 else whole
        with loop(last_row - first_row) as r:
            row = make_conv_row(conv, materialize(first_row + r))
            for segment in segments:
                with loop(segment.count) as tile:
                    place = materialize(tile * segment.width + segment.start)
                    with loop(full - first) as vector:
                        channels = Channels(materialize(first + vector) * conv.lanes, conv.lanes)
                        _emit_tile(conv, row, segment, place, channels, accs)
                    if whole < vectors:
                        left = Channels(tirx.const(whole * conv.lanes, "int64"), conv.channels - whole * conv.lanes)
                        with loop(last - materialize(T.max(full, first)) if split.columns > 1 else 1):
                            _emit_tile(conv, row, segment, place, left, accs)


def _emit_tile(
    conv: Convolution, row: ConvRow, segment: Segment, place: Expr, channels: Channels, accs: Registers
) -> None:
    for t in range(segment.width):
        accs[t] = zeros(conv.problem.acc_dtype, conv.lanes)
    window = conv.windows[-1]

    def accumulate(taps: Sequence[Expr]) -> None:
        at = data_position(conv, row, taps, tirx.const(0, "int64"), place * window.stride - window.before)
        data = materialize(conv.data.address(at))
        for k in range(conv.depth):
            if segment.taps or isinstance(segment.count, int):
                _accumulate(conv, segment, channels, (data, k), taps, accs)
            else:
                _accumulate_at_end(conv, place, channels, (data, k), taps, accs)

    over_taps(row, accumulate)
    masks = [lane_mask(channels.existing, conv.lanes)]
    store_pixels(conv, row, place, channels.column, (segment.width, 1), masks, lambda t, _: accs[t])


def _accumulate(
    conv: Convolution,
    segment: Segment,
    channels: Channels,
    start: tuple[Expr, int],
    taps: Sequence[Expr],
    accs: Registers,
) -> None:
    """Accumulate one input channel of every group from one row of the data."""
    window = conv.windows[-1]
    mask = lane_mask(channels.existing, conv.lanes)
    data, k = start
    right: dict[int, Expr] = {}
    ranges: dict[int, range] = {}
    for run in segment.taps:
        for tap in range(run.first, run.first + run.count):
            at = {"n": channels.column, "k": tirx.const(k, "int64")}
            at |= {f"w{d}": place for d, place in enumerate([*taps, tirx.const(tap, "int64")])}
            weight = cast(conv.weight.load(at, "n", conv.lanes, mask), conv.problem.acc_dtype)
            right[tap] = let(_zero_missing_lanes(conv, weight, mask))
            ranges[tap] = range(run.begin, run.end)
    offsets = sorted({t * window.stride + tap * window.dilation for tap, places in ranges.items() for t in places})
    for offset in offsets:
        left = let(_data_vector(conv, channels, data + offset * conv.data.stride(f"x{len(conv.windows) - 1}"), k))
        for tap, places in ranges.items():
            t, rest = divmod(offset - tap * window.dilation, window.stride)
            if rest == 0 and t in places:
                accs[t] = accs[t] + left * right[tap]


def _accumulate_at_end(
    conv: Convolution, place: Expr, channels: Channels, start: tuple[Expr, int], taps: Sequence[Expr], accs: Registers
) -> None:
    """Accumulate the same for one pixel at an end of a row, whose taps are determined at run time."""
    window, mask = conv.windows[-1], lane_mask(channels.existing, conv.lanes)
    data, k = start
    first, count = taps_at(window, conv.data.extents[-1], place)
    with loop(count) as number:
        tap = materialize(first + number)
        at = {"n": channels.column, "k": tirx.const(k, "int64")}
        at |= {f"w{d}": index for d, index in enumerate([*taps, tap])}
        weight = cast(conv.weight.load(at, "n", conv.lanes, mask), conv.problem.acc_dtype)
        right = let(_zero_missing_lanes(conv, weight, mask))
        along = conv.data.stride(f"x{len(conv.windows) - 1}")
        accs[0] = accs[0] + let(_data_vector(conv, channels, data + tap * window.dilation * along, k)) * right


def _zero_missing_lanes(conv: Convolution, value: Expr, mask: Expr | None) -> Expr:
    """The value with zeros in lanes that do not exist."""
    return (
        value
        if mask is None or conv.lanes == 1
        else T.Select(mask, let(value), zeros(conv.problem.acc_dtype, conv.lanes))
    )


def _data_vector(conv: Convolution, channels: Channels, start: Expr, k: int) -> Expr:
    """Input channel `k` of the group of each lane; `start` is the address of the first group's first channel."""
    outputs, depth, lanes = conv.channels // conv.problem.groups, conv.depth, conv.lanes
    channel_stride = conv.data.stride("c")
    if lanes % outputs == 0 and channel_stride == 1 and lanes > 1:
        count = lanes // outputs * depth
        start = start + channels.column // outputs * depth
        vector = _load_run(conv, start, count, ceil_div(channels.existing, outputs) * depth)
        source_lanes = [lane // outputs * depth + k for lane in range(lanes)]
        if source_lanes == list(range(count)):
            return vector
        vector = let(vector)
        # TVM requires as many input lanes as result lanes.
        return T.Shuffle([vector] * ceil_div(lanes, count), source_lanes)
    scalars = []
    for lane in range(lanes):
        group = (channels.column + min(lane, channels.existing - 1)) // outputs
        scalars.append(cast(conv.data.data[start + (group * depth + k) * channel_stride], conv.problem.acc_dtype))
    return scalars[0] if lanes == 1 else T.Shuffle(scalars, list(range(lanes)))


def _load_run(conv: Convolution, start: Expr, count: int, existing: int) -> Expr:
    """`count` contiguous elements as a vector of the accumulators' type, with zeros after `existing` ones."""
    dtype = conv.problem.acc_dtype
    if count == 1:
        return cast(conv.data.data[start], dtype)
    if existing >= count:
        return cast(conv.data.data[lane_indices(start, count)], dtype)
    mask = lane_mask(existing, count)
    vector = T.masked_load(vector_type(conv.data.dtype, count), conv.data.data, lane_indices(start, count), mask)
    return T.Select(mask, let(cast(vector, dtype)), zeros(dtype, count))
