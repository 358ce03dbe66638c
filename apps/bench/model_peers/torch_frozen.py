"""PyTorch on a PyTorch network, compiled as in `torch_compiled`, with weights as constants that are packed ahead."""

from __future__ import annotations

import torch

from . import Inputs, Session, Setting
from .torch_compiled import session


def load(model: str, file: str, inputs: Inputs, setting: Setting) -> Session:
    """The network that the ONNX file is named after; inductor freezes weights in inference mode."""
    options = {**torch._inductor.list_mode_options("max-autotune"), "freezing": True}
    return session(model, setting, lambda module: torch.compile(module, options=options, dynamic=False))
