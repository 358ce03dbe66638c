"""Kernels of stock ops with NumPy's results: for NaN, for booleans, for extremes, and without warnings.

Stock ``relu``, ``clip``, ``maximum`` and ``minimum`` consist of max and min, which return the other operand if one is
NaN: a NaN would survive or not depending on fusion into a product. Comparisons and selects keep it.
Stock ``sign`` gives 0 for it, and casts to integers are undefined where the integer is too large (`tir.math.casts`).
A quotient by the constant 0 lacks a stock kernel, since TVM's arithmetic refuses to divide by the number 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tvm
from tvm import relax, te, tirx, topi

from ...tir.math.casts import cast, truncated
from ...tir.math.extremes import index_wins, maximum, minimum, reduced_shape, source_index
from ..ir.blocks import is_one
from ..ir.rewriting import is_tensor_constant
from . import scatter_kernels, sort_kernels
from .sort_kernels import Legalize

# Comparisons, maximum and minimum, sums and products of booleans.
#
# TVM's code generator for LLVM lacks comparisons of booleans: it emits those of floats, which LLVM refuses in the
# middle of a build. As bytes they compare as in numpy, false before true, and LLVM makes one instruction of it.
# Their sum is the maximum, their product the minimum.

_COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
_EXTREMES = {"maximum": "maximum", "minimum": "minimum", "add": "maximum", "multiply": "minimum"}
"""Equivalent of an op on the numbers 0 and 1."""


def boolean_legalizations(others: dict[str, Legalize]) -> dict[str, Legalize]:
    """Legalizations by op, for `relax.transform.LegalizeOps`; other types use those of `others`, else TVM's."""
    result = {}
    for name in (*_COMPARISONS, *_EXTREMES):
        op = f"relax.{name}"
        result[op] = _boolean_legalization(name, others.get(op) or tvm.ir.Op.get(op).get_attr("FLegalize"))
    return result


def _boolean_legalization(name: str, otherwise: Legalize) -> Legalize:
    compute = getattr(topi, _EXTREMES.get(name, name))

    def kernel(a: te.Tensor, b: te.Tensor) -> te.Tensor:
        result = compute(topi.cast(a, "int8"), topi.cast(b, "int8"))
        return topi.cast(result, "bool") if name in _EXTREMES else result

    def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        if not all(map(_is_boolean_of_known_shape, call.args)):
            return otherwise(builder, call)
        return builder.call_te(kernel, *call.args, primfunc_name_hint=name)

    return legalize


def _is_boolean_of_known_shape(arg: relax.Expr) -> bool:
    ty = arg.ty
    return isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr) and str(ty.dtype) == "bool"


# ``take`` of indices that are known to be in bounds, without a check and without a warning about that.
#
# Stock TVM warns at every compilation of such a ``take``; importers use it for indices that they compute themselves.

_INJECTIVE = 2
"""TVM's number for the pattern of ops that FuseOps joins with elementwise ones; it cannot infer that of a gather."""


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

    def element(*indices: tirx.Var) -> tirx.PrimExpr:
        at = index(*indices[axis : axis + rank])
        # A constant takes the place of a scalar, and fusion that of a dimension, whose type is int64.
        return x(*indices[:axis], at if rank else at.astype("int64"), *indices[axis + rank :])

    return te.compute([*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]], element, name="take")


# Largest and smallest elements of floats as numpy defines them, infinities and NaN included.
#
# Stock ``max`` and ``min`` start from finite numbers: the maximum of elements that are all -inf would not be -inf, and
# its index would be invalid. They drop NaN or not, depending on its position: here NaN is the result, and the index of
# the first NaN is that of the largest and of the smallest element.

# The largest element with its index, a top-k of one, is the same reduction.

_OPS = {"relax.max": True, "relax.min": False, "relax.argmax": True, "relax.argmin": False}


def extreme_legalizations(others: dict[str, Legalize]) -> dict[str, Legalize]:
    """Legalizations by op, for `relax.transform.LegalizeOps`; integers, and bfloat16, use TVM's, and top-k `others`."""
    extremes = {name: _extreme_legalization(name, largest) for name, largest in _OPS.items()}
    return {**extremes, "relax.topk": _top_one_legalization(others["relax.topk"])}


def _extreme_legalization(name: str, largest: bool) -> Legalize:
    stock = tvm.ir.Op.get(name).get_attr("FLegalize")
    short = name.removeprefix("relax.")

    def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        data, axis = call.args[0], call.attrs.axis
        is_float = str(data.ty.dtype).startswith("float")
        if not is_float or int(data.ty.ndim) < 0 or (axis is None and short.startswith("arg")):
            return stock(builder, call)
        rank = int(data.ty.ndim)
        dims = range(rank) if axis is None else [axis] if isinstance(axis, int) else axis
        axes = sorted({int(dim) % rank for dim in dims})
        keepdims = bool(call.attrs.keepdims)
        if not short.startswith("arg"):
            return builder.call_te(_extreme, data, axes, keepdims, largest, primfunc_name_hint=short)
        locate = _locate_by_blocks if _has_blocks(data.ty, axes[0]) else _locate
        return builder.call_te(
            lambda x: locate(x, axes[0], keepdims, largest, "int64")[0], data, primfunc_name_hint=short
        )

    return legalize


def _top_one_legalization(otherwise: Legalize) -> Legalize:
    def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        data, attrs = call.args[0], call.attrs
        is_float = str(data.ty.dtype).startswith("float")
        is_known = isinstance(data.ty.shape, relax.ShapeExpr)
        if int(attrs.k) != 1 or not attrs.largest or str(attrs.ret_type) != "both" or not (is_float and is_known):
            return otherwise(builder, call)
        axis = int(attrs.axis) % int(data.ty.ndim)
        locate = _locate_by_blocks if _has_blocks(data.ty, axis) else _locate

        def kernel(x: te.Tensor) -> list[te.Tensor]:
            index, value = locate(x, axis, True, True, str(attrs.dtype))
            return [value, index]

        return builder.call_te(kernel, data, primfunc_name_hint="top_one")

    return legalize


def _extreme(x: te.Tensor, axes: Sequence[int], keepdims: bool, largest: bool) -> te.Tensor:
    def combine(one: tirx.PrimExpr, other: tirx.PrimExpr) -> tirx.PrimExpr:
        return maximum(one, other) if largest else minimum(one, other)

    reducer = te.comm_reducer(combine, lambda kind: _start_value(str(kind), largest), name="extreme")
    reduced = {axis: te.reduce_axis((0, x.shape[axis]), name=f"r{axis}") for axis in axes}

    def element(*indices: tirx.Var) -> tirx.PrimExpr:
        return reducer(x(*source_index(indices, reduced, len(x.shape), keepdims)), axis=list(reduced.values()))

    return te.compute(reduced_shape(x.shape, axes, keepdims), element, name="extreme")


_Located: TypeAlias = "tuple[te.Tensor, te.Tensor]"  # index and value of an extreme element


def _locate(x: te.Tensor, axis: int, keepdims: bool, largest: bool, index_type: str) -> _Located:
    """Locate the first largest (or smallest) element; any beats the start, whose index is past the end."""

    def better(one: Sequence[Any], other: Sequence[Any]) -> tuple[Any, Any]:
        wins = index_wins(one, other, largest, last=False)
        return tirx.Select(wins, one[0], other[0]), tirx.Select(wins, one[1], other[1])

    def start(index_type: str, value_type: str) -> tuple[Any, Any]:
        return tirx.max_value(index_type), _start_value(str(value_type), largest)

    reducer = te.comm_reducer(better, start, name="index_of_extreme")
    along = te.reduce_axis((0, x.shape[axis]), name="along")

    def pair(*indices: tirx.Var) -> Any:
        source = source_index(indices, {axis: along}, len(x.shape), keepdims)
        return reducer((tirx.Cast(index_type, along), x(*source)), axis=along)

    return tuple(te.compute(reduced_shape(x.shape, [axis], keepdims), pair, name="index_of_extreme"))


# On CPUs, a search along rows is of blocks: only their extremes, which are vectors' work, read all elements. The first
# block with the extreme has the element.

_MIN_BLOCK, _MAX_BLOCK, _MIN_BLOCKS = 16, 256, 4
"""Minimum and maximum elements of a block, and minimum number of blocks."""


def _has_blocks(ty: relax.TensorType, axis: int) -> bool:
    """Return whether a search along an axis is of blocks."""
    extent = ty.shape.values[-1] if isinstance(ty.shape, relax.ShapeExpr) else None
    on_gpu = ty.vdevice is not None and "cpu" not in ty.vdevice.target.keys
    if on_gpu or axis != int(ty.ndim) - 1 or not isinstance(extent, tirx.IntImm):
        return False
    size = math.gcd(int(extent), _MAX_BLOCK)
    return size >= _MIN_BLOCK and int(extent) >= size * _MIN_BLOCKS


def _locate_by_blocks(x: te.Tensor, axis: int, keepdims: bool, largest: bool, index_type: str) -> _Located:
    """`_locate` along the last axis."""
    *outer, extent = x.shape
    size = math.gcd(int(extent), _MAX_BLOCK)
    blocks = te.compute([*outer, extent // size, size], lambda *i: x(*i[:axis], i[-2] * size + i[-1]), "blocks")
    block, _ = _locate(_extreme(blocks, [axis + 1], False, largest), axis, False, largest, index_type)
    chosen = te.compute([*outer, size], lambda *i: x(*i[:-1], block(*i[:-1]) * size + i[-1]), "chosen")
    column, value = _locate(chosen, axis, False, largest, index_type)
    shape = [*outer, 1] if keepdims else outer
    index = te.compute(shape, lambda *i: block(*i[:axis]) * size + column(*i[:axis]), "index_of_extreme")
    return index, te.compute(shape, lambda *i: value(*i[:axis]), "extreme")


def _start_value(dtype: str, largest: bool) -> tirx.PrimExpr:
    return tirx.const(float("-inf") if largest else float("inf"), dtype)


_STOCK: dict[str, Legalize] = {
    name: tvm.ir.Op.get(f"relax.{name}").get_attr("FLegalize")
    for name in ("nn.relu", "clip", "maximum", "minimum", "sign", "astype", "divide")
}


def _relu(x: te.Tensor) -> te.Tensor:
    zero = tirx.const(0, x.dtype)
    return te.compute(x.shape, lambda *i: tirx.Select(x(*i) < zero, zero, x(*i)), name="compute")


def _clip(x: te.Tensor, low: tirx.PrimExpr, high: tirx.PrimExpr) -> te.Tensor:
    def element(*i: tirx.Var) -> tirx.PrimExpr:
        value, minimum, maximum = x(*i), low.astype(x.dtype), high.astype(x.dtype)
        below = tirx.Select(value > maximum, maximum, value)
        return tirx.Select(below < minimum, minimum, below)

    return te.compute(x.shape, element, name="compute")


def _sign(x: te.Tensor) -> te.Tensor:
    one, zero, minus_one = (tirx.const(number, x.dtype) for number in (1, 0, -1))

    def element(*i: tirx.Var) -> tirx.PrimExpr:
        value = x(*i)
        other = tirx.Select(value < zero, minus_one, tirx.Select(tirx.EQ(value, zero), zero, value))
        return tirx.Select(value > zero, one, other)

    return te.compute(x.shape, element, name="compute")


def _binary_extreme(name: str, extreme: Callable[..., tirx.PrimExpr]) -> Legalize:
    def kernel(a: te.Tensor | tirx.PrimExpr, b: te.Tensor | tirx.PrimExpr) -> te.Tensor:
        tensors = [x for x in (a, b) if isinstance(x, te.Tensor)]
        shape = topi.add(*tensors).shape if len(tensors) > 1 else tensors[0].shape

        def element(*i: tirx.Var) -> tirx.PrimExpr:
            return extreme(*(x(*_operand_indices(i, x)) if isinstance(x, te.Tensor) else x for x in (a, b)))

        return te.compute(shape, element, name="compute")

    def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        if not _has_known_float_operands(call):
            return _STOCK[name](builder, call)
        a, b = call.args
        number = _as_number(b)
        a, b = (_as_number(a), b) if number is b else (a, number)
        return builder.call_te(kernel, a, b, primfunc_name_hint=name)

    return legalize


def _as_number(arg: relax.Expr) -> relax.Expr:
    """A scalar constant as a number, which kernels use as an immediate operand; other arguments unchanged."""
    if not is_tensor_constant(arg) or arg.ty.ndim != 0:
        return arg
    return tirx.FloatImm(str(arg.ty.dtype), float(arg.value.numpy()[()]))


def _has_known_float_operands(call: relax.Call) -> bool:
    types = [arg.ty for arg in call.args]
    known = all(isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr) for ty in types)
    return known and str(call.ty.dtype).startswith(("float", "bfloat"))


def _operand_indices(indices: tuple[tirx.Var, ...], x: te.Tensor) -> list[tirx.PrimExpr]:
    """Indices of an operand, which may broadcast, for an element of the result."""
    trailing = indices[len(indices) - len(x.shape) :]
    return [tirx.const(0, "int64") if is_one(extent) else i for i, extent in zip(trailing, x.shape, strict=True)]


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
    """Quotient by the constant 0 as a product with an infinity of its sign: infinities, and NaN for 0 by 0."""
    number = _as_number(call.args[1]) if _has_known_float_operands(call) else call.args[1]
    if not isinstance(number, tirx.FloatImm) or float(number) != 0:
        return _STOCK["divide"](builder, call)
    infinity = tirx.infinity(str(call.ty.dtype))
    factor = infinity if math.copysign(1.0, float(number)) > 0 else -infinity
    return builder.call_te(topi.multiply, call.args[0], factor, primfunc_name_hint="divide")


def _float_legalization(stock: Legalize, kernel: Callable[..., te.Tensor], name: str) -> Legalize:
    def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        if not str(call.ty.dtype).startswith(("float", "bfloat")):
            return stock(builder, call)
        return builder.call_te(kernel, *call.args, primfunc_name_hint=name)

    return legalize


def legalizations() -> dict[str, Legalize]:
    """Legalizations by op, for `relax.transform.LegalizeOps`."""
    return {
        "relax.nn.relu": _float_legalization(_STOCK["nn.relu"], _relu, "relu"),
        "relax.clip": _float_legalization(_STOCK["clip"], _clip, "tir_clip"),
        "relax.maximum": _binary_extreme("maximum", maximum),
        "relax.minimum": _binary_extreme("minimum", minimum),
        "relax.sign": _float_legalization(_STOCK["sign"], _sign, "tir_sign"),
        "relax.astype": _cast,
        "relax.divide": _divide,
        **extreme_legalizations(sort_kernels.legalizations()),
        **take_legalizations(),
        **scatter_kernels.legalizations(),
    }
