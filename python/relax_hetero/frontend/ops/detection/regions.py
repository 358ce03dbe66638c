"""Ops on regions of images: RoiAlign and MaxRoiPool."""

from __future__ import annotations

import functools

import numpy as np
from tvm import relax, te, tirx

from ..elementwise import cast
from ..node import Dim, Node, Position, const, dtype_of
from ..required_sizes import as_expr, require_shape
from ..table import converts

_MAX_REGION_EXTENT = 2.0**15
"""Pixels of the side of a region whose samples are counted: their number grows with the square."""


@converts("RoiAlign")
def roi_align(node: Node) -> relax.Expr:
    """Mean of bilinear samples in every bin of a region, or the maximum of what the pixels around them add."""
    data, regions, batch = node.tensor(0), node.tensor(1), node.tensor(2)
    mode = node.attribute("mode", "avg")
    if mode not in ("avg", "max"):
        raise node.refusal(f"mode is {mode!r}, expected 'avg' or 'max'")
    known = [size for size in (node.shape(regions)[0], node.shape(batch)[0]) if isinstance(size, int)]
    number = known[0] if known else node.shape(regions)[0]
    regions = require_shape(node, regions, [number, 4], "its regions")
    batch = require_shape(node, batch, [number], "its batch indices, one for each region,")
    for axis, size in enumerate(node.shape(data)[2:]):
        node.require(as_expr(size) >= 1, f"axis {axis + 2} of its input has {size} elements")
    dtype = dtype_of(regions)
    default = "half_pixel" if node.opset >= 16 else "output_half_pixel"
    is_half_pixel = node.attribute("coordinate_transformation_mode", default) == "half_pixel"
    # The region is scaled, then moved by half a pixel; TVM's kernel would move it before it scales.
    scaled = node.emit(relax.op.multiply(regions, const(node.attribute("spatial_scale", 1.0), dtype)))
    if is_half_pixel:
        scaled = node.emit(relax.op.subtract(scaled, const(0.5, dtype)))
    ratio = node.attribute("sampling_ratio", 0)
    scaled, is_finite, has_samples = _with_samples(node, scaled, ratio, is_half_pixel)
    column = cast(node, node.emit(relax.op.expand_dims(batch, 1)), dtype)
    size = (node.attribute("output_height", 1), node.attribute("output_width", 1))
    rows = node.emit(relax.op.concat([column, scaled], axis=1))
    if mode == "max":
        found = _maxima(node, data, rows, size, ratio, is_half_pixel)
    else:
        found = node.emit(relax.op.vision.roi_align(data, rows, size, 1.0, ratio, is_half_pixel))
    for condition, other in ((has_samples, 0.0), (is_finite, np.nan)):
        condition = node.emit(relax.op.expand_dims(condition, [2, 3]))
        found = node.emit(relax.op.where(condition, found, const(other, dtype)))
    return found


def _with_samples(
    node: Node, regions: relax.Expr, ratio: int, is_half_pixel: bool
) -> tuple[relax.Expr, relax.Expr, relax.Expr]:
    """Regions that TVM's kernel can take, and by region whether it is finite and whether its bins have samples.

    The kernel takes as many samples as a bin is long, where no number is given. It writes nothing at all for none, and
    does not end for regions of 10^9 pixels, for which ONNX Runtime has no memory either.
    """
    dtype = dtype_of(regions)

    def of_all(condition: relax.Expr) -> relax.Expr:
        minimum = node.emit(relax.op.min(cast(node, node.emit(condition), "int32"), axis=1, keepdims=True))
        return node.emit(relax.op.greater(minimum, const(0, "int32")))

    is_finite = of_all(relax.op.isfinite(regions))
    has_samples = is_finite
    if ratio <= 0:
        first, last = (node.emit(relax.op.strided_slice(regions, [1], [i], [i + 2])) for i in (0, 2))
        lengths = node.emit(relax.op.subtract(last, first))
        has_samples = of_all(relax.op.less(node.emit(relax.op.abs(lengths)), const(_MAX_REGION_EXTENT, dtype)))
        if is_half_pixel:  # otherwise a region is a pixel long at least
            is_long = of_all(relax.op.greater(lengths, const(0.0, dtype)))
            has_samples = node.emit(relax.op.logical_and(has_samples, is_long))
    is_usable = node.emit(relax.op.logical_and(is_finite, has_samples))
    pixel = relax.const(np.array([[0, 0, 1, 1]], dtype))
    return node.emit(relax.op.where(is_usable, regions, pixel)), is_finite, has_samples


def checked_images(node: Node, images: relax.Expr, count: Dim) -> relax.Expr:
    """Indices of images, each of which there is: a call with another one is refused."""
    # Taken from 0, 1, 2, ..., as indices of `take` are checked.
    numbers = node.kernel("numbers", lambda i: i[0], shape=[count])
    return node.emit(relax.op.take(numbers, cast(node, images, "int64"), 0, "fast"))


def _maxima(
    node: Node, data: relax.Expr, rows: relax.Expr, size: tuple[int, int], ratio: int, is_half_pixel: bool
) -> relax.Expr:
    """ONNX's maximum of a bin: of the four products, pixel times weight, that each bilinear sample is the sum of."""
    dtype = dtype_of(data)
    image = node.emit(relax.op.squeeze(relax.op.strided_slice(rows, [1], [0], [1]), [1]))
    image = checked_images(node, image, node.shape(data)[0])

    def element(i: Position, x: te.Tensor, region: te.Tensor, image: te.Tensor) -> tirx.Expr:
        number, channel, *bins = i
        along = []
        for d, (at, count) in enumerate(zip(bins, size, strict=True)):
            begin, end = region(number, 2 - d), region(number, 4 - d)
            length = end - begin if is_half_pixel else tirx.max(end - begin, tirx.const(1, dtype))
            step = length / tirx.const(count, dtype)
            samples = tirx.const(ratio, "int32") if ratio > 0 else tirx.ceil(step).astype("int32")
            sample = te.reduce_axis((0, samples), name=f"sample{d}")
            share = (sample.var.astype(dtype) + tirx.const(0.5, dtype)) * step / samples.astype(dtype)
            along.append((sample, begin + at.astype(dtype) * step + share))
        maximum = _max_product(x, (image(number), channel), [place for _, place in along])
        return te.max(maximum, axis=[sample for sample, _ in along])

    shape = [node.shape(rows)[0], node.shape(data)[1], *size]
    return node.kernel("roi_max", element, data, rows, image, shape=shape)


def _max_product(x: te.Tensor, front: Position, where: list[tirx.Expr]) -> tirx.Expr:
    dtype = x.dtype
    outside, corners = tirx.const(False, "bool"), []
    for place, extent in zip(where, x.shape[2:], strict=True):
        outside = tirx.any(outside, place < -1, place > extent.astype(dtype))
        held = tirx.max(tirx.min(place, (extent - 1).astype(dtype)), tirx.const(0, dtype))
        low = tirx.floor(held)
        first = low.astype("int64")
        corners.append([(first, 1 - (held - low)), (tirx.min(first + 1, extent - 1), held - low)])
    products = [a * b * x(*front, row, column) for row, a in corners[0] for column, b in corners[1]]
    return tirx.Select(outside, tirx.const(0, dtype), functools.reduce(tirx.max, products))


@converts("MaxRoiPool")
def max_roi_pool(node: Node) -> relax.Expr:
    """The largest pixel of every bin of a region, whose edges are rounded; 0 for a bin without pixels."""
    data, regions = node.tensor(0), node.tensor(1)
    size = [int(count) for count in node.attribute("pooled_shape")]
    if node.rank(data) != 4 or len(size) != 2:
        raise node.refusal(f"its input has {node.rank(data)} axes and pooled_shape is {size}, expected 4 and 2 numbers")
    number, dtype = node.shape(regions)[0], dtype_of(data)
    regions = require_shape(node, regions, [number, 5], "its regions")
    for axis, extent in enumerate(node.shape(data)[2:]):
        node.require(as_expr(extent) >= 1, f"axis {axis + 2} of its input has {extent} elements")
    image = node.emit(relax.op.squeeze(relax.op.strided_slice(regions, [1], [0], [1]), [1]))
    image = checked_images(node, image, node.shape(data)[0])
    scale = tirx.const(node.attribute("spatial_scale", 1.0), dtype)

    def bin_of(region: te.Tensor, i: Position, d: int, extent: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr]:
        """First pixel of a bin along an axis, and the one behind the last."""
        begin, end = (_rounded(region(i[0], edge - d) * scale) for edge in (2, 4))
        length = tirx.max(end - begin + 1, 1).astype(dtype) / tirx.const(size[d], dtype)
        at = i[2 + d].astype(dtype)
        edges = (tirx.floor(at * length).astype("int32"), tirx.ceil((at + 1) * length).astype("int32"))
        first, behind = ((edge + begin).astype("int64") for edge in edges)
        return tirx.min(tirx.max(first, 0), extent), tirx.min(tirx.max(behind, 0), extent)

    def element(i: Position, x: te.Tensor, region: te.Tensor, image: te.Tensor) -> tirx.Expr:
        places, axes = [], []
        for d, extent in enumerate(x.shape[2:]):
            first, behind = bin_of(region, i, d, extent)
            axis = te.reduce_axis((0, tirx.max(behind - first, 1)), name=f"pixel{d}")
            places.append(tirx.min(first + axis.var, extent - 1))
            axes.append(axis)
        return te.max(x(image(i[0]), i[1], *places), axis=axes)

    def without_empty(i: Position, found: te.Tensor, region: te.Tensor, x: te.Tensor) -> tirx.Expr:
        bins = [bin_of(region, i, d, extent) for d, extent in enumerate(x.shape[2:])]
        is_empty = tirx.any(*(behind <= first for first, behind in bins))
        return tirx.Select(is_empty, tirx.const(0, dtype), found(*i))

    shape = [number, node.shape(data)[1], *size]
    found = node.kernel("roi_pool", element, data, regions, image, shape=shape)
    return node.kernel("roi_pool", without_empty, found, regions, data, shape=shape)


def _rounded(value: tirx.Expr) -> tirx.Expr:
    """The nearest integer, halves away from zero."""
    size = tirx.abs(value)
    low = tirx.floor(size)
    whole = low + tirx.Select(size - low >= 0.5, tirx.const(1, value.ty.dtype), tirx.const(0, value.ty.dtype))
    return tirx.Select(value < 0, -whole, whole).astype("int32")
