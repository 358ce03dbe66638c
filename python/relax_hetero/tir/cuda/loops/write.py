"""Nests become launches, one after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T
from tvm_ffi import structural_map, structural_walk

from ....target.gpu_target import GpuTarget
from ...loops.boxes import Box, split_axes
from ...loops.flat import flatten
from ...loops.nests import Nest
from .map_code import write_map
from .reduction import write_reduction
from .split_reduction import halves_of

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
