"""Nests become code: vectors inside, threads outside where a nest takes long enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T
from tvm_ffi import structural_walk

from ...target.cpu_target import CpuTarget
from ...target.element_types import bytes_of
from ..core import work_split
from ..core.builder import flat, int64, materialize, plain_extent
from ..core.ties import with_ties
from ..core.work_split import part
from .boxes import cut, split_axes
from .flat import FlatBox, flatten
from .loop_code import most_even
from .map_box import computes_once, write_map
from .nests import Nest, tied_in
from .reduce_box import write_reduction
from .stages import loads, sources


def write_function(func: tirx.PrimFunc, nests: Sequence[Nest], cpu: CpuTarget) -> tirx.PrimFunc:
    """A PrimFunc that computes nests in order, with the parameters and attributes of `func`, and its ties noted."""
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
    for buffer in [buffer for nest in nests for buffer in nest.made]:
        if buffer not in views:
            count = prod(buffer.shape, start=tirx.IntImm("int64", 1))
            make = T.alloc_buffer if buffer in stored else tirx.decl_buffer
            views[buffer] = make((count,), buffer.dtype)
    return views


def _write_nest(nest: Nest, cpu: CpuTarget, views: dict[tirx.Buffer, tirx.Buffer], may_tie: bool) -> bool:
    """Write a nest; whether every element is computed once and by itself, which is asked if it `may_tie` operands."""
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
    shared = most_even([nest.axes[d].extent for d in wide], tasks)
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
            # A task whose part lies outside of the box has nothing to do there: no loop runs backwards.
            high = materialize(T.max(T.min(end, high), low))
            _write_box(flatten(box, (d, low, high), view), cpu, 1)
    return False


def _write_box(box: FlatBox, cpu: CpuTarget, tasks: int) -> None:
    write = write_reduction if box.nest.sums else write_map
    write(box, cpu, tasks)


# One core: bytes read or written in a nanosecond, and vectors of simple operations.
_BYTES, _VECTORS = 20.0, 2.0
# Nanoseconds that a call of a transcendental function takes for a vector.
_CALL = 2.0


def tasks_for(nest: Nest, cpu: CpuTarget) -> int:
    """Into how many tasks a nest is cut: one for each core, or one if it is done soon."""
    return work_split.tasks_for(cpu.cores, "nanoseconds", nanoseconds(nest, cpu))


def nanoseconds(nest: Nest, cpu: CpuTarget) -> float | None:
    """An estimate of a nest's time on one core; None where extents are unknown."""
    if not all(isinstance(axis.extent, int) for axis in (*nest.axes, *nest.reduced)):
        return None
    points, terms = prod(axis.extent for axis in nest.axes), prod(axis.extent for axis in nest.reduced)
    of_sums = sum(points * terms * _point(s.value, cpu) for s in nest.sums)
    return of_sums + sum(points * _point(value, cpu) for _, value in nest.steps)


def _point(value: tvm.ir.Expr, cpu: CpuTarget) -> float:
    lanes = cpu.lanes("float32")
    nodes = calls = 0

    def on_node(node: tvm.ir.Expr) -> None:
        nonlocal nodes, calls
        nodes += 1
        if isinstance(node, tvm.ir.Call) and node.op.name not in ("prim.if_then_else", "prim.likely"):
            calls += 1

    structural_walk(value, (tvm.ir.Expr, on_node))
    read = sum(bytes_of(str(load.ty.dtype)) for load in loads(value))
    return read / _BYTES + (nodes / _VECTORS / 4 + calls * _CALL) / lanes
