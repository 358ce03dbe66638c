"""Converters of ops of ONNX Runtime's domain, ``com.microsoft``."""

from __future__ import annotations

# Importing a module registers its converters.
from . import (  # noqa: F401
    contrib_activations,
    contrib_attention,
    contrib_block_weights,
    contrib_moving,
    contrib_normalization,
    contrib_products,
    contrib_recurrent,
    experts,
    grouped_attention,
    matrices,
    position_biases,
    quantized_ops,
)
