"""Ops that move elements: Pad, Concat, SpaceToDepth, Col2Im and similar ones."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from tvm import relax, te, tirx, topi

from .elementwise import cast
from .node import Dim, Node, Position, as_dim, const, dtype_of, is_float
from .required_sizes import (
    MAX_ELEMENTS,
    any_of,
    as_expr,
    equal,
    renamed,
    require_equal,
    require_multiple,
    require_shape,
    shown,
)
from .run_time.numbers import dims_at_run_time, dims_of_vector, sizes_of
from .run_time.pads import pads_of_named_axes, pads_to
from .table import converts

_MAX_GATHERED_SIZE = 2**20
"""Padded axes up to this size are gathered by constant indices; kernels compute the indices of longer ones."""


def _pads(node: Node, rank: int) -> tuple[list[Dim], list[Dim]] | None:
    """Elements to add (or remove, if negative) before and after each axis; None if they are dynamic."""
    pads = node.dims(1) if node.has(1) else node.attribute("pads") or node.attribute("paddings")
    if pads is None:
        return None
    axes = _padded_axes(node, rank)
    if len(pads) != 2 * len(axes):
        raise node.refusal(f"has {len(pads)} pads for {len(axes)} axes")
    before: list[Dim] = [0] * rank
    after: list[Dim] = [0] * rank
    for position, axis in enumerate(axes):
        before[axis], after[axis] = pads[position], pads[len(axes) + position]
    return before, after


def _padded_axes(node: Node, rank: int) -> list[int]:
    axes = node.dims(3) if node.has(3) else list(range(rank))
    if axes is None:
        raise node.unknown("its axes are")
    normalized = [node.axis(int(axis), rank) for axis in axes]
    if len(set(normalized)) != len(normalized):
        raise node.refusal(f"pads an axis twice: axes {normalized}")
    return normalized


def _repeated_index(index: tirx.Expr, size: Any, mode: str) -> tirx.Expr:
    """Index in [0, size) of the element that an index out of range repeats."""
    if mode == "edge":
        return tirx.max(tirx.min(index, size - 1), 0)
    if mode == "wrap":
        return topi.floor_mod(index, tirx.max(size, 1))
    period = tirx.max(2 * (size - 1), 1)
    inside = topi.floor_mod(index, period)
    return tirx.Select(inside < size, inside, period - inside)


def _remaining(dim: Dim, before: Dim, after: Dim) -> tirx.Expr:
    """Number of elements of an axis that negative pads leave."""
    return as_expr(dim) + tirx.min(as_expr(before), 0) + tirx.min(as_expr(after), 0)


def _require_valid_pads(node: Node, dims: list[Dim], before: list[Dim], after: list[Dim], mode: str) -> None:
    """Require that pads leave a size of at least 0, or of at least 1 if the mode repeats elements."""
    for axis, (dim, first, last) in enumerate(zip(dims, before, after, strict=True)):
        if isinstance(first, int) and isinstance(last, int) and first == last == 0:
            continue
        for amount in (first, last):
            is_bounded = tirx.all(as_expr(amount) <= MAX_ELEMENTS, as_expr(amount) >= -MAX_ELEMENTS)
            node.require(is_bounded, f"a pad of axis {axis} is {amount}")
        text = f"its pads, {first} and {last}, leave too little of axis {axis}, of {dim} elements, for mode {mode!r}"
        if mode == "constant":
            node.require(as_expr(dim) + first + last >= 0, text)
        else:
            is_unpadded = tirx.all(equal(first, 0), equal(last, 0))
            node.require(any_of([_remaining(dim, first, last) >= 1, is_unpadded]), text)


@converts("Pad")
def pad(node: Node) -> relax.Expr:
    """Pad by constant, edge, reflect or wrap; a negative pad removes elements. The constant may be an input."""
    data = node.tensor(0)
    dims, dtype = node.shape(data), dtype_of(data)
    mode = node.attribute("mode", "constant")
    if mode not in ("constant", "edge", "reflect", "wrap"):
        raise node.refusal(f"mode is {mode!r}")
    if node.has(3) and node.dims(3) is None:
        node = replace(node, inputs=[data, pads_of_named_axes(node, len(dims)), *node.inputs[2:3]])
    pads = _pads(node, len(dims))
    if pads is None:
        return _pad_at_run_time(node, data, mode)
    before, after = pads
    _require_valid_pads(node, dims, before, after, mode)
    padded_axes = [axis for axis in range(len(dims)) if before[axis] != 0 or after[axis] != 0]
    if not padded_axes:
        return data
    sizes: list[Dim] = [dim + before[i] + after[i] for i, dim in enumerate(dims)]
    constant_pads = [amount for amount in [*before, *after] if isinstance(amount, int)]
    if len(constant_pads) == 2 * len(dims):
        is_short = all(isinstance(sizes[axis], int) and int(sizes[axis]) <= _MAX_GATHERED_SIZE for axis in padded_axes)
        if mode != "constant" and is_short:
            return _pad_by_gather(node, data, constant_pads[: len(dims)], constant_pads[len(dims) :], mode)
        constant = node.constant(2) if node.has(2) else np.array(node.attribute("value", 0))
        number = float(constant.item()) if constant is not None and constant.size == 1 else None
        if mode == "constant" and number is not None and min(constant_pads) >= 0 and _is_exact_fill(number, dtype):
            widths = np.reshape(constant_pads, (2, -1)).T.reshape(-1).tolist()
            return node.emit(relax.op.nn.pad(data, widths, "constant", number))

    def element(i: Position, x: te.Tensor, filling: te.Tensor) -> tirx.Expr:
        axis_pads = {axis: (before[axis], after[axis]) for axis in padded_axes}
        return _padded_element(i, x, filling, axis_pads, mode)

    return node.kernel("pad", element, data, _fill_value(node, dtype), shape=sizes)


def _fill_value(node: Node, dtype: str) -> relax.Expr:
    if not node.has(2):
        return const(node.attribute("value", 0), dtype)
    value = node.tensor(2)
    return node.emit(relax.op.reshape(value, ())) if node.rank(value) else value


def _padded_element(
    i: Position, x: te.Tensor, filling: te.Tensor, pads: dict[int, tuple[Any, Any]], mode: str
) -> tirx.Expr:
    """One element of a padded tensor; `pads` has the pads before and after each padded axis."""
    indices, checks = list(i), []
    for axis, (before, after) in pads.items():
        index = i[axis] - as_expr(before)
        if mode == "constant":
            indices[axis] = index
            checks += [index >= 0, index < x.shape[axis]]
        else:
            cut_off = tirx.max(-as_expr(before), 0)
            remaining = _remaining(x.shape[axis], before, after)
            indices[axis] = _repeated_index(index - cut_off, remaining, mode) + cut_off
    return tirx.if_then_else(tirx.all(*checks), x(*indices), filling()) if checks else x(*indices)


def _pad_at_run_time(node: Node, data: relax.Expr, mode: str) -> relax.Expr:
    """Pad by dynamic pads; the sizes of the result are read from a vector at run time."""
    dims = node.shape(data)
    axes = _padded_axes(node, len(dims))
    pad_vector = cast(node, require_shape(node, node.tensor(1), [2 * len(axes)], "its pads"), "int64")
    pad_dims = dims_at_run_time(node, pad_vector, "pad")
    first_pads: list[Dim] = [0] * len(dims)
    last_pads: list[Dim] = [0] * len(dims)
    for position, axis in enumerate(axes):
        first_pads[axis], last_pads[axis] = as_dim(pad_dims[position]), as_dim(pad_dims[len(axes) + position])
    _require_valid_pads(node, dims, first_pads, last_pads, mode)

    def scatter_to_rank(first: int) -> relax.Expr:
        part = node.emit(relax.op.strided_slice(pad_vector, [0], [first], [first + len(axes)]))
        zeros = const(np.zeros(len(dims)), "int64")
        return node.emit(relax.op.scatter_elements(zeros, const(axes, "int64"), part, 0))

    before, after = scatter_to_rank(0), scatter_to_rank(len(axes))
    total = node.emit(sizes_of(node, data) + (before + after))
    padded = dims_at_run_time(node, total, "padded_dim")
    sizes = [
        dim if isinstance(pad, int) and isinstance(last_pad, int) and pad == last_pad == 0 else size
        for dim, pad, last_pad, size in zip(dims, first_pads, last_pads, padded, strict=True)
    ]

    def element(i: Position, x: te.Tensor, filling: te.Tensor, first: te.Tensor, last: te.Tensor) -> tirx.Expr:
        return _padded_element(i, x, filling, {axis: (first(axis), last(axis)) for axis in axes}, mode)

    return node.kernel("pad", element, data, _fill_value(node, dtype_of(data)), before, after, shape=sizes)


def _is_exact_fill(value: float, dtype: str) -> bool:
    """Return whether the float attribute of `nn.pad` represents a number of this type."""
    if is_float(dtype):
        return dtype != "bfloat16" and (abs(value) < 2.0**31 or value == float("-inf"))
    return dtype in ("int8", "uint8", "int32") and abs(value) < 2.0**31


def _pad_by_gather(node: Node, data: relax.Expr, before: list[int], after: list[int], mode: str) -> relax.Expr:
    """Pad by repeated elements, as a gather along each axis."""
    for axis, size in enumerate(node.shape(data)):
        if before[axis] or after[axis]:
            cut_off = max(-before[axis], 0)
            remaining = int(size) - cut_off + min(after[axis], 0)
            node.check_constant_size(before[axis] + int(size) + after[axis], itemsize=32)
            indices = np.arange(-before[axis], int(size) + after[axis]) - cut_off
            if mode == "reflect":
                indices = remaining - 1 - np.abs(indices % max(2 * (remaining - 1), 1) - (remaining - 1))
            elif mode == "wrap":
                indices = indices % remaining
            indices = np.clip(indices, 0, remaining - 1) + cut_off
            data = node.emit(relax.op.take(data, const(indices, "int64"), axis, "fast"))
    return data


@converts("Trilu")
def trilu(node: Node) -> relax.Expr:
    """Upper or lower triangle of the last two axes from diagonal k, which may be an input."""
    data = node.tensor(0)
    dtype, is_upper = dtype_of(data), bool(node.attribute("upper", 1))
    diagonal_input = node.tensor(1) if node.has(1) else const(0, "int64")
    diagonal = node.emit(relax.op.reshape(diagonal_input, ())) if node.rank(diagonal_input) else diagonal_input

    def element(i: Position, x: te.Tensor, k: te.Tensor) -> tirx.Expr:
        offset = i[-1] - i[-2]
        return tirx.Select(offset >= k() if is_upper else offset <= k(), x(*i), tirx.const(0, dtype))

    return node.kernel("trilu", element, data, diagonal)


@converts("Flatten")
def flatten(node: Node) -> relax.Expr:
    """Reshape to a matrix: axes before `axis` are rows, the others columns."""
    data = node.tensor(0)
    dims, axis = node.shape(data), node.attribute("axis", 1)
    if not -len(dims) <= axis <= len(dims):
        raise node.refusal(f"axis {axis} is out of range for rank {len(dims)}")
    axis += len(dims) if axis < 0 else 0
    target = [math.prod(dims[:axis]), math.prod(dims[axis:])]
    if 0 in [dim for dim in target if isinstance(dim, int)]:  # in TVM's reshape, 0 copies a size
        return node.filled(target, 0, dtype_of(data))
    return node.emit(relax.op.reshape(data, target))


@converts("Transpose")
def transpose(node: Node) -> relax.Expr:
    """Permute axes, by default in reverse order."""
    data = node.tensor(0)
    rank = node.rank(data)
    order = list(node.attribute("perm", None) or reversed(range(rank)))
    if sorted(order) != list(range(rank)):
        raise node.refusal(f"its perm {order} is not an order of {rank} axes")
    return node.emit(relax.op.permute_dims(data, order)) if rank else data


@converts("Concat")
def concat(node: Node) -> relax.Expr:
    """Concatenate inputs that differ in size along one axis only."""
    values = [node.tensor(i) for i in range(len(node.inputs))]
    axis = node.axis(node.attribute("axis", 1 if node.opset < 4 else None), node.rank(values[0]))
    shapes = [node.shape(value) for value in values]
    text = (
        f"its inputs have the shapes {', '.join(map(shown, shapes))}, expected shapes that differ on axis {axis} only"
    )
    if len({len(dims) for dims in shapes}) > 1:
        raise node.refusal(text)
    common_dims = [([dim for dim in dims if isinstance(dim, int)] or dims)[0] for dims in zip(*shapes, strict=True)]
    for index, dims in enumerate(shapes):
        for other_axis, dim in enumerate(dims):
            if other_axis != axis:
                node.require(equal(dim, common_dims[other_axis]), text)
        values[index] = renamed(node, values[index], [*common_dims[:axis], dims[axis], *common_dims[axis + 1 :]])
    return node.emit(relax.op.concat(values, axis))


@converts("SpaceToDepth")
def space_to_depth(node: Node) -> relax.Expr:
    """Blocks of an image become channels; in mode CRD (since opset 26) the original channel varies slowest."""
    data = node.tensor(0)
    batch, channels, height, width = node.shape(data)
    block = _block_size(node)
    require_multiple(node, height, block, "its image has a height of")
    require_multiple(node, width, block, "its image has a width of")
    inner = [batch, channels, height // block, block, width // block, block]
    grouped = node.emit(relax.op.reshape(data, inner))
    slowest_channel = node.attribute("mode", "DCR") == "CRD"
    moved = node.emit(relax.op.permute_dims(grouped, [0, 1, 3, 5, 2, 4] if slowest_channel else [0, 3, 5, 1, 2, 4]))
    return node.emit(relax.op.reshape(moved, [batch, channels * block * block, height // block, width // block]))


def _block_size(node: Node) -> int:
    block = int(node.attribute("blocksize"))
    if block < 1:
        raise node.refusal(f"its blocksize is {block}")
    return block


@converts("DepthToSpace")
def depth_to_space(node: Node) -> relax.Expr:
    """Channels become blocks of an image; in mode CRD the remaining channel varies slowest."""
    data = node.tensor(0)
    batch, channels, height, width = node.shape(data)
    block = _block_size(node)
    require_multiple(node, channels, block * block, "its image has a number of channels of")
    out_channels = channels // (block * block)
    is_channel_first = node.attribute("mode", "DCR") == "CRD"
    inner = [out_channels, block, block] if is_channel_first else [block, block, out_channels]
    grouped = node.emit(relax.op.reshape(data, [batch, *inner, height, width]))
    moved = node.emit(relax.op.permute_dims(grouped, [0, 1, 4, 2, 5, 3] if is_channel_first else [0, 3, 4, 1, 5, 2]))
    return node.emit(relax.op.reshape(moved, [batch, out_channels, height * block, width * block]))


@converts("Col2Im")
def col2im(node: Node) -> relax.Expr:
    """Sum of blocks (columns) at their positions in an image."""
    data = node.tensor(0)
    image, block = (dims_of_vector(node, node.tensor(i), prefix) for i, prefix in ((1, "image"), (2, "block")))
    count = len(image)
    strides, dilations = node.attribute("strides", (1,) * count), node.attribute("dilations", (1,) * count)
    pads = node.attribute("pads", (0,) * (2 * count))
    batch, columns, windows = node.shape(data)
    if len(block) != count:
        raise node.refusal(f"has blocks of {len(block)} axes for an image of {count}")
    for size in [*image, *block]:
        node.require(tirx.all(as_expr(size) >= 1, as_expr(size) <= MAX_ELEMENTS), f"has a size of {size}")
    spans = [image[a] + pads[a] + pads[count + a] - dilations[a] * (block[a] - 1) - 1 for a in range(count)]
    for span in spans:
        node.require(as_expr(span) >= 0, f"an image of {shown(image)} is smaller than blocks of {shown(block)}")
    steps = [span // stride + 1 for span, stride in zip(spans, strides, strict=True)]
    elements = math.prod(block)
    safe = elements if isinstance(elements, int) else tirx.max(elements, as_expr(1))
    remainder = columns % safe if isinstance(columns, int) and isinstance(safe, int) else tirx.floormod(columns, safe)
    text = f"axis 1 of its input has a size of {columns}, expected a multiple of {elements}"
    node.require(equal(as_dim(remainder), 0), text)
    node.require(as_expr(columns) >= 1, f"axis 1 of its input has {columns} elements")
    require_equal(node, windows, math.prod(steps), "axis 2 of its input, the places of a block, has")
    offsets = [te.reduce_axis((0, size), name=f"k{a}") for a, size in enumerate(block)]

    def element(i: Position, x: te.Tensor) -> tirx.Expr:
        batch_index, row, *pixel = i
        column, checks = tirx.const(0, "int64"), []
        for a in range(count):
            distance = pixel[a] + pads[a] - offsets[a] * dilations[a]
            step = topi.floor_divide(distance, strides[a])
            checks += [distance >= 0, topi.floor_mod(distance, strides[a]) == 0, step < steps[a]]
            row, column = row * block[a] + offsets[a], column * steps[a] + step
        inside = tirx.if_then_else(tirx.all(*checks), x(batch_index, row, column), tirx.const(0, str(x.dtype)))
        return te.sum(inside, axis=offsets)

    return node.kernel("col2im", element, data, shape=[batch, as_dim(columns // safe), *image])


@converts("MaxUnpool")
def max_unpool(node: Node) -> relax.Expr:
    """Elements at flat indices of an image of the default output size, zeros elsewhere."""
    data, indices = node.tensor(0), node.tensor(1)
    shape = node.static_shape(data)
    indices = require_shape(node, indices, shape, "its indices")
    kernel = [int(size) for size in node.attribute("kernel_shape")]
    count = len(kernel)
    strides, pads = node.attribute("strides", (1,) * count), node.attribute("pads", (0,) * (2 * count))
    default_sizes = [(shape[2 + a] - 1) * strides[a] + kernel[a] - pads[a] - pads[count + a] for a in range(count)]
    sizes = [*shape[:2], *default_sizes]
    target = node.dims(2) if node.has(2) else sizes
    if target is not None and all(isinstance(size, int) for size in target):
        sizes = [int(size) for size in target]
        target = sizes
    elements = math.prod([*shape[:2], *default_sizes])
    flat = node.filled([elements], 0, dtype_of(data))
    flat_indices = cast(node, indices, "int64")
    # Negative indices are invalid, but a scatter would count them from the end.
    is_negative = flat_indices < const(0, "int64")
    flat_indices = node.emit(relax.op.where(is_negative, const(elements, "int64"), flat_indices))
    scattered = relax.op.scatter_elements(flat, relax.op.reshape(flat_indices, (-1,)), relax.op.reshape(data, (-1,)), 0)
    result = node.emit(relax.op.reshape(scattered, [*shape[:2], *default_sizes]))
    if target is not sizes:
        output_shape = require_shape(node, node.tensor(2), [len(shape)], "its output_shape")
        spatial = node.emit(relax.op.strided_slice(output_shape, [0], [2], [len(shape)]))
        pads = pads_to(node, result, spatial, range(2, len(shape)), is_centered=False)
        return pad(node.as_op("Pad", [result, pads], opset=13))
    if sizes == [*shape[:2], *default_sizes]:
        return result
    width = [0] * 2 + [0] * count + [0] * 2 + [sizes[2 + a] - default_sizes[a] for a in range(count)]
    return pad(node.as_op("Pad", [result, const(width, "int64")], opset=13))


@converts("CenterCropPad")
def center_crop_pad(node: Node) -> relax.Expr:
    """Crop or pad with zeros to a target size, evenly on both sides (an odd element goes after)."""
    data = node.tensor(0)
    rank, target = node.rank(data), node.dims(1)
    axes = [node.axis(axis, rank) for axis in node.attribute("axes", range(rank))]
    if len(set(axes)) != len(axes):
        raise node.refusal(f"names an axis twice: axes {axes}")
    if target is None or not all(isinstance(size, int) for size in [*target, *node.shape(data)]):
        sizes = require_shape(node, node.tensor(1), [len(axes)], "its shape, a size for each axis,")
        return pad(node.as_op("Pad", [data, pads_to(node, data, sizes, axes, is_centered=True)], opset=13))
    dims = node.static_shape(data)
    if any(not isinstance(size, int) or size < 0 for size in target):
        raise node.refusal(f"its shape is {shown(target)}, expected sizes of 0 and more")
    if len(axes) != len(target):
        raise node.refusal(f"has {len(target)} sizes for {len(axes)} axes")
    before, after = [0] * len(dims), [0] * len(dims)
    for axis, size in zip(axes, target, strict=True):
        change = int(size) - dims[axis]
        before[axis] = change // 2 if change >= 0 else -(-change // 2)
        after[axis] = change - before[axis]
    return pad(node.as_op("Pad", [data, const(before + after, "int64")], opset=13))
