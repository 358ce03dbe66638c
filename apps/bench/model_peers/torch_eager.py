"""PyTorch on a PyTorch network, op by op."""

from __future__ import annotations

from . import Inputs, Session, Setting
from .torch_compiled import session


def load(model: str, file: str, inputs: Inputs, setting: Setting) -> Session:
    """The network that the ONNX file is named after."""
    return session(model, setting, lambda module: module)
