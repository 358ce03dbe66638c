"""Support vector machines: pairwise classifiers, regressors, and their linear forms."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from __future__ import annotations

import itertools

import numpy as np
from tvm import relax, te, tirx
from tvm.script import tirx as T

from ..elementwise import cast
from ..node import Dim, Node, Position, const
from ..products import matmul, squared_distances
from ..required_sizes import require_equal
from ..table import CLASSICAL, converts
from .scores import labels_from, labels_of, largest, transformed, two_columns

_KERNELS = ("POLY", "RBF", "SIGMOID")
_MAX_COUPLING_STEPS = 100  # maximum number of iterations of pairwise coupling, as in LIBSVM and ONNX Runtime
_MIN_PROBABILITY = 1e-7  # minimum probability of a pair


def _floats(node: Node, name: str) -> np.ndarray:
    return np.array(node.attribute(name, ()), "float32")


def _rows(node: Node, width: int) -> relax.Expr:
    """The input as rows of `width` features in float32."""
    data = cast(node, node.tensor(0), "float32")
    if node.rank(data) == 1:
        data = node.emit(relax.op.expand_dims(data, [0]))
    if node.rank(data) != 2:
        raise node.refusal(f"found an input of rank {node.rank(data)}, expected rows of features")
    require_equal(node, node.shape(data)[1], width, "the last axis of its input, the features, has")
    return data


def _matrix(node: Node, name: str, rows: int) -> np.ndarray:
    """Read an attribute as a matrix."""
    numbers = _floats(node, name)
    if rows < 1 or not numbers.size or numbers.size % rows:
        raise node.refusal(f"{name} has {numbers.size} entries, expected a multiple of {rows}")
    return numbers.reshape(rows, -1)


def _weighted_similarities(node: Node, vectors: np.ndarray, weights: np.ndarray, offsets: np.ndarray) -> relax.Expr:
    """Weighted sums of similarities to support vectors, plus offsets, (rows, sums).

    Sums are in float64 because of cancellation; linear kernels are folded into one matrix at import.
    """
    data, wide = _rows(node, vectors.shape[1]), weights.astype("float64")
    if node.attribute("kernel_type", "LINEAR") == "LINEAR":
        folded = np.ascontiguousarray((vectors.T.astype("float64") @ wide).astype("float32"))
        return node.emit(matmul(node, data, const(folded)) + const(offsets))
    total = matmul(node, cast(node, _similarities(node, data, vectors), "float64"), const(wide))
    return cast(node, node.emit(total + const(offsets, "float64")), "float32")


def _similarities(node: Node, data: relax.Expr, vectors: np.ndarray) -> relax.Expr:
    """Kernel function of each row and support vector, (rows, vectors)."""
    kind, parameters = node.attribute("kernel_type", "LINEAR"), list(node.attribute("kernel_params", ()))
    if kind not in _KERNELS:
        raise node.refusal(f"kernel_type {kind!r} is unknown; expected LINEAR or one of {', '.join(_KERNELS)}")
    columns = const(np.ascontiguousarray(vectors.T))
    if len(parameters) != 3:
        raise node.refusal(f"kernel_params has {len(parameters)} entries, expected 3: gamma, coef0 and degree")
    gamma, offset, degree = parameters
    if kind == "RBF":
        return node.emit(relax.op.exp(squared_distances(node, data, columns) * const(-gamma, "float32")))
    product = matmul(node, data, columns) * const(gamma, "float32")
    value = node.emit(product + const(offset, "float32"))
    if kind == "SIGMOID":
        return node.emit(relax.op.tanh(value))
    if degree not in (2, 3):
        return node.emit(value ** const(degree, "float32"))
    square = node.emit(value * value)
    return square if degree == 2 else node.emit(square * value)


def _linear_scores(node: Node, count: int) -> relax.Expr:
    """Scores of `count` targets without support vectors."""
    coefficients, offset = _matrix(node, "coefficients", count), _floats(node, "rho")
    if not offset.size:
        raise node.refusal("has no rho")
    product = matmul(node, _rows(node, coefficients.shape[1]), const(np.ascontiguousarray(coefficients.T)))
    return node.emit(product + const(offset[0]))


@converts("SVMRegressor", domain=CLASSICAL)
def svm_regressor(node: Node) -> relax.Expr:
    """SVM regression, or the sign of the result for a one-class SVM."""
    count = int(node.attribute("n_supports", 0))
    if node.attribute("post_transform", "NONE") != "NONE":
        raise node.refusal(f"found post_transform {node.attribute('post_transform')!r}, expected NONE")
    if count:
        vectors = _matrix(node, "support_vectors", count)
        coefficients, offset = _matrix(node, "coefficients", count), _floats(node, "rho")
        if coefficients.shape[1] != 1 or not offset.size:
            raise node.refusal(f"has {coefficients.size} coefficients and {offset.size} rho for {count} vectors")
        value = _weighted_similarities(node, vectors, coefficients, offset[:1])
    else:
        value = _linear_scores(node, 1)
    if not node.attribute("one_class", 0):
        return value
    is_inside = node.emit(value > const(0, "float32"))
    return node.emit(relax.op.where(is_inside, const(1, "float32"), const(-1, "float32")))


@converts("SVMClassifier", domain=CLASSICAL)
def svm_classifier(node: Node) -> relax.Expr:
    """SVM classification: the label with the most votes of pairs, and pair scores or class probabilities."""
    labels = labels_of(node, "classlabels_ints")
    counts = [int(count) for count in node.attribute("vectors_per_class", ())]
    if labels.size < 2:
        raise node.refusal(f"has {labels.size} classes, expected two or more")
    if not sum(counts):
        return _classify_by_linear_scores(node, labels)
    pairs = list(itertools.combinations(range(labels.size), 2))
    scores = _pair_scores(node, counts, pairs, labels.size)
    is_won = node.emit(relax.op.astype(scores > const(0, "float32"), "float32"))
    gain, base_votes = np.zeros((len(pairs), labels.size), "float32"), np.zeros(labels.size, "float32")
    for pair, (first, second) in enumerate(pairs):
        gain[pair, first], gain[pair, second] = 1, -1
        base_votes[second] += 1
    votes = node.emit(matmul(node, is_won, const(gain)) + const(base_votes))
    label = labels_from(node, largest(node, votes), labels)
    if node.attribute("prob_a"):
        return node.outputs([label, transformed(node, _probabilities(node, scores, pairs, labels.size))])
    if len(pairs) > 1:
        return node.outputs([label, transformed(node, scores)])
    return node.outputs([label, two_columns(node, scores, ("NONE", "LOGISTIC"))])


def _classify_by_linear_scores(node: Node, labels: np.ndarray) -> relax.Expr:
    """Classification without support vectors; of two classes, the second if any score is positive.

    As in ONNX Runtime, which reads two columns for the one score that trainers write for two classes.
    """
    scores = _linear_scores(node, labels.size)
    index = largest(node, scores)
    if labels.size == 2 and not node.attribute("prob_a"):
        are_positive = bool((_floats(node, "coefficients") >= 0).all())
        maximum = node.emit(relax.op.max(scores, [1]))
        test = relax.op.greater_equal if are_positive else relax.op.greater
        is_second = node.emit(test(maximum, const(0.5 if are_positive else 0, "float32")))
        index = node.emit(relax.op.where(is_second, const(1, "int64"), index))
    return node.outputs([labels_from(node, index, labels), transformed(node, scores)])


def _pair_scores(node: Node, counts: list[int], pairs: list[tuple[int, int]], classes: int) -> relax.Expr:
    """Scores (rows, pairs), positive if the first class of a pair is more likely."""
    total = sum(counts)
    if len(counts) != classes or min(counts) < 0:
        raise node.refusal(f"vectors_per_class has {len(counts)} entries, expected {classes}")
    vectors = _matrix(node, "support_vectors", total)
    coefficients, offsets = _floats(node, "coefficients"), _floats(node, "rho")
    if coefficients.size != (classes - 1) * total or offsets.size < len(pairs):
        raise node.refusal(
            f"has {coefficients.size} coefficients and {offsets.size} rho, expected {(classes - 1) * total} and "
            f"{len(pairs)}"
        )
    node.check_constant_size(total, len(pairs))
    rows, starts = coefficients.reshape(classes - 1, total), np.cumsum([0, *counts])
    weights = np.zeros((total, len(pairs)), "float32")
    for pair, (first, second) in enumerate(pairs):
        for class_, row in ((first, second - 1), (second, first)):  # rows omit the class itself
            weights[starts[class_] : starts[class_ + 1], pair] = rows[row, starts[class_] : starts[class_ + 1]]
    return _weighted_similarities(node, vectors, weights, offsets[: len(pairs)])


def _probabilities(node: Node, scores: relax.Expr, pairs: list[tuple[int, int]], classes: int) -> relax.Expr:
    """Class probabilities (rows, classes) by pairwise coupling (Wu, Lin, Weng)."""
    slopes, offsets = _floats(node, "prob_a"), _floats(node, "prob_b")
    if slopes.size < len(pairs) or offsets.size != slopes.size:
        raise node.refusal(f"has {slopes.size} prob_a and {offsets.size} prob_b, expected {len(pairs)} of each")
    scaled = scores * const(slopes[: len(pairs)])
    negative_score = node.emit(-(scaled + const(offsets[: len(pairs)])))
    first = node.emit(relax.op.clip(relax.op.sigmoid(negative_score), _MIN_PROBABILITY, 1 - _MIN_PROBABILITY))
    pair_of = np.zeros((classes, classes), "int32")
    for index, (a, other) in enumerate(pairs):
        pair_of[a, other] = pair_of[other, a] = index
    rows = node.shape(scores)[0]

    def likelier(x: te.Tensor, pair: te.Tensor, row: tirx.Expr, a: tirx.Expr, other: tirx.Expr) -> tirx.Expr:
        """Probability of one class against another; 0 against itself."""
        of_pair = x(row, pair(a, other))
        return tirx.Select(a < other, of_pair, tirx.Select(a > other, tirx.const(1.0, "float32") - of_pair, 0.0))

    other = te.reduce_axis((0, classes), "other")

    def squares(i: Position, x: te.Tensor, pair: te.Tensor) -> tirx.Expr:
        against = likelier(x, pair, i[0], other, i[1])
        return te.sum(against * against, axis=other)

    def element(i: Position, x: te.Tensor, pair: te.Tensor, diagonal: te.Tensor) -> tirx.Expr:
        product = likelier(x, pair, i[0], i[2], i[1]) * likelier(x, pair, i[0], i[1], i[2])
        return tirx.Select(i[1].equal(i[2]), diagonal(i[0], i[1]), -product)

    table = const(pair_of)
    diagonal = node.kernel("lost_squares", squares, first, table, shape=[rows, classes])
    form = node.kernel("coupling", element, first, table, diagonal, shape=[rows, classes, classes])
    return _couple(node, form, rows, classes)


def _couple(node: Node, form: relax.Expr, rows: Dim, classes: int) -> relax.Expr:
    symbol = node.builder.add_func(_coupling_kernel(classes), "class_probabilities")
    sizes = ((rows, classes), (rows, classes), (rows, 3))
    types = [relax.TensorType(size, "float32") for size in sizes]
    return node.emit(relax.TupleGetItem(node.emit(relax.op.call_tir(symbol, [form], types)), 0))


def _coupling_kernel(classes: int) -> tirx.PrimFunc:
    """Minimize p' Q p over the probabilities p of each row by coordinate descent.

    It has converged when all entries of Q p are nearly equal. The other results are work space: Q p, and the value, the
    error and the change of an iteration.
    """

    @T.prim_func(private=True, s_tir=True)
    def class_probabilities(form: T.handle, found: T.handle, products: T.handle, numbers: T.handle):
        T.func_attr({"tirx.noalias": True})
        rows = T.int64()
        q = T.match_buffer(form, (rows, classes, classes), "float32")
        p = T.match_buffer(found, (rows, classes), "float32")
        qp = T.match_buffer(products, (rows, classes), "float32")
        state = T.match_buffer(numbers, (rows, 3), "float32")
        for n in T.parallel(rows):
            for i in T.serial(classes):
                p[n, i] = T.float32(1.0 / classes)
            for _ in T.serial(_MAX_COUPLING_STEPS):
                state[n, 0] = T.float32(0)
                state[n, 1] = T.float32(0)
                for i in T.serial(classes):
                    qp[n, i] = T.float32(0)
                    for j in T.serial(classes):
                        qp[n, i] = qp[n, i] + q[n, i, j] * p[n, j]
                    state[n, 0] = state[n, 0] + p[n, i] * qp[n, i]
                for i in T.serial(classes):
                    state[n, 1] = T.max(state[n, 1], T.abs(qp[n, i] - state[n, 0]))
                if state[n, 1] >= T.float32(0.005 / classes):
                    for i in T.serial(classes):
                        state[n, 2] = (state[n, 0] - qp[n, i]) / q[n, i, i]
                        p[n, i] = p[n, i] + state[n, 2]
                        state[n, 0] = (
                            (state[n, 0] + state[n, 2] * (state[n, 2] * q[n, i, i] + T.float32(2) * qp[n, i]))
                            / (T.float32(1) + state[n, 2])
                            / (T.float32(1) + state[n, 2])
                        )
                        for j in T.serial(classes):
                            qp[n, j] = (qp[n, j] + state[n, 2] * q[n, i, j]) / (T.float32(1) + state[n, 2])
                            p[n, j] = p[n, j] / (T.float32(1) + state[n, 2])

    return class_probabilities
