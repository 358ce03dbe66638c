"""Sizes of 0 in ops that infer sizes, known at import or to a call only, against ONNX Runtime: one model of each."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import relax_hetero as rh

WEIGHTS = {
    "none": np.array([-1]), "rows": np.array([3, 2, -1]), "keep": np.array([-1, 2]), "two": np.array([2, 2]),
    "zero": np.array([0]), "w": np.ones((2, 4), "float32"), "none_by_4": np.ones((0, 4), "float32"),
    "kernel": np.ones((3, 2, 3, 3), "float32"), "scale": np.ones(2, "float32"), "picked": np.zeros((0, 2), "int64"),
    "length": np.array(0), "axes": np.array([0]), "first": np.array(1),
}  # fmt: skip
"""x is (0, 2), and z (2, 0)."""
NODES: list[tuple[str, list[str], dict[str, Any]]] = [
    ("Reshape", ["x", "none"], {}),
    ("Reshape", ["x", "rows"], {}),
    ("Reshape", ["z", "keep"], {}),
    ("Flatten", ["x"], {"axis": 0}),
    ("Flatten", ["z"], {"axis": 1}),
    ("Tile", ["x", "two"], {}),
    ("MatMul", ["x", "w"], {}),
    ("MatMul", ["z", "none_by_4"], {}),
    ("Gemm", ["z", "none_by_4"], {}),
    ("Concat", ["x", "x"], {"axis": 0}),
    ("Softmax", ["x"], {}),
    ("LogSoftmax", ["z"], {}),
    ("Hardmax", ["z"], {}),
    ("ReduceSum", ["x", "axes"], {}),
    ("ReduceMean", ["x"], {"axes": [0], "keepdims": 0}),
    ("ReduceMean", ["z"], {"axes": [1]}),
    ("ReduceLogSumExp", ["x"], {"axes": [1]}),
    ("ReduceMax", ["z"], {"axes": [1]}),
    ("GatherElements", ["w", "picked"], {}),
    ("CumSum", ["z", "first"], {}),
    ("LayerNormalization", ["x", "scale"], {}),
    ("NonZero", ["z"], {}),
    ("Einsum", ["z", "none_by_4"], {"equation": "ij,jk->ik"}),
]


@pytest.mark.parametrize(
    "is_open", [pytest.param(False, id="known"), pytest.param(True, id="open", marks=pytest.mark.slow)]
)
def test_empty_sizes(is_open):
    nodes = [helper.make_node(op, inputs, [f"y{i}"], f"{op}_{i}", **more) for i, (op, inputs, more) in enumerate(NODES)]
    dims = {"x": ["n", 2], "z": [2, "n"]} if is_open else {"x": [0, 2], "z": [2, 0]}
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in dims.items()]
    outputs = [onnx.ValueInfoProto(name=f"y{i}") for i in range(len(nodes))]
    weights = [numpy_helper.from_array(array, name) for name, array in WEIGHTS.items()]
    graph = helper.make_graph(nodes, "g", infos, outputs, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    feeds = {"x": np.zeros((0, 2), "float32"), "z": np.zeros((2, 0), "float32")}
    session = pytest.importorskip("onnxruntime").InferenceSession(model.SerializeToString())
    actual = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))["main"](**feeds)
    for node, want, result in zip(nodes, session.run(None, feeds), actual, strict=True):
        assert result.shape == want.shape and str(result.dtype) == str(want.dtype), node.name
        np.testing.assert_array_equal(result.numpy(), want, err_msg=node.name)
