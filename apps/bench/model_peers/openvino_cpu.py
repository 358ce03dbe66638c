"""OpenVINO: the CPU plugin in float32, hinted for latency; tensors set once."""

from __future__ import annotations

import numpy as np
import openvino as ov

from . import Inputs, Session


def load(model: str, file: str, inputs: Inputs, threads: int) -> Session:
    """The file is read, optimized and compiled when the session is made."""
    core = ov.Core()
    graph = core.read_model(model)
    names = [port.any_name for port in graph.inputs]
    graph.reshape({port: list(inputs[name].shape) for port, name in zip(graph.inputs, names, strict=True)})
    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
    }
    compiled = core.compile_model(graph, "CPU", settings)
    request = compiled.create_infer_request()
    operands = [ov.Tensor(inputs[name], shared_memory=True) for name in names]
    for index, operand in enumerate(operands):
        request.set_input_tensor(index, operand)

    def results() -> list[np.ndarray]:
        return [np.array(request.get_output_tensor(index).data) for index in range(len(compiled.outputs))]

    # The request keeps none of these alive.
    alive = (core, graph, compiled, operands)
    return Session(lambda alive=alive: request.infer(share_outputs=True), results)
