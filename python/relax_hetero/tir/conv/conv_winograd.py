"""Convolutions of 3 x 3 windows and stride 1 by Winograd's minimal filtering.

The loops, outermost first: tasks, groups, blocks of tiles. The data of a block are transformed once, to ``[position,
tile, channel]``; then, for each panel of output channels, every position is a small matrix product of tiles by the
transformed weight. Its sums, ``[position, tile, column]``, are transformed back at once, and stored after the epilogue.
Both buffers belong to a task and stay in the L2 cache.

A tile reads (m + 2) x (m + 2) elements of data; those in the padding, and outside of the image, are zeros.

The two inner dimensions of a volume are transformed. Taps along the outer one act as more input channels, each from
another image: the products add over both, and images in the padding are zeros.

Plans of Winograd convolutions: tasks, blocks of tiles, rows of a register tile.

The transformed data of a block of tiles stay in the L2 cache and meet one panel of weights after the other, so that a
panel is read once per block. Measured (AVX-512, float32): 24 tiles per block are best; with 48 and more the transformed
data leave the cache, and with fewer the weights are read too often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import prod
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.winograd import POINTS, WINDOW, positions
from ...target.cpu_target import CpuTarget
from ..core.builder import (
    CACHE_LINE_BYTES,
    Expr,
    Masks,
    Registers,
    broadcast,
    ceil_div,
    constant,
    either,
    lane_indices,
    lane_mask,
    lane_numbers,
    let,
    load_lanes,
    loop,
    materialize,
    minimum,
    over_columns,
    prefetch,
    zeros,
)
from ..core.view import Coordinates
from ..core.work_split import part, tasks_for, unravel
from ..microkernel.amx import scratch
from ..microkernel.microkernel import VectorTile
from .conv_spec import Convolution

MAX_UNROLLED_CHANNELS = 8  # maximum number of input channels of a step of a product
LINE_ELEMENTS = CACHE_LINE_BYTES // 4  # float32 elements of a cache line


@dataclass(frozen=True)
class _Work:
    """A convolution, its plan, and the memory of a task."""

    conv: Convolution
    plan: Plan
    m: int
    size: int  # positions along one dimension
    depth: int  # terms of a product: input channels times taps along outer dimensions
    distance: int  # elements from the data of one tile to those of the next
    # Elements from one position to the next.
    data_plane: int
    sums_plane: int
    # Transformed data, and the sums of one panel.
    data: Any
    sums: Any

    @property
    def lanes(self) -> int:
        return self.conv.lanes

    @property
    def width(self) -> int:
        """Elements of a row of sums: whole vectors."""
        return ceil_div(self.conv.weight.layout.tile(0), self.lanes) * self.lanes

    @property
    def vectors(self) -> int:
        return self.width // self.lanes

    @property
    def inner(self) -> tuple[int, int]:
        """The two transformed dimensions."""
        return len(self.conv.windows) - 2, len(self.conv.windows) - 1

    def tile_counts(self) -> list[Expr]:
        """Number of tiles along batch, outer dimensions, rows and columns."""
        images, _, *places = self.conv.result.extents
        return [images, *places[:-2], *(materialize(ceil_div(extent, self.m)) for extent in places[-2:])]


def shape_of(conv: Convolution) -> Shape:
    """The sizes of a convolution."""
    images, _, *places = (extent if isinstance(extent, int) else 0 for extent in conv.result.extents)
    layout, groups = conv.weight.layout, conv.problem.groups
    columns, depth = conv.channels // groups, conv.depth * outer_taps(conv)
    images *= prod(places[:-2])
    return Shape(layout.winograd, images, (places[-2], places[-1]), depth, columns, layout.tile(0), groups)


def outer_taps(conv: Convolution) -> int:
    """Number of taps along dimensions that are not transformed."""
    return prod(window.size for window in conv.windows[:-2])


def emit_winograd(conv: Convolution) -> None:
    """Write the body of the kernel."""
    shape = shape_of(conv)
    plan = make_plan(shape, conv.cpu)
    m, dtype = shape.m, conv.problem.acc_dtype
    size = positions(m)
    # The last channels of a tap fill a vector.
    distance = _odd_lines(shape.depth - conv.depth + ceil_div(conv.depth, conv.lanes) * conv.lanes)
    planes = _odd_lines(plan.tiles * distance), _odd_lines(plan.tiles * ceil_div(shape.width, conv.lanes) * conv.lanes)
    with loop(plan.tasks, parallel=plan.tasks > 1) as task:
        data, sums = (scratch(size * size * plane, dtype) for plane in planes)
        work = _Work(conv, plan, m, size, shape.depth, distance, *planes, data, sums)
        registers = Registers(plan.rows * work.vectors, dtype, conv.lanes)
        counts = work.tile_counts()
        first_tile, last_tile = part(materialize(prod(counts)), plan.tile_parts, task // plan.panel_parts)
        first_panel, last_panel = part(shape.panels, plan.panel_parts, task % plan.panel_parts)
        task_tiles = materialize(last_tile - first_tile)
        blocks = plan.blocks or materialize(ceil_div(task_tiles, plan.tiles))
        with loop(shape.groups) as group:
            with loop(blocks) as block:
                # The blocks of a task differ by one tile at most.
                begin = materialize(first_tile + task_tiles * block // blocks)
                count = materialize(first_tile + task_tiles * (block + 1) // blocks - begin)
                with loop(count) as tile:
                    _transform_data(work, materialize(group * conv.depth), tile, _tile_at(work, counts, begin + tile))
                with loop(last_panel - first_panel) as number:
                    panel = materialize(group * shape.panels + first_panel + number)
                    with loop(size * size) as position:
                        _multiply(work, registers, panel, position, count)
                    _finish_panel(work, shape, panel, materialize(first_panel + number), counts, (begin, count))


def _odd_lines(elements: int) -> int:
    """The elements rounded up to an odd number of cache lines, a stride that avoids conflicts of cache sets."""
    lines = ceil_div(elements, LINE_ELEMENTS)
    return (lines + 1 - lines % 2) * LINE_ELEMENTS


def _tile_at(work: _Work, counts: Sequence[Expr], number: Expr) -> Coordinates:
    """The image of a tile and the tile's first pixel in the result."""
    image, *outer, row, column = unravel(number, counts, place=materialize)
    places = [*outer, materialize(row * work.m), materialize(column * work.m)]
    return {"b": image, **{f"y{d}": place for d, place in enumerate(places)}}


def _transform_data(work: _Work, channel: Expr, tile: Expr, at: Coordinates) -> None:
    """Write the transformed data of a tile, all channels of a group."""
    conv = work.conv
    starts = {f"x{d}": materialize(at[f"y{d}"] - conv.windows[d].before) for d in work.inner}
    place = {"b": at["b"], "c": channel, **starts}
    if len(conv.windows) == 2:
        _transform_image(work, place, materialize(tile * work.distance))
        return
    window, extent = conv.windows[0], conv.data.extents[2]
    with loop(window.size) as tap:
        image = materialize(at["y0"] * window.stride + tap * window.dilation - window.before)
        target = materialize(tile * work.distance + tap * conv.depth)
        either(
            tirx.all(image >= 0, image < extent),
            lambda: _transform_image(work, {**place, "x0": image}, target),
            lambda: _clear_data(work, target),
        )


def _clear_data(work: _Work, target: Expr) -> None:
    """Write zeros for all channels of a group."""
    with loop(work.size**2) as position, loop(ceil_div(work.conv.depth, work.lanes)) as number:
        index = target + position * work.data_plane + number * work.lanes
        T.buffer_store(work.data, zeros(work.conv.data.dtype, work.lanes), [lane_indices(index, work.lanes)])


def _transform_image(work: _Work, origin: Coordinates, target: Expr) -> None:
    """Write the transformed data of a tile of one image, all channels of a group, from `target` on."""
    conv, size, lanes = work.conv, work.size, work.lanes
    starts = [origin[f"x{d}"] for d in work.inner]
    extents = conv.data.extents[-2:]
    base = materialize(conv.data.address(origin))
    strides = [conv.data.stride(f"x{d}") for d in work.inner]

    def all_channels(is_inside: bool) -> None:
        existing: list[list[Expr]] = []
        for start, extent in () if is_inside else zip(starts, extents, strict=True):
            existing.append([_is_within(start + i, extent) for i in range(size)])
        whole, left = divmod(conv.depth, lanes)

        def vector(first: Expr, count: int) -> None:
            def load(i: int, j: int) -> Expr:
                start = base + i * strides[0] + j * strides[1] + first
                if is_inside and count == lanes:
                    return let(load_lanes(conv.data.data, start, lanes))
                existing_lanes = tirx.const(count, "int32") if is_inside else count * existing[0][i] * existing[1][j]
                mask = lane_numbers(lanes) < broadcast(existing_lanes, lanes)
                return let(load_lanes(conv.data.data, start, lanes, mask))

            square = [[load(i, j) for j in range(size)] for i in range(size)]
            values = _both_dimensions(square, lambda line: _transform_data_line(line, work.m, lanes))
            begin = materialize(target + first)
            for i, j in product(range(size), repeat=2):
                T.buffer_store(work.data, values[i][j], [lane_indices(begin + (i * size + j) * work.data_plane, lanes)])

        with loop(whole) as number:
            vector(number * lanes, lanes)
        if left:
            vector(whole * lanes, left)

    ends_inside = [start + size <= extent for start, extent in zip(starts, extents, strict=True)]
    either(
        tirx.all(starts[0] >= 0, starts[1] >= 0, *ends_inside),
        lambda: all_channels(True),
        lambda: all_channels(False),
    )


def _is_within(place: Expr, extent: Expr) -> Expr:
    """1 if a position lies in the image, else 0."""
    slot = T.alloc_buffer((1,), "int32", scope="global")
    T.buffer_store(slot, tirx.Cast("int32", tirx.all(place >= 0, place < extent)), [tirx.const(0, "int64")])
    return slot[tirx.const(0, "int64")]


def _multiply(work: _Work, registers: Registers, panel: Expr, position: Expr, count: Expr) -> None:
    """Write the sums of a panel at a position, for all tiles of a block."""
    conv, rows, vectors, lanes = work.conv, work.plan.rows, work.vectors, work.lanes
    weight, tile = conv.weight, conv.weight.layout.tile(0)
    zero = tirx.const(0, "int64")
    outer, inner = tirx.floordiv(position, work.size), tirx.floormod(position, work.size)
    taps = {f"w{d}": zero for d in range(work.inner[0])}
    taps |= {f"w{d}": place for d, place in zip(work.inner, (outer, inner), strict=True)}
    start = materialize(weight.address({"n": panel * tile, "k": zero, **taps}))
    plane = materialize(position * work.data_plane)
    line = materialize(position * work.sums_plane)
    usual_groups = max(1, work.plan.tiles // rows)
    unrolled = next(u for u in range(min(MAX_UNROLLED_CHANNELS, work.depth), 0, -1) if work.depth % u == 0)
    lines = ceil_div(unrolled * tile * 4, CACHE_LINE_BYTES * usual_groups)

    def left(first: Expr, row: int) -> Expr:
        return work.data[first + row * work.distance]

    with loop(materialize(ceil_div(count, rows))) as group:
        # The last rows overlap those before if the block is not a multiple of them.
        first = materialize(T.max(zero, minimum(group * rows, count - rows)))
        data = materialize(plane + first * work.distance)
        next_panel = materialize(start + work.depth * tile + group * (work.depth // unrolled * lines * LINE_ELEMENTS))
        sums = VectorTile(conv.dot, registers, rows, vectors, lanes)
        sums.clear()
        with loop(work.depth // unrolled) as step:
            for line_number in range(lines):
                prefetch(weight.data, next_panel + (step * lines + line_number) * (LINE_ELEMENTS))
            for channel in range(unrolled):
                k = step * unrolled + channel
                sums.step(partial(left, data + k), partial(_weights, work, start + k * tile))
        for row in range(rows):
            for j in range(vectors):
                to = line + (first + row) * work.width + j * lanes
                T.buffer_store(work.sums, registers[row * vectors + j], [lane_indices(to, lanes)])


def _weights(work: _Work, start: Expr, vector: int) -> Expr:
    weight, lanes = work.conv.weight, work.lanes
    mask = lane_mask(weight.layout.tile(0) - vector * lanes, lanes)
    return load_lanes(weight.data, start + vector * lanes, lanes, mask)


def _finish_panel(
    work: _Work, shape: Shape, panel: Expr, number: Expr, counts: Sequence[Expr], block: tuple[Expr, Expr]
) -> None:
    """Transform the sums of a panel back, apply the epilogue and store."""
    begin, count = block
    width = shape.width
    column = materialize(panel * width)
    if shape.groups > 1:
        column = materialize(panel // shape.panels * (shape.columns) + number * width)

    def tiles_of(masks: Masks) -> None:
        with loop(count) as tile:
            _transform_sums(work, tile, _tile_at(work, counts, begin + tile), column, masks)

    over_columns(number * width, width, shape.columns, work.lanes, tiles_of)


def _transform_sums(work: _Work, tile: Expr, at: Coordinates, column: Expr, masks: Masks) -> None:
    """Compute and store the pixels of a tile from its sums; a tile at the border has fewer."""
    conv, m, size, lanes = work.conv, work.m, work.size, work.lanes
    extents = conv.result.extents[-2:]
    names = [f"y{d}" for d in work.inner]
    places = [at[name] for name in names]

    start = materialize(tile * work.width)

    def slot(number: Expr, j: int) -> Expr:
        """Index of a vector of sums of a position."""
        return lane_indices(start + (number * work.sums_plane + j * lanes), lanes)

    def finish(a: Expr, b: Expr, j: int, value: Expr) -> None:
        to = {**at, "n": column + j * lanes, names[0]: places[0] + a, names[1]: places[1] + b}
        conv.result.store(to, "n", conv.epilogue.result_at(value, to, masks[j]), lanes, masks[j])

    def transformed(j: int) -> list[Line]:
        square = [[let(work.sums[slot(a * size + b, j)]) for b in range(size)] for a in range(size)]
        return _both_dimensions(square, lambda line: _transform_sums_line(line, m, lanes))

    def whole() -> None:
        for j in range(len(masks)):
            values = transformed(j)
            for a, b in product(range(m), repeat=2):
                finish(a, b, j, values[a][b])

    def border() -> None:
        for j in range(len(masks)):
            # Stored over the sums: a loop over existing pixels is less code than a branch for each.
            values = transformed(j)
            for a, b in product(range(m), repeat=2):
                T.buffer_store(work.sums, values[a][b], [slot(a * m + b, j)])
            rows, columns = (materialize(minimum(e - p, m)) for e, p in zip(extents, places, strict=True))
            with loop(rows) as row, loop(columns) as place:
                finish(row, place, j, let(work.sums[slot(row * m + place, j)]))

    if all(isinstance(extent, int) and extent % m == 0 for extent in extents):
        whole()
    else:
        either(tirx.all(*(p + m <= e for p, e in zip(places, extents, strict=True))), whole, border)


Line = list[Expr]


def _both_dimensions(square: list[Line], along: Callable[[Line], Line]) -> list[Line]:
    """A square of vectors transformed along its columns, then along its rows."""
    columns = [along([line[j] for line in square]) for j in range(len(square))]
    return [along([column[i] for column in columns]) for i in range(len(columns[0]))]


def _times(factor: float, value: Expr, lanes: int) -> Expr:
    return value if abs(factor - 1) < 1e-12 else constant(factor, "float32", lanes) * value


def _transform_data_line(d: Line, m: int, lanes: int) -> Line:
    """The data's transform along one dimension."""

    def times(factor: float, value: Expr) -> Expr:
        return _times(factor, value, lanes)

    if m == 2:
        (a,) = POINTS[m]
        return [
            let(d[2] - times(a * a, d[0])),
            let(d[2] + times(a, d[1])),
            let(d[2] - times(a, d[1])),
            let(d[3] - times(a * a, d[1])),
        ]
    a, b = POINTS[m]
    even = [let(d[4] - times(other * other, d[2])) for other in (b, a)]
    odd = [let(d[3] - times(other * other, d[1])) for other in (b, a)]
    ends = [let((d[i + 4] - times(a * a + b * b, d[i + 2])) + times(a * a * b * b, d[i])) for i in (0, 1)]
    inner = [
        let(even[i] + times(point, odd[i]) if sign > 0 else even[i] - times(point, odd[i]))
        for i, point in enumerate((a, b))
        for sign in (1, -1)
    ]
    return [ends[0], *inner, ends[1]]


def _transform_sums_line(x: Line, m: int, lanes: int) -> Line:
    """The transform of sums to pixels along one dimension."""

    def times(factor: float, value: Expr) -> Expr:
        return _times(factor, value, lanes)

    if m == 2:
        (a,) = POINTS[m]
        return [let(x[0] + x[1] + x[2]), let(times(a, x[1] - x[2]) + x[3])]
    a, b = POINTS[m]
    s, d, other_s, other_d = let(x[1] + x[2]), let(x[1] - x[2]), let(x[3] + x[4]), let(x[3] - x[4])
    return [
        let(x[0] + s + other_s),
        let(times(a, d) + times(b, other_d)),
        let(times(a * a, s) + times(b * b, other_s)),
        let(x[5] + times(a**3, d) + times(b**3, other_d)),
    ]


BLOCK_TILES = 24
BLOCK_BYTES = 7 << 17  # maximum bytes of the transformed data of a block
MAX_ROWS = 14
SYMBOLIC_TILES_GUESS = 196  # guess for a symbolic number of tiles: an image of 28 x 28 pixels

TRANSFORM_COST = {2: 140, 4: 700}
"""Cost of a forward or inverse transform of a vector of a tile, by m, in multiply-adds of vectors."""
PANEL_READ_ROWS = 12  # cost of reading a panel from L3 for each block, in rows of a product
COLD_BYTE_COST = 0.12  # extra cost of the first read of a byte of the weights, in multiply-adds of vectors
DIRECT_EFFICIENCY = 0.93  # fraction of the peak of multiply-adds that the direct kernel reaches
# Measured on a Zen 4 with AVX-512, one and two threads, weights not in the caches: the estimates are within 25 % of the
# times of 30 shapes of 7 x 7 to 224 x 224 pixels and 16 to 1,024 channels.


@dataclass(frozen=True)
class Shape:
    """Plain sizes of the problem."""

    m: int  # pixels of a tile along each dimension of the image
    # The batch, and the extents of the result; symbolic ones are 0.
    images: int
    places: tuple[int, int]
    # Input and output channels of a group, output channels of a panel of weights, groups.
    depth: int
    columns: int
    width: int
    groups: int

    @property
    def panels(self) -> int:
        """Number of panels of a group."""
        return ceil_div(self.columns, self.width)

    @property
    def tiles(self) -> int:
        """Number of tiles of all images, 0 if symbolic."""
        return self.images * prod(ceil_div(extent, self.m) for extent in self.places)

    @property
    def usual_tiles(self) -> int:
        """Number of tiles, a guess if symbolic."""
        return self.tiles or prod(ceil_div(extent, self.m) for extent in self.places) or SYMBOLIC_TILES_GUESS

    @property
    def products(self) -> int:
        """Number of small matrix products of a tile: one for each position."""
        return positions(self.m) ** 2


@dataclass(frozen=True)
class Plan:
    """Tasks, blocks and register tiles of a Winograd convolution."""

    # Numbers of parts of the tiles and of the panels of a group; a task is one of each.
    tile_parts: int
    panel_parts: int
    blocks: int  # number of blocks of a task; 0 for a symbolic number of tiles
    tiles: int  # maximum number of tiles of a block
    rows: int  # tiles (rows) of a register tile
    cost: float  # cost of the longest task, in multiply-adds of vectors

    @property
    def tasks(self) -> int:
        """Number of tasks."""
        return self.tile_parts * self.panel_parts


def make_plan(shape: Shape, cpu: CpuTarget, dtype: str = "float32") -> Plan:
    """The plan of a convolution for all cores of a CPU, or for one core if there is little work."""
    vectors = ceil_div(shape.width, cpu.lanes(dtype))
    macs = shape.usual_tiles * shape.products * shape.depth * shape.panels * shape.width * shape.groups
    cores = tasks_for(cpu.cores, "multiply-adds", macs if shape.tiles else None)
    plans = []
    for parts in range(1, cores + 1):
        if cores % parts == 0 and parts <= shape.usual_tiles:
            plans.append(_plan(shape, cpu, vectors, parts, min(shape.panels, cores // parts)))
    plan = min(plans, key=lambda plan: (plan.cost, -plan.tile_parts))
    return plan if shape.tiles else replace(plan, blocks=0, tiles=max(plan.tiles, plan.rows))


def estimated_speedup(shape: Shape, cpu: CpuTarget) -> float:
    """The estimated speedup over a direct convolution, in float32."""
    lanes = cpu.lanes("float32")
    places = prod(shape.places) * (shape.images or 1) or shape.usual_tiles * shape.m**2
    direct = places * WINDOW**2 * shape.depth * shape.panels * ceil_div(shape.width, lanes) * shape.groups
    plan = make_plan(shape, cpu, "float32")
    return direct / plan.tasks / DIRECT_EFFICIENCY / plan.cost


def _plan(shape: Shape, cpu: CpuTarget, vectors: int, tile_parts: int, panel_parts: int) -> Plan:
    max_rows = max(1, min(MAX_ROWS, (cpu.isa.registers - 1 - vectors) // vectors))
    max_tiles = max(4, min(BLOCK_TILES, BLOCK_BYTES // (shape.products * shape.depth * 4)))
    max_part, min_part = ceil_div(shape.usual_tiles, tile_parts), shape.usual_tiles // tile_parts
    panels = ceil_div(shape.panels, panel_parts)

    def rows_computed(choice: tuple[int, int]) -> int:
        blocks, rows = choice
        # Each product reads its weights, which takes about as long as a row.
        return blocks * max(ceil_div(ceil_div(max_part, blocks), rows) * (rows + 1), PANEL_READ_ROWS)

    block_counts = {max(1, max_part // max_tiles), ceil_div(max_part, max_tiles)}
    choices = [
        (blocks, rows)
        for blocks in sorted(block_counts)
        if ceil_div(max_part, blocks) <= max_tiles + max_tiles // 3
        for rows in range(1, min(max_rows, max(1, min_part // blocks)) + 1)
    ]
    blocks, rows = best = min(choices, key=rows_computed)
    row = shape.products * shape.depth * vectors
    transforms = max_part * TRANSFORM_COST[shape.m] * (ceil_div(shape.depth, cpu.lanes("float32")) + panels * vectors)
    weights = panels * shape.products * shape.depth * shape.width * 4
    cost = (panels * rows_computed(best) * row + transforms + weights * COLD_BYTE_COST) * shape.groups
    return Plan(tile_parts, panel_parts, blocks, ceil_div(max_part, blocks), rows, cost)
