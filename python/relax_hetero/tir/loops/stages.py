"""A PrimFunc in te.compute form as a list of stages: the computed values, without the loops around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx
from tvm.ir.expr import TensorLoad as Load
from tvm.s_tir import SBlock, SBlockRealize
from tvm_ffi import structural_map

from ..core.builder import Expr, plain_extent
from ..core.walks import nodes, replaced

_REDUCED = 2  # IterVar.CommReduce


@dataclass(frozen=True)
class Axis:
    """A variable that runs from zero to its extent, an int if static."""

    var: tirx.Var
    extent: Expr


@dataclass(frozen=True)
class Stage:
    """The values stored at every point of `spatial`."""

    buffers: tuple[tirx.Buffer, ...]  # buffers with the variables of `spatial` as indices
    values: tuple[Expr, ...]  # Value of each buffer. A reduction reads the buffers at the same point: the accumulators.
    initial: tuple[Expr, ...]  # initial value of each accumulator; empty without a reduction
    spatial: tuple[Axis, ...]
    reduced: tuple[Axis, ...]


class NotStages(Exception):
    """A PrimFunc cannot be read as stages; the message is the reason."""


def has_schedule(func: tirx.PrimFunc) -> bool:
    """True if a PrimFunc lacks blocks inside of its root block: its loops are scheduled already."""
    return len(nodes(func.body, SBlockRealize)) < 2


def read_stages(func: tirx.PrimFunc) -> list[Stage]:
    """The stages of a PrimFunc, in order.

    Raises NotStages if the function is not made of loops around single blocks that store, or has loops that are
    scheduled already.
    """
    root = func.body
    if not isinstance(root, SBlockRealize) or root.iter_values:
        raise NotStages("its body is not a block")
    for buffer in (*func.params, *root.block.alloc_buffers):
        if not isinstance(buffer.ty, tirx.BufferType):
            raise NotStages(f"parameter {buffer} is not a buffer")
        offset = buffer.ty.elem_offset
        if buffer.ty.strides or not (isinstance(offset, tirx.IntImm) and int(offset) == 0):
            raise NotStages(f"buffer {buffer} has strides or an offset")
    body = root.block.body
    stages = [_read_nest(nest) for nest in (body.seq if isinstance(body, tirx.SeqStmt) else [body])]
    read: set[tirx.Buffer] = set()
    for stage in stages:
        read.update(source for value in stage.values for source in sources(value) if source not in stage.buffers)
        for buffer in stage.buffers:
            if buffer in read:
                raise NotStages(f"{buffer} is overwritten after it was read")
    return stages


def _read_nest(statement: tirx.Stmt) -> Stage:
    loops: dict[tirx.Var, Expr] = {}
    while isinstance(statement, tirx.For):
        if statement.kind != tirx.ForKind.SERIAL or not _is_constant(statement.min, 0) or statement.step is not None:
            raise NotStages(f"loop {statement.loop_var} is not a serial loop from 0")
        loops[statement.loop_var] = plain_extent(statement.extent)
        statement = statement.body
    if not isinstance(statement, SBlockRealize) or not _is_constant(statement.predicate, 1):
        raise NotStages("a loop contains more than one block")
    block = statement.block
    if block.match_buffers or block.alloc_buffers or any(v.iter_type not in (0, _REDUCED) for v in block.iter_vars):
        raise NotStages(f"block {block.name_hint} is opaque")
    spatial: list[Axis] = []
    reduced: list[Axis] = []
    for iter_var, value in zip(block.iter_vars, statement.iter_values, strict=True):
        if value not in loops and not _is_constant(value, 0):
            raise NotStages(f"block {block.name_hint} is bound to {value}")
        axis = Axis(iter_var.var, loops.pop(value, 1))
        (reduced if iter_var.iter_type == _REDUCED else spatial).append(axis)
    if any(extent != 1 for extent in loops.values()):
        raise NotStages(f"block {block.name_hint} is computed more than once")
    buffers, values = _stores(block, block.body, spatial)
    initial: tuple[Expr, ...] = ()
    if block.init is not None:
        init_buffers, initial = _stores(block, block.init, spatial)
        if list(init_buffers) != list(buffers):
            raise NotStages(f"block {block.name_hint} initializes other buffers")
    elif reduced or any(any(source.same_as(b) for b in buffers) for v in values for source in sources(v)):
        raise NotStages(f"block {block.name_hint} reads what it writes")
    return Stage(buffers, values, initial, tuple(spatial), tuple(reduced))


def _stores(block: SBlock, body: tirx.Stmt, spatial: list[Axis]) -> tuple[tuple[tirx.Buffer, ...], tuple[Expr, ...]]:
    bindings: dict[tirx.Var, Expr] = {}
    buffers, values = [], []
    for statement in body.seq if isinstance(body, tirx.SeqStmt) else [body]:
        if isinstance(statement, tirx.Bind):
            bindings[statement.var] = replaced(statement.value, bindings)
            continue
        if not isinstance(statement, tirx.BufferStore):
            raise NotStages(f"block {block.name_hint} does more than store")
        if not statement.indices and all(axis.extent == 1 for axis in spatial):
            spatial.clear()
        if len(statement.indices) != len(spatial) or not all(
            index.same_as(axis.var) or (axis.extent == 1 and _is_constant(index, 0))
            for index, axis in zip(statement.indices, spatial, strict=True)
        ):
            raise NotStages(f"block {block.name_hint} stores to {list(statement.indices)}")
        buffers.append(statement.buffer)
        values.append(replaced(statement.value, bindings))
    return tuple(buffers), tuple(values)


def _is_constant(value: Expr, number: int) -> bool:
    return isinstance(value, tirx.IntImm) and int(value) == number


def with_loads(expr: Expr, change: Callable[[Any], Expr]) -> Expr:
    """`expr` with every read changed, innermost first."""
    return structural_map(expr, (Load, change))


def loads(expr: Expr) -> list[Any]:
    """Every read in `expr`."""
    return nodes(expr, Load)


def sources(expr: Expr) -> list[tirx.Buffer]:
    """The buffer of every read in `expr`."""
    return [load.source for load in loads(expr)]


def node_count(expr: Expr) -> int:
    """Number of nodes of an expression as a tree."""
    return len(nodes(expr, tvm.ir.Expr))


def variables(expr: Expr) -> set[tirx.Var]:
    """Every variable in `expr`, buffers included."""
    return set(nodes(expr, tvm.ir.Var))
