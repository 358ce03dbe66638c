"""Converters of single ONNX ops that are tried before stock TVM's, by op type."""

from __future__ import annotations

# Each of these registers the converters it defines.
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
"""Domain and op type to converter, in stock TVM's form: `get_converter(opset)(builder, inputs, attributes, scope)`."""
