"""Scores of classes: labels, and the functions that make probabilities of scores."""

from __future__ import annotations

import numpy as np
from tvm import relax

from ..node import Node, const
from ..table import convert_node

TRANSFORMS = ("NONE", "LOGISTIC", "SOFTMAX")


def transformed(node: Node, scores: relax.Expr) -> relax.Expr:
    """Scores after the node's `post_transform`.

    Raises
    ------
    FrontendError: for SOFTMAX_ZERO and PROBIT.
    """
    name = node.attribute("post_transform", "NONE")
    if name not in TRANSFORMS:
        raise node.refusal(f"post_transform {name!r} cannot be imported; expected one of {', '.join(TRANSFORMS)}")
    if name == "LOGISTIC":
        return node.emit(relax.op.sigmoid(scores))
    if name == "SOFTMAX":
        return node.builder.normalize(convert_node(node.as_op("Softmax", [scores], 13, axis=-1)))
    return scores


def labels_of(node: Node, *names: str) -> np.ndarray:
    """The classes, whole numbers.

    Raises
    ------
    FrontendError: if they are strings.
    """
    for name in names:
        if node.attribute(name):
            return np.array(node.attribute(name), "int64")
    raise node.refusal("its labels are strings, which no tensor holds; train the model with numbers as labels")


def labels_from(node: Node, index: relax.Expr, labels: np.ndarray) -> relax.Expr:
    """The label of each row, by the index of its class."""
    if (labels == np.arange(labels.size)).all():
        return index
    return node.emit(relax.op.take(const(labels, "int64"), index, 0, "fast"))
