"""OpenVINO: the CPU plugin with a hint for latency and one for the precision; tensors set once."""

from __future__ import annotations

from collections import Counter

import numpy as np
import openvino as ov

from . import PRECISIONS, Inputs, Session, Setting

_PRODUCTS = ("Convolution", "Deconvolution", "FullyConnected", "MatMul", "ScaledDotProductAttention")


def load(model: str, file: str, inputs: Inputs, setting: Setting) -> Session:
    """Make a session, which reads, optimizes and compiles the file."""
    core = ov.Core()
    graph = core.read_model(model)
    names = [port.any_name for port in graph.inputs]
    graph.reshape({port: list(inputs[name].shape) for port, name in zip(graph.inputs, names, strict=True)})
    settings = {
        "INFERENCE_NUM_THREADS": setting.threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": PRECISIONS[setting.precision],
    }
    compiled = core.compile_model(graph, "CPU", settings)
    request = compiled.create_infer_request()
    operands = [ov.Tensor(inputs[name], shared_memory=True) for name in names]
    for index, operand in enumerate(operands):
        request.set_input_tensor(index, operand)

    def results() -> list[np.ndarray]:
        return [np.array(request.get_output_tensor(index).data) for index in range(len(compiled.outputs))]

    # The request does not keep these alive.
    alive = (core, graph, compiled, operands)
    return Session(lambda alive=alive: request.infer(share_outputs=True), results, products=_products(compiled))


def _products(compiled: ov.CompiledModel) -> dict[str, int]:
    """The number of executed layers with products, by precision."""
    layers = [node.get_rt_info() for node in compiled.get_runtime_model().get_ops()]
    kinds = [(layer["layerType"].astype(str), layer["runtimePrecision"].astype(str)) for layer in layers]
    return dict(Counter(precision for kind, precision in kinds if kind in _PRODUCTS))
