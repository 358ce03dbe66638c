"""Largest and smallest elements of floats as numpy defines them, infinities and NaN included.

Stock ``max`` and ``min`` start from the largest finite numbers: the largest of nothing but -inf would not be -inf, and
no element's index would be that of it. And they drop NaN, or not, as it happens to stand: here it is the result, and
its index, the first one's, that of the largest and of the smallest element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import relax, te, tirx

from ...tir.math.extremes import index_wins, maximum, minimum

Legalize = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]

_OPS = {"relax.max": True, "relax.min": False, "relax.argmax": True, "relax.argmin": False}


def legalizations() -> dict[str, Legalize]:
    """Legalizations by op, for `relax.transform.LegalizeOps`; integers, and bfloat16, are left to stock."""
    return {name: _legalization(name, largest) for name, largest in _OPS.items()}


def _legalization(name: str, largest: bool) -> Legalize:
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
