"""Ops that read or write elements at computed places."""

from __future__ import annotations

from typing import Any

from tvm import relax

from ...ops.node import const
from ..node import TorchNode, converts


@converts("embedding")
def embedding(node: TorchNode, table: relax.Expr, indices: relax.Expr, *_: Any) -> relax.Expr:
    """Rows of a table."""
    return node.onnx("Gather", table, indices, axis=0)


@converts("index_select")
def index_select(node: TorchNode, x: relax.Expr, dim: int, indices: relax.Expr) -> relax.Expr:
    """Places of an axis."""
    return node.onnx("Gather", x, indices, axis=dim)


@converts("gather")
def gather(node: TorchNode, x: relax.Expr, dim: int, indices: relax.Expr, *_: Any) -> relax.Expr:
    """Elements at indices along an axis."""
    return node.onnx("GatherElements", x, indices, axis=dim)


@converts("scatter", "scatter_add", "scatter_reduce")
def scatter(node: TorchNode, x: relax.Expr, dim: int, indices: relax.Expr, source: Any, *given: Any) -> relax.Expr:
    """A copy with elements replaced at indices along an axis, or reduced with."""
    kind = "add" if node.op.startswith("scatter_add") else given[0] if given else "none"
    kinds = {"none": "none", "add": "add", "sum": "add", "prod": "mul", "multiply": "mul", "amax": "max", "amin": "min"}
    if kind not in kinds or (len(given) > 1 and not given[1]) or not node.shape:
        raise node.refusal(f"by {kind}, without the elements that are there")
    dims = node.dims(indices)
    if not isinstance(source, relax.Expr):
        source = node.filled(source, dims)
    elif not all(node.sizes_equal(a, b) for a, b in zip(node.dims(source), dims, strict=True)):
        raise node.refusal("from a part of its source")
    return node.onnx("ScatterElements", x, indices, source, axis=dim, reduction=kinds[kind])


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
    if axes != list(range(axes[0], axes[-1] + 1)):
        raise node.refusal("at indices of axes that are not neighbors")
    if len(axes) == 1:
        places = node.reshape(places, [*node.dims(places), 1])
    dims, own = node.dims(places)[:-1], node.shape
    first, last = axes[0], axes[-1] + 1
    # Values have the index where its axes were; scattering wants it in front.
    values = node.broadcast(node.tensor(values), [*own[:first], *dims, *own[last:]])
    if first:
        count = len(own) - len(axes) + rank
        order = [*range(first, first + rank), *range(first), *range(first + rank, count)]
        values = node.emit(relax.op.permute_dims(values, order))
        front = [*axes, *range(first), *range(last, len(own))]
        x = node.emit(relax.op.permute_dims(x, front))
    result = node.onnx("ScatterND", x, places, values, reduction="add" if accumulate else "none")
    return (
        node.emit(relax.op.permute_dims(result, [front.index(axis) for axis in range(len(own))])) if first else result
    )


@converts("nonzero")
def nonzero(node: TorchNode, x: relax.Expr) -> relax.Expr:
    """Coordinates of the elements that are not 0, a row each."""
    return node.emit(relax.op.permute_dims(node.onnx("NonZero", x)))


@converts("one_hot")
def one_hot(node: TorchNode, x: relax.Expr, count: int = -1) -> relax.Expr:
    """1 at the index, along a new last axis."""
    return node.onnx("OneHot", x, const(node.shape[-1], "int64"), const([0, 1], "int64"))


@converts("topk", "sort")
def topk(node: TorchNode, x: relax.Expr, *given: Any) -> list[relax.Expr]:
    """The largest or smallest in order, and where they are."""
    if node.op.startswith("topk"):
        count, dim, largest = (*given, *(1, -1, True)[len(given) :])[:3]
    else:
        if node.op.endswith("stable"):
            given = given[1:]
        dim, largest = (*given, *(-1, False)[len(given) :])[:2]
        count = node.dims(x)[dim] if node.dims(x) else 1
    return node.onnx("TopK", x, [count], outputs=2, axis=dim, largest=int(largest))
