"""Reductions, ArgMax and ArgMin."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax, te, tirx

from ...tir.math.extremes import index_wins, reduced_shape, source_index
from .elementwise import HALF, cast, widened
from .node import Node, Position, const, dtype_of, is_float
from .required_sizes import any_of, as_expr, equal, shown
from .run_time.run_time_axes import axes_input, with_named_axes_last, without_named_axes
from .table import converts

Reduce = Callable[[Node, relax.Expr, list[int], bool], relax.Expr]


def _axes(node: Node, rank: int) -> list[int] | None:
    """The non-negative axes to reduce, empty for a node that reduces nothing; None if they are dynamic."""
    axes = node.attributes.get("axes")
    if node.has(1):
        array = node.constant(1)
        if array is not None:
            axes = [int(axis) for axis in array.reshape(-1)]
        elif node.shape(node.tensor(1)) == [0]:
            axes = []
        else:
            return None
    if axes:
        return sorted({node.axis(int(axis), rank) for axis in axes})
    return [] if node.attribute("noop_with_empty_axes", 0) else list(range(rank))


def _register(op_type: str, reduce: Reduce) -> None:
    def convert(node: Node) -> relax.Expr:
        data = node.tensor(0)
        rank, keepdims = node.rank(data), bool(node.attribute("keepdims", 1))
        axes = _axes(node, rank)
        if axes is not None:
            return reduce(node, data, axes, keepdims)
        named, count = axes_input(node, 1, rank)
        if rank == 0:
            return reduce(node, data, [], keepdims)
        result = reduce(node, with_named_axes_last(node, data, named, count), list(range(rank, 2 * rank)), False)
        return result if keepdims else without_named_axes(node, result, named, count)

    converts(op_type)(convert)


def _empty_result(node: Node, data: relax.Expr, axes: list[int], keepdims: bool, value: Any) -> relax.Expr | None:
    """The result of an empty reduction, else None; a kernel without iterations would not write its result."""
    dims = node.shape(data) if data.ty.shape is not None else []
    if not any(isinstance(dims[axis], int) and dims[axis] == 0 for axis in axes if dims):
        return None
    return node.filled(reduced_shape(dims, axes, keepdims), value, dtype_of(data))


def _require_elements(node: Node, data: relax.Expr, axis: int, message: str) -> None:
    """Require that a nonempty result has elements to reduce."""
    dims = node.shape(data) if data.ty.shape is not None else []
    empty_axes = [equal(dim, 0) for other_axis, dim in enumerate(dims) if other_axis != axis]
    if dims:
        node.require(
            any_of([as_expr(dims[axis]) > 0, *empty_axes]), f"{message}: its axes [{axis}] are empty in {shown(dims)}"
        )


def _sum(node: Node, data: relax.Expr, axes: list[int], keepdims: bool) -> relax.Expr:
    """Sum; half precision is accumulated in float32."""
    if not axes:
        return data
    empty = _empty_result(node, data, axes, keepdims, 0)
    if empty is not None:
        return empty
    return cast(node, node.emit(relax.op.sum(widened(node, data), axes, keepdims)), dtype_of(data))


def _mean(node: Node, data: relax.Expr, axes: list[int], keepdims: bool) -> relax.Expr:
    dtype = dtype_of(data)
    if not axes:
        return data
    if dtype in HALF:
        return cast(node, _mean(node, widened(node, data), axes, keepdims), dtype)
    empty = _empty_result(node, data, axes, keepdims, 0)  # as in onnxruntime; numpy returns NaN
    if empty is not None:
        return empty
    if is_float(dtype):
        mean = node.emit(relax.op.mean(data, axes, keepdims))
        count = 1 if data.ty.shape is None else _count(node, data, axes)
        return mean if isinstance(count, (int, tirx.IntImm)) else _zero_if_empty(node, mean, count)
    count = _count(node, data, axes)
    number = const(int(count), "float64") if isinstance(count, tirx.IntImm) else _as_float(node, tirx.max(count, 1))
    # Truncated, like numpy's mean of integers cast back.
    total = node.emit(relax.op.sum(relax.op.astype(data, "float64"), axes, keepdims))
    return node.emit(relax.op.astype(total / number, dtype))


def _count(node: Node, data: relax.Expr, axes: list[int]) -> Any:
    """Number of elements along some axes."""
    dims = node.shape(data)
    return math.prod(as_expr(dims[axis]) for axis in axes)


def _zero_if_empty(node: Node, mean: relax.Expr, count: Any) -> relax.Expr:
    """Replace a mean of no elements by 0."""

    def element(i: Position, x: te.Tensor, counts: list[Any]) -> tirx.Expr:
        return tirx.Select(counts[0] > 0, x(*i), tirx.const(0, x.dtype))

    return node.kernel("mean_or_zero", element, mean, [count])


def _as_float(node: Node, size: Any) -> relax.Expr:
    number = node.emit(relax.op.shape_to_tensor(relax.ShapeExpr([size])))
    return node.emit(relax.op.reshape(relax.op.astype(number, "float64"), ()))


def _prod(node: Node, data: relax.Expr, axes: list[int], keepdims: bool) -> relax.Expr:
    empty = _empty_result(node, data, axes, keepdims, 1)
    return empty if empty is not None else node.emit(relax.op.prod(data, axes, keepdims)) if axes else data


def _l1(node: Node, data: relax.Expr, axes: list[int], keepdims: bool) -> relax.Expr:
    return _sum(node, node.emit(relax.op.abs(data)), axes, keepdims)


def _sum_square(node: Node, data: relax.Expr, axes: list[int], keepdims: bool) -> relax.Expr:
    return _sum(node, node.emit(data * data), axes, keepdims)


def _l2(node: Node, data: relax.Expr, axes: list[int], keepdims: bool) -> relax.Expr:
    """Square root of the sum of squares, computed in float32 for integers, float64 for 64-bit ones."""
    dtype = dtype_of(data)
    compute = dtype if dtype in ("float32", "float64") else "float64" if dtype.endswith("64") else "float32"
    squares = _sum_square(node, cast(node, data, compute), axes, keepdims)
    return cast(node, node.emit(relax.op.sqrt(squares)), dtype)


def _float_only(node: Node, data: relax.Expr) -> None:
    if not is_float(dtype_of(data)):
        raise node.refusal(f"is not defined for {dtype_of(data)}")


def _log_sum(node: Node, data: relax.Expr, axes: list[int], keepdims: bool) -> relax.Expr:
    _float_only(node, data)
    return node.emit(relax.op.log(_sum(node, data, axes, keepdims)))


def _log_sum_exp(node: Node, data: relax.Expr, axes: list[int], keepdims: bool) -> relax.Expr:
    """log(sum(exp(x - max))) + max, so that large values do not overflow; an infinite maximum is not subtracted."""
    _float_only(node, data)
    if not axes:
        return data
    largest = _extreme(node, data, axes, keepdims=True, largest=True)
    shift = node.emit(relax.op.where(relax.op.isfinite(largest), largest, const(0, dtype_of(data))))
    total = _sum(node, node.emit(relax.op.exp(data - shift)), axes, keepdims=True)
    result = node.emit(relax.op.log(total) + shift)
    return result if keepdims else node.emit(relax.op.squeeze(result, axes))


def lowest(dtype: str) -> tirx.Expr:
    """Neutral element of a maximum."""
    return tirx.const(float("-inf"), dtype) if is_float(dtype) else tvm.tirx.min_value(dtype)


def _highest(dtype: str) -> tirx.Expr:
    return tirx.const(float("inf"), dtype) if is_float(dtype) else tvm.tirx.max_value(dtype)


def _extreme(node: Node, data: relax.Expr, axes: list[int], keepdims: bool, largest: bool) -> relax.Expr:
    """Maximum or minimum; the neutral element if there are no elements."""
    if not axes:
        return data
    dtype = dtype_of(data)
    if is_float(dtype):
        neutral: Any = -np.inf if largest else np.inf
    else:
        limits = (False, True) if dtype == "bool" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        neutral = limits[0 if largest else 1]
    empty = _empty_result(node, data, axes, keepdims, neutral)
    if empty is not None:
        return empty
    # bfloat16 is exact in float32, and targets without bfloat16 arithmetic have no infinity for it.
    compute = {"bool": "int8", "bfloat16": "float32"}.get(dtype)
    if compute is not None:
        result = _extreme(node, cast(node, data, compute), axes, keepdims, largest)
        if dtype == "bool":  # the minimum int8, an empty maximum, becomes False
            return node.emit(result > const(0, compute))
        return cast(node, result, dtype)
    return node.emit((relax.op.max if largest else relax.op.min)(data, axes, keepdims))


def largest_along(node: Node, data: relax.Expr, axes: list[int]) -> relax.Expr:
    """Maximum over `axes`, which are kept."""
    return _extreme(node, data, axes, keepdims=True, largest=True)


_register("ReduceSum", _sum)
_register("ReduceMean", _mean)
_register("ReduceProd", _prod)
_register("ReduceL1", _l1)
_register("ReduceL2", _l2)
_register("ReduceSumSquare", _sum_square)
_register("ReduceLogSum", _log_sum)
_register("ReduceLogSumExp", _log_sum_exp)
_register("ReduceMax", lambda node, data, axes, keepdims: _extreme(node, data, axes, keepdims, largest=True))
_register("ReduceMin", lambda node, data, axes, keepdims: _extreme(node, data, axes, keepdims, largest=False))


@converts("ArgMax", "ArgMin")
def arg_extreme(node: Node) -> relax.Expr:
    """Index of the first (or last) largest or smallest element along an axis, also if all are infinite."""
    data = node.tensor(0)
    rank = node.rank(data)
    axis = node.axis(node.attribute("axis", 0), rank)
    keepdims, last = bool(node.attribute("keepdims", 1)), bool(node.attribute("select_last_index", 0))
    _require_elements(node, data, axis, "has no index of an element to give")
    return index_of_extreme(node, data, axis, keepdims, last, largest=node.op_type == "ArgMax")


def index_of_extreme(node: Node, data: relax.Expr, axis: int, keepdims: bool, last: bool, largest: bool) -> relax.Expr:
    """Index of the largest or smallest element along an axis, which the caller requires to be nonempty."""
    rank = node.rank(data)
    if dtype_of(data) == "bfloat16":
        data = cast(node, data, "float32")
    if not last and is_float(dtype_of(data)):
        return node.emit((relax.op.argmax if largest else relax.op.argmin)(data, axis, keepdims))

    def better(a: Sequence[tirx.Expr], b: Sequence[tirx.Expr]) -> tuple[tirx.Expr, tirx.Expr]:
        is_better = index_wins(a, b, largest, last)
        return tirx.Select(is_better, a[0], b[0]), tirx.Select(is_better, a[1], b[1])

    def worst(index_type: str, value_type: str) -> tuple[tirx.Expr, tirx.Expr]:
        # An index that loses every tie against a real element.
        losing_index = tirx.const(-1, index_type) if last else tvm.tirx.max_value(index_type)
        return losing_index, lowest(value_type) if largest else _highest(value_type)

    def compute(x: te.Tensor) -> te.Tensor:
        reducer = te.comm_reducer(better, worst, name="arg_extreme")
        along = te.reduce_axis((0, x.shape[axis]), name="along")

        def pair(*i: Any) -> Any:
            source = source_index(i, {axis: along}, rank, keepdims)
            return reducer((tirx.Cast("int64", along), x(*source)), axis=along)

        return te.compute(reduced_shape(x.shape, [axis], keepdims), pair, name="arg_extreme")[0]

    return node.builder.emit_te(compute, data, primfunc_name_hint="argmax" if largest else "argmin")
