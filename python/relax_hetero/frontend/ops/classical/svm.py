"""Support vector machines: classifiers of pairs of classes, regressors, and their linear forms."""
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
from ..table import CLASSICAL, convert_node, converts
from .scores import labels_from, labels_of, transformed

_KERNELS = ("POLY", "RBF", "SIGMOID")
_STEPS = 100
"""Steps of the search for probabilities of classes, as LIBSVM and ONNX Runtime have it."""
_MIN_PROBABILITY = 1e-7
"""The least probability of a pair."""


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
    """An attribute as a matrix of that many rows."""
    numbers = _floats(node, name)
    if rows < 1 or not numbers.size or numbers.size % rows:
        raise node.refusal(f"{name} has {numbers.size} entries, expected a multiple of {rows}")
    return numbers.reshape(rows, -1)


def _weighted(node: Node, vectors: np.ndarray, weights: np.ndarray, offsets: np.ndarray) -> relax.Expr:
    """(rows, sums), similarities to support vectors weighted and added up, plus offsets.

    Weights of both signs cancel, so sums are taken in float64; linear similarities are summed at import.
    """
    data, wide = _rows(node, vectors.shape[1]), weights.astype("float64")
    if node.attribute("kernel_type", "LINEAR") == "LINEAR":
        folded = np.ascontiguousarray((vectors.T.astype("float64") @ wide).astype("float32"))
        return node.emit(relax.op.add(matmul(node, data, const(folded)), const(offsets)))
    total = matmul(node, cast(node, _similarities(node, data, vectors), "float64"), const(wide))
    return cast(node, node.emit(relax.op.add(total, const(offsets, "float64"))), "float32")


def _similarities(node: Node, data: relax.Expr, vectors: np.ndarray) -> relax.Expr:
    """(rows, vectors), the kernel function of each row and each support vector."""
    kind, parameters = node.attribute("kernel_type", "LINEAR"), list(node.attribute("kernel_params", ()))
    if kind not in _KERNELS:
        raise node.refusal(f"kernel_type {kind!r} is unknown; expected LINEAR or one of {', '.join(_KERNELS)}")
    columns = const(np.ascontiguousarray(vectors.T))
    if len(parameters) != 3:
        raise node.refusal(f"kernel_params has {len(parameters)} entries, expected 3: gamma, coef0 and degree")
    gamma, offset, degree = parameters
    if kind == "RBF":
        distances = squared_distances(node, data, columns)
        return node.emit(relax.op.exp(relax.op.multiply(distances, const(-gamma, "float32"))))
    product = relax.op.multiply(matmul(node, data, columns), const(gamma, "float32"))
    value = node.emit(relax.op.add(product, const(offset, "float32")))
    if kind == "SIGMOID":
        return node.emit(relax.op.tanh(value))
    if degree not in (2, 3):
        return node.emit(relax.op.power(value, const(degree, "float32")))
    square = node.emit(relax.op.multiply(value, value))
    return square if degree == 2 else node.emit(relax.op.multiply(square, value))


def _linear_scores(node: Node, count: int) -> relax.Expr:
    """A score for each of `count` targets, where there are no support vectors."""
    coefficients, offset = _matrix(node, "coefficients", count), _floats(node, "rho")
    if not offset.size:
        raise node.refusal("has no rho")
    product = matmul(node, _rows(node, coefficients.shape[1]), const(np.ascontiguousarray(coefficients.T)))
    return node.emit(relax.op.add(product, const(offset[0])))


@converts("SVMRegressor", domain=CLASSICAL)
def svm_regressor(node: Node) -> relax.Expr:
    """A sum of similarities to support vectors; its sign, where the node tells outliers from one class."""
    count = int(node.attribute("n_supports", 0))
    if node.attribute("post_transform", "NONE") != "NONE":
        raise node.refusal(f"found post_transform {node.attribute('post_transform')!r}, expected NONE")
    if count:
        vectors = _matrix(node, "support_vectors", count)
        coefficients, offset = _matrix(node, "coefficients", count), _floats(node, "rho")
        if coefficients.shape[1] != 1 or not offset.size:
            raise node.refusal(f"has {coefficients.size} coefficients and {offset.size} rho for {count} vectors")
        value = _weighted(node, vectors, coefficients, offset[:1])
    else:
        value = _linear_scores(node, 1)
    if not node.attribute("one_class", 0):
        return value
    is_inside = node.emit(relax.op.greater(value, const(0, "float32")))
    return node.emit(relax.op.where(is_inside, const(1, "float32"), const(-1, "float32")))


@converts("SVMClassifier", domain=CLASSICAL)
def svm_classifier(node: Node) -> relax.Expr:
    """The label that most pairs vote for, and scores: of pairs, or probabilities of classes where these are trained."""
    labels = labels_of(node, "classlabels_ints")
    counts = [int(count) for count in node.attribute("vectors_per_class", ())]
    if labels.size < 2:
        raise node.refusal(f"has {labels.size} classes, expected two or more")
    if not sum(counts):
        return _by_linear_scores(node, labels)
    pairs = list(itertools.combinations(range(labels.size), 2))
    scores = _scores_of_pairs(node, counts, pairs, labels.size)
    is_won = node.emit(relax.op.astype(relax.op.greater(scores, const(0, "float32")), "float32"))
    gain, given = np.zeros((len(pairs), labels.size), "float32"), np.zeros(labels.size, "float32")
    for at, (first, second) in enumerate(pairs):
        gain[at, first], gain[at, second] = 1, -1
        given[second] += 1
    votes = node.emit(relax.op.add(matmul(node, is_won, const(gain)), const(given)))
    label = labels_from(node, _largest(node, votes), labels)
    if node.attribute("prob_a"):
        return node.outputs([label, transformed(node, _probabilities(node, scores, pairs, labels.size))])
    if len(pairs) > 1:
        return node.outputs([label, transformed(node, scores)])
    after = node.attribute("post_transform", "NONE")
    if after == "PROBIT":
        raise node.refusal("post_transform 'PROBIT' of one score for two classes has no meaning")
    # Columns as ONNX Runtime has them; a softmax it leaves out where there is one score.
    is_mirrored = after in ("NONE", "LOGISTIC")
    other = relax.op.negative(scores) if is_mirrored else relax.op.subtract(const(1, "float32"), scores)
    columns = node.emit(relax.op.concat([node.emit(other), scores], axis=1))
    return node.outputs([label, node.emit(relax.op.sigmoid(columns)) if after == "LOGISTIC" else columns])


def _largest(node: Node, scores: relax.Expr) -> relax.Expr:
    return node.builder.normalize(convert_node(node.as_op("ArgMax", [scores], 13, axis=1, keepdims=0)))


def _by_linear_scores(node: Node, labels: np.ndarray) -> relax.Expr:
    """Scores of classes without support vectors; of two classes the second where any score is positive.

    That is what ONNX Runtime does: it takes two columns for the one score that trainers give two classes.
    """
    scores = _linear_scores(node, labels.size)
    index = _largest(node, scores)
    if labels.size == 2 and not node.attribute("prob_a"):
        are_positive = bool((_floats(node, "coefficients") >= 0).all())
        maximum = node.emit(relax.op.max(scores, [1]))
        test = relax.op.greater_equal if are_positive else relax.op.greater
        is_second = node.emit(test(maximum, const(0.5 if are_positive else 0, "float32")))
        index = node.emit(relax.op.where(is_second, const(1, "int64"), index))
    return node.outputs([labels_from(node, index, labels), transformed(node, scores)])


def _scores_of_pairs(node: Node, counts: list[int], pairs: list[tuple[int, int]], classes: int) -> relax.Expr:
    """(rows, pairs): above 0 where the first class of a pair is likelier than the second."""
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
    node.check_table(total, len(pairs))
    rows, starts = coefficients.reshape(classes - 1, total), np.cumsum([0, *counts])
    weights = np.zeros((total, len(pairs)), "float32")
    for at, (first, second) in enumerate(pairs):
        for own, other in ((first, second - 1), (second, first)):  # a row has no entry for a class and itself
            weights[starts[own] : starts[own + 1], at] = rows[other, starts[own] : starts[own + 1]]
    return _weighted(node, vectors, weights, offsets[: len(pairs)])


def _probabilities(node: Node, scores: relax.Expr, pairs: list[tuple[int, int]], classes: int) -> relax.Expr:
    """(rows, classes), probabilities that agree best with those of the pairs (Wu, Lin, Weng: pairwise coupling)."""
    slopes, offsets = _floats(node, "prob_a"), _floats(node, "prob_b")
    if slopes.size < len(pairs) or offsets.size != slopes.size:
        raise node.refusal(f"has {slopes.size} prob_a and {offsets.size} prob_b, expected {len(pairs)} of each")
    scaled = relax.op.multiply(scores, const(slopes[: len(pairs)]))
    place = node.emit(relax.op.negative(relax.op.add(scaled, const(offsets[: len(pairs)]))))
    first = node.emit(relax.op.clip(relax.op.sigmoid(place), _MIN_PROBABILITY, 1 - _MIN_PROBABILITY))
    pair_of = np.zeros((classes, classes), "int32")
    for at, (one, other) in enumerate(pairs):
        pair_of[one, other] = pair_of[other, one] = at
    rows = node.shape(scores)[0]

    def likelier(x: te.Tensor, pair: te.Tensor, row: tirx.Expr, one: tirx.Expr, other: tirx.Expr) -> tirx.Expr:
        """The probability of one class against another; 0 of a class against itself."""
        of_pair = x(row, pair(one, other))
        return tirx.Select(one < other, of_pair, tirx.Select(one > other, tirx.const(1.0, "float32") - of_pair, 0.0))

    other = te.reduce_axis((0, classes), "other")

    def squares(i: Position, x: te.Tensor, pair: te.Tensor) -> tirx.Expr:
        against = likelier(x, pair, i[0], other, i[1])
        return te.sum(against * against, axis=other)

    def element(i: Position, x: te.Tensor, pair: te.Tensor, own: te.Tensor) -> tirx.Expr:
        product = likelier(x, pair, i[0], i[2], i[1]) * likelier(x, pair, i[0], i[1], i[2])
        return tirx.Select(i[1].equal(i[2]), own(i[0], i[1]), -product)

    table = const(pair_of)
    own = node.kernel("lost_squares", squares, first, table, shape=[rows, classes])
    form = node.kernel("coupling", element, first, table, own, shape=[rows, classes, classes])
    return _coupled(node, form, rows, classes)


def _coupled(node: Node, form: relax.Expr, rows: Dim, classes: int) -> relax.Expr:
    symbol = node.builder.add_func(_coupling_kernel(classes), "class_probabilities")
    sizes = ((rows, classes), (rows, classes), (rows, 3))
    types = [relax.TensorType(size, "float32") for size in sizes]
    return node.emit(relax.TupleGetItem(node.emit(relax.op.call_tir(symbol, [form], types)), 0))


def _coupling_kernel(classes: int) -> tirx.PrimFunc:
    """Probabilities p of each row that make p' Q p least, by steps in one of them at a time.

    The search ends where all entries of Q p are nearly the same; later steps change nothing. The other results hold
    Q p, and the value, the error and the difference of a step.
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
            for _ in T.serial(_STEPS):
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
