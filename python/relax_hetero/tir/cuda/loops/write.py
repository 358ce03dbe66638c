"""Nests become launches, one after another."""

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
from ...loops.boxes import Box, split_axes
from ...loops.flat import FlatBox, Loop, flatten, is_step, stride
from ...loops.nests import Nest, Sum
from ...loops.stages import Load, node_count, replaced, with_loads
from .lanes import (
    LANE,
    WORD,
    Guards,
    LaneBox,
    compute_steps,
    copy_words,
    element_types,
    is_vector,
    load_key,
    read_vectors,
    register,
    store_lanes,
    vectorized,
    widest,
)
from .launch import count_of, inside, launch, place_in, sync, threads_for
from .merging import Merge, merge_of
from .reduction import write_reduction

# Maps that read across the direction of writing: tiles go through shared memory, which is read along either side.
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
# A tile's rows are a word longer than what they hold, so that threads that read a column use different banks.

_SIDE = 64
"""Elements of a tile's side, at most."""

_LEAST = 8
"""Loops that are shorter are read across their direction: the lines of the cache hold what neighbours need."""

_THREADS = 256
_MAX_SHARED = 48 << 10


@dataclass(frozen=True)
class Tiles:
    """A box whose reads, some of them, lie along another loop than what is written.

    Attributes
    ----------
    box : FlatBox
        It reads stand-ins, at `LANE`.
    across : Loop
        The loop that these reads lie along.
    reads : dict
        From stand-in to the read.
    read_lanes, lanes : int
        Elements that a thread brings, and leaves, at once.
    """

    box: FlatBox
    across: Loop
    reads: dict[tirx.Buffer, Load]
    read_lanes: int
    lanes: int

    @property
    def last(self) -> Loop:
        """The loop that is written along."""
        return self.box.spatial[-1]


def tiles_of(box: FlatBox) -> Tiles | None:
    """How to tile a box; None where nothing in it reads across."""
    *outer, last = box.spatial
    if not outer or not isinstance(last.count, int) or last.count < _LEAST or box.nest.in_place:
        return None
    guards = Guards(box.nest.computed)
    for value in box.nest.expressions():
        guards.visit(value, ())
    across: list[Loop] = []
    reads: dict[tirx.Buffer, Load] = {}
    known: dict[object, tirx.Buffer] = {}

    def change(load: Load) -> Expr:
        key = load_key(load)
        if guards.of.get(key) != () or str(load.ty.dtype) == "bool":
            return load
        step = stride(load.indices[0], last.var)
        if not isinstance(step, int) or abs(step) < _LEAST:
            return load
        found = [loop for loop in outer if is_step(stride(load.indices[0], loop.var), 1)]
        if not found or (across and found[-1] is not across[0]):
            return load
        if key not in known:
            across.append(found[-1])
            known[key] = tirx.decl_buffer((1,), str(load.ty.dtype), scope="local")
            reads[known[key]] = load
        return tirx.BufferLoad(known[key], [LANE])

    steps = [(buffer, with_loads(value, change)) for buffer, value in box.nest.steps]
    if not reads or not isinstance(across[0].count, int) or across[0].count < _LEAST:
        return None
    sizes = [bytes_of(str(load.ty.dtype)) for load in reads.values()]
    if sum(_SIDE * (_SIDE * size + WORD) for size in sizes) > _MAX_SHARED:
        return None
    wanted = max(2, min(8, 16 // max(sizes)))
    tiled = replace(box, nest=replace(box.nest, steps=steps))
    stored = [(place, buffer) for buffer, place in box.places.items()]
    into = [(load.indices[0], load.source) for load in reads.values()]
    read_lanes = wanted if _all_vectors(into, across[0], wanted) else 1
    lanes = wanted if _all_vectors(stored, last, wanted) else 1
    return Tiles(tiled, across[0], reads, read_lanes, lanes)


def _all_vectors(accesses: list[tuple[Expr, tirx.Buffer]], loop: Loop, lanes: int) -> bool:
    units = {loop.var: tirx.Var(loop.var.name, "int64") * lanes}
    fits = isinstance(loop.count, int) and loop.count % lanes == 0
    return fits and all(is_vector(offset, buffer, loop.var, units, lanes) for offset, buffer in accesses)


def write_tiles(tiles: Tiles) -> None:
    """Write a box as one launch, a block a tile."""
    across, last = tiles.across, tiles.last
    rows, columns = _side(last.count), _side(across.count)
    outer = [loop for loop in tiles.box.spatial if loop is not across and loop is not last]
    grid = [*outer, Loop(across.var, 0, ceil_div(across.count, columns)), Loop(last.var, 0, ceil_div(last.count, rows))]
    made = vectorized(tiles.box, last, tiles.lanes, True)
    threads = min(_THREADS, max(32, rows * columns // 16))
    count = count_of(grid)
    with launch(count, threads) as (block, thread):
        pitches = [columns + max(WORD // bytes_of(str(load.ty.dtype)), 1) for load in tiles.reads.values()]
        memory = [
            T.alloc_buffer((rows * pitch,), str(load.ty.dtype), scope="shared")
            for load, pitch in zip(tiles.reads.values(), pitches, strict=True)
        ]
        place = place_in(block, grid)
        # A block is launched even where there is no tile.
        is_tile = [] if isinstance(count, int) and count > 0 else [block < int64(count)]
        first = {across.var: place[across.var] * columns, last.var: place[last.var] * rows}
        wide = columns // tiles.read_lanes
        brought: list[tuple[Expr, Expr, Expr, list[tirx.Buffer]]] = []
        for i in range(max(rows * wide // threads, 1)):
            unit = i * threads + thread
            row, column = tirx.floordiv(unit, int64(wide)), tirx.floormod(unit, int64(wide)) * tiles.read_lanes
            position = {**place, across.var: first[across.var] + column, last.var: first[last.var] + row}
            is_inside = tirx.all(*is_tile, _inside(tiles, position, row, rows))
            held = [register(str(shared.dtype), tiles.read_lanes) for shared in memory]
            with T.If(is_inside), T.Then():
                for load, registers in zip(tiles.reads.values(), held, strict=True):
                    _bring(load, registers, position, tiles.read_lanes)
            brought.append((is_inside, row, column, held))
        for is_inside, row, column, held in brought:  # behind the last read: all are under way at once
            with T.If(is_inside), T.Then():
                for registers, shared, pitch in zip(held, memory, pitches, strict=True):
                    for lane in range(tiles.read_lanes):
                        value = tirx.BufferLoad(registers, [int64(lane)])
                        T.buffer_store(shared, value, [row * pitch + column + lane])
        sync()
        long = rows // tiles.lanes
        with T.unroll(int64(max(columns * long // threads, 1))) as i:
            unit = i * threads + thread
            column, row = tirx.floordiv(unit, int64(long)), tirx.floormod(unit, int64(long)) * tiles.lanes
            position = {**place, across.var: first[across.var] + column, last.var: first[last.var] + row}
            with T.If(tirx.all(*is_tile, _inside(tiles, position, column, columns))), T.Then():
                found = dict(read_vectors(made, position, made.box.nest.expressions()))
                for stand_in, shared, pitch in zip(tiles.reads, memory, pitches, strict=True):
                    found[stand_in] = register(str(shared.dtype), tiles.lanes)
                    for lane in range(tiles.lanes):
                        value = tirx.BufferLoad(shared, [(row + lane) * pitch + column])
                        T.buffer_store(found[stand_in], value, [int64(lane)])
                _leave(made, position, found)


def _side(count: Expr) -> int:
    side = _SIDE
    while side > _LEAST and side // 2 >= count:
        side //= 2
    return side


def _inside(tiles: Tiles, position: Mapping[tirx.Var, Expr], unit: Expr, units: int) -> Expr:
    """Return whether a position is one of the box, and its unit one of the tile."""
    return tirx.all(
        position[tiles.across.var] < int64(tiles.across.count),
        position[tiles.last.var] < int64(tiles.last.count),
        unit < int64(units),
    )


def _bring(load: Load, registers: tirx.Buffer, position: Mapping[tirx.Var, Expr], lanes: int) -> None:
    """Elements from memory to registers."""
    offset = replaced(load.indices[0], position)
    if lanes == 1:
        T.buffer_store(registers, tirx.BufferLoad(load.source, [offset]), [int64(0)])
    else:
        copy_words(registers, int64(0), load.source, offset, lanes)


def _leave(box: LaneBox, position: dict[tirx.Var, Expr], held: dict[tirx.Buffer, tirx.Buffer]) -> None:
    own = position if box.lanes == 1 or box.var is None else {**position, box.var: position[box.var] + LANE}
    store_lanes(box, own, compute_steps(box.box, box.lanes, own, held))


# Long reductions with few results in two launches: many blocks compute parts of each result, then a block joins them.
#
# Before::
#
#     sum[0] = reduce i in 67108864: x[i]
#
# After::
#
#     part[s] = reduce i in 131072: x[s * 131072 + i]      # for s in 512
#     sum[0] = reduce s in 512: part[s]

_BLOCKS = 4
"""Blocks for each multiprocessor that a reduction should have."""

_MIN_TERMS = 2048
"""Minimum number of terms of a part: fewer are not worth a launch more."""

_FEW_PARTS = 8
"""Fewer parts are left to one launch."""


@dataclass(frozen=True)
class Halves:
    """A reduction in two launches.

    Attributes
    ----------
    parts : tuple of Buffer
        Partial results, which the first stores and the second reads.
    """

    first: FlatBox
    second: FlatBox
    parts: tuple[tirx.Buffer, ...]


def halves_of(box: FlatBox, gpu: GpuTarget) -> Halves | None:
    """The two halves of a reduction; None where one launch has blocks enough."""
    merge = merge_of(box.nest.sums)
    results, terms = count_of(box.spatial), count_of(box.reduced)
    if merge is None or not isinstance(results, int) or not isinstance(terms, int) or results == 0:
        return None
    wanted = gpu.multiprocessors * _BLOCKS
    # As `reduction.plan_of` has it, a block for each result, or for 32 vectors of neighbouring ones.
    blocks = results if terms >= _MIN_TERMS else 0
    most = terms // _MIN_TERMS
    if blocks == 0 or blocks * 4 > wanted or most < _FEW_PARTS:
        return None
    most = min(most, -(-wanted // blocks))
    return _halves(box, merge, *(_divisor(box.reduced, most) or _longest(box.reduced, most)))


def _divisor(loops: tuple[Loop, ...], most: int) -> tuple[Loop, int] | None:
    """The loop to cut, and into how many equal parts."""
    best: tuple[int, Loop] | None = None
    for loop in loops:
        for parts in range(min(most, loop.count), 3, -1):
            rest = loop.count // parts
            if loop.count % parts == 0 and (loop is not loops[-1] or rest % 4 == 0 or loop.count % 4):
                if best is None or parts > best[0]:
                    best = parts, loop
                break
    return (best[1], best[0]) if best is not None else None


def _longest(loops: tuple[Loop, ...], most: int) -> tuple[Loop, int]:
    """The loop to cut where none has equal parts, and into how many parts, of which the last is shorter."""
    loop = max(loops, key=lambda each: each.count)
    size = -(-loop.count // min(most, loop.count))
    return loop, -(-loop.count // size)


def _halves(box: FlatBox, merge: Merge, cut: Loop, splits: int) -> Halves:
    size = prod([loop.count for loop in box.spatial])
    split, rest = tirx.Var("split", "int64"), tirx.Var(cut.var.name, "int64")
    parts = [tirx.decl_buffer((splits * size,), dtype, f"part{i}") for i, dtype in enumerate(merge.types)]
    totals = [tirx.decl_buffer((size,), dtype, f"total{i}") for i, dtype in enumerate(merge.types)]
    place: Expr = int64(0)
    for loop in box.spatial:
        place = place * loop.count + loop.var
    here = split * size + place
    length = -(-cut.count // splits)
    number = split * length + rest
    terms = [replaced(term, {cut.var: number}) for term in merge.terms]
    if cut.count % splits:
        terms = [
            tirx.if_then_else(number < cut.count, term, start) for term, start in zip(terms, merge.starts, strict=True)
        ]
    reduced = tuple(Loop(rest, 0, length) if loop is cut else loop for loop in box.reduced)
    first = FlatBox(
        Nest((), (), sums=_sums(merge, parts, here, terms, list(merge.starts)), stored=list(parts)),
        (Loop(split, 0, splits), *box.spatial),
        reduced,
        {part: here for part in parts},
    )
    found = [tirx.BufferLoad(part, [here]) for part in parts]
    initial = [start if final is None else final for start, final in zip(merge.starts, merge.finals, strict=True)]
    steps = [
        (s.buffer, tirx.Cast(str(s.buffer.dtype), load) if str(s.buffer.dtype) != str(load.ty.dtype) else load)
        for s, load in zip(merge.sums, [tirx.BufferLoad(total, [place]) for total in totals], strict=True)
    ]
    second = FlatBox(
        Nest(
            (),
            (),
            sums=_sums(merge, totals, place, found, initial),
            steps=[*steps, *box.nest.steps],
            stored=list(box.nest.stored),
        ),
        box.spatial,
        (Loop(split, 0, splits),),
        box.places,
    )
    return Halves(first, second, tuple(parts))


def _sums(merge: Merge, buffers: list[tirx.Buffer], place: Expr, terms: list[Expr], initial: list[Expr]) -> list[Sum]:
    own = [tirx.BufferLoad(buffer, [place]) for buffer in buffers]
    return [
        Sum(buffer, start, value) for buffer, start, value in zip(buffers, initial, merge.join(own, terms), strict=True)
    ]


# Maps: boxes in which nothing is reduced, a few elements a thread.

# Elements that a thread computes where they are no vectors: as many reads are on their way at once.
_STRIDED = 4
# Where there are fewer elements, or they take long, every one has a thread of its own.
_MANY, _SHORT = 1 << 18, 200


def write_map(box: FlatBox, gpu: GpuTarget) -> None:
    """Write a box as one launch."""
    if not box.spatial:
        with launch(1, 32) as (_, thread), T.If(tirx.EQ(thread, int64(0))), T.Then():
            _points(LaneBox(box, None, 1), {})
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
    """Lanes of vectors along the last loop, 1 where nothing is contiguous there."""
    last = box.spatial[-1]
    lanes = widest(element_types(box))
    if len(box.spatial) > 1 or not isinstance(last.count, int):
        while lanes > 1 and not (isinstance(last.count, int) and last.count % lanes == 0):
            if len(box.spatial) == 1:
                break
            lanes //= 2
    while lanes > 1:
        made = vectorized(box, last, lanes, True)
        if made.reads or made.stores:
            return lanes
        lanes //= 2
    return 1


def _write_vectors(box: FlatBox, lanes: int, gpu: GpuTarget) -> None:
    """A vector a thread; of a single loop, the last thread has what is left."""
    *outer, last = box.spatial
    made = vectorized(box, last, lanes, True)
    counts = [*(loop.count for loop in outer), ceil_div(last.count, lanes)]
    units = count_of(outer) * counts[-1]
    threads = threads_for(units, gpu)
    is_whole = isinstance(last.count, int) and last.count % lanes == 0
    with launch(ceil_div(units, threads), threads) as (block, thread):
        number = block * threads + thread
        with inside(number, units, threads):
            position = place_in(number, box.spatial, counts)
            start = position[last.var] * lanes
            position = {**position, last.var: start}
            if is_whole:
                _points(made, position)
                return
            with T.If(start + lanes <= int64(last.count)):
                with T.Then():
                    _points(made, position)
                with T.Else(), T.serial(int64(last.count) - start) as i:
                    _points(LaneBox(box, last.var, 1), {**position, last.var: start + i})


def _write_strided(box: FlatBox, gpu: GpuTarget) -> None:
    """Elements that lie a block apart."""
    units = count_of(box.spatial)
    is_long = sum(node_count(value) for value in box.nest.expressions()) > _SHORT
    lanes = 1 if is_long or not isinstance(units, int) or units < _MANY else _STRIDED
    threads = threads_for(units, gpu)
    with launch(ceil_div(units, threads * lanes), threads) as (block, thread):
        first = block * (threads * lanes) + thread
        if lanes == 1:
            with inside(first, units, threads):
                _points(LaneBox(box, None, 1), place_in(first, box.spatial))
            return
        number = first + LANE * threads
        is_whole = units % (threads * lanes) == 0
        at = number if is_whole else T.min(number, int64(units - 1))
        made = LaneBox(box, None, lanes)
        position = place_in(at, box.spatial)
        results = compute_steps(box, lanes, position, {})
        store_lanes(made, position, results, None if is_whole else lambda lane: first + lane * threads < int64(units))


def _points(box: LaneBox, position: dict[tirx.Var, Expr]) -> None:
    held = read_vectors(box, position, box.box.nest.expressions())
    own = position if box.lanes == 1 or box.var is None else {**position, box.var: position[box.var] + LANE}
    results = compute_steps(box.box, box.lanes, own, held)
    store_lanes(box, own, results)


Buffers = dict[tirx.Buffer, tirx.Buffer]


def write_function(func: tirx.PrimFunc, nests: Sequence[Nest], gpu: GpuTarget) -> tirx.PrimFunc:
    """A PrimFunc that computes nests in order, with the parameters and attributes of `func`."""
    own: Buffers = {p: p for p in func.params}
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("scheduled")
        with T.sblock("root"):
            T.reads()
            T.writes()
            for buffer in [buffer for nest in nests for buffer in nest.stored]:
                if buffer not in own:
                    own[buffer] = T.alloc_buffer(list(buffer.shape), buffer.dtype, scope="global")
            views = {buffer: _elements(kept) for buffer, kept in own.items()}
            memory = {views[buffer]: kept for buffer, kept in own.items()}
            for nest in nests:
                memory |= _write_nest(split_axes(nest), gpu, views)
    body = with_views(builder.get().body, memory)
    return func.with_body(body).with_attr("tirx.is_scheduled", True)


def _count(buffer: tirx.Buffer) -> list[tirx.Expr]:
    return [prod(buffer.shape, start=tirx.IntImm("int64", 1))]


def _elements(buffer: tirx.Buffer) -> tirx.Buffer:
    return tirx.decl_buffer(_count(buffer), buffer.dtype, f"{buffer.name}_elements", layout=None)


def _write_nest(nest: Nest, gpu: GpuTarget, kept: Buffers) -> Buffers:
    """Write a nest, and return the memory between its launches by what stands for its elements there."""
    views = dict(kept)

    def view(buffer: tirx.Buffer) -> tirx.Buffer:
        return views.setdefault(buffer, _elements(buffer))

    box = flatten(Box(nest, tuple((0, axis.extent) for axis in nest.axes)), None, view)
    if not nest.sums:
        write_map(box, gpu)
        return {}
    halves = halves_of(box, gpu)
    if halves is None:
        write_reduction(box, gpu)
        return {}
    made = {part: T.alloc_buffer(list(part.shape), part.dtype, scope="global") for part in halves.parts}
    write_reduction(halves.first, gpu)
    write_reduction(halves.second, gpu)
    return made


def with_views(body: tirx.Stmt, views: Mapping[tirx.Buffer, tirx.Buffer]) -> tirx.Stmt:
    """`body` with the elements of parameters declared in every launch that touches them.

    Within the launch: what is around it would be code of the host.
    """

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
