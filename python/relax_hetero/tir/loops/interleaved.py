"""Maps that take elements from a few places in turn, as a shuffle of channels does: read whole, merged in registers.

Before, every element is a read of its own::

    for a, b in 34, 4: y[a * 4 + b] = x[b * 34 + a]

After, 16 elements from each of the 4 places are read as vectors, and shuffles put them in turn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..core.builder import Expr, ceil_div, int64, lane_indices, opaque
from .flat import FlatBox, Loop, is_step, stride
from .loop_code import nested, spread
from .stages import Load, loads, replaced, variables, with_loads
from .vector_code import slot, write_point

# Shuffles of more vectors cost more than the reads that they save.
_MOST_PLACES = 8


@dataclass(frozen=True)
class Interleaved:
    """A box whose two innermost loops write one run.

    Attributes
    ----------
    box : FlatBox
        It reads the first element of a buffer of `reads` instead.
    reads : dict of Buffer to TensorLoad
        Neighbours along the outer of the two loops.
    lanes : int
    """

    box: FlatBox
    reads: dict[tirx.Buffer, Load]
    lanes: int


def interleaved(box: FlatBox, lanes: int, tasks: int) -> Interleaved | None:
    """How to merge a box's reads, None where it reads otherwise."""
    if len(box.spatial) < 2 or box.nest.in_place:
        return None
    outer, last = box.spatial[-2:]
    if not isinstance(last.count, int) or not isinstance(outer.count, int) or last.count > _MOST_PLACES:
        return None
    while lanes > outer.count // tasks:  # a task's part of this loop holds a whole vector
        lanes //= 2
    reads: dict[tirx.Buffer, Load] = {}

    def change(load: Load) -> Load:
        along, step = stride(load.indices[0], outer.var), stride(load.indices[0], last.var)
        if not is_step(along, 1) or step is None or load.ty.dtype == "bool":
            return load
        stand_in = tirx.decl_buffer((1,), str(load.ty.dtype))
        reads[stand_in] = load
        return tirx.BufferLoad(stand_in, [int64(0)])

    steps = [(buffer, with_loads(value, change)) for buffer, value in box.nest.steps]
    inside = {outer.var, last.var}
    offsets = list(box.places.values())
    for _, value in steps:
        offsets += [load.indices[0] for load in loads(value) if load.source not in box.nest.made]
        if variables(with_loads(value, lambda load: tirx.const(0, load.ty.dtype))) & inside:
            return None
    if lanes < 4 or not reads or not all(_is_run(offset, outer, last) for offset in offsets):
        return None
    return Interleaved(replace(box, nest=replace(box.nest, steps=steps)), reads, lanes)


def _is_run(offset: Expr, outer: Loop, last: Loop) -> bool:
    """Whether an offset advances alike through both loops, as if they were one."""
    wide, narrow = stride(offset, outer.var), stride(offset, last.var)
    return isinstance(wide, int) and isinstance(narrow, int) and wide == narrow * last.count


def write_interleaved(merge: Interleaved, tasks: int) -> None:
    """Write the loops of a box."""
    lanes = merge.lanes

    def write(part: FlatBox) -> None:
        outer, last = part.spatial[-2:]
        with nested(part.spatial[:-2]) as position, T.serial(int64(ceil_div(outer.count, lanes))) as i:
            first = i * lanes + outer.begin
            if not isinstance(outer.count, int) or outer.count % lanes:
                # The last run ends with the loop, and does again what it shares with the one before.
                first = opaque(T.min(first, int64(outer.end) - lanes))
            merged: list[dict[tirx.Buffer, tirx.Buffer]] = [{} for _ in range(last.count)]
            for stand_in, load in merge.reads.items():
                places = []
                for b in range(last.count):
                    here = replaced(load.indices[0], {**position, outer.var: first, last.var: int64(b)})
                    places.append(tirx.BufferLoad(load.source, [lane_indices(here, lanes)]))
                for n, held in enumerate(merged):
                    numbers = range(n * lanes, (n + 1) * lanes)
                    order = [number % last.count * lanes + number // last.count for number in numbers]
                    held[stand_in] = slot(stand_in.dtype, lanes)
                    T.buffer_store(held[stand_in], tirx.Shuffle(places, order), [lane_indices(int64(0), lanes)])
            for n, held in enumerate(merged):
                write_point(part.at({**position, outer.var: first}), last.var, int64(n * lanes), lanes, held)

    spread(merge.box, tasks, lanes, write)
