"""Ops that move elements: reshape, permute, slice, concatenate, pad. Result shapes are the ones torch inferred."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax, te, tirx

from ...ops.node import Position, const
from ...ops.required_sizes import as_expr
from ...ops.slicing import slice_axes
from ..torch_node import TorchNode, converts


@converts(
    "view",
    "reshape",
    "_unsafe_view",
    "squeeze",
    "unsqueeze",
    "flatten",
    "unflatten",
    "view_copy",
    "squeeze_copy",
    "unsqueeze_copy",
    "ravel",
)
def reshape(node: TorchNode, x: relax.Expr, *_: Any) -> relax.Expr:
    """Reshape to the result's shape."""
    if node.dtype != str(x.ty.dtype):
        raise node.refusal("as bits of another type")
    return node.reshape(x, node.shape)


@converts("expand", "broadcast_to", "expand_as", "expand_copy")
def expand(node: TorchNode, x: relax.Expr, *_: Any) -> relax.Expr:
    """Broadcast to the result's shape."""
    return node.broadcast(x, node.shape)


@converts("copy", "copy_")
def copy(node: TorchNode, _: relax.Expr, source: relax.Expr, *__: Any) -> relax.Expr:
    """Another tensor, cast and broadcast to this one's type and shape."""
    return node.broadcast(node.tensor(source), node.shape)


@converts("permute", "permute_copy")
def permute(node: TorchNode, x: relax.Expr, axes: list[int]) -> relax.Expr:
    """Permute axes."""
    return node.emit(relax.op.permute_dims(x, [node.axis(axis, len(axes)) for axis in axes]))


@converts("transpose", "t", "transpose_copy")
def transpose(node: TorchNode, x: relax.Expr, a: int = 0, b: int = 1) -> relax.Expr:
    """Swap two axes."""
    rank = len(node.shape)
    if rank < 2:
        return x
    axes = list(range(rank))
    a, b = node.axis(a, rank), node.axis(b, rank)
    axes[a], axes[b] = b, a
    return node.emit(relax.op.permute_dims(x, axes))


def cut_axis(node: TorchNode, x: relax.Expr, axis: int, first: Any, count: Any, step: int = 1) -> relax.Expr:
    """Slice `count` elements of an axis; a negative `first` counts from the end."""
    size = node.dims(x)[axis]
    if isinstance(first, int) and first < 0:
        first = max(size + first, 0) if isinstance(size, int) else size + first
    if isinstance(first, int) and isinstance(size, int):
        first = min(first, size)
    if not isinstance(first, int) and node.sizes.may_be_negative(first):
        first = tirx.Select(first < 0, first + size, first)
        node.onnx_node("Slice", [x]).require(first >= 0, f"begins before an axis of {size}")
    if isinstance(first, int) and first == 0 and step == 1 and node.sizes_equal(count, size):
        return x
    target = node.onnx_node("Slice", [x])
    if not (isinstance(first, int) and isinstance(count, int) and isinstance(size, int)):
        last = first + count * step - (step - 1)
        target.require(last <= size, f"takes {count} elements of an axis of {size}, from {first} on")
    return node.emit(slice_axes(target, x, {axis: (first, count, step)}))


@converts("slice", "slice_copy")
def slice_(
    node: TorchNode, x: relax.Expr, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> relax.Expr:
    """Slice an axis to the result's size."""
    axis = node.axis(dim, len(node.dims(x)))
    size, count = node.dims(x)[axis], node.value.shape[axis]
    start = 0 if start is None else start
    if not isinstance(count, int) and node.sizes.is_new(count):  # a bound is a number read from a tensor

        def clamp(index: Any) -> Any:
            index = as_expr(index)
            return tirx.max(tirx.min(tirx.Select(index < 0, index + size, index), as_expr(size)), as_expr(0))

        first = clamp(start)
        last = as_expr(size) if end is None else clamp(end)
        length = tirx.floordiv(tirx.max(last - first, as_expr(0)) + (step - 1), as_expr(step))
        node.sizes.bind(count, node.read_size(node.number(length)))
        start = first
    return cut_axis(node, x, axis, start, node.shape[axis], step)


@converts("narrow")
def narrow(node: TorchNode, x: relax.Expr, dim: int, start: Any, length: Any) -> relax.Expr:
    """Slice an axis by start and length."""
    return slice_(node, x, dim, start)


@converts("select", "select_copy")
def select(node: TorchNode, x: relax.Expr, dim: int, index: Any) -> relax.Expr:
    """One index of an axis, which is removed."""
    return node.reshape(cut_axis(node, x, node.axis(dim, len(node.dims(x))), index, 1), node.shape)


@converts("split", "split_with_sizes", "unbind", "chunk", "split_copy", "split_with_sizes_copy", "unbind_copy")
def split(node: TorchNode, x: relax.Expr, *arguments: Any) -> list[relax.Expr]:
    """Consecutive parts of an axis."""
    is_unbind = node.op.startswith("unbind")
    dim = arguments[0] if is_unbind and arguments else arguments[1] if len(arguments) > 1 else 0
    axis = node.axis(dim, len(node.dims(x)))
    parts, first = [], 0
    shapes = [node.sizes.shape(value.shape) for value in node.value]
    if not is_unbind and len(shapes) > 1 and all(isinstance(shape[axis], int) and shape[axis] for shape in shapes):
        ends = [int(end) for end in np.cumsum([shape[axis] for shape in shapes])[:-1]]
        pieces = node.emit(relax.op.split(x, ends, axis))
        return [node.emit(relax.TupleGetItem(pieces, index)) for index in range(len(shapes))]
    for shape in shapes:
        count = 1 if is_unbind else shape[axis]
        parts.append(node.reshape(cut_axis(node, x, axis, first, count), shape))
        first = first + count
    return parts


@converts("cat", "concat")
def cat(node: TorchNode, tensors: list[relax.Expr], dim: int = 0) -> relax.Expr:
    """Concatenate along an axis; empty vectors are ignored."""
    rank = len(node.shape)
    selected = [tensor for tensor in tensors if len(node.dims(tensor)) == rank]
    parts = [node.tensor(tensor) for tensor in selected]
    return parts[0] if len(parts) == 1 else node.emit(relax.op.concat(parts, node.axis(dim, rank)))


@converts("stack")
def stack(node: TorchNode, tensors: list[relax.Expr], dim: int = 0) -> relax.Expr:
    """Concatenate along a new axis."""
    axis = node.axis(dim, len(node.shape))
    parts = [node.emit(relax.op.expand_dims(node.tensor(tensor), axis)) for tensor in tensors]
    return parts[0] if len(parts) == 1 else node.emit(relax.op.concat(parts, axis))


@converts("repeat", "tile")
def repeat(node: TorchNode, x: relax.Expr, counts: list[Any]) -> relax.Expr:
    """Repeat along axes, with new axes in front."""
    dims = node.dims(x)
    x = node.reshape(x, [*[1] * (len(node.shape) - len(dims)), *dims])
    counts = [*[1] * (len(node.shape) - len(counts)), *counts]
    return node.onnx("Tile", x, counts)


@converts("flip")
def flip(node: TorchNode, x: relax.Expr, dims: list[int]) -> relax.Expr:
    """Reverse axes."""
    for dim in dims:
        x = node.emit(relax.op.flip(x, node.axis(dim, len(node.shape))))
    return x


@converts("roll")
def roll(node: TorchNode, x: relax.Expr, shifts: list[int], dims: list[int]) -> relax.Expr:
    """Rotate axes."""
    if not dims:
        raise node.refusal("of all elements as one row")
    for shift, dim in zip(shifts, dims, strict=True):
        axis = node.axis(dim, len(node.shape))
        (size,) = node.static([node.shape[axis]], "turns an axis of")
        start = (size - shift % size) % size if size else 0
        if start:
            parts = [cut_axis(node, x, axis, start, size - start), cut_axis(node, x, axis, 0, start)]
            x = node.emit(relax.op.concat(parts, axis))
    return x


@converts("tril", "triu")
def trilu(node: TorchNode, x: relax.Expr, diagonal: int = 0) -> relax.Expr:
    """The lower or upper triangle."""
    if str(x.ty.dtype) == "bool":
        as_int = node.onnx("Trilu", node.cast(x, "int32"), const(diagonal, "int64"), upper=int("triu" in node.op))
        return node.cast(as_int, "bool")
    return node.onnx("Trilu", x, const(diagonal, "int64"), upper=int(node.op.startswith("triu")))


@converts(
    "constant_pad_nd", "pad", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d",
    "replication_pad2d", "replication_pad3d",
)  # fmt: skip
def pad(node: TorchNode, x: relax.Expr, pads: list[Any], *options: Any) -> relax.Expr:
    """Pad or crop the ends of the last axes."""
    name = node.op.partition(".")[0]
    modes = {"reflect": "reflect", "replicate": "edge", "constant": "constant", "circular": "wrap"}
    mode = {"r": "reflect" if name.startswith("reflection") else "edge", "c": "constant"}.get(name[0], "")
    mode = mode or modes[options[0] if options else "constant"]
    value = (options[0] if name[0] == "c" else options[1] if len(options) > 1 else None) if options else None
    rank = len(node.shape)
    before = [0] * (rank - len(pads) // 2) + list(pads[::2])[::-1]
    after = [0] * (rank - len(pads) // 2) + list(pads[1::2])[::-1]
    numbers = node.static([*before, *after], "pads by")
    is_bool = node.dtype == "bool"
    data = node.cast(x, "uint8") if is_bool else x
    fill = const(0 if value is None else value, "uint8" if is_bool else node.dtype)
    out = node.onnx("Pad", data, const(numbers, "int64"), fill if mode == "constant" else None, mode=mode)
    return node.cast(out, "bool") if is_bool else out


@converts("pixel_shuffle")
def pixel_shuffle(node: TorchNode, x: relax.Expr, factor: int) -> relax.Expr:
    """Move channels to pixels."""
    return node.onnx("DepthToSpace", x, blocksize=factor, mode="CRD")


@converts("slice_scatter")
def slice_scatter(
    node: TorchNode, x: relax.Expr, source: relax.Expr, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> relax.Expr:
    """Copy with a slice of an axis replaced."""
    axis = node.axis(dim, len(node.shape))
    size, count = node.shape[axis], node.dims(source)[axis]
    first = 0 if start is None else start
    if isinstance(first, int) and isinstance(size, int):
        first = min(max(first + size, 0) if first < 0 else first, size)
    elif isinstance(first, int) and first < 0:
        first = size + first
    source = node.tensor(source)
    if isinstance(count, int) and count == 0:
        return x
    if step == 1:
        num_after = size - first - count
        parts = [] if isinstance(first, int) and first == 0 else [cut_axis(node, x, axis, 0, first)]
        parts.append(source)
        if not isinstance(num_after, int) or num_after > 0:
            parts.append(cut_axis(node, x, axis, first + count, num_after))
        return parts[0] if len(parts) == 1 else node.emit(relax.op.concat(parts, axis))
    first, num_elements = as_expr(first), as_expr(count)

    def element(i: Position, x: te.Tensor, source: te.Tensor) -> tirx.Expr:
        offset = i[axis].astype("int64") - first
        is_inside = tirx.all(
            offset >= 0, offset <= (num_elements - 1) * step, tirx.EQ(tirx.floormod(offset, as_expr(step)), as_expr(0))
        )
        source_index = tirx.max(tirx.min(tirx.floordiv(offset, as_expr(step)), num_elements - 1), as_expr(0))
        return tirx.if_then_else(is_inside, source(*i[:axis], source_index, *i[axis + 1 :]), x(*i))

    return node.onnx_node("Scatter", []).kernel("slice_scatter", element, x, source)


@converts("select_scatter")
def select_scatter(node: TorchNode, x: relax.Expr, source: relax.Expr, dim: int, index: Any) -> relax.Expr:
    """Copy with one index of an axis replaced."""
    axis = node.axis(dim, len(node.shape))
    return slice_scatter(node, x, node.emit(relax.op.expand_dims(source, axis)), dim, index)


@converts("unfold")
def unfold(node: TorchNode, x: relax.Expr, dim: int, size: int, step: int) -> relax.Expr:
    """Sliding windows of an axis, along a new last axis."""
    rank = len(node.dims(x))
    axis = node.axis(dim, rank)
    (count,) = node.static([node.shape[axis]], "cuts windows of number")
    indices = np.arange(count)[:, None] * step + np.arange(size)
    windows = node.onnx("Gather", x, const(indices, "int64"), axis=axis)
    order = [position for position in range(rank + 1) if position != axis + 1]
    return node.emit(relax.op.permute_dims(windows, [*order, axis + 1]))
