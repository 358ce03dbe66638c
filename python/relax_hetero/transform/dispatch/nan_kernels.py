"""Kernels of stock ops that keep what is not a number, as numpy and the encoded kernels do.

Stock ``relu``, ``clip``, ``maximum`` and ``minimum`` are made of max and min, which take the other operand where one is
NaN: whether a NaN is seen would depend on whether the op was fused behind a product. Comparisons and selects keep it.
Stock ``sign`` gives 0 for it, and casts to integers are undefined where the integer is too large (`tir.math.casts`).
"""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import relax, te, tirx, topi

from ...tir.math.casts import truncated
from ...tir.math.extremes import maximum, minimum
from ..ir.blocks import is_one
from . import extreme_kernels, scatter_kernels, take_kernels

Legalize = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]


_STOCK: dict[str, Legalize] = {
    name: tvm.ir.Op.get(f"relax.{name}").get_attr("FLegalize")
    for name in ("nn.relu", "clip", "maximum", "minimum", "sign", "astype")
}


def _relu(x: te.Tensor) -> te.Tensor:
    zero = tirx.const(0, x.dtype)
    return te.compute(x.shape, lambda *i: tirx.Select(x(*i) < zero, zero, x(*i)), name="compute")


def _clip(x: te.Tensor, low: tirx.PrimExpr, high: tirx.PrimExpr) -> te.Tensor:
    def held(*i: tirx.Var) -> tirx.PrimExpr:
        value, least, most = x(*i), low.astype(x.dtype), high.astype(x.dtype)
        below = tirx.Select(value > most, most, value)
        return tirx.Select(below < least, least, below)

    return te.compute(x.shape, held, name="compute")


def _sign(x: te.Tensor) -> te.Tensor:
    one, zero, minus_one = (tirx.const(number, x.dtype) for number in (1, 0, -1))

    def element(*i: tirx.Var) -> tirx.PrimExpr:
        value = x(*i)
        other = tirx.Select(value < zero, minus_one, tirx.Select(tirx.EQ(value, zero), zero, value))
        return tirx.Select(value > zero, one, other)

    return te.compute(x.shape, element, name="compute")


def _of_two(extreme: Callable[..., tirx.PrimExpr]) -> Callable[..., te.Tensor]:
    def kernel(a: te.Tensor, b: te.Tensor) -> te.Tensor:
        def element(*i: tirx.Var) -> tirx.PrimExpr:
            return extreme(*(x(*_read_at(i, x)) for x in (a, b)))

        return te.compute(topi.add(a, b).shape, element, name="compute")

    return kernel


def _read_at(place: tuple[tirx.Var, ...], x: te.Tensor) -> list[tirx.PrimExpr]:
    """Where an operand that broadcasts is read for an element of the result."""
    own = place[len(place) - len(x.shape) :]
    return [tirx.const(0, "int64") if is_one(extent) else i for i, extent in zip(own, x.shape, strict=True)]


def _cast(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    source, dtype = str(call.args[0].ty.dtype), str(call.attrs.dtype)
    if not source.startswith("float") or not dtype.startswith(("int", "uint")):
        return _STOCK["astype"](builder, call)

    def kernel(x: te.Tensor) -> te.Tensor:
        return te.compute(x.shape, lambda *i: truncated(x(*i), dtype), name="compute")

    return builder.call_te(kernel, call.args[0], primfunc_name_hint="cast")


def _of_floats(stock: Legalize, kernel: Callable[..., te.Tensor], name: str) -> Legalize:
    def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        operands = [arg for arg in call.args if isinstance(arg.ty, relax.TensorType)]
        known = all(isinstance(arg.ty.shape, relax.ShapeExpr) for arg in operands)
        expected = 1 if name == "tir_clip" else len(call.args)
        if not known or len(operands) < expected or not str(call.ty.dtype).startswith(("float", "bfloat")):
            return stock(builder, call)
        return builder.call_te(kernel, *call.args, primfunc_name_hint=name)

    return legalize


def legalizations() -> dict[str, Legalize]:
    """By op, for `relax.transform.LegalizeOps`."""
    return {
        "relax.nn.relu": _of_floats(_STOCK["nn.relu"], _relu, "relu"),
        "relax.clip": _of_floats(_STOCK["clip"], _clip, "tir_clip"),
        "relax.maximum": _of_floats(_STOCK["maximum"], _of_two(maximum), "maximum"),
        "relax.minimum": _of_floats(_STOCK["minimum"], _of_two(minimum), "minimum"),
        "relax.sign": _of_floats(_STOCK["sign"], _sign, "tir_sign"),
        "relax.astype": _cast,
        **extreme_kernels.legalizations(),
        **take_kernels.legalizations(),
        **scatter_kernels.legalizations(),
    }
