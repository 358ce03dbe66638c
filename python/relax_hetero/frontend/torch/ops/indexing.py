"""Ops that read or write elements at computed places."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax

from ...ops.node import const, is_float
from ...ops.required_sizes import require_shape
from ..node import TorchNode, converts
from .moving import cut_axis


@converts("embedding")
def embedding(node: TorchNode, table: relax.Expr, indices: relax.Expr, *_: Any) -> relax.Expr:
    """Rows of a table."""
    return node.onnx("Gather", table, node.from_zero(indices, node.dims(table)[0]), axis=0)


@converts("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(
    node: TorchNode, table: relax.Expr, indices: relax.Expr, offsets: relax.Expr, by_frequency: bool, mode: int,
    sparse: bool, weights: relax.Expr | None = None, has_end: bool = False, padding: int = -1,
) -> list[relax.Expr]:  # fmt: skip
    """Sums, means or maxima over bags of a table's rows, without rows of padding; a bag begins at each offset."""
    if node.used - {0}:
        raise node.refusal("with the bags of its rows, or their sizes")
    node = node.of(node.value[0])
    (count,), rows, (bags, width), dtype = node.dims(indices), node.dims(table)[0], node.shape, node.dtype
    wide = "float32" if dtype in ("float16", "bfloat16") else dtype
    offsets, indices = node.cast(offsets, "int64"), node.cast(indices, "int64")
    offsets = cut_axis(node, offsets, 0, 0, bags) if has_end else offsets
    # The bag of a row is the number of offsets up to it, less 1; rows before the first offset get -1, no bag.
    starts, zeros = node.filled(1, [bags], "int64"), node.filled(0, [count + 1], "int64")
    starts = node.onnx("ScatterElements", zeros, node.from_zero(offsets, count + 1), starts, axis=0, reduction="add")
    bag = node.emit(relax.op.subtract(relax.op.cumsum(starts, 0, "int64"), const(1, "int64")))
    bag = node.reshape(node.from_zero(cut_axis(node, bag, 0, 0, count), bags), [count, 1])
    values = node.cast(node.onnx("Gather", table, node.from_zero(indices, rows), axis=0), wide)
    is_kept = node.reshape(node.emit(relax.op.not_equal(indices, const(padding, "int64"))), [count, 1])
    if weights is not None:
        values = node.emit(relax.op.multiply(values, node.cast(node.reshape(weights, [count, 1]), wide)))
    is_max = mode == 2
    neutral = const(-np.inf if is_max else 0, wide)
    values = node.emit(relax.op.where(is_kept, values, neutral))
    found = node.onnx(
        "ScatterND", node.filled(-np.inf if is_max else 0, [bags, width], wide), bag, values,
        reduction="max" if is_max else "add",
    )  # fmt: skip
    if mode:
        kept = node.reshape(node.cast(is_kept, wide), [count])
        number = node.onnx("ScatterND", node.filled(0, [bags], wide), bag, kept, reduction="add")
        number = node.reshape(node.emit(relax.op.maximum(number, const(1, wide))), [bags, 1])
        is_empty = relax.op.equal(found, neutral)
        mean = relax.op.where(is_empty, const(0, wide), found) if is_max else relax.op.divide(found, number)
        found = node.emit(mean)
    return [node.cast(found, dtype)]


@converts("index_select")
def index_select(node: TorchNode, x: relax.Expr, dim: int, indices: relax.Expr) -> relax.Expr:
    """Places of an axis."""
    if not node.dims(x):
        return x
    found = node.onnx("Gather", x, node.from_zero(indices, node.dims(x)[dim]), axis=dim)
    return node.reshape(found, node.shape)  # one index may be a scalar


@converts("gather")
def gather(node: TorchNode, x: relax.Expr, dim: int, indices: relax.Expr, *_: Any) -> relax.Expr:
    """Elements at indices along an axis."""
    if not node.dims(x):
        return node.reshape(x, node.shape)
    return node.onnx("GatherElements", x, node.from_zero(indices, node.dims(x)[dim]), axis=dim)


_KINDS = {
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
def scatter(node: TorchNode, x: relax.Expr, dim: int, indices: relax.Expr, source: Any, *given: Any) -> relax.Expr:
    """A copy with elements replaced at indices along an axis, or reduced with."""
    kind = "add" if node.op.startswith("scatter_add") else given[0] if given else "none"
    has_own = len(given) < 2 or bool(given[1])
    if kind not in _KINDS or not node.shape:
        raise node.refusal(f"by {kind}" if node.shape else "of a single number")
    dims = node.dims(indices)
    indices = node.from_zero(indices, node.dims(x)[dim])
    if not isinstance(source, relax.Expr):
        source = node.filled(source, dims)
    for axis, size in enumerate(dims):  # indices may be fewer than the source's elements
        source = cut_axis(node, source, axis, 0, size)

    def placed(data: relax.Expr, values: relax.Expr, reduction: str) -> relax.Expr:
        return node.onnx("ScatterElements", data, indices, values, axis=dim, reduction=reduction)

    own = x if has_own else placed(x, node.filled(_neutral(kind, node.dtype), dims), "none")
    result = placed(own, source, _KINDS[kind])
    if kind != "mean":
        return result
    counts = placed(node.filled(int(has_own)), node.filled(1, dims), "add")
    counts = node.emit(relax.op.maximum(counts, const(1, node.dtype)))
    return node.emit((relax.op.divide if is_float(node.dtype) else relax.op.floor_divide)(result, counts))


def _neutral(kind: str, dtype: str) -> Any:
    """The number that a reduction leaves out."""
    if kind in ("amax", "amin"):
        if is_float(dtype):
            return float("-inf" if kind == "amax" else "inf")
        limits = np.iinfo("uint8" if dtype == "bool" else dtype)
        return int(limits.min if kind == "amax" else limits.max)
    return int(kind == "prod")


def _places(node: TorchNode, indices: list[Any]) -> tuple[list[int], relax.Expr, int]:
    """The indexed axes, their coordinates (the last axis), and the rank of the index."""
    axes: list[int] = []
    given: list[relax.Expr] = []
    axis = 0
    for index in indices:
        if index is not None and str(index.ty.dtype) in ("bool", "uint8"):  # a mask stands for as many axes as it has
            found = node.onnx("NonZero", index)
            rank, count = len(node.dims(index)), node.dims(found)[1]
            rows = [node.emit(relax.op.strided_slice(found, [0], [row], [row + 1])) for row in range(rank)]
            given += [node.reshape(row, [count]) for row in rows]
        else:
            rank = 1
            given += [] if index is None else [node.cast(index, "int64")]
        axes += [] if index is None else range(axis, axis + rank)
        axis += rank
    rank = max(len(node.dims(index)) for index in given)
    if len(given) == 1:
        return axes, given[0], rank
    shape = given[0]
    for index in given[1:]:
        shape = node.emit(relax.op.add(shape, index))
    dims = node.dims(shape)
    columns = [node.reshape(node.broadcast(index, dims), [*dims, 1]) for index in given]
    return axes, node.emit(relax.op.concat(columns, rank)), rank


@converts("index")
def index(node: TorchNode, x: relax.Expr, indices: list[Any]) -> relax.Expr:
    """Elements at indices of several axes, which broadcast to each other."""
    axes, places, rank = _places(node, indices)
    if len(axes) == 1:
        return node.onnx("Gather", x, places, axis=axes[0])
    count = len(node.dims(x))
    rest = [axis for axis in range(count) if axis not in axes]
    if axes != list(range(len(axes))):
        x = node.emit(relax.op.permute_dims(x, [*axes, *rest]))
    found = node.onnx("GatherND", x, places)
    if axes[0] and axes == list(range(axes[0], axes[-1] + 1)):  # the index stands where its axes were
        before = list(range(rank, rank + axes[0]))
        after = list(range(rank + axes[0], rank + len(rest)))
        found = node.emit(relax.op.permute_dims(found, [*before, *range(rank), *after]))
    return found


@converts("index_put", "_unsafe_index_put")
def index_put(node: TorchNode, x: relax.Expr, indices: list[Any], values: Any, accumulate: bool = False) -> relax.Expr:
    """A copy with elements replaced at indices of neighboring axes, or added to."""
    mask = indices[0]
    if len(indices) == 1 and str(mask.ty.dtype) == "bool" and not node.dims(values) and not accumulate:
        rank, own = len(node.shape), node.dims(mask)
        return node.onnx("Where", node.reshape(mask, [*own, *[1] * (rank - len(own))]), node.tensor(values), x)
    axes, places, rank = _places(node, indices)
    if len(axes) == 1:
        places = node.reshape(places, [*node.dims(places), 1])
    dims, own = node.dims(places)[:-1], node.shape
    rest = [axis for axis in range(len(own)) if axis not in axes]
    # Values have the index where its axes were, or in front if these are no neighbors; scattering wants it in front.
    first = axes[0] if axes == list(range(axes[0], axes[-1] + 1)) else 0
    values = node.tensor(values)
    wanted = [*(own[axis] for axis in rest[:first]), *dims, *(own[axis] for axis in rest[first:])]
    if node.dims(values) and any(not isinstance(dim, int) for dim in dims):
        values = _as_many(node, values, wanted)
    values = node.broadcast(values, wanted)
    if first:
        order = [*range(first, first + rank), *range(first), *range(first + rank, len(rest) + rank)]
        values = node.emit(relax.op.permute_dims(values, order))
    front = [*axes, *rest]
    is_moved = front != list(range(len(own)))
    if is_moved:
        x = node.emit(relax.op.permute_dims(x, front))
    result = node.onnx("ScatterND", x, places, values, reduction="add" if accumulate else "none")
    if not is_moved:
        return result
    return node.emit(relax.op.permute_dims(result, [front.index(axis) for axis in range(len(own))]))


@converts("index_add", "index_copy")
def index_add(
    node: TorchNode, x: relax.Expr, dim: int, indices: relax.Expr, source: relax.Expr, alpha: Any = 1
) -> relax.Expr:
    """A copy with slices of an axis replaced, or added to."""
    if alpha != 1:
        source = node.emit(relax.op.multiply(source, node.tensor(alpha)))
    axis = node.axis(dim, len(node.shape))
    places = node.reshape(node.from_zero(indices, node.dims(x)[axis]), [-1])
    return index_put(node, x, [*[None] * axis, places], source, node.op.startswith("index_add"))


@converts("put")
def put(
    node: TorchNode, x: relax.Expr, indices: relax.Expr, values: relax.Expr, accumulate: bool = False
) -> relax.Expr:
    """A copy with elements replaced, or added to, at indices into the flattened tensor."""
    flat, places, values = (node.reshape(value, [-1]) for value in (x, indices, values))
    coordinates = node.reshape(places, [-1, 1])
    kind = "add" if accumulate else "none"
    return node.reshape(node.onnx("ScatterND", flat, coordinates, values, reduction=kind), node.shape)


def _as_many(node: TorchNode, values: relax.Expr, wanted: list[Any]) -> relax.Expr:
    """Values, required to be as many as places that only a call knows the number of."""
    found = node.dims(values)
    own = wanted[len(wanted) - len(found) :]
    dims = [size if isinstance(size, int) and size == 1 else other for size, other in zip(found, own, strict=True)]
    return require_shape(node.onnx_node("ScatterND", []), values, dims, "its values")


@converts("nonzero")
def nonzero(node: TorchNode, x: relax.Expr) -> relax.Expr:
    """Coordinates of the elements that are not 0, a row each."""
    return node.emit(relax.op.permute_dims(node.onnx("NonZero", x)))


@converts("one_hot")
def one_hot(node: TorchNode, x: relax.Expr, count: int = -1) -> relax.Expr:
    """1 at the index, along a new last axis."""
    dims = node.shape
    places = node.reshape(node.from_zero(x, dims[-1]), [*dims[:-1], 1])
    ones = node.filled(1, [*dims[:-1], 1])
    return node.onnx("ScatterElements", node.filled(0), places, ones, axis=len(dims) - 1)


@converts("topk", "sort")
def topk(node: TorchNode, x: relax.Expr, *given: Any) -> list[relax.Expr]:
    """The largest or smallest in order, and where they are."""
    if not node.dims(x):
        return [x, node.number(0)]
    if node.op.startswith("topk"):
        count, dim, largest = (*given, *(1, -1, True)[len(given) :])[:3]
    else:
        if node.op.endswith("stable"):
            given = given[1:]
        dim, largest = (*given, *(-1, False)[len(given) :])[:2]
        count = node.dims(x)[dim]
    return node.onnx("TopK", x, [count], outputs=2, axis=dim, largest=int(largest))
