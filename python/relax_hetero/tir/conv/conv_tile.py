"""The register tile of a direct convolution: its sums over window and input channels, and their end.

A step takes as many neighbouring input channels as the CPU multiplies at once (`DotInstruction.k0`), the same in every
lane, and as many of each output channel of the panel. Where the instruction needs the sign of the data flipped, a tile
starts from the compensation in the weight's layout, for the places of the window that it reads: padding is no part of
any sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...target.dot_instructions import widened_instruction
from ...target.element_types import bytes_of
from ..core.builder import (
    CACHE_LINE_BYTES,
    Expr,
    Registers,
    ceil_div,
    lane_indices,
    lane_mask,
    let,
    loop,
    materialize,
    prefetch,
    vector_type,
    when,
    zeros,
)
from ..matmul.fp16_partial_sums import Fp16PartialSums, is_out_of_range
from ..matmul.k_step import add_step, lhs_group, put_rows_in_order, rhs_groups, rows_group, zero
from .conv_geometry import Segment, Taps
from .conv_spec import Convolution, ConvRow, data_position, over_taps, result_position, store_places

# Up to so many steps over the input channels, the loop is written out.
FEW_STEPS = 4

# Of so many chains, the sum stays in the operands' type until the tile ends: each row of the window has few of them.
MAX_HELD_CHAINS = 12


@dataclass(frozen=True)
class Panel:
    """A panel of output channels, all or the last.

    Attributes
    ----------
    column : PrimExpr
        Its first channel.
    vectors : int
        Number of vectors that hold channels that exist.
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
    """Prefetches of the next panel during a tile: a part for each of its steps.

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
class ConvTile:
    """The tile that is being written.

    Attributes
    ----------
    first : PrimExpr
        Its first place along the innermost dimension.
    """

    row: ConvRow
    panel: Panel
    segment: Segment
    first: Expr
    ahead: Ahead | None


@dataclass(frozen=True)
class AmxTiles:
    """Where a tile adds up.

    Attributes
    ----------
    sums : Registers
        Sums of the positions, a vector of output channels after the other.
    compensation : Registers or None
        Terms that make up for flipped signs, for each run of the window's taps; None where no sign is flipped.
    """

    sums: Registers
    compensation: Registers | None

    @staticmethod
    def of(conv: Convolution, segments: Sequence[Segment], vectors: int) -> AmxTiles:
        """Registers for the tiles of some segments, of so many vectors."""
        dtype = conv.problem.acc_dtype
        places = max(conv.dot.whole_rows(segment.width) for segment in segments)
        sums = Registers(places * vectors, dtype, conv.lanes)
        if conv.dot.compensation == 0:
            return AmxTiles(sums, None)
        runs = max(len(segment.taps) for segment in segments)
        return AmxTiles(sums, Registers(runs * vectors, dtype, conv.lanes))


def emit_tile(conv: Convolution, tile: ConvTile, registers: AmxTiles) -> None:
    """Write the code of a tile."""
    panel, width, accs = tile.panel, tile.segment.width, registers.sums
    size = (width, panel.vectors)
    conv.epilogue.prefetch(
        f"y{len(conv.windows) - 1}",
        size,
        lambda _, t, j: result_position(conv, tile.row, tile.first + t, panel.column + j * conv.lanes),
    )
    if conv.dot.short:
        _accumulate_short(conv, tile, accs)
    else:
        if registers.compensation is None:
            _clear(conv, accs, conv.dot.whole_rows(width) * panel.vectors)
        else:
            _start_compensated(conv, tile, registers.compensation, accs)
        over_taps(tile.row, lambda taps: _accumulate_row(conv, tile, taps, _Sums(accs)))
        put_rows_in_order(conv.dot, accs, conv.dot.whole_rows(width), panel.vectors)
    store_places(conv, tile.row, tile.first, panel.column, size, panel.masks, lambda t, j: accs[t * panel.vectors + j])


@dataclass(frozen=True)
class _Sums:
    """Where products are added: accumulators themselves, or short sums on their way there.

    Attributes
    ----------
    is_held : bool
        Short sums of all the window join the accumulators at once.
    """

    accs: Registers
    short: Fp16PartialSums | None = None
    is_held: bool = False

    @property
    def length(self) -> int:
        """Steps of a chain of short sums."""
        return self.short.length if self.short else 1

    def add(self, size: int, length: int, emit: Callable[[Expr, Any, Registers], None]) -> None:
        """A sum, which `emit` writes from a place on, so far, into registers; `length` is that of a chain."""
        if self.short is None:
            emit(0, size, self.accs)
        else:
            (self.short.add_chains if self.is_held else self.short.add)(size, length, emit)


def _clear(conv: Convolution, accs: Registers, count: int) -> None:
    for number in range(count):
        accs[number] = zero(conv.dot, conv.lanes)


def _accumulate_short(conv: Convolution, tile: ConvTile, accs: Registers) -> None:
    """Accumulate by short sums, and once more without where these left their range."""
    count = tile.segment.width * tile.panel.vectors
    window = prod(window.size for window in conv.windows)
    short = Fp16PartialSums(conv.dot, accs, count, conv.lanes)
    rows = window // conv.windows[-1].size
    runs = sum(ceil_div(run.count * ceil_div(conv.depth, conv.dot.k0), short.length) for run in tile.segment.taps)
    is_held = rows * runs <= MAX_HELD_CHAINS
    _clear(conv, accs, count)
    if is_held:
        short.begin()
    over_taps(tile.row, lambda taps: _accumulate_row(conv, tile, taps, _Sums(accs, short, is_held)))
    if is_held:
        short.finish()
    with when(is_out_of_range([accs[number] for number in range(count)], window * conv.depth, conv.lanes)):
        _clear(conv, accs, count)
        wide = replace(conv, dot=widened_instruction(conv.dot))
        alone = replace(tile, ahead=None)
        over_taps(tile.row, lambda taps: _accumulate_row(wide, alone, taps, _Sums(accs)))


def _start_compensated(conv: Convolution, tile: ConvTile, compensation: Registers, accs: Registers) -> None:
    """The sums of what the layout holds for every place of the window that reads data."""
    vectors, runs = tile.panel.vectors, tile.segment.taps
    for number in range(len(runs) * vectors):
        compensation[number] = zero(conv.dot, conv.lanes)

    def visit(taps: Sequence[Expr]) -> None:
        at = _weight_position(conv, tile.panel, taps)
        start = materialize(conv.weight.address(at, skip_compensation=False))
        for index, run in enumerate(runs):
            with loop(run.count) as tap:
                block = start + (run.first + tap) * _tap_stride(conv)
                for j in range(vectors):
                    sums = tirx.reinterpret(vector_type("int32", conv.lanes), _panel_vector(conv, block, j))
                    number = index * vectors + j
                    compensation[number] = compensation[number] + sums

    over_taps(tile.row, visit)
    for t in range(tile.segment.width):
        for j in range(vectors):
            total = zero(conv.dot, conv.lanes)
            for index, run in enumerate(runs):
                if run.begin <= t < run.end:
                    sums = compensation[index * vectors + j]
                    total = total + sums if conv.dot.compensation > 0 else total - sums
            accs[t * vectors + j] = total


def _weight_position(conv: Convolution, panel: Panel, taps: Sequence[Expr]) -> dict[str, Expr]:
    """The first input channel of a panel, for outer places of the window and the first of the innermost dimension."""
    zero_at = tirx.const(0, "int64")
    at = {f"w{d}": tap for d, tap in enumerate([*taps, zero_at])}
    return {"n": panel.column, "k": zero_at, **at}


def _tap_stride(conv: Convolution) -> Expr:
    """Elements from one place of the window to the next, in the weight."""
    return conv.weight.stride(f"w{len(conv.windows) - 1}")


def _accumulate_row(conv: Convolution, tile: ConvTile, taps: Sequence[Expr], sums: _Sums) -> None:
    """Multiply and add what one row of the data gives."""
    window = conv.windows[-1]
    at = data_position(conv, tile.row, taps, tile.panel.channel, tile.first * window.stride - window.before)
    data = materialize(conv.data.address(at))
    weight_at = _weight_position(conv, tile.panel, taps)
    weight = materialize(conv.weight.address(weight_at))
    ahead = None
    if tile.ahead is not None:
        done = conv.weight.address({**weight_at, "n": tirx.const(0, "int64")})
        steps = tirx.floordiv(done, conv.weight.layout.tile(0) * conv.dot.k0)
        ahead = Ahead(materialize(tile.ahead.start + steps * tile.ahead.step), tile.ahead.step)
    for run in tile.segment.taps:
        _accumulate(conv, tile.panel.vectors, run, (data, weight), ahead, sums)


def _accumulate(
    conv: Convolution, vectors: int, run: Taps, start: tuple[Expr, Expr], ahead: Ahead | None, sums: _Sums
) -> None:
    """Multiply and add what a run of the window's places finds in one row of the data."""
    window, dot = conv.windows[-1], conv.dot
    along, across = conv.data.stride(f"x{len(conv.windows) - 1}"), conv.data.stride("c")
    size, next_tap = conv.weight.layout.tile(0) * dot.k0, _tap_stride(conv)
    is_padded = conv.data.layout.tile(1) > 1
    steps, left = (ceil_div(conv.depth, dot.k0), 0) if is_padded else divmod(conv.depth, dot.k0)

    def group_of(data: Expr, t: int, left: int) -> Expr:
        # A place that does not read the tap adds nothing where a step takes it with its neighbour.
        existing = left if run.begin <= t < run.end else 0
        return let(lhs_group(dot, _left(conv, data + t * window.stride * along, existing)))

    def step(accs: Registers, tap: Expr, number: Expr, left: int = dot.k0) -> None:
        data, weight = start
        data = data + (run.first + tap) * (window.dilation * along) + number * (dot.k0 * across)
        weight = weight + (run.first + tap) * next_tap + number * size
        if ahead is not None:
            done = (run.first + tap) * ceil_div(conv.depth, dot.k0) + number
            _prefetch(conv, ahead.start + done * ahead.step, ahead.step)
        right = [let(_right(conv, weight, j)) for j in range(vectors)]
        for first in range(run.begin // dot.rows * dot.rows, run.end, dot.rows):
            places = range(first, first + dot.rows)
            group = rows_group([group_of(data, t, left) for t in places])
            for j in range(vectors):
                add_step(dot, accs, [t * vectors + j for t in places], group, right[j], conv.lanes)

    is_one_run = along * window.dilation == steps * dot.k0 * across and next_tap == steps * size
    if left == 0 and (is_one_run or (isinstance(run.count, int) and run.count == 1)):

        def steps_of(first: Expr, count: Expr, accs: Registers) -> None:
            # From the last channels of one place, the same step leads to the first channels of the next.
            with loop(count) as s:
                step(accs, 0, first + s)

        sums.add(run.count * steps, sums.length, steps_of)
        return

    def channels_of(tap: Expr, first: Expr, count: int, accs: Registers) -> None:
        number, rest = divmod(count, dot.k0)
        begin = materialize(first // dot.k0)
        if number <= FEW_STEPS:
            for s in range(number):
                step(accs, tap, begin + s)
        else:
            with loop(number) as s:
                step(accs, tap, begin + s)
        if rest:
            step(accs, tap, begin + number, rest)

    def taps_of(first: Expr, count: Expr, accs: Registers) -> None:
        with loop(count) as tap:
            channels_of(first + tap, 0, channels, accs)

    channels = steps * dot.k0 + left
    if steps < FEW_STEPS:
        sums.add(run.count, max(1, sums.length // (steps + (left > 0))), taps_of)
        return
    with loop(run.count) as tap:
        sums.add(channels, sums.length * dot.k0, lambda first, count, accs: channels_of(tap, first, count, accs))


def _left(conv: Convolution, address: Expr, existing: int) -> Expr | list[Expr]:
    """The input channels of a step, zeros for those beyond `existing`."""
    k0, across = conv.dot.k0, conv.data.stride("c")
    if across == 1 and existing == k0:
        return conv.data.data[lane_indices(address, k0)]
    nothing = zeros(conv.data.dtype, 1)
    return [conv.data.data[address + i * across] if i < existing else nothing for i in range(k0)]


def _right(conv: Convolution, start: Expr, vector: int) -> Expr:
    """Vector number `vector` of a panel's factors; lanes beyond the panel are zero."""
    groups = rhs_groups(conv.dot, _panel_vector(conv, start, vector), conv.lanes)
    mask = lane_mask(conv.weight.layout.tile(0) - vector * conv.lanes, conv.lanes)
    if mask is None:
        return groups
    return T.Select(mask, let(groups), zeros(str(groups.ty.dtype).partition("x")[0], conv.lanes))


def _panel_vector(conv: Convolution, start: Expr, vector: int) -> Expr:
    """Vector number `vector` of the weights of a panel, `DotInstruction.k0` elements for each channel."""
    k0, dtype = conv.dot.k0, conv.weight.dtype
    lanes = conv.lanes * k0
    index = lane_indices(start + vector * lanes, lanes)
    mask = lane_mask((conv.weight.layout.tile(0) - vector * conv.lanes) * k0, lanes)
    if mask is None:
        return conv.weight.data[index]
    return T.masked_load(vector_type(dtype, lanes), conv.weight.data, index, mask)


def _prefetch(conv: Convolution, start: Expr, count: int) -> None:
    """Ask for `count` elements of the weight."""
    for ahead in range(0, count, CACHE_LINE_BYTES // bytes_of(conv.weight.dtype)):
        prefetch(conv.weight.data, start + ahead)
