"""Labels of classes, and transforms of scores to probabilities."""

from __future__ import annotations

import numpy as np
from tvm import relax

from ..node import Node, const, dtype_of
from ..table import convert_node

TRANSFORMS = ("NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO", "PROBIT")

_ZERO_BOUND = 1e-7  # scores of at most this magnitude count as 0 in SOFTMAX_ZERO


def transformed(node: Node, scores: relax.Expr, name: str | None = None) -> relax.Expr:
    """Apply `post_transform`, by default the node's, to scores (rows, classes).

    Raises FrontendError if the name is unknown.
    """
    name = node.attribute("post_transform", "NONE") if name is None else name
    if name not in TRANSFORMS:
        raise node.refusal(f"post_transform {name!r} is unknown; expected one of {', '.join(TRANSFORMS)}")
    if name == "LOGISTIC":
        return node.emit(relax.op.sigmoid(scores))
    if name == "SOFTMAX":
        return node.builder.normalize(convert_node(node.as_op("Softmax", [scores], 13, axis=-1)))
    if name == "SOFTMAX_ZERO":
        return _softmax_of_nonzero(node, scores)
    return _probit(node, scores) if name == "PROBIT" else scores


def _softmax_of_nonzero(node: Node, scores: relax.Expr) -> relax.Expr:
    """Softmax over nonzero scores; zeros stay near 0."""
    dtype = dtype_of(scores)
    maximum = node.emit(relax.op.max(scores, [-1], keepdims=True))
    is_scored = node.emit(node.emit(relax.op.abs(scores)) > const(_ZERO_BOUND, dtype))
    power = node.emit(relax.op.exp(node.emit(scores - maximum)))
    total = node.emit(relax.op.sum(relax.op.where(is_scored, power, const(0, dtype)), [-1], keepdims=True))
    small = node.emit(scores * node.emit(relax.op.exp(node.emit(-maximum))))
    return node.emit(node.emit(relax.op.where(is_scored, power, small)) / total)


def _probit(node: Node, scores: relax.Expr) -> relax.Expr:
    """Normal quantile, by ONNX Runtime's approximation of the inverse error function."""
    dtype = dtype_of(scores)

    def number(value: float) -> relax.Expr:
        return const(value, dtype)

    x = node.emit(scores * number(2) - number(1))
    log = node.emit(relax.op.log((number(1) - x) * (number(1) + x)))
    half = node.emit(number(2 / (3.14159 * 0.147)) + number(0.5) * log)
    root = node.emit(relax.op.sqrt(relax.op.sqrt(half * half - number(1 / 0.147) * log) - half))
    sign = node.emit(relax.op.where(x < number(0), number(-1), number(1)))
    return node.emit(number(1.41421356) * sign * root)


def two_columns(node: Node, score: relax.Expr, mirrored: tuple[str, ...]) -> relax.Expr:
    """Scores of two classes by one score of the second, (rows, 1), as in ONNX Runtime, which omits a softmax.

    `mirrored`: transforms with which the first class has minus the score; with others it has one minus the score.
    Raises FrontendError if the transform is PROBIT.
    """
    name = node.attribute("post_transform", "NONE")
    if name == "PROBIT":
        raise node.refusal("post_transform 'PROBIT' of one score for two classes has no meaning")
    first = -score if name in mirrored else const(1, "float32") - score
    columns = node.emit(relax.op.concat([node.emit(first), score], axis=1))
    return node.emit(relax.op.sigmoid(columns)) if name == "LOGISTIC" else columns


def largest(node: Node, scores: relax.Expr) -> relax.Expr:
    """Index of the first class with the largest score of each row."""
    return node.builder.normalize(convert_node(node.as_op("ArgMax", [scores], 13, axis=1, keepdims=0)))


def labels_of(node: Node, *names: str) -> np.ndarray:
    """Integer labels of the classes. Raises FrontendError if they are strings."""
    for name in names:
        if node.attribute(name):
            return np.array(node.attribute(name), "int64")
    raise node.refusal("its labels are strings, which no tensor holds; train the model with numbers as labels")


def labels_from(node: Node, index: relax.Expr, labels: np.ndarray) -> relax.Expr:
    """Map class indices to labels."""
    if (labels == np.arange(labels.size)).all():
        return index
    return node.emit(relax.op.take(const(labels, "int64"), index, 0, "fast"))
