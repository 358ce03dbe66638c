"""Sampling of images at computed coordinates: DeformConv and CropAndResize."""

from __future__ import annotations

from tvm import relax, te, tirx

from ..convolution import spatial, with_bias
from ..elementwise import HALF, cast
from ..node import Dim, Node, Position, dtype_of
from ..products import matmul
from ..required_sizes import as_expr, require_equal, require_shape
from ..run_time.numbers import dims_of_vector
from ..table import MICROSOFT, converts
from .regions import checked_images


@converts("DeformConv")
def deformed_convolution(node: Node) -> relax.Expr:
    """Deformable convolution in two dimensions: bilinear samples at offset positions, optionally masked."""
    data, weight = node.tensor(0), node.tensor(1)
    if node.rank(data) != 4:
        raise node.refusal(f"its input has {node.rank(data)} axes, expected 4")
    outputs, inner, *window = node.static_shape(weight)
    attribute = node.attribute("kernel_shape")
    if attribute is not None and [int(size) for size in attribute] != window:
        raise node.refusal(f"kernel_shape is {list(attribute)}, but the weight has {window}")
    groups, offset_groups = node.attribute("group", 1), node.attribute("offset_group", 1)
    channels = inner * groups
    require_equal(node, node.shape(data)[1], channels, "axis 1 of its input, the channels, has")
    if outputs % groups or channels % offset_groups:
        raise node.refusal(f"cannot share {outputs} outputs, {channels} channels by {groups}, {offset_groups} groups")
    batch, _, *image = node.shape(data)
    strides, dilations = spatial(node, "strides", 2, 1), spatial(node, "dilations", 2, 1)
    pads = [int(pad) for pad in node.attribute("pads") or [0] * 4]
    if len(pads) != 4:
        raise node.refusal(f"pads is {pads}, expected 4 numbers")
    output_shape = [
        _num_positions(node, size, (window[d] - 1) * dilations[d] + 1, pads[d] + pads[d + 2], strides[d])
        for d, size in enumerate(image)
    ]
    count = offset_groups * window[0] * window[1]
    offsets = require_shape(node, node.tensor(2), [batch, 2 * count, *output_shape], "its offsets")
    dtype = dtype_of(data)
    exact = "float32" if dtype in HALF else dtype
    operands = [cast(node, data, exact), cast(node, offsets, exact)]
    if node.has(4):
        mask = require_shape(node, node.tensor(4), [batch, count, *output_shape], "its mask")
        operands.append(cast(node, mask, exact))

    def element(i: Position, x: te.Tensor, offset: te.Tensor, *masks: te.Tensor) -> tirx.Expr:
        n, channel, *tap, row, column = i
        number = (tirx.indexdiv(channel, as_expr(channels // offset_groups)) * window[0] + tap[0]) * window[1] + tap[1]
        coordinates = [
            tirx.Cast(exact, index * strides[d] - pads[d] + tap[d] * dilations[d])
            + offset(n, 2 * number + d, row, column)
            for d, index in enumerate((row, column))
        ]
        sample = bilinear(x, (n, channel), coordinates)
        return sample * masks[0](n, number, row, column) if masks else sample

    windows = node.kernel("moved_windows", element, *operands, shape=[batch, channels, *window, *output_shape])
    depth = inner * window[0] * window[1]
    columns = node.emit(relax.op.reshape(windows, [batch, groups, depth, output_shape[0] * output_shape[1]]))
    rows = node.emit(relax.op.reshape(weight, [1, groups, outputs // groups, depth]))
    result = matmul(node, cast(node, rows, exact), columns)
    result = cast(node, node.emit(relax.op.reshape(result, [batch, outputs, *output_shape])), dtype)
    return with_bias(node, result, 3)


def _num_positions(node: Node, size: Dim, extent: int, pads: int, stride: int) -> Dim:
    """Number of positions of a window of `extent` elements on an axis."""
    node.require(as_expr(size) + pads >= extent, f"its kernel spans {extent} elements of {size} with padding {pads}")
    if isinstance(size, int):
        return (size + pads - extent) // stride + 1
    return tirx.floordiv(size + (pads - extent), as_expr(stride)) + 1


def bilinear(x: te.Tensor, front: tuple[tirx.Expr, ...], coordinates: list[tirx.Expr]) -> tirx.Expr:
    """Bilinear sample of an image, with zeros outside of it."""
    corners = []
    for coordinate, extent in zip(coordinates, x.shape[len(front) :], strict=True):
        low = tirx.floor(coordinate)
        first = low.astype("int64")
        fraction = coordinate - low
        corners.append([(first, extent, 1 - fraction), (first + 1, extent, fraction)])
    total = tirx.const(0, x.dtype)
    for row, height, row_weight in corners[0]:
        for column, width, column_weight in corners[1]:
            is_inside = tirx.all(row >= 0, row < height, column >= 0, column < width)
            clamped = [tirx.max(tirx.min(index, size - 1), 0) for index, size in ((row, height), (column, width))]
            value = row_weight * column_weight * x(*front, *clamped)
            total = total + tirx.Select(is_inside, value, tirx.const(0, x.dtype))
    return total


@converts("CropAndResize", domain=MICROSOFT)
def crop_and_resize(node: Node) -> relax.Expr:
    """Crop regions ``[y1, x1, y2, x2]`` in [0, 1] of images and resize them, with a fill value outside of the image."""
    data, regions = node.tensor(0), node.tensor(1)
    if node.rank(data) != 4:
        raise node.refusal(f"its input has {node.rank(data)} axes, expected 4")
    mode = node.attribute("mode", "bilinear")
    if mode not in ("bilinear", "nearest"):
        raise node.refusal(f"mode is {mode!r}, expected 'bilinear' or 'nearest'")
    number = node.shape(regions)[0]
    regions = require_shape(node, regions, [number, 4], "its regions")
    images = require_shape(node, node.tensor(2), [number], "its batch indices, one for each region,")
    sizes = dims_of_vector(node, require_shape(node, node.tensor(3), [2], "its crop_size"), "crop")
    for size in sizes:
        node.require(as_expr(size) >= 0, f"its crop_size is {size}")
    for axis, size in enumerate(node.shape(data)[2:]):
        node.require(as_expr(size) >= 1, f"axis {axis + 2} of its input has {size} elements")
    fill, dtype = node.attribute("extrapolation_value", 0.0), dtype_of(data)
    images = checked_images(node, images, node.shape(data)[0])

    def element(i: Position, x: te.Tensor, region: te.Tensor, image: te.Tensor, extents: list[tirx.Expr]) -> tirx.Expr:
        coordinates, outside = [], tirx.const(False, "bool")
        for d, (index, size) in enumerate(zip(i[2:], extents, strict=True)):
            start, end = region(i[0], d), region(i[0], d + 2)
            last = tirx.Cast(dtype, x.shape[d + 2] - 1)
            step = (end - start) * last / tirx.Cast(dtype, tirx.max(size - 1, as_expr(1)))
            middle = tirx.const(0.5, dtype) * (start + end) * last
            coordinate = tirx.Select(size > 1, start * last + tirx.Cast(dtype, index) * step, middle)
            outside = tirx.any(outside, coordinate < 0, coordinate > last)
            coordinates.append(coordinate)
        value = (_nearest if mode == "nearest" else _interpolated)(x, (image(i[0]), i[1]), coordinates)
        return tirx.Select(outside, tirx.const(fill, dtype), value)

    extents = [as_expr(size) for size in sizes]
    shape = [number, node.shape(data)[1], *sizes]
    return node.kernel("crop_and_resize", element, data, regions, images, extents, shape=shape)


def _clamp(index: tirx.Expr, size: tirx.Expr) -> tirx.Expr:
    return tirx.max(tirx.min(index.astype("int64"), size - 1), 0)


def _nearest(x: te.Tensor, front: Position, coordinates: list[tirx.Expr]) -> tirx.Expr:
    # Halves away from zero; coordinates are not negative.
    rounded = [_clamp(tirx.floor(c + 0.5), size) for c, size in zip(coordinates, x.shape[2:], strict=True)]
    return x(*front, *rounded)


def _interpolated(x: te.Tensor, front: Position, coordinates: list[tirx.Expr]) -> tirx.Expr:
    sizes = x.shape[2:]
    (top, left), (bottom, right) = (
        [_clamp(rounding(coordinate), size) for coordinate, size in zip(coordinates, sizes, strict=True)]
        for rounding in (tirx.floor, tirx.ceil)
    )
    down, along = (coordinate - tirx.floor(coordinate) for coordinate in coordinates)

    def in_row(row: tirx.Expr) -> tirx.Expr:
        first = x(*front, row, left)
        return first + (x(*front, row, right) - first) * along

    return in_row(top) + (in_row(bottom) - in_row(top)) * down
