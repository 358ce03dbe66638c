"""A builder of ONNX graphs: nodes, random weights, and the layers that networks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


class Graph:
    """Nodes and initializers in order; values are named after the node that makes them.

    Parameters
    ----------
    name : str
    opset : int
    """

    def __init__(self, name: str, opset: int = 17) -> None:
        self.name, self.opset = name, opset
        self._random = np.random.default_rng(0)
        self._nodes: list[onnx.NodeProto] = []
        self._weights: dict[str, onnx.TensorProto] = {}
        self._inputs: list[onnx.ValueInfoProto] = []
        self.channels: dict[str, int] = {}
        """Channels of feature maps, by value."""

    def input(self, name: str, shape: Sequence[int | str], dtype: int = TensorProto.FLOAT) -> str:
        """An input of the model; its second extent, if a number, is its number of channels."""
        self._inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        if len(shape) > 1 and isinstance(shape[1], int):
            self.channels[name] = shape[1]
        return name

    def node(self, op: str, *inputs: str, outputs: int = 1, channels: int = 0, **attributes: Any) -> Any:
        """Append a node; returns its value or values. By default, a feature map has the channels of the first input."""
        name = f"{op}_{len(self._nodes)}"
        names = [name] if outputs == 1 else [f"{name}_{index}" for index in range(outputs)]
        self._nodes.append(helper.make_node(op, inputs, names, name=name, **attributes))
        for value in names:
            self.channels[value] = channels or self.channels.get(inputs[0], 0)
        return names[0] if outputs == 1 else names

    def constant(self, value: Any, dtype: str = "float32") -> str:
        """An initializer; equal small ones are shared."""
        array = np.asarray(value, dtype)
        name = f"{dtype}_{array.tolist()}" if array.size <= 8 else f"weight_{len(self._weights)}"
        self._weights.setdefault(name, numpy_helper.from_array(array, name))
        return name

    def shape(self, *extents: int) -> str:
        """An int64 vector."""
        return self.constant(extents, "int64")

    def weight(self, *shape: int, deviation: float) -> str:
        """A new initializer with normal numbers."""
        name = f"weight_{len(self._weights)}"
        array = self._random.standard_normal(shape, "float32") * np.float32(deviation)
        self._weights[name] = numpy_helper.from_array(array, name)
        return name

    def uniform(self, *shape: int) -> str:
        """A new initializer with numbers between 0.5 and 1.5."""
        name = f"weight_{len(self._weights)}"
        self._weights[name] = numpy_helper.from_array(self._random.uniform(0.5, 1.5, shape).astype("float32"), name)
        return name

    def conv(
        self,
        x: str,
        channels: int,
        kernel: int | tuple[int, int],
        stride: int = 1,
        groups: int = 1,
        norm: bool = False,
        pad: int | None = None,
        gain: float = 1.0,
    ) -> str:
        """A convolution of the same size (divided by the stride), with a bias or a batch norm.

        Its weights keep the magnitude of numbers, except for a factor `gain`.
        """
        size = (kernel, kernel) if isinstance(kernel, int) else kernel
        before = [extent // 2 if pad is None else pad for extent in size]
        inner = self.channels[x] // groups
        weight = self.weight(channels, inner, *size, deviation=gain * (2 / (inner * size[0] * size[1])) ** 0.5)
        operands = [x, weight] + ([] if norm else [self.weight(channels, deviation=0.1)])
        attributes = {"kernel_shape": size, "pads": [*before, *before], "strides": [stride, stride], "group": groups}
        y = self.node("Conv", *operands, channels=channels, **attributes)
        return self.batch_norm(y) if norm else y

    def batch_norm(self, x: str) -> str:
        """BatchNormalization for inference, with random statistics."""
        c = self.channels[x]
        shift, mean = self.weight(c, deviation=0.1), self.weight(c, deviation=0.1)
        return self.node("BatchNormalization", x, self.uniform(c), shift, mean, self.uniform(c), epsilon=1e-5)

    def pool(self, op: str, x: str, kernel: int, stride: int, pad: int = 0, **attributes: Any) -> str:
        """``MaxPool`` or ``AveragePool`` with square windows."""
        return self.node(op, x, kernel_shape=[kernel, kernel], strides=[stride, stride], pads=[pad] * 4, **attributes)

    def concat(self, *values: str) -> str:
        """Concatenate feature maps along channels."""
        return self.node("Concat", *values, axis=1, channels=sum(self.channels[value] for value in values))

    def linear(self, x: str, inputs: int, outputs: int) -> str:
        """MatMul and Add, over the last axis."""
        product = self.node("MatMul", x, self.weight(inputs, outputs, deviation=inputs**-0.5))
        return self.node("Add", product, self.weight(outputs, deviation=0.02))

    def layer_norm(self, x: str, width: int) -> str:
        """LayerNormalization over the last axis."""
        return self.node(
            "LayerNormalization", x, self.uniform(width), self.weight(width, deviation=0.1), axis=-1, epsilon=1e-5
        )

    def decomposed_layer_norm(self, x: str, width: int) -> str:
        """The same in the ops that exporters wrote before opset 17."""
        centered = self.node("Sub", x, self.node("ReduceMean", x, axes=[-1], keepdims=1))
        squares = self.node("Pow", centered, self.constant(2.0))
        variance = self.node("Add", self.node("ReduceMean", squares, axes=[-1], keepdims=1), self.constant(1e-5))
        scaled = self.node("Mul", self.node("Div", centered, self.node("Sqrt", variance)), self.uniform(width))
        return self.node("Add", scaled, self.weight(width, deviation=0.1))

    def gelu(self, x: str) -> str:
        """x · (1 + erf(x / √2)) / 2."""
        inner = self.node("Erf", self.node("Div", x, self.constant(2**0.5)))
        return self.node("Mul", self.node("Mul", x, self.node("Add", inner, self.constant(1.0))), self.constant(0.5))

    def classifier(self, x: str, classes: int = 1000) -> str:
        """The mean over pixels, flattened, and a Gemm."""
        flat = self.node("Flatten", self.node("GlobalAveragePool", x), axis=1)
        inputs = self.channels[x]
        weight, bias = self.weight(classes, inputs, deviation=inputs**-0.5), self.weight(classes, deviation=0.02)
        return self.node("Gemm", flat, weight, bias, transB=1)

    def model(self, *outputs: str) -> onnx.ModelProto:
        """The checked model; shapes of its outputs are inferred."""
        values = [helper.make_tensor_value_info(output, TensorProto.FLOAT, None) for output in outputs]
        graph = helper.make_graph(self._nodes, self.name, self._inputs, values, list(self._weights.values()))
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8)
        model = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
        onnx.checker.check_model(model)
        return model
