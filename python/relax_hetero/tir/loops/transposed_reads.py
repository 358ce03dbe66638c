"""Maps that read across the direction they write in: square tiles, transposed in registers.

Before, every element of a column is a read of its own::

    for q, v: y[q, v] = x[v, q]

After, a tile is read by rows, goes through a network of shuffles, and is written by rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..core.builder import Expr, ceil_div, int64, lane_indices, opaque
from ..pack.tile_transpose import riffle
from .flat import FlatBox, Loop, stride
from .loop_code import nested, spread
from .stages import Load, replaced, with_loads
from .vector_code import slot, write_point

# Tiles are no larger: sixteen vectors and their successors are what registers hold.
_LARGEST = 16


@dataclass(frozen=True)
class TransposedReads:
    """A box whose reads, some of them, lie along another loop.

    Attributes
    ----------
    box : FlatBox
        It reads the first element of a buffer of `reads` instead.
    across : Var
        The loop that these reads lie along.
    reads : dict of Buffer to TensorLoad
    size : int
        Elements of a tile's side.
    """

    box: FlatBox
    across: tirx.Var
    reads: dict[tirx.Buffer, Load]
    size: int


def transposed_reads(box: FlatBox, lanes: int, tasks: int) -> TransposedReads | None:
    """How to tile a box, None where nothing in it reads across."""
    *outer, last = box.spatial
    if not outer or not isinstance(last.count, int):
        return None
    across: Loop | None = None
    reads: dict[tirx.Buffer, Load] = {}

    def change(load: Load) -> Load:
        nonlocal across
        step = stride(load.indices[0], last.var)
        if load.source in box.nest.made or not isinstance(step, int) or abs(step) <= 4 or load.ty.dtype == "bool":
            return load
        steps = [(loop, stride(load.indices[0], loop.var)) for loop in outer]
        found = [loop for loop, along in steps if isinstance(along, int) and along == 1]
        if not found or (across is not None and found[-1] is not across):
            return load
        across = found[-1]
        stand_in = tirx.decl_buffer((1,), str(load.ty.dtype))
        reads[stand_in] = load
        return tirx.BufferLoad(stand_in, [int64(0)])

    steps = [(buffer, with_loads(value, change)) for buffer, value in box.nest.steps]
    if across is None or not isinstance(across.count, int) or box.nest.in_place:
        return None
    size = min(lanes, _LARGEST)
    while size > last.count or size > across.count // tasks:
        size //= 2
    if size < 4:
        return None
    return TransposedReads(replace(box, nest=replace(box.nest, steps=steps)), across.var, reads, size)


def write_transposed(tiles: TransposedReads, tasks: int) -> None:
    """Write the loops of a box by tiles."""

    def write(part: FlatBox) -> None:
        across = next(loop for loop in part.spatial if loop.var.same_as(tiles.across))
        others = [loop for loop in part.spatial[:-1] if loop is not across]
        with nested(others) as position:
            with T.serial(int64(ceil_div(across.count, tiles.size))) as i:
                first = _start(across, i, tiles.size)
                with T.serial(int64(ceil_div(part.spatial[-1].count, tiles.size))) as j:
                    _tile(tiles, part, position, first, _start(part.spatial[-1], j, tiles.size))

    spread(tiles.box, tasks, tiles.size, write)


def _start(loop: Loop, number: Expr, size: int) -> Expr:
    """Where a tile starts: the last one ends with the loop, and does again what it shares with the one before."""
    if isinstance(loop.count, int) and loop.count % size == 0:
        return number * size + loop.begin
    return opaque(T.min(number * size + loop.begin, int64(loop.end) - size))


def _tile(tiles: TransposedReads, part: FlatBox, position: dict[tirx.Var, Expr], first: Expr, start: Expr) -> None:
    last, size = part.spatial[-1].var, tiles.size
    columns: dict[tirx.Buffer, list[tirx.Buffer]] = {}
    for stand_in, load in tiles.reads.items():
        rows = []
        for i in range(size):
            here = {**position, tiles.across: first, last: start + i}
            rows.append(tirx.BufferLoad(load.source, [lane_indices(replaced(load.indices[0], here), size)]))
        columns[stand_in] = []
        for column in riffle(rows, size):
            columns[stand_in].append(slot(stand_in.dtype, size))
            T.buffer_store(columns[stand_in][-1], column, [lane_indices(int64(0), size)])
    for i in range(size):
        row = part.at({**position, tiles.across: first + i})
        write_point(row, last, start, size, {stand_in: held[i] for stand_in, held in columns.items()})
