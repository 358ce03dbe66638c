"""What a PrimFunc does to the memory of its parameters."""

from __future__ import annotations

from collections import Counter

import tvm
from tvm import s_tir, tirx
from tvm.ir.expr import TensorLoad
from tvm_ffi import structural_walk

from ..vm.commands import READ, READ_WRITE, WRITE


def buffer_access(func: tirx.PrimFunc) -> dict[tirx.Var, str]:
    """Whether each tensor parameter is read, written or both, by the elements that the body names.

    Memory that is handed on otherwise (its address, a part of it under another name, another function) counts as read
    and written; memory that nothing names counts as read.
    """
    seen: Counter[tirx.Var] = Counter()
    loads: Counter[tirx.Var] = Counter()
    stores: Counter[tirx.Var] = Counter()
    declared: Counter[tirx.Var] = Counter()

    def on_block(block: s_tir.SBlock) -> None:
        declared.update(region.buffer for region in (*block.reads, *block.writes))

    on_nodes = [
        (tvm.ir.Var, lambda var: seen.update((var,))),
        (TensorLoad, lambda load: loads.update((load.source,))),
        (tirx.BufferStore, lambda store: stores.update((store.buffer,))),
        (s_tir.SBlock, on_block),
    ]
    structural_walk(func.body, on_nodes)

    def access(param: tirx.Var) -> str:
        handed_on = seen[param] > loads[param] + stores[param] + declared[param]
        if handed_on or (loads[param] and stores[param]):
            return READ_WRITE
        return WRITE if stores[param] else READ

    return {param: access(param) for param in func.params}
