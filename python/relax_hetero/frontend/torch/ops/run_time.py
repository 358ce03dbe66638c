"""Ops whose results only a call knows the sizes of, and numbers that are read from tensors."""

from __future__ import annotations

from typing import Any

from tvm import relax, te, tirx

from ...ops.node import Position, const
from ...ops.required_sizes import as_expr
from ..exporting import torch_package
from ..node import TorchNode, converts


@converts("_local_scalar_dense", "item")
def item(node: TorchNode, x: relax.Expr) -> relax.Expr:
    """The number in a tensor of one element."""
    return node.reshape(x, [])


@converts("_assert_scalar", "_functional_assert_scalar")
def assert_scalar(node: TorchNode, condition: Any, message: str, *_: Any) -> None:
    """A condition over sizes that torch could not decide: calls are refused where it does not hold.

    Conditions that mention numbers nobody reads any more are left out, as torch's own compiler does.
    """
    if isinstance(condition, tirx.Expr) and not isinstance(condition, tirx.IntImm):
        node.onnx_node("Identity", []).require(condition, message.partition(" on node")[0])
    elif isinstance(condition, (bool, tirx.IntImm)) and not bool(condition):
        raise node.refusal(message)


def _flat_places(node: TorchNode, mask: relax.Expr) -> relax.Expr:
    """Where a mask is set, in row-major order: [count]."""
    found = node.onnx("NonZero", node.reshape(mask, [-1]))
    return node.reshape(found, node.dims(found)[1:])


@converts("masked_select")
def masked_select(node: TorchNode, x: relax.Expr, mask: relax.Expr) -> relax.Expr:
    """The elements where a mask is set; both broadcast to each other."""
    dims = _broadcast_dims(node, 0, 1)
    places = _flat_places(node, node.broadcast(mask, dims))
    return node.onnx("Gather", node.reshape(node.broadcast(x, dims), [-1]), places, axis=0)


def _broadcast_dims(node: TorchNode, *which: int) -> list[Any]:
    torch = torch_package()
    return node.sizes.shape(torch.broadcast_shapes(*(node.tensors[index].shape for index in which)))


@converts("masked_scatter")
def masked_scatter(node: TorchNode, x: relax.Expr, mask: relax.Expr, source: relax.Expr) -> relax.Expr:
    """A copy with the elements where a mask is set replaced by those of the source, in order."""
    dims = node.shape
    flat = node.reshape(node.broadcast(mask, dims), [-1])
    count = node.emit(relax.op.cumsum(node.cast(flat, "int64"), 0, "int64"))
    places = node.emit(relax.op.maximum(relax.op.subtract(count, const(1, "int64")), const(0, "int64")))
    values = node.onnx("Gather", node.reshape(source, [-1]), places, axis=0)
    return node.onnx("Where", node.broadcast(mask, dims), node.reshape(values, dims), node.broadcast(x, dims))


@converts("repeat_interleave")
def repeat_interleave(node: TorchNode, repeats: relax.Expr, *_: Any) -> relax.Expr:
    """Each place as often as its number says: [sum of repeats]."""
    if not node.op.endswith(".Tensor"):
        raise node.refusal("expected the form that only takes counts")
    (count,) = node.dims(repeats)
    ends = node.emit(relax.op.cumsum(node.cast(repeats, "int64"), 0, "int64"))
    minimum = node.onnx_node("Min", [])
    total = node.read_size(node.emit(relax.op.sum(node.cast(repeats, "int64"))))
    if not isinstance(total, int):
        minimum.require(as_expr(total) >= 0, "repeats less than 0 times")
    along = te.reduce_axis((0, as_expr(count)), name="along")

    def element(i: Position, ends: te.Tensor) -> tirx.Expr:
        is_before = tirx.Select(ends(along) <= i[0].astype("int64"), as_expr(1), as_expr(0))
        return te.sum(is_before, axis=along)

    places = minimum.kernel("repeated", element, ends, shape=[total])
    return node.cast(places, node.dtype)


@converts("_unique2", "unique_dim", "unique_consecutive")
def unique(node: TorchNode, x: relax.Expr, *given: Any) -> list[relax.Expr]:
    """Values in order, or runs of equal ones; where each element's is, and how often it is there."""
    if node.op.startswith("unique_dim") or (
        node.op.startswith("unique_cons") and len(given) > 2 and given[2] is not None
    ):
        raise node.refusal("of slices along an axis, expected single elements")
    is_runs = node.op.startswith("unique_cons")
    dims = node.dims(x)
    flat = node.reshape(x, [-1])
    (count,) = node.dims(flat)
    if is_runs:
        values, order = flat, None
    else:
        values, order = node.onnx("TopK", flat, [count], outputs=2, axis=0, largest=0)

    def starts(i: Position, values: te.Tensor) -> tirx.Expr:
        place = i[0].astype("int64")
        is_new = tirx.NE(values(i[0]), values(tirx.max(place - 1, as_expr(0))))
        return tirx.any(tirx.EQ(place, as_expr(0)), is_new)

    kernel = node.onnx_node("Unique", [])
    is_start = kernel.kernel("starts", starts, values, shape=[count])
    places = _flat_places(node, is_start)
    found = node.onnx("Gather", values, places, axis=0)
    number = node.emit(relax.op.subtract(relax.op.cumsum(node.cast(is_start, "int64"), 0, "int64"), const(1, "int64")))
    inverse = number
    if order is not None:
        inverse = node.onnx("ScatterElements", node.emit(relax.op.zeros_like(order)), order, number, axis=0)
    ends = node.emit(relax.op.concat([places, node.reshape(node.number(count), [1])], 0))
    (groups,) = node.dims(places)
    counts = kernel.kernel("counts", lambda i, ends: ends(i[0] + 1) - ends(i[0]), ends, shape=[groups])
    return [found, node.reshape(inverse, dims), counts]
