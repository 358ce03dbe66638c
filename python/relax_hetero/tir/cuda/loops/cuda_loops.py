"""Launches of nests: transposing maps by tiles in shared memory, split reductions, maps, and whole functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T
from tvm_ffi import structural_map, structural_walk

from ....target.element_types import bytes_of
from ....target.gpu_target import GpuTarget
from ...core.builder import Expr, ceil_div, int64
from ...core.walks import replaced
from ...loops.boxes import Box, split_axes
from ...loops.flat import FlatBox, Loop, flatten, is_step, stride
from ...loops.nests import Nest, Sum
from ...loops.stages import Load, node_count, with_loads
from .lanes import (
    LANE,
    WORD_BYTES,
    Guards,
    LaneBox,
    compute_steps,
    copy_words,
    element_types,
    is_vector,
    load_key,
    max_lanes,
    read_vectors,
    register,
    store_lanes,
    vectorized,
)
from .launch import count_of, inside, launch, position_of, sync, threads_for
from .merging import Merge, merge_of
from .reduction import lane_position, write_reduction

# Transposing maps, which read along another loop than they write: tiles go through shared memory for coalescing.
#
# Before::
#
#     for i, j: y[i, j] = x[j, i]
#
# After, for each tile, by all threads of a block::
#
#     tile[j, i] = x[j0 + j, i0 + i]        # neighbouring threads along i
#     barrier
#     y[i0 + i, j0 + j] = tile[j, i]        # neighbouring threads along j
#
# Rows are padded by a word, so that threads that read a column have no bank conflicts.

_MAX_TILE_EXTENT = 64  # maximum rows and columns of a tile
_MIN_TILE_EXTENT = 8  # minimum extent of tiled loops: strided loads of shorter ones hit the cache

_THREADS = 256
_MAX_SHARED_BYTES = 48 << 10


@dataclass(frozen=True)
class Tiles:
    """A box that reads some inputs along another loop than it writes."""

    box: FlatBox  # its expressions load stand-ins, at `LANE`
    across: Loop  # the loop along which these inputs are contiguous
    reads: dict[tirx.Buffer, Load]  # load of each stand-in
    # Elements of a thread's vector loads and stores.
    read_lanes: int
    lanes: int

    @property
    def last(self) -> Loop:
        """The loop along which results are contiguous."""
        return self.box.spatial[-1]


def tiles_of(box: FlatBox) -> Tiles | None:
    """Tiles of a transposing box; None if it does not transpose."""
    *outer, last = box.spatial
    if not outer or not isinstance(last.count, int) or last.count < _MIN_TILE_EXTENT or box.nest.in_place:
        return None
    guards = Guards(box.nest.computed)
    for value in box.nest.expressions():
        guards.visit(value, ())
    across: list[Loop] = []
    reads: dict[tirx.Buffer, Load] = {}
    stand_ins: dict[object, tirx.Buffer] = {}

    def replace_load(load: Load) -> Expr:
        key = load_key(load)
        if guards.conditions.get(key) != () or str(load.ty.dtype) == "bool":
            return load
        step = stride(load.indices[0], last.var)
        if not isinstance(step, int) or abs(step) < _MIN_TILE_EXTENT:
            return load
        contiguous = [loop for loop in outer if is_step(stride(load.indices[0], loop.var), 1)]
        if not contiguous or (across and contiguous[-1] is not across[0]):
            return load
        if key not in stand_ins:
            across.append(contiguous[-1])
            stand_ins[key] = tirx.decl_buffer((1,), str(load.ty.dtype), scope="local")
            reads[stand_ins[key]] = load
        return tirx.BufferLoad(stand_ins[key], [LANE])

    steps = [(buffer, with_loads(value, replace_load)) for buffer, value in box.nest.steps]
    if not reads or not isinstance(across[0].count, int) or across[0].count < _MIN_TILE_EXTENT:
        return None
    sizes = [bytes_of(str(load.ty.dtype)) for load in reads.values()]
    if sum(_MAX_TILE_EXTENT * (_MAX_TILE_EXTENT * size + WORD_BYTES) for size in sizes) > _MAX_SHARED_BYTES:
        return None
    vector = max(2, min(8, 16 // max(sizes)))
    tiled = replace(box, nest=replace(box.nest, steps=steps))
    stored = [(place, buffer) for buffer, place in box.places.items()]
    loaded = [(load.indices[0], load.source) for load in reads.values()]
    read_lanes = vector if _all_vectors(loaded, across[0], vector) else 1
    lanes = vector if _all_vectors(stored, last, vector) else 1
    return Tiles(tiled, across[0], reads, read_lanes, lanes)


def _all_vectors(accesses: list[tuple[Expr, tirx.Buffer]], loop: Loop, lanes: int) -> bool:
    units = {loop.var: tirx.Var(loop.var.name, "int64") * lanes}
    fits = isinstance(loop.count, int) and loop.count % lanes == 0
    return fits and all(is_vector(offset, buffer, loop.var, units, lanes) for offset, buffer in accesses)


def write_tiles(tiles: Tiles) -> None:
    """Write a transposing box as one launch, with a tile per block."""
    across, last = tiles.across, tiles.last
    rows, columns = _tile_extent(last.count), _tile_extent(across.count)
    outer = [loop for loop in tiles.box.spatial if loop is not across and loop is not last]
    grid = [*outer, Loop(across.var, 0, ceil_div(across.count, columns)), Loop(last.var, 0, ceil_div(last.count, rows))]
    lane_box = vectorized(tiles.box, last, tiles.lanes, True)
    threads = min(_THREADS, max(32, rows * columns // 16))
    count = count_of(grid)
    with launch(count, threads) as (block, thread):
        pitches = [columns + max(WORD_BYTES // bytes_of(str(load.ty.dtype)), 1) for load in tiles.reads.values()]
        buffers = [
            T.alloc_buffer((rows * pitch,), str(load.ty.dtype), scope="shared")
            for load, pitch in zip(tiles.reads.values(), pitches, strict=True)
        ]
        origin = position_of(block, grid)
        # An empty grid still launches one block.
        is_tile = [] if isinstance(count, int) and count > 0 else [block < int64(count)]
        first = {across.var: origin[across.var] * columns, last.var: origin[last.var] * rows}
        row_vectors = columns // tiles.read_lanes
        loads: list[tuple[Expr, Expr, Expr, list[tirx.Buffer]]] = []
        for i in range(max(rows * row_vectors // threads, 1)):
            unit = i * threads + thread
            row = tirx.floordiv(unit, int64(row_vectors))
            column = tirx.floormod(unit, int64(row_vectors)) * tiles.read_lanes
            position = {**origin, across.var: first[across.var] + column, last.var: first[last.var] + row}
            is_inside = tirx.all(*is_tile, _inside(tiles, position, row, rows))
            loaded = [register(str(shared.dtype), tiles.read_lanes) for shared in buffers]
            with T.If(is_inside), T.Then():
                for load, registers in zip(tiles.reads.values(), loaded, strict=True):
                    _load_lanes(load, registers, position, tiles.read_lanes)
            loads.append((is_inside, row, column, loaded))
        for is_inside, row, column, loaded in loads:  # after the last load, so that all are in flight together
            with T.If(is_inside), T.Then():
                for registers, shared, pitch in zip(loaded, buffers, pitches, strict=True):
                    for lane in range(tiles.read_lanes):
                        value = tirx.BufferLoad(registers, [int64(lane)])
                        T.buffer_store(shared, value, [row * pitch + column + lane])
        sync()
        column_vectors = rows // tiles.lanes
        with T.unroll(int64(max(columns * column_vectors // threads, 1))) as i:
            unit = i * threads + thread
            column = tirx.floordiv(unit, int64(column_vectors))
            row = tirx.floormod(unit, int64(column_vectors)) * tiles.lanes
            position = {**origin, across.var: first[across.var] + column, last.var: first[last.var] + row}
            with T.If(tirx.all(*is_tile, _inside(tiles, position, column, columns))), T.Then():
                inputs = dict(read_vectors(lane_box, position, lane_box.box.nest.expressions()))
                for stand_in, shared, pitch in zip(tiles.reads, buffers, pitches, strict=True):
                    inputs[stand_in] = register(str(shared.dtype), tiles.lanes)
                    for lane in range(tiles.lanes):
                        value = tirx.BufferLoad(shared, [(row + lane) * pitch + column])
                        T.buffer_store(inputs[stand_in], value, [int64(lane)])
                _store_points(lane_box, position, inputs)


def _tile_extent(count: Expr) -> int:
    extent = _MAX_TILE_EXTENT
    while extent > _MIN_TILE_EXTENT and extent // 2 >= count:
        extent //= 2
    return extent


def _inside(tiles: Tiles, position: Mapping[tirx.Var, Expr], unit: Expr, units: int) -> Expr:
    """Return whether a position is in the box, and its unit in the tile."""
    return tirx.all(
        position[tiles.across.var] < int64(tiles.across.count),
        position[tiles.last.var] < int64(tiles.last.count),
        unit < int64(units),
    )


def _load_lanes(load: Load, registers: tirx.Buffer, position: Mapping[tirx.Var, Expr], lanes: int) -> None:
    """Load elements into registers."""
    offset = replaced(load.indices[0], position)
    if lanes == 1:
        T.buffer_store(registers, tirx.BufferLoad(load.source, [offset]), [int64(0)])
    else:
        copy_words(registers, int64(0), load.source, offset, lanes)


def _store_points(box: LaneBox, position: dict[tirx.Var, Expr], inputs: dict[tirx.Buffer, tirx.Buffer]) -> None:
    own = lane_position(box, position)
    store_lanes(box, own, compute_steps(box.box, box.lanes, own, inputs))


# Long reductions with few results take two launches (split-k): partial results by many blocks, then their reduction.
#
# Before::
#
#     sum[0] = reduce i in 67108864: x[i]
#
# After::
#
#     part[s] = reduce i in 131072: x[s * 131072 + i]      # for s in 512
#     sum[0] = reduce s in 512: part[s]

_TARGET_BLOCKS_PER_SM = 4  # target blocks per multiprocessor of a reduction
_MIN_SPLIT_TERMS = 2048  # minimum terms of a split: fewer do not pay for a second launch
_MIN_SPLITS = 8  # minimum number of splits; reductions with fewer take one launch


@dataclass(frozen=True)
class SplitReduction:
    """A reduction in two launches."""

    first: FlatBox
    second: FlatBox
    partials: tuple[tirx.Buffer, ...]  # partial results, which the first launch stores and the second one reduces


def split_reduction_of(box: FlatBox, gpu: GpuTarget) -> SplitReduction | None:
    """Split a reduction into two launches; None if one launch has enough blocks."""
    merge = merge_of(box.nest.sums)
    results, terms = count_of(box.spatial), count_of(box.reduced)
    if merge is None or not isinstance(results, int) or not isinstance(terms, int) or results == 0:
        return None
    target_blocks = gpu.multiprocessors * _TARGET_BLOCKS_PER_SM
    # Like `reduction.plan_of`: a block per result, or per 32 vectors of neighbouring results.
    blocks = results if terms >= _MIN_SPLIT_TERMS else 0
    limit = terms // _MIN_SPLIT_TERMS
    if blocks == 0 or blocks * 4 > target_blocks or limit < _MIN_SPLITS:
        return None
    limit = min(limit, -(-target_blocks // blocks))
    return _split_reduction(box, merge, *(_equal_splits(box.reduced, limit) or _unequal_splits(box.reduced, limit)))


def _equal_splits(loops: tuple[Loop, ...], max_splits: int) -> tuple[Loop, int] | None:
    """The loop to split, and the number of equal splits; None if there are none."""
    best: tuple[int, Loop] | None = None
    for loop in loops:
        for splits in range(min(max_splits, loop.count), 3, -1):
            length = loop.count // splits
            if loop.count % splits == 0 and (loop is not loops[-1] or length % 4 == 0 or loop.count % 4):
                if best is None or splits > best[0]:
                    best = splits, loop
                break
    return (best[1], best[0]) if best is not None else None


def _unequal_splits(loops: tuple[Loop, ...], max_splits: int) -> tuple[Loop, int]:
    """The longest loop, and its number of splits, of which the last is shorter."""
    loop = max(loops, key=lambda each: each.count)
    size = -(-loop.count // min(max_splits, loop.count))
    return loop, -(-loop.count // size)


def _split_reduction(box: FlatBox, merge: Merge, cut: Loop, splits: int) -> SplitReduction:
    size = prod([loop.count for loop in box.spatial])
    split, inner = tirx.Var("split", "int64"), tirx.Var(cut.var.name, "int64")
    partials = [tirx.decl_buffer((splits * size,), dtype, f"part{i}") for i, dtype in enumerate(merge.types)]
    totals = [tirx.decl_buffer((size,), dtype, f"total{i}") for i, dtype in enumerate(merge.types)]
    offset: Expr = int64(0)
    for loop in box.spatial:
        offset = offset * loop.count + loop.var
    offset_in_partials = split * size + offset
    length = -(-cut.count // splits)
    index = split * length + inner
    terms = [replaced(term, {cut.var: index}) for term in merge.terms]
    if cut.count % splits:
        terms = [
            tirx.if_then_else(index < cut.count, term, start) for term, start in zip(terms, merge.starts, strict=True)
        ]
    reduced = tuple(Loop(inner, 0, length) if loop is cut else loop for loop in box.reduced)
    first = FlatBox(
        Nest((), (), sums=_sums(merge, partials, offset_in_partials, terms, list(merge.starts)), stored=list(partials)),
        (Loop(split, 0, splits), *box.spatial),
        reduced,
        {partial: offset_in_partials for partial in partials},
    )
    partial_values = [tirx.BufferLoad(partial, [offset_in_partials]) for partial in partials]
    initial = [start if final is None else final for start, final in zip(merge.starts, merge.finals, strict=True)]
    steps = [
        (s.buffer, tirx.Cast(str(s.buffer.dtype), load) if str(s.buffer.dtype) != str(load.ty.dtype) else load)
        for s, load in zip(merge.sums, [tirx.BufferLoad(total, [offset]) for total in totals], strict=True)
    ]
    second = FlatBox(
        Nest(
            (),
            (),
            sums=_sums(merge, totals, offset, partial_values, initial),
            steps=[*steps, *box.nest.steps],
            stored=list(box.nest.stored),
        ),
        box.spatial,
        (Loop(split, 0, splits),),
        box.places,
    )
    return SplitReduction(first, second, tuple(partials))


def _sums(merge: Merge, buffers: list[tirx.Buffer], offset: Expr, terms: list[Expr], initial: list[Expr]) -> list[Sum]:
    totals = [tirx.BufferLoad(buffer, [offset]) for buffer in buffers]
    return [
        Sum(buffer, start, value)
        for buffer, start, value in zip(buffers, initial, merge.join(totals, terms), strict=True)
    ]


# Maps: boxes without a reduction, a few elements per thread.

_STRIDED_LANES = 4  # strided elements of a thread, whose loads are in flight together
# A thread has several strided elements only of boxes with many elements, and expressions of few nodes.
_MIN_STRIDED_ELEMENTS, _MAX_STRIDED_NODES = 1 << 18, 200


def write_map(box: FlatBox, gpu: GpuTarget) -> None:
    """Write a box without reductions as one launch."""
    if not box.spatial:
        with launch(1, 32) as (_, thread), T.If(tirx.EQ(thread, int64(0))), T.Then():
            _compute_points(LaneBox(box, None, 1), {})
        return
    tiles = tiles_of(box)
    if tiles is not None:
        write_tiles(tiles)
        return
    lanes = _lanes(box)
    if lanes > 1:
        _write_vectors(box, lanes, gpu)
    else:
        _write_strided(box, gpu)


def _lanes(box: FlatBox) -> int:
    """Lanes of vectors along the last loop, 1 if no access is contiguous."""
    last = box.spatial[-1]
    lanes = max_lanes(element_types(box, last.var))
    if len(box.spatial) > 1 or not isinstance(last.count, int):
        while lanes > 1 and not (isinstance(last.count, int) and last.count % lanes == 0):
            if len(box.spatial) == 1:
                break
            lanes //= 2
    while lanes > 1:
        lane_box = vectorized(box, last, lanes, True)
        if lane_box.reads or lane_box.stores:
            return lanes
        lanes //= 2
    return 1


def _write_vectors(box: FlatBox, lanes: int, gpu: GpuTarget) -> None:
    """Write a map with a vector per thread; the tail of a single loop belongs to the last thread."""
    *outer, last = box.spatial
    lane_box = vectorized(box, last, lanes, True)
    counts = [*(loop.count for loop in outer), ceil_div(last.count, lanes)]
    units = count_of(outer) * counts[-1]
    threads = threads_for(units, gpu)
    is_whole = isinstance(last.count, int) and last.count % lanes == 0
    with launch(ceil_div(units, threads), threads) as (block, thread):
        number = block * threads + thread
        with inside(number, units, threads):
            position = position_of(number, box.spatial, counts)
            start = position[last.var] * lanes
            position = {**position, last.var: start}
            if is_whole:
                _compute_points(lane_box, position)
                return
            with T.If(start + lanes <= int64(last.count)):
                with T.Then():
                    _compute_points(lane_box, position)
                with T.Else(), T.serial(int64(last.count) - start) as i:
                    _compute_points(LaneBox(box, last.var, 1), {**position, last.var: start + i})


def _write_strided(box: FlatBox, gpu: GpuTarget) -> None:
    """Write a map whose threads have elements a block apart, as in a grid-stride loop."""
    units = count_of(box.spatial)
    is_long = sum(node_count(value) for value in box.nest.expressions()) > _MAX_STRIDED_NODES
    lanes = 1 if is_long or not isinstance(units, int) or units < _MIN_STRIDED_ELEMENTS else _STRIDED_LANES
    threads = threads_for(units, gpu)
    with launch(ceil_div(units, threads * lanes), threads) as (block, thread):
        first = block * (threads * lanes) + thread
        if lanes == 1:
            with inside(first, units, threads):
                _compute_points(LaneBox(box, None, 1), position_of(first, box.spatial))
            return
        number = first + LANE * threads
        is_whole = units % (threads * lanes) == 0
        clamped = number if is_whole else T.min(number, int64(units - 1))
        tile = LaneBox(box, None, lanes)
        position = position_of(clamped, box.spatial)
        results = compute_steps(box, lanes, position, {})
        store_lanes(tile, position, results, None if is_whole else lambda lane: first + lane * threads < int64(units))


def _compute_points(box: LaneBox, position: dict[tirx.Var, Expr]) -> None:
    _store_points(box, position, read_vectors(box, position, box.box.nest.expressions()))


Buffers = dict[tirx.Buffer, tirx.Buffer]


def write_function(func: tirx.PrimFunc, nests: Sequence[Nest], gpu: GpuTarget) -> tirx.PrimFunc:
    """Write nests in order as a PrimFunc with the parameters and attributes of `func`."""
    buffers: Buffers = {p: p for p in func.params}
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("scheduled")
        with T.sblock("root"):
            T.reads()
            T.writes()
            for buffer in [buffer for nest in nests for buffer in nest.stored]:
                if buffer not in buffers:
                    buffers[buffer] = T.alloc_buffer(list(buffer.shape), buffer.dtype, scope="global")
            views = {buffer: _elements(memory_of) for buffer, memory_of in buffers.items()}
            memory = {views[buffer]: memory_of for buffer, memory_of in buffers.items()}
            for nest in nests:
                memory |= _write_nest(split_axes(nest), gpu, views)
    return func.with_body(with_views(builder.get().body, memory)).with_attr("tirx.is_scheduled", True)


def _count(buffer: tirx.Buffer) -> list[tirx.Expr]:
    return [prod(buffer.shape, start=tirx.IntImm("int64", 1))]


def _elements(buffer: tirx.Buffer) -> tirx.Buffer:
    return tirx.decl_buffer(_count(buffer), buffer.dtype, f"{buffer.name}_elements", layout=None)


def _write_nest(nest: Nest, gpu: GpuTarget, outer_views: Buffers) -> Buffers:
    """Write a nest; return the buffers between its launches by the views of their elements."""
    views = dict(outer_views)

    def view(buffer: tirx.Buffer) -> tirx.Buffer:
        return views.setdefault(buffer, _elements(buffer))

    box = flatten(Box(nest, tuple((0, axis.extent) for axis in nest.axes)), None, view)
    if not nest.sums:
        write_map(box, gpu)
        return {}
    split = split_reduction_of(box, gpu)
    if split is None:
        write_reduction(box, gpu)
        return {}
    partials = {p: T.alloc_buffer(list(p.shape), p.dtype, scope="global") for p in split.partials}
    write_reduction(split.first, gpu)
    write_reduction(split.second, gpu)
    return partials


def with_views(body: tirx.Stmt, views: Mapping[tirx.Buffer, tirx.Buffer]) -> tirx.Stmt:
    """Declare the views that each launch uses inside it: outside they would be host code."""

    def declare(loop: tirx.For) -> tirx.For:
        if loop.thread_binding is None or str(loop.thread_binding.thread_tag) != "threadIdx.x":
            return loop
        used: dict[tirx.Buffer, None] = {}
        structural_walk(loop.body, (tvm.ir.Var, lambda var: used.setdefault(var) if var in views else None))
        declared = [tirx.DeclBuffer(view, data=views[view].data) for view in used]
        inner = tirx.SeqStmt([*declared, loop.body]) if declared else loop.body
        return tirx.For(
            loop.loop_var, loop.min, loop.extent, loop.kind, inner, loop.thread_binding, loop.annotations, loop.step
        )

    return structural_map(body, (tirx.For, declare))
