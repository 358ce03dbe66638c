"""Converters of single ONNX ops, which take precedence over stock TVM's."""

from __future__ import annotations

# Importing a module registers its converters.
from . import (  # noqa: F401
    activations,
    block_weights,
    classical,
    contrib,
    convolution,
    detection,
    elementwise,
    gathering,
    moving,
    normalization,
    pooling,
    preview,
    products,
    quantization,
    random,
    recurrent,
    reductions,
    resizing,
    sequences,
    shapes,
    signal,
    slicing,
)
from .table import Converter, OpKey, converters

CONVERTERS: dict[OpKey, Converter] = converters()
"""(domain, op type) -> converter in stock TVM's form: `get_converter(opset)(builder, inputs, attributes, scope)`."""
