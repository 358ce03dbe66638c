"""Ops that search, sort and count, and strided views."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tvm import relax, te, tirx

from ...ops.node import Position, const, is_float
from ...ops.required_sizes import as_expr
from ..torch_node import TorchNode, converts
from .torch_moving import cut_axis
from .torch_reductions import vector_norm


@converts("searchsorted", "bucketize")
def searchsorted(node: TorchNode, a: Any, b: Any, *options: Any) -> relax.Expr:
    """Insertion index of each value in sorted numbers; NaN sorts last."""
    is_bucketize = node.op.startswith("bucketize")
    numbers, values = (b, a) if is_bucketize else (a, b)
    is_right = bool(options[1])
    if not is_bucketize:
        side, sorter = (*options[2:], None, None)[:2]
        is_right = is_right if side is None else side == "right"
        if sorter is not None:
            raise node.refusal("with a sorter")
    values = node.reshape(node.walk.as_tensor(values), node.shape)
    dtype = str(numbers.ty.dtype)
    if str(values.ty.dtype) != dtype:
        dtype = "float64" if is_float(dtype) or is_float(str(values.ty.dtype)) else "int64"
        numbers, values = node.cast(numbers, dtype), node.cast(values, dtype)
    rank = len(node.dims(numbers))
    along = te.reduce_axis((0, as_expr(node.dims(numbers)[-1])), name="along")

    def element(i: Position, numbers: te.Tensor, values: te.Tensor) -> tirx.Expr:
        entry = numbers(*i[: rank - 1], along)
        is_after = entry > values(*i) if is_right else entry >= values(*i)
        return te.sum(tirx.Select(is_after, as_expr(0), as_expr(1)), axis=along)

    counts = node.onnx_node("SearchSorted", []).kernel("searchsorted", element, numbers, values, shape=node.shape)
    return node.cast(counts, node.dtype)


@converts("median", "kthvalue", "nanmedian")
def median(node: TorchNode, x: relax.Expr, *options: Any) -> Any:
    """Lower median or k-th smallest value; NaN if any element is NaN."""
    is_kth = node.op.startswith("kthvalue")
    is_flat = not options
    position = None
    if is_kth:
        position, *options = options  # type: ignore[assignment]
    dim, keepdim = (*options, *(-1, False)[len(options) :])[:2]
    data = node.reshape(x, [-1]) if is_flat else x
    axis = node.axis(-1 if is_flat else dim, len(node.dims(data)))
    if not node.dims(data):
        return [x, node.number(0)]
    (count,) = node.static([node.dims(data)[axis]], "sorts an axis of")
    dtype = str(x.ty.dtype)
    if is_flat and not count:
        return node.filled(np.nan if is_float(dtype) else np.iinfo(dtype).min)
    position = (count - 1) // 2 if position is None else position - 1
    ordered, indices = node.onnx("TopK", data, [count], outputs=2, axis=axis, largest=0)
    if is_float(dtype) and node.op.startswith("nan"):  # NaN sorts last
        numbers = node.cast(node.emit(relax.op.logical_not(relax.op.isnan(data))), "int64")
        last = relax.op.maximum(relax.op.sum(numbers, axis, True) - const(1, "int64"), const(0, "int64"))
        middle = node.emit(node.emit(last) // const(2, "int64"))
        parts = [node.onnx("GatherElements", part, middle, axis=axis) for part in (ordered, indices)]
    else:
        parts = [cut_axis(node, part, axis, position, 1) for part in (ordered, indices)]
    if is_float(dtype) and node.op.startswith("median"):
        is_nan = node.cast(node.emit(relax.op.isnan(data)), "int32")
        nan_index = node.onnx("ArgMax", is_nan, axis=axis, keepdims=1)
        any_nan = node.emit(relax.op.max(is_nan, axis, True) > const(0, "int32"))
        nan = const(np.nan, "float32" if dtype == "bfloat16" else dtype)
        parts = [
            node.emit(relax.op.where(any_nan, node.cast(nan, dtype), parts[0])),
            node.emit(relax.op.where(any_nan, nan_index, parts[1])),
        ]
    if is_flat:
        return node.reshape(parts[0], [])
    return (
        [node.reshape(part, node.sizes.shape(fake.shape)) for part, fake in zip(parts, node.value, strict=True)]
        if not keepdim
        else parts
    )


@converts("mode")
def mode(node: TorchNode, x: relax.Expr, dim: int = -1, keepdim: bool = False) -> list[relax.Expr]:
    """Most frequent value of an axis (the smallest one of several) and its last index."""
    dtype = str(x.ty.dtype)
    data = node.cast(x, "int32") if dtype == "bool" else x
    data = data if node.dims(x) else node.reshape(data, [1])
    axis = node.axis(dim, len(node.dims(data)))
    ordered, order = node.onnx("TopK", data, [node.dims(data)[axis]], outputs=2, axis=axis, largest=0)
    along = te.reduce_axis((0, as_expr(node.dims(data)[axis])), name="along")

    def count(i: Position, values: te.Tensor) -> tirx.Expr:
        other, is_own = values(*i[:axis], along, *i[axis + 1 :]), tirx.EQ(along - i[axis].astype("int64"), as_expr(0))
        is_same = tirx.any(tirx.EQ(other, values(*i)), is_own)
        return te.sum(tirx.Select(is_same, as_expr(1), as_expr(0)), axis=along)

    counts = node.onnx_node("Mode", []).kernel("mode", count, ordered, shape=node.dims(data))
    first = node.onnx("ArgMax", counts, axis=axis, keepdims=1)
    last = node.emit(first + node.emit(relax.op.max(counts, axis, True)) - const(1, "int64"))
    results = [node.onnx("GatherElements", part, last, axis=axis) for part in (ordered, order)]
    shape = node.sizes.shape(node.value[0].shape)
    return [node.reshape(node.cast(part, kind), shape) for part, kind in zip(results, (dtype, "int64"), strict=True)]


@converts("cummax", "cummin", "logcumsumexp")
def running(node: TorchNode, x: relax.Expr, dim: int) -> Any:
    """Cumulative maximum or minimum with its last index, or cumulative log-sum-exp.

    A prefix scan: step k combines each element with the one 2**k before it.
    """
    is_sum, rank = node.op.startswith("log"), len(node.dims(x))
    axis = node.axis(dim, rank)
    (count,) = node.static(node.dims(x)[axis : axis + 1] or [1], "runs along an axis of")
    values = node.cast(x, "int32") if str(x.ty.dtype) == "bool" else x
    numbers = const(np.arange(count).reshape([-1, *[1] * (rank - axis - 1)] if rank else []), "int64")
    indices = node.broadcast(numbers, node.dims(x))
    distance = 1
    while distance < count:
        earlier, later = (cut_axis(node, values, axis, first, count - distance) for first in (0, distance))
        if is_sum:
            combined = _log_of_sum(node, earlier, later)
        else:
            is_better = (relax.op.less_equal if node.op.startswith("cummin") else relax.op.greater_equal)(
                later, earlier
            )
            if is_float(str(x.ty.dtype)):
                is_better = relax.op.logical_or(is_better, relax.op.isnan(later))
            is_better = node.emit(is_better)
            combined = node.emit(relax.op.where(is_better, later, earlier))
            first_at, second_at = (cut_axis(node, indices, axis, first, count - distance) for first in (0, distance))
            better = node.emit(relax.op.where(is_better, second_at, first_at))
            indices = node.emit(relax.op.concat([cut_axis(node, indices, axis, 0, distance), better], axis))
        values = node.emit(relax.op.concat([cut_axis(node, values, axis, 0, distance), combined], axis))
        distance *= 2
    return values if is_sum else [node.cast(values, str(x.ty.dtype)), indices]


def _log_of_sum(node: TorchNode, a: relax.Expr, b: relax.Expr) -> relax.Expr:
    """Compute log(exp(a) + exp(b)), also for infinities."""
    zero = const(0, node.dtype)
    distance = relax.op.abs(a - b)
    distance = node.emit(relax.op.where(relax.op.equal(a, b), zero, distance))
    correction = relax.op.log(const(1, node.dtype) + relax.op.exp(-distance))
    return node.emit(relax.op.maximum(a, b) + correction)


@converts("bincount")
def bincount(node: TorchNode, x: relax.Expr, weights: relax.Expr | None = None, min_length: int = 0) -> relax.Expr:
    """Number of occurrences of each integer from 0, or the sum of their weights."""
    values = node.cast(x, "int64")
    size = node.read_size(node.emit(relax.op.max(values) + const(1, "int64")))
    size = (
        max(size, min_length) if isinstance(size, int) else tirx.max(size, as_expr(min_length)) if min_length else size
    )
    increments = node.filled(1, node.dims(x)) if weights is None else node.tensor(weights)
    return node.onnx(
        "ScatterElements", node.filled(0, [size]), node.from_zero(values, size), increments, axis=0, reduction="add"
    )


@converts("histc")
def histc(node: TorchNode, x: relax.Expr, bins: int = 100, low: float = 0, high: float = 0) -> relax.Expr:
    """Histogram with bins of equal width; the last bin includes its end."""
    if not low < high:
        raise node.refusal("over the range of its elements, expected min < max")
    flat = node.cast(node.reshape(x, [-1]), "float64" if str(x.ty.dtype) == "float64" else "float32")
    dtype = str(flat.ty.dtype)
    along = te.reduce_axis((0, as_expr(node.dims(flat)[0])), name="along")

    def element(i: Position, data: te.Tensor) -> tirx.Expr:
        value = data(along)
        bin = tirx.floor((value - tirx.const(low, dtype)) * tirx.const(bins, dtype) / tirx.const(high - low, dtype))
        clamped = tirx.min(bin, tirx.const(bins - 1, dtype))
        is_inside = tirx.all(value >= tirx.const(low, dtype), value <= tirx.const(high, dtype))
        is_counted = tirx.all(is_inside, tirx.EQ(clamped, i[0].astype(dtype)))
        return te.sum(tirx.Select(is_counted, as_expr(1), as_expr(0)), axis=along)

    counts = node.onnx_node("Histogram", []).kernel("histc", element, flat, shape=[bins])
    return node.cast(counts, node.dtype)


@converts("_cdist_forward")
def cdist(node: TorchNode, a: relax.Expr, b: relax.Expr, order: float, *_: Any) -> relax.Expr:
    """Distances between rows, [..., rows of a, rows of b]."""
    first = node.emit(relax.op.expand_dims(a, len(node.dims(a)) - 1))
    second = node.emit(relax.op.expand_dims(b, len(node.dims(b)) - 2))
    return vector_norm(node, node.emit(first - second), order, [-1])


@converts("diagonal", "diagonal_copy")
def diagonal(node: TorchNode, x: relax.Expr, offset: int = 0, first: int = 0, second: int = 1) -> relax.Expr:
    """Elements whose indices on two axes differ by an offset, along a new last axis."""
    rank = len(node.dims(x))
    first, second = node.axis(first, rank), node.axis(second, rank)
    rest = [axis for axis in range(rank) if axis not in (first, second)]

    def element(i: Position, x: te.Tensor) -> tirx.Expr:
        place: list[Any] = [0] * rank
        for axis, index in zip(rest, i, strict=False):
            place[axis] = index
        place[first], place[second] = i[-1] + max(-offset, 0), i[-1] + max(offset, 0)
        return x(*place)

    return node.onnx_node("Diagonal", []).kernel("diagonal", element, x, shape=node.shape)


@converts("as_strided", "as_strided_copy")
def as_strided(node: TorchNode, x: relax.Expr, sizes: Any, strides: Any, start: Any = None) -> relax.Expr:
    """Strided view of a dense tensor, as a gather."""
    fake = node.tensors[0]
    start = int(start or 0)
    if not fake.is_contiguous() or fake.storage_offset():
        raise node.refusal("of a tensor that is itself a view")
    shape = node.static(sizes, "takes sizes of")
    (count,) = node.static([math.prod(node.static(node.dims(x), "reads axes of"))], "reads")
    offsets = np.full(shape, start)
    for axis, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        offsets = offsets + (np.arange(size) * stride).reshape([-1, *[1] * (len(shape) - axis - 1)])
    if offsets.size and int(offsets.max()) >= count:
        raise node.refusal("beyond the elements of its input")
    node.onnx_node("Gather", []).check_constant_size(*shape)
    return node.onnx("Gather", node.reshape(x, [-1]), const(offsets, "int64"), axis=0)


@converts("_linalg_det")
def determinant(node: TorchNode, x: relax.Expr) -> list[relax.Expr]:
    """Determinants of square matrices."""
    if node.used - {0}:
        raise node.refusal("with its factors")
    return [node.onnx("Det", x)]


@converts("col2im")
def col2im(
    node: TorchNode, x: relax.Expr, size: Any, kernel: Any, dilation: Any, padding: Any, stride: Any
) -> relax.Expr:
    """Sum of sliding windows at their positions in an image."""
    return node.onnx(
        "Col2Im", x, const(node.static(size, "makes images of"), "int64"), const(list(kernel), "int64"),
        dilations=tuple(dilation), pads=(*padding, *padding), strides=tuple(stride),
    )  # fmt: skip
