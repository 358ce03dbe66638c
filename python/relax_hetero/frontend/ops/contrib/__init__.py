"""Converters of ops of ONNX Runtime's own domain, ``com.microsoft``."""

from __future__ import annotations

# Each of these registers the converters it defines.
from . import (  # noqa: F401
    activations,
    attention,
    block_weights,
    experts,
    grouped_attention,
    matrices,
    moving,
    normalization,
    position_biases,
    products,
    quantized_ops,
    recurrent,
)
