"""Nodes over constants are computed at import by ONNX's reference, unless they are weights or the reference errs."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from tvm import relax

import relax_hetero as rh
from frontend.ops.checking import expected, run, uniform
from relax_hetero.frontend.ops.fold import MAX_ELEMENTS, fold
from relax_hetero.frontend.ops.node import Node, as_constant, const


def constant_node(op, *values, opset=18, outputs=1, **attributes):
    inputs = [None if value is None else const(np.asarray(value)) for value in values]
    return Node(op, "n", opset, relax.BlockBuilder(), inputs, attributes, outputs)


@pytest.mark.parametrize(
    ("node", "want"),
    [
        (constant_node("Gather", np.array([2, 3, 4]), np.array(-1)), np.array(4)),
        (constant_node("Concat", np.array([2]), np.array([-1, 8]), axis=0), np.array([2, -1, 8])),
        (constant_node("Slice", np.array([2, 3, 4]), np.array([1]), np.array([9])), np.array([3, 4])),
        (constant_node("Div", np.array([7, -7]), np.array([2, 2])), np.array([3, -3])),
        (constant_node("Range", np.array(0), np.array(6), np.array(2)), np.array([0, 2, 4])),
        (constant_node("Cast", np.array([2, 3]), to=TensorProto.FLOAT), np.array([2, 3], "float32")),
    ],
    ids=lambda value: value.op_type if isinstance(value, Node) else "",
)
def test_shape_arithmetic_is_computed(node, want):
    got = as_constant(fold(node))
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


def test_several_outputs():
    node = constant_node("Split", np.arange(5), np.array([2, 3]), outputs=2, axis=0)
    assert [as_constant(field).tolist() for field in fold(node).fields] == [[0, 1], [2, 3, 4]]


@pytest.mark.parametrize(
    "node",
    [
        constant_node("Add", np.zeros(MAX_ELEMENTS + 1), np.zeros(1)),
        constant_node("Expand", np.zeros(1), np.array([1 << 10, 1 << 10])),
        constant_node("Range", np.array(0), np.array(1 << 20), np.array(1)),
        constant_node("LRN", uniform(1, 4, 2, 2), size=2),
        constant_node("Softmax", uniform(2, 3), opset=11),
        Node("Relu", "n", 18, relax.BlockBuilder(), [relax.Var("x", relax.TensorType((2,), "float32"))], {}, 1),
    ],
    ids=lambda node: node.op_type,
)
def test_weights_large_results_and_other_ops_are_not(node):
    assert fold(node) is None


@pytest.mark.parametrize(
    "node",
    [
        constant_node("Expand", np.zeros(1), np.array([1 << 20, 1 << 20])),
        constant_node("Range", np.array(0), np.array(1 << 40), np.array(1)),
        constant_node("Range", np.array(0.0), np.array(1e300), np.array(1e-300)),
        constant_node("Tile", np.zeros(64), np.array([1 << 40])),
        constant_node("ConstantOfShape", np.array([1 << 40, 1 << 40])),
        constant_node("Add", np.zeros((1 << 16, 1)), np.zeros((1, 1 << 16))),
        constant_node("Gather", np.zeros((1, 1 << 16)), np.zeros(1 << 16, "int64")),
        constant_node("Where", np.zeros((1 << 16, 1), bool), np.zeros((1, 1 << 16)), np.zeros(1)),
    ],
    ids=lambda node: node.op_type,
)
def test_results_that_fill_the_memory_are_refused(node):
    with pytest.raises(rh.FrontendError, match=f"{node.op_type} node 'n' computes a constant of .*limits=rh.ImportLi"):
        fold(node)


def test_ops_that_are_not_folded_compute_on_constants():
    graph = helper.make_graph(
        [helper.make_node("Softmax", ["c"], ["s"], axis=1, name="s"), helper.make_node("Add", ["x", "s"], ["y"])],
        "legacy",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3, 4])],
        [numpy_helper.from_array(uniform(2, 3, 4), "c")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=8)
    feeds = {"x": uniform(2, 3, 4, low=0)}
    np.testing.assert_allclose(run(model, feeds)[0], expected(model, feeds, "onnxruntime")[0], rtol=1e-4)
