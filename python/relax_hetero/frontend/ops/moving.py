"""Ops that move elements without computing: Pad, Concat, SpaceToDepth, Col2Im and the like."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tvm import relax, te, tirx, topi

from .elementwise import cast
from .node import Dim, Node, Position, const, dtype_of, is_float
from .table import converts


def _padding(node: Node, rank: int) -> tuple[list[int], list[int]]:
    """Elements to add (or, negative, to cut) before and after each axis."""
    pads = node.dims(1) if node.has(1) else node.attribute("pads") or node.attribute("paddings")
    if pads is None:
        raise node.unknown("its pads are")
    amounts = [int(pad) for pad in pads if isinstance(pad, int)]
    axes = node.dims(3) if node.has(3) else list(range(rank))
    if axes is None or len(amounts) != len(pads):
        raise node.unknown("its pads or axes are")
    if len(amounts) != 2 * len(axes):
        raise node.refusal(f"has {len(amounts)} pads for {len(axes)} axes")
    before, after = [0] * rank, [0] * rank
    for position, axis in enumerate(axes):
        before[node.axis(int(axis), rank)] = amounts[position]
        after[node.axis(int(axis), rank)] = amounts[len(axes) + position]
    return before, after


def _wrapped(place: tirx.Expr, size: Any, mode: str) -> tirx.Expr:
    """The element that a place outside of [0, size) repeats."""
    if mode == "edge":
        return tirx.max(tirx.min(place, size - 1), 0)
    if mode == "wrap":
        return topi.floor_mod(place, size)
    period = tirx.max(2 * (size - 1), 1)
    inside = topi.floor_mod(place, period)
    return tirx.Select(inside < size, inside, period - inside)


@converts("Pad")
def pad(node: Node) -> relax.Expr:
    """Constant, edge, reflect or wrap; a negative pad cuts elements off. The constant may be an input."""
    data = node.tensor(0)
    dims, dtype = node.shape(data), dtype_of(data)
    mode = node.attribute("mode", "constant")
    if mode not in ("constant", "edge", "reflect", "wrap"):
        raise node.refusal(f"mode is {mode!r}")
    before, after = _padding(node, len(dims))
    moved = [axis for axis in range(len(dims)) if before[axis] or after[axis]]
    if not moved:
        return data
    sizes: list[Dim] = [dim + before[i] + after[i] for i, dim in enumerate(dims)]
    if any(isinstance(size, int) and size < 0 for size in sizes):
        raise node.refusal(f"cuts more off shape {dims} than there is: pads {before + after}")
    if mode != "constant" and all(isinstance(dims[axis], int) for axis in moved):
        return _taken(node, data, before, after, mode)
    constant = node.constant(2) if node.has(2) else np.array(node.attribute("value", 0))
    number = float(constant.item()) if constant is not None and constant.size == 1 else None
    if mode == "constant" and number is not None and min(before + after) >= 0 and _is_exact(number, dtype):
        widths = [width for pair in zip(before, after, strict=True) for width in pair]
        return node.emit(relax.op.nn.pad(data, widths, "constant", number))
    if node.has(2):
        value = node.tensor(2)
        fill = node.emit(relax.op.reshape(value, ())) if node.rank(value) else value
    else:
        fill = const(node.attribute("value", 0), dtype)

    def element(i: Position, x: te.Tensor, filling: te.Tensor) -> tirx.Expr:
        places = [place - before[axis] if axis in moved else place for axis, place in enumerate(i)]
        if mode != "constant":
            for axis in moved:
                places[axis] = _wrapped(places[axis], dims[axis], mode)
            return x(*places)
        checks = [places[axis] >= 0 for axis in moved if before[axis] > 0]
        checks += [places[axis] < dims[axis] for axis in moved if after[axis] > 0]
        return tirx.if_then_else(tirx.all(*checks), x(*places), filling()) if checks else x(*places)

    return node.kernel("pad", element, data, fill, shape=sizes)


def _is_exact(value: float, dtype: str) -> bool:
    """Whether a number survives as an attribute of `nn.pad`, which is a float, in any type."""
    if is_float(dtype):
        return dtype != "bfloat16" and (abs(value) < 2.0**31 or value == float("-inf"))
    return dtype in ("int8", "uint8", "int32") and abs(value) < 2.0**31


def _taken(node: Node, data: relax.Expr, before: list[int], after: list[int], mode: str) -> relax.Expr:
    """Padding that repeats elements, as elements taken along each axis."""
    for axis, size in enumerate(node.shape(data)):
        if before[axis] or after[axis]:
            node.check_table(before[axis] + int(size) + after[axis], itemsize=32)
            places = np.arange(-before[axis], int(size) + after[axis])
            if mode == "reflect":
                places = int(size) - 1 - np.abs(places % max(2 * (int(size) - 1), 1) - (int(size) - 1))
            elif mode == "wrap":
                places = places % int(size)
            places = np.clip(places, 0, int(size) - 1)
            data = node.emit(relax.op.take(data, const(places, "int64"), axis, "fast"))
    return data


@converts("Trilu")
def trilu(node: Node) -> relax.Expr:
    """The part of the last two axes on and above (or below) diagonal k, zeros elsewhere; k may be an input."""
    data = node.tensor(0)
    dtype, is_upper = dtype_of(data), bool(node.attribute("upper", 1))
    given = node.tensor(1) if node.has(1) else const(0, "int64")
    diagonal = node.emit(relax.op.reshape(given, ())) if node.rank(given) else given

    def element(i: Position, x: te.Tensor, k: te.Tensor) -> tirx.Expr:
        offset = i[-1] - i[-2]
        kept = offset >= k() if is_upper else offset <= k()
        return tirx.Select(kept, x(*i), tirx.const(0, dtype))

    return node.kernel("trilu", element, data, diagonal)


@converts("Concat")
def concat(node: Node) -> relax.Expr:
    """The inputs side by side."""
    values = [node.tensor(i) for i in range(len(node.inputs))]
    return node.emit(relax.op.concat(values, node.attribute("axis", 1 if node.opset < 4 else None)))


@converts("SpaceToDepth")
def space_to_depth(node: Node) -> relax.Expr:
    """Blocks of an image become channels; in mode CRD (opset 26 on) the original channel varies slowest."""
    data = node.tensor(0)
    batch, channels, height, width = node.shape(data)
    block = int(node.attribute("blocksize"))
    if any(isinstance(size, int) and size % block for size in (height, width)):
        raise node.refusal(f"an image of {height} x {width} does not divide into blocks of {block}")
    inner = [batch, channels, height // block, block, width // block, block]
    grouped = relax.op.reshape(data, inner)
    slowest_channel = node.attribute("mode", "DCR") == "CRD"
    moved = relax.op.permute_dims(grouped, [0, 1, 3, 5, 2, 4] if slowest_channel else [0, 3, 5, 1, 2, 4])
    return node.emit(relax.op.reshape(moved, [batch, channels * block * block, height // block, width // block]))


@converts("Col2Im")
def col2im(node: Node) -> relax.Expr:
    """Columns of blocks added back into an image of any number of spatial axes."""
    data = node.tensor(0)
    image, block = ([int(size) for size in node.known_dims(i, "its shapes are")] for i in (1, 2))
    count = len(image)
    strides, dilations = node.attribute("strides", (1,) * count), node.attribute("dilations", (1,) * count)
    pads = node.attribute("pads", (0,) * (2 * count))
    batch, columns, _ = node.shape(data)
    steps = [
        (image[a] + pads[a] + pads[count + a] - dilations[a] * (block[a] - 1) - 1) // strides[a] + 1
        for a in range(count)
    ]

    offsets = [te.reduce_axis((0, size), name=f"k{a}") for a, size in enumerate(block)]

    def element(i: Position, x: te.Tensor) -> tirx.Expr:
        batch_index, row, *place = i
        column, checks = tirx.const(0, "int64"), []
        for a in range(count):
            distance = place[a] + pads[a] - offsets[a] * dilations[a]
            step = topi.floor_divide(distance, strides[a])
            checks += [distance >= 0, topi.floor_mod(distance, strides[a]) == 0, step < steps[a]]
            row, column = row * block[a] + offsets[a], column * steps[a] + step
        inside = tirx.if_then_else(tirx.all(*checks), x(batch_index, row, column), tirx.const(0, str(x.dtype)))
        return te.sum(inside, axis=offsets)

    return node.kernel("col2im", element, data, shape=[batch, columns // math.prod(block), *image])


@converts("MaxUnpool")
def max_unpool(node: Node) -> relax.Expr:
    """Elements put back at flat indices of the pooled image, which counts in the default output size; the rest is 0."""
    data, indices = node.tensor(0), node.tensor(1)
    shape = node.static_shape(data)
    kernel = [int(size) for size in node.attribute("kernel_shape")]
    count = len(kernel)
    strides, pads = node.attribute("strides", (1,) * count), node.attribute("pads", (0,) * (2 * count))
    natural = [(shape[2 + a] - 1) * strides[a] + kernel[a] - pads[a] - pads[count + a] for a in range(count)]
    sizes = [*shape[:2], *natural]
    if node.has(2):
        sizes = [int(size) for size in node.known_dims(2, "its output_shape is")]
    elements = math.prod([*shape[:2], *natural])
    flat = node.filled([elements], 0, dtype_of(data))
    held = node.emit(relax.op.clip(cast(node, indices, "int64"), 0, elements - 1))
    placed = relax.op.scatter_elements(flat, relax.op.reshape(held, (-1,)), relax.op.reshape(data, (-1,)), 0)
    result = node.emit(relax.op.reshape(placed, [*shape[:2], *natural]))
    if sizes == [*shape[:2], *natural]:
        return result
    width = [0] * 2 + [0] * count + [0] * 2 + [sizes[2 + a] - natural[a] for a in range(count)]
    return pad(node.as_op("Pad", [result, const(width, "int64")], opset=13))


@converts("CenterCropPad")
def center_crop_pad(node: Node) -> relax.Expr:
    """Cut or padded with zeros to a target size, evenly on both sides (the odd element goes after)."""
    data = node.tensor(0)
    dims, target = node.static_shape(data), node.known_dims(1, "its shape is")
    axes = [node.axis(axis, len(dims)) for axis in node.attribute("axes", range(len(dims)))]
    before, after = [0] * len(dims), [0] * len(dims)
    for axis, size in zip(axes, target, strict=True):
        change = int(size) - dims[axis]
        before[axis] = change // 2 if change >= 0 else -(-change // 2)
        after[axis] = change - before[axis]
    return pad(node.as_op("Pad", [data, const(before + after, "int64")], opset=13))
