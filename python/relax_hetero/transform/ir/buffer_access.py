"""What a PrimFunc does to the memory of its parameters."""

from __future__ import annotations

from collections import Counter

import tvm
from tvm import s_tir, tirx
from tvm.ir.expr import TensorLoad
from tvm_ffi import structural_walk

from ...artifact.commands import READ, READ_WRITE, WRITE


def buffer_access(func: tirx.PrimFunc) -> dict[tirx.Var, str]:
    """Whether each tensor parameter is read, written or both, by the elements that the body names.

    The body may name the same memory by other buffers. Memory that is handed on otherwise (its address, another
    function) counts as read and written; memory that nothing names counts as read.
    """
    seen: Counter[tirx.Var] = Counter()
    loads: Counter[tirx.Var] = Counter()
    stores: Counter[tirx.Var] = Counter()
    declared: Counter[tirx.Var] = Counter()
    views: dict[tirx.Var, tirx.Var] = {}

    def on_block(block: s_tir.SBlock) -> None:
        declared.update(region.source for region in (*block.reads, *block.writes))

    def on_view(view: tirx.DeclBuffer) -> None:
        data = view.data
        if isinstance(data, tvm.ir.Call) and isinstance(data.op, tvm.ir.Op) and data.op.name == "tirx.buffer_data":
            views[view.buffer] = data.args[0]
            declared.update((view.buffer, data.args[0]))

    on_nodes = [
        (tvm.ir.Var, lambda var: seen.update((var,))),
        (TensorLoad, lambda load: loads.update((load.source,))),
        (tirx.BufferStore, lambda store: stores.update((store.buffer,))),
        (s_tir.SBlock, on_block),
        (tirx.DeclBuffer, on_view),
    ]
    structural_walk(func.body, on_nodes)

    def access(param: tirx.Var) -> str:
        names = [param, *(view for view in views if _viewed(view, views) == param)]
        handed_on = any(seen[name] > loads[name] + stores[name] + declared[name] for name in names)
        read, written = (any(uses[name] for name in names) for uses in (loads, stores))
        if handed_on or (read and written):
            return READ_WRITE
        return WRITE if written else READ

    return {param: access(param) for param in func.params}


def _viewed(view: tirx.Var, views: dict[tirx.Var, tirx.Var]) -> tirx.Var:
    """The parameter that a buffer names the memory of."""
    while view in views:
        view = views[view]
    return view
