"""Linear models."""

from __future__ import annotations

import numpy as np
from tvm import relax

from ..elementwise import cast
from ..node import Node, const
from ..products import matmul
from ..required_sizes import require_equal
from ..table import CLASSICAL, converts
from .scores import labels_from, labels_of, largest, transformed, two_columns


def _scores(node: Node, count: int) -> relax.Expr:
    """x @ coefficients' + intercepts, with a column for each target."""
    data = cast(node, node.tensor(0), "float32")
    if node.rank(data) != 2:
        raise node.refusal(f"found an input of rank {node.rank(data)}, expected rows of features")
    coefficients = np.array(node.attribute("coefficients"), "float32")
    if count < 1 or coefficients.size % count:
        raise node.refusal(f"has {coefficients.size} coefficients for {count} targets")
    require_equal(node, node.shape(data)[1], coefficients.size // count, "axis 1 of its input, the features, has")
    result = matmul(node, data, const(np.ascontiguousarray(coefficients.reshape(count, -1).T)))
    intercepts = node.attribute("intercepts", ())
    if not len(intercepts):
        return result
    if len(intercepts) != count:
        raise node.refusal(f"has {len(intercepts)} intercepts for {count} targets")
    return node.emit(result + const(np.array(intercepts), "float32"))


@converts("LinearRegressor", domain=CLASSICAL)
def linear_regressor(node: Node) -> relax.Expr:
    """Linear regression."""
    return transformed(node, _scores(node, int(node.attribute("targets", 1))))


@converts("LinearClassifier", domain=CLASSICAL)
def linear_classifier(node: Node) -> relax.Expr:
    """Linear classification: the label with the largest score, and the scores."""
    labels = labels_of(node, "classlabels_ints")
    count = len(node.attribute("intercepts", ())) or labels.size
    if count == 1 and labels.size == 2:
        return _classify_by_one_score(node, labels)
    if count != labels.size or count < 2:
        raise node.refusal(f"has {count} scores for {labels.size} classes, expected a score for each")
    scores = _scores(node, count)
    return node.outputs([labels_from(node, largest(node, scores), labels), transformed(node, scores)])


def _classify_by_one_score(node: Node, labels: np.ndarray) -> relax.Expr:
    """Two classes by one score, positive for the second."""
    score = _scores(node, 1)
    above = node.emit(node.emit(relax.op.squeeze(score, [1])) > const(0, "float32"))
    columns = two_columns(node, score, ("LOGISTIC",))
    return node.outputs([labels_from(node, cast(node, above, "int64"), labels), columns])
