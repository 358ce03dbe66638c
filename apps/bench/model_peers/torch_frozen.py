"""PyTorch on a network of its own, compiled as `torch_compiled`, with weights as constants that are packed before."""

from __future__ import annotations

import torch

from . import Inputs, Session, Setting
from .torch_compiled import session


def load(model: str, file: str, inputs: Inputs, setting: Setting) -> Session:
    """The network that the ONNX file is named for; inductor freezes what is called in inference mode."""
    options = {**torch._inductor.list_mode_options("max-autotune"), "freezing": True}
    return session(model, setting, lambda module: torch.compile(module, options=options, dynamic=False))
