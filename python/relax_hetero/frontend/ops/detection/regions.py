"""Ops on regions of images: RoiAlign."""

from __future__ import annotations

import numpy as np
from tvm import relax

from ..elementwise import cast
from ..node import Node, const, dtype_of
from ..required_sizes import as_expr, require_shape
from ..table import converts

_LONGEST = 2.0**15
"""Pixels of the side of a region whose samples are counted: their number grows with the square."""


@converts("RoiAlign")
def roi_align(node: Node) -> relax.Expr:
    """Mean of bilinear samples in every bin of a region; the maximum is refused."""
    data, regions, batch = node.tensor(0), node.tensor(1), node.tensor(2)
    if node.attribute("mode", "avg") != "avg":
        raise node.refusal("mode 'max' cannot be imported")
    batch = require_shape(node, batch, [node.shape(regions)[0]], "its batch indices, one for each region,")
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
    means = node.emit(relax.op.vision.roi_align(data, rows, size, 1.0, ratio, is_half_pixel))
    for condition, other in ((has_samples, 0.0), (is_finite, np.nan)):
        condition = node.emit(relax.op.expand_dims(condition, [2, 3]))
        means = node.emit(relax.op.where(condition, means, const(other, dtype)))
    return means


def _with_samples(
    node: Node, regions: relax.Expr, ratio: int, is_half_pixel: bool
) -> tuple[relax.Expr, relax.Expr, relax.Expr]:
    """Regions that TVM's kernel can take, and by region whether it is finite and whether its bins have samples.

    The kernel takes as many samples as a bin is long, where no number is given. It writes nothing at all for none, and
    does not end for regions of 10^9 pixels, for which ONNX Runtime has no memory either.
    """
    dtype = dtype_of(regions)

    def of_all(condition: relax.Expr) -> relax.Expr:
        least = node.emit(relax.op.min(cast(node, node.emit(condition), "int32"), axis=1, keepdims=True))
        return node.emit(relax.op.greater(least, const(0, "int32")))

    is_finite = of_all(relax.op.isfinite(regions))
    has_samples = is_finite
    if ratio <= 0:
        first, last = (node.emit(relax.op.strided_slice(regions, [1], [i], [i + 2])) for i in (0, 2))
        lengths = node.emit(relax.op.subtract(last, first))
        has_samples = of_all(relax.op.less(node.emit(relax.op.abs(lengths)), const(_LONGEST, dtype)))
        if is_half_pixel:  # otherwise a region is a pixel long at least
            is_long = of_all(relax.op.greater(lengths, const(0.0, dtype)))
            has_samples = node.emit(relax.op.logical_and(has_samples, is_long))
    is_usable = node.emit(relax.op.logical_and(is_finite, has_samples))
    pixel = relax.const(np.array([[0, 0, 1, 1]], dtype))
    return node.emit(relax.op.where(is_usable, regions, pixel)), is_finite, has_samples
