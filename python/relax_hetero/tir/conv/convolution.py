"""Direct convolutions, and the selection of a convolution's kernel."""

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
from ...target.dot_instructions import DotInstruction, dot_instruction_for
from ...target.element_types import bytes_of
from ...target.tiles import MAX_PIXELS, conv_pixels, tile_sizes
from ..core.builder import (
    CACHE_LINE_BYTES,
    Expr,
    Function,
    Masks,
    Registers,
    ceil_div,
    lane_indices,
    lane_mask,
    lane_of,
    let,
    loop,
    materialize,
    minimum,
    over_columns,
    prefetch,
    vector_type,
    zeros,
)
from ..core.ties import tied_to
from ..core.work_split import part
from ..math.casts import cast
from ..matmul.matmul import matmul_kernel
from ..microkernel.amx import LLVM_TEXT, amx_or_vectors
from ..microkernel.fp16_partial_sums import Fp16PartialSums, mark_fp16_partial_sums
from ..microkernel.k_step import lhs_group, lhs_groups, llvm_import, rhs_groups, zero
from ..microkernel.microkernel import VectorTile
from .amx_conv import amx_convolution, emit_amx_conv
from .conv_geometry import Segment, Taps, resolve_taps, row_segments
from .conv_products import as_product
from .conv_spec import (
    Convolution,
    ConvRow,
    data_position,
    make_conv_row,
    over_taps,
    result_position,
    split_rows,
    store_pixels,
)
from .conv_winograd import emit_winograd
from .depthwise_conv import emit_depthwise

# The micro-kernel of a direct convolution: a register tile of pixels and output channels.
#
# A k-step multiplies `DotInstruction.k0` neighbouring input channels of a pixel, broadcast to all lanes, by the weights
# of each output channel of the panel. If the instruction flips the sign bits of the data, a tile starts from the
# compensation in the weight's layout, for the taps that it reads: padding is not part of any sum.

MAX_UNROLLED_STEPS = 4  # maximum number of steps over the input channels for which the loop is unrolled

# Maximum number of fp16 chains of a tile whose sums are converted to float32 only at the end of the tile.
MAX_FP16_CHAINS = 12


@dataclass(frozen=True)
class Panel:
    """A panel of output channels."""

    column: Expr  # first output channel
    vectors: int  # number of vectors with existing channels
    masks: Masks  # existing lanes of each vector
    first_channel: Expr  # first input channel of the panel's group
    next_panel: Expr | None  # offset of the next panel in the weight; None if panels are not prefetched


@dataclass(frozen=True)
class PanelPrefetch:
    """Prefetches of the next panel by the steps of a tile."""

    start: Expr  # offset in the weight of the tile's share
    elements: int  # elements that each step prefetches


@dataclass(frozen=True)
class ConvTile:
    """A register tile."""

    row: ConvRow
    panel: Panel
    segment: Segment
    first_pixel: Expr  # first pixel along the innermost dimension
    prefetch: PanelPrefetch | None


def emit_tile(conv: Convolution, tile: ConvTile, accs: Registers, compensation: Registers | None) -> None:
    """Write the code of a tile; registers of compensation are those of each run of taps, None without flipped bits."""
    panel, width = tile.panel, tile.segment.width
    size = (width, panel.vectors)
    conv.epilogue.prefetch(
        f"y{len(conv.windows) - 1}",
        size,
        lambda _, t, j: result_position(conv, tile.row, tile.first_pixel + t, panel.column + j * conv.lanes),
    )
    sums = VectorTile(conv.dot, accs, conv.dot.whole_rows(width), panel.vectors, conv.lanes)
    if conv.dot.short:
        _accumulate_fp16(conv, tile, sums)
    else:
        if compensation is None:
            sums.clear()
        else:
            _start_compensated(conv, tile, compensation, accs)
        over_taps(tile.row, lambda taps: _accumulate_row(conv, tile, taps, _Sums(sums)))
        sums.deinterleave()
    store_pixels(
        conv, tile.row, tile.first_pixel, panel.column, size, panel.masks, lambda t, j: accs[t * panel.vectors + j]
    )


@dataclass(frozen=True)
class _Sums:
    """Destination of products: the accumulators, or fp16 partial sums."""

    tile: VectorTile
    partial_sums: Fp16PartialSums | None = None
    is_deferred: bool = False  # whether partial sums of the whole window are added to the accumulators only at the end

    @property
    def chain_steps(self) -> int:
        """Steps of a chain of fp16 partial sums, else 1."""
        return self.partial_sums.length if self.partial_sums else 1

    def add(self, size: int, length: int, emit: Callable[[Expr, Any, VectorTile], None]) -> None:
        """Write a sum of `size` products in chains of `length`; `emit` takes a start, a length and a tile."""
        if self.partial_sums is None:
            emit(0, size, self.tile)
            return
        add = self.partial_sums.add_chains if self.is_deferred else self.partial_sums.add
        add(size, length, lambda first, count, sums: emit(first, count, replace(self.tile, sums=sums)))


def _accumulate_fp16(conv: Convolution, tile: ConvTile, sums: VectorTile) -> None:
    """Accumulate with fp16 partial sums, and again in float32 if one is out of range."""
    tap_count = prod(window.size for window in conv.windows)
    partial_sums = Fp16PartialSums(conv.dot, sums.sums, sums.count, conv.lanes)
    outer_taps = tap_count // conv.windows[-1].size
    steps = ceil_div(conv.depth, conv.dot.k0)
    # Taps that are determined at run time are at most the window's.
    counts = [run.count if isinstance(run.count, int) else conv.windows[-1].size for run in tile.segment.taps]
    chains = sum(ceil_div(count * steps, partial_sums.length) for count in counts)
    is_deferred = outer_taps * chains <= MAX_FP16_CHAINS
    sums.clear()
    if is_deferred:
        partial_sums.begin()
    over_taps(tile.row, lambda taps: _accumulate_row(conv, tile, taps, _Sums(sums, partial_sums, is_deferred)))
    if is_deferred:
        partial_sums.finish()

    def accumulate_wide(wide: VectorTile) -> None:
        wide_conv, without_prefetch = replace(conv, dot=wide.dot), replace(tile, prefetch=None)
        over_taps(tile.row, lambda taps: _accumulate_row(wide_conv, without_prefetch, taps, _Sums(wide)))

    sums.again_if_out_of_range(tap_count * conv.depth, accumulate_wide)


def _start_compensated(conv: Convolution, tile: ConvTile, compensation: Registers, accs: Registers) -> None:
    """Initialize accumulators with the compensation of every tap that reads data."""
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
    """Coordinates of the weight at the first input channel of a panel, for outer taps and the first innermost tap."""
    first = tirx.const(0, "int64")
    at = {f"w{d}": tap for d, tap in enumerate([*taps, first])}
    return {"n": panel.column, "k": first, **at}


def _tap_stride(conv: Convolution) -> Expr:
    """Elements of the weight from one tap to the next."""
    return conv.weight.stride(f"w{len(conv.windows) - 1}")


def _accumulate_row(conv: Convolution, tile: ConvTile, taps: Sequence[Expr], sums: _Sums) -> None:
    """Accumulate the products with one row of the data."""
    window = conv.windows[-1]
    at = data_position(conv, tile.row, taps, tile.panel.first_channel, tile.first_pixel * window.stride - window.before)
    data = materialize(conv.data.address(at))
    weight_at = _weight_position(conv, tile.panel, taps)
    weight = materialize(conv.weight.address(weight_at))
    panel_prefetch = None
    if tile.prefetch is not None:
        elements_before = conv.weight.address({**weight_at, "n": tirx.const(0, "int64")})
        steps_before = tirx.floordiv(elements_before, conv.weight.layout.tile(0) * conv.dot.k0)
        start = materialize(tile.prefetch.start + steps_before * tile.prefetch.elements)
        panel_prefetch = PanelPrefetch(start, tile.prefetch.elements)
    for run in tile.segment.taps:
        _TapRun(conv, run, (data, weight), panel_prefetch).accumulate(sums)


class _TapRun:
    """Products of a run of taps with one row of the data.

    Attributes
    ----------
    start : tuple of PrimExpr
        Offsets of the first pixel in the data and of the first tap in the weight.
    steps, tail : int
        Steps over the input channels of a tap, and channels of a last step that is not whole.
    block : int
        Steps whose left factors one load fetches.
    """

    def __init__(self, conv: Convolution, taps: Taps, start: tuple[Expr, Expr], prefetch: PanelPrefetch | None) -> None:
        self.conv, self.taps, self.start, self.prefetch = conv, taps, start, prefetch
        self.window, self.dot = conv.windows[-1], conv.dot
        self.pixel_stride, self.channel_stride = conv.data.stride(f"x{len(conv.windows) - 1}"), conv.data.stride("c")
        self.step_size, self.tap_stride = conv.weight.layout.tile(0) * self.dot.k0, _tap_stride(conv)
        self.steps, self.tail = divmod(conv.depth, self.dot.k0)
        if conv.data.layout.tile(1) > 1:  # padded
            self.steps, self.tail = ceil_div(conv.depth, self.dot.k0), 0
        block = _steps_per_load(conv)
        self.block = 1 if self.steps % block else block

    def accumulate(self, sums: _Sums) -> None:
        """Write the loops over taps and input channels, one loop where channels of neighbouring taps are contiguous."""
        steps, count, k0 = self.steps, self.taps.count, self.dot.k0
        tap_elements = steps * k0 * self.channel_stride
        is_dense = (
            self.pixel_stride * self.window.dilation == tap_elements and self.tap_stride == steps * self.step_size
        )
        if self.tail == 0 and (is_dense or (isinstance(count, int) and count == 1)):
            sums.add(count * steps, sums.chain_steps, self._emit_steps)
        elif steps < MAX_UNROLLED_STEPS:
            sums.add(count, max(1, sums.chain_steps // (steps + (self.tail > 0))), self._emit_taps)
        else:
            with loop(count) as tap:
                sums.add(
                    steps * k0 + self.tail,
                    sums.chain_steps * k0,
                    lambda first, channels, tile: self._emit_channels(tap, first, channels, tile),
                )

    def _emit_steps(self, first: Expr, count: Expr, tile: VectorTile) -> None:
        with loop(count // self.block) as s:
            self._emit_step(tile, 0, first + s * self.block, count=self.block)

    def _emit_taps(self, first: Expr, count: Expr, tile: VectorTile) -> None:
        with loop(count) as tap:
            self._emit_channels(first + tap, 0, self.steps * self.dot.k0 + self.tail, tile)

    def _emit_channels(self, tap: Expr, first: Expr, count: int, tile: VectorTile) -> None:
        number, rest = divmod(count, self.dot.k0)
        begin = materialize(first // self.dot.k0)
        if number <= MAX_UNROLLED_STEPS:
            for s in range(0, number, self.block):
                self._emit_step(tile, tap, begin + s, count=self.block)
        else:
            with loop(number // self.block) as s:
                self._emit_step(tile, tap, begin + s * self.block, count=self.block)
        if rest:
            self._emit_step(tile, tap, begin + number, rest)

    def _emit_step(self, tile: VectorTile, tap: Expr, number: Expr, existing: int = 0, count: int = 1) -> None:
        """Write `count` steps from step `number` of a tap on; only `existing` channels are data, 0: all."""
        (data, weight), conv, dot, taps = self.start, self.conv, self.dot, self.taps
        data = data + (taps.first + tap) * (self.window.dilation * self.pixel_stride)
        data = data + number * (dot.k0 * self.channel_stride)
        weight = weight + (taps.first + tap) * self.tap_stride + number * self.step_size
        if self.prefetch is not None:
            steps_before = (taps.first + tap) * ceil_div(conv.depth, dot.k0) + number
            _prefetch(conv, self.prefetch.start + steps_before * self.prefetch.elements, self.prefetch.elements)
        rows = range(taps.begin // dot.rows * dot.rows, taps.end, dot.rows)
        if count > 1:
            self._emit_lanes(tile, rows, data, weight, count)
            return

        def left(t: int) -> Expr:
            # A pixel without the tap adds zeros if a step multiplies it together with its neighbour.
            channels = (existing or dot.k0) if taps.begin <= t < taps.end else 0
            return lhs_group(dot, _left_factors(conv, data + t * self.window.stride * self.pixel_stride, channels))

        tile.step(left, lambda j: _right_factors(conv, weight, j), rows=rows)

    def _emit_lanes(self, tile: VectorTile, rows: range, data: Expr, weight: Expr, count: int) -> None:
        """Write `count` steps, each of which multiplies by another lane of one load of a pixel."""
        conv, dot = self.conv, self.dot
        pixels = range(self.taps.begin, self.taps.end)
        stride = self.window.stride * self.pixel_stride
        index = {t: lane_indices(data + t * stride, count * dot.k0) for t in pixels}
        loads = {t: let(_widened_groups(dot, conv.data.data[index[t]], count)) for t in pixels}
        no_factors = [zeros(conv.data.dtype, 1)] * dot.k0

        def emit_lane(s: int) -> None:
            at = weight + s * self.step_size
            tile.step(
                lambda t: lane_of(loads[t], s) if t in loads else lhs_group(dot, no_factors),
                lambda j: _right_factors(conv, at, j),
                rows=rows,
            )

        for s in range(count):
            emit_lane(s)


def _steps_per_load(conv: Convolution) -> int:
    """Steps whose left factors one load fetches, for instructions that multiply by lanes of a register."""
    dot = conv.dot
    is_by_lane = dot.form in ("fma", "f16_fma", "dot", "blocks", "bf16_blocks") and conv.data.stride("c") == 1
    step_bytes = max(dot.k0 * bytes_of(dot.types[0]), 4)
    return max(1, tile_sizes(conv.cpu).left_bytes // step_bytes) if is_by_lane else 1


def _widened_groups(dot: DotInstruction, values: Expr, count: int) -> Expr:
    """The left factors of `count` steps, float16 as float32."""
    groups = lhs_groups(dot, values, count)
    return cast(groups, dot.types[2]) if dot.form == "f16_fma" else groups


def _left_factors(conv: Convolution, address: Expr, existing: int) -> Expr | list[Expr]:
    """The input channels of a step, with zeros after the `existing` ones."""
    k0, channel_stride = conv.dot.k0, conv.data.stride("c")
    if channel_stride == 1 and existing == k0:
        return conv.data.data[lane_indices(address, k0)]
    zero_element = zeros(conv.data.dtype, 1)
    return [conv.data.data[address + i * channel_stride] if i < existing else zero_element for i in range(k0)]


def _right_factors(conv: Convolution, start: Expr, vector: int) -> Expr:
    """The weights of a vector of a panel, for a step; lanes outside of the panel are zero."""
    groups = rhs_groups(conv.dot, _panel_vector(conv, start, vector), conv.lanes)
    mask = lane_mask(conv.weight.layout.tile(0) - vector * conv.lanes, conv.lanes)
    if mask is None:
        return groups
    return T.Select(mask, let(groups), zeros(str(groups.ty.dtype).partition("x")[0], conv.lanes))


def _panel_vector(conv: Convolution, start: Expr, vector: int) -> Expr:
    """The weights of a vector of a panel, `DotInstruction.k0` elements for each channel."""
    k0, dtype = conv.dot.k0, conv.weight.dtype
    lanes = conv.lanes * k0
    index = lane_indices(start + vector * lanes, lanes)
    mask = lane_mask((conv.weight.layout.tile(0) - vector * conv.lanes) * k0, lanes)
    if mask is None:
        return conv.weight.data[index]
    return T.masked_load(vector_type(dtype, lanes), conv.weight.data, index, mask)


def _prefetch(conv: Convolution, start: Expr, count: int) -> None:
    """Prefetch `count` elements of the weight."""
    for offset in range(0, count, CACHE_LINE_BYTES // bytes_of(conv.weight.dtype)):
        prefetch(conv.weight.data, start + offset)


# The loops of a direct convolution, outermost first: tasks, panels of output channels, rows, tiles; within a tile taps
# and input channels. The whole reduction is in registers. Data are read in place, a few input channels broadcast to
# every lane; the weight is packed panel by panel.
#
# CPUs with Intel AMX use it for some types (`amx_conv`), from the same weights; the loops here are then for
# processes that may not use AMX.

# Addresses a multiple of this distance apart map to one set of the L1 cache, which has 8 to 12 ways.
CACHE_WAY_BYTES = 4096
MAX_PIXELS_IN_ONE_SET = 8
# Weights of more bytes are prefetched, panel by panel: other kernels have probably evicted them from the caches.
PREFETCH_BYTES = 1 << 16
# Maximum pixels of a tile in the fallback of an AMX kernel: short code, which compiles in half the time.
AMX_FALLBACK_PIXELS = 6


def emit_direct(conv: Convolution) -> None:
    """Write the body of the kernel: with AMX if it pays and the process may use it, and with vectors."""
    problem = conv.problem
    instruction = amx_instruction_for(conv.cpu, problem.data.dtype, problem.weight.dtype, problem.acc_dtype)
    tiles = amx_convolution(conv, instruction)
    if tiles is None:
        _emit_vectors(conv, MAX_PIXELS)
        return
    with T.attr(0, "pragma_import_llvm", LLVM_TEXT):
        amx_or_vectors(lambda: emit_amx_conv(tiles), lambda: _emit_vectors(conv, AMX_FALLBACK_PIXELS))


def _emit_vectors(conv: Convolution, max_pixels: int) -> None:
    width = conv.weight.layout.tile(0)
    panels = ceil_div(conv.channels, width)
    max_width = min(max_pixels, _max_pixels(conv, ceil_div(width, conv.lanes)))
    segments = row_segments(conv.windows[-1], conv.data.extents[-1], conv.result.extents[-1], max_width)
    macs = prod(window.size for window in conv.windows) * conv.depth
    split = split_rows(conv, panels, width * macs, max_width)
    rows = conv.row_count()
    row_tiles, task_rows = sum(segment.count for segment in segments), ceil_div(rows, split.rows)
    tile_count = task_rows * row_tiles if isinstance(task_rows, int) and isinstance(row_tiles, int) else None
    pixels = max(conv.dot.whole_rows(segment.width) for segment in segments)
    runs = max(len(segment.taps) for segment in segments)
    vectors = ceil_div(min(width, conv.channels), conv.lanes)
    with loop(split.tasks, parallel=split.tasks > 1) as task:
        sums = Registers(pixels * vectors, conv.problem.acc_dtype, conv.lanes)
        has_compensation = conv.dot.compensation != 0
        compensation = Registers(runs * vectors, conv.problem.acc_dtype, conv.lanes) if has_compensation else None
        # `Split.batch` has the parts of a single row (see `split_rows`).
        tile_part, row_part, panel_part = split.parts_of(task)
        tiles = [part(segment.count, split.batch, tile_part) for segment in segments]
        first_row, last_row = part(rows, split.rows, row_part)
        first_panel, last_panel = part(panels, split.columns, panel_part)
        with loop(last_panel - first_panel) as number:
            panel_number = materialize(first_panel + number)
            next_panel = materialize(minimum(panel_number + 1, last_panel - 1) * _panel_elements(conv))

            def emit_rows(masks: Masks, number: Expr = panel_number, next_panel: Expr = next_panel) -> None:
                panel = _make_panel(conv, number, masks, next_panel)
                with loop(last_row - first_row) as r:
                    row, tiles_before = make_conv_row(conv, materialize(first_row + r)), 0
                    for segment, (begin, end) in zip(segments, tiles, strict=True):
                        with loop(end - begin) as tile:
                            pixel = materialize((tile + begin) * segment.width + segment.start)
                            ahead = _make_panel_prefetch(conv, panel, r * row_tiles + tiles_before + tile, tile_count)
                            resolved = resolve_taps(segment, conv.windows[-1], conv.data.extents[-1], pixel)
                            emit_tile(conv, ConvTile(row, panel, resolved, pixel, ahead), sums, compensation)
                        tiles_before += segment.count

            over_columns(panel_number * width, width, conv.channels, conv.lanes, emit_rows)


def _panel_elements(conv: Convolution) -> int:
    """Stored elements of the weight per panel of output channels."""
    return prod(conv.weight.layout.packed_shape(conv.weight.extents)[1:])


def _max_pixels(conv: Convolution, vectors: int) -> int:
    """Maximum width of a tile: limited by registers, and by cache sets if pixels map to the same one."""
    pixels = conv_pixels(conv.cpu, conv.dot, vectors, _steps_per_load(conv) > 1)
    distance = conv.data.stride(f"x{len(conv.windows) - 1}") * conv.windows[-1].stride * bytes_of(conv.data.dtype)
    return min(pixels, MAX_PIXELS_IN_ONE_SET) if distance % CACHE_WAY_BYTES == 0 else pixels


def _make_panel(conv: Convolution, number: Expr, masks: Masks, next_panel: Expr) -> Panel:
    column = materialize(number * conv.weight.layout.tile(0))
    channel: Expr = tirx.const(0, "int64")
    if conv.problem.groups > 1:
        channel = materialize(column // (conv.channels // conv.problem.groups) * conv.depth)
    size = conv.problem.weight.layout.storage_bytes(conv.weight.extents, conv.weight.dtype)
    return Panel(column, len(masks), masks, channel, next_panel if size > PREFETCH_BYTES else None)


def _make_panel_prefetch(conv: Convolution, panel: Panel, number: Expr, count: int | None) -> PanelPrefetch | None:
    """The share of tile `number` of `count` in prefetching the next panel."""
    if panel.next_panel is None or count is None:
        return None
    share = ceil_div(_panel_elements(conv), count)
    step = conv.weight.layout.tile(0) * conv.dot.k0
    return PanelPrefetch(materialize(panel.next_panel + number * share), ceil_div(step, count))


def conv_kernel(problem: ConvProblem, cpu: CpuTarget) -> tirx.PrimFunc:
    """The kernel of a convolution.

    `problem`: data and result row-major or permuted (channels last is fastest), the data perhaps with channels padded
    to `DotInstruction.k0`; the weight in panels of `conv_columns` output channels, ``[OC/n0, KH, KW, IC/groups/k0, n0,
    k0]``. Returns the kernel with the parameters of `ConvProblem`, parallel over the CPU's cores. Raises EncodingError
    if no kernel supports these element types, layouts, or symbolic extents (batch and images may be symbolic).
    """
    dot = _check_problem(problem, cpu)
    matmul = as_product(problem)
    if matmul is not None:
        return matmul_kernel(matmul, cpu)
    with Function("conv2d") as function:
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
    return tied if _is_depthwise(problem) else mark_fp16_partial_sums(tied, dot)


def _check_problem(problem: ConvProblem, cpu: CpuTarget) -> DotInstruction:
    """The instruction that multiplies the problem's types, after checks that a kernel supports the problem."""
    types = (problem.data.dtype, problem.weight.dtype, problem.acc_dtype)
    dot = dot_instruction_for(cpu, *types)
    if dot is None:
        raise EncodingError(
            "convolution: found element types {} * {} -> {}, expected ones that {} multiplies".format(
                *types, cpu.isa.name
            )
        )
    static_extents = (problem.data.shape[1], *problem.weight.shape, problem.result.shape[1])
    if not all(isinstance(extent, int) for extent in static_extents):
        raise EncodingError(
            f"convolution: found channels and extents of the weight {static_extents}, expected numbers; only batch and "
            "images may be symbolic"
        )
    for d, window in enumerate(problem.windows):
        extent, actual = problem.data.shape[2 + d], problem.result.shape[2 + d]
        expected = window.output_extent(extent) if isinstance(extent, int) and isinstance(actual, int) else actual
        if expected != actual:
            raise EncodingError(f"convolution: found {actual} pixels along spatial dimension {d}, expected {expected}")
    _check_layouts(problem, dot)
    return dot


def _check_layouts(problem: ConvProblem, dot: DotInstruction) -> None:
    rank = len(problem.windows) + 2
    channels_last, depthwise_order = (0, *range(2, rank), 1), (1, *range(2, rank), 0)
    data, result, weight = problem.data.layout, problem.result.layout, problem.weight.layout
    padded = PackedLayout(channels_last, (1,), (dot.k0,))
    if data.inner_dims and (data != padded or problem.groups > 1 or dot.k0 == 1):
        raise EncodingError(f"convolution: found data stored as {data}, expected no tiles but those of {padded}")
    if result.inner_dims:
        raise EncodingError(f"convolution: found result stored as {result}, expected no tiles")
    if problem.weight.shape[1] == 1 and weight == PackedLayout(depthwise_order):
        return
    # Transformed windows are stored before the reduced dimensions: outer taps, input channels.
    order = (0, *channels_last[-3:-1], *channels_last[1:-3], 1) if weight.winograd else channels_last
    expected = PackedLayout(order, (0,), (weight.tile(0),), winograd=weight.winograd)
    if dot.k0 > 1 and not (weight.inner_dims and _is_depthwise(problem)):
        expected = PackedLayout(channels_last, (0, 1), (weight.tile(0), dot.k0), dot.compensation != 0)
    if weight.winograd:
        _check_winograd(problem, dot)
    if weight != expected:
        raise EncodingError(
            f"convolution: found the weight stored as {weight}, expected {expected} with any tile of dimension 0, "
            f"or outer={list(depthwise_order)} where groups have one input channel"
        )


def _check_winograd(problem: ConvProblem, dot: DotInstruction) -> None:
    windows = [(window.size, window.stride, window.dilation) for window in problem.windows]
    if len(windows) not in (2, 3) or windows[-2:] != [(WINDOW, 1, 1)] * 2 or dot.types != ("float32",) * 3:
        raise EncodingError(
            f"convolution: found transformed windows {problem.weight.layout} of {dot.types[1]}, sizes, strides and "
            f"dilations {windows}; expected float32 and two (inner) dimensions of {WINDOW}, 1 and 1"
        )
    for name, operand in (("data", problem.data), ("result", problem.result)):
        if operand.layout != PackedLayout((0, *range(2, len(windows) + 2), 1)):
            raise EncodingError(f"convolution: found {name} stored as {operand.layout}, expected channels last")
    channels = int(problem.weight.shape[0]) // problem.groups
    if problem.groups > 1 and channels % problem.weight.layout.tile(0):
        raise EncodingError(
            f"convolution: found {channels} channels a group in panels of {problem.weight.layout.tile(0)}, expected "
            "whole panels"
        )


def _is_depthwise(problem: ConvProblem) -> bool:
    """Return whether a vector of output channels spans several groups."""
    channels = int(problem.weight.shape[0]) // problem.groups
    return not problem.weight.layout.inner_dims or (problem.groups > 1 and problem.weight.layout.tile(0) > channels)
