"""Ops of ai.onnx.ml against ONNX Runtime, many nodes in one model."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import relax_hetero as rh

CLASSICAL = "ai.onnx.ml"


def _model(nodes: list[onnx.NodeProto], feeds: dict[str, np.ndarray]) -> onnx.ModelProto:
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in feeds.items()
    ]
    outputs = [onnx.ValueInfoProto(name=name) for node in nodes for name in node.output]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(CLASSICAL, 3)]
    return helper.make_model(helper.make_graph(nodes, "g", infos, outputs), opset_imports=opsets, ir_version=9)


def _node(index: int, op: str, *inputs: str, outputs: int = 1, **attributes: Any) -> onnx.NodeProto:
    names = [f"y{index}_{i}" for i in range(outputs)]
    return helper.make_node(op, inputs, names, f"node{index}", domain=CLASSICAL, **attributes)


def test_features_and_linear_models():
    random = np.random.default_rng(0)
    x = random.uniform(-1, 1, (5, 4)).astype("float32")
    x[1, 2] = np.nan
    feeds = {"x": x, "z": np.nan_to_num(x), "zero": np.zeros((2, 3), "float32"), "i": np.array([3, 1, 7, 3])}
    feeds["k"] = np.array([2, 0])
    weights = [float(number) for number in random.uniform(-1, 1, 12)]
    linear = {"coefficients": weights, "intercepts": weights[:3]}
    classes = {**linear, "outputs": 2}
    specs: list[tuple[str, list[str], dict[str, Any]]] = [
        ("Scaler", ["z"], {"offset": weights[:4], "scale": weights[4:8]}),
        ("Scaler", ["z"], {"offset": [0.5], "scale": [2.0]}),
        *(("Normalizer", ["z"], {"norm": norm}) for norm in ("MAX", "L1", "L2")),
        *(("Normalizer", ["zero"], {"norm": norm}) for norm in ("MAX", "L1", "L2")),
        ("Imputer", ["x"], {"imputed_value_floats": weights[:4], "replaced_value_float": float("nan")}),
        ("Binarizer", ["z"], {"threshold": 0.1}),
        ("ArrayFeatureExtractor", ["z", "k"], {}),
        ("LabelEncoder", ["i"], {"keys_int64s": [1, 3], "values_int64s": [10, 30], "default_int64": -7}),
        ("LabelEncoder", ["i"], {"keys_int64s": [1, 3], "values_floats": [0.5, 1.5]}),
        ("LinearRegressor", ["z"], {**linear, "targets": 3}),
        ("LinearClassifier", ["z"], {**classes, "classlabels_ints": [4, 2, 9], "post_transform": "SOFTMAX"}),
        ("LinearClassifier", ["z"], {**classes, "classlabels_ints": [0, 1, 2], "post_transform": "LOGISTIC"}),
    ]  # fmt: skip
    nodes = [_node(index, op, *names, **options) for index, (op, names, options) in enumerate(specs)]
    model = _model(nodes, feeds)
    expected = pytest.importorskip("onnxruntime").InferenceSession(model.SerializeToString()).run(None, feeds)
    for info, array in zip(model.graph.output, expected, strict=True):
        dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
        info.type.CopyFrom(helper.make_tensor_type_proto(dtype, None))
    actual = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))["main"](**feeds)
    for info, array, result in zip(model.graph.output, expected, actual, strict=True):
        assert (result.numpy().dtype, result.shape) == (array.dtype, array.shape), info.name
        np.testing.assert_allclose(result.numpy(), array, 1e-5, 1e-6, err_msg=info.name)


def test_labels_in_a_branch_that_are_strings_are_refused():
    output = [helper.make_tensor_value_info("y0_0", onnx.TensorProto.STRING, [1])]
    inner = _node(0, "LabelEncoder", "x", keys_int64s=[1], values_strings=["a"])
    branch = helper.make_graph([inner], "branch", [], output)
    choice = helper.make_node("If", ["flag"], ["y"], "choice", then_branch=branch, else_branch=branch)
    model = _model([choice], {"x": np.array([1]), "flag": np.array(True)})
    model.graph.output[0].type.CopyFrom(helper.make_tensor_type_proto(onnx.TensorProto.INT64, [1]))
    with pytest.raises(rh.HeteroError, match="LabelEncoder node .*strings"):
        rh.from_onnx(model)
