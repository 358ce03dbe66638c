"""Ensembles of decision trees: forests, boosted trees, single trees."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import numpy_helper
from tvm import relax, te, tirx
from tvm.script import tirx as T

from ..elementwise import cast
from ..node import Node, const, dtype_of
from ..table import CLASSICAL, convert_node, converts
from .scores import labels_from, labels_of, transformed

# Decision trees as one table: every node asks whether a feature is at most a number, leaves point to themselves.

LEAF = "LEAF"
"""Modes of nodes, in the order in which `TreeEnsemble` counts them."""

_ROWS = 16
"""Rows that a task walks at least."""

_SHALLOW = 8
"""Steps to the deepest leaf up to which each row walks by itself.

Ten rows down 50 trees of a random forest (12 to 25 steps) take 80 µs so and 46 µs together; down 500 trees of 3 steps
54 and 60 µs (Zen 4, two threads, beside other work).
"""

Weights = Mapping[int, Sequence[tuple[int, float]]]
"""Targets of each leaf, and what it adds to each."""


@dataclass
class Trees:
    """Nodes of all trees, leaves among them, as a model file lists them; nodes point to each other by position.

    Attributes
    ----------
    members : mapping of int to sequence of float
        Numbers for which a node of mode BRANCH_MEMBER takes the true branch.
    """

    modes: Sequence[str]
    features: Sequence[int]
    splits: Sequence[float]
    if_true: Sequence[int]
    if_false: Sequence[int]
    missing_is_true: Sequence[bool]
    roots: Sequence[int]
    members: Mapping[int, Sequence[float]]


@dataclass
class Forest:
    """The table that a kernel walks. Leaves come first, in the order of their nodes.

    Attributes
    ----------
    leaves : list of int
        Position of each leaf among the nodes of the file.
    children : np.ndarray
        (nodes, 2), where to go if the feature is more than the split, and where if it is not.
    missing : np.ndarray
        1 where a feature that is NaN counts as at most the split.
    roots, depths : np.ndarray
        Root of each tree; steps from the root to the deepest leaf.
    """

    leaves: list[int]
    features: np.ndarray
    splits: np.ndarray
    children: np.ndarray
    missing: np.ndarray
    roots: np.ndarray
    depths: np.ndarray
    leaves_of: list[list[int]]


class _Table:
    """Rows of the table while it grows: a node that asks for equality becomes two, for membership several."""

    def __init__(self, trees: Trees, dtype: str) -> None:
        self._type = np.dtype(dtype).type
        self.leaves = [i for i, mode in enumerate(trees.modes) if mode == LEAF]
        inner = [i for i, mode in enumerate(trees.modes) if mode != LEAF]
        self.place = {old: new for new, old in enumerate([*self.leaves, *inner])}
        count = len(self.place)
        self.features, self.splits, self.missing = [0] * count, [0.0] * count, [0] * count
        self.children = [[new, new] for new in range(count)]
        for old in inner:
            self._add(trees, old)

    def _add(self, trees: Trees, old: int) -> None:
        mode, split, tracks = trees.modes[old], self._type(trees.splits[old]), bool(trees.missing_is_true[old])
        true, false = self.place[trees.if_true[old]], self.place[trees.if_false[old]]
        at, feature = self.place[old], trees.features[old]
        if mode in ("BRANCH_LEQ", "BRANCH_LT") or (np.isnan(split) and mode in ("BRANCH_GTE", "BRANCH_GT")):
            self._ask(at, feature, self._below(split) if mode == "BRANCH_LT" else split, tracks, true, false)
        elif mode in ("BRANCH_GTE", "BRANCH_GT"):
            bound = self._below(split) if mode == "BRANCH_GTE" else split
            self._ask(at, feature, bound, not tracks, false, true)
        elif mode == "BRANCH_NEQ":  # NaN differs from everything: it takes the true branch in any case
            self._ask_equal(at, feature, [split], False, false, true)
        else:
            values = trees.members[old] if mode == "BRANCH_MEMBER" else [split]
            self._ask_equal(at, feature, [self._type(value) for value in values], tracks, true, false)

    def _below(self, split: np.floating) -> np.floating:
        """The greatest number less than a split; NaN, which nothing is at most, if there is none."""
        return self._type(np.nan) if np.isneginf(split) else np.nextafter(split, self._type(-np.inf))

    def _ask(self, at: int, feature: int, split: np.floating, missing: bool, low: int, high: int) -> None:
        self.features[at], self.splits[at], self.missing[at] = feature, float(split), int(missing)
        self.children[at] = [high, low]

    def _append(self) -> int:
        self.features.append(0)
        self.splits.append(0.0)
        self.missing.append(0)
        self.children.append([0, 0])
        return len(self.features) - 1

    def _ask_equal(
        self, at: int, feature: int, values: Sequence[np.floating], missing: bool, true: int, false: int
    ) -> None:
        """True if the feature is one of `values`: at most the least and not below it, else of the greater ones."""
        ordered = sorted({value for value in values if not np.isnan(value)})
        if not ordered:
            self._ask(at, feature, self._type(np.nan), missing, true, false)
        for index, value in enumerate(ordered):
            following = self._append() if index + 1 < len(ordered) else false
            exact = self._append()
            self._ask(at, feature, value, missing, exact, following)
            self._ask(exact, feature, self._below(value), False, false, true)
            at, missing = following, False


def forest_of(node: Node, trees: Trees, width: int, dtype: str) -> Forest:
    """The table of trees over rows of `width` features.

    Raises
    ------
    FrontendError
        If a node asks for a feature that is not there, a mode is unknown or a tree has a cycle.
    """
    for mode in trees.modes:
        if mode not in (*_MODES, LEAF):
            raise node.refusal(f"mode {mode!r} of a node is unknown; expected one of {', '.join(_MODES)}")
    asked = [f for f, mode in zip(trees.features, trees.modes, strict=True) if mode != LEAF]
    if asked and not 0 <= min(asked) <= max(asked) < width:
        found = max(asked) if max(asked) >= width else min(asked)
        raise node.refusal(f"its trees read feature {found} of an input of {width} features")
    table = _Table(trees, dtype)
    roots = [table.place[root] for root in trees.roots]
    depths, leaves_of = [], []
    for root in roots:
        depth, reached = _walk(node, table, root)
        depths.append(depth)
        leaves_of.append(reached)
    return Forest(
        table.leaves, np.array(table.features, "int32"), np.array(table.splits, dtype),
        np.array(table.children, "int32"), np.array(table.missing, "int8"), np.array(roots, "int32"),
        np.array(depths, "int32"), leaves_of,
    )  # fmt: skip


def _walk(node: Node, table: _Table, root: int) -> tuple[int, list[int]]:
    """The depth of a tree, and its leaves."""
    count = len(table.leaves)
    reached: set[int] = set()
    depth, level = 0, [root]
    while True:
        reached.update(at for at in level if at < count)
        level = list({child for at in level if at >= count for child in table.children[at]})
        if not level:
            return depth, sorted(reached)
        depth += 1
        if depth > len(table.features):
            raise node.refusal("a tree of it has a cycle: some row never comes to a leaf")


@functools.cache
def _leaf_kernel(width: int, dtype: str, has_missing: bool, is_deep: bool) -> tirx.PrimFunc:
    """The leaf that each row comes to, by tree; trees are walked to their deepest leaf, without a branch.

    The numbers of nodes and trees are arguments, so that a model of many small forests has one kernel.

    A step waits for the one before. Down shallow trees the processor begins with the next tree meanwhile; down deep
    ones, several rows go together.
    """

    def child_of(child, x, feature, split, missing, row, at):
        """The left child where a feature is at most the split, or missing where that counts so."""
        value = x[row, feature[at]]
        low = tirx.Cast("int32", value <= split[at])
        if has_missing:
            low = low | (tirx.Cast("int32", tirx.isnan(value)) & tirx.Cast("int32", missing[at]))
        return child[at, low]

    @T.prim_func(private=True, s_tir=True)
    def tree_leaves(
        data: T.handle,
        features: T.handle,
        splits: T.handle,
        children: T.handle,
        are_missing: T.handle,
        roots: T.handle,
        depths: T.handle,
        result: T.handle,
    ):
        T.func_attr({"tirx.noalias": True})
        rows, nodes, trees = T.int64(), T.int64(), T.int64()
        x = T.match_buffer(data, (rows, width), dtype)
        feature = T.match_buffer(features, (nodes,), "int32")
        split = T.match_buffer(splits, (nodes,), dtype)
        child = T.match_buffer(children, (nodes, 2), "int32")
        missing = T.match_buffer(are_missing, (nodes,), "int8")
        root = T.match_buffer(roots, (trees,), "int32")
        depth = T.match_buffer(depths, (trees,), "int32")
        leaf = T.match_buffer(result, (rows, trees), "int32")
        for task in T.parallel((rows + T.int64(_ROWS - 1)) // T.int64(_ROWS)):
            if is_deep:
                for t in T.serial(trees):
                    for i in T.serial(T.min(T.int64(_ROWS), rows - task * T.int64(_ROWS))):
                        leaf[task * T.int64(_ROWS) + i, t] = root[t]
                    for _ in T.serial(depth[t]):
                        for i in T.serial(T.min(T.int64(_ROWS), rows - task * T.int64(_ROWS))):
                            leaf[task * T.int64(_ROWS) + i, t] = child_of(
                                child, x, feature, split, missing,
                                task * T.int64(_ROWS) + i, leaf[task * T.int64(_ROWS) + i, t],
                            )  # fmt: skip
            else:
                for i in T.serial(T.min(T.int64(_ROWS), rows - task * T.int64(_ROWS))):
                    for t in T.serial(trees):
                        leaf[task * T.int64(_ROWS) + i, t] = root[t]
                        for _ in T.serial(depth[t]):
                            leaf[task * T.int64(_ROWS) + i, t] = child_of(
                                child, x, feature, split, missing,
                                task * T.int64(_ROWS) + i, leaf[task * T.int64(_ROWS) + i, t],
                            )  # fmt: skip

    return tree_leaves


def leaves_of_rows(node: Node, data: relax.Expr, forest: Forest) -> relax.Expr:
    """(rows, trees), the leaf that each row comes to."""
    rows, width = node.shape(data)
    trees = forest.roots.size
    is_deep = int(forest.depths.max(initial=0)) > _SHALLOW
    kernel = _leaf_kernel(width, str(forest.splits.dtype), bool(forest.missing.any()), is_deep)
    symbol = node.builder.add_func(kernel, "tree_leaves")
    tables = (forest.features, forest.splits, forest.children, forest.missing, forest.roots, forest.depths)
    inputs = [data, *(const(table) for table in tables)]
    return node.emit(relax.op.call_tir(symbol, inputs, relax.TensorType((rows, trees), "int32")))


def combined(
    node: Node, leaves: relax.Expr, forest: Forest, weights: Weights, targets: int, dtype: str, how: str = "SUM"
) -> relax.Expr:
    """(rows, targets), the weights of leaves added up, or the least (MIN) or greatest (MAX); 0 where there are none."""
    none = {"MIN": np.inf, "MAX": -np.inf}.get(how, 0.0)
    reduce = {"MIN": te.min, "MAX": te.max}.get(how, te.sum)
    rows = node.shape(leaves)[0]
    if forest.roots.size == 1 and all(len(entries) <= 1 for entries in weights.values()):
        return _of_one_tree(node, leaves, len(forest.leaves), weights, targets, dtype)
    served = [sorted({k for leaf in tree for k, _ in weights.get(leaf, ())}) for tree in forest.leaves_of]
    count = len(forest.leaves)

    if all(len(found) <= 1 for found in served):  # each tree serves a target: a target reads its own trees
        of_target: list[list[int]] = [[] for _ in range(targets)]
        for tree, found in enumerate(served):
            for k in found:
                of_target[k].append(tree)
        max_members = max(1, *map(len, of_target))
        order = np.array([[*of_k, *[0] * (max_members - len(of_k))] for of_k in of_target], "int32")
        sizes = np.array([len(of_k) for of_k in of_target], "int32")
        table = np.full(count, none, dtype)
        for leaf, entries in weights.items():
            table[leaf] = _merged(entries, targets, none, how, dtype).take(entries[0][0]) if entries else none

        def of_own(leaf: te.Tensor, weight: te.Tensor, order: te.Tensor, size: te.Tensor) -> te.Tensor:
            tree = te.reduce_axis((0, max_members), "tree")
            absent = tirx.const(none, dtype) if not none else (tirx.min_value if none < 0 else tirx.max_value)(dtype)

            def element(i, k):
                found = weight[leaf[i, order[k, tree]]]
                return reduce(tirx.if_then_else(tree < size[k], found, absent), axis=tree)

            return te.compute((rows, targets), element, name="tree_scores")

        result = node.builder.emit_te(
            of_own, leaves, const(table), const(order), const(sizes), primfunc_name_hint="tree_scores"
        )
    else:
        node.check_table(count, targets)
        dense = np.full((count, targets), none, dtype)
        for leaf, entries in weights.items():
            dense[leaf] = _merged(entries, targets, none, how, dtype)

        def of_all(leaf: te.Tensor, weight: te.Tensor) -> te.Tensor:
            tree = te.reduce_axis((0, forest.roots.size), "tree")
            return te.compute(
                (rows, targets), lambda i, k: reduce(weight[leaf[i, tree], k], axis=tree), name="tree_scores"
            )

        result = node.builder.emit_te(of_all, leaves, const(dense), primfunc_name_hint="tree_scores")
    if not none:
        return result
    highest = const(np.finfo(dtype).max, dtype)  # where a minimum or maximum begins
    is_found = node.emit(relax.op.less(node.emit(relax.op.abs(result)), highest))
    return node.emit(relax.op.where(is_found, result, const(0, dtype)))


@functools.cache
def _one_tree_kernel(dtype: str) -> tirx.PrimFunc:
    """The weight of the leaf that each row comes to, at the one target of the leaf, and 0 at others."""

    @T.prim_func(private=True, s_tir=True)
    def tree_scores(leaves: T.handle, targets: T.handle, weights: T.handle, result: T.handle):
        T.func_attr({"tirx.noalias": True})
        rows, count, width = T.int64(), T.int64(), T.int64()
        leaf = T.match_buffer(leaves, (rows, 1), "int32")
        target = T.match_buffer(targets, (count,), "int32")
        weight = T.match_buffer(weights, (count,), dtype)
        score = T.match_buffer(result, (rows, width), dtype)
        for i in T.parallel(rows):
            for k in T.serial(width):
                score[i, k] = T.if_then_else(
                    target[leaf[i, 0]] == T.Cast("int32", k), weight[leaf[i, 0]], T.Cast(dtype, 0)
                )

    return tree_scores


def _of_one_tree(node: Node, leaves: relax.Expr, count: int, weights: Weights, targets: int, dtype: str) -> relax.Expr:
    """`combined` of a tree whose leaves have at most one target each: without a table of every target."""
    target, weight = np.full(count, -1, "int32"), np.zeros(count, dtype)
    for leaf, entries in weights.items():
        for k, value in entries:
            target[leaf], weight[leaf] = k, value
    symbol = node.builder.add_func(_one_tree_kernel(dtype), "tree_scores")
    ty = relax.TensorType((node.shape(leaves)[0], targets), dtype)
    return node.emit(relax.op.call_tir(symbol, [leaves, const(target), const(weight)], ty))


@functools.cache
def _label_kernel() -> tirx.PrimFunc:
    @T.prim_func(private=True, s_tir=True)
    def tree_labels(leaves: T.handle, labels: T.handle, result: T.handle):
        T.func_attr({"tirx.noalias": True})
        rows, count = T.int64(), T.int64()
        leaf = T.match_buffer(leaves, (rows, 1), "int32")
        label = T.match_buffer(labels, (count,), "int64")
        found = T.match_buffer(result, (rows,), "int64")
        for i in T.serial(rows):
            found[i] = label[leaf[i, 0]]

    return tree_labels


def labels_of_leaves(node: Node, leaves: relax.Expr, labels: np.ndarray) -> relax.Expr:
    """(rows,), the label of the leaf that each row of a single tree comes to."""
    symbol = node.builder.add_func(_label_kernel(), "tree_labels")
    ty = relax.TensorType((node.shape(leaves)[0],), "int64")
    return node.emit(relax.op.call_tir(symbol, [leaves, const(labels)], ty))


def _merged(entries: Sequence[tuple[int, float]], targets: int, none: float, how: str, dtype: str) -> np.ndarray:
    """Values that a leaf gives each target, several entries for one combined."""
    combine = {"MIN": np.minimum, "MAX": np.maximum}.get(how, np.add)
    result = np.full(targets, none, dtype)
    for target, weight in entries:
        result[target] = combine(result[target], np.dtype(dtype).type(weight))
    return result


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
