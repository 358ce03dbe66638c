"""CropAndResize of ONNX Runtime: regions of images, each resized to one size."""

from __future__ import annotations

from tvm import relax, te, tirx

from ..node import Node, Position, dtype_of
from ..required_sizes import as_expr, require_shape
from ..run_time.numbers import numbers_of
from ..table import MICROSOFT, converts
from .regions import checked_images


@converts("CropAndResize", domain=MICROSOFT)
def crop_and_resize(node: Node) -> relax.Expr:
    """Regions ``[y1, x1, y2, x2]``, from 0 to 1, of the images that they name; what lies beyond is one number."""
    data, regions = node.tensor(0), node.tensor(1)
    if node.rank(data) != 4:
        raise node.refusal(f"its input has {node.rank(data)} axes, expected 4")
    mode = node.attribute("mode", "bilinear")
    if mode not in ("bilinear", "nearest"):
        raise node.refusal(f"mode is {mode!r}, expected 'bilinear' or 'nearest'")
    number = node.shape(regions)[0]
    regions = require_shape(node, regions, [number, 4], "its regions")
    images = require_shape(node, node.tensor(2), [number], "its batch indices, one for each region,")
    sizes = numbers_of(node, require_shape(node, node.tensor(3), [2], "its crop_size"), "crop")
    for size in sizes:
        node.require(as_expr(size) >= 0, f"its crop_size is {size}")
    for axis, size in enumerate(node.shape(data)[2:]):
        node.require(as_expr(size) >= 1, f"axis {axis + 2} of its input has {size} elements")
    beyond, dtype = node.attribute("extrapolation_value", 0.0), dtype_of(data)
    images = checked_images(node, images, node.shape(data)[0])

    def element(i: Position, x: te.Tensor, region: te.Tensor, image: te.Tensor, extents: list[tirx.Expr]) -> tirx.Expr:
        places, outside = [], tirx.const(False, "bool")
        for d, (at, size) in enumerate(zip(i[2:], extents, strict=True)):
            begin, end = region(i[0], d), region(i[0], d + 2)
            last = tirx.Cast(dtype, x.shape[d + 2] - 1)
            step = (end - begin) * last / tirx.Cast(dtype, tirx.max(size - 1, as_expr(1)))
            middle = tirx.const(0.5, dtype) * (begin + end) * last
            place = tirx.Select(size > 1, begin * last + tirx.Cast(dtype, at) * step, middle)
            outside = tirx.any(outside, place < 0, place > last)
            places.append(place)
        value = (_nearest if mode == "nearest" else _interpolated)(x, (image(i[0]), i[1]), places)
        return tirx.Select(outside, tirx.const(beyond, dtype), value)

    extents = [as_expr(size) for size in sizes]
    shape = [number, node.shape(data)[1], *sizes]
    return node.kernel("crop_and_resize", element, data, regions, images, extents, shape=shape)


def _clamped(index: tirx.Expr, size: tirx.Expr) -> tirx.Expr:
    return tirx.max(tirx.min(index.astype("int64"), size - 1), 0)


def _nearest(x: te.Tensor, front: Position, places: list[tirx.Expr]) -> tirx.Expr:
    # Halves away from zero; places are not negative.
    rounded = [_clamped(tirx.floor(place + 0.5), size) for place, size in zip(places, x.shape[2:], strict=True)]
    return x(*front, *rounded)


def _interpolated(x: te.Tensor, front: Position, places: list[tirx.Expr]) -> tirx.Expr:
    sizes = x.shape[2:]
    (top, left), (bottom, right) = (
        [_clamped(of(place), size) for place, size in zip(places, sizes, strict=True)] for of in (tirx.floor, tirx.ceil)
    )
    down, along = (place - tirx.floor(place) for place in places)

    def in_row(row: tirx.Expr) -> tirx.Expr:
        first = x(*front, row, left)
        return first + (x(*front, row, right) - first) * along

    return in_row(top) + (in_row(bottom) - in_row(top)) * down
