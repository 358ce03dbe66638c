"""Kernels of stock ops with NumPy's results: for NaN, for truth values, for extremes, and without warnings.

Stock ``relu``, ``clip``, ``maximum`` and ``minimum`` are made of max and min, which take the other operand where one is
NaN: whether a NaN is seen would depend on whether the op was fused behind a product. Comparisons and selects keep it.
Stock ``sign`` gives 0 for it, and casts to integers are undefined where the integer is too large (`tir.math.casts`).
A quotient by the constant 0 has no stock kernel, since TVM's arithmetic refuses to divide by a number that is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import relax, te, tirx, topi

from ...tir.math.casts import cast, truncated
from ...tir.math.extremes import index_wins, maximum, minimum
from ..ir.blocks import is_one
from ..ir.rewriting import is_tensor_constant
from . import scatter_kernels

Legalize = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]


# Comparisons, the larger and smaller, and sums and products of truth values, which stock TVM takes for floats.
#
# TVM's code generator for LLVM knows no comparison of booleans: it writes that of floats, which LLVM refuses, in the
# middle of a build. As bytes they compare as numpy has it, false before true, and LLVM makes one instruction of it.
# Their sum is the larger of two, their product the smaller.

_COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
_EXTREMES = {"maximum": "maximum", "minimum": "minimum", "add": "maximum", "multiply": "minimum"}
"""Equivalent of an op on numbers 0 and 1."""


def truth_legalizations(others: dict[str, Legalize]) -> dict[str, Legalize]:
    """Legalizations by op, for `relax.transform.LegalizeOps`; other types are left to `others`, or to stock."""
    found = {}
    for name in (*_COMPARISONS, *_EXTREMES):
        op = f"relax.{name}"
        found[op] = _truth_legalization(name, others.get(op) or tvm.ir.Op.get(op).get_attr("FLegalize"))
    return found


def _truth_legalization(name: str, otherwise: Legalize) -> Legalize:
    compute = getattr(topi, _EXTREMES.get(name, name))

    def kernel(a: te.Tensor, b: te.Tensor) -> te.Tensor:
        result = compute(topi.cast(a, "int8"), topi.cast(b, "int8"))
        return topi.cast(result, "bool") if name in _EXTREMES else result

    def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        if not all(map(_is_known_truth, call.args)):
            return otherwise(builder, call)
        return builder.call_te(kernel, *call.args, primfunc_name_hint=name)

    return legalize


def _is_known_truth(arg: relax.Expr) -> bool:
    ty = arg.ty
    return isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr) and str(ty.dtype) == "bool"


# ``take`` whose indices are known to be in bounds, without a check and without a warning about that.
#
# Stock TVM warns at every compilation of one; importers ask for it where they have made the indices themselves.

_INJECTIVE = 2
"""The pattern of ops that FuseOps joins with elementwise ones; it cannot see that of an op that reads its indices."""


def take_legalizations() -> dict[str, Legalize]:
    """Legalizations by op, for `relax.transform.LegalizeOps`."""
    stock = tvm.ir.Op.get("relax.take").get_attr("FLegalize")

    def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        data, index = call.args
        is_known = isinstance(index.ty, relax.TensorType) and min(int(data.ty.ndim), int(index.ty.ndim)) >= 0
        if str(call.attrs.mode) != "fast" or call.attrs.axis is None or not is_known:
            return stock(builder, call)
        axis = int(call.attrs.axis) % int(data.ty.ndim)
        return builder.call_te(
            _take, data, index, axis, primfunc_name_hint="take", primfunc_attrs={"op_pattern": _INJECTIVE}
        )

    return {"relax.take": legalize}


def _take(x: te.Tensor, index: te.Tensor, axis: int) -> te.Tensor:
    rank = len(index.shape)

    def element(*place: tirx.Var) -> tirx.PrimExpr:
        return x(*place[:axis], index(*place[axis : axis + rank]), *place[axis + rank :])

    return te.compute([*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]], element, name="take")


# Largest and smallest elements of floats as numpy defines them, infinities and NaN included.
#
# Stock ``max`` and ``min`` start from the largest finite numbers: the largest of nothing but -inf would not be -inf,
# and no element's index would be that of it. And they drop NaN, or not, as it happens to stand: here it is the
# result, and its index, the first one's, that of the largest and of the smallest element.

_OPS = {"relax.max": True, "relax.min": False, "relax.argmax": True, "relax.argmin": False}


def extreme_legalizations() -> dict[str, Legalize]:
    """Legalizations by op, for `relax.transform.LegalizeOps`; integers, and bfloat16, are left to stock."""
    return {name: _extreme_legalization(name, largest) for name, largest in _OPS.items()}


def _extreme_legalization(name: str, largest: bool) -> Legalize:
    stock = tvm.ir.Op.get(name).get_attr("FLegalize")
    short = name.removeprefix("relax.")

    def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        data, axis = call.args[0], call.attrs.axis
        is_float = str(data.ty.dtype).startswith("float")
        if not is_float or int(data.ty.ndim) < 0 or (axis is None and short.startswith("arg")):
            return stock(builder, call)
        rank = int(data.ty.ndim)
        given = range(rank) if axis is None else [axis] if isinstance(axis, int) else axis
        axes = sorted({int(each) % rank for each in given})
        kernel = _index if short.startswith("arg") else _extreme
        return builder.call_te(kernel, data, axes, bool(call.attrs.keepdims), largest, primfunc_name_hint=short)

    return legalize


def _extreme(x: te.Tensor, axes: Sequence[int], keepdims: bool, largest: bool) -> te.Tensor:
    def combine(one: tirx.PrimExpr, other: tirx.PrimExpr) -> tirx.PrimExpr:
        return maximum(one, other) if largest else minimum(one, other)

    reducer = te.comm_reducer(combine, lambda kind: _worst(str(kind), largest), name="extreme")
    reduced = {axis: te.reduce_axis((0, x.shape[axis]), name=f"r{axis}") for axis in axes}

    def element(*place: tirx.Var) -> tirx.PrimExpr:
        return reducer(x(*_source(place, reduced, len(x.shape), keepdims)), axis=list(reduced.values()))

    return te.compute(_reduced_shape(x.shape, axes, keepdims), element, name="extreme")


def _index(x: te.Tensor, axes: Sequence[int], keepdims: bool, largest: bool) -> te.Tensor:
    """The first of the largest elements; any real element beats the start, whose index is beyond all of them."""
    (axis,) = axes

    def better(one: Sequence[Any], other: Sequence[Any]) -> tuple[Any, Any]:
        wins = index_wins(one, other, largest, last=False)
        return tirx.Select(wins, one[0], other[0]), tirx.Select(wins, one[1], other[1])

    def worst(index_type: str, value_type: str) -> tuple[Any, Any]:
        return tirx.max_value(index_type), _worst(str(value_type), largest)

    reducer = te.comm_reducer(better, worst, name="index_of_extreme")
    along = te.reduce_axis((0, x.shape[axis]), name="along")

    def pair(*place: tirx.Var) -> Any:
        source = _source(place, {axis: along}, len(x.shape), keepdims)
        return reducer((tirx.Cast("int64", along), x(*source)), axis=along)

    return te.compute(_reduced_shape(x.shape, axes, keepdims), pair, name="index_of_extreme")[0]


def _worst(dtype: str, largest: bool) -> tirx.PrimExpr:
    return tirx.const(float("-inf") if largest else float("inf"), dtype)


def _reduced_shape(shape: Sequence[Any], axes: Sequence[int], keepdims: bool) -> list[Any]:
    return [1 if axis in axes else extent for axis, extent in enumerate(shape) if keepdims or axis not in axes]


def _source(place: Sequence[Any], reduced: dict[int, Any], rank: int, keepdims: bool) -> list[Any]:
    kept = iter([each for axis, each in enumerate(place) if not (keepdims and axis in reduced)])
    return [reduced[axis] if axis in reduced else next(kept) for axis in range(rank)]


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
        **extreme_legalizations(),
        **take_legalizations(),
        **scatter_kernels.legalizations(),
    }
