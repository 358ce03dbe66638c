"""Decision trees as one table: every node asks whether a feature is at most a number, leaves point to themselves."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tvm import relax, te, tirx
from tvm.script import tirx as T

from ..node import Node, const

LEAF = "LEAF"
_MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ", "BRANCH_MEMBER")
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
