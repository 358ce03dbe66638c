"""Expressions as the CUDA compiler can compute them, and accumulators that lose nothing.

Functions of 16-bit floats are computed in float32 and rounded once. Of most of them CUDA has no 16-bit form (``fmod``,
``asin``, ``log1p``), of others one that is less exact than a rounded float32, and TVM names some that are nowhere.
Exponentials, sigmoids and hyperbolic tangents take CUDA's quick forms, whose errors of some 1e-6 a result of 16 bits
does not show: exact ones take longer than memory does.
"""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import tirx
from tvm_ffi import structural_map

from ...core.builder import Expr
from ...loops.stages import node_count

_NARROW = ("float16", "bfloat16")

# Calls that are no arithmetic: choices, hints, and the bits of a number.
_KEPT = frozenset(("prim.if_then_else", "prim.likely", "tirx.reinterpret", "tirx.address_of", "tirx.call_extern"))


def for_cuda(expr: Expr) -> Expr:
    """An expression with the functions of 16-bit floats in it computed in float32."""

    def on_call(call: tvm.ir.Call) -> Expr:
        if not isinstance(call.op, tvm.ir.Op) or call.op.name in _KEPT:
            return call
        types = [_type(arg) for arg in call.args]
        if not any(dtype in _NARROW for dtype in types):
            return call
        args = [
            tirx.Cast("float32", arg) if dtype in _NARROW else arg for arg, dtype in zip(call.args, types, strict=True)
        ]
        dtype = _type(call)
        if dtype not in _NARROW:
            return tvm.ir.Call(call.op, args, ret_ty=tvm.ir.PrimType(dtype))
        quick = _QUICK.get(call.op.name)
        wide = quick(args[0]) if quick is not None else None
        if wide is None:
            wide = tvm.ir.Call(call.op, args, ret_ty=tvm.ir.PrimType("float32"))
        return tirx.Cast(dtype, wide)

    def on_binary(node: tirx.Max | tirx.Min | tirx.Mod) -> Expr:
        dtype = _type(node)
        wide = "float32" if dtype in _NARROW else "int32" if dtype == "bool" else None
        if wide is None:
            return node
        return tirx.Cast(dtype, type(node)(tirx.Cast(wide, node.a), tirx.Cast(wide, node.b)))

    return structural_map(expr, [(tvm.ir.Call, on_call), ((tirx.Max, tirx.Min, tirx.Mod), on_binary)])


def _exp(x: Expr) -> Expr:
    return tirx.call_pure_extern("float32", "__expf", x)


def _sigmoid(x: Expr) -> Expr:
    one = tirx.const(1, "float32")
    return tirx.call_pure_extern("float32", "__fdividef", one, one + _exp(tirx.const(0, "float32") - x))


def _tanh(x: Expr) -> Expr | None:
    if node_count(x) > _SHORT:
        return None  # it stands there three times
    two = tirx.const(2, "float32")
    is_small = tirx.abs(x) < tirx.const(0.01, "float32")  # the difference has no digits there
    return tirx.Select(is_small, x, two * _sigmoid(two * x) - tirx.const(1, "float32"))


_SHORT = 24
"""Nodes of an expression that may be written several times: the CUDA compiler computes it once."""

_QUICK: dict[str, Callable[[Expr], Expr | None]] = {
    "tirx.exp": _exp,
    "tirx.sigmoid": _sigmoid,
    "tirx.tanh": _tanh,
}


def accumulator_type(dtype: str) -> str:
    """The type that terms of a type are added and multiplied in."""
    return "float32" if dtype in _NARROW else dtype


def _type(value: Expr) -> str:
    return str(getattr(value.ty, "dtype", ""))
