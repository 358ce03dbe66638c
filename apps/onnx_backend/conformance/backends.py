"""Backends for `onnx.backend.test`: stock TVM, and relax_hetero on one or two devices, CPUs and NVIDIA GPUs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx
from onnx.backend.base import Backend, BackendRep

# Two CPU targets that differ in their instructions, so a kernel on the wrong device cannot go unnoticed.
SECOND_CPU = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v2"}

GPU_VARIABLE, BUILD_ONLY_VARIABLE = "CONFORMANCE_GPU", "CONFORMANCE_BUILD_ONLY"
"""Environment variables of worker processes: the target that stands for the GPU, and whether to compile only."""


class BuiltOnly(Exception):
    """A case was compiled and not run, as the command line says."""


def gpu_target() -> Any:
    """The target of the GPU: this machine's, or the command line's, a kind or JSON."""
    text = os.environ.get(GPU_VARIABLE, "cuda")
    return json.loads(text) if text.startswith("{") else text


def _outputs(result: Any) -> tuple[Any, ...]:
    """The graph's outputs, tensors as arrays and sequences as lists; a single tensor comes without a tuple."""
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

    def __init__(
        self, model: onnx.ModelProto, vdevices: list[Any], placement: dict[str, str] | None, inputs: Sequence[Any] = ()
    ) -> None:
        import relax_hetero as rh

        module = rh.from_onnx(model, vdevices=vdevices, placement=placement, shapes=_lengths(model, inputs))
        self.executable = rh.compile(module, cache=False)
        is_run = not os.environ.get(BUILD_ONLY_VARIABLE)
        self._machine = rh.vm.VirtualMachine(self.executable) if is_run else None

    def run(self, inputs: Sequence[Any], **kwargs: Any) -> tuple[Any, ...]:
        if self._machine is None:
            raise BuiltOnly
        result = self._machine["main"](*(value for value in inputs if value is not None))
        return _outputs(result)


def _lengths(model: onnx.ModelProto, inputs: Sequence[Any]) -> dict[str, Any] | None:
    """Shapes that the types of a model's inputs lack: the tensors of sequences, and None for empty optionals."""
    shapes: dict[str, Any] = {}
    for info, value in zip(model.graph.input, inputs, strict=False):
        if value is None:
            shapes[info.name] = None
        elif isinstance(value, (list, tuple)):
            shapes[info.name] = [list(np.shape(element)) for element in value]
    return shapes or None


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
        return HeteroRep(model, ["llvm"], None, kwargs.get("inputs", ()))

    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device == "CPU"


class TwoDeviceBackend(Backend):
    """relax_hetero with the nodes of the graph alternating between two CPU devices with different targets."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> HeteroRep:
        named, placement = deal_out(model)
        return HeteroRep(named, ["llvm", SECOND_CPU], placement, kwargs.get("inputs", ()))

    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device == "CPU"


class GpuBackend(Backend):
    """relax_hetero with everything on one NVIDIA GPU."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CUDA", **kwargs: Any) -> HeteroRep:
        return HeteroRep(model, [gpu_target()], None, kwargs.get("inputs", ()))

    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device == "CUDA"


class CpuAndGpuBackend(Backend):
    """relax_hetero with the nodes of the graph alternating between a GPU and the native CPU."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CUDA", **kwargs: Any) -> HeteroRep:
        named, placement = deal_out(model)
        gpu = gpu_target()
        devices = ["llvm", SECOND_CPU if gpu == "llvm" else gpu]
        return HeteroRep(named, devices, placement, kwargs.get("inputs", ()))

    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device == "CUDA"


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _nodes(attribute.g)
            for inner in attribute.graphs:
                yield from _nodes(inner)


def deal_out(model: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, str]]:
    """Name every node and place the nodes alternately on the second and the first device.

    The first node goes to the second device, so that a model of one node does not run on the default device.

    Returns
    -------
    A copy of the model whose nodes are called `node<i>`, and its placement.
    """
    named = onnx.ModelProto()
    named.CopyFrom(model)
    placement = {}
    for index, node in enumerate(_nodes(named.graph)):
        node.name = f"node{index}"
        placement[node.name] = "vdevice:0" if index % 2 else "vdevice:1"
    return named, placement


CONFIGURATIONS: dict[str, type[Backend]] = {
    "a": StockBackend,
    "b": OneDeviceBackend,
    "c": TwoDeviceBackend,
    "d": GpuBackend,
    "e": CpuAndGpuBackend,
}
"""Configuration letter to backend: (a) stock TVM, (b) one CPU, (c) two CPUs, (d) a GPU, (e) a GPU and a CPU."""

CPU_CONFIGURATIONS, GPU_CONFIGURATIONS = "abc", "de"
"""Configurations that run anywhere, and those that need an NVIDIA GPU."""
