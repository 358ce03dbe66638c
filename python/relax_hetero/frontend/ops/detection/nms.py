"""NonMaxSuppression, with a result of dynamic size."""

from __future__ import annotations

import numpy as np
from tvm import relax, tirx

from ....tir.nms import NmsProblem, nms_kernel
from ....transform.ir.extents import Symbols
from ....transform.ir.kernels import opaque_kernel
from ..elementwise import cast
from ..node import Node, const
from ..required_sizes import as_expr, require_shape
from ..run_time.numbers import dims_at_run_time
from ..table import converts


@converts("NonMaxSuppression")
def non_max_suppression(node: Node) -> relax.Expr:
    """Selected boxes of every class by decreasing score; limits and thresholds may be inputs."""
    boxes, scores = node.tensor(0), node.tensor(1)
    if node.rank(boxes) != 3 or node.rank(scores) != 3:
        raise node.refusal(f"its boxes and scores have {node.rank(boxes)} and {node.rank(scores)} axes, expected 3")
    batches, count, _ = node.shape(boxes)
    classes = node.shape(scores)[1]
    boxes = require_shape(node, boxes, [batches, count, 4], "its boxes")
    scores = require_shape(node, scores, [batches, classes, count], "its scores")
    overlap = node.constant(3)
    if overlap is not None and not ((overlap >= 0) & (overlap <= 1)).all():
        raise node.refusal(f"its iou_threshold is {overlap.reshape(-1)[0]}, expected 0 to 1")
    constant = node.constant(2)
    max_boxes = None if constant is None else int(constant.reshape(-1)[0])
    if not node.has(2) or (max_boxes is not None and max_boxes <= 0) or 0 in (batches, classes, count):
        return const(np.zeros((0, 3)), "int64")
    if isinstance(count, int) and max_boxes is not None and max_boxes >= count:
        max_boxes = None
    max_boxes_tensor = node.emit(relax.op.reshape(cast(node, node.tensor(2), "int64"), (1,)))
    symbols = Symbols()
    problem = NmsProblem(
        symbols.dim(as_expr(batches)),
        symbols.dim(as_expr(classes)),
        symbols.dim(as_expr(count)),
        None if max_boxes is not None and max_boxes >= np.iinfo("int32").max else max_boxes,
        bool(node.attribute("center_point_box", 0)),
    )
    kernel = opaque_kernel(nms_kernel(problem))
    limit = as_expr(count) if problem.max_boxes is None else tirx.min(as_expr(count), as_expr(problem.max_boxes))
    results = node.emit(
        relax.op.call_tir(
            node.builder.add_func(kernel, "non_max_suppression"),
            [boxes, scores, max_boxes_tensor, _threshold(node, 3, 0.0), _threshold(node, 4, -np.inf)],
            [
                relax.TensorType((as_expr(batches) * as_expr(classes) * limit, 3), "int64"),
                relax.TensorType((1,), "int64"),
            ],
        )
    )
    triples, number = (node.emit(relax.TupleGetItem(results, i)) for i in (0, 1))
    (size,) = dims_at_run_time(node, number, "selected")
    ends = node.emit(relax.op.concat([number, const([3], "int64")], axis=0))
    zeros, ones = const([0, 0], "int64"), const([1, 1], "int64")
    cut = node.emit(relax.op.dynamic_strided_slice(triples, zeros, ends, ones))
    return node.builder.match_cast(cut, relax.TensorType((size, 3), "int64"))


def _threshold(node: Node, index: int, default: float) -> relax.Expr:
    if not node.has(index):
        return const([default], "float32")
    return node.emit(relax.op.reshape(cast(node, node.tensor(index), "float32"), (1,)))
