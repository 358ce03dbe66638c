"""Converters of single ONNX ops that are tried before stock TVM's, by op type."""

from __future__ import annotations

# Each of these registers the converters it defines.
from . import (  # noqa: F401
    activations,
    block_weights,
    convolution,
    detection,
    elementwise,
    gathering,
    moving,
    normalization,
    pooling,
    products,
    quantization,
    quantized_ops,
    recurrent,
    reductions,
    resizing,
    sequences,
    shapes,
    slicing,
)
from .table import Converter, converters

CONVERTERS: dict[str, Converter] = converters()
"""Op type to converter, in the form of stock TVM's: `get_converter(opset)(builder, inputs, attributes, scope)`."""
