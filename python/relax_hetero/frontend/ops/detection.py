"""Ops of object detection: RoiAlign and NonMaxSuppression."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from __future__ import annotations

import numpy as np
from tvm import relax, tirx
from tvm.script import tirx as T

from ...tir.cuda.loops.suppression import SUPPRESSION, Suppression
from .elementwise import cast
from .node import Node, const, dtype_of
from .required_sizes import as_expr, require_shape
from .run_time.numbers import dims_at_run_time
from .table import converts

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


def _suppression_kernel(batches: int, classes: int, boxes: int, limit: int, is_center: bool) -> tirx.PrimFunc:
    """Greedy suppression per class: take the best box left, drop the boxes that overlap it, repeat.

    Writes the selected (batch, class, box) triples, as many as there are, and their number.
    """
    capacity = batches * classes * limit

    @T.prim_func(private=True, s_tir=True)
    def non_max_suppression(
        box: T.Buffer((batches, boxes, 4), "float32"),
        score: T.Buffer((batches, classes, boxes), "float32"),
        most: T.Buffer((1,), "int64"),
        overlap: T.Buffer((1,), "float32"),
        least: T.Buffer((1,), "float32"),
        selected: T.Buffer((capacity, 3), "int64"),
        number: T.Buffer((1,), "int64"),
    ):
        T.func_attr({"tirx.noalias": True})
        corners = T.alloc_buffer((boxes, 4), "float32")
        alive = T.alloc_buffer((boxes,), "bool")
        state = T.alloc_buffer((2,), "int64")  # the best box of this round or -1, and how many this class has
        number[0] = T.int64(0)
        for b in T.serial(batches):
            for i in T.serial(boxes):
                if is_center:
                    corners[i, 0] = box[b, i, 0] - box[b, i, 2] / T.float32(2)
                    corners[i, 1] = box[b, i, 1] - box[b, i, 3] / T.float32(2)
                    corners[i, 2] = box[b, i, 0] + box[b, i, 2] / T.float32(2)
                    corners[i, 3] = box[b, i, 1] + box[b, i, 3] / T.float32(2)
                else:
                    corners[i, 0] = T.min(box[b, i, 0], box[b, i, 2])
                    corners[i, 1] = T.min(box[b, i, 1], box[b, i, 3])
                    corners[i, 2] = T.max(box[b, i, 0], box[b, i, 2])
                    corners[i, 3] = T.max(box[b, i, 1], box[b, i, 3])
            for c in T.serial(classes):
                for i in T.serial(boxes):
                    alive[i] = score[b, c, i] > least[0]
                state[0] = T.int64(0)
                state[1] = T.int64(0)
                while state[0] >= T.int64(0) and state[1] < T.min(most[0], T.int64(limit)):
                    state[0] = T.int64(-1)
                    for i in T.serial(boxes):
                        if alive[i]:
                            if state[0] < T.int64(0):
                                state[0] = T.Cast("int64", i)
                            elif score[b, c, i] > score[b, c, state[0]]:
                                state[0] = T.Cast("int64", i)
                    if state[0] >= T.int64(0):
                        selected[number[0], 0] = T.Cast("int64", b)
                        selected[number[0], 1] = T.Cast("int64", c)
                        selected[number[0], 2] = state[0]
                        number[0] = number[0] + T.int64(1)
                        state[1] = state[1] + T.int64(1)
                        alive[state[0]] = T.bool(False)
                        for i in T.serial(boxes):
                            if alive[i]:
                                high = T.min(corners[i, 2], corners[state[0], 2]) - T.max(
                                    corners[i, 0], corners[state[0], 0]
                                )
                                wide = T.min(corners[i, 3], corners[state[0], 3]) - T.max(
                                    corners[i, 1], corners[state[0], 1]
                                )
                                if high > T.float32(0) and wide > T.float32(0):
                                    own = (corners[i, 2] - corners[i, 0]) * (corners[i, 3] - corners[i, 1])
                                    other = (corners[state[0], 2] - corners[state[0], 0]) * (
                                        corners[state[0], 3] - corners[state[0], 1]
                                    )
                                    if high * wide / (own + other - high * wide) > overlap[0]:
                                        alive[i] = T.bool(False)

    return non_max_suppression


@converts("NonMaxSuppression")
def non_max_suppression(node: Node) -> relax.Expr:
    """The boxes to keep of every class, best first; limits and thresholds may be inputs."""
    boxes, scores = node.tensor(0), node.tensor(1)
    batches, count, _ = node.static_shape(boxes)
    classes = node.static_shape(scores)[1]
    boxes = require_shape(node, boxes, [batches, count, 4], "its boxes")
    scores = require_shape(node, scores, [batches, classes, count], "its scores")
    known = node.constant(2)
    limit = count
    if not node.has(2) or (known is not None and int(known.reshape(-1)[0]) <= 0):
        return const(np.zeros((0, 3)), "int64")
    if known is not None:
        limit = min(limit, int(known.reshape(-1)[0]))
    most = node.emit(relax.op.reshape(cast(node, node.tensor(2), "int64"), (1,)))
    overlap = _threshold(node, 3, 0.0)
    least = _threshold(node, 4, -np.inf)
    problem = Suppression(batches, classes, count, limit, bool(node.attribute("center_point_box", 0)))
    kernel = _suppression_kernel(batches, classes, count, limit, problem.is_center)
    if batches and classes and count:
        kernel = kernel.with_attr(SUPPRESSION, problem.text)
    symbol = node.builder.add_func(kernel, "non_max_suppression")
    capacity = batches * classes * limit
    found = node.emit(
        relax.op.call_tir(
            symbol,
            [boxes, scores, most, overlap, least],
            [relax.TensorType((capacity, 3), "int64"), relax.TensorType((1,), "int64")],
        )
    )
    triples, number = (node.emit(relax.TupleGetItem(found, i)) for i in (0, 1))
    (size,) = dims_at_run_time(node, number, "selected")
    ends = node.emit(relax.op.concat([number, const([3], "int64")], axis=0))
    zeros, ones = const([0, 0], "int64"), const([1, 1], "int64")
    cut = node.emit(relax.op.dynamic_strided_slice(triples, zeros, ends, ones))
    return node.builder.match_cast(cut, relax.TensorType((size, 3), "int64"))


def _threshold(node: Node, index: int, default: float) -> relax.Expr:
    if not node.has(index):
        return const([default], "float32")
    return node.emit(relax.op.reshape(cast(node, node.tensor(index), "float32"), (1,)))
