"""LSTM of ONNX Runtime's quantizer: quantized weights, data and states quantized in each step."""

from __future__ import annotations

import numpy as np
from tvm import relax

from ..node import Node, const
from ..recurrent import QUANTIZES, recurrent
from ..table import MICROSOFT, converts


def as_lstm(node: Node) -> Node:
    """Convert to a standard LSTM with dequantized weights, which rounds its operands.

    Raises FrontendError if weights, scales or zero points are not constant, or do not match.
    """
    weights = [_floats(node, index, scale) for index, scale in ((1, 8), (2, 10))]
    inputs = [node.inputs[0], *weights, *node.inputs[3:8]]
    attributes = {name: value for name, value in node.attributes.items() if name != "tvm_custom"}
    lstm = node.as_op("LSTM", inputs, 14, **attributes, **{QUANTIZES: 1})
    lstm.num_outputs = node.num_outputs
    return lstm


def _floats(node: Node, index: int, scale: int) -> relax.Expr:
    """Dequantize input `index`, [directions, input size, 4 * hidden], in the standard op's layout."""
    arrays = [node.constant(place) for place in (index, scale, scale + 1)]
    data, factor, point = arrays
    if data is None or factor is None or (point is None and node.has(scale + 1)):
        raise node.refusal(f"input {index}, its scale or its zero point is computed when the model runs")
    if data.ndim != 3 or factor.size not in (data.shape[0], data.shape[0] * data.shape[2]):
        raise node.refusal(f"input {index} of shape {list(data.shape)} has {factor.size} scales")
    shifted = data.astype("int32")
    if point is not None:
        shifted = shifted - point.astype("int32").reshape(data.shape[0], 1, -1)
    numbers = shifted.astype("float32") * factor.astype("float32").reshape(data.shape[0], 1, -1)
    return const(np.ascontiguousarray(numbers.transpose(0, 2, 1)))


@converts("DynamicQuantizeLSTM", domain=MICROSOFT)
def dynamic_quantize_lstm(node: Node) -> relax.Expr:
    """Quantized LSTM, computed in float32, which is exact up to the last bits."""
    return recurrent(as_lstm(node))
