"""Ops of ONNX Runtime's own domain that few models have: against it, or numpy where it has them on GPUs only."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper

import relax_hetero as rh
from device_pairs import TWO_DEVICES
from frontend.ops.contrib.contrib_nodes import Nodes


def _lstm(
    nodes: Nodes, steps: int, batch: int, directions: int, dtype: str, channels: bool, **attributes: object
) -> None:
    hidden, width = 5, 6
    sizes = (directions, 4 * hidden) if channels else (directions,)
    point = np.full(sizes, 50 if dtype == "uint8" else 0, dtype)
    scale = nodes.random.uniform(0.005, 0.01, sizes).astype("float32")
    weights = [nodes.bytes(directions, size, 4 * hidden, dtype=dtype) for size in (width, hidden)]
    nodes.add(
        "DynamicQuantizeLSTM", nodes.floats(steps, batch, width), *weights, nodes.floats(directions, 8 * hidden), None,
        nodes.floats(directions, batch, hidden), None, None, scale, point, scale, point, hidden_size=hidden, outputs=3,
        constant=(1, 2, 8, 9, 10, 11), **attributes,
    )  # fmt: skip


def test_rotations_and_inverses():
    nodes = Nodes()
    x = nodes.floats(2, 4, 12)
    nodes.add("RotaryEmbedding", x, np.array([2]), nodes.floats(8, 3), nodes.floats(8, 3))
    nodes.add("Inverse", np.stack([np.eye(4, dtype="float32")[::-1], nodes.floats(4, 4)]))
    nodes.check(["llvm"])


def test_ops_of_open_sizes():
    nodes = Nodes(is_open=True)
    nodes.add("CDist", nodes.floats(5, 4), nodes.floats(7, 4))
    nodes.add("CDist", nodes.floats(5, 4), nodes.floats(7, 4), metric="euclidean", constant=(1,))
    nodes.add(
        "SimplifiedLayerNormalization", nodes.floats(2, 12), nodes.floats(12), domain="", outputs=2, constant=(1,)
    )
    scales = np.array(0.1, "float32"), np.array(3, "uint8"), np.array(0.2, "float32"), np.array(5, "uint8")
    image, pooling = nodes.bytes(2, 5, 6, 3), {"kernel_shape": [2, 2], "strides": [2, 1], "channels_last": 1}
    nodes.add("QLinearGlobalAveragePool", image, *scales, channels_last=1, constant=(1, 2, 3, 4))
    nodes.add("QLinearAveragePool", image, *scales, **pooling, constant=(1, 2, 3, 4))
    nodes.check(["llvm"])


@pytest.mark.slow
def test_a_quantized_lstm_of_open_sizes():
    nodes = Nodes(is_open=True)
    _lstm(nodes, 3, 2, 2, "int8", False, direction="bidirectional")
    nodes.check(["llvm"])


@pytest.mark.slow
@pytest.mark.parametrize("vdevices", [["llvm"], TWO_DEVICES])
def test_the_rest(vdevices):
    nodes = Nodes()
    x, other, gate = nodes.floats(2, 4, 12), nodes.floats(2, 4, 12), nodes.floats(2, 4, 12)
    cos, sin = nodes.floats(8, 3), nodes.floats(8, 3)
    ids = np.array([[0, 1, 2, 3], [2, 3, 4, 5]])
    nodes.add("RotaryEmbedding", x, ids, cos, sin, interleaved=1)
    nodes.add("RotaryEmbedding", x, ids, nodes.floats(8, 2), nodes.floats(8, 2), num_heads=2, rotary_embedding_dim=4)
    nodes.add("RotaryEmbedding", nodes.floats(2, 3, 4, 6), ids, cos, sin)
    nodes.add("UnfoldTensor", x, size=4, dim=2, step=3)
    nodes.add("NGramRepeatBlock", np.array([[0, 1, 2, 0, 1], [3, 3, 3, 3, 3]]), nodes.floats(2, 6), ngram_size=3)
    codes, scales = nodes.bytes(5, 24), nodes.floats(5, 3)
    nodes.add(
        "MatMulBnb4",
        nodes.floats(3, 33),
        nodes.bytes(83),
        nodes.floats(11),
        K=33,
        N=5,
        block_size=16,
        quant_type=1,
        constant=(1, 2),
    )
    nodes.add("GatherBlockQuantized", codes, np.array([[4, 0]]), scales, bits=4, block_size=16, constant=(0, 2))
    codes = nodes.bytes(32, 6).astype(ml_dtypes.int4)  # an index takes a number of a block
    nodes.add(
        "GatherBlockQuantized",
        codes,
        np.array([31, -32]),
        nodes.floats(2, 6),
        quantize_axis=0,
        block_size=16,
        constant=(0, 2),
    )
    _lstm(nodes, 3, 2, 1, "int8", True)
    nodes.add("Inverse", nodes.floats(2, 3, 6, 6).astype("float64"))
    for metric in ("euclidean", "sqeuclidean"):
        nodes.add("CDist", x[0], nodes.floats(5, 12), metric=metric)
    nodes.add("ExpandDims", x, np.array([-1], "int32"), constant=(1,))
    nodes.add("Pad", x[0], np.array([[1, 0, 0, 2]]), np.array([0.5], "float32"), constant=(1,))
    nodes.add("Pad", x[0], np.array([[1, 0, 0, 2]]), mode="reflect")
    nodes.add("Unique", np.array([2, 1, 1, 3, 4, 3], "float32"), outputs=3)
    nodes.add("NGramRepeatBlock", np.array([[0, 1, 4], [3, 3, 3]]), nodes.floats(2, 6), ngram_size=1)
    nodes.add(
        "MatMulBnb4",
        nodes.floats(3, 32),
        nodes.bytes(80),
        nodes.floats(10),
        K=32,
        N=5,
        block_size=16,
        quant_type=0,
        constant=(1, 2),
    )
    for bits in (2, 4, 8):
        data, scales = nodes.bytes(5, 8 * bits), nodes.floats(5, 4)
        nodes.add("GatherBlockQuantized", data, np.array([[4, 0]]), scales, bits=bits, block_size=16, constant=(0, 2))
    points = nodes.bytes(5, 2)
    nodes.add("GatherBlockQuantized", nodes.bytes(5, 32), np.array([3]), nodes.floats(5, 4), points, block_size=16)
    _lstm(nodes, 3, 1, 2, "uint8", False, direction="bidirectional")
    _lstm(nodes, 3, 2, 1, "int8", True, direction="reverse")
    kernel, pads = nodes.floats(3, 4, 3, 3), np.array([1, 1, 1, 1])
    image, bias = nodes.floats(1, 3, 5, 5), nodes.floats(4)
    nodes.add("ConvTransposeWithDynamicPads", image, kernel, pads, bias, strides=[2, 2], constant=(2,))
    nodes.add("ScaledSiLU", x, np.array(0.3, "float32"))
    nodes.add("GatedAdd", x, other, nodes.floats(2, 4, 1))
    nodes.add("GatedRMSNorm", x, nodes.floats(4), gate)
    nodes.add("GatedRMSNorm", x, nodes.floats(12), gate, activation="sigmoid")
    nodes.add("BranchwiseRMSNorm", x, nodes.floats(12), num_branches=3)
    nodes.add("BranchwiseRMSNorm", nodes.floats(2, 3, 4), nodes.floats(4))
    words = nodes.random.integers(0, 9, (2, 4)).astype("int32")
    tables = [nodes.bytes(rows, 8) for rows in (9, 6, 2)] + [nodes.bytes(8), nodes.bytes(8)]
    scales = [np.array(0.03, "float32")] * 5
    nodes.add(
        "QEmbedLayerNormalization", words, words % 2, *tables, np.minimum(words, 1), *scales,
        *[np.array(50, "uint8")] * 5, outputs=2, epsilon=1e-5,
    )  # fmt: skip
    nodes.check(vdevices)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


def _buckets(queries: int, keys: int, count: int, max_distance: int, is_bidirectional: bool) -> np.ndarray:
    """Buckets of relative positions as T5 counts them."""
    buckets = np.zeros((queries, keys), int)
    count = count // 2 if is_bidirectional else count
    for query, key in np.ndindex(queries, keys):
        ahead, exact = key - query, count // 2
        distance = abs(ahead) if is_bidirectional else max(-ahead, 0)
        far = exact + int(np.log(max(distance, 1) / exact) / np.log(max_distance / exact) * (count - exact))
        buckets[query, key] = distance if distance < exact else min(far, count - 1)
        buckets[query, key] += count if is_bidirectional and ahead > 0 else 0
    return buckets


@pytest.mark.slow
def test_ops_that_onnxruntime_has_on_gpus_only():
    nodes, expected = Nodes(), []
    x, other, a, b = nodes.floats(2, 4, 12), nodes.floats(2, 4, 12), nodes.floats(3, 4), nodes.floats(4, 5)

    def add(want: np.ndarray, op: str, *inputs: np.ndarray, **options: object) -> None:
        nodes.add(op, *inputs, **options)
        expected.append(want.astype("float32") if want.dtype.kind == "f" else want)

    gate, up = np.minimum(x[..., :6], 0.5), np.clip(x[..., 6:], -0.5, 0.5)
    swish = {"limit": 0.5, "activation_alpha": 1.7, "activation_beta": 1.0}
    add(gate * _sigmoid(1.7 * gate) * (up + 1), "SwiGLU", x, **swish)
    add(x * _sigmoid(x) * other, "SwiGLU", x, other)
    add(np.maximum(0.5 * a @ b, 0), "FusedMatMulActivation", a, b, activation="Relu", alpha=0.5)
    add(_softmax(a @ b), "FusedMatMulActivation", a, b, activation="Softmax")
    inner = a @ b + b[0]
    add(inner / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (inner + 0.044715 * inner**3))), "GemmFastGelu", a, b, b[0])
    add(_softmax(x + other[:, :1]), "BiasSoftmax", x, other[:, :1], axis=2, is_inner_broadcast=1)
    add(x + other[0, 0] + x, "BiasDropout", x, other[0, 0], x)
    add(np.array(False), "IsAllFinite", x, np.array([np.nan], "float32"))
    add(np.array(True), "IsAllFinite", x.astype("float64") * 1e300)
    pairs = [nodes.floats(3, 2), nodes.floats(3, 2)]
    product = [pair[:, 0] + 1j * pair[:, 1] for pair in pairs]
    for op, number in (("ComplexMul", product[1]), ("ComplexMulConj", product[1].conj())):
        result = product[0] * number
        add(np.stack([result.real, result.imag], -1).astype("float32"), op, *pairs)
    data, scale, point = nodes.bytes(2, 3), np.array(0.1, "float32"), np.array(3, "uint8")
    mean = np.round((data.astype("float32") - 3).mean(1) * np.float32(0.1) / np.float32(0.2)) + 3
    attributes = {"axes": [1], "keepdims": 0}
    half = np.array(0.2, "float32")
    add(mean.astype("uint8"), "QLinearReduceMean", data, scale, point, half, point, **attributes)
    add(data.sum(1, dtype="uint32"), "ReduceSumInteger", data, **attributes)
    add((data.astype("int32") - 3) * (data[0].astype("int32") - 3), "MulInteger", data, point, data[0], point)
    table = nodes.floats(8, 3)
    for flag in (0, 1):
        values = table.reshape(3, 8)[:, _buckets(30, 25, 8, 20, bool(flag))][None]
        options = {"max_distance": 20, "is_bidirectional": flag, "constant": (1, 2)}
        add(values, "RelativePositionBias", table, np.array([30]), np.array([25]), **options)
    query, bias, positions, gates = nodes.floats(2, 4, 6), nodes.floats(6), nodes.floats(1, 2, 4, 4), nodes.floats(3, 8)
    parts = (query + bias).reshape(2, 4, 2, 3).transpose(0, 2, 1, 3) @ gates + nodes.floats(8) * 0 + gates[0]
    u, r = np.split(_sigmoid(parts.reshape(2, 2, 4, 2, 4).sum(-1)), 2, -1)
    factor = nodes.floats(1, 2, 1, 1)
    want = (u * (r * factor - 1) + 2) * positions
    add(want, "GatedRelativePositionBias", query, bias, positions, gates, gates[0], factor, num_heads=2)
    nodes.check(["llvm"], expected)


def test_forms_that_cannot_be_imported_are_refused():
    x = np.ones((2, 4, 12), "float32")
    for op, inputs, attributes, match in (
        ("CDist", [x[0], x[0]], {"metric": "cosine"}, "metric 'cosine'"),
        ("Inverse", [x], {}, "expected square matrices"),
        ("UnfoldTensor", [x], {"size": 13}, "shorter than its size 13"),
        ("RotaryEmbedding", [x, np.array([0]), x[0], x[0]], {"scale": 2.0}, "scales cannot be imported"),
        ("GatedAdd", [x, x, x[..., :1], x[0, 0, :1, None]], {}, "gate_weight"),
    ):
        nodes = Nodes()
        nodes.add(op, *inputs, **attributes)
        model = nodes.model()
        model.graph.output[0].type.CopyFrom(helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, None))
        with pytest.raises(rh.FrontendError, match=match):
            rh.from_onnx(model)
