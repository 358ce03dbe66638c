"""Maps that read across the direction of writing: tiles go through shared memory, which is read along either side.

Before::

    for i, j: y[i, j] = x[j, i]

After, for each tile, by all threads of a block::

    tile[j, i] = x[j0 + j, i0 + i]        # neighbouring threads along i
    barrier
    y[i0 + i, j0 + j] = tile[j, i]        # neighbouring threads along j

A tile's rows are a word longer than what they hold, so that threads that read a column use different banks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....target.element_types import bytes_of
from ...core.builder import Expr, ceil_div, int64
from ...loops.flat import FlatBox, Loop, is_step, stride
from ...loops.stages import Load, replaced, with_loads
from .lanes import (
    LANE,
    WORD,
    Guards,
    LaneBox,
    compute_steps,
    copy_words,
    is_vector,
    load_key,
    read_vectors,
    register,
    store_lanes,
    vectorized,
)
from .launch import count_of, launch, place_in, sync

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
    guards = Guards(box.nest.made)
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
