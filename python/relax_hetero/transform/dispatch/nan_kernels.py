"""Kernels of stock ops that keep what is not a number, as numpy and the encoded kernels do.

Stock ``relu``, ``clip``, ``maximum`` and ``minimum`` are made of max and min, which take the other operand where one is
NaN: whether a NaN is seen would depend on whether the op was fused behind a product. Comparisons and selects keep it.
Stock ``sign`` gives 0 for it, and casts to integers are undefined where the integer is too large (`tir.math.casts`).
A quotient by the constant 0 has no stock kernel, since TVM's arithmetic refuses to divide by a number that is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import tvm
from tvm import relax, te, tirx, topi

from ...tir.math.casts import cast, truncated
from ...tir.math.extremes import maximum, minimum
from ..ir.blocks import is_one
from ..ir.rewriting import is_tensor_constant
from . import extreme_kernels, scatter_kernels, take_kernels

Legalize = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]


_STOCK: dict[str, Legalize] = {
    name: tvm.ir.Op.get(f"relax.{name}").get_attr("FLegalize")
    for name in ("nn.relu", "clip", "maximum", "minimum", "sign", "astype", "divide")
}


def _relu(x: te.Tensor) -> te.Tensor:
    zero = tirx.const(0, x.dtype)
    return te.compute(x.shape, lambda *i: tirx.Select(x(*i) < zero, zero, x(*i)), name="compute")


def _clip(x: te.Tensor, low: tirx.PrimExpr, high: tirx.PrimExpr) -> te.Tensor:
    def held(*i: tirx.Var) -> tirx.PrimExpr:
        value, minimum, maximum = x(*i), low.astype(x.dtype), high.astype(x.dtype)
        below = tirx.Select(value > maximum, maximum, value)
        return tirx.Select(below < minimum, minimum, below)

    return te.compute(x.shape, held, name="compute")


def _sign(x: te.Tensor) -> te.Tensor:
    one, zero, minus_one = (tirx.const(number, x.dtype) for number in (1, 0, -1))

    def element(*i: tirx.Var) -> tirx.PrimExpr:
        value = x(*i)
        other = tirx.Select(value < zero, minus_one, tirx.Select(tirx.EQ(value, zero), zero, value))
        return tirx.Select(value > zero, one, other)

    return te.compute(x.shape, element, name="compute")


def _of_two(name: str, extreme: Callable[..., tirx.PrimExpr]) -> Legalize:
    def kernel(a: te.Tensor | tirx.PrimExpr, b: te.Tensor | tirx.PrimExpr) -> te.Tensor:
        tensors = [x for x in (a, b) if isinstance(x, te.Tensor)]
        shape = topi.add(*tensors).shape if len(tensors) > 1 else tensors[0].shape

        def element(*i: tirx.Var) -> tirx.PrimExpr:
            return extreme(*(x(*_read_at(i, x)) if isinstance(x, te.Tensor) else x for x in (a, b)))

        return te.compute(shape, element, name="compute")

    def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        if not _is_of_known_floats(call):
            return _STOCK[name](builder, call)
        a, b = call.args
        number = _as_number(b)
        a, b = (_as_number(a), b) if number is b else (a, number)
        return builder.call_te(kernel, a, b, primfunc_name_hint=name)

    return legalize


def _as_number(arg: relax.Expr) -> relax.Expr:
    """A constant of one number as that number, which kernels compare with in an instruction; others as they are."""
    if not is_tensor_constant(arg) or arg.ty.ndim != 0:
        return arg
    return tirx.FloatImm(str(arg.ty.dtype), float(arg.value.numpy()[()]))


def _is_of_known_floats(call: relax.Call) -> bool:
    types = [arg.ty for arg in call.args]
    known = all(isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr) for ty in types)
    return known and str(call.ty.dtype).startswith(("float", "bfloat"))


def _read_at(place: tuple[tirx.Var, ...], x: te.Tensor) -> list[tirx.PrimExpr]:
    """Where an operand that broadcasts is read for an element of the result."""
    own = place[len(place) - len(x.shape) :]
    return [tirx.const(0, "int64") if is_one(extent) else i for i, extent in zip(own, x.shape, strict=True)]


def _cast(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    source, dtype = str(call.args[0].ty.dtype), str(call.attrs.dtype)
    if not source.startswith(("float", "bfloat")) or not dtype.startswith(("int", "uint")):
        return _STOCK["astype"](builder, call)
    is_bfloat16 = source == "bfloat16"

    def kernel(x: te.Tensor) -> te.Tensor:
        def element(*i: tirx.Var) -> tirx.PrimExpr:
            return truncated(cast(x(*i), "float32") if is_bfloat16 else x(*i), dtype)

        return te.compute(x.shape, element, name="compute")

    return builder.call_te(kernel, call.args[0], primfunc_name_hint="cast")


def _divide(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """A quotient by the constant 0 is a product with an infinity of its sign: infinities, and NaN for 0 by 0."""
    number = _as_number(call.args[1]) if _is_of_known_floats(call) else call.args[1]
    if not isinstance(number, tirx.FloatImm) or float(number) != 0:
        return _STOCK["divide"](builder, call)
    infinity = tirx.infinity(str(call.ty.dtype))
    factor = infinity if math.copysign(1.0, float(number)) > 0 else -infinity
    return builder.call_te(topi.multiply, call.args[0], factor, primfunc_name_hint="divide")


def _of_floats(stock: Legalize, kernel: Callable[..., te.Tensor], name: str) -> Legalize:
    def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        if not str(call.ty.dtype).startswith(("float", "bfloat")):
            return stock(builder, call)
        return builder.call_te(kernel, *call.args, primfunc_name_hint=name)

    return legalize


def legalizations() -> dict[str, Legalize]:
    """Legalizations by op, for `relax.transform.LegalizeOps`."""
    return {
        "relax.nn.relu": _of_floats(_STOCK["nn.relu"], _relu, "relu"),
        "relax.clip": _of_floats(_STOCK["clip"], _clip, "tir_clip"),
        "relax.maximum": _of_two("maximum", maximum),
        "relax.minimum": _of_two("minimum", minimum),
        "relax.sign": _of_floats(_STOCK["sign"], _sign, "tir_sign"),
        "relax.astype": _cast,
        "relax.divide": _divide,
        **extreme_kernels.legalizations(),
        **take_kernels.legalizations(),
        **scatter_kernels.legalizations(),
    }
