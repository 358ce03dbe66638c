"""Code of nests: vectors inside, threads outside where a nest takes long enough; boxes without reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ...target.cpu_target import CpuTarget
from ...target.element_types import bytes_of
from ..core import work_split
from ..core.builder import Expr, ceil_div, flat, int64, lane_indices, materialize, plain_extent
from ..core.ties import with_ties
from ..core.walks import nodes, replaced
from ..core.work_split import part
from ..pack.tile_transpose import riffle
from .boxes import cut, split_axes
from .flat import FlatBox, Loop, flatten, is_step, stride
from .loop_code import loop_to_share, nested, share_among_tasks, vectorize_loop
from .nests import Nest, tied_in
from .reduce_box import write_reduction
from .stages import Load, loads, node_count, sources, variables, with_loads
from .vector_code import chooses, lanes_of, slot, varies_inside, write_point

# Boxes without reductions: the innermost loop is vectorized.
#
# Reads that are not contiguous along the innermost loop become vectors if they form one of two patterns. Interleaved
# reads of a few streams (`Interleaved`), as in a channel shuffle::
#
#     for a, b in 34, 4: y[a * 4 + b] = x[b * 34 + a]
#
# become reads of 16 elements of each of the 4 streams, and shuffles. Transposed reads (`TransposedReads`)::
#
#     for q, v: y[q, v] = x[v, q]
#
# become square tiles, read by rows, transposed by a network of shuffles, and written by rows.

_UNROLLED_VECTORS = 2  # vectors of an iteration
_MAX_TILE = 16  # side of the largest tile: registers hold 16 vectors before and after a stage of shuffles
_MAX_STREAMS = 8  # shuffles of more streams cost more than the reads that they save


def write_map(box: FlatBox, cpu: CpuTarget, tasks: int) -> None:
    """Write the loops of a box."""
    if not box.spatial:
        write_point(box, None, tirx.IntImm("int64", 0), 1, {})
        return
    var, lanes = box.spatial[-1].var, _lanes(box, cpu)
    merge = interleaved(box, lanes, tasks) if _lacks_branches(box, lanes) else None
    if merge is not None:
        write_interleaved(merge, tasks)
        return

    def write(part: FlatBox) -> None:
        with nested(part.spatial[:-1]) as position:
            here = part.at(position)

            def visit(start: Expr, width: int, count: int) -> None:
                for i in range(count):
                    write_point(here, var, start + i * width, width, {})

            vectorize_loop(part.spatial[-1], lanes, _UNROLLED_VECTORS, not box.nest.in_place, visit)

    tiles = transposed_reads(box, lanes, tasks) if _lacks_branches(box, lanes) else None
    if tiles is not None:
        write_transposed(tiles, tasks, write)
        return
    share_among_tasks(box, tasks, lanes * _UNROLLED_VECTORS, write)


def computes_once(box: FlatBox, cpu: CpuTarget, tasks: int) -> bool:
    """Return whether `write_map` loses nothing by computing every element exactly once."""
    if len(box.spatial) < 2:
        return True  # the tail of a single loop is short
    lanes, count = _lanes(box, cpu), box.spatial[-1].count
    if _lacks_branches(box, lanes) and (interleaved(box, lanes, tasks) or transposed_reads(box, lanes, tasks)):
        return False
    return not isinstance(count, int) or count < lanes or count % lanes == 0


def _lanes(box: FlatBox, cpu: CpuTarget) -> int:
    return 1 if varies_inside(box, box.spatial[-1].var) else lanes_of(box.nest, cpu)


def _lacks_branches(box: FlatBox, lanes: int) -> bool:
    """Return whether values lack if_then_else, so that reads may be combined into vectors."""
    return lanes > 1 and not any(map(chooses, box.nest.expressions()))


def _replace_read(load: Load, reads: dict[tirx.Buffer, Load]) -> Load:
    """A read of the first element of a new buffer in place of `load`, which `reads` gets."""
    buffer = tirx.decl_buffer((1,), str(load.ty.dtype))
    reads[buffer] = load
    return tirx.BufferLoad(buffer, [int64(0)])


@dataclass(frozen=True)
class Interleaved:
    """A box whose two innermost loops write contiguously, and read streams along the outer of the two."""

    box: FlatBox  # box with reads of the buffers of `reads` in place of these
    reads: dict[tirx.Buffer, Load]  # reads that are contiguous along the outer of the two loops
    lanes: int


def interleaved(box: FlatBox, lanes: int, tasks: int) -> Interleaved | None:
    """The interleaved reads of a box, or None."""
    if len(box.spatial) < 2 or box.nest.in_place:
        return None
    outer, last = box.spatial[-2:]
    if not isinstance(last.count, int) or not isinstance(outer.count, int) or last.count > _MAX_STREAMS:
        return None
    while lanes > outer.count // tasks:  # a task's part of this loop holds a whole vector
        lanes //= 2
    reads: dict[tirx.Buffer, Load] = {}

    def change(load: Load) -> Load:
        along, step = stride(load.indices[0], outer.var), stride(load.indices[0], last.var)
        if not is_step(along, 1) or step is None or load.ty.dtype == "bool":
            return load
        return _replace_read(load, reads)

    steps = [(buffer, with_loads(value, change)) for buffer, value in box.nest.steps]
    inner_variables = {outer.var, last.var}
    offsets = list(box.places.values())
    for _, value in steps:
        offsets += [load.indices[0] for load in loads(value) if load.source not in box.nest.computed]
        if variables(with_loads(value, lambda load: tirx.const(0, load.ty.dtype))) & inner_variables:
            return None
    if lanes < 4 or not reads or not all(_is_run(offset, outer, last) for offset in offsets):
        return None
    return Interleaved(replace(box, nest=replace(box.nest, steps=steps)), reads, lanes)


def _is_run(offset: Expr, outer: Loop, last: Loop) -> bool:
    """Return whether an offset advances through both loops as through a single one."""
    wide, narrow = stride(offset, outer.var), stride(offset, last.var)
    return isinstance(wide, int) and isinstance(narrow, int) and wide == narrow * last.count


def write_interleaved(merge: Interleaved, tasks: int) -> None:
    """Write the loops of a box."""
    lanes = merge.lanes

    def write(part: FlatBox) -> None:
        outer, last = part.spatial[-2:]
        with nested(part.spatial[:-2]) as position, T.serial(int64(ceil_div(outer.count, lanes))) as i:
            first = _start(outer, i, lanes)
            merged: list[dict[tirx.Buffer, tirx.Buffer]] = [{} for _ in range(last.count)]
            for stand_in, load in merge.reads.items():
                streams = []
                for b in range(last.count):
                    offset = replaced(load.indices[0], {**position, outer.var: first, last.var: int64(b)})
                    streams.append(tirx.BufferLoad(load.source, [lane_indices(offset, lanes)]))
                for n, registers in enumerate(merged):
                    numbers = range(n * lanes, (n + 1) * lanes)
                    order = [number % last.count * lanes + number // last.count for number in numbers]
                    registers[stand_in] = slot(stand_in.dtype, lanes)
                    T.buffer_store(registers[stand_in], tirx.Shuffle(streams, order), [lane_indices(int64(0), lanes)])
            for n, registers in enumerate(merged):
                write_point(part.at({**position, outer.var: first}), last.var, int64(n * lanes), lanes, registers)

    share_among_tasks(merge.box, tasks, lanes, write)


@dataclass(frozen=True)
class TransposedReads:
    """A box with reads that are contiguous along another loop than the innermost."""

    # Box as it is, and with reads of the buffers of `reads` in place of these.
    plain: FlatBox
    box: FlatBox
    across: tirx.Var  # variable of the loop along which these reads are contiguous
    reads: dict[tirx.Buffer, Load]
    size: int  # side of a tile in elements

    def loops_of(self, part: FlatBox) -> tuple[Loop, Loop]:
        """The loops of a tile's rows and columns in a part of the box."""
        return next(loop for loop in part.spatial if loop.var.same_as(self.across)), part.spatial[-1]


def transposed_reads(box: FlatBox, lanes: int, tasks: int) -> TransposedReads | None:
    """The transposed reads of a box, or None."""
    *outer, last = box.spatial
    if not outer:
        return None
    across: Loop | None = None
    reads: dict[tirx.Buffer, Load] = {}

    def change(load: Load) -> Load:
        nonlocal across
        step = stride(load.indices[0], last.var)
        is_short = step is None or (isinstance(step, int) and abs(step) <= 4)
        if load.source in box.nest.computed or is_short or load.ty.dtype == "bool":
            return load
        steps = [(loop, stride(load.indices[0], loop.var)) for loop in outer]
        contiguous = [loop for loop, along in steps if isinstance(along, int) and along == 1]
        if not contiguous or (across is not None and contiguous[-1] is not across):
            return load
        across = contiguous[-1]
        return _replace_read(load, reads)

    steps = [(buffer, with_loads(value, change)) for buffer, value in box.nest.steps]
    if across is None or box.nest.in_place:
        return None
    size = min(lanes, _MAX_TILE)
    for count in (count for count in (last.count, across.count // tasks) if isinstance(count, int)):
        while size > count:
            size //= 2
    if size < 4:
        return None
    return TransposedReads(box, replace(box, nest=replace(box.nest, steps=steps)), across.var, reads, size)


def write_transposed(tiles: TransposedReads, tasks: int, write_others: Callable[[FlatBox], None]) -> None:
    """Write the loops of a box by tiles; `write_others` writes parts of symbolic sizes that are smaller than a tile."""
    has_symbolic_size = not all(isinstance(loop.count, int) for loop in tiles.loops_of(tiles.box))

    def write(part: FlatBox) -> None:
        if not has_symbolic_size:
            write_tiles(part)
            return
        across, last = tiles.loops_of(part)
        with T.If(tirx.all(int64(across.count) >= tiles.size, int64(last.count) >= tiles.size)):
            with T.Then():
                write_tiles(part)
            with T.Else():
                write_others(replace(tiles.plain, spatial=part.spatial))

    def write_tiles(part: FlatBox) -> None:
        across, _ = tiles.loops_of(part)
        outer_loops = [loop for loop in part.spatial[:-1] if loop is not across]
        with nested(outer_loops) as position:
            with T.serial(int64(ceil_div(across.count, tiles.size))) as i:
                first = _start(across, i, tiles.size)
                with T.serial(int64(ceil_div(part.spatial[-1].count, tiles.size))) as j:
                    _tile(tiles, part, position, first, _start(part.spatial[-1], j, tiles.size))

    share_among_tasks(tiles.box, tasks, tiles.size, write)


def _start(loop: Loop, number: Expr, size: int) -> Expr:
    """Start of a run or tile; the last ends with the loop, and computes elements of the one before again."""
    if isinstance(loop.count, int) and loop.count % size == 0:
        return number * size + loop.begin
    return materialize(T.min(number * size + loop.begin, int64(loop.end) - size))


def _tile(tiles: TransposedReads, part: FlatBox, position: dict[tirx.Var, Expr], first: Expr, start: Expr) -> None:
    last, size = part.spatial[-1].var, tiles.size
    columns: dict[tirx.Buffer, list[tirx.Buffer]] = {}
    for stand_in, load in tiles.reads.items():
        rows = []
        for i in range(size):
            values = {**position, tiles.across: first, last: start + i}
            rows.append(tirx.BufferLoad(load.source, [lane_indices(replaced(load.indices[0], values), size)]))
        columns[stand_in] = []
        for column in riffle(rows, size):
            columns[stand_in].append(slot(stand_in.dtype, size))
            T.buffer_store(columns[stand_in][-1], column, [lane_indices(int64(0), size)])
    for i in range(size):
        row = part.at({**position, tiles.across: first + i})
        write_point(row, last, start, size, {stand_in: registers[i] for stand_in, registers in columns.items()})


def write_function(func: tirx.PrimFunc, nests: Sequence[Nest], cpu: CpuTarget) -> tirx.PrimFunc:
    """A PrimFunc that computes nests in order, with the parameters and attributes of `func`, and with its ties."""
    params = list(func.params)
    candidates, ties = tied_in(nests, params), []
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("scheduled")
        with T.sblock("root"):
            T.reads()
            T.writes()
            views = _views(func, nests)
            for nest in nests:
                pairs = [pair for pair, own in candidates if own is nest]
                if _write_nest(split_axes(nest), cpu, views, bool(pairs)):
                    ties += [(params.index(operand), params.index(result)) for operand, result in pairs]
    return with_ties(func.with_body(builder.get().body), ties)


def _views(func: tirx.PrimFunc, nests: Sequence[Nest]) -> dict[tirx.Buffer, tirx.Buffer]:
    used = {buffer for nest in nests for value in nest.expressions() for buffer in sources(value)}
    stored = {buffer for nest in nests for buffer in nest.stored}
    views = {p: flat(p, p.shape) for p in func.params if p in used or p in stored}
    for buffer in [buffer for nest in nests for buffer in nest.computed]:
        if buffer not in views:
            count = prod(buffer.shape, start=tirx.IntImm("int64", 1))
            make = T.alloc_buffer if buffer in stored else tirx.decl_buffer
            views[buffer] = make((count,), buffer.dtype)
    return views


def _write_nest(nest: Nest, cpu: CpuTarget, views: dict[tirx.Buffer, tirx.Buffer], may_tie: bool) -> bool:
    """Write a nest; return whether every element is computed exactly once, which holds only if it `may_tie`."""
    view = views.__getitem__
    boxes, tasks = cut(nest), tasks_for(nest, cpu)
    if len(boxes) == 1:
        only = flatten(boxes[0], None, view)
        ties = may_tie and computes_once(only, cpu, tasks)
        if ties:
            only = replace(only, nest=replace(only.nest, in_place=True))
        _write_box(only, cpu, tasks)
        return ties
    wide = [d for d, axis in enumerate(nest.axes[:-1]) if plain_extent(axis.extent) != 1]
    shared = loop_to_share([nest.axes[d].extent for d in wide], tasks)
    if shared is None or tasks == 1:
        for box in boxes:
            _write_box(flatten(box, None, view), cpu, tasks)
        return False
    d = wide[shared]
    with T.parallel(int64(tasks)) as task:
        begin, end = part(nest.axes[d].extent, tasks, task)
        for box in boxes:
            low, high = box.bounds[d]
            low = materialize(T.max(begin, low)) if low != 0 else begin
            # The loop is empty for a task whose part lies outside of the box.
            high = materialize(T.max(T.min(end, high), low))
            _write_box(flatten(box, (d, low, high), view), cpu, 1)
    return False


def _write_box(box: FlatBox, cpu: CpuTarget, tasks: int) -> None:
    write = write_reduction if box.nest.sums else write_map
    write(box, cpu, tasks)


_BYTES_PER_NS, _VECTOR_OPS_PER_NS = 20.0, 2.0  # throughput of one core
_NS_PER_CALL = 2.0  # time of a transcendental function of a vector


def tasks_for(nest: Nest, cpu: CpuTarget) -> int:
    """Number of tasks of a nest: one for each core, or one if it is short."""
    return work_split.tasks_for(cpu.cores, "nanoseconds", nanoseconds(nest, cpu))


def nanoseconds(nest: Nest, cpu: CpuTarget) -> float | None:
    """An estimate of a nest's time on one core; None for symbolic extents."""
    if not all(isinstance(axis.extent, int) for axis in (*nest.axes, *nest.reduced)):
        return None
    points, terms = prod(axis.extent for axis in nest.axes), prod(axis.extent for axis in nest.reduced)
    sum_time = sum(points * terms * _point_nanoseconds(s.value, cpu) for s in nest.sums)
    return sum_time + sum(points * _point_nanoseconds(value, cpu) for _, value in nest.steps)


def _point_nanoseconds(value: tvm.ir.Expr, cpu: CpuTarget) -> float:
    lanes = cpu.lanes("float32")
    calls = sum(call.op.name not in ("prim.if_then_else", "prim.likely") for call in nodes(value, tvm.ir.Call))
    read = sum(bytes_of(str(load.ty.dtype)) for load in loads(value))
    return read / _BYTES_PER_NS + (node_count(value) / _VECTOR_OPS_PER_NS / 4 + calls * _NS_PER_CALL) / lanes
