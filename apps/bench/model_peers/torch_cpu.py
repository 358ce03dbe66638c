"""torch: the graph node by node in eager ops, then traced, frozen and optimized for inference (oneDNN)."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import torch

from . import FLOAT32, Inputs, Session, Setting
from .torch_graph import Runner


def load(model: str, file: str, inputs: Inputs, setting: Setting) -> Session:
    """The traced graph on tensors; `Unsupported` if a node lacks a translation."""
    torch.set_num_threads(setting.threads)
    runner = Runner(onnx.load(model)).eval()
    operands = [torch.from_numpy(array) for array in inputs.values()]
    note = "traced, frozen, optimize_for_inference"
    lower = torch.autocast(
        "cpu", getattr(torch, setting.precision), enabled=setting.precision != FLOAT32, cache_enabled=False
    )
    with torch.inference_mode(), lower, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runner(*operands)  # unsupported nodes raise here, not in the tracer
        program = torch.jit.optimize_for_inference(torch.jit.freeze(torch.jit.trace(runner, operands)))
        for _ in range(2):  # its executor specializes in the first calls
            program(*operands)
    outputs: list[torch.Tensor] = []

    def call() -> None:
        with torch.inference_mode():
            outputs[:] = program(*operands)

    def results() -> list[np.ndarray]:
        return [output.float().numpy() for output in outputs]

    return Session(call, results, note)
