"""Ensembles of decision trees: forests, boosted trees, single trees."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import numpy_helper
from tvm import relax

from ..elementwise import cast
from ..node import Node, const, dtype_of
from ..table import CLASSICAL, convert_node, converts
from .forest import LEAF, Forest, Trees, Weights, combined, forest_of, labels_of_leaves, leaves_of_rows
from .scores import labels_from, labels_of, transformed

_MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ", "BRANCH_MEMBER")
_HOW = ("AVERAGE", "SUM", "MIN", "MAX")
_TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")


def _array(value: Any) -> np.ndarray:
    return np.asarray(numpy_helper.to_array(value)) if hasattr(value, "raw_data") else np.asarray(value)


def _numbers(node: Node, name: str) -> Any:
    """A list attribute, which may stand as a tensor of float64 instead; as Python numbers."""
    value = node.attributes.get(f"{name}_as_tensor")
    return _array(node.attribute(name, ()) if value is None else value).reshape(-1).tolist()


def _lists(node: Node, length: int | None, *names: str) -> list[list[Any]]:
    """Attributes with an entry for each node, or each weight.

    Raises
    ------
    FrontendError
        If they differ in length.
    """
    found = [_numbers(node, name) for name in names]
    for name, values in zip(names, found, strict=True):
        expected = len(found[0]) if length is None else length
        if len(values) != expected:
            raise node.refusal(f"{name} has {len(values)} entries, expected {expected}")
    return found


def _rows(node: Node) -> tuple[relax.Expr, int]:
    """The input as rows of features, in float64 or else float32, and how many features there are."""
    data = node.tensor(0)
    if node.rank(data) == 1:
        data = node.emit(relax.op.expand_dims(data, [0]))
    if node.rank(data) != 2:
        raise node.refusal(f"found an input of rank {node.rank(data)}, expected rows of features")
    width = node.shape(data)[1]
    if not isinstance(width, int):
        raise node.refusal("the number of features of its input is unknown; give it with shapes=")
    return (data if dtype_of(data) == "float64" else cast(node, data, "float32")), width


def _listed_trees(node: Node, prefix: str) -> tuple[Trees, Weights, list[int]]:
    """Trees and weights of the ops that list nodes with leaves among them; `prefix` is "target" or "class"."""
    names = ("nodeids", "treeids", "featureids", "values", "truenodeids", "falsenodeids")
    ids, tree_of, features, splits, true, false = _lists(node, None, *(f"nodes_{name}" for name in names))
    modes = [mode.decode() if isinstance(mode, bytes) else mode for mode in node.attribute("nodes_modes", ())]
    tracks = list(node.attribute("nodes_missing_value_tracks_true", ())) or [0] * len(ids)
    for name, values in (("nodes_modes", modes), ("nodes_missing_value_tracks_true", tracks)):
        if len(values) != len(ids):
            raise node.refusal(f"{name} has {len(values)} entries, expected {len(ids)}")
    place = {key: index for index, key in enumerate(zip(tree_of, ids, strict=True))}
    if len(place) < len(ids):
        raise node.refusal("two of its nodes have the same number and tree")

    def find(tree: int, identity: int) -> int:
        if (tree, identity) not in place:
            raise node.refusal(f"its tree {tree} has no node {identity}")
        return place[tree, identity]

    is_leaf = [mode == LEAF for mode in modes]
    pairs = [
        (0, 0) if leaf else (find(tree, high), find(tree, low))
        for leaf, tree, high, low in zip(is_leaf, tree_of, true, false, strict=True)
    ]
    roots = [i for i, tree in enumerate(tree_of) if i == 0 or tree != tree_of[i - 1]]
    trees = Trees(modes, features, splits, [a for a, _ in pairs], [b for _, b in pairs], tracks, roots, {})
    targets, nodes, of_tree, weights = _lists(
        node, None, *(f"{prefix}_{name}" for name in ("ids", "nodeids", "treeids", "weights"))
    )
    leaf_at = {old: new for new, old in enumerate(i for i, leaf in enumerate(is_leaf) if leaf)}
    entries: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for target, tree, identity, weight in zip(targets, of_tree, nodes, weights, strict=True):
        old = find(tree, identity)
        if old in leaf_at:  # a weight of an inner node is never reached
            entries[leaf_at[old]].append((target, weight))
    return trees, entries, targets


def _check_targets(node: Node, targets: Sequence[int], count: int) -> None:
    if count < 1 or any(not 0 <= target < count for target in targets):
        raise node.refusal(f"its leaves have weights of target {max(targets, default=0)}, expected less than {count}")


@converts("TreeEnsembleRegressor", domain=CLASSICAL)
def tree_ensemble_regressor(node: Node) -> relax.Expr:
    """A number for each target, from the leaf of each tree."""
    data, width = _rows(node)
    dtype, count = dtype_of(data), int(node.attribute("n_targets", 1))
    trees, weights, targets = _listed_trees(node, "target")
    _check_targets(node, targets, count)
    forest = forest_of(node, trees, width, dtype)
    how = node.attribute("aggregate_function", "SUM")
    scores = _aggregate(node, data, forest, weights, count, how)
    base = _numbers(node, "base_values")
    if len(base) not in (0, count):
        raise node.refusal(f"base_values has {len(base)} entries, expected {count}")
    if base:
        scores = node.emit(relax.op.add(scores, const(base, dtype)))
    return cast(node, _after(node, scores, node.attribute("post_transform", "NONE")), "float32")


def _aggregate(node: Node, data: relax.Expr, forest: Forest, weights: Weights, count: int, how: str) -> relax.Expr:
    if how not in _HOW:
        raise node.refusal(f"aggregate_function {how!r} is unknown; expected one of {', '.join(_HOW)}")
    dtype = dtype_of(data)
    rows = leaves_of_rows(node, data, forest)
    scores = combined(node, rows, forest, weights, count, dtype, "SUM" if how == "AVERAGE" else how)
    return node.emit(relax.op.divide(scores, const(forest.roots.size, dtype))) if how == "AVERAGE" else scores


def _after(node: Node, scores: relax.Expr, name: str) -> relax.Expr:
    """Scores of regression after `post_transform`; of one target only PROBIT changes any, as in ONNX Runtime."""
    is_single = node.shape(scores)[1] == 1
    return transformed(node, scores, "NONE" if is_single and name != "PROBIT" else name)


@converts("TreeEnsembleClassifier", domain=CLASSICAL)
def tree_ensemble_classifier(node: Node) -> relax.Expr:
    """The label with the largest score, and the scores."""
    data, width = _rows(node)
    dtype = dtype_of(data)
    labels = labels_of(node, "classlabels_int64s")
    trees, weights, ids = _listed_trees(node, "class")
    _check_targets(node, ids, labels.size)
    base = _numbers(node, "base_values")
    forest = forest_of(node, trees, width, dtype)
    rows = leaves_of_rows(node, data, forest)
    scores = combined(node, rows, forest, weights, labels.size, dtype)
    if len(base) not in (0, labels.size) and (labels.size, len(base)) != (2, 1):
        raise node.refusal(f"base_values has {len(base)} entries, expected {labels.size}")
    if labels.size <= 2:
        if labels.size == 1:
            index, scores = _one_class(node, scores, base)
        else:
            index, scores = _two_classes(node, rows, scores, forest, weights, base)
        if labels.dtype.kind == "i" and (labels.size == 1 or len(_scored(weights)) > 1):
            labels = np.arange(2)  # ONNX Runtime gives the number of the class, not its label
    else:
        compared = scores
        if base:
            compared = scores = node.emit(relax.op.add(scores, const(base, dtype)))
        elif not set(range(labels.size)) <= _always(forest, weights):
            counted = {leaf: [(k, 1.0) for k, _ in entries] for leaf, entries in weights.items()}
            counts = combined(node, rows, forest, counted, labels.size, dtype)
            is_scored = node.emit(relax.op.greater(counts, const(0, dtype)))  # others are never the label
            compared = node.emit(relax.op.where(is_scored, scores, const(-np.inf, dtype)))
        if forest.roots.size == 1 and not base:  # its leaf says the label of a row
            label = labels_of_leaves(node, rows, labels[_best_of_leaves(forest, weights, dtype)])
            return node.outputs([label, cast(node, transformed(node, scores), "float32")])
        index = node.builder.normalize(convert_node(node.as_op("ArgMax", [compared], 13, axis=1, keepdims=0)))
        scores = transformed(node, scores)
    return node.outputs([labels_from(node, index, labels), cast(node, scores, "float32")])


def _best_of_leaves(forest: Forest, weights: Weights, dtype: str) -> np.ndarray:
    """The class with the largest score of each leaf; 0 where there are no scores."""
    best = np.zeros(len(forest.leaves), "int64")
    for leaf, entries in weights.items():
        found: dict[int, float] = {}
        for k, weight in entries:
            found[k] = np.dtype(dtype).type(found.get(k, 0) + np.dtype(dtype).type(weight))
        best[leaf] = min(found, key=lambda k: (-found[k], k))
    return best


def _always(forest: Forest, weights: Weights) -> set[int]:
    """Targets that have a weight in whichever leaves a row comes to: in all leaves of some tree."""
    found: set[int] = set()
    for tree in forest.leaves_of:
        found |= set.intersection(*({k for k, _ in weights.get(leaf, ())} for leaf in tree))
    return found


def _scored(weights: Weights) -> set[int]:
    """Targets that have a weight in some leaf."""
    return {target for entries in weights.values() for target, _ in entries}


def _one_class(node: Node, scores: relax.Expr, base: list[float]) -> tuple[relax.Expr, relax.Expr]:
    """The index 1 where the one score is positive, else 0, and the score, which only PROBIT changes."""
    scores = node.emit(relax.op.add(scores, const(base, dtype_of(scores)))) if base else scores
    return _is_above(node, scores, 0.0), _after(node, scores, node.attribute("post_transform", "NONE"))


def _two_classes(
    node: Node, rows: relax.Expr, scores: relax.Expr, forest: Forest, weights: Weights, base: list[float]
) -> tuple[relax.Expr, relax.Expr]:
    """The index of the class, and scores of both, as ONNX Runtime has it.

    A score is of class k where one of the leaves that a row comes to has a weight of it. Where there is one of class 1,
    or two base values, both classes have scores, which are 0 where nothing gives one; else the other score follows from
    that of class 0.

    Raises
    ------
    FrontendError
        Where ONNX Runtime leaves a score unwritten.
    """
    dtype, ids = dtype_of(scores), _scored(weights)
    name = node.attribute("post_transform", "NONE")
    always = _always(forest, weights)
    counted = {leaf: [(k, 1.0) for k, _ in entries] for leaf, entries in weights.items()}
    counts = None if ids <= always else combined(node, rows, forest, counted, 2, dtype)
    columns = [[_column(node, value, k) for k in (0, 1)] for value in (scores, scores if counts is None else counts)]
    zero = const(0, dtype)

    def where_scored(k: int, value: relax.Expr, otherwise: relax.Expr) -> relax.Expr:
        if k in always:
            return value
        if k not in ids:
            return otherwise
        return node.emit(relax.op.where(relax.op.greater(columns[1][k], zero), value, otherwise))

    first, second = columns[0]
    if base:
        moved = node.emit(relax.op.add(first, const(base[0], dtype)))
    if len(base) == 2:
        sum_of_both = node.emit(relax.op.add(first, const(base[1], dtype)))
        second = where_scored(1, sum_of_both, node.emit(relax.op.add(second, const(base[1], dtype))))
        first = where_scored(1, node.emit(relax.op.negative(sum_of_both)), moved)
    elif base:
        first = moved
    first = where_scored(0, first, _zeros(node, first))
    both = transformed(node, node.emit(relax.op.concat([first, where_scored(1, second, _zeros(node, second))], axis=1)))
    is_binary, are_positive = len(ids) == 1, _are_positive(weights)
    index = _is_above(node, where_scored(1, second, first), 0.5 if is_binary and are_positive else 0.0)
    if len(base) == 2 or 1 in always:
        return index, both
    if name == "PROBIT" or (base and not is_binary):
        raise node.refusal(
            f"has scores of classes {sorted(ids)} of two, {len(base)} base_values and post_transform {name!r}, "
            "for which ONNX Runtime leaves a score open; expected scores of class 1 in every leaf of a tree, or two "
            "base_values"
        )
    other = node.emit(relax.op.negative(first))
    if is_binary and are_positive and name != "LOGISTIC":
        other = node.emit(relax.op.subtract(const(1, dtype), first))
    pair = node.emit(relax.op.concat([other, first], axis=1))
    return index, where_scored(1, both, node.emit(relax.op.sigmoid(pair)) if name == "LOGISTIC" else pair)


def _column(node: Node, value: relax.Expr, k: int) -> relax.Expr:
    return node.emit(relax.op.strided_slice(value, [1], [k], [k + 1]))


def _zeros(node: Node, like: relax.Expr) -> relax.Expr:
    return node.filled(node.shape(like), 0, dtype_of(like))


def _are_positive(weights: Weights) -> bool:
    return all(weight >= 0 for entries in weights.values() for _, weight in entries)


def _is_above(node: Node, column: relax.Expr, bound: float) -> relax.Expr:
    above = node.emit(relax.op.greater(column, const(bound, dtype_of(column))))
    return cast(node, node.emit(relax.op.squeeze(above, [1])), "int64")


@converts("TreeEnsemble", domain=CLASSICAL)
def tree_ensemble(node: Node) -> relax.Expr:
    """Trees whose leaves are listed apart from their nodes, in the input's type."""
    wanted = dtype_of(node.tensor(0))
    data, width = _rows(node)
    count = int(node.attribute("n_targets", 1))
    trees = _apart_trees(node)
    leaves = sum(mode == LEAF for mode in trees.modes)
    targets, weights = _lists(node, leaves, "leaf_targetids", "leaf_weights")
    _check_targets(node, targets, count)
    forest = forest_of(node, trees, width, dtype_of(data))
    entries = {leaf: [pair] for leaf, pair in enumerate(zip(targets, weights, strict=True))}
    how, after = int(node.attribute("aggregate_function", 1)), int(node.attribute("post_transform", 0))
    if not (0 <= how < len(_HOW) and 0 <= after < len(_TRANSFORMS)):
        raise node.refusal(f"found aggregate_function {how} and post_transform {after}, expected at most 3 and 4")
    scores = _aggregate(node, data, forest, entries, count, _HOW[how])
    return cast(node, _after(node, scores, _TRANSFORMS[after]), wanted)


def _apart_trees(node: Node) -> Trees:
    """Trees of op `TreeEnsemble`: the positions of leaves follow those of nodes."""
    features, splits, modes, true, true_leaf, false, false_leaf = _lists(
        node, None,
        *(f"nodes_{name}" for name in
          ("featureids", "splits", "modes", "truenodeids", "trueleafs", "falsenodeids", "falseleafs")),
    )  # fmt: skip
    inner, leaves = len(features), len(_numbers(node, "leaf_weights"))

    def place(identity: int, is_leaf: int) -> int:
        if not 0 <= identity < (leaves if is_leaf else inner):
            raise node.refusal(f"it has no {'leaf' if is_leaf else 'node'} {identity}")
        return int(identity) + (inner if is_leaf else 0)

    roots = [place(root, 0) for root in _numbers(node, "tree_roots")]
    if any(not 0 <= mode < len(_MODES) for mode in modes):
        raise node.refusal(f"found a node of mode {max(modes)}, expected 0 to {len(_MODES) - 1}")
    names = [_MODES[mode] for mode in modes]
    ends = [0] * leaves
    tracks = _numbers(node, "nodes_missing_value_tracks_true") or [0] * inner
    if len(tracks) != inner:
        raise node.refusal(f"nodes_missing_value_tracks_true has {len(tracks)} entries, expected {inner}")
    return Trees(
        names + [LEAF] * leaves, features + ends, splits + ends,
        [*map(place, true, true_leaf), *ends], [*map(place, false, false_leaf), *ends], tracks + ends, roots,
        _members(node, names),
    )  # fmt: skip


def _members(node: Node, modes: list[str]) -> dict[int, list[float]]:
    """Sets of nodes that ask for membership: each ends with a NaN, in the order of the nodes."""
    sets: list[list[float]] = [[]]
    for value in _numbers(node, "membership_values"):
        if np.isnan(value):
            sets.append([])
        else:
            sets[-1].append(value)
    asking = [at for at, mode in enumerate(modes) if mode == "BRANCH_MEMBER"]
    if sets[-1] or len(sets) - 1 != len(asking):
        raise node.refusal(
            f"its membership_values hold {len(sets) - 1} sets, expected {len(asking)}, each ended by NaN"
        )
    return dict(zip(asking, sets, strict=False))
