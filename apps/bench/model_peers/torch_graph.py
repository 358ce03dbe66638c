"""An ONNX model as one graph of PyTorch's ops, which does not use protobufs or read numbers from tensors.

``torch.compile`` breaks its graph at Python code that it cannot follow, and a program that reads a tensor's numbers
cannot be captured in a CUDA graph. Shapes, axes and bounds are therefore computed once, on the host, and are constants
of the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from . import Unsupported
from .torch_ops import NUMBERS, OPS, Attributes

Tensor = torch.Tensor


class Runner(torch.nn.Module):
    """Runs a model's nodes in their order.

    Parameters
    ----------
    model : onnx.ModelProto
    dtype : torch.dtype
        Type of weights, and of casts to float32 in the model. Numbers beyond its range become its largest.
    """

    def __init__(self, model: onnx.ModelProto, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self._opset = next(one.version for one in model.opset_import if one.domain in ("", "ai.onnx"))
        self._nodes = list(model.graph.node)
        self._dtype = dtype
        self._arrays = {weight.name: numpy_helper.to_array(weight) for weight in model.graph.initializer}
        self._inputs = [value.name for value in model.graph.input if value.name not in self._arrays]
        self._outputs = [value.name for value in model.graph.output]
        for node in self._nodes:
            if node.op_type == "Constant":
                self._arrays[node.output[0]] = _constant(node)
        read = {name for node in self._nodes for name in _tensors_of(node, self._arrays)} | {*self._outputs}
        self._names = {name: f"weight_{index}" for index, name in enumerate(self._arrays) if name in read}
        for name, buffer in self._names.items():
            self.register_buffer(buffer, self._tensor(self._arrays[name]))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The model's outputs."""
        arrays = dict(self._arrays)
        values = dict(zip(self._inputs, inputs, strict=True))
        values.update({name: getattr(self, buffer) for name, buffer in self._names.items()})
        for node in self._nodes:
            if all(name in arrays for name in node.output):
                continue
            attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
            if (folded := self._folded(node, values, arrays)) is not None:
                arrays.update(zip(node.output, folded, strict=True))
                continue
            results = self._run(node, values, arrays, attributes)
            for name, value in zip(node.output, results if isinstance(results, tuple) else (results,), strict=False):
                values[name] = value
        return tuple(self._value(name, values, arrays) for name in self._outputs)

    def _folded(self, node: onnx.NodeProto, values: Mapping[str, Tensor], arrays: dict[str, Any]) -> list[Any] | None:
        """The results of a node that computes shapes: one on integers whose operands the host knows."""
        if node.op_type == "Shape" and node.input[0] in values:
            shape = np.array(values[node.input[0]].shape, "int64")
            start, end = (_attribute(node, name, value) for name, value in (("start", 0), ("end", None)))
            return [shape[start:end]]
        operands = {name: arrays[name] for name in node.input if name in arrays}
        if len(operands) != len(set(filter(None, node.input))) or not operands:
            return None
        if any(array.dtype.kind == "f" for array in operands.values()) and node.op_type != "Cast":
            return None
        return list(ReferenceEvaluator(node, opsets={"": self._opset}).run(None, operands))

    def _run(self, node: onnx.NodeProto, values: dict[str, Tensor], arrays: dict[str, Any], more: Attributes) -> Any:
        if node.op_type not in OPS:
            raise Unsupported(f"no translation of {node.op_type}")
        operands: list[Any] = []
        for index, name in enumerate(node.input):
            number = _is_number(node, index, arrays)
            if number and name and name not in arrays:
                raise Unsupported(f"operand {index} of {node.op_type} is computed")
            operands.append((arrays[name] if number else self._value(name, values, arrays)) if name else None)
        operands += [None] * (1 + max(NUMBERS.get(node.op_type, (0,))) - len(operands))
        return OPS[node.op_type](operands, {"opset": self._opset, "float": self._dtype, **more})

    def _value(self, name: str, values: dict[str, Tensor], arrays: dict[str, Any]) -> Tensor:
        if name not in values:  # computed by the host, and read as a tensor
            device = next((tensor.device for tensor in values.values()), None)
            values[name] = self._tensor(arrays[name]).to(device)
        return values[name]

    def _tensor(self, array: Any) -> Tensor:
        tensor = torch.from_numpy(np.array(array))
        if tensor.dtype != torch.float32 or self._dtype == torch.float32:
            return tensor
        largest = torch.finfo(self._dtype).max
        return tensor.clamp(-largest, largest).to(self._dtype)


def graph_of(runner: Runner, operands: Sequence[Tensor]) -> GraphModule:
    """The graph of a runner's ops for such operands, on their device; the graph holds the weights."""
    with torch.no_grad():
        return make_fx(runner, pre_dispatch=True)(*operands)


def _constant(node: onnx.NodeProto) -> np.ndarray:
    attribute = node.attribute[0]
    value = onnx.helper.get_attribute_value(attribute)
    return numpy_helper.to_array(value) if attribute.name == "value" else np.array(value)


def _attribute(node: onnx.NodeProto, name: str, otherwise: Any) -> Any:
    return next((onnx.helper.get_attribute_value(a) for a in node.attribute if a.name == name), otherwise)


def _is_number(node: onnx.NodeProto, index: int, arrays: Mapping[str, Any]) -> bool:
    """True if an operand is read on the host, as is a constant index of one element."""
    if node.op_type == "Gather":
        return index == 1 and node.input[1] in arrays and np.ndim(arrays[node.input[1]]) == 0
    return index in NUMBERS.get(node.op_type, ())


def _tensors_of(node: onnx.NodeProto, arrays: Mapping[str, Any]) -> list[str]:
    """The weights that a node reads as tensors."""
    return [name for index, name in enumerate(node.input) if name in arrays and not _is_number(node, index, arrays)]
