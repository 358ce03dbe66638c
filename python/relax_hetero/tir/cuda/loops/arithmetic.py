"""Expressions rewritten for the CUDA compiler, and accumulator types.

Functions of 16-bit floats are computed in float32 and rounded once. CUDA lacks 16-bit forms of most of them (``fmod``,
``asin``, ``log1p``), has less exact ones of others, and TVM emits names that do not exist. Exponentials, sigmoids and
hyperbolic tangents use approximations whose errors (about 1e-6) vanish in a 16-bit result: exact forms would make
memory-bound kernels compute-bound.
"""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import tirx
from tvm_ffi import structural_map

from ...core.builder import Expr
from ..core import ptx
from ..core.dialect import has_ptx

NARROW = ("float16", "bfloat16")  # 16-bit floating-point types, computed in float32

# Calls without arithmetic: selection, hints and reinterpretation of bits.
_OPAQUE = frozenset(("prim.if_then_else", "prim.likely", "tirx.reinterpret", "tirx.address_of", "tirx.call_extern"))


def for_cuda(expr: Expr) -> Expr:
    """Compute the functions of 16-bit floats in an expression in float32."""

    def on_call(call: tvm.ir.Call) -> Expr:
        if not isinstance(call.op, tvm.ir.Op) or call.op.name in _OPAQUE:
            return call
        types = [_type(arg) for arg in call.args]
        if not any(dtype in NARROW for dtype in types):
            return call
        args = [
            tirx.Cast("float32", arg) if dtype in NARROW else arg for arg, dtype in zip(call.args, types, strict=True)
        ]
        dtype = _type(call)
        if dtype not in NARROW:
            return tvm.ir.Call(call.op, args, ret_ty=tvm.ir.PrimType(dtype))
        quick = _QUICK.get(call.op.name) if has_ptx() else None
        wide = quick(args[0]) if quick else tvm.ir.Call(call.op, args, ret_ty=tvm.ir.PrimType("float32"))
        return tirx.Cast(dtype, wide)

    def on_binary(node: tirx.Max | tirx.Min | tirx.Mod) -> Expr:
        dtype = _type(node)
        wide = "float32" if dtype in NARROW else "int32" if dtype == "bool" else None
        if wide is None:
            return node
        return tirx.Cast(dtype, type(node)(tirx.Cast(wide, node.a), tirx.Cast(wide, node.b)))

    return structural_map(expr, [(tvm.ir.Call, on_call), ((tirx.Max, tirx.Min, tirx.Mod), on_binary)])


_QUICK: dict[str, Callable[[Expr], Expr]] = {
    "tirx.exp": ptx.quick_exp,
    "tirx.sigmoid": ptx.quick_sigmoid,
    "tirx.tanh": ptx.quick_tanh,
}


def accumulator_type(dtype: str) -> str:
    """Type that terms of `dtype` are accumulated in."""
    return "float32" if dtype in NARROW else dtype


def _type(value: Expr) -> str:
    return str(getattr(value.ty, "dtype", ""))
