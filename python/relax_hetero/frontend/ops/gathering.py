"""Ops that read or write elements at computed indices: Gather, Scatter, OneHot, TopK and similar ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax, te, tirx, topi

from ...tir.math.extremes import is_nan
from .elementwise import cast, widened
from .node import Dim, Node, Position, as_constant, const, dtype_of, is_float, onnx_dtype
from .required_sizes import MAX_ELEMENTS, as_expr, renamed, require_equal, require_shape, shown
from .run_time.numbers import dims_at_run_time
from .run_time.run_time_axes import axes_input, with_named_axis_second
from .slicing import slice_axes
from .table import converts


def from_front(node: Node, indices: relax.Expr, extent: relax.Expr) -> relax.Expr:
    """Add `extent`, in int64 and broadcast, to negative indices."""
    if dtype_of(indices).startswith("uint"):
        return indices
    extent = cast(node, extent, dtype_of(indices))
    is_negative = node.emit(indices < const(0, dtype_of(indices)))
    return node.emit(relax.op.where(is_negative, indices + extent, indices))


def _normalized(node: Node, indices: relax.Expr, sizes: Sequence[Dim | None]) -> relax.Expr:
    """Check constant indices and make them non-negative; CheckValues handles others at run time.

    `sizes`: extent of the axis of each coordinate along the last axis, or of a single axis; None if unknown. Raises
    FrontendError if a constant index is out of range.
    """
    constant = as_constant(indices)
    if constant is None or constant.size == 0 or not all(isinstance(size, int) for size in sizes):
        return indices
    extents = np.array(sizes, "int64")
    if np.any((constant < -extents) | (constant >= extents)):
        raise node.refusal(f"indices from {constant.min()} to {constant.max()} are out of an axis of {list(sizes)}")
    return const(np.where(constant < 0, constant + extents, constant).reshape(constant.shape), "int64")


def _axis_size(node: Node, data: relax.Expr, axis: int) -> Dim | None:
    return node.shape(data)[axis] if data.ty.shape is not None else None


@converts("Gather")
def gather(node: Node) -> relax.Expr:
    """Slices of one axis at indices of any rank."""
    data = node.inputs[0]
    if isinstance(data, relax.ShapeExpr):
        index = node.constant(1)
        if index is not None and index.ndim == 0:
            return data.values[int(index)]
    data, indices = node.tensor(0), node.tensor(1)
    axis = node.axis(node.attribute("axis", 0), node.rank(data))
    indices = _normalized(node, indices, [_axis_size(node, data, axis)])
    return node.emit(relax.op.take(data, indices, axis, "fast"))


@converts("GatherElements")
def gather_elements(node: Node) -> relax.Expr:
    """Elements at indices along one axis; the other coordinates are those of the index."""
    data, indices = node.tensor(0), node.tensor(1)
    axis = node.axis(node.attribute("axis", 0), node.rank(data))
    _check_indices(node, data, indices, axis)
    indices = _normalized(node, indices, [_axis_size(node, data, axis)])
    return node.emit(relax.op.gather_elements(data, indices, axis))


def _check_indices(node: Node, data: relax.Expr, indices: relax.Expr, axis: int) -> None:
    """Require that indices have the data's rank, and fit into its shape except along `axis`."""
    dims, index_dims = node.shape(data), node.shape(indices)
    text = f"its indices have shape {shown(index_dims)}, which does not fit into {shown(dims)} besides axis {axis}"
    if len(dims) != len(index_dims):
        raise node.refusal(text)
    for other_axis, (size, count) in enumerate(zip(dims, index_dims, strict=True)):
        if other_axis != axis:
            node.require(as_expr(count) <= as_expr(size), text)


@converts("GatherND")
def gather_nd(node: Node) -> relax.Expr:
    """Slices at coordinates, which are the last axis of the indices."""
    data, indices = node.tensor(0), node.tensor(1)
    batch_dims = node.attribute("batch_dims", 0)
    for axis in range(batch_dims):
        batches = node.shape(indices)[axis]
        require_equal(node, batches, node.shape(data)[axis], f"axis {axis} of its indices, a batch, has")
    return node.emit(relax.op.gather_nd(data, _coordinates(node, data, indices, batch_dims), batch_dims))


def _coordinates(node: Node, data: relax.Expr, indices: relax.Expr, first: int) -> relax.Expr:
    length = node.shape(indices)[-1]
    if not isinstance(length, int):
        raise node.refusal("needs a static number of coordinates")
    sizes = node.shape(data)[first : first + length] if data.ty.shape is not None else [None]
    return _normalized(node, indices, sizes)


def _reduction(node: Node) -> str:
    reduction = node.attribute("reduction", "none")
    if reduction not in ("none", "add", "mul", "min", "max"):
        raise node.refusal(f"reduction {reduction!r} is unknown")
    return "update" if reduction == "none" else reduction


@converts("ScatterElements")
def scatter_elements(node: Node) -> relax.Expr:
    """Copy of the data with elements replaced by, or reduced with, updates."""
    data, indices, updates = node.tensor(0), node.tensor(1), node.tensor(2)
    axis = node.axis(node.attribute("axis", 0), node.rank(data))
    _check_indices(node, data, indices, axis)
    updates = require_shape(node, updates, node.shape(indices), "its updates")
    indices = renamed(node, indices, node.shape(updates))  # a static size of either holds for both
    indices = _normalized(node, indices, [_axis_size(node, data, axis)])
    return node.emit(relax.op.scatter_elements(data, indices, updates, axis, _reduction(node)))


@converts("Scatter")
def scatter(node: Node) -> relax.Expr:
    """The old name of ScatterElements without a reduction."""
    return scatter_elements(node)


@converts("ScatterND")
def scatter_nd(node: Node) -> relax.Expr:
    """Copy of the data with slices at coordinates replaced by, or reduced with, updates."""
    data, indices, updates = node.tensor(0), node.tensor(1), node.tensor(2)
    index_dims = node.shape(indices)
    slices = node.shape(data)[int(index_dims[-1]) :] if isinstance(index_dims[-1], int) else []
    updates = require_shape(node, updates, [*index_dims[:-1], *slices], "its updates")
    indices = renamed(node, indices, [*node.shape(updates)[: len(index_dims) - 1], index_dims[-1]])
    return node.emit(relax.op.scatter_nd(data, _coordinates(node, data, indices, 0), updates, _reduction(node)))


@converts("OneHot")
def one_hot(node: Node) -> relax.Expr:
    """New axis of size `depth`, on at the (possibly negative) index, off elsewhere and for indices out of range."""
    indices, values = node.tensor(0), node.tensor(2)
    values = require_shape(node, values, [2], "its values, off and on,")
    sizes = node.dims(1)
    if sizes is None:
        sizes = list(dims_at_run_time(node, node.emit(relax.op.reshape(node.tensor(1), (1,))), "depth"))
    depth = sizes[0]
    node.require(as_expr(depth) > 0, f"its depth is {depth}")
    rank = node.rank(indices) + 1
    axis = node.axis(node.attribute("axis", -1), rank)
    int_indices = cast(node, indices, "int64")  # of any numeric type
    if not isinstance(depth, int):
        return _one_hot_at_run_time(node, int_indices, values, depth, axis)
    node.check_constant_size(depth)
    normalized = from_front(node, int_indices, const(depth, "int64"))
    positions = np.arange(depth).reshape([-1 if i == axis else 1 for i in range(rank)])
    is_on = node.emit(relax.op.equal(relax.op.expand_dims(normalized, axis), const(positions, "int64")))
    off, on = (node.emit(relax.op.reshape(relax.op.strided_slice(values, [0], [i], [i + 1]), ())) for i in (0, 1))
    return node.emit(relax.op.where(is_on, on, off))


def _one_hot_at_run_time(node: Node, indices: relax.Expr, values: relax.Expr, depth: Dim, axis: int) -> relax.Expr:
    def element(i: Position, places: te.Tensor, value: te.Tensor) -> tirx.Expr:
        index = places(*i[:axis], *i[axis + 1 :])
        is_on = tirx.any(index == i[axis], index + depth == i[axis])
        return tirx.Select(is_on, value(1), value(0))

    dims = node.shape(indices)
    return node.kernel("one_hot", element, indices, values, shape=[*dims[:axis], depth, *dims[axis:]])


# Type that TVM cannot sort -> wider type.
_SORTED_AS = {
    "float16": "float32", "bfloat16": "float32", "int8": "int32", "uint8": "int32", "int16": "int32",
    "uint16": "int32", "uint32": "int64",
}  # fmt: skip


@converts("TopK")
def top_k(node: Node) -> relax.Expr:
    """The k largest or smallest elements along an axis, in order, with their indices."""
    data = node.tensor(0)
    sizes = node.dims(1) if node.opset >= 10 else [node.attribute("k", 1)]
    if sizes is None:
        sizes = list(dims_at_run_time(node, node.emit(relax.op.reshape(node.tensor(1), (1,))), "k"))
    k = sizes[0]
    axis = node.axis(node.attribute("axis", -1), node.rank(data))
    size = node.shape(data)[axis]
    text = f"k is {k}, but the axis has {size} elements"
    node.require(tirx.all(as_expr(k) >= 0, as_expr(k) <= as_expr(size)), text)
    largest, dtype = bool(node.attribute("largest", 1)), dtype_of(data)
    sortable = "int64" if dtype == "uint64" else _SORTED_AS.get(dtype, dtype)
    if sortable not in ("float32", "float64", "int32", "int64"):
        raise node.refusal(f"elements of type {dtype} cannot be sorted")
    if isinstance(k, int) and k == 0:
        dims = [0 if i == axis else dim for i, dim in enumerate(node.shape(data))]
        return relax.Tuple([node.filled(dims, 0, kind) for kind in (dtype, "int64")])
    count = k if isinstance(k, int) else -1  # all of them
    data = node.kernel("signed", _signed, data) if dtype == "uint64" else cast(node, data, sortable)
    keys = node.kernel("sort_keys", _sort_key, data) if is_float(sortable) else data
    result = node.emit(relax.op.topk(keys, count, axis, "both", largest, "int64"))
    values, indices = (node.emit(relax.TupleGetItem(result, i)) for i in (0, 1))
    if is_float(sortable):
        values = node.kernel("sorted_values", _from_sort_key, values)
    if not isinstance(k, int):
        values, indices = (slice_axes(node, value, {axis: (0, k, 1)}) for value in (values, indices))
    if dtype == "uint64":
        return relax.Tuple([node.kernel("unsigned", _unsigned, values), indices])
    return relax.Tuple([cast(node, values, dtype), indices])


def _signed(i: Position, x: te.Tensor) -> tirx.Expr:
    """Map uint64 to int64 in the same order, by flipping the top bit."""
    return tirx.bitwise_xor(x(*i).astype("int64"), tirx.min_value("int64"))


def _unsigned(i: Position, x: te.Tensor) -> tirx.Expr:
    return tirx.bitwise_xor(x(*i), tirx.min_value("int64")).astype("uint64")


def _sort_key(i: Position, x: te.Tensor) -> tirx.Expr:
    """Map floats to integers in the same order, NaN largest, because TVM's sort requires a total order."""
    dtype = str(x.dtype).replace("float", "int")
    raw = tirx.reinterpret(tvm.ir.PrimType(dtype), x(*i))
    flipped = tirx.bitwise_xor(raw, tirx.max_value(dtype))  # reverses the order of negative numbers
    key = tirx.Select(raw < 0, flipped, raw)
    signed_zero_key = tirx.Select(tirx.EQ(x(*i), tirx.const(0, x.dtype)), tirx.const(0, dtype), key)
    return tirx.Select(is_nan(x(*i)), tirx.max_value(dtype), signed_zero_key)


def _from_sort_key(i: Position, keys: te.Tensor) -> tirx.Expr:
    key, dtype = keys(*i), str(keys.dtype)
    raw = tirx.Select(key < 0, tirx.bitwise_xor(key, tirx.max_value(dtype)), key)
    return tirx.reinterpret(tvm.ir.PrimType(dtype.replace("int", "float")), raw)


@converts("Compress")
def compress(node: Node) -> relax.Expr:
    """Slices of an axis, or elements of the flat tensor, where a condition holds; it may be shorter than the axis."""
    data, condition = node.tensor(0), node.tensor(1)
    axis_attribute = node.attribute("axis")
    if axis_attribute is None:
        data = node.emit(relax.op.reshape(data, (-1,)))
    axis = 0 if axis_attribute is None else node.axis(axis_attribute, node.rank(data))
    positions = node.emit(relax.op.nonzero(_clip_condition(node, condition, node.shape(data)[axis])))
    number = tirx.Var("number_kept", "int64")
    positions = node.builder.match_cast(positions, relax.TensorType((1, number), "int64"))
    flat = node.emit(relax.op.reshape(positions, (number,)))
    return node.emit(relax.op.take(data, flat, axis, "fast"))


def _clip_condition(node: Node, condition: relax.Expr, size: Dim) -> relax.Expr:
    """The condition of Compress, False beyond an axis of this size."""
    (length,) = node.shape(condition)
    if isinstance(length, int) and isinstance(size, int) and length <= size:
        return condition

    def element(i: Position, flags: te.Tensor, extent: list[Any]) -> tirx.Expr:
        return tirx.all(flags(i[0]), i[0] < extent[0])

    return node.kernel("kept", element, condition, [as_expr(size)])


@converts("NonZero")
def non_zero(node: Node) -> relax.Expr:
    """Coordinates of nonzero elements, one column each."""
    data = node.tensor(0)
    if node.rank(data) == 0:
        raise node.refusal("of a scalar cannot be imported")
    positions = node.emit(relax.op.nonzero(data))
    number = tirx.Var("number_nonzero", "int64")
    return node.builder.match_cast(positions, relax.TensorType((node.rank(data), number), "int64"))


@converts("ReverseSequence")
def reverse_sequence(node: Node) -> relax.Expr:
    """Reverse the first `sequence_lens[b]` steps of each sequence."""
    data, lengths = node.tensor(0), node.tensor(1)
    time, batch = node.attribute("time_axis", 0), node.attribute("batch_axis", 1)
    lengths = require_shape(node, lengths, [node.shape(data)[batch]], "its lengths, one for each sequence,")

    def element(i: Position, x: te.Tensor, length: te.Tensor) -> tirx.Expr:
        steps = length(i[batch])
        step = tirx.Select(i[time] < steps, steps - 1 - i[time], i[time])
        return x(*i[:time], step, *i[time + 1 :])

    return node.kernel("reverse_sequence", element, data, cast(node, lengths, "int64"), ranges=(1, 0, time, 1))


@converts("TensorScatter")
def tensor_scatter(node: Node) -> relax.Expr:
    """Cache with an update written along an axis from an index per batch, optionally circular."""
    data, update = node.tensor(0), node.tensor(1)
    rank = node.rank(data)
    axis = node.axis(node.attribute("axis", -2), rank)
    is_circular = node.attribute("mode", "linear") == "circular"
    dims, update_dims = node.shape(data), node.shape(update)
    expected = [update_dims[i] if i == axis else dim for i, dim in enumerate(dims)]
    update = require_shape(node, update, expected, "its update")
    node.require(
        as_expr(update_dims[axis]) <= as_expr(dims[axis]),
        f"its update {shown(update_dims)} is longer than {shown(dims)}",
    )
    if node.has(2):
        require_shape(node, node.tensor(2), dims[:1], "its indices, one for each batch,")
    starts = cast(node, node.tensor(2), "int64") if node.has(2) else node.filled(dims[:1], 0, "int64")

    # A scatter can update a donated cache in place.
    def index_of(i: Position, cache: te.Tensor, start: te.Tensor) -> tirx.Expr:
        step = i[axis] + start(i[0])
        return topi.floor_mod(step, cache.shape[axis]) if is_circular else step

    # Circular indices are always valid; otherwise the scatter refuses indices out of range.
    ranges = (1, -1, 0, MAX_ELEMENTS) if is_circular else (1, 0, axis, 1)
    index = node.kernel("places", index_of, data, starts, shape=node.shape(update), ranges=ranges)
    return node.emit(relax.op.scatter_elements(data, index, update, axis))


@converts("EyeLike")
def eye_like(node: Node) -> relax.Expr:
    """Ones on a diagonal, of the input's shape."""
    data = node.tensor(0)
    if node.rank(data) != 2:
        raise node.refusal(f"found an input of rank {node.rank(data)}, expected a matrix")
    dtype = onnx_dtype(node.attribute("dtype")) if "dtype" in node.attributes else dtype_of(data)
    diagonal = int(node.attribute("k", 0))

    def element(i: Position, _: te.Tensor) -> tirx.Expr:
        return tirx.Select(i[1] - i[0] == diagonal, tirx.const(1, dtype), tirx.const(0, dtype))

    dims = node.shape(data)
    if all(isinstance(dim, int) for dim in dims):
        rows, columns = map(int, dims)
        node.check_constant_size(rows, columns)
        return const(np.eye(rows, columns, k=diagonal), dtype)
    return node.kernel("eye", element, data)


@converts("CumSum", "CumProd")
def cumulate(node: Node) -> relax.Expr:
    """Cumulative sum or product along an axis, inclusive or exclusive, from either end."""
    data = node.tensor(0)
    dtype = dtype_of(data)
    dims, constant_axis = node.shape(data), node.constant(1)
    if constant_axis is None:
        named, _ = axes_input(node, 1, len(dims))
        data, axis = with_named_axis_second(node, data, named), 1
    else:
        axis = node.axis(int(constant_axis.reshape(())), len(dims))
    operation: Any = relax.op.cumsum if node.op_type == "CumSum" else relax.op.cumprod
    wide = widened(node, data)
    backwards = bool(node.attribute("reverse", 0))
    if backwards:
        wide = node.emit(relax.op.flip(wide, axis))
    result = node.emit(operation(wide, axis, dtype_of(wide), bool(node.attribute("exclusive", 0))))
    if backwards:
        result = node.emit(relax.op.flip(result, axis))
    result = cast(node, result, dtype)
    return result if constant_axis is not None else node.emit(relax.op.reshape(result, dims))
