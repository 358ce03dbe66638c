"""Kernels of stock ops that keep what is not a number, as numpy and the encoded kernels do.

Stock ``relu`` and ``clip`` are made of max and min, which take the other operand where one is NaN: whether a NaN is
seen would depend on whether the op was fused behind a product. Comparisons and selects keep it, at the same cost.
"""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import relax, te, tirx

from . import extreme_kernels, scatter_kernels, take_kernels

Legalize = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]


def _relu(x: te.Tensor) -> te.Tensor:
    zero = tirx.const(0, x.dtype)
    return te.compute(x.shape, lambda *i: tirx.Select(x(*i) < zero, zero, x(*i)), name="compute")


def _clip(x: te.Tensor, low: tirx.PrimExpr, high: tirx.PrimExpr) -> te.Tensor:
    def held(*i: tirx.Var) -> tirx.PrimExpr:
        value, least, most = x(*i), low.astype(x.dtype), high.astype(x.dtype)
        below = tirx.Select(value > most, most, value)
        return tirx.Select(below < least, least, below)

    return te.compute(x.shape, held, name="compute")


def _of_floats(stock: Legalize, kernel: Callable[..., te.Tensor], name: str) -> Legalize:
    def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        if not str(call.ty.dtype).startswith(("float", "bfloat")):
            return stock(builder, call)
        return builder.call_te(kernel, *call.args, primfunc_name_hint=name)

    return legalize


def legalizations() -> dict[str, Legalize]:
    """By op, for `relax.transform.LegalizeOps`."""
    stock = {name: tvm.ir.Op.get(f"relax.{name}").get_attr("FLegalize") for name in ("nn.relu", "clip")}
    return {
        "relax.nn.relu": _of_floats(stock["nn.relu"], _relu, "relu"),
        "relax.clip": _of_floats(stock["clip"], _clip, "tir_clip"),
        **extreme_kernels.legalizations(),
        **take_kernels.legalizations(),
        **scatter_kernels.legalizations(),
    }
