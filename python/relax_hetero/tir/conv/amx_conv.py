"""Convolutions by tile registers: the loops, copies and stores of `conv_direct` for CPUs with Intel AMX.

The loops, from outside: tasks, groups, blocks of rows of the result, stretches of output channels, pairs of tiles,
places of the window, steps of 64 bytes of input channels. No matrix of windows is written down: a tile of data is
loaded from the image, or from a copy of its rows with the padding (`tile_register_plan`). As in products by tile
registers (`tir.matmul.amx_matmul`), sums of a pair are finished, row by row, between the steps of the next.
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
    ceil_div,
    either,
    int64,
    lane_indices,
    let,
    loop,
    materialize,
    when,
)
from ..core.view import Coordinates
from ..core.work_split import Split, part, unravel
from ..matmul import amx
from .conv_spec import Convolution, channel_masks, split_rows

# How tile registers go over a convolution: plain integers, no code.
#
# A row of a tile of data is a pixel of a channels-last image, the rows of a tile are neighbouring places of the result,
# so their pixels lie at a constant distance. A step multiplies up to 64 bytes of channels. Where the window's innermost
# places lie one after the other in memory, a step may take several of them: few channels fill a tile that way.
#
# Data are read where they lie if nothing is padded. Otherwise a task copies the rows of the image that a block of its
# result needs, with zeros for the padding: once for all output channels and places of the window.

GROUP_BYTES = 4  # of k0 neighbouring input channels, whatever their type
COLUMNS = 16  # of a tile

# Steps that fill less of a tile cost more than vectors do.
MIN_STEP_BYTES = 16

# Copied rows of a block stay in the second-level cache; but the weight is read once for each block, so a block has so
# many places at least, as long as memory for it is moderate.
BLOCK_BYTES = 1 << 20
BLOCK_PLACES = 256
MAX_BLOCK_BYTES = 1 << 24

# Weights of more bytes are prefetched, panel by panel: those of a model come from memory or the last-level cache.
PREFETCH_BYTES = 1 << 16


@dataclass(frozen=True)
class RunSteps:
    """How the input channels of a run of the window's places divide among steps.

    Attributes
    ----------
    runs : int
        Number of runs of an innermost row of the window: its taps, or one run of all of them.
    steps : int
        Number of steps of a run.
    groups : int
        Number of groups of k0 neighbouring channels in a step.
    shared : int
        Groups of the weight that the last step reads as well as the one before; they meet zeros.
    """

    runs: int
    steps: int
    groups: int
    shared: int = 0

    @property
    def count(self) -> int:
        """Steps of an innermost row of the window."""
        return self.runs * self.steps

    @property
    def step_bytes(self) -> int:
        """Bytes of a pixel that a step reads."""
        return self.groups * GROUP_BYTES


@dataclass(frozen=True)
class Copy:
    """Where pixels of the copied rows lie.

    Attributes
    ----------
    distance : int
        Bytes from one pixel to the next.
    width : int
        Pixels of a row, padding included.
    unit : int
        Rows that are neighbours in the copy are so many apart in the image.
    """

    distance: int
    width: int
    unit: int

    def rows(self, places: int, window: Window) -> int:
        """Rows that so many rows of the result need."""
        return ((places - 1) * window.stride + window.dilated_extent - 1) // self.unit + 1

    @property
    def row_bytes(self) -> int:
        """Number of bytes of a row."""
        return self.distance * self.width


@dataclass(frozen=True)
class TilePlan:
    """How the tiles of a convolution are cut.

    Attributes
    ----------
    height : int
        Places of a tile, along the innermost dimension; the last tile of a row overlaps the one before.
    across : int
        Tiles of a row of the result.
    run : RunSteps
    rows : int
        Rows of the result in a block, along the last but one dimension.
    blocks : int
        Number of blocks along that dimension.
    copy : Copy or None
        None: data are read where they lie.
    panel : int
        Output channels of a panel, as the weight is stored.
    columns : int
        Output channels that a pair of tiles is multiplied by: those of two tiles or one, which divide a panel.
    fetched : int
        Cache lines of the next panel that a step asks for.
    """

    height: int
    across: int
    run: RunSteps
    rows: int
    blocks: int
    copy: Copy | None
    panel: int
    columns: int
    fetched: int

    @property
    def vectors(self) -> int:
        """Tiles of the weight that are multiplied at once."""
        return self.columns // COLUMNS

    @property
    def lefts(self) -> int:
        """Tiles of data that are multiplied at once, at most."""
        return min(2, self.rows * self.across)


def plan_tiles(problem: ConvProblem, instruction: AmxInstruction, parts: int) -> TilePlan | None:
    """How tiles go over a convolution; None where vectors are better, or tiles cannot read the operands.

    Parameters
    ----------
    parts : int
        Into how many parts rows of the result are shared among cores.
    """
    places = _static(problem.result.shape[2:])
    panel = problem.weight.layout.tile(0)
    if 0 in places or 0 in problem.weight.shape or panel % COLUMNS:
        return None
    columns = columns_at_once(panel)
    if problem.weight.layout.inner_dims != (0, 1) or problem.weight.layout.tile(1) != instruction.k0:
        return None
    if problem.data.layout.outer_perm != (0, *range(2, len(problem.data.shape)), 1):
        return None
    across = ceil_div(places[-1], TILE_ROWS)
    height = ceil_div(places[-1], across)
    if height < instruction.min_rows:
        return None
    copied = _steps_of(problem, instruction.k0, may_join=True, may_share=True)
    in_place = _steps_in_place(problem, instruction.k0)
    run = in_place if in_place is not None and in_place.count <= copied.count else copied
    if run.step_bytes < MIN_STEP_BYTES:
        return None
    outer = _outer(problem)
    copy = None if run is in_place else _copy(problem, run, instruction.k0)
    rows = _rows_of_block(problem, copy, places, across * height)
    if copy is not None and rows == 1:
        copy = Copy(copy.distance, copy.width, outer.dilation)
    if copy is not None and _copy_bytes(problem, copy, rows) > MAX_BLOCK_BYTES:
        return None
    extent = places[-2] if len(places) > 1 else 1
    blocks = _even_blocks(problem, ceil_div(extent, rows), extent, parts)
    rows = ceil_div(extent, blocks)
    blocks = ceil_div(extent, rows)
    weight = problem.weight.layout.storage_bytes(_static(problem.weight.shape), problem.weight.dtype)
    is_fetched = weight > PREFETCH_BYTES and columns == panel
    fetched = ceil_div(TILE_ROWS * columns // COLUMNS, ceil_div(rows * across, 2)) if is_fetched else 0
    return TilePlan(height, across, run, rows, blocks, copy, panel, columns, fetched)


def columns_at_once(panel: int) -> int:
    """Output channels that are multiplied at once, of panels of so many: two tiles of the weight, or one."""
    return COLUMNS * (1 if panel // COLUMNS % 2 else 2)


def even_steps(groups: int) -> int:
    """The fewest steps of equal numbers of groups."""
    return next(steps for steps in range(ceil_div(groups, TILE_ROWS), groups + 1) if groups % steps == 0)


def _static(extents: tuple) -> tuple[int, ...]:
    assert all(isinstance(extent, int) for extent in extents), "only the batch is symbolic"
    return extents


def _outer(problem: ConvProblem) -> Window:
    """The last window but one: blocks are cut along its dimension."""
    return problem.windows[-2] if len(problem.windows) > 1 else Window(1)


def _groups(problem: ConvProblem, k0: int) -> int:
    """Groups of k0 channels, of a pixel and one group of output channels."""
    return ceil_div(_static(problem.weight.shape)[1], k0)


def _steps_of(problem: ConvProblem, k0: int, may_join: bool, may_share: bool) -> RunSteps:
    """The steps of an innermost row of the window.

    Parameters
    ----------
    may_join : bool
        The window's places may be neighbours in memory.
    may_share : bool
        The last two steps may read the same groups of the weight.
    """
    groups, window = _groups(problem, k0), problem.windows[-1]
    apart, joined = even_steps(groups), even_steps(groups * window.size)
    if may_share:
        apart = ceil_div(groups, TILE_ROWS)
    # A block of sums stands between the places of a weight with compensation; single groups are equally far apart.
    are_even = not problem.weight.layout.compensation or groups == 1
    if may_join and are_even and window.dilation == 1 and joined < apart * window.size:
        return RunSteps(1, joined, groups * window.size // joined)
    step = ceil_div(groups, apart)
    return RunSteps(window.size, apart, step, apart * step - groups)


def _steps_in_place(problem: ConvProblem, k0: int) -> RunSteps | None:
    """None where something is padded, or the last channels are no whole group."""
    depth = _static(problem.weight.shape)[1]
    is_whole = depth % k0 == 0 or problem.data.layout.tile(1) == k0
    extents = zip(problem.windows, _static(problem.data.shape[2:]), _static(problem.result.shape[2:]), strict=True)
    is_inside = all(
        w.before == 0 and (places - 1) * w.stride + w.dilated_extent <= extent for w, extent, places in extents
    )
    if not is_whole or not is_inside:
        return None
    return _steps_of(problem, k0, may_join=problem.groups == 1, may_share=False)


def _copy(problem: ConvProblem, run: RunSteps, k0: int) -> Copy:
    window, outer = problem.windows[-1], _outer(problem)
    pixel = _groups(problem, k0) * GROUP_BYTES
    lines = ceil_div(run.steps * run.step_bytes, TILE_BYTES)
    # An odd number of cache lines: rows of a tile then fall into different sets of the first-level cache.
    distance = (lines | 1) * TILE_BYTES if run.runs == window.size else pixel
    width = (_static(problem.result.shape[2:])[-1] - 1) * window.stride + window.dilated_extent
    return Copy(distance, width, gcd(outer.stride, outer.dilation))


def _copy_bytes(problem: ConvProblem, copy: Copy, rows: int) -> int:
    planes = prod(window.size for window in problem.windows[:-2])
    return planes * copy.rows(rows, _outer(problem)) * copy.row_bytes


def _rows_of_block(problem: ConvProblem, copy: Copy | None, places: tuple[int, ...], row: int) -> int:
    """Rows of the result that a panel of the weight meets before the next one."""
    if len(places) == 1:
        return 1
    if copy is None:
        outer = _outer(problem)
        row_bytes = prod(_static((problem.data.shape[1], problem.data.shape[-1]))) * bytes_of(problem.data.dtype)
        return max(1, min(places[-2], BLOCK_BYTES // (row_bytes * outer.stride)))
    rows = places[-2]
    while rows > 1 and _copy_bytes(problem, copy, rows) > BLOCK_BYTES and (rows - 1) * row >= BLOCK_PLACES:
        rows -= 1
    while rows > 1 and _copy_bytes(problem, copy, rows) > MAX_BLOCK_BYTES:
        rows -= 1
    return rows


def _even_blocks(problem: ConvProblem, blocks: int, extent: int, parts: int) -> int:
    """As many blocks or more, which cores can share evenly."""
    planes = prod(
        extent for extent in (problem.result.shape[0], *problem.result.shape[2:-2]) if isinstance(extent, int)
    )
    for count in range(blocks, min(blocks + parts, extent + 1)):
        if planes * count % parts == 0:
            return count
    return blocks


_LEFT, _RIGHT = (4, 5), (6, 7)  # tiles of factors; those of sums are 0 to 3, two for each of the left ones


@dataclass(frozen=True)
class AmxConvolution:
    """A convolution that tiles compute; see `amx_convolution`."""

    conv: Convolution
    instruction: AmxInstruction
    plan: TilePlan
    split: Split

    @property
    def groups(self) -> int:
        """Groups of channels."""
        return self.conv.problem.groups

    @property
    def stretches(self) -> int:
        """Stretches of `TilePlan.columns` output channels, of a group."""
        return ceil_div(self.conv.channels // self.groups, self.plan.columns)

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
        """Bytes of the weight that a group of input channels has in a panel."""
        return self.plan.panel * GROUP_BYTES

    @property
    def groups_apart(self) -> int:
        """Groups of the weight from one place of the window to the next, with those of compensation."""
        return self.conv.weight.stride(f"w{len(self.conv.windows) - 1}") * self.size // self.group_bytes

    @property
    def group_unit(self) -> int:
        """Groups of the weight from one group of a step to the next."""
        run = self.plan.run
        is_joined = run.runs < self.conv.windows[-1].size
        return self.groups_apart * self.conv.windows[-1].size // (run.steps * run.groups) if is_joined else 1

    @property
    def size(self) -> int:
        """Bytes of an element of the data and the weight."""
        return bytes_of(self.conv.data.dtype)

    @property
    def outer_places(self) -> list[Expr]:
        """Extents of the result that blocks are not cut along: the batch and all but its last two dimensions."""
        return [self.conv.result.extents[0], *self.conv.result.extents[2:-2]]


def amx_convolution(conv: Convolution, instruction: AmxInstruction | None) -> AmxConvolution | None:
    """How tiles compute a convolution, None if they do not."""
    if instruction is None or conv.lanes != COLUMNS:
        return None
    columns = columns_at_once(conv.weight.layout.tile(0))
    units = ceil_div(conv.channels, columns)
    if conv.problem.groups > 1:
        units, columns = conv.problem.groups, conv.channels // conv.problem.groups
    macs = prod(window.size for window in conv.windows) * conv.depth * columns
    split = split_rows(conv, units, ceil_div(macs, instruction.rate))
    assert isinstance(split.rows, int)
    plan = plan_tiles(conv.problem, instruction, split.rows)
    return None if plan is None else AmxConvolution(conv, instruction, plan, split)


class _Task:
    """Buffers of a task: copied rows, sums, and where the sums that wait are to go."""

    def __init__(self, tiles: AmxConvolution) -> None:
        self.tiles, self.conv, plan = tiles, tiles.conv, tiles.plan
        self.copied = None
        if plan.copy is not None:
            planes = prod(window.size for window in tiles.windows[:-1])
            rows = planes * plan.copy.rows(plan.rows, _last(tiles.windows))
            # Lines are copied whole, beyond the end of the last pixel too.
            self.copied = amx.scratch(rows * plan.copy.row_bytes + TILE_BYTES, "int8")
        self.sums = amx.scratch(2 * TILE_ROWS * 2 * COLUMNS, tiles.conv.problem.acc_dtype)
        # Their place: the first output channel, the outer coordinates, and of each tile the row, its first place, and
        # how many places the tile before has as well.
        self.outer = len(tiles.outer_places)
        self.waiting = amx.WaitingRows(1 + self.outer + 6)
        width = plan.run.step_bytes
        amx.configure([plan.height] * 6 + [plan.run.groups] * 2, [TILE_BYTES] * 4 + [width] * 2 + [TILE_BYTES] * 2)


def _last(windows: Sequence[Window]) -> Window:
    return windows[-1] if windows else Window(1)


def emit_tiles(tiles: AmxConvolution) -> None:
    """Write the body of the kernel, for a process that may use tiles."""
    plan, split, groups = tiles.plan, tiles.split, tiles.groups
    planes = materialize(prod(tiles.outer_places))
    units = groups if groups > 1 else tiles.stretches
    with loop(split.tasks, parallel=split.tasks > 1) as number:
        task = _Task(tiles)
        _, row_part, unit_part = split.parts_of(number)
        first_block, last_block = part(planes * plan.blocks, split.rows, row_part)
        first_unit, last_unit = part(units, split.columns, unit_part)
        with loop(last_unit - first_unit if groups > 1 else 1) as g, loop(last_block - first_block) as n:
            group = materialize(first_unit + g) if groups > 1 else 0
            begin, end = (0, tiles.stretches) if groups > 1 else (first_unit, last_unit)
            plane, within = unravel(first_block + n, [planes, plan.blocks], materialize, materialize)
            outer = unravel(plane, tiles.outer_places, materialize, materialize)
            block = _Block(task, group, outer, materialize(within * plan.rows))
            block.copy_rows()
            with loop(end - begin) as stretch:
                block.sweep(materialize(group * tiles.stretches + begin + stretch))
        _finish_waiting(task)
        amx.release()


class _Block:
    """Some rows of the result, and the data that they need.

    Parameters
    ----------
    outer : list of PrimExpr
        Coordinates of the batch and all but the last two dimensions of the result.
    first : PrimExpr
        The first row, along the last dimension but one.
    """

    def __init__(self, task: _Task, group: Expr, outer: list[Expr], first: Expr) -> None:
        self.task, self.tiles, self.conv = task, task.tiles, task.conv
        self.plan = self.tiles.plan
        self.outer, self.first = outer, first
        extents = self.conv.result.extents
        rows, extent = self.plan.rows, extents[-2] if len(extents) > 3 else 1
        self.rows = rows if extent % rows == 0 else materialize(T.min(int64(rows), extent - first))
        self.channel = materialize(group * self.conv.depth)

    def _data_address(self, outer_taps: Sequence[Expr], row: Expr, column: Expr) -> Expr:
        """The first channel of a pixel, whose row and column are counted in the image."""
        windows = self.conv.windows
        at: dict[str, Expr] = {"b": self.outer[0], "c": self.channel, f"x{len(windows) - 1}": column}
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
        outer = self.tiles.windows[:-1]
        last = _last(self.tiles.windows)
        count = prod(window.size for window in outer)
        all_rows = copy.rows(self.plan.rows, last)
        rows: Expr = all_rows
        if not isinstance(self.rows, int):
            rows = materialize(tirx.floordiv((self.rows - 1) * last.stride + (last.dilated_extent - 1), copy.unit) + 1)
        begin = materialize(self.first * last.stride - last.before)
        with loop(count) as plane:
            taps = unravel(plane, [window.size for window in outer], materialize, materialize) if outer else []
            with loop(rows) as r:
                row = materialize(begin + r * copy.unit)
                target = materialize((plane * all_rows + r) * copy.row_bytes)
                self._fill_row(copy, taps, row, target)

    def _fill_row(self, copy: Copy, outer_taps: Sequence[Expr], row: Expr, target: Expr) -> None:
        """A row of the image, or zeros where the image has none."""
        inside = self._is_inside(outer_taps, row)
        either(
            True if inside is None else inside,
            lambda: self._copy_row(copy, outer_taps, row, target),
            lambda: self._clear(target, 0, copy.width),
        )

    def _is_inside(self, outer_taps: Sequence[Expr], row: Expr) -> Expr | None:
        """Return whether the image has a row; None: each that is asked for."""
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
        with loop(ceil_div(count * copy.distance, TILE_BYTES)) as line:
            start = materialize(target + first * copy.distance + line * TILE_BYTES)
            T.buffer_store(self.task.copied, empty, [lane_indices(start, TILE_BYTES)])

    def _copy_row(self, copy: Copy, outer_taps: Sequence[Expr], row: Expr, target: Expr) -> None:
        """A row of the image and its padding. From the left: each line that is copied may reach into what follows."""
        conv, size = self.conv, self.tiles.size
        before = min(conv.windows[-1].before, copy.width)
        pixels = max(0, min(conv.data.extents[-1], copy.width - before))
        if before:
            self._clear(target, 0, before)
        source = materialize(self._data_address(outer_taps, row, tirx.const(0, "int64")))
        channels = conv.depth if conv.data.layout.tile(1) == 1 else ceil_div(conv.depth, conv.dot.k0) * conv.dot.k0
        content, apart = channels * size, conv.data.stride(f"x{len(conv.windows) - 1}") * size
        target = target + before * copy.distance
        if content == apart == copy.distance:
            self._copy_bytes(source, target, pixels * content)
        elif pixels:
            with loop(pixels) as pixel:
                start = materialize(source + pixel * (apart // size))
                self._copy_pixel(start, materialize(target + pixel * copy.distance), content)
        if before + pixels < copy.width:
            self._clear(target, pixels, copy.width - before - pixels)

    def _copy_pixel(self, source: Expr, target: Expr, content: int) -> None:
        """The channels of a pixel; zeros meet the groups of the weight that the last step shares."""
        run = self.plan.run
        if not run.shared:
            self._copy_bytes(source, target, content)
            return
        first = (run.steps - 1) * run.step_bytes
        self._copy_bytes(source, target, first)
        T.buffer_store(self.task.copied, T.broadcast(T.int8(0), TILE_BYTES), [lane_indices(target + first, TILE_BYTES)])
        self._copy_bytes(source + first // self.tiles.size, target + first + run.shared * GROUP_BYTES, content - first)

    def _copy_bytes(self, source: Expr, target: Expr, count: int) -> None:
        lines, left = divmod(count, TILE_BYTES)
        data, size = self.conv.data.data, self.tiles.size

        def copy(line: Expr, count: int) -> None:
            origin = amx.address(data, source + line * (TILE_BYTES // size))
            place = amx.address(self.task.copied, materialize(target + line * TILE_BYTES))
            amx.copy_line(origin, place, count)

        if lines:
            with loop(lines) as line:
                copy(line, TILE_BYTES)
        if left:
            copy(tirx.const(lines, "int64"), left)

    def sweep(self, stretch: Expr) -> None:
        """All places of the block, for a stretch of output channels."""
        conv, plan = self.conv, self.plan
        column = materialize(stretch * plan.columns)
        names = {"n": column, "k": tirx.const(0, "int64")}
        names |= {f"w{d}": tirx.const(0, "int64") for d in range(len(conv.windows))}
        weight = materialize(conv.weight.address(names))
        count = self.rows * plan.across
        pairs = materialize(ceil_div(count, 2))
        with loop(pairs) as number:
            pair = _Pair(self, number, column, weight)
            if plan.lefts == 1:
                pair.multiply(1)
            elif isinstance(count, int) and count % 2 == 0:
                pair.multiply(2)
            else:
                either(number * 2 + 1 < count, partial(pair.multiply, 2), partial(pair.multiply, 1))

    def tile_start(self, row: Expr, first: Expr) -> Expr:
        """Where the first pixel of a tile lies: bytes of the copied rows, elements of the data."""
        copy, windows = self.plan.copy, self.conv.windows
        last = _last(self.tiles.windows)
        if copy is not None:
            return row * (last.stride // copy.unit * copy.row_bytes) + first * (windows[-1].stride * copy.distance)
        zeros = [tirx.const(0, "int64")] * (len(windows) - 2)
        return self._data_address(zeros, (self.first + row) * last.stride, first * windows[-1].stride)

    def tap_offset(self, taps: Sequence[Expr], inner: Expr) -> Expr:
        """From a tile's first pixel to that of places of the window; in the unit of `tile_start`."""
        copy, windows = self.plan.copy, self.conv.windows
        if copy is None:
            pairs = zip(windows, [*taps, inner], strict=True)
            return sum(
                (tap * (w.dilation * self.conv.data.stride(f"x{d}")) for d, (w, tap) in enumerate(pairs)),
                tirx.const(0, "int64"),
            )
        offset: Expr = inner * (windows[-1].dilation * copy.distance)
        if taps:
            offset = offset + taps[-1] * (windows[-2].dilation // copy.unit * copy.row_bytes)
        plane: Expr = tirx.const(0, "int64")
        for window, tap in zip(windows, taps[:-1], strict=False):
            plane = plane * window.size + tap
        return offset + plane * (copy.rows(self.plan.rows, _last(self.tiles.windows)) * copy.row_bytes)


class _Pair:
    """Two tiles of places, or one, and a stretch of output channels.

    Parameters
    ----------
    number : PrimExpr
        Number of the pair in its block.
    weight : PrimExpr
        Where the stretch begins in storage.
    """

    def __init__(self, block: _Block, number: Expr, column: Expr, weight: Expr) -> None:
        self.block, self.task, self.tiles, self.plan = block, block.task, block.tiles, block.plan
        self.number, self.column, self.weight = number, column, weight

    def multiply(self, lefts: int) -> None:
        """Add up the products of `lefts` tiles of data, and leave the sums where they wait."""
        tiles, plan, block = self.tiles, self.plan, self.block
        places = [self._place(i) for i in range(lefts)]
        starts = [materialize(block.tile_start(row, first)) for row, first, _ in places]
        sums = [(2 * i + j, i, j) for j in range(plan.vectors) for i in range(lefts)]
        for tile, _, _ in sums:
            amx.clear(tile)
        outer = [window.size for window in tiles.windows]
        run = plan.run
        unit = 1 if plan.copy is not None else tiles.size
        with loop(prod(outer)) as o:
            taps = unravel(o, outer, materialize, materialize) if outer else []
            with loop(run.runs) as tap, loop(run.steps) as s:
                offset = materialize(block.tap_offset(taps, tap) + s * (run.step_bytes // unit))
                at_group = s * run.groups
                if run.shared:
                    at_group = T.min(at_group, int64((run.steps - 1) * run.groups - run.shared))
                groups = (o * tiles.conv.windows[-1].size + tap) * tiles.groups_apart + at_group * tiles.group_unit
                weight = materialize(self.weight + groups * (tiles.group_bytes // tiles.size))
                self._step([materialize(start + offset) for start in starts], weight, sums)
                self._prefetch(weight)
                _finish_waiting(self.task, ceil_div(2 * plan.height, tiles.steps))
        self._end(places, sums)

    def _place(self, i: int) -> tuple[Expr, Expr, Expr]:
        """Row in the block and first place of a tile, and how many places are those of the tile before."""
        plan, last = self.plan, self.tiles.conv.result.extents[-1] - self.plan.height
        number = self.number * 2 + i if plan.lefts > 1 else self.number
        if plan.across == 1:
            return materialize(number), tirx.const(0, "int64"), tirx.const(0, "int64")
        row, across = unravel(number, [0, plan.across], materialize, materialize)
        nominal = across * plan.height
        first = materialize(T.min(nominal, tirx.const(last, "int64")))
        return row, first, materialize(nominal - first)

    def _step(self, lefts: list[Expr], weight: Expr, sums: list[tuple[int, int, int]]) -> None:
        """One step: all loads, then all products."""
        tiles, plan = self.tiles, self.plan
        data = tiles.conv.data.data if plan.copy is None else self.task.copied
        window = tiles.conv.windows[-1]
        if plan.copy is not None:
            distance: Expr = window.stride * plan.copy.distance
        else:
            distance = window.stride * tiles.conv.data.stride(f"x{len(tiles.conv.windows) - 1}") * tiles.size
        for j in range(plan.vectors):
            right = weight + j * TILE_BYTES // tiles.size
            rows_apart = tiles.group_bytes * tiles.group_unit
            amx.load(_RIGHT[j], amx.address(tiles.conv.weight.data, right), rows_apart)
            for i, left in enumerate(lefts) if j == 0 else ():
                amx.load(_LEFT[i], amx.address(data, left), distance)
        for tile, i, j in sums:
            amx.multiply(tiles.instruction, tile, _LEFT[i], _RIGHT[j])

    def _prefetch(self, weight: Expr) -> None:
        """Ask for the part of the next panel that is this step's share."""
        plan, tiles = self.plan, self.tiles
        if not plan.fetched:
            return
        # Pairs share the lines of a step.
        panel = tiles.conv.weight.stride("w0") * tiles.conv.windows[0].size
        lines = plan.run.groups * tiles.group_bytes // TILE_BYTES
        first = materialize(T.min(self.number * plan.fetched, int64(lines - 1)))
        for i in range(plan.fetched):
            position = weight + panel + (first + i) * (TILE_BYTES // tiles.size)
            amx.fetch(amx.address(tiles.conv.weight.data, position))

    def _end(self, places: list[tuple[Expr, Expr, Expr]], sums: list[tuple[int, int, int]]) -> None:
        """The sums wait to be finished."""
        task, height = self.task, self.plan.height
        for tile, i, j in sums:
            begin = i * height * (2 * COLUMNS) + j * COLUMNS
            amx.store(tile, amx.address(task.sums, tirx.const(begin, "int64")), 2 * TILE_BYTES)
        values = [self.column, *self.block.outer]
        for row, first, skipped in places:
            values += [self.block.first + row, first, skipped]
        task.waiting.put(0, len(places) * height, values)


def _finish_waiting(task: _Task, most: int | None = None) -> None:
    """Finish places of the sums that wait, at most so many (None: all)."""
    task.waiting.finish(lambda r: _finish_place(task, r), most)


def _finish_place(task: _Task, number: Expr) -> None:
    """Apply the epilogue to a place of the sums that wait, and store it."""
    conv, plan = task.conv, task.tiles.plan
    place = task.waiting.place
    tile: Expr = materialize(tirx.Cast("int64", number >= plan.height)) if plan.lefts > 1 else 0
    within = number - tile * plan.height
    slot = materialize(tile * 3 + (1 + task.outer))
    names = ["b", *(f"y{d}" for d in range(len(conv.windows) - 2))]
    at: dict[str, Expr] = {name: materialize(place[1 + i]) for i, name in enumerate(names)}
    if len(conv.windows) > 1:
        at[f"y{len(conv.windows) - 2}"] = materialize(place[slot])
    at[f"y{len(conv.windows) - 1}"] = materialize(place[slot + 1] + within)
    column = materialize(place[0])

    def store(existing: int) -> None:
        vectors = ceil_div(existing, COLUMNS)
        for j, mask in enumerate(channel_masks(conv, vectors, existing)):
            here: Coordinates = {**at, "n": column + j * COLUMNS}
            value = let(task.sums[lane_indices(number * (2 * COLUMNS) + j * COLUMNS, COLUMNS)])
            conv.result.store(here, "n", conv.epilogue.result_at(value, here, mask), COLUMNS, mask)

    overlap = conv.result.extents[-1] % plan.height != 0
    with when(within >= place[slot + 2] if overlap else True):
        left = conv.channels % plan.columns
        if left == 0:
            store(plan.columns)
        elif conv.channels < plan.columns:
            store(left)
        else:
            either(column + plan.columns <= conv.channels, lambda: store(plan.columns), lambda: store(left))
