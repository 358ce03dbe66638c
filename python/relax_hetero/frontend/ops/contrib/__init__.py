"""Converters of ops of ONNX Runtime's domain, ``com.microsoft``."""

from __future__ import annotations

# Importing a module registers its converters.
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
