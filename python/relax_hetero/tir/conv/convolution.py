"""Convolutions: which kernel computes a problem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.packed_layout import PackedLayout
from ...encoding.problem import ConvProblem
from ...encoding.winograd import WINDOW
from ...errors import EncodingError
from ...target.amx_instructions import amx_instruction_for
from ...target.cpu_target import CpuTarget
from ...target.dot_instructions import DotInstruction, dot_instruction_for, widened_instruction
from ...target.element_types import bytes_of
from ...target.tiles import MAX_PIXELS, conv_pixels
from ..core.builder import (
    CACHE_LINE_BYTES,
    Expr,
    Function,
    Registers,
    ceil_div,
    either,
    lane_indices,
    lane_mask,
    let,
    loop,
    materialize,
    minimum,
    prefetch,
    vector_type,
    when,
    zeros,
)
from ..core.ties import tied_to
from ..core.work_split import part
from ..matmul.amx import LLVM_TEXT, tiles_or_vectors
from ..matmul.fp16_partial_sums import Fp16PartialSums, is_out_of_range, marked
from ..matmul.k_step import add_step, lhs_group, llvm_import, put_rows_in_order, rhs_groups, rows_group, zero
from ..matmul.matmul import matmul_kernel
from .amx_conv import amx_convolution, emit_tiles
from .conv_geometry import Segment, Taps
from .conv_products import as_product
from .conv_spec import (
    Convolution,
    ConvRow,
    channel_masks,
    data_position,
    make_conv_row,
    over_taps,
    result_position,
    split_rows,
    store_places,
)
from .conv_winograd import emit_winograd
from .depthwise_conv import emit_depthwise
from .dynamic_height import at_place, can_have_dynamic_height, row_segments

# The register tile of a direct convolution: its sums over window and input channels, and their end.
#
# A step takes as many neighbouring input channels as the CPU multiplies at once (`DotInstruction.k0`), the same in
# every lane, and as many of each output channel of the panel. Where the instruction needs the sign of the data
# flipped, a tile starts from the compensation in the weight's layout, for the places of the window that it reads:
# padding is no part of any sum.

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


# The direct convolution: a register tile of neighbouring places and output channels, the whole reduction in registers.
#
# The loops, from outside: tasks, panels of output channels, rows, tiles; within a tile (`conv_tile`) places of the
# window and input channels. Data is read where it lies, a few input channels in every lane; the weight as it is packed,
# panel by panel.
#
# CPUs with tile registers multiply some types by them (`tile_register_conv`), from the same weights; the loops here are
# then for processes that may not use them.

# Elements that are a multiple of this apart fall into one set of the first-level cache, of 8 to 12 ways.
CACHE_WAY_BYTES = 4096
PLACES_IN_ONE_SET = 8
# Weights of more bytes are prefetched, panel by panel: whoever ran before has most likely put them out of the caches.
PREFETCH_BYTES = 1 << 16
# Places of a tile in a kernel whose main way is by tile registers: short code, which compiles in half the time.
FEW_PLACES = 6


@dataclass(frozen=True)
class PanelTiles:
    """The tiles that go over one panel.

    Attributes
    ----------
    tiles : int or PrimExpr
        Number of tiles of a row.
    """

    rows: Expr
    tiles: Expr


def emit_direct(conv: Convolution) -> None:
    """Write the body of the kernel: by tile registers where they pay and the process may use them, else by vectors."""
    problem = conv.problem
    instruction = amx_instruction_for(conv.cpu, problem.data.dtype, problem.weight.dtype, problem.acc_dtype)
    tiles = amx_convolution(conv, instruction)
    if tiles is None:
        _emit_by_vectors(conv, MAX_PIXELS)
        return
    with T.attr(0, "pragma_import_llvm", LLVM_TEXT):
        tiles_or_vectors(lambda: emit_tiles(tiles), lambda: _emit_by_vectors(conv, FEW_PLACES))


def _emit_by_vectors(conv: Convolution, places: int) -> None:
    width = conv.weight.layout.tile(0)
    panels = ceil_div(conv.channels, width)
    widest = min(places, _max_places(conv, ceil_div(width, conv.lanes)))
    segments = row_segments(conv.windows[-1], conv.data.extents[-1], conv.result.extents[-1], widest)
    macs = prod(window.size for window in conv.windows) * conv.depth
    split = split_rows(conv, panels, width * macs, widest)
    rows = conv.row_count()
    sweep = PanelTiles(ceil_div(rows, split.rows), sum(segment.count for segment in segments))
    vectors = ceil_div(min(width, conv.channels), conv.lanes)
    with loop(split.tasks, parallel=split.tasks > 1) as task:
        registers = AmxTiles.of(conv, segments, vectors)
        place_part, row_part, panel_part = split.parts_of(task)
        tiles = [part(segment.count, split.batch, place_part) for segment in segments]
        first_row, last_row = part(rows, split.rows, row_part)
        first_panel, last_panel = part(panels, split.columns, panel_part)
        with loop(last_panel - first_panel) as number:
            panel_number = materialize(first_panel + number)
            following = materialize(minimum(panel_number + 1, last_panel - 1) * _panel_elements(conv))

            def rows_of(existing: int, number: Expr = panel_number, following: Expr = following) -> None:
                panel = _make_panel(conv, number, existing, following)
                with loop(last_row - first_row) as r:
                    _emit_row(conv, first_row + r, panel, (segments, tiles), registers, (r, sweep))

            left = conv.channels % width
            if left == 0 or panels == 1:
                rows_of(min(width, conv.channels))
            else:
                either(panel_number < panels - 1, lambda: rows_of(width), lambda: rows_of(left))


def _panel_elements(conv: Convolution) -> int:
    """Elements of the weight that are stored for one panel of output channels."""
    return prod(conv.weight.layout.packed_shape(conv.weight.extents)[1:])


def _max_places(conv: Convolution, vectors: int) -> int:
    """The widest tile: as the registers allow, less where places would put one another out of the cache."""
    most = conv_pixels(conv.cpu, conv.dot, vectors)
    apart = conv.data.stride(f"x{len(conv.windows) - 1}") * conv.windows[-1].stride * bytes_of(conv.data.dtype)
    return min(most, PLACES_IN_ONE_SET) if apart % CACHE_WAY_BYTES == 0 else most


def _make_panel(conv: Convolution, number: Expr, existing: int, following: Expr) -> Panel:
    width = conv.weight.layout.tile(0)
    column = materialize(number * width)
    vectors = ceil_div(existing, conv.lanes)
    channel: Expr = tirx.const(0, "int64")
    if conv.problem.groups > 1:
        channel = materialize(column // (conv.channels // conv.problem.groups) * conv.depth)
    size = conv.problem.weight.layout.storage_bytes(conv.weight.extents, conv.weight.dtype)
    return Panel(
        column, vectors, channel_masks(conv, vectors, existing), channel, following if size > PREFETCH_BYTES else None
    )


def _emit_row(
    conv: Convolution,
    row_number: Expr,
    panel: Panel,
    tiles: tuple[Sequence[Segment], Sequence[tuple[Expr, Expr]]],
    registers: AmxTiles,
    sweep: tuple[Expr, PanelTiles],
) -> None:
    """The tiles of a row: of each segment those from a first to behind a last."""
    row = make_conv_row(conv, materialize(row_number))
    number, whole = sweep
    before: Expr = 0
    for segment, (begin, end) in zip(*tiles, strict=True):
        with loop(end - begin) as tile:
            first = materialize((tile + begin) * segment.width + segment.start)
            ahead = _make_ahead(conv, panel, number * whole.tiles + before + tile, whole)
            found = at_place(segment, conv.windows[-1], conv.data.extents[-1], first)
            emit_tile(conv, ConvTile(row, panel, found, first, ahead), registers)
        before += segment.count


def _make_ahead(conv: Convolution, panel: Panel, number: Expr, sweep: PanelTiles) -> Ahead | None:
    if panel.following is None or not isinstance(sweep.rows, int) or not isinstance(sweep.tiles, int):
        return None
    tiles = sweep.rows * sweep.tiles
    share = ceil_div(_panel_elements(conv), tiles)
    step = conv.weight.layout.tile(0) * conv.dot.k0
    return Ahead(materialize(panel.following + number * share), ceil_div(step, tiles))


def conv_kernel(problem: ConvProblem, cpu: CpuTarget) -> tirx.PrimFunc:
    """The kernel of a convolution.

    Parameters
    ----------
    problem : ConvProblem
        Data and result row-major or permuted (channels last is what kernels are made for), the data perhaps with its
        channels padded to `DotInstruction.k0`; the weight in tiles of output channels, `conv_columns` of them,
        ``[OC/n0, KH, KW, IC/groups/k0, n0, k0]``.

    Returns
    -------
    tirx.PrimFunc
        Its parameters are those that `ConvProblem` says; it is parallel over the CPU's cores.

    Raises
    ------
    EncodingError
        If no kernel computes these element types, stores, or symbolic extents (the batch may be symbolic, and where the
        weight's windows are transformed or `can_have_dynamic_height`, the image).
    """
    dot = _checked(problem, cpu)
    matmul = as_product(problem)
    if matmul is not None:
        return matmul_kernel(matmul, cpu)
    function = Function("conv2d")
    with function:
        conv = Convolution.of(function, problem, cpu, dot)
        with function.body():
            conv.open()
            text = llvm_import(dot, conv.lanes)
            if problem.weight.layout.winograd:
                emit_winograd(conv)
            elif _is_depthwise(problem):
                emit_depthwise(conv)
            elif text is None:
                emit_direct(conv)
            else:
                with T.attr(0, "pragma_import_llvm", text):
                    emit_direct(conv)
    tied = tied_to(function.result, problem.epilogue.operands if problem.epilogue else (), 2, problem.result)
    return tied if _is_depthwise(problem) else marked(tied, dot)


def _checked(problem: ConvProblem, cpu: CpuTarget) -> DotInstruction:
    """How the CPU multiplies what the problem, which kernels can compute, multiplies."""
    types = (problem.data.dtype, problem.weight.dtype, problem.acc_dtype)
    dot = dot_instruction_for(cpu, *types)
    if dot is None:
        raise EncodingError(
            "convolution: found element types {} * {} -> {}, expected ones that {} multiplies".format(
                *types, cpu.isa.name
            )
        )
    takes_images = bool(problem.weight.layout.winograd) or can_have_dynamic_height(dot)
    last, but = (2, "images") if takes_images else (None, "the batch")
    fixed = (*problem.data.shape[1:last], *problem.weight.shape, *problem.result.shape[1:last])
    if not all(isinstance(extent, int) for extent in fixed):
        raise EncodingError(f"convolution: found extents {fixed}, expected numbers for all but {but}")
    for d, window in enumerate(problem.windows):
        extent, found = problem.data.shape[2 + d], problem.result.shape[2 + d]
        places = window.places(extent) if isinstance(extent, int) and isinstance(found, int) else found
        if places != found:
            raise EncodingError(f"convolution: found {found} places along spatial dimension {d}, expected {places}")
    _check_layouts(problem, dot)
    return dot


def _check_layouts(problem: ConvProblem, dot: DotInstruction) -> None:
    rank = len(problem.windows) + 2
    perm, last = (0, *range(2, rank), 1), (1, *range(2, rank), 0)
    data, result, weight = problem.data.layout, problem.result.layout, problem.weight.layout
    padded = PackedLayout(perm, (1,), (dot.k0,))
    if data.inner_dims and (data != padded or problem.groups > 1 or dot.k0 == 1):
        raise EncodingError(f"convolution: found data stored as {data}, expected no tiles but those of {padded}")
    if result.inner_dims:
        raise EncodingError(f"convolution: found result stored as {result}, expected no tiles")
    if problem.weight.shape[1] == 1 and weight == PackedLayout(last):
        return
    # Transformed windows lie before what products add over: places along outer dimensions, input channels.
    order = (0, *perm[-3:-1], *perm[1:-3], 1) if weight.winograd else perm
    expected = PackedLayout(order, (0,), (weight.tile(0),), winograd=weight.winograd)
    if dot.k0 > 1 and not (weight.inner_dims and _is_depthwise(problem)):
        expected = PackedLayout(perm, (0, 1), (weight.tile(0), dot.k0), dot.compensation != 0)
    if weight.winograd:
        _check_winograd(problem, dot)
    if weight != expected:
        raise EncodingError(
            f"convolution: found the weight stored as {weight}, expected {expected} with any tile of dimension 0, "
            f"or outer={list(last)} where groups have one input channel"
        )


def _check_winograd(problem: ConvProblem, dot: DotInstruction) -> None:
    windows = [(window.size, window.stride, window.dilation) for window in problem.windows]
    if len(windows) not in (2, 3) or windows[-2:] != [(WINDOW, 1, 1)] * 2 or dot.types != ("float32",) * 3:
        raise EncodingError(
            f"convolution: found transformed windows {problem.weight.layout} of {dot.types[1]}, sizes, strides and "
            f"dilations {windows}; expected float32 and two (inner) dimensions of {WINDOW}, 1 and 1"
        )
    for side, operand in (("data", problem.data), ("result", problem.result)):
        if operand.layout != PackedLayout((0, *range(2, len(windows) + 2), 1)):
            raise EncodingError(f"convolution: found {side} stored as {operand.layout}, expected channels last")
    channels = int(problem.weight.shape[0]) // problem.groups
    if problem.groups > 1 and channels % problem.weight.layout.tile(0):
        raise EncodingError(
            f"convolution: found {channels} channels a group in panels of {problem.weight.layout.tile(0)}, expected "
            "whole panels"
        )


def _is_depthwise(problem: ConvProblem) -> bool:
    """Return whether a vector of output channels holds several groups."""
    channels = int(problem.weight.shape[0]) // problem.groups
    return not problem.weight.layout.inner_dims or (problem.groups > 1 and problem.weight.layout.tile(0) > channels)
