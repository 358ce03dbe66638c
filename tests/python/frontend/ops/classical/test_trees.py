"""Tree ensembles of ai.onnx.ml against ONNX Runtime, many nodes in one model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import relax_hetero as rh

CLASSICAL = "ai.onnx.ml"
MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ")
FEATURES = 4


def _trees(seed: int, targets: Sequence[int], modes: Sequence[str] = MODES, prefix: str = "target") -> dict[str, Any]:
    """Attributes of as many random trees of depth 0 to 3 as there are entries in `targets`, each of that target."""
    random = np.random.default_rng(seed)
    names = ("nodeids", "treeids", "featureids", "values", "truenodeids", "falsenodeids", "modes")
    nodes: dict[str, list[Any]] = {f"nodes_{name}": [] for name in (*names, "missing_value_tracks_true")}
    weights: dict[str, list[Any]] = {f"{prefix}_{name}": [] for name in ("ids", "nodeids", "treeids", "weights")}

    def grow(tree: int, identity: int, depth: int) -> int:
        """Append the tree below a node; the number of the next node."""
        is_leaf = depth == 0
        node = len(nodes["nodes_nodeids"])
        row = (identity, tree, int(random.integers(FEATURES)), float(random.integers(-1, 2)), 0, 0)
        for name, value in zip(names, (*row, "LEAF" if is_leaf else str(random.choice(modes))), strict=True):
            nodes[f"nodes_{name}"].append(value)
        nodes["nodes_missing_value_tracks_true"].append(int(random.integers(2)))
        if is_leaf:
            values = (targets[tree], identity, tree, float(random.normal()))
            for name, value in zip(("ids", "nodeids", "treeids", "weights"), values, strict=True):
                weights[f"{prefix}_{name}"].append(value)
            return identity + 1
        nodes["nodes_truenodeids"][node] = identity + 1
        following = grow(tree, identity + 1, depth - 1)
        nodes["nodes_falsenodeids"][node] = following
        return grow(tree, following, depth - 1)

    for tree in range(len(targets)):
        grow(tree, 0, tree % 4)
    return {**nodes, **weights}


def _specs() -> list[tuple[str, int, dict[str, Any]]]:
    """Op type, outputs and attributes."""
    regressor = [
        {"n_targets": 1, **_trees(0, [0] * 9), "base_values": [0.5]},
        {"n_targets": 1, **_trees(1, [0] * 5), "aggregate_function": "AVERAGE", "post_transform": "LOGISTIC"},
        {"n_targets": 3, **_trees(2, [0, 1, 2] * 4), "base_values": [0.5, -1.0, 2.0], "post_transform": "SOFTMAX_ZERO"},
        {"n_targets": 3, **_trees(3, [0, 1, 2] * 4), "aggregate_function": "MIN"},
        {"n_targets": 3, **_trees(4, [0, 2] * 4), "aggregate_function": "MAX", "post_transform": "LOGISTIC"},
    ]

    def classes(
        seed: int, ids: Sequence[int], labels: list[int], positive: bool = False, **more: Any
    ) -> dict[str, Any]:
        trees = _trees(seed, ids, MODES[:4], "class")
        if positive:
            trees["class_weights"] = [abs(weight) / 9 for weight in trees["class_weights"]]
        return {**trees, "classlabels_int64s": labels, **more}

    classifier = [
        classes(5, [0, 1, 2] * 4, [7, 3, 5], post_transform="SOFTMAX"),
        classes(6, [0, 1, 2] * 4, [0, 1, 2], base_values=[0.1, 0.2, -3.0], post_transform="LOGISTIC"),
        classes(7, [0, 2] * 4, [0, 1, 2]),
        *(classes(8, [0] * 7, [4, 2], post_transform=name) for name in ("NONE", "LOGISTIC", "SOFTMAX")),
        *(classes(9, [0] * 7, [0, 1], True, post_transform=name) for name in ("NONE", "LOGISTIC")),
        classes(10, [0] * 7, [0, 1], base_values=[0.3], post_transform="LOGISTIC"),
        classes(11, [0] * 7, [0, 1], base_values=[0.3]),
        classes(12, [1] * 7, [0, 1], post_transform="LOGISTIC"),
        classes(13, [0, 1] * 4, [0, 1]),
    ]
    return [*(("TreeEnsembleRegressor", 1, spec) for spec in regressor),
            *(("TreeEnsembleClassifier", 2, spec) for spec in classifier)]  # fmt: skip


def _model(specs: list[tuple[str, int, dict[str, Any]]], rows: Any) -> onnx.ModelProto:
    nodes = [
        helper.make_node(op, ["x"], [f"y{i}_{k}" for k in range(count)], f"node{i}", domain=CLASSICAL, **attributes)
        for i, (op, count, attributes) in enumerate(specs)
    ]
    info = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [rows, FEATURES])
    floats, integers = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
    outputs = []
    for node in nodes:
        types = [integers, floats] if len(node.output) == 2 else [floats]
        outputs += [helper.make_tensor_value_info(*pair, None) for pair in zip(node.output, types, strict=True)]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(CLASSICAL, 3)]
    return helper.make_model(helper.make_graph(nodes, "g", [info], outputs), opset_imports=opsets, ir_version=9)


def _stumps(ids: Sequence[int | None], labels: list[int], sign: int = 1, **more: Any) -> dict[str, Any]:
    """Trees of two leaves, of class `ids` or of none; weights of both signs where `sign` is -1."""
    trees = range(len(ids) // 2)
    scored = [(place // 2, place % 2 + 1, k) for place, k in enumerate(ids) if k is not None]
    return {
        "nodes_treeids": [tree for tree in trees for _ in range(3)],
        "nodes_nodeids": [0, 1, 2] * len(trees),
        "nodes_featureids": [place for tree in trees for place in (tree % FEATURES, 0, 0)],
        "nodes_values": [0.25, 0.0, 0.0] * len(trees),
        "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"] * len(trees),
        "nodes_truenodeids": [1, 0, 0] * len(trees),
        "nodes_falsenodeids": [2, 0, 0] * len(trees),
        "class_treeids": [tree for tree, _, _ in scored],
        "class_nodeids": [leaf for _, leaf, _ in scored],
        "class_ids": [k for _, _, k in scored],
        "class_weights": [(sign if place % 2 else 1) * (0.2 + 0.15 * place) for place in range(len(scored))],
        "classlabels_int64s": labels,
        **more,
    }


@pytest.mark.parametrize(
    "forms",
    [
        [
            _stumps([0, None, 0, 0], [7], -1, base_values=[-0.3]),
            _stumps([0, None], [7], post_transform="PROBIT", base_values=[0.3]),
            _stumps([0, 1, 1, 0], [4, 9], -1),
        ],
        pytest.param(
            [
                _stumps([0, 0], [7], post_transform="LOGISTIC"),
                _stumps([1, None, 1, 1], [4, 9]),
                _stumps([0, None], [4, 9], base_values=[0.2], post_transform="SOFTMAX"),
                _stumps([1, None], [4, 9], -1, base_values=[0.2, -0.3]),
                _stumps([0, 1], [4, 9], post_transform="LOGISTIC"),
                _stumps([0, 1, 1, 0], [4, 9], base_values=[0.2, -0.3], post_transform="LOGISTIC"),
                _stumps([0, None, 1, 1], [4, 9], base_values=[0.2], post_transform="SOFTMAX"),
            ],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["few", "all"],
)
def test_one_class_and_two_classes_with_one_score(forms):
    """ONNX Runtime's choice of labels, and of the score that no leaf gives."""
    x = np.random.default_rng(0).normal(size=(9, FEATURES)).astype("float32")
    model = _model([("TreeEnsembleClassifier", 2, form) for form in forms], "rows")
    expected = pytest.importorskip("onnxruntime").InferenceSession(model.SerializeToString()).run(None, {"x": x})
    actual = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))["main"](x)
    for info, array, result in zip(model.graph.output, expected, actual, strict=True):
        np.testing.assert_allclose(result.numpy(), array, 1e-5, 1e-6, err_msg=info.name)


def test_scores_that_onnxruntime_leaves_open_are_refused():
    model = _model([("TreeEnsembleClassifier", 2, _stumps([0, 1], [4, 9], base_values=[0.2]))], "rows")
    with pytest.raises(rh.FrontendError, match="leaves a score open"):
        rh.from_onnx(model)


def test_a_leaf_that_no_tree_reaches_is_ignored():
    forms = [_stumps([0, 1], [4, 9]), _stumps([0, 1, 1, 0], [4, 9])]
    for form in forms:
        for name, value in {
            "nodes_treeids": 0, "nodes_nodeids": 9, "nodes_featureids": 0, "nodes_values": 0.0, "nodes_modes": "LEAF",
            "nodes_truenodeids": 0, "nodes_falsenodeids": 0, "class_treeids": 0, "class_nodeids": 9, "class_ids": 1,
            "class_weights": 7.0,
        }.items():  # fmt: skip
            form[name].insert(3 if name.startswith("nodes") else 0, value)
    model = _model([("TreeEnsembleClassifier", 2, form) for form in forms], "rows")
    x = np.random.default_rng(0).normal(size=(5, FEATURES)).astype("float32")
    expected = pytest.importorskip("onnxruntime").InferenceSession(model.SerializeToString()).run(None, {"x": x})
    actual = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))["main"](x)
    for array, result in zip(expected, actual, strict=True):
        np.testing.assert_allclose(result.numpy(), array, 1e-5, 1e-6)


def test_numbers_of_trees_and_rows_around_those_that_are_interleaved():
    trees = _trees(3, [0] * 37)
    trees["nodes_featureids"] = [feature % 3 for feature in trees["nodes_featureids"]]
    model = _model([("TreeEnsembleRegressor", 1, {"n_targets": 1, **trees})], "rows")
    session = pytest.importorskip("onnxruntime").InferenceSession(model.SerializeToString())
    main = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))["main"]
    for rows in (1, 15, 16, 17, 50):
        x = np.random.default_rng(rows).integers(-2, 3, (rows, FEATURES)).astype("float32")
        x[0, 1], x[-1, 2] = np.nan, np.inf
        (expected,) = session.run(None, {"x": x})
        np.testing.assert_allclose(main(x).numpy(), expected, 1e-5, 1e-6)


@pytest.mark.slow
def test_ensembles_of_every_form():
    x = np.random.default_rng(0).integers(-2, 3, (37, FEATURES)).astype("float32")
    x[::5, 1] = np.nan
    x[1::5, 2] = np.inf
    model = _model(_specs(), "rows")
    expected = pytest.importorskip("onnxruntime").InferenceSession(model.SerializeToString()).run(None, {"x": x})
    actual = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))["main"](x)
    wrong = []
    for info, array, result in zip(model.graph.output, expected, actual, strict=True):
        assert (result.numpy().dtype, result.shape) == (array.dtype, array.shape), info.name
        if not np.allclose(result.numpy(), array, 1e-5, 1e-6, equal_nan=True):
            wrong.append(info.name)
    assert not wrong


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"nodes_featureids": [9, 0, 0]}, "feature 9 of an input of 4 features"),
        ({"nodes_truenodeids": [0, 0, 0]}, "cycle"),
        ({"nodes_truenodeids": [5, 0, 0]}, "tree 0 has no node 5"),
        ({"target_ids": [0, 4]}, "weights of target 4, expected less than 1"),
        ({"nodes_values": [0.0]}, "nodes_values has 1 entries, expected 3"),
    ],
)
def test_damaged_trees_are_refused_by_name(changes: dict[str, Any], match: str):
    attributes = {
        "nodes_nodeids": [0, 1, 2], "nodes_treeids": [0, 0, 0], "nodes_featureids": [1, 0, 0],
        "nodes_values": [0.5, 0.0, 0.0], "nodes_truenodeids": [1, 0, 0], "nodes_falsenodeids": [2, 0, 0],
        "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"], "target_ids": [0, 0], "target_nodeids": [1, 2],
        "target_treeids": [0, 0], "target_weights": [1.0, 2.0], "n_targets": 1,
    }  # fmt: skip
    with pytest.raises(rh.HeteroError, match=f"TreeEnsembleRegressor node 'node0'.*{match}"):
        rh.from_onnx(_model([("TreeEnsembleRegressor", 1, {**attributes, **changes})], 5))


def test_rows_walk_down_a_deep_tree_together():
    steps, x = 12, np.linspace(-1, 13, 37, dtype="float32").reshape(-1, 1)
    x[5] = np.nan
    inner, leaves = range(steps), range(steps, 2 * steps + 1)
    node = helper.make_node(
        "TreeEnsembleRegressor", ["x"], ["y"], "chain", domain="ai.onnx.ml",
        nodes_treeids=[0] * (2 * steps + 1), nodes_nodeids=[*inner, *leaves], nodes_featureids=[0] * (2 * steps + 1),
        nodes_modes=["BRANCH_LEQ"] * steps + ["LEAF"] * (steps + 1),
        nodes_values=[float(at) for at in inner] + [0.0] * (steps + 1),
        nodes_truenodeids=[steps + at for at in inner] + [0] * (steps + 1),
        nodes_falsenodeids=[*(at + 1 for at in range(steps - 1)), 2 * steps] + [0] * (steps + 1),
        target_treeids=[0] * (steps + 1), target_nodeids=list(leaves), target_ids=[0] * (steps + 1),
        target_weights=[float(at) for at in range(steps + 1)], n_targets=1,
    )  # fmt: skip
    infos = [helper.make_tensor_value_info(name, 1, ["rows", 1]) for name in "xy"]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    model = helper.make_model(helper.make_graph([node], "g", infos[:1], infos[1:]), opset_imports=opsets, ir_version=9)
    actual = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))["main"](x).numpy()
    np.testing.assert_array_equal(actual, np.where(np.isnan(x), steps, np.clip(np.ceil(x), 0, steps)))


def _one_tree(depth: int, entries: int) -> dict[str, Any]:
    """A tree of `depth` whose leaves score classes of their own."""
    inner, count = 2**depth - 1, 2 ** (depth + 1) - 1
    random = np.random.default_rng(depth)
    leaves = [leaf for leaf in range(inner, count) for _ in range(entries)]
    return {
        "nodes_nodeids": list(range(count)), "nodes_treeids": [0] * count,
        "nodes_featureids": random.integers(0, FEATURES, count).tolist(),
        "nodes_values": random.normal(size=count).astype("float32").tolist(),
        "nodes_modes": ["BRANCH_LEQ"] * inner + ["LEAF"] * (count - inner),
        "nodes_truenodeids": [*range(1, 2 * inner, 2), *[0] * (count - inner)],
        "nodes_falsenodeids": [*range(2, 2 * inner + 1, 2), *[0] * (count - inner)],
        "class_nodeids": leaves, "class_treeids": [0] * len(leaves),
        "class_ids": [(leaf + 2 * at) % count for at, leaf in enumerate(leaves)],
        "class_weights": random.normal(size=len(leaves)).astype("float32").tolist(),
        "classlabels_int64s": list(range(10, 10 + count)),
    }  # fmt: skip


def test_a_node_for_each_tree_makes_no_kernels_for_each():
    """Forests of several outputs as sklearn exports them: compile time follows the size of the trees."""
    specs = [("TreeEnsembleClassifier", 2, _one_tree(depth, 1)) for depth in (2, 3, 4)]
    specs.append(("TreeEnsembleClassifier", 2, _one_tree(3, 3)))
    model = _model(specs, "rows")
    x = np.random.default_rng(0).standard_normal((50, FEATURES)).astype("float32")
    executable = rh.compile(rh.from_onnx(model))
    actual = rh.vm.VirtualMachine(executable)["main"](x)
    expected = pytest.importorskip("onnxruntime").InferenceSession(model.SerializeToString()).run(None, {"x": x})
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(one.numpy(), other)
    names = [name for name in executable.metadata.dispatches if "tree_leaves" in name or "tree_labels" in name]
    assert sorted(names) == ["tree_labels", "tree_leaves"]
