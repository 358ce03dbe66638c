"""Ops that read or write elements at computed indices."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
from tvm import relax

from ...ops.node import const, is_float
from ...ops.required_sizes import require_shape
from ..torch_node import TorchNode, converts
from .torch_moving import cut_axis


@converts("embedding")
def embedding(node: TorchNode, table: relax.Expr, indices: relax.Expr, *_: Any) -> relax.Expr:
    """Rows of a table."""
    return node.onnx("Gather", table, node.from_zero(indices, node.dims(table)[0]), axis=0)


@converts("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(
    node: TorchNode, table: relax.Expr, indices: relax.Expr, offsets: relax.Expr, by_frequency: bool, mode: int,
    sparse: bool, weights: relax.Expr | None = None, has_end: bool = False, padding: int = -1,
) -> list[relax.Expr]:  # fmt: skip
    """Sums, means or maxima over bags of a table's rows, without padding rows; a bag begins at each offset."""
    if node.used - {0}:
        raise node.refusal("with the bags of its rows, or their sizes")
    node = node.of(node.value[0])
    (count,), rows, (bags, width), dtype = node.dims(indices), node.dims(table)[0], node.shape, node.dtype
    wide = "float32" if dtype in ("float16", "bfloat16") else dtype
    offsets, indices = node.cast(offsets, "int64"), node.cast(indices, "int64")
    offsets = cut_axis(node, offsets, 0, 0, bags) if has_end else offsets
    # The bag of a row is the number of offsets up to it, minus 1; rows before the first offset get -1, no bag.
    starts, zeros = node.filled(1, [bags], "int64"), node.filled(0, [count + 1], "int64")
    starts = node.onnx("ScatterElements", zeros, node.from_zero(offsets, count + 1), starts, axis=0, reduction="add")
    bag = node.emit(relax.op.cumsum(starts, 0, "int64") - const(1, "int64"))
    bag = node.reshape(node.from_zero(cut_axis(node, bag, 0, 0, count), bags), [count, 1])
    values = node.cast(node.onnx("Gather", table, node.from_zero(indices, rows), axis=0), wide)
    is_valid = node.reshape(node.emit(relax.op.not_equal(indices, const(padding, "int64"))), [count, 1])
    if weights is not None:
        values = node.emit(values * node.cast(node.reshape(weights, [count, 1]), wide))
    is_max = mode == 2
    neutral = const(-np.inf if is_max else 0, wide)
    values = node.emit(relax.op.where(is_valid, values, neutral))
    result = node.onnx(
        "ScatterND", node.filled(-np.inf if is_max else 0, [bags, width], wide), bag, values,
        reduction="max" if is_max else "add",
    )  # fmt: skip
    if mode:
        valid = node.reshape(node.cast(is_valid, wide), [count])
        counts = node.onnx("ScatterND", node.filled(0, [bags], wide), bag, valid, reduction="add")
        counts = node.reshape(node.emit(relax.op.maximum(counts, const(1, wide))), [bags, 1])
        is_empty = relax.op.equal(result, neutral)
        mean = relax.op.where(is_empty, const(0, wide), result) if is_max else result / counts
        result = node.emit(mean)
    return [node.cast(result, dtype)]


@converts("index_select")
def index_select(node: TorchNode, x: relax.Expr, dim: int, indices: relax.Expr) -> relax.Expr:
    """Select indices of an axis."""
    if not node.dims(x):
        return x
    rows = node.onnx("Gather", x, node.from_zero(indices, node.dims(x)[dim]), axis=dim)
    return node.reshape(rows, node.shape)  # one index may be a scalar


@converts("gather")
def gather(node: TorchNode, x: relax.Expr, dim: int, indices: relax.Expr, *_: Any) -> relax.Expr:
    """Elements at indices along an axis."""
    if not node.dims(x):
        return node.reshape(x, node.shape)
    return node.onnx("GatherElements", x, node.from_zero(indices, node.dims(x)[dim]), axis=dim)


_ONNX_REDUCTIONS = {
    "none": "none",
    "add": "add",
    "sum": "add",
    "mean": "add",
    "prod": "mul",
    "multiply": "mul",
    "amax": "max",
    "amin": "min",
}


@converts("scatter", "scatter_add", "scatter_reduce")
def scatter(node: TorchNode, x: relax.Expr, dim: int, indices: relax.Expr, source: Any, *options: Any) -> relax.Expr:
    """Copy with elements at indices along an axis replaced or reduced."""
    kind = "add" if node.op.startswith("scatter_add") else options[0] if options else "none"
    includes_self = len(options) < 2 or bool(options[1])
    if kind not in _ONNX_REDUCTIONS or not node.shape:
        raise node.refusal(f"by {kind}" if node.shape else "of a single number")
    dims = node.dims(indices)
    indices = node.from_zero(indices, node.dims(x)[dim])
    if not isinstance(source, relax.Expr):
        source = node.filled(source, dims)
    for axis, size in enumerate(dims):  # indices may be fewer than the source's elements
        source = cut_axis(node, source, axis, 0, size)

    def scatter_values(data: relax.Expr, values: relax.Expr, reduction: str) -> relax.Expr:
        return node.onnx("ScatterElements", data, indices, values, axis=dim, reduction=reduction)

    initial = x if includes_self else scatter_values(x, node.filled(_neutral(kind, node.dtype), dims), "none")
    result = scatter_values(initial, source, _ONNX_REDUCTIONS[kind])
    if kind != "mean":
        return result
    counts = scatter_values(node.filled(int(includes_self)), node.filled(1, dims), "add")
    counts = node.emit(relax.op.maximum(counts, const(1, node.dtype)))
    return node.emit((relax.op.divide if is_float(node.dtype) else relax.op.floor_divide)(result, counts))


def _neutral(kind: str, dtype: str) -> Any:
    """Neutral element of a reduction."""
    if kind in ("amax", "amin"):
        if is_float(dtype):
            return float("-inf" if kind == "amax" else "inf")
        limits = np.iinfo("uint8" if dtype == "bool" else dtype)
        return int(limits.min if kind == "amax" else limits.max)
    return int(kind == "prod")


def _coordinates(node: TorchNode, indices: list[Any]) -> tuple[list[int], relax.Expr, int]:
    """The indexed axes, their coordinates (along a last axis), and the rank of the index."""
    axes: list[int] = []
    coordinates: list[relax.Expr] = []
    axis = 0
    for index in indices:
        if index is not None and str(index.ty.dtype) in ("bool", "uint8"):  # a mask indexes as many axes as it has
            mask_indices = node.onnx("NonZero", index)
            rank, count = len(node.dims(index)), node.dims(mask_indices)[1]
            rows = [node.emit(relax.op.strided_slice(mask_indices, [0], [row], [row + 1])) for row in range(rank)]
            coordinates += [node.reshape(row, [count]) for row in rows]
        else:
            rank = 1
            coordinates += [] if index is None else [node.cast(index, "int64")]
        axes += [] if index is None else range(axis, axis + rank)
        axis += rank
    rank = max(len(node.dims(index)) for index in coordinates)
    if len(coordinates) == 1:
        return axes, coordinates[0], rank
    dims = node.dims(reduce(lambda total, index: node.emit(total + index), coordinates))
    columns = [node.reshape(node.broadcast(index, dims), [*dims, 1]) for index in coordinates]
    return axes, node.emit(relax.op.concat(columns, rank)), rank


@converts("index")
def index(node: TorchNode, x: relax.Expr, indices: list[Any]) -> relax.Expr:
    """Elements at broadcast indices of several axes."""
    axes, coordinates, rank = _coordinates(node, indices)
    if len(axes) == 1:
        return node.onnx("Gather", x, coordinates, axis=axes[0])
    rest = [axis for axis in range(len(node.dims(x))) if axis not in axes]
    if axes != list(range(len(axes))):
        x = node.emit(relax.op.permute_dims(x, [*axes, *rest]))
    result = node.onnx("GatherND", x, coordinates)
    if axes[0] and axes == list(range(axes[0], axes[-1] + 1)):  # adjacent axes: the index takes their position
        before = list(range(rank, rank + axes[0]))
        after = list(range(rank + axes[0], rank + len(rest)))
        result = node.emit(relax.op.permute_dims(result, [*before, *range(rank), *after]))
    return result


@converts("index_put", "_unsafe_index_put")
def index_put(node: TorchNode, x: relax.Expr, indices: list[Any], values: Any, accumulate: bool = False) -> relax.Expr:
    """Copy with elements at indices of several axes replaced or accumulated."""
    mask = indices[0]
    if len(indices) == 1 and str(mask.ty.dtype) == "bool" and not node.dims(values) and not accumulate:
        rank, x_dims = len(node.shape), node.dims(mask)
        return node.onnx("Where", node.reshape(mask, [*x_dims, *[1] * (rank - len(x_dims))]), node.tensor(values), x)
    axes, coordinates, rank = _coordinates(node, indices)
    if len(axes) == 1:
        coordinates = node.reshape(coordinates, [*node.dims(coordinates), 1])
    dims, x_dims = node.dims(coordinates)[:-1], node.shape
    rest = [axis for axis in range(len(x_dims)) if axis not in axes]
    # The index of values is at the position of adjacent axes, else in front; ScatterND requires it in front.
    first = axes[0] if axes == list(range(axes[0], axes[-1] + 1)) else 0
    values = node.tensor(values)
    expected_dims = [*(x_dims[axis] for axis in rest[:first]), *dims, *(x_dims[axis] for axis in rest[first:])]
    if node.dims(values) and any(not isinstance(dim, int) for dim in dims):
        values = _require_count(node, values, expected_dims)
    values = node.broadcast(values, expected_dims)
    if first:
        order = [*range(first, first + rank), *range(first), *range(first + rank, len(rest) + rank)]
        values = node.emit(relax.op.permute_dims(values, order))
    permuted = [*axes, *rest]
    is_moved = permuted != list(range(len(x_dims)))
    if is_moved:
        x = node.emit(relax.op.permute_dims(x, permuted))
    result = node.onnx("ScatterND", x, coordinates, values, reduction="add" if accumulate else "none")
    if not is_moved:
        return result
    return node.emit(relax.op.permute_dims(result, [permuted.index(axis) for axis in range(len(x_dims))]))


@converts("index_add", "index_copy")
def index_add(
    node: TorchNode, x: relax.Expr, dim: int, indices: relax.Expr, source: relax.Expr, alpha: Any = 1
) -> relax.Expr:
    """Copy with slices of an axis replaced or accumulated."""
    if alpha != 1:
        source = node.emit(source * node.tensor(alpha))
    axis = node.axis(dim, len(node.shape))
    flat_indices = node.reshape(node.from_zero(indices, node.dims(x)[axis]), [-1])
    return index_put(node, x, [*[None] * axis, flat_indices], source, node.op.startswith("index_add"))


@converts("put")
def put(
    node: TorchNode, x: relax.Expr, indices: relax.Expr, values: relax.Expr, accumulate: bool = False
) -> relax.Expr:
    """Copy with elements at flat indices replaced or accumulated."""
    flat, flat_indices, values = (node.reshape(value, [-1]) for value in (x, indices, values))
    coordinates = node.reshape(flat_indices, [-1, 1])
    kind = "add" if accumulate else "none"
    return node.reshape(node.onnx("ScatterND", flat, coordinates, values, reduction=kind), node.shape)


def _require_count(node: TorchNode, values: relax.Expr, target: list[Any]) -> relax.Expr:
    """Require that values match a dynamic number of indices."""
    value_dims = node.dims(values)
    pairs = zip(value_dims, target[len(target) - len(value_dims) :], strict=True)
    dims = [size if isinstance(size, int) and size == 1 else other for size, other in pairs]
    return require_shape(node.onnx_node("ScatterND", []), values, dims, "its values")


@converts("nonzero")
def nonzero(node: TorchNode, x: relax.Expr) -> relax.Expr:
    """Coordinates of nonzero elements, one row each."""
    return node.emit(relax.op.permute_dims(node.onnx("NonZero", x)))


@converts("one_hot")
def one_hot(node: TorchNode, x: relax.Expr, count: int = -1) -> relax.Expr:
    """1 at the index, along a new last axis."""
    dims = node.shape
    indices = node.reshape(node.from_zero(x, dims[-1]), [*dims[:-1], 1])
    ones = node.filled(1, [*dims[:-1], 1])
    return node.onnx("ScatterElements", node.filled(0), indices, ones, axis=len(dims) - 1)


@converts("topk", "sort")
def topk(node: TorchNode, x: relax.Expr, *options: Any) -> list[relax.Expr]:
    """The largest or smallest elements in order, and their indices."""
    if not node.dims(x):
        return [x, node.number(0)]
    if node.op.startswith("topk"):
        count, dim, largest = (*options, *(1, -1, True)[len(options) :])[:3]
    else:
        if node.op.endswith("stable"):
            options = options[1:]
        dim, largest = (*options, *(-1, False)[len(options) :])[:2]
        count = node.dims(x)[dim]
    return node.onnx("TopK", x, [count], outputs=2, axis=dim, largest=int(largest))
