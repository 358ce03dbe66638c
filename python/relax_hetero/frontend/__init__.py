"""Front ends: models of other formats become placed Relax modules."""

from .onnx import from_onnx

__all__ = ["from_onnx"]
