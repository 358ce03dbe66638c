"""Splitting a PrimFunc with several launches into one PrimFunc per launch.

Buffers between launches become tensors that Relax allocates and plans, and each launch can be a CUDA graph node.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import tvm
from tvm import s_tir, tirx
from tvm.tirx.buffer import is_buffer_var
from tvm_ffi import structural_map, structural_walk

from ...loops.stages import Load


@dataclass(frozen=True)
class Launch:
    """One launch of a PrimFunc."""

    func: tirx.PrimFunc  # its parameters are `reads`, then `updates`, then `writes`
    # Parameters of the original PrimFunc, scalars included, and buffers that its root block allocates. Buffers that an
    # earlier launch has written are updated, not written.
    reads: tuple[tirx.Var, ...]
    updates: tuple[tirx.Var, ...]
    writes: tuple[tirx.Var, ...]


def launches_of(func: tirx.PrimFunc) -> list[Launch] | None:
    """Split a scheduled PrimFunc into its launches, in order.

    None if there is only one, or if a launch overwrites an input that an earlier one has read.
    """
    root = func.body
    if not isinstance(root, s_tir.SBlockRealize) or not isinstance(root.block.body, tirx.SeqStmt):
        return None
    memory = [*func.params, *root.block.alloc_buffers]
    statements: list[tirx.Stmt] = []
    for statement in root.block.body.seq:
        if isinstance(statement, tirx.AllocBuffer):
            memory.append(statement.buffer)
        else:
            statements.append(statement)
    if len(statements) < 2:
        return None
    if not all(isinstance(s, tirx.For) and s.kind == tirx.ForKind.THREAD_BINDING for s in statements):
        return None
    read: set[tirx.Var] = set()
    written: set[tirx.Var] = set()
    launches = []
    for statement in statements:
        launch = _launch(func, statement, memory, written)
        if launch is None or read & set(launch.writes):
            return None
        read |= set(launch.reads)
        written |= {*launch.updates, *launch.writes}
        launches.append(launch)
    return launches


def _launch(
    func: tirx.PrimFunc, statement: tirx.For, memory: list[tirx.Var], before: Collection[tirx.Var]
) -> Launch | None:
    views: dict[tirx.Var, tirx.Var] = {}
    used: dict[tirx.Var, None] = {}

    def on_variable(var: tirx.Var) -> None:
        if var in memory:
            used[var] = None

    def on_declaration(declaration: tirx.DeclBuffer) -> None:
        sources: list[tirx.Var] = []
        structural_walk(declaration.data, (tvm.ir.Var, sources.append))
        for var in sources:
            views[declaration.buffer] = views.get(var, var)

    structural_walk(statement, [(tirx.DeclBuffer, on_declaration), (tvm.ir.Var, on_variable)])
    stored: list[tirx.Var] = []
    loaded: list[tirx.Var] = []
    structural_walk(statement, (tirx.BufferStore, lambda store: stored.append(store.buffer)))
    structural_walk(statement, (Load, lambda load: loaded.append(load.source)))
    written = {views.get(buffer, buffer) for buffer in stored} & set(memory)
    read = {views.get(buffer, buffer) for buffer in loaded} & set(memory)
    # Only parameters may have contents before the first launch.
    if (written & read & set(func.params)).difference(before) or not written:
        return None
    reads = tuple(var for var in memory if var in used and var not in written)
    updates = tuple(var for var in memory if var in written and var in before)
    writes = tuple(var for var in memory if var in written and var not in before)
    tensors = (*reads, *updates, *writes)
    sizes = {extent for var in tensors if is_buffer_var(var) for extent in var.shape}
    free: list[tirx.Var] = []
    loop_vars: set[tirx.Var] = set()
    structural_walk(statement, [(tirx.For, lambda loop: loop_vars.add(loop.loop_var)), (tvm.ir.Var, free.append)])
    names = {param for p in func.params if is_buffer_var(p) for param in _extent_vars(p)}
    if any(var in names and var not in sizes and var not in reads for var in free):
        return None  # no argument defines this extent
    copies = {var: _copy(var) for var in tensors if is_buffer_var(var)}
    body = structural_map(statement, (tvm.ir.Var, lambda var: copies.get(var, var)))
    params = [copies.get(var, var) for var in tensors]
    block = s_tir.SBlock([], [], [], "root", body)
    kernel = tirx.PrimFunc(params, s_tir.SBlockRealize([], True, block), func.ret_type, func.attrs, func.span)
    return Launch(kernel.without_attr("global_symbol"), reads, updates, writes)


def _extent_vars(buffer: tirx.Var) -> list[tirx.Var]:
    extents: list[tirx.Var] = []
    for extent in buffer.shape:
        structural_walk(extent, (tvm.ir.Var, extents.append))
    return extents


def _copy(buffer: tirx.Var) -> tirx.Var:
    return tirx.decl_buffer(list(buffer.shape), str(buffer.dtype), buffer.name)
