"""Ensembles of decision trees.

All trees are one table: each node tests if a feature is at most a number; leaves are their own children.
"""
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

from ....tir.core.bounds import BOUNDED
from ..elementwise import cast
from ..node import Node, const, dtype_of
from ..table import CLASSICAL, converts
from .scores import labels_from, labels_of, largest, transformed

LEAF = "LEAF"  # mode of leaves
_CHAINS = 16  # number of interleaved walks
Weights = Mapping[int, Sequence[tuple[int, float]]]  # leaf -> (target, weight) entries


@dataclass
class Trees:
    """Nodes of all trees, including leaves, as listed in the model; children are indices."""

    modes: Sequence[str]
    features: Sequence[int]
    splits: Sequence[float]
    if_true: Sequence[int]
    if_false: Sequence[int]
    missing_is_true: Sequence[bool]
    roots: Sequence[int]
    members: Mapping[int, Sequence[float]]  # node of mode BRANCH_MEMBER -> numbers for which it takes the true branch


@dataclass
class Forest:
    """Nodes of all trees for kernels: each tree in breadth-first order, the two children of a node side by side.

    A row steps from a node to its first child if it passes the node's test, else to the next place. Leaves step to
    themselves. Nodes with several parents have several places.
    """

    # (places, 2) integers: the bits of the split, and the first child's place times `stride` plus the feature.
    tests: np.ndarray
    stride: int  # power of two, at least the number of features
    dtype: str  # type of splits and features
    missing: np.ndarray  # 1 if NaN passes the test
    leaf_at: np.ndarray  # number of the leaf in each place, in the order of the model's leaves; 0 for inner nodes
    # Root and depth of each tree.
    roots: np.ndarray
    depths: np.ndarray
    num_leaves: int  # number of the model's leaves, with those that no tree reaches
    leaves_of: list[list[int]]  # leaves of each tree


class _Table:
    """Builder of the table: a test for equality becomes two nodes, a test for membership several."""

    def __init__(self, trees: Trees, dtype: str) -> None:
        self._type = np.dtype(dtype).type
        self.leaves = [i for i, mode in enumerate(trees.modes) if mode == LEAF]
        inner = [i for i, mode in enumerate(trees.modes) if mode != LEAF]
        self.place = {index: new for new, index in enumerate([*self.leaves, *inner])}
        count = len(self.place)
        self.features, self.splits, self.missing = [0] * count, [0.0] * count, [0] * count
        self.children = [[new, new] for new in range(count)]
        for index in inner:
            self._add(trees, index)

    def _add(self, trees: Trees, old: int) -> None:
        mode, split, tracks = trees.modes[old], self._type(trees.splits[old]), bool(trees.missing_is_true[old])
        true, false = self.place[trees.if_true[old]], self.place[trees.if_false[old]]
        at, feature = self.place[old], trees.features[old]
        if mode in ("BRANCH_LEQ", "BRANCH_LT") or (np.isnan(split) and mode in ("BRANCH_GTE", "BRANCH_GT")):
            self._ask(at, feature, self._below(split) if mode == "BRANCH_LT" else split, tracks, true, false)
        elif mode in ("BRANCH_GTE", "BRANCH_GT"):
            bound = self._below(split) if mode == "BRANCH_GTE" else split
            self._ask(at, feature, bound, not tracks, false, true)
        elif mode == "BRANCH_NEQ":  # NaN is unequal to everything and takes the true branch
            self._ask_equal(at, feature, [split], False, false, true)
        else:
            values = trees.members[old] if mode == "BRANCH_MEMBER" else [split]
            self._ask_equal(at, feature, [self._type(value) for value in values], tracks, true, false)

    def _below(self, split: np.floating) -> np.floating:
        """The greatest number less than a split, or NaN, for which the test is always false."""
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
        """Test for equality with one of `values`, in ascending order: at most the value and not less than it."""
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
    """Build the table of trees over rows of `width` features.

    Raises FrontendError if a node reads a feature out of range, a mode is unknown, or a tree has a cycle.
    """
    for mode in trees.modes:
        if mode not in (*_MODES, LEAF):
            raise node.refusal(f"mode {mode!r} of a node is unknown; expected one of {', '.join(_MODES)}")
    features_read = [f for f, mode in zip(trees.features, trees.modes, strict=True) if mode != LEAF]
    if features_read and not 0 <= min(features_read) <= max(features_read) < width:
        feature = max(features_read) if max(features_read) >= width else min(features_read)
        raise node.refusal(f"its trees read feature {feature} of an input of {width} features")
    table = _Table(trees, dtype)
    roots = [table.place[root] for root in trees.roots]
    depths, leaves_of = [], []
    for root in roots:
        depth, reached = _walk(node, table, root)
        depths.append(depth)
        leaves_of.append(reached)
    nodes, first_child, places = _places(table, roots)
    stride = 1 << max(width - 1, 0).bit_length()
    is_leaf = nodes < len(table.leaves)
    splits = np.where(is_leaf, np.nan, np.array(table.splits, dtype)[nodes]).astype(dtype)
    first_child = np.where(is_leaf, np.arange(nodes.size) - 1, first_child)  # x <= NaN is false: a leaf steps to itself
    steps = first_child * stride + np.array(table.features)[nodes]
    record = "int32" if dtype == "float32" and nodes.size * stride < 1 << 31 else "int64"
    bits = splits.view(f"int{8 * splits.itemsize}")
    tests = np.stack([bits.astype(record), steps.astype(record)], axis=1)
    missing = np.array(table.missing, "int8")[nodes]
    leaf_at = np.where(is_leaf, nodes, 0)
    return Forest(
        tests, stride, dtype, missing, leaf_at, places, np.array(depths, "int32"), len(table.leaves), leaves_of
    )


def _places(table: _Table, roots: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Node of each place, place of its first child, and places of the roots."""
    nodes: list[int] = []
    first_child: dict[int, int] = {}
    places = []
    for root in roots:
        place = len(nodes)
        places.append(place)
        nodes.append(root)
        while place < len(nodes):
            index = nodes[place]
            if index >= len(table.leaves) and index not in first_child:
                first_child[index] = len(nodes)
                high, low = table.children[index]
                nodes += [low, high]
            place += 1
    children = [first_child.get(index, 0) for index in nodes]
    return np.array(nodes, "int64"), np.array(children, "int64"), np.array(places, "int32")


def _walk(node: Node, table: _Table, root: int) -> tuple[int, list[int]]:
    """Depth and leaves of a tree."""
    count = len(table.leaves)
    reached: set[int] = set()
    depth, level = 0, [root]
    while True:
        reached.update(index for index in level if index < count)
        level = list({child for index in level if index >= count for child in table.children[index]})
        if not level:
            return depth, sorted(reached)
        depth += 1
        if depth > len(table.features):
            raise node.refusal("a tree of it has a cycle: some row never comes to a leaf")


@functools.cache
def _leaf_kernel(width: int, stride: int, dtype: str, record: str, has_missing: bool) -> tirx.PrimFunc:
    """Kernel that finds the place of the leaf of each row in each tree, by branch-free steps to the tree's depth.

    The numbers of nodes and trees are symbolic, so that forests share a kernel. Each step depends on the previous one,
    so `_CHAINS` walks are interleaved: of as many rows in one tree, whose nodes stay in the L1 cache, or, with few
    rows, of one row in as many trees. These trees are not neighbours, because LLVM would replace the loads of
    neighbours by gathers, which take longer on some CPUs.
    """
    shift = stride.bit_length() - 1

    def child_of(tests, x, missing, row, at):
        """Child of a node by its test."""
        step = tests[at, 1]
        value = x[row, step & tirx.const(stride - 1, record)]
        split = tests[at, 0] if dtype == "float64" else tirx.Cast("int32", tests[at, 0])
        passes = tirx.Cast("int32", value <= tirx.reinterpret(dtype, split))
        if has_missing:
            passes = passes | (tirx.Cast("int32", tirx.isnan(value)) & tirx.Cast("int32", missing[at]))
        return tirx.Cast("int32", step >> tirx.const(shift, record)) + 1 - passes

    @T.prim_func(private=True, s_tir=True)
    def tree_leaves(
        data: T.handle,
        nodes: T.handle,
        are_missing: T.handle,
        roots: T.handle,
        depths: T.handle,
        group_depths: T.handle,
        result: T.handle,
    ):
        T.func_attr({"tirx.noalias": True})
        rows, count, trees, groups = T.int64(), T.int64(), T.int64(), T.int64()
        x = T.match_buffer(data, (rows, width), dtype)
        tests = T.match_buffer(nodes, (count, 2), record)
        missing = T.match_buffer(are_missing, (count,), "int8")
        root = T.match_buffer(roots, (trees,), "int32")
        depth = T.match_buffer(depths, (trees,), "int32")
        group_depth = T.match_buffer(group_depths, (groups,), "int32")
        leaf = T.match_buffer(result, (rows, trees), "int32")
        for task in T.parallel((rows + (_CHAINS - 1)) // _CHAINS):
            if task * _CHAINS + _CHAINS <= rows:
                for t in T.serial(trees):
                    for i in T.unroll(_CHAINS):
                        leaf[task * _CHAINS + i, t] = root[t]
                    for _ in T.serial(depth[t]):
                        for i in T.unroll(_CHAINS):
                            leaf[task * _CHAINS + i, t] = child_of(
                                tests, x, missing, task * _CHAINS + i, leaf[task * _CHAINS + i, t]
                            )
            else:
                for i in T.serial(rows - task * _CHAINS):
                    for g in T.serial(groups):
                        for j in T.unroll(_CHAINS):
                            leaf[task * _CHAINS + i, j * groups + g] = root[j * groups + g]
                        for _ in T.serial(group_depth[g]):
                            for j in T.unroll(_CHAINS):
                                leaf[task * _CHAINS + i, j * groups + g] = child_of(
                                    tests, x, missing, task * _CHAINS + i, leaf[task * _CHAINS + i, j * groups + g]
                                )
                    for t in T.serial(trees - groups * _CHAINS):
                        leaf[task * _CHAINS + i, groups * _CHAINS + t] = root[groups * _CHAINS + t]
                        for _ in T.serial(depth[groups * _CHAINS + t]):
                            leaf[task * _CHAINS + i, groups * _CHAINS + t] = child_of(
                                tests, x, missing, task * _CHAINS + i, leaf[task * _CHAINS + i, groups * _CHAINS + t]
                            )

    return tree_leaves.with_attr(BOUNDED, True)  # `forest_of` checks the tables


def leaves_of_rows(node: Node, data: relax.Expr, forest: Forest) -> relax.Expr:
    """Place of the leaf of each row in each tree, (rows, trees)."""
    rows, width = node.shape(data)
    trees = forest.roots.size
    kernel = _leaf_kernel(width, forest.stride, forest.dtype, str(forest.tests.dtype), bool(forest.missing.any()))
    symbol = node.builder.add_func(kernel, "tree_leaves")
    group_depths = forest.depths[: trees // _CHAINS * _CHAINS].reshape(_CHAINS, -1).max(axis=0, initial=0)
    tables = (forest.tests, forest.missing, forest.roots, forest.depths, group_depths)
    inputs = [data, *(const(table) for table in tables)]
    return node.emit(relax.op.call_tir(symbol, inputs, relax.TensorType((rows, trees), "int32")))


def combined(
    node: Node, leaves: relax.Expr, forest: Forest, weights: Weights, targets: int, dtype: str, how: str = "SUM"
) -> relax.Expr:
    """Sum, minimum or maximum of the weights of leaves, (rows, targets); 0 for targets without weights."""
    neutral = {"MIN": np.inf, "MAX": -np.inf}.get(how, 0.0)
    reduce = {"MIN": te.min, "MAX": te.max}.get(how, te.sum)
    rows = node.shape(leaves)[0]
    if forest.roots.size == 1 and all(len(entries) <= 1 for entries in weights.values()):
        return _combine_one_tree(node, leaves, forest, weights, targets, dtype)
    targets_of_tree = [sorted({k for leaf in tree for k, _ in weights.get(leaf, ())}) for tree in forest.leaves_of]
    count = forest.num_leaves

    if all(len(ks) <= 1 for ks in targets_of_tree):  # each tree has one target, which reads its own trees
        of_target: list[list[int]] = [[] for _ in range(targets)]
        for tree, ks in enumerate(targets_of_tree):
            for k in ks:
                of_target[k].append(tree)
        max_members = max(1, *map(len, of_target))
        order = np.array([[*of_k, *[0] * (max_members - len(of_k))] for of_k in of_target], "int32")
        sizes = np.array([len(of_k) for of_k in of_target], "int32")
        table = np.full(count, neutral, dtype)
        for leaf, entries in weights.items():
            if entries:
                table[leaf] = _merge_entries(entries, targets, neutral, how, dtype)[entries[0][0]]

        def sum_own_trees(leaf: te.Tensor, weight: te.Tensor, order: te.Tensor, size: te.Tensor) -> te.Tensor:
            tree = te.reduce_axis((0, max_members), "tree")
            limit = tirx.min_value if neutral < 0 else tirx.max_value
            absent = limit(dtype) if neutral else tirx.const(0.0, dtype)

            def element(i, k):
                value = weight[leaf[i, order[k, tree]]]
                return reduce(tirx.if_then_else(tree < size[k], value, absent), axis=tree)

            return te.compute((rows, targets), element, name="tree_scores")

        result = node.builder.emit_te(
            sum_own_trees,
            leaves,
            const(table[forest.leaf_at]),
            const(order),
            const(sizes),
            primfunc_name_hint="tree_scores",
        )
    else:
        node.check_constant_size(forest.leaf_at.size, targets)
        dense = np.full((count, targets), neutral, dtype)
        for leaf, entries in weights.items():
            dense[leaf] = _merge_entries(entries, targets, neutral, how, dtype)

        def sum_all_trees(leaf: te.Tensor, weight: te.Tensor) -> te.Tensor:
            tree = te.reduce_axis((0, forest.roots.size), "tree")
            return te.compute(
                (rows, targets), lambda i, k: reduce(weight[leaf[i, tree], k], axis=tree), name="tree_scores"
            )

        result = node.builder.emit_te(
            sum_all_trees, leaves, const(dense[forest.leaf_at]), primfunc_name_hint="tree_scores"
        )
    if not neutral:
        return result
    highest = const(np.finfo(dtype).max, dtype)  # initial value of a minimum or maximum
    is_found = node.emit(node.emit(relax.op.abs(result)) < highest)
    return node.emit(relax.op.where(is_found, result, const(0, dtype)))


@functools.cache
def _one_tree_kernel(width: int, dtype: str) -> tirx.PrimFunc:
    """Kernel that writes the weight of each row's leaf to the leaf's one target, and 0 to others."""

    @T.prim_func(private=True, s_tir=True)
    def tree_scores(leaves: T.handle, targets: T.handle, weights: T.handle, result: T.handle):
        T.func_attr({"tirx.noalias": True})
        rows, count = T.int64(), T.int64()
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


def _combine_one_tree(
    node: Node, leaves: relax.Expr, forest: Forest, weights: Weights, width: int, dtype: str
) -> relax.Expr:
    """`combined` for one tree whose leaves have at most one target each, without a dense table."""
    target, weight = np.full(forest.num_leaves, -1, "int32"), np.zeros(forest.num_leaves, dtype)
    for leaf, entries in weights.items():
        for k, value in entries:
            target[leaf], weight[leaf] = k, value
    symbol = node.builder.add_func(_one_tree_kernel(width, dtype), "tree_scores")
    ty = relax.TensorType((node.shape(leaves)[0], width), dtype)
    return node.emit(
        relax.op.call_tir(symbol, [leaves, *(const(table[forest.leaf_at]) for table in (target, weight))], ty)
    )


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
    """Label of each row's leaf in a single tree, (rows,)."""
    symbol = node.builder.add_func(_label_kernel(), "tree_labels")
    ty = relax.TensorType((node.shape(leaves)[0],), "int64")
    return node.emit(relax.op.call_tir(symbol, [leaves, const(labels)], ty))


def _merge_entries(entries: Sequence[tuple[int, float]], targets: int, none: float, how: str, dtype: str) -> np.ndarray:
    """Weights of a leaf for each target, with entries of the same target combined."""
    combine = {"MIN": np.minimum, "MAX": np.maximum}.get(how, np.add)
    result = np.full(targets, none, dtype)
    for target, weight in entries:
        result[target] = combine(result[target], np.dtype(dtype).type(weight))
    return result


_MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ", "BRANCH_MEMBER")
_AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")
_TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")


def _array(value: Any) -> np.ndarray:
    return np.asarray(numpy_helper.to_array(value)) if hasattr(value, "raw_data") else np.asarray(value)


def _numbers(node: Node, name: str) -> Any:
    """Read a list attribute, or its variant as a float64 tensor, as Python numbers."""
    value = node.attributes.get(f"{name}_as_tensor")
    return _array(node.attribute(name, ()) if value is None else value).reshape(-1).tolist()


def _lists(node: Node, length: int | None, *names: str) -> list[list[Any]]:
    """Read attributes with an entry per node or weight. Raises FrontendError if they differ in length."""
    lists = [_numbers(node, name) for name in names]
    for name, values in zip(names, lists, strict=True):
        expected = len(lists[0]) if length is None else length
        if len(values) != expected:
            raise node.refusal(f"{name} has {len(values)} entries, expected {expected}")
    return lists


def _rows(node: Node) -> tuple[relax.Expr, int]:
    """The input as rows of features, in float64 or else float32, and the number of features."""
    data = node.tensor(0)
    if node.rank(data) == 1:
        data = node.emit(relax.op.expand_dims(data, [0]))
    if node.rank(data) != 2:
        raise node.refusal(f"found an input of rank {node.rank(data)}, expected rows of features")
    width = node.shape(data)[1]
    if not isinstance(width, int):
        raise node.refusal("the number of features of its input is unknown; give it with shapes=")
    return (data if dtype_of(data) == "float64" else cast(node, data, "float32")), width


def _parse_listed_trees(node: Node, prefix: str) -> tuple[Trees, Weights, list[int]]:
    """Parse ops that list leaves among nodes; `prefix` is "target" or "class"."""
    names = ("nodeids", "treeids", "featureids", "values", "truenodeids", "falsenodeids")
    ids, tree_of, features, splits, true, false = _lists(node, None, *(f"nodes_{name}" for name in names))
    modes = [mode.decode() if isinstance(mode, bytes) else mode for mode in node.attribute("nodes_modes", ())]
    tracks = list(node.attribute("nodes_missing_value_tracks_true", ())) or [0] * len(ids)
    for name, values in (("nodes_modes", modes), ("nodes_missing_value_tracks_true", tracks)):
        if len(values) != len(ids):
            raise node.refusal(f"{name} has {len(values)} entries, expected {len(ids)}")
    index_of = {key: index for index, key in enumerate(zip(tree_of, ids, strict=True))}
    if len(index_of) < len(ids):
        raise node.refusal("two of its nodes have the same number and tree")

    def find(tree: int, identity: int) -> int:
        if (tree, identity) not in index_of:
            raise node.refusal(f"its tree {tree} has no node {identity}")
        return index_of[tree, identity]

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
    leaf_index = {old: new for new, old in enumerate(i for i, leaf in enumerate(is_leaf) if leaf)}
    entries: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for target, tree, identity, weight in zip(targets, of_tree, nodes, weights, strict=True):
        old = find(tree, identity)
        if old in leaf_index:  # weights of inner nodes are unused
            entries[leaf_index[old]].append((target, weight))
    return trees, entries, targets


def _check_targets(node: Node, targets: Sequence[int], count: int) -> None:
    if count < 1 or any(not 0 <= target < count for target in targets):
        raise node.refusal(f"its leaves have weights of target {max(targets, default=0)}, expected less than {count}")


@converts("TreeEnsembleRegressor", domain=CLASSICAL)
def tree_ensemble_regressor(node: Node) -> relax.Expr:
    """Regression by trees."""
    data, width = _rows(node)
    dtype, count = dtype_of(data), int(node.attribute("n_targets", 1))
    trees, weights, targets = _parse_listed_trees(node, "target")
    _check_targets(node, targets, count)
    forest = forest_of(node, trees, width, dtype)
    scores = _aggregate(node, data, forest, weights, count, node.attribute("aggregate_function", "SUM"))
    base = _numbers(node, "base_values")
    if len(base) not in (0, count):
        raise node.refusal(f"base_values has {len(base)} entries, expected {count}")
    if base:
        scores = node.emit(scores + const(base, dtype))
    return cast(node, _post_transform(node, scores, node.attribute("post_transform", "NONE")), "float32")


def _aggregate(node: Node, data: relax.Expr, forest: Forest, weights: Weights, count: int, how: str) -> relax.Expr:
    if how not in _AGGREGATES:
        raise node.refusal(f"aggregate_function {how!r} is unknown; expected one of {', '.join(_AGGREGATES)}")
    dtype = dtype_of(data)
    rows = leaves_of_rows(node, data, forest)
    scores = combined(node, rows, forest, weights, count, dtype, "SUM" if how == "AVERAGE" else how)
    return node.emit(scores / const(forest.roots.size, dtype)) if how == "AVERAGE" else scores


def _post_transform(node: Node, scores: relax.Expr, name: str) -> relax.Expr:
    """Apply `post_transform`; for one target only PROBIT has an effect, as in ONNX Runtime."""
    is_single = node.shape(scores)[1] == 1
    return transformed(node, scores, "NONE" if is_single and name != "PROBIT" else name)


@converts("TreeEnsembleClassifier", domain=CLASSICAL)
def tree_ensemble_classifier(node: Node) -> relax.Expr:
    """Classification by trees: the label with the largest score, and the scores."""
    data, width = _rows(node)
    dtype = dtype_of(data)
    labels = labels_of(node, "classlabels_int64s")
    trees, weights, ids = _parse_listed_trees(node, "class")
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
        if labels.dtype.kind == "i" and (labels.size == 1 or len(_scored_targets(weights)) > 1):
            labels = np.arange(2)  # ONNX Runtime returns the class index rather than its label
    else:
        compared = scores
        if base:
            compared = scores = node.emit(scores + const(base, dtype))
        elif not set(range(labels.size)) <= _always_scored(forest, weights):
            counted = {leaf: [(k, 1.0) for k, _ in entries] for leaf, entries in weights.items()}
            counts = combined(node, rows, forest, counted, labels.size, dtype)
            is_scored = node.emit(counts > const(0, dtype))  # others cannot be the label
            compared = node.emit(relax.op.where(is_scored, scores, const(-np.inf, dtype)))
        if forest.roots.size == 1 and not base:  # the leaf determines the label
            label = labels_of_leaves(node, rows, labels[_best_of_leaves(forest, weights, dtype)[forest.leaf_at]])
            return node.outputs([label, cast(node, transformed(node, scores), "float32")])
        index = largest(node, compared)
        scores = transformed(node, scores)
    return node.outputs([labels_from(node, index, labels), cast(node, scores, "float32")])


def _best_of_leaves(forest: Forest, weights: Weights, dtype: str) -> np.ndarray:
    """Class with the largest score of each leaf, 0 without scores."""
    best = np.zeros(forest.num_leaves, "int64")
    for leaf, entries in weights.items():
        sums: dict[int, float] = {}
        for k, weight in entries:
            sums[k] = np.dtype(dtype).type(sums.get(k, 0) + np.dtype(dtype).type(weight))
        best[leaf] = min(sums, key=lambda k: (-sums[k], k))
    return best


def _always_scored(forest: Forest, weights: Weights) -> set[int]:
    """Targets with a weight for every row: in all leaves of some tree."""
    targets: set[int] = set()
    for tree in forest.leaves_of:
        targets |= set.intersection(*({k for k, _ in weights.get(leaf, ())} for leaf in tree))
    return targets


def _scored_targets(weights: Weights) -> set[int]:
    """Targets with a weight in any leaf."""
    return {target for entries in weights.values() for target, _ in entries}


def _one_class(node: Node, scores: relax.Expr, base: list[float]) -> tuple[relax.Expr, relax.Expr]:
    """Index 1 if the one score is positive, else 0, and the score, which only PROBIT changes."""
    scores = node.emit(scores + const(base, dtype_of(scores))) if base else scores
    return _is_above(node, scores, 0.0), _post_transform(node, scores, node.attribute("post_transform", "NONE"))


def _two_classes(
    node: Node, rows: relax.Expr, scores: relax.Expr, forest: Forest, weights: Weights, base: list[float]
) -> tuple[relax.Expr, relax.Expr]:
    """Class index and both scores, as in ONNX Runtime.

    Class k has a score for a row if one of the row's leaves has a weight of it. If class 1 has a score, or there are
    two base values, both classes have scores, 0 if missing; else the other score follows from that of class 0. Raises
    FrontendError if ONNX Runtime leaves a score undefined.
    """
    dtype, ids = dtype_of(scores), _scored_targets(weights)
    name = node.attribute("post_transform", "NONE")
    always = _always_scored(forest, weights)
    counted = {leaf: [(k, 1.0) for k, _ in entries] for leaf, entries in weights.items()}
    counts = None if ids <= always else combined(node, rows, forest, counted, 2, dtype)
    columns = [
        [node.emit(relax.op.strided_slice(value, [1], [k], [k + 1])) for k in (0, 1)]
        for value in (scores, scores if counts is None else counts)
    ]
    zero = const(0, dtype)

    def where_scored(k: int, value: relax.Expr, fallback: relax.Expr) -> relax.Expr:
        if k in always:
            return value
        if k not in ids:
            return fallback
        return node.emit(relax.op.where(columns[1][k] > zero, value, fallback))

    first, second = columns[0]
    if base:
        shifted_first = node.emit(first + const(base[0], dtype))
    if len(base) == 2:
        sum_of_both = node.emit(first + const(base[1], dtype))
        second = where_scored(1, sum_of_both, node.emit(second + const(base[1], dtype)))
        first = where_scored(1, node.emit(-sum_of_both), shifted_first)
    elif base:
        first = shifted_first
    first = where_scored(0, first, _zeros(node, first))
    both = transformed(node, node.emit(relax.op.concat([first, where_scored(1, second, _zeros(node, second))], axis=1)))
    is_binary, are_positive = len(ids) == 1, all(weight >= 0 for entries in weights.values() for _, weight in entries)
    index = _is_above(node, where_scored(1, second, first), 0.5 if is_binary and are_positive else 0.0)
    if len(base) == 2 or 1 in always:
        return index, both
    if name == "PROBIT" or (base and not is_binary):
        raise node.refusal(
            f"has scores of classes {sorted(ids)} of two, {len(base)} base_values and post_transform {name!r}, "
            "for which ONNX Runtime leaves a score open; expected scores of class 1 in every leaf of a tree, or two "
            "base_values"
        )
    other_score = node.emit(-first)
    if is_binary and are_positive and name != "LOGISTIC":
        other_score = node.emit(const(1, dtype) - first)
    pair = node.emit(relax.op.concat([other_score, first], axis=1))
    return index, where_scored(1, both, node.emit(relax.op.sigmoid(pair)) if name == "LOGISTIC" else pair)


def _zeros(node: Node, like: relax.Expr) -> relax.Expr:
    return node.filled(node.shape(like), 0, dtype_of(like))


def _is_above(node: Node, column: relax.Expr, bound: float) -> relax.Expr:
    above = node.emit(column > const(bound, dtype_of(column)))
    return cast(node, node.emit(relax.op.squeeze(above, [1])), "int64")


@converts("TreeEnsemble", domain=CLASSICAL)
def tree_ensemble(node: Node) -> relax.Expr:
    """Trees with leaves listed separately from nodes, in the input's type."""
    dtype = dtype_of(node.tensor(0))
    data, width = _rows(node)
    count = int(node.attribute("n_targets", 1))
    trees = _parse_separate_trees(node)
    leaves = sum(mode == LEAF for mode in trees.modes)
    targets, weights = _lists(node, leaves, "leaf_targetids", "leaf_weights")
    _check_targets(node, targets, count)
    forest = forest_of(node, trees, width, dtype_of(data))
    entries = {leaf: [pair] for leaf, pair in enumerate(zip(targets, weights, strict=True))}
    how, transform = int(node.attribute("aggregate_function", 1)), int(node.attribute("post_transform", 0))
    if not (0 <= how < len(_AGGREGATES) and 0 <= transform < len(_TRANSFORMS)):
        raise node.refusal(f"found aggregate_function {how} and post_transform {transform}, expected at most 3 and 4")
    scores = _aggregate(node, data, forest, entries, count, _AGGREGATES[how])
    return cast(node, _post_transform(node, scores, _TRANSFORMS[transform]), dtype)


def _parse_separate_trees(node: Node) -> Trees:
    """Parse the trees of op `TreeEnsemble`; indices of leaves follow those of nodes."""
    features, splits, modes, true, true_leaf, false, false_leaf = _lists(
        node, None,
        *(f"nodes_{name}" for name in
          ("featureids", "splits", "modes", "truenodeids", "trueleafs", "falsenodeids", "falseleafs")),
    )  # fmt: skip
    inner, leaves = len(features), len(_numbers(node, "leaf_weights"))

    def child(identity: int, is_leaf: int) -> int:
        if not 0 <= identity < (leaves if is_leaf else inner):
            raise node.refusal(f"it has no {'leaf' if is_leaf else 'node'} {identity}")
        return int(identity) + (inner if is_leaf else 0)

    roots = [child(root, 0) for root in _numbers(node, "tree_roots")]
    if any(not 0 <= mode < len(_MODES) for mode in modes):
        raise node.refusal(f"found a node of mode {max(modes)}, expected 0 to {len(_MODES) - 1}")
    names = [_MODES[mode] for mode in modes]
    pad = [0] * leaves
    tracks = _numbers(node, "nodes_missing_value_tracks_true") or [0] * inner
    if len(tracks) != inner:
        raise node.refusal(f"nodes_missing_value_tracks_true has {len(tracks)} entries, expected {inner}")
    return Trees(
        names + [LEAF] * leaves, features + pad, splits + pad,
        [*map(child, true, true_leaf), *pad], [*map(child, false, false_leaf), *pad], tracks + pad, roots,
        _members(node, names),
    )  # fmt: skip


def _members(node: Node, modes: list[str]) -> dict[int, list[float]]:
    """Sets of BRANCH_MEMBER nodes, each terminated by NaN, in the order of the nodes."""
    sets: list[list[float]] = [[]]
    for value in _numbers(node, "membership_values"):
        if np.isnan(value):
            sets.append([])
        else:
            sets[-1].append(value)
    member_nodes = [index for index, mode in enumerate(modes) if mode == "BRANCH_MEMBER"]
    if sets[-1] or len(sets) - 1 != len(member_nodes):
        raise node.refusal(
            f"its membership_values hold {len(sets) - 1} sets, expected {len(member_nodes)}, each ended by NaN"
        )
    return dict(zip(member_nodes, sets, strict=False))
