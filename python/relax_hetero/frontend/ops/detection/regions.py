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
"""Maximum side in pixels of regions with an adaptive number of samples, which grows with the square."""


@converts("RoiAlign")
def roi_align(node: Node) -> relax.Expr:
    """Mean of bilinear samples in every bin of a region, or the maximum of their weighted pixels."""
    data, regions, batch = node.tensor(0), node.tensor(1), node.tensor(2)
    mode = node.attribute("mode", "avg")
    if mode not in ("avg", "max"):
        raise node.refusal(f"mode is {mode!r}, expected 'avg' or 'max'")
    static = [size for size in (node.shape(regions)[0], node.shape(batch)[0]) if isinstance(size, int)]
    number = static[0] if static else node.shape(regions)[0]
    regions = require_shape(node, regions, [number, 4], "its regions")
    batch = require_shape(node, batch, [number], "its batch indices, one for each region,")
    for axis, size in enumerate(node.shape(data)[2:]):
        node.require(as_expr(size) >= 1, f"axis {axis + 2} of its input has {size} elements")
    dtype = dtype_of(regions)
    default = "half_pixel" if node.opset >= 16 else "output_half_pixel"
    is_half_pixel = node.attribute("coordinate_transformation_mode", default) == "half_pixel"
    # The region is scaled, then shifted by half a pixel; TVM's kernel would shift it before it scales.
    scaled = node.emit(regions * const(node.attribute("spatial_scale", 1.0), dtype))
    if is_half_pixel:
        scaled = node.emit(scaled - const(0.5, dtype))
    ratio = node.attribute("sampling_ratio", 0)
    scaled, is_finite, has_samples = _sanitize_regions(node, scaled, ratio, is_half_pixel)
    column = cast(node, node.emit(relax.op.expand_dims(batch, 1)), dtype)
    size = (node.attribute("output_height", 1), node.attribute("output_width", 1))
    rows = node.emit(relax.op.concat([column, scaled], axis=1))
    if mode == "max":
        result = _maxima(node, data, rows, size, ratio, is_half_pixel)
    else:
        result = node.emit(relax.op.vision.roi_align(data, rows, size, 1.0, ratio, is_half_pixel))
    for condition, fill in ((has_samples, 0.0), (is_finite, np.nan)):
        condition = node.emit(relax.op.expand_dims(condition, [2, 3]))
        result = node.emit(relax.op.where(condition, result, const(fill, dtype)))
    return result


def _sanitize_regions(
    node: Node, regions: relax.Expr, ratio: int, is_half_pixel: bool
) -> tuple[relax.Expr, relax.Expr, relax.Expr]:
    """Replace regions that TVM's kernel cannot handle; return masks of finite regions and of regions with samples.

    Without a sampling ratio, the kernel takes a sample per pixel. It does not write its result for 0 samples, and does
    not terminate for regions of 10^9 pixels, for which ONNX Runtime runs out of memory.
    """
    dtype = dtype_of(regions)

    def all_coordinates(condition: relax.Expr) -> relax.Expr:
        minimum = node.emit(relax.op.min(cast(node, node.emit(condition), "int32"), axis=1, keepdims=True))
        return node.emit(minimum > const(0, "int32"))

    is_finite = all_coordinates(relax.op.isfinite(regions))
    has_samples = is_finite
    if ratio <= 0:
        first, last = (node.emit(relax.op.strided_slice(regions, [1], [i], [i + 2])) for i in (0, 2))
        lengths = node.emit(last - first)
        has_samples = all_coordinates(node.emit(relax.op.abs(lengths)) < const(_MAX_REGION_EXTENT, dtype))
        if is_half_pixel:  # otherwise a region is at least one pixel
            is_long = all_coordinates(lengths > const(0.0, dtype))
            has_samples = node.emit(relax.op.logical_and(has_samples, is_long))
    is_usable = node.emit(relax.op.logical_and(is_finite, has_samples))
    pixel = relax.const(np.array([[0, 0, 1, 1]], dtype))
    return node.emit(relax.op.where(is_usable, regions, pixel)), is_finite, has_samples


def checked_images(node: Node, images: relax.Expr, count: Dim) -> relax.Expr:
    """Check indices of images; a call with an invalid one is refused."""
    # A gather from 0, 1, 2, ..., because indices of `take` are checked.
    numbers = node.kernel("numbers", lambda i: i[0], shape=[count])
    return node.emit(relax.op.take(numbers, cast(node, images, "int64"), 0, "fast"))


def _maxima(
    node: Node, data: relax.Expr, rows: relax.Expr, size: tuple[int, int], ratio: int, is_half_pixel: bool
) -> relax.Expr:
    """ONNX's maximum of a bin: over the four weighted pixels of each bilinear sample."""
    dtype = dtype_of(data)
    image = node.emit(relax.op.squeeze(relax.op.strided_slice(rows, [1], [0], [1]), [1]))
    image = checked_images(node, image, node.shape(data)[0])

    def element(i: Position, x: te.Tensor, region: te.Tensor, image: te.Tensor) -> tirx.Expr:
        number, channel, *bins = i
        along = []
        for d, (index, count) in enumerate(zip(bins, size, strict=True)):
            start, end = region(number, 2 - d), region(number, 4 - d)
            length = end - start if is_half_pixel else tirx.max(end - start, tirx.const(1, dtype))
            step = length / tirx.const(count, dtype)
            samples = tirx.const(ratio, "int32") if ratio > 0 else tirx.ceil(step).astype("int32")
            sample = te.reduce_axis((0, samples), name=f"sample{d}")
            offset = (sample.var.astype(dtype) + tirx.const(0.5, dtype)) * step / samples.astype(dtype)
            along.append((sample, start + index.astype(dtype) * step + offset))
        maximum = _max_product(x, (image(number), channel), [coordinate for _, coordinate in along])
        return te.max(maximum, axis=[sample for sample, _ in along])

    shape = [node.shape(rows)[0], node.shape(data)[1], *size]
    return node.kernel("roi_max", element, data, rows, image, shape=shape)


def _max_product(x: te.Tensor, front: Position, coordinates: list[tirx.Expr]) -> tirx.Expr:
    dtype = x.dtype
    outside, corners = tirx.const(False, "bool"), []
    for coordinate, extent in zip(coordinates, x.shape[2:], strict=True):
        outside = tirx.any(outside, coordinate < -1, coordinate > extent.astype(dtype))
        clamped = tirx.max(tirx.min(coordinate, (extent - 1).astype(dtype)), tirx.const(0, dtype))
        low = tirx.floor(clamped)
        first = low.astype("int64")
        corners.append([(first, 1 - (clamped - low)), (tirx.min(first + 1, extent - 1), clamped - low)])
    products = [a * b * x(*front, row, column) for row, a in corners[0] for column, b in corners[1]]
    return tirx.Select(outside, tirx.const(0, dtype), functools.reduce(tirx.max, products))


@converts("MaxRoiPool")
def max_roi_pool(node: Node) -> relax.Expr:
    """Largest pixel of every bin of a region with rounded edges; 0 for an empty bin."""
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
        """First and end (exclusive) pixel of a bin along an axis."""
        start, end = (_round_half_away(region(i[0], edge - d) * scale) for edge in (2, 4))
        length = tirx.max(end - start + 1, 1).astype(dtype) / tirx.const(size[d], dtype)
        index = i[2 + d].astype(dtype)
        edges = (tirx.floor(index * length).astype("int32"), tirx.ceil((index + 1) * length).astype("int32"))
        first, stop = ((edge + start).astype("int64") for edge in edges)
        return tirx.min(tirx.max(first, 0), extent), tirx.min(tirx.max(stop, 0), extent)

    def element(i: Position, x: te.Tensor, region: te.Tensor, image: te.Tensor) -> tirx.Expr:
        indices, axes = [], []
        for d, extent in enumerate(x.shape[2:]):
            first, stop = bin_of(region, i, d, extent)
            axis = te.reduce_axis((0, tirx.max(stop - first, 1)), name=f"pixel{d}")
            indices.append(tirx.min(first + axis.var, extent - 1))
            axes.append(axis)
        return te.max(x(image(i[0]), i[1], *indices), axis=axes)

    def without_empty(i: Position, maxima: te.Tensor, region: te.Tensor, x: te.Tensor) -> tirx.Expr:
        bins = [bin_of(region, i, d, extent) for d, extent in enumerate(x.shape[2:])]
        is_empty = tirx.any(*(stop <= first for first, stop in bins))
        return tirx.Select(is_empty, tirx.const(0, dtype), maxima(*i))

    shape = [number, node.shape(data)[1], *size]
    maxima = node.kernel("roi_pool", element, data, regions, image, shape=shape)
    return node.kernel("roi_pool", without_empty, maxima, regions, data, shape=shape)


def _round_half_away(value: tirx.Expr) -> tirx.Expr:
    """Round to the nearest integer, halves away from zero."""
    absolute = tirx.abs(value)
    low = tirx.floor(absolute)
    rounded = low + tirx.Select(absolute - low >= 0.5, tirx.const(1, value.ty.dtype), tirx.const(0, value.ty.dtype))
    return tirx.Select(value < 0, -rounded, rounded).astype("int32")
