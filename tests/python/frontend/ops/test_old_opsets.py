"""Forms that ops had before opset 13: attributes in the place of inputs, broadcasting by an axis, ops on trial."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import relax_hetero as rh
from frontend.ops.checking import check, refused, uniform

IMAGE = uniform(2, 3, 4, 5)


def channels(vector: np.ndarray) -> np.ndarray:
    return vector.reshape(-1, 1, 1)


class Opset:
    """Nodes of one opset as one model, and what each has to give."""

    def __init__(self, opset: int) -> None:
        self.opset = opset
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.wanted: list[np.ndarray] = []

    def add(self, op: str, *weights: np.ndarray, expected: np.ndarray, **attributes: Any) -> None:
        number = len(self.nodes)
        names = [f"w{number}_{index}" for index in range(len(weights))]
        self.weights += [numpy_helper.from_array(value, name) for name, value in zip(names, weights, strict=True)]
        self.nodes.append(helper.make_node(op, ["x", *names], [f"y{number}"], f"node{number}", **attributes))
        self.wanted.append(expected)

    def check(self) -> None:
        x = helper.make_tensor_value_info("x", 1, IMAGE.shape)
        outputs = [
            helper.make_tensor_value_info(f"y{at}", helper.np_dtype_to_tensor_dtype(value.dtype), None)
            for at, value in enumerate(self.wanted)
        ]
        graph = helper.make_graph(self.nodes, "g", [x], outputs, self.weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=4)
        actual = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))["main"](IMAGE)
        actual = [actual] if len(self.nodes) == 1 else actual
        for node, result, value in zip(self.nodes, actual, self.wanted, strict=True):
            assert result.shape == value.shape, node.op_type
            np.testing.assert_allclose(result.numpy(), value, 1e-5, 1e-5, err_msg=node.op_type)


@pytest.mark.slow
def test_opset_1(capfd):
    x, vector = IMAGE, uniform(3)
    nodes = Opset(1)
    nodes.add("Add", vector, expected=x + channels(vector), broadcast=1, axis=1)
    nodes.add("Mul", uniform(3, 4), expected=x * uniform(3, 4)[..., None], broadcast=1, axis=-3)
    nodes.add("Div", uniform(5, low=1.0), expected=x / uniform(5, low=1.0), broadcast=1)
    nodes.add("Greater", vector, expected=x > channels(vector), broadcast=1, axis=1)
    nodes.add("Cast", expected=x.astype("int32"), to="INT32")
    nodes.add("Tile", np.array([2]), np.array([3]), expected=np.tile(x, (1, 1, 1, 2)))
    nodes.add("Reshape", expected=x.reshape(2, -1, 5), shape=[0, -1, 5])
    nodes.add("Concat", expected=x)
    nodes.add("ThresholdedRelu", expected=np.where(x > 0.7, x, 0), alpha=0.7)
    centred = x - x.mean((1, 2, 3), keepdims=True)
    nodes.add("MeanVarianceNormalization", expected=centred / x.std((1, 2, 3), keepdims=True), across_channels=1)
    nodes.add("MeanVarianceNormalization", expected=x - x.mean((2, 3), keepdims=True), normalize_variance=0)
    nodes.check()
    assert capfd.readouterr() == ("", "")


def test_opset_6():
    vectors = [uniform(3, 4, 5), uniform(3, 4, 5), uniform(3, 4, 5), uniform(3, 4, 5, low=0.5)]
    scale, shift, mean, variance = vectors
    expected = (IMAGE - mean) / np.sqrt(variance + 1e-5) * scale + shift
    nodes = Opset(6)
    nodes.add("Sub", uniform(3), expected=IMAGE - channels(uniform(3)), broadcast=1, axis=1)
    nodes.add("BatchNormalization", *vectors, expected=expected, spatial=0)
    nodes.check()


@pytest.mark.parametrize("constant", [(1,), ()])
def test_nearest_element_of_an_axis_that_shrinks_is_the_one_above(constant):
    check("Resize", uniform(1, 2, 6, 9), np.array([1, 1, 0.6, 1.5], "float32"), opset=10, constant=constant)


def test_training_and_axes_that_do_not_fit_are_refused():
    refused("Dropout", IMAGE, opset=6, is_test=0, match="is_test=0 asks for training")
    refused("BatchNormalization", IMAGE, *4 * [uniform(3)], opset=6, is_test=0, match="is_test=0 asks for training")
    refused("Add", IMAGE, uniform(4, 5), opset=6, broadcast=1, axis=3, match=r"\[4, 5\] does not fit after axis 3")
    refused("Crop", IMAGE, opset=1, border=[3, 0, 2, 0], match="Crop")
