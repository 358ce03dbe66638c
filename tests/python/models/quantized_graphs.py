"""Small float networks, and what ONNX Runtime's quantizer makes of them."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

BENCH = Path(__file__).parents[3] / "apps" / "bench"
sys.path.append(str(BENCH))  # after the tests' folder, which has a package `models`, too

from model_zoo import random_inputs  # noqa: E402 (found in the benchmark)
from model_zoo.graph import Graph  # noqa: E402
from requantizations import cut_model, differences, reference  # noqa: E402

__all__ = ["cut_model", "differences", "reference"]

QDQ, QOPERATOR = QuantFormat.QDQ, QuantFormat.QOperator
U8, S8 = QuantType.QUInt8, QuantType.QInt8


def residual_network() -> onnx.ModelProto:
    """Odd images and channels: a stem of 3 channels, a grouped and a depthwise layer, a residual, pooling, a Gemm."""
    graph = Graph("residual")
    x = graph.node("Relu", graph.conv(graph.input("image", (2, 3, 15, 17)), 21, 3, stride=2, norm=True))
    y = graph.node("Relu", graph.conv(x, 21, 3, groups=3))
    y = graph.conv(graph.node("Clip", graph.conv(y, 21, 3, groups=21), graph.constant(0.0), graph.constant(6.0)), 21, 1)
    x = graph.node("Relu", graph.node("Add", x, y))
    x = graph.concat(graph.pool("MaxPool", x, 3, 2, 1), graph.pool("AveragePool", x, 3, 2, 1))
    return graph.model(graph.classifier(x, classes=13))


def gated_network() -> onnx.ModelProto:
    """Squeeze and excitation, activations other than ReLU, channels last in between."""
    graph = Graph("gated")
    x = graph.conv(graph.input("image", (1, 8, 9, 11)), 12, 3)
    x = graph.node("Mul", x, graph.node("Sigmoid", x))
    gate = graph.node("Sigmoid", graph.conv(graph.node("GlobalAveragePool", x), 12, 1))
    x = graph.node("LeakyRelu", graph.node("Mul", x, gate), alpha=0.2)
    return graph.model(graph.node("Transpose", x, perm=[0, 2, 3, 1]))


def encoder_layer() -> onnx.ModelProto:
    """Attention with heads, layer norms, GELU."""
    graph, batch, sequence, width, heads = Graph("encoder"), 2, 19, 24, 3
    x = graph.input("x", (batch, sequence, width))

    def head(perm: list[int]) -> str:
        split = graph.node("Reshape", graph.linear(x, width, width), graph.shape(0, 0, heads, width // heads))
        return graph.node("Transpose", split, perm=perm)

    scores = graph.node("Mul", graph.node("MatMul", head([0, 2, 1, 3]), head([0, 2, 3, 1])), graph.constant(0.35))
    context = graph.node("MatMul", graph.node("Softmax", scores, axis=-1), head([0, 2, 1, 3]))
    merged = graph.node("Reshape", graph.node("Transpose", context, perm=[0, 2, 1, 3]), graph.shape(0, 0, width))
    y = graph.layer_norm(graph.node("Add", graph.linear(merged, width, width), x), width)
    z = graph.linear(graph.gelu(graph.linear(y, width, 40)), 40, width)
    return graph.model(graph.layer_norm(graph.node("Add", z, y), width))


class _Feeds(CalibrationDataReader):
    def __init__(self, feeds: list[dict[str, np.ndarray]]) -> None:
        self._feeds = iter(feeds)

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._feeds, None)


def quantized(make: Callable[[], onnx.ModelProto], dynamic: bool = False, **options: Any) -> onnx.ModelProto:
    """A network after `quantize_static` with these options, calibrated with random inputs, or `quantize_dynamic`."""
    with tempfile.TemporaryDirectory() as folder:
        plain, prepared, target = (Path(folder) / f"{name}.onnx" for name in ("plain", "prepared", "quantized"))
        onnx.save(make(), plain)
        quant_pre_process(plain, prepared, skip_symbolic_shape=True)
        if dynamic:
            quantize_dynamic(prepared, target, **options)
        else:
            feeds = [random_inputs(plain, {}, seed) for seed in range(1, 4)]
            quantize_static(prepared, target, _Feeds(feeds), **options)
        return onnx.load(str(target))


def inputs_of(model: onnx.ModelProto, seed: int) -> dict[str, np.ndarray]:
    """Random inputs."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(model, path)
        return random_inputs(path, {}, seed)
