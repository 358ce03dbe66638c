"""Nodes of ONNX Runtime's own domain as one model, compared with ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import relax_hetero as rh

MICROSOFT = "com.microsoft"


class Nodes:
    """Nodes with separate inputs that become one model; with symbolic sizes if it `is_open`."""

    def __init__(self, is_open: bool = False) -> None:
        self.is_open = is_open
        self.random = np.random.default_rng(0)
        self.nodes: list[onnx.NodeProto] = []
        self.feeds: dict[str, np.ndarray] = {}
        self.weights: dict[str, np.ndarray] = {}

    def floats(self, *shape: int) -> np.ndarray:
        return self.random.uniform(-1, 1, shape).astype("float32")

    def bytes(self, *shape: int, dtype: str = "uint8") -> np.ndarray:
        return self.random.integers(0, 100, shape).astype(dtype)

    def add(
        self,
        op: str,
        *inputs: np.ndarray | None,
        domain: str = MICROSOFT,
        outputs: int = 1,
        constant: Sequence[int] = (),
        **attributes: Any,
    ) -> None:
        """Add a node; inputs whose numbers are in `constant` are weights of the model."""
        index = len(self.nodes)
        names = [f"x{index}_{i}" if value is not None else "" for i, value in enumerate(inputs)]
        for place, (name, value) in enumerate(zip(names, inputs, strict=True)):
            if value is not None:
                (self.weights if place in constant else self.feeds)[name] = value
        results = [f"y{index}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op, names, results, f"node{index}", domain=domain, **attributes))

    def model(self) -> onnx.ModelProto:
        infos = [
            helper.make_tensor_value_info(
                name,
                helper.np_dtype_to_tensor_dtype(value.dtype),
                [f"{name}_{axis}" for axis in range(value.ndim)] if self.is_open else value.shape,
            )
            for name, value in self.feeds.items()
        ]
        outputs = [onnx.ValueInfoProto(name=name) for node in self.nodes for name in node.output]
        weights = [numpy_helper.from_array(value, name) for name, value in self.weights.items()]
        graph = helper.make_graph(self.nodes, "nodes", infos, outputs, weights)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=9)

    def check(self, vdevices: list[Any], expected: Sequence[np.ndarray] | None = None, atol: float = 1e-5) -> None:
        """Compare the model with ONNX Runtime, or with given results; its nodes are dealt out over the devices."""
        if expected is None:
            options = pytest.importorskip("onnxruntime").SessionOptions()
            options.intra_op_num_threads = 1  # its rounding of states depends on their split over threads
            session = pytest.importorskip("onnxruntime").InferenceSession(self.model().SerializeToString(), options)
            expected = session.run(None, self.feeds)
        typed = self.model()
        for info, array in zip(typed.graph.output, expected, strict=True):
            dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
            info.type.CopyFrom(helper.make_tensor_type_proto(dtype, None))
        rules = {f"node{index}": f"vdevice:{index % len(vdevices)}" for index in range(len(self.nodes))}
        machine = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(typed, vdevices=vdevices, placement=rules)))
        actual = machine["main"](**self.feeds)
        actual = [actual] if hasattr(actual, "numpy") else actual
        for info, array, result in zip(typed.graph.output, expected, actual, strict=True):
            assert result.numpy().dtype == array.dtype, info.name
            off_by_one = 1 if array.dtype.kind in "iu" else 0
            np.testing.assert_allclose(result.numpy(), array, 1e-4, atol + off_by_one, err_msg=info.name)
