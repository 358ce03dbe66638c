"""Converters of ops of ONNX Runtime's own domain, ``com.microsoft``."""

from __future__ import annotations

# Each of these registers the converters it defines.
from . import (  # noqa: F401
    activations,
    attention,
    convolution,
    normalization,
    products,
    quantized_ops,
    removed,
    same_as_standard,
)
