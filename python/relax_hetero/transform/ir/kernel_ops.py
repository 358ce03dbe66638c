"""What a kernel computes: the ops that were fused into it, as an attribute that lasts to the executable."""

from __future__ import annotations

import re

import tvm
from tvm import relax, tirx

from .calls import called_prim_func
from .rewriting import copy_module, walk_bindings

OPS = "relax_hetero.ops"


def fused_ops(mod: tvm.IRModule) -> dict[str, list[str]]:
    """Between FuseOps and FuseTIR: function name to the kernels inside, in order."""
    found: dict[str, list[str]] = {}
    for gv, func in mod.functions.items():
        if isinstance(func, relax.Function) and func.attrs.get("Primitive"):
            kernels = [called_prim_func(mod, binding.value) for binding in walk_bindings(func)]
            found[gv.name_hint] = [_plain(kernel.name_hint) for kernel in kernels if kernel is not None]
    return found


def with_ops(mod: tvm.IRModule, fused: dict[str, list[str]]) -> tvm.IRModule:
    """Note on every kernel what it computes; kernels that are noted already keep it."""
    functions = {
        gv: func.with_attr(OPS, fused.get(gv.name_hint, [_plain(gv.name_hint)]))
        if isinstance(func, tirx.PrimFunc) and OPS not in func.attrs
        else func
        for gv, func in mod.functions.items()
    }
    return copy_module(mod, functions)


def ops_of(func: tirx.PrimFunc) -> tuple[str, ...]:
    """The ops of a kernel; none for those that TVM adds, which compute shapes."""
    return tuple(str(op) for op in func.attrs.get(OPS, ()))


def _plain(kernel: str) -> str:
    # Legalization writes tir_exp for exp, and numbers the kernels of one op.
    return re.sub(r"\d+$", "", kernel).removeprefix("tir_")
