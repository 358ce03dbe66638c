"""Maps: boxes in which nothing is reduced, a few elements a thread."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....target.gpu_target import GpuTarget
from ...core.builder import Expr, ceil_div, int64
from ...loops.flat import FlatBox
from ...loops.stages import node_count
from .lanes import LANE, LaneBox, compute_steps, element_types, read_vectors, store_lanes, vectorized, widest
from .launch import count_of, inside, launch, place_in, threads_for
from .transpose import tiles_of, write_tiles

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
