"""Direct convolutions with Intel AMX: plan, loops, copies of rows and stores.

The loops, outermost first: tasks, groups, blocks of rows of the result, chunks of output channels, pairs of tiles, taps
of the window, k-steps of 64 bytes of input channels. There is no im2col matrix: a tile of data is loaded from the
image, or from a copy of its rows with the padding. As in products with AMX (`tir.matmul.amx_matmul`), the epilogue of a
pair is interleaved, row by row, with the steps of the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd, prod

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.problem import ConvProblem, Window
from ...target.amx_instructions import TILE_BYTES, TILE_ROWS, AmxInstruction
from ...target.element_types import bytes_of
from ..core.builder import (
    Expr,
    Masks,
    ceil_div,
    either,
    int64,
    lane_indices,
    let,
    loop,
    materialize,
    over_columns,
    when,
)
from ..core.view import Coordinates
from ..core.work_split import Split, unravel
from ..microkernel import amx
from ..microkernel.amx import LANES
from ..microkernel.microkernel import AmxTile
from .conv_spec import Convolution, split_rows

# The plan of tiles: plain integers, no code.
#
# A row of a tile of data is a pixel of a channels-last image, and the rows of a tile are neighbouring pixels of the
# result, so that their data have a constant stride. A step multiplies up to 64 bytes of channels. If innermost taps are
# contiguous in memory, a step may join several of them, which fills tiles even if channels are few.
#
# Data are read in place if nothing is padded. Otherwise a task copies the rows of the image that a block of the result
# needs, with zeros for the padding, once for all output channels and taps.

GROUP_BYTES = 4  # bytes of a group of k0 neighbouring input channels, for every type

MIN_STEP_BYTES = 16  # steps that fill less of a tile are slower than vectors

# Maximum bytes of a block's copied rows, which stay in the L2 cache. Each block reads the weight again, so that a block
# has a minimum number of pixels, up to a larger number of bytes.
BLOCK_BYTES = 1 << 20
MIN_BLOCK_PIXELS = 256
MAX_BLOCK_BYTES = 1 << 24

# Weights of more bytes are prefetched, panel by panel: those of a model come from memory or the L3 cache.
PREFETCH_BYTES = 1 << 16


@dataclass(frozen=True)
class RunSteps:
    """The k-steps of an innermost row of taps."""

    runs: int  # number of runs of an innermost row of the window: its taps, or one run of all of them
    steps: int  # number of steps of a run
    groups: int  # number of groups of k0 neighbouring channels in a step
    # Groups of the weight that the last two steps of a run both read; the last multiplies them by zeros.
    shared: int = 0

    @property
    def count(self) -> int:
        """Number of steps of an innermost row of the window."""
        return self.runs * self.steps

    @property
    def step_bytes(self) -> int:
        """Bytes of a pixel that a step reads."""
        return self.groups * GROUP_BYTES


@dataclass(frozen=True)
class Copy:
    """Layout of the copied rows."""

    pixel_stride: int  # bytes from one pixel of a row to the next
    width: int  # pixels of a row, padding included
    row_step: int  # number of rows of the image from one row of the copy to the next

    def rows(self, result_rows: int, window: Window) -> int:
        """Number of copied rows for `result_rows` rows of the result."""
        return ((result_rows - 1) * window.stride + window.dilated_extent - 1) // self.row_step + 1

    @property
    def row_bytes(self) -> int:
        """Number of bytes of a row."""
        return self.pixel_stride * self.width


@dataclass(frozen=True)
class TilePlan:
    """Sizes of the tiles and blocks of a convolution."""

    height: int  # pixels of a tile, along the innermost dimension; the last tile of a row overlaps the one before
    row_tiles: int  # number of tiles of a row of the result
    run: RunSteps
    rows: int  # rows of the result in a block, along the last but one dimension
    blocks: int  # number of blocks along that dimension
    copy: Copy | None  # layout of copied rows; None if data are read in place
    panel_channels: int  # output channels of a panel, as the weight is stored
    chunk_channels: int  # output channels of a chunk: those of two tiles or one, a divisor of a panel
    prefetched_lines: int  # cache lines of the next panel that a step prefetches

    @property
    def vectors(self) -> int:
        """Tiles of the weight in a step."""
        return self.chunk_channels // LANES

    @property
    def lefts(self) -> int:
        """Maximum number of tiles of data in a step."""
        return min(2, self.rows * self.row_tiles)


def plan_tiles(problem: ConvProblem, instruction: AmxInstruction, parts: int) -> TilePlan | None:
    """The plan of a convolution; None if vectors are better, or tile loads cannot read the operands.

    `parts`: number of parts of the rows of the result, which the cores share.
    """
    extents = _static(problem.result.shape[2:])
    panel_channels = problem.weight.layout.tile(0)
    if 0 in extents or 0 in problem.weight.shape or panel_channels % LANES:
        return None
    chunk_channels = chunk_columns(panel_channels)
    if problem.weight.layout.inner_dims != (0, 1) or problem.weight.layout.tile(1) != instruction.k0:
        return None
    if problem.data.layout.outer_perm != (0, *range(2, len(problem.data.shape)), 1):
        return None
    row_tiles = ceil_div(extents[-1], TILE_ROWS)
    height = ceil_div(extents[-1], row_tiles)
    if height < instruction.min_rows:
        return None
    copy_run = _plan_steps(problem, instruction.k0, may_join=True, may_share=True)
    in_place_run = _plan_steps_in_place(problem, instruction.k0)
    run = in_place_run if in_place_run is not None and in_place_run.count <= copy_run.count else copy_run
    if run.step_bytes < MIN_STEP_BYTES:
        return None
    outer = _outer_window(problem)
    copy = None if run is in_place_run else _plan_copy(problem, run, instruction.k0)
    rows = _block_rows(problem, copy, extents, row_tiles * height)
    if copy is not None and rows == 1:
        copy = Copy(copy.pixel_stride, copy.width, outer.dilation)
    if copy is not None and _copy_bytes(problem, copy, rows) > MAX_BLOCK_BYTES:
        return None
    rows_extent = extents[-2] if len(extents) > 1 else 1
    blocks = _count_blocks(problem, ceil_div(rows_extent, rows), rows_extent, parts)
    rows = ceil_div(rows_extent, blocks)
    blocks = ceil_div(rows_extent, rows)
    weight_bytes = problem.weight.layout.storage_bytes(_static(problem.weight.shape), problem.weight.dtype)
    is_prefetched = weight_bytes > PREFETCH_BYTES and chunk_channels == panel_channels
    lines = ceil_div(TILE_ROWS * chunk_channels // LANES, ceil_div(rows * row_tiles, 2)) if is_prefetched else 0
    return TilePlan(height, row_tiles, run, rows, blocks, copy, panel_channels, chunk_channels, lines)


def chunk_columns(panel: int) -> int:
    """Output channels of a chunk, for panels of `panel` channels: two tiles of the weight, or one."""
    return LANES * (1 if panel // LANES % 2 else 2)


def even_steps(groups: int) -> int:
    """The minimum number of steps with equal numbers of groups."""
    return next(steps for steps in range(ceil_div(groups, TILE_ROWS), groups + 1) if groups % steps == 0)


def _static(extents: tuple) -> tuple[int, ...]:
    assert all(isinstance(extent, int) for extent in extents), "only the batch is symbolic"
    return extents


def _outer_window(problem: ConvProblem) -> Window:
    """The last window but one; blocks divide its dimension."""
    return problem.windows[-2] if len(problem.windows) > 1 else Window(1)


def _groups(problem: ConvProblem, k0: int) -> int:
    """Number of groups of k0 input channels of a pixel, for one group of output channels."""
    return ceil_div(_static(problem.weight.shape)[1], k0)


def _plan_steps(problem: ConvProblem, k0: int, may_join: bool, may_share: bool) -> RunSteps:
    """The steps of an innermost row of the window.

    `may_join`: whether taps may be contiguous in memory. `may_share`: whether the last two steps may read the same
    groups of the weight.
    """
    groups, window = _groups(problem, k0), problem.windows[-1]
    separate_steps, joined_steps = even_steps(groups), even_steps(groups * window.size)
    if may_share:
        separate_steps = ceil_div(groups, TILE_ROWS)
    # Compensation is stored between the taps of a weight; groups have a uniform stride then only if a tap is one group.
    has_uniform_stride = not problem.weight.layout.compensation or groups == 1
    if may_join and has_uniform_stride and window.dilation == 1 and joined_steps < separate_steps * window.size:
        return RunSteps(1, joined_steps, groups * window.size // joined_steps)
    step_groups = ceil_div(groups, separate_steps)
    return RunSteps(window.size, separate_steps, step_groups, separate_steps * step_groups - groups)


def _plan_steps_in_place(problem: ConvProblem, k0: int) -> RunSteps | None:
    """The steps without copies; None if something is padded, or the last channels are not a whole group."""
    depth = _static(problem.weight.shape)[1]
    has_whole_groups = depth % k0 == 0 or problem.data.layout.tile(1) == k0
    extents = zip(problem.windows, _static(problem.data.shape[2:]), _static(problem.result.shape[2:]), strict=True)
    is_unpadded = all(
        w.before == 0 and (pixels - 1) * w.stride + w.dilated_extent <= extent for w, extent, pixels in extents
    )
    if not has_whole_groups or not is_unpadded:
        return None
    return _plan_steps(problem, k0, may_join=problem.groups == 1, may_share=False)


def _plan_copy(problem: ConvProblem, run: RunSteps, k0: int) -> Copy:
    window, outer = problem.windows[-1], _outer_window(problem)
    pixel_bytes = _groups(problem, k0) * GROUP_BYTES
    lines = ceil_div(run.steps * run.step_bytes, TILE_BYTES)
    # An odd number of cache lines: rows of a tile then map to different sets of the L1 cache.
    pixel_stride = (lines | 1) * TILE_BYTES if run.runs == window.size else pixel_bytes
    width = (_static(problem.result.shape[2:])[-1] - 1) * window.stride + window.dilated_extent
    return Copy(pixel_stride, width, gcd(outer.stride, outer.dilation))


def _copy_bytes(problem: ConvProblem, copy: Copy, rows: int) -> int:
    planes = prod(window.size for window in problem.windows[:-2])
    return planes * copy.rows(rows, _outer_window(problem)) * copy.row_bytes


def _block_rows(problem: ConvProblem, copy: Copy | None, extents: tuple[int, ...], row_pixels: int) -> int:
    """Rows of the result in a block, which uses a panel of the weight before the next one."""
    if len(extents) == 1:
        return 1
    if copy is None:
        outer = _outer_window(problem)
        row_bytes = prod(_static((problem.data.shape[1], problem.data.shape[-1]))) * bytes_of(problem.data.dtype)
        return max(1, min(extents[-2], BLOCK_BYTES // (row_bytes * outer.stride)))
    rows = extents[-2]
    while rows > 1 and _copy_bytes(problem, copy, rows) > BLOCK_BYTES and (rows - 1) * row_pixels >= MIN_BLOCK_PIXELS:
        rows -= 1
    while rows > 1 and _copy_bytes(problem, copy, rows) > MAX_BLOCK_BYTES:
        rows -= 1
    return rows


def _count_blocks(problem: ConvProblem, blocks: int, extent: int, parts: int) -> int:
    """The number of blocks, increased if cores can then share them evenly."""
    planes = prod(
        extent for extent in (problem.result.shape[0], *problem.result.shape[2:-2]) if isinstance(extent, int)
    )
    for count in range(blocks, min(blocks + parts, extent + 1)):
        if planes * count % parts == 0:
            return count
    return blocks


@dataclass(frozen=True)
class AmxConvolution:
    """A convolution with AMX; see `amx_convolution`."""

    conv: Convolution
    instruction: AmxInstruction
    plan: TilePlan
    split: Split

    @property
    def groups(self) -> int:
        """Groups of channels."""
        return self.conv.problem.groups

    @property
    def chunks(self) -> int:
        """Number of chunks of `TilePlan.chunk_channels` output channels of a group."""
        return ceil_div(self.conv.channels // self.groups, self.plan.chunk_channels)

    @property
    def windows(self) -> tuple[Window, ...]:
        """Windows of all dimensions but the innermost."""
        return self.conv.windows[:-1]

    @property
    def steps(self) -> int:
        """Number of steps of a pair."""
        return prod(window.size for window in self.windows) * self.plan.run.count

    @property
    def group_bytes(self) -> int:
        """Bytes of a group of input channels in a panel of the weight."""
        return self.plan.panel_channels * GROUP_BYTES

    @property
    def tap_groups(self) -> int:
        """Groups of the weight from one tap to the next, with those of compensation."""
        return self.conv.weight.stride(f"w{len(self.conv.windows) - 1}") * self.element_bytes // self.group_bytes

    @property
    def group_stride(self) -> int:
        """Stride of the groups of a step, in groups of the weight."""
        run = self.plan.run
        is_joined = run.runs < self.conv.windows[-1].size
        return self.tap_groups * self.conv.windows[-1].size // (run.steps * run.groups) if is_joined else 1

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of the data and the weight."""
        return bytes_of(self.conv.data.dtype)

    def tile(self, lefts: int) -> AmxTile:
        """The accumulators of one or two tiles of pixels."""
        return AmxTile(self.instruction, (self.plan.height, self.plan.height * (lefts - 1)), self.plan.vectors)

    @property
    def outer_extents(self) -> list[Expr]:
        """Extents of the batch and of all but the last two dimensions of the result, which blocks do not divide."""
        return [self.conv.result.extents[0], *self.conv.result.extents[2:-2]]


def amx_convolution(conv: Convolution, instruction: AmxInstruction | None) -> AmxConvolution | None:
    """The convolution with AMX, or None if it is unsupported or slower."""
    has_symbolic_images = not all(isinstance(extent, int) for extent in conv.result.extents[2:])
    if instruction is None or conv.lanes != LANES or has_symbolic_images:
        return None
    columns = chunk_columns(conv.weight.layout.tile(0))
    units = ceil_div(conv.channels, columns)
    if conv.problem.groups > 1:
        units, columns = conv.problem.groups, conv.channels // conv.problem.groups
    macs = prod(window.size for window in conv.windows) * conv.depth * columns
    split = split_rows(conv, units, ceil_div(macs, instruction.rate))
    assert isinstance(split.rows, int)
    plan = plan_tiles(conv.problem, instruction, split.rows)
    return None if plan is None else AmxConvolution(conv, instruction, plan, split)


class _Task:
    """Buffers of a task: copied rows, accumulators, and pending pixels."""

    def __init__(self, tiles: AmxConvolution) -> None:
        self.tiles, self.conv, plan = tiles, tiles.conv, tiles.plan
        self.copied = None
        if plan.copy is not None:
            planes = prod(window.size for window in tiles.windows[:-1])
            rows = planes * plan.copy.rows(plan.rows, _last(tiles.windows))
            # Whole lines are copied, also after the end of the last pixel.
            self.copied = amx.scratch(rows * plan.copy.row_bytes + TILE_BYTES, "int8")
        self.sums = amx.scratch(2 * TILE_ROWS * 2 * LANES, tiles.conv.problem.acc_dtype)
        # Destination: the first output channel, the outer coordinates, and for each tile the row, the first pixel and
        # the number of pixels in common with the tile before.
        self.outer_rank = len(tiles.outer_extents)
        self.pending = amx.PendingRows(1 + self.outer_rank + 6)
        tiles.tile(2).configure(plan.run.groups, plan.run.step_bytes)


def _last(windows: Sequence[Window]) -> Window:
    return windows[-1] if windows else Window(1)


def emit_amx_conv(tiles: AmxConvolution) -> None:
    """Write the body of the kernel, for a process that may use AMX."""
    plan, split, groups = tiles.plan, tiles.split, tiles.groups
    planes = materialize(prod(tiles.outer_extents))
    units = groups if groups > 1 else tiles.chunks
    with loop(split.tasks, parallel=split.tasks > 1) as number:
        task = _Task(tiles)
        ranges = split.ranges(number, 1, planes * plan.blocks, units)
        _, (first_block, last_block), (first_unit, last_unit) = ranges
        with loop(last_unit - first_unit if groups > 1 else 1) as g, loop(last_block - first_block) as n:
            group = materialize(first_unit + g) if groups > 1 else 0
            begin, end = (0, tiles.chunks) if groups > 1 else (first_unit, last_unit)
            plane, block_index = unravel(first_block + n, [planes, plan.blocks], materialize, materialize)
            outer = unravel(plane, tiles.outer_extents, materialize, materialize)
            block = _Block(task, group, outer, materialize(block_index * plan.rows))
            block.copy_rows()
            with loop(end - begin) as chunk:
                block.sweep(materialize(group * tiles.chunks + begin + chunk))
        _finish_pending(task)
        amx.release()


class _Block:
    """A block of rows of the result, and its data.

    `outer`: coordinates of the batch and all but the last two dimensions of the result. `first_row`: first row of the
    result, along the last dimension but one.
    """

    def __init__(self, task: _Task, group: Expr, outer: list[Expr], first_row: Expr) -> None:
        self.task, self.tiles, self.conv = task, task.tiles, task.conv
        self.plan = self.tiles.plan
        self.outer, self.first_row = outer, first_row
        extents = self.conv.result.extents
        rows, extent = self.plan.rows, extents[-2] if len(extents) > 3 else 1
        self.rows = rows if extent % rows == 0 else materialize(T.min(int64(rows), extent - first_row))
        self.first_channel = materialize(group * self.conv.depth)

    def _data_address(self, outer_taps: Sequence[Expr], row: Expr, column: Expr) -> Expr:
        """Address of the first channel of a pixel at a row and a column of the image."""
        windows = self.conv.windows
        at: dict[str, Expr] = {"b": self.outer[0], "c": self.first_channel, f"x{len(windows) - 1}": column}
        if len(windows) > 1:
            at[f"x{len(windows) - 2}"] = row
        for d, tap in enumerate(outer_taps):
            at[f"x{d}"] = self._outer_position(d, tap)
        return self.conv.data.address(at)

    def _outer_position(self, d: int, tap: Expr) -> Expr:
        window = self.conv.windows[d]
        return self.outer[1 + d] * window.stride + tap * window.dilation - window.before

    def copy_rows(self) -> None:
        """Copy the rows of the image that the block needs, with zeros for the padding."""
        copy = self.plan.copy
        if copy is None:
            return
        outer_windows = self.tiles.windows[:-1]
        last = _last(self.tiles.windows)
        planes = prod(window.size for window in outer_windows)
        all_rows = copy.rows(self.plan.rows, last)
        rows: Expr = all_rows
        if not isinstance(self.rows, int):
            last_row = (self.rows - 1) * last.stride + (last.dilated_extent - 1)
            rows = materialize(tirx.floordiv(last_row, copy.row_step) + 1)
        begin = materialize(self.first_row * last.stride - last.before)
        with loop(planes) as plane:
            taps = unravel(plane, [window.size for window in outer_windows], materialize, materialize)
            with loop(rows) as r:
                row = materialize(begin + r * copy.row_step)
                target = materialize((plane * all_rows + r) * copy.row_bytes)
                self._fill_row(copy, taps, row, target)

    def _fill_row(self, copy: Copy, outer_taps: Sequence[Expr], row: Expr, target: Expr) -> None:
        """Copy a row of the image, or zeros for a row of the padding."""
        exists = self._row_exists(outer_taps, row)
        either(
            True if exists is None else exists,
            lambda: self._copy_row(copy, outer_taps, row, target),
            lambda: self._clear(target, 0, copy.width),
        )

    def _row_exists(self, outer_taps: Sequence[Expr], row: Expr) -> Expr | None:
        """Return whether a row lies in the image; None if all rows do."""
        conv, checks = self.conv, []
        positions = [self._outer_position(d, tap) for d, tap in enumerate(outer_taps)]
        positions += [row] if len(conv.windows) > 1 else []
        for d, position in enumerate(positions):
            window, extent, places = conv.windows[d], conv.data.extents[2 + d], conv.result.extents[2 + d]
            if window.before:
                checks.append(position >= 0)
            if (places - 1) * window.stride + window.dilated_extent - window.before > extent:
                checks.append(position < extent)
        return tirx.all(*checks) if checks else None

    def _clear(self, target: Expr, first: int, count: int) -> None:
        """Fill pixels of a copied row with zeros."""
        copy = self.plan.copy
        assert copy is not None
        empty = T.broadcast(T.int8(0), TILE_BYTES)
        with loop(ceil_div(count * copy.pixel_stride, TILE_BYTES)) as line:
            start = materialize(target + first * copy.pixel_stride + line * TILE_BYTES)
            T.buffer_store(self.task.copied, empty, [lane_indices(start, TILE_BYTES)])

    def _copy_row(self, copy: Copy, outer_taps: Sequence[Expr], row: Expr, target: Expr) -> None:
        """Copy a row of the image and its padding, from left to right: a copied line may overwrite what follows it."""
        conv, size = self.conv, self.tiles.element_bytes
        pixels_before = min(conv.windows[-1].before, copy.width)
        pixels = max(0, min(conv.data.extents[-1], copy.width - pixels_before))
        if pixels_before:
            self._clear(target, 0, pixels_before)
        source = materialize(self._data_address(outer_taps, row, tirx.const(0, "int64")))
        channels = conv.depth if conv.data.layout.tile(1) == 1 else ceil_div(conv.depth, conv.dot.k0) * conv.dot.k0
        pixel_bytes, image_stride = channels * size, conv.data.stride(f"x{len(conv.windows) - 1}") * size
        target = target + pixels_before * copy.pixel_stride
        if pixel_bytes == image_stride == copy.pixel_stride:
            self._copy_bytes(source, target, pixels * pixel_bytes)
        elif pixels:
            with loop(pixels) as pixel:
                start = materialize(source + pixel * (image_stride // size))
                self._copy_pixel(start, materialize(target + pixel * copy.pixel_stride), pixel_bytes)
        if pixels_before + pixels < copy.width:
            self._clear(target, pixels, copy.width - pixels_before - pixels)

    def _copy_pixel(self, source: Expr, target: Expr, pixel_bytes: int) -> None:
        """Copy the channels of a pixel, with zeros for the groups of the weight that the last step shares."""
        run = self.plan.run
        if not run.shared:
            self._copy_bytes(source, target, pixel_bytes)
            return
        first = (run.steps - 1) * run.step_bytes
        self._copy_bytes(source, target, first)
        T.buffer_store(self.task.copied, T.broadcast(T.int8(0), TILE_BYTES), [lane_indices(target + first, TILE_BYTES)])
        source = source + first // self.tiles.element_bytes
        self._copy_bytes(source, target + first + run.shared * GROUP_BYTES, pixel_bytes - first)

    def _copy_bytes(self, source: Expr, target: Expr, count: int) -> None:
        amx.copy_bytes((self.conv.data.data, source), (self.task.copied, target), count)

    def sweep(self, chunk: Expr) -> None:
        """Compute all pixels of the block, for a chunk of output channels."""
        conv, plan = self.conv, self.plan
        column = materialize(chunk * plan.chunk_channels)
        at = {"n": column, "k": tirx.const(0, "int64")}
        at |= {f"w{d}": tirx.const(0, "int64") for d in range(len(conv.windows))}
        weight = materialize(conv.weight.address(at))
        tile_count = self.rows * plan.row_tiles
        pairs = materialize(ceil_div(tile_count, 2))
        with loop(pairs) as number:
            pair = _Pair(self, number, column, weight)
            if plan.lefts == 1:
                pair.multiply(1)
            elif isinstance(tile_count, int) and tile_count % 2 == 0:
                pair.multiply(2)
            else:
                either(number * 2 + 1 < tile_count, partial(pair.multiply, 2), partial(pair.multiply, 1))

    def tile_start(self, row: Expr, pixel: Expr) -> Expr:
        """Offset of a tile's first pixel: in bytes of the copied rows, or else in elements of the data."""
        copy, windows = self.plan.copy, self.conv.windows
        window = _last(self.tiles.windows)
        if copy is not None:
            row_offset = row * (window.stride // copy.row_step * copy.row_bytes)
            return row_offset + pixel * (windows[-1].stride * copy.pixel_stride)
        zeros = [tirx.const(0, "int64")] * (len(windows) - 2)
        return self._data_address(zeros, (self.first_row + row) * window.stride, pixel * windows[-1].stride)

    def tap_offset(self, taps: Sequence[Expr], inner: Expr) -> Expr:
        """Offset of taps from a tile's first pixel, in the unit of `tile_start`."""
        copy, windows = self.plan.copy, self.conv.windows
        if copy is None:
            pairs = zip(windows, [*taps, inner], strict=True)
            return sum(
                (tap * (w.dilation * self.conv.data.stride(f"x{d}")) for d, (w, tap) in enumerate(pairs)),
                tirx.const(0, "int64"),
            )
        offset: Expr = inner * (windows[-1].dilation * copy.pixel_stride)
        if taps:
            offset = offset + taps[-1] * (windows[-2].dilation // copy.row_step * copy.row_bytes)
        plane: Expr = tirx.const(0, "int64")
        for window, tap in zip(windows, taps[:-1], strict=False):
            plane = plane * window.size + tap
        return offset + plane * (copy.rows(self.plan.rows, _last(self.tiles.windows)) * copy.row_bytes)


class _Pair:
    """Two tiles of pixels, or one, and a chunk of output channels.

    `number`: index of the pair in its block. `weight`: offset of the chunk in the weight.
    """

    def __init__(self, block: _Block, number: Expr, column: Expr, weight: Expr) -> None:
        self.block, self.task, self.tiles, self.plan = block, block.task, block.tiles, block.plan
        self.number, self.column, self.weight = number, column, weight

    def multiply(self, lefts: int) -> None:
        """Accumulate the products of `lefts` tiles of data, and make their pixels pending."""
        tiles, plan, block = self.tiles, self.plan, self.block
        left_tiles = [self._tile_pixels(i) for i in range(lefts)]
        starts = [materialize(block.tile_start(row, first)) for row, first, _ in left_tiles]
        tile = tiles.tile(lefts)
        tile.clear()
        outer = [window.size for window in tiles.windows]
        run = plan.run
        unit_bytes = 1 if plan.copy is not None else tiles.element_bytes
        with loop(prod(outer)) as outer_tap:
            taps = unravel(outer_tap, outer, materialize, materialize)
            with loop(run.runs) as tap, loop(run.steps) as step:
                offset = materialize(block.tap_offset(taps, tap) + step * (run.step_bytes // unit_bytes))
                group = step * run.groups
                if run.shared:
                    group = T.min(group, int64((run.steps - 1) * run.groups - run.shared))
                groups = (outer_tap * tiles.conv.windows[-1].size + tap) * tiles.tap_groups + group * tiles.group_stride
                weight = materialize(self.weight + groups * (tiles.group_bytes // tiles.element_bytes))
                self._step(tile, [materialize(start + offset) for start in starts], weight)
                self._prefetch(weight)
                _finish_pending(self.task, ceil_div(2 * plan.height, tiles.steps))
        self._finish(tile, left_tiles)

    def _tile_pixels(self, i: int) -> tuple[Expr, Expr, Expr]:
        """Row in the block and first pixel of a tile, and its number of pixels in common with the tile before."""
        plan, last = self.plan, self.tiles.conv.result.extents[-1] - self.plan.height
        number = self.number * 2 + i if plan.lefts > 1 else self.number
        if plan.row_tiles == 1:
            return materialize(number), tirx.const(0, "int64"), tirx.const(0, "int64")
        row, across = unravel(number, [0, plan.row_tiles], materialize, materialize)
        unclamped = across * plan.height
        first = materialize(T.min(unclamped, tirx.const(last, "int64")))
        return row, first, materialize(unclamped - first)

    def _step(self, tile: AmxTile, lefts: list[Expr], weight: Expr) -> None:
        tiles, plan = self.tiles, self.plan
        data = tiles.conv.data.data if plan.copy is None else self.task.copied
        window = tiles.conv.windows[-1]
        if plan.copy is not None:
            stride: Expr = window.stride * plan.copy.pixel_stride
        else:
            stride = window.stride * tiles.conv.data.stride(f"x{len(tiles.conv.windows) - 1}") * tiles.element_bytes
        element_bytes, row_stride = tiles.element_bytes, tiles.group_bytes * tiles.group_stride

        def right(j: int) -> tuple[Expr, Expr]:
            return amx.address(tiles.conv.weight.data, weight + j * TILE_BYTES // element_bytes), row_stride

        tile.step(lambda i: (amx.address(data, lefts[i]), stride), right)

    def _prefetch(self, weight: Expr) -> None:
        """Prefetch this step's share of the next panel."""
        plan, tiles = self.plan, self.tiles
        if not plan.prefetched_lines:
            return
        # Pairs share the lines of a step.
        panel = tiles.conv.weight.stride("w0") * tiles.conv.windows[0].size
        lines = plan.run.groups * tiles.group_bytes // TILE_BYTES
        first = materialize(T.min(self.number * plan.prefetched_lines, int64(lines - 1)))
        for i in range(plan.prefetched_lines):
            position = weight + panel + (first + i) * (TILE_BYTES // tiles.element_bytes)
            amx.prefetch(amx.address(tiles.conv.weight.data, position))

    def _finish(self, tile: AmxTile, left_tiles: list[tuple[Expr, Expr, Expr]]) -> None:
        """Store the accumulators, and make their pixels pending."""
        task, height = self.task, self.plan.height
        tile.store(task.sums, int64(0), 2 * LANES)
        destination = [self.column, *self.block.outer]
        for row, first, overlap in left_tiles:
            destination += [self.block.first_row + row, first, overlap]
        task.pending.put(0, len(left_tiles) * height, destination)


def _finish_pending(task: _Task, max_pixels: int | None = None) -> None:
    """Finish at most `max_pixels` pending pixels (None: all)."""
    task.pending.finish(lambda r: _finish_pixel(task, r), max_pixels)


def _finish_pixel(task: _Task, number: Expr) -> None:
    """Apply the epilogue to a pending pixel, and store it."""
    conv, plan = task.conv, task.tiles.plan
    destination = task.pending.place
    tile: Expr = materialize(tirx.Cast("int64", number >= plan.height)) if plan.lefts > 1 else 0
    pixel = number - tile * plan.height
    tile_entry = materialize(tile * 3 + (1 + task.outer_rank))
    names = ["b", *(f"y{d}" for d in range(len(conv.windows) - 2))]
    at: dict[str, Expr] = {name: materialize(destination[1 + i]) for i, name in enumerate(names)}
    if len(conv.windows) > 1:
        at[f"y{len(conv.windows) - 2}"] = materialize(destination[tile_entry])
    at[f"y{len(conv.windows) - 1}"] = materialize(destination[tile_entry + 1] + pixel)
    column = materialize(destination[0])

    def store(masks: Masks) -> None:
        for j, mask in enumerate(masks):
            coordinates: Coordinates = {**at, "n": column + j * LANES}
            value = let(task.sums[lane_indices(number * (2 * LANES) + j * LANES, LANES)])
            conv.result.store(coordinates, "n", conv.epilogue.result_at(value, coordinates, mask), LANES, mask)

    overlap = conv.result.extents[-1] % plan.height != 0
    with when(pixel >= destination[tile_entry + 2] if overlap else True):
        over_columns(column, plan.chunk_channels, conv.channels, LANES, store)
