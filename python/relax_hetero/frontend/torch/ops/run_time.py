"""Ops with results of dynamic sizes, and numbers read from tensors."""

from __future__ import annotations

from typing import Any

from tvm import relax, te, tirx

from ...ops.node import Position, const
from ...ops.required_sizes import as_expr
from ..exporting import torch_package
from ..torch_node import TorchNode, converts


@converts("_local_scalar_dense", "item")
def item(node: TorchNode, x: relax.Expr) -> relax.Expr:
    """The number in a tensor of one element."""
    return node.reshape(x, [])


@converts("_assert_scalar", "_functional_assert_scalar")
def assert_scalar(node: TorchNode, condition: Any, message: str, *_: Any) -> None:
    """Require a condition over sizes in each call.

    Conditions with numbers that nothing else reads are ignored, as in torch's compiler.
    """
    if isinstance(condition, tirx.Expr) and not isinstance(condition, tirx.IntImm):
        node.onnx_node("Identity", []).require(condition, message.partition(" on node")[0])
    elif isinstance(condition, (bool, tirx.IntImm)) and not bool(condition):
        raise node.refusal(message)


def _flat_indices(node: TorchNode, mask: relax.Expr) -> relax.Expr:
    """Row-major indices of the set elements of a mask, [count]."""
    nonzero = node.onnx("NonZero", node.reshape(mask, [-1]))
    return node.reshape(nonzero, node.dims(nonzero)[1:])


@converts("masked_select")
def masked_select(node: TorchNode, x: relax.Expr, mask: relax.Expr) -> relax.Expr:
    """Elements at the set positions of a mask, after broadcasting."""
    dims = _broadcast_dims(node, 0, 1)
    indices = _flat_indices(node, node.broadcast(mask, dims))
    return node.onnx("Gather", node.reshape(node.broadcast(x, dims), [-1]), indices, axis=0)


def _broadcast_dims(node: TorchNode, *which: int) -> list[Any]:
    torch = torch_package()
    return node.sizes.shape(torch.broadcast_shapes(*(node.tensors[index].shape for index in which)))


@converts("masked_scatter")
def masked_scatter(node: TorchNode, x: relax.Expr, mask: relax.Expr, source: relax.Expr) -> relax.Expr:
    """Copy with the elements at set positions of a mask replaced by those of the source, in order."""
    dims = node.shape
    flat = node.reshape(node.broadcast(mask, dims), [-1])
    count = node.emit(relax.op.cumsum(node.cast(flat, "int64"), 0, "int64"))
    indices = node.emit(relax.op.maximum(count - const(1, "int64"), const(0, "int64")))
    values = node.onnx("Gather", node.reshape(source, [-1]), indices, axis=0)
    return node.onnx("Where", node.broadcast(mask, dims), node.reshape(values, dims), node.broadcast(x, dims))


@converts("repeat_interleave")
def repeat_interleave(node: TorchNode, repeats: relax.Expr, *_: Any) -> relax.Expr:
    """Each index, repeated by its count, [sum of repeats]."""
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

    indices = minimum.kernel("repeated", element, ends, shape=[total])
    return node.cast(indices, node.dtype)


@converts("_unique2", "unique_dim", "unique_consecutive")
def unique(node: TorchNode, x: relax.Expr, *options: Any) -> list[relax.Expr]:
    """Sorted distinct values, or values of runs; the inverse indices and the counts."""
    if node.op.startswith("unique_dim") or (
        node.op.startswith("unique_cons") and len(options) > 2 and options[2] is not None
    ):
        raise node.refusal("of slices along an axis, expected single elements")
    is_consecutive = node.op.startswith("unique_cons")
    dims = node.dims(x)
    flat = node.reshape(x, [-1])
    (count,) = node.dims(flat)
    if is_consecutive:
        values, order = flat, None
    else:
        values, order = node.onnx("TopK", flat, [count], outputs=2, axis=0, largest=0)

    def starts(i: Position, values: te.Tensor) -> tirx.Expr:
        index = i[0].astype("int64")
        is_new = tirx.NE(values(i[0]), values(tirx.max(index - 1, as_expr(0))))
        return tirx.any(tirx.EQ(index, as_expr(0)), is_new)

    kernel = node.onnx_node("Unique", [])
    is_start = kernel.kernel("starts", starts, values, shape=[count])
    start_indices = _flat_indices(node, is_start)
    distinct = node.onnx("Gather", values, start_indices, axis=0)
    group = node.emit(relax.op.cumsum(node.cast(is_start, "int64"), 0, "int64") - const(1, "int64"))
    inverse = group
    if order is not None:
        inverse = node.onnx("ScatterElements", node.emit(relax.op.zeros_like(order)), order, group, axis=0)
    ends = node.emit(relax.op.concat([start_indices, node.reshape(node.number(count), [1])], 0))
    (groups,) = node.dims(start_indices)
    counts = kernel.kernel("counts", lambda i, ends: ends(i[0] + 1) - ends(i[0]), ends, shape=[groups])
    return [distinct, node.reshape(inverse, dims), counts]
