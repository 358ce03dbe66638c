"""PyTorch on a PyTorch network, compiled by inductor with ``mode="max-autotune"``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_bench.networks import build

from . import Inputs, Session, Setting


def load(model: str, file: str, inputs: Inputs, setting: Setting) -> Session:
    """The network that the ONNX file is named after, compiled for its sizes."""
    return session(model, setting, lambda module: torch.compile(module, mode="max-autotune", dynamic=False))


def session(model: str, setting: Setting, compiled: Callable[[Any], Any]) -> Session:
    """Calls of the network, whose module `compiled` converts."""
    setting.only_float32()
    torch.set_num_threads(setting.threads)
    module, arguments = build(Path(model).stem)
    program = compiled(module)
    outputs: list[Any] = []

    def call() -> None:
        with torch.inference_mode():
            outputs[:] = [program(*arguments)]

    def results() -> list[np.ndarray]:
        return [tensor.numpy() for tensor in torch.utils._pytree.tree_leaves(outputs)]

    return Session(call, results)
