"""Forests of decision trees, grown as extremely randomized trees are: random features and splits of random samples."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto, helper

FEATURES, SAMPLES = 20, 2000
_NODE = ("nodeids", "treeids", "featureids", "values", "truenodeids", "falsenodeids", "modes")
_LEAF = ("ids", "nodeids", "treeids", "weights")


class _Forest:
    """Attributes of a TreeEnsemble node; `classes` is 0 for a regression."""

    def __init__(self, trees: int, depth: int, classes: int) -> None:
        self._random, self._classes = np.random.default_rng(0), classes
        self._samples = self._random.normal(size=(SAMPLES, FEATURES)).astype("float32")
        self.nodes: dict[str, list] = {name: [] for name in _NODE}
        self.leaves: dict[str, list] = {name: [] for name in _LEAF}
        for tree in range(trees):
            self._first = len(self.nodes["nodeids"])
            self._grow(self._random.choice(SAMPLES, SAMPLES), depth, tree)

    def _grow(self, samples: np.ndarray, depth: int, tree: int) -> int:
        """Append the nodes of a tree; returns the root's number within it."""
        node = len(self.nodes["nodeids"]) - self._first
        feature = int(self._random.integers(FEATURES))
        values = self._samples[samples, feature]
        split = np.float32(self._random.uniform(values.min(), values.max()))
        halves = samples[values <= split], samples[values > split]
        is_leaf = not depth or not all(half.size for half in halves)
        row = (node, tree, feature, float(split), 0, 0, "LEAF" if is_leaf else "BRANCH_LEQ")
        for name, value in zip(_NODE, row, strict=True):
            self.nodes[name].append(value)
        if is_leaf:
            for target in range(max(self._classes, 1)):
                weight = float(self._random.random())
                for name, value in zip(_LEAF, (target, node, tree, weight), strict=True):
                    self.leaves[name].append(value)
            return node
        for name, half in zip(("truenodeids", "falsenodeids"), halves, strict=True):
            self.nodes[name][self._first + node] = self._grow(half, depth - 1, tree)
        return node


def forest(trees: int, depth: int, classes: int = 0) -> onnx.ModelProto:
    """A model of rows of features, ``(rows, 20)``; `depth` is the largest of a tree."""
    grown = _Forest(trees, depth, classes)
    attributes = {f"nodes_{name}": values for name, values in grown.nodes.items()}
    attributes |= {f"{'class' if classes else 'target'}_{name}": values for name, values in grown.leaves.items()}
    outputs = [helper.make_tensor_value_info("scores", TensorProto.FLOAT, None)]
    if classes:
        outputs.insert(0, helper.make_tensor_value_info("label", TensorProto.INT64, None))
    attributes |= {"classlabels_int64s": list(range(classes))} if classes else {"n_targets": 1}
    node = helper.make_node(
        "TreeEnsembleClassifier" if classes else "TreeEnsembleRegressor",
        ["x"], [output.name for output in outputs], domain="ai.onnx.ml", **attributes,
    )  # fmt: skip
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", FEATURES])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(helper.make_graph([node], "forest", [x], outputs), opset_imports=opsets, ir_version=9)


FORESTS: dict[str, Callable[[], onnx.ModelProto]] = {
    "forest_500x6": lambda: forest(500, 6),
    "forest_500x6_3_classes": lambda: forest(500, 6, 3),
    "forest_deep": lambda: forest(100, 40),
    "forest_deep_5_classes": lambda: forest(100, 40, 5),
}
"""Boosted trees are shallow, those of random forests deep: 100 trees have 2,000 leaves each, 11 to 25 steps away."""
