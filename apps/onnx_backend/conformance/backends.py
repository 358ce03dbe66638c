"""Backends for `onnx.backend.test`: stock TVM, relax_hetero on one CPU device, relax_hetero on two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx
from onnx.backend.base import Backend, BackendRep

# Two CPU targets that differ in their instructions, so a kernel on the wrong device cannot go unnoticed.
SECOND_CPU = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v2"}


def _outputs(result: Any) -> tuple[Any, ...]:
    """The graph's outputs: tensors as arrays, sequences as lists of them. One tensor comes without a tuple around."""
    values = [result] if hasattr(result, "numpy") else list(result)
    return tuple(_to_host(value) for value in values)


def _to_host(value: Any) -> Any:
    return value.numpy() if hasattr(value, "numpy") else [_to_host(item) for item in value]


class StockRep(BackendRep):
    """A model built by stock `tvm.compile` for generic llvm."""

    def __init__(self, model: onnx.ModelProto) -> None:
        import tvm
        from tvm import relax
        from tvm.relax.frontend.onnx import from_onnx

        module = from_onnx(model)
        executable = tvm.compile(module, target="llvm")
        self._machine = relax.VirtualMachine(executable, tvm.cpu())

    def run(self, inputs: Sequence[Any], **kwargs: Any) -> tuple[Any, ...]:
        import tvm

        result = self._machine["main"](*[tvm.runtime.tensor(np.asarray(value)) for value in inputs])
        return _outputs(result)


class HeteroRep(BackendRep):
    """A model built by `relax_hetero` for the devices of its placement."""

    def __init__(self, model: onnx.ModelProto, vdevices: list[Any], placement: dict[str, str] | None) -> None:
        import relax_hetero as rh

        module = rh.from_onnx(model, vdevices=vdevices, placement=placement)
        self.executable = rh.compile(module, cache=False)
        self._machine = rh.vm.VirtualMachine(self.executable)

    def run(self, inputs: Sequence[Any], **kwargs: Any) -> tuple[Any, ...]:
        result = self._machine["main"](*inputs)
        return _outputs(result)


class StockBackend(Backend):
    """Stock TVM: `tvm.relax.frontend.onnx.from_onnx`, then `tvm.compile`."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> StockRep:
        return StockRep(model)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device == "CPU"


class OneDeviceBackend(Backend):
    """relax_hetero with everything on the native CPU."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> HeteroRep:
        return HeteroRep(model, ["llvm"], None)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device == "CPU"


class TwoDeviceBackend(Backend):
    """relax_hetero with the nodes of the graph dealt out in turn over two CPU devices with different targets."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> HeteroRep:
        named, placement = deal_out(model)
        return HeteroRep(named, ["llvm", SECOND_CPU], placement)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device == "CPU"


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _nodes(attribute.g)
            for inner in attribute.graphs:
                yield from _nodes(inner)


def deal_out(model: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, str]]:
    """Name every node and place the nodes alternately on `llvm:1` and `llvm:0`.

    The first node goes to the second device, so that a model of one node runs where nothing is by default.

    Returns
    -------
    A copy of the model whose nodes are called `node<i>`, and its placement.
    """
    named = onnx.ModelProto()
    named.CopyFrom(model)
    placement = {}
    for index, node in enumerate(_nodes(named.graph)):
        node.name = f"node{index}"
        placement[node.name] = "llvm:0" if index % 2 else "llvm:1"
    return named, placement


CONFIGURATIONS: dict[str, type[Backend]] = {"a": StockBackend, "b": OneDeviceBackend, "c": TwoDeviceBackend}
"""Configuration letter to backend: (a) stock TVM, (b) one CPU device, (c) two CPU devices."""
