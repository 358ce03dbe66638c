"""Kernels that other kernels call stay private.

AttachGlobalSymbol makes every PrimFunc public, and TVM compiles a call of a public PrimFunc by its variable into a
call with the wrong number of arguments. Private ones become plain functions of the same module.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, tirx
from tvm_ffi import structural_map, structural_walk

from ..ir.rewriting import copy_module, fresh_global_var


def keep_private_kernels(mod: tvm.IRModule) -> tvm.IRModule:
    """Take the symbol off PrimFuncs that only PrimFuncs call; what Relax calls too gets a private copy for them."""
    by_relax = _called(mod, relax.Function)
    by_kernels = _called(mod, tirx.PrimFunc)
    if not by_kernels:
        return mod
    functions = dict(mod.functions.items())
    taken = {gv.name_hint for gv in functions}
    private: dict[tvm.ir.GlobalVar, tvm.ir.GlobalVar] = {}
    for gv in by_kernels:
        private[gv] = fresh_global_var(f"{gv.name_hint}_private", gv.ty, taken) if gv in by_relax else gv
        functions[private[gv]] = functions[gv].without_attr("global_symbol")
    for gv, func in functions.items():
        if isinstance(func, tirx.PrimFunc):
            body = structural_map(func.body, (tvm.ir.GlobalVar, lambda callee: private.get(callee, callee)))
            functions[gv] = func.with_body(body)
    return copy_module(mod, functions)


def _called(mod: tvm.IRModule, kind: type[Any]) -> dict[tvm.ir.GlobalVar, None]:
    """The PrimFuncs that functions of a kind refer to, in order."""
    found: dict[tvm.ir.GlobalVar, None] = {}

    def on_global(gv: tvm.ir.GlobalVar) -> None:
        if isinstance(mod.functions.get(gv), tirx.PrimFunc):
            found[gv] = None

    for _, func in sorted(mod.functions.items(), key=lambda pair: pair[0].name_hint):
        if isinstance(func, kind):
            structural_walk(func.body, (tvm.ir.GlobalVar, on_global))
    return found
