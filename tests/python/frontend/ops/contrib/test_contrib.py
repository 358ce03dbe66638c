"""Ops of ONNX Runtime's own domain against ONNX Runtime: many nodes in one model, on one device and on two."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

import relax_hetero as rh
from device_pairs import TWO_DEVICES
from frontend.ops.contrib.contrib_nodes import MICROSOFT, Nodes
from relax_hetero.frontend.ops import CONVERTERS


@pytest.mark.slow
@pytest.mark.parametrize("vdevices", [["llvm"], TWO_DEVICES])
def test_attention(vdevices):
    nodes = Nodes()
    x, weight, bias = nodes.floats(2, 4, 8), nodes.floats(8, 24), nodes.floats(24)
    mask = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], "int32")
    past = nodes.floats(2, 2, 2, 3, 4)
    for form in (
        None,
        mask,
        mask.sum(1, dtype="int32"),
        np.array([3, 4, 0, 1], "int32"),
        mask[:, None] * mask[:, ::-1, None],
    ):
        nodes.add("Attention", x, weight, bias, form, num_heads=2)
    nodes.add("Attention", x, weight, bias, mask, num_heads=2, unidirectional=1)
    nodes.add("Attention", x, weight, bias, None, past, num_heads=2, unidirectional=1, outputs=2)
    nodes.add("Attention", x, weight, bias, None, None, nodes.floats(2, 2, 4, 4), num_heads=2, scale=0.3)
    nodes.add("Attention", x, nodes.floats(8, 28), nodes.floats(28), num_heads=2, qkv_hidden_sizes=[8, 8, 12])
    nodes.add("MultiHeadAttention", x, nodes.floats(2, 5, 8), nodes.floats(2, 5, 12), num_heads=2)
    nodes.add("MultiHeadAttention", x, x, x, bias, mask, num_heads=2)
    nodes.add("MultiHeadAttention", x, x, x, bias, None, None, past[0], past[1], num_heads=2, outputs=3)
    nodes.check(vdevices)


@pytest.mark.parametrize("vdevices", [["llvm"], pytest.param(TWO_DEVICES, marks=pytest.mark.slow)])
def test_fused_ops(vdevices):
    nodes = Nodes()
    x, vector = nodes.floats(2, 3, 8), nodes.floats(8)
    nodes.add("Gelu", x)
    for op in ("FastGelu", "BiasGelu"):
        nodes.add(op, x, vector)
    nodes.add("QuickGelu", x, alpha=1.3)
    nodes.add("FusedMatMul", nodes.floats(2, 5, 3, 4), nodes.floats(2, 5, 6, 4), transB=1, alpha=0.5)
    nodes.add("FusedMatMul", nodes.floats(3, 2, 5, 4), nodes.floats(2, 5, 3, 6), transBatchA=1, transA=1)
    nodes.add("FusedGemm", x[0], nodes.floats(8, 5), nodes.floats(5), activation="LeakyRelu", activation_alpha=0.2)
    image, kernel = nodes.floats(1, 3, 8, 8), nodes.floats(4, 3, 3, 3)
    nodes.add("FusedConv", image, kernel, nodes.floats(4), nodes.floats(1, 4, 6, 6), activation="Relu")
    nodes.add("FusedConv", image, kernel, activation="Clip", activation_params=[0.0, 0.5])
    nodes.add("FusedConv", image, kernel, activation="HardSigmoid", activation_params=[0.3, 0.5], strides=[2, 2])
    nodes.add("SkipLayerNormalization", x, x[::-1].copy(), vector, vector, vector, epsilon=1e-5)
    nodes.add("SkipLayerNormalization", x, x[0], vector, epsilon=1e-5)
    nodes.add("SkipSimplifiedLayerNormalization", x, x, vector, vector, epsilon=1e-5)
    nodes.add("SimplifiedLayerNormalization", x, vector, domain="", epsilon=1e-5, axis=-1)
    ids = nodes.random.integers(0, 10, (2, 4)).astype("int32")
    tables = [nodes.floats(rows, 8) for rows in (10, 6, 2)]
    nodes.add("EmbedLayerNormalization", ids, ids % 2, *tables, vector, vector, np.minimum(ids, 1), outputs=3)
    nodes.add("Trilu", x, upper=0)
    mask = np.array([[1, 1, 1], [1, 1, 0]], "int32")
    nodes.add("Attention", x, nodes.floats(8, 24), nodes.floats(24), mask, num_heads=2, unidirectional=1)
    nodes.add("GatherND", x[0], np.array([[1, 2], [0, 3]]))
    nodes.add("NhwcMaxPool", nodes.bytes(1, 8, 8, 3), kernel_shape=[2, 2], strides=[2, 2])
    scales = [np.array(value, "float32") for value in (0.02, 0.01, 0.05)]
    points = [np.array(value, "uint8") for value in (12, 0, 10)]
    nodes.add(
        "QLinearConv", nodes.bytes(1, 8, 8, 3), scales[0], points[0], nodes.bytes(4, 3, 3, 3), scales[1], points[1],
        scales[2], points[2], channels_last=1,
    )  # fmt: skip
    nodes.add(
        "QAttention", nodes.bytes(2, 4, 8), nodes.bytes(8, 24, dtype="int8"), nodes.floats(24), scales[1], scales[1],
        None, points[0], np.array(2, "int8"), num_heads=2,
    )  # fmt: skip
    nodes.check(vdevices)


@pytest.mark.parametrize("vdevices", [["llvm"], pytest.param(TWO_DEVICES, marks=pytest.mark.slow)])
def test_places_in_images(vdevices):
    nodes = Nodes()
    image = nodes.floats(2, 3, 7, 9)
    nodes.add("GridSample", image, nodes.floats(2, 4, 5, 2), mode="bicubic", padding_mode="border")
    regions = np.array([[0.1, 0.2, 0.8, 0.9], [0.5, 0.5, 1.2, 1.3], [0.9, 0.1, 0.2, 0.7]], "float32")
    for mode, size in (("bilinear", [4, 5]), ("nearest", [1, 3])):
        crops = np.array([0, 1, 1], "int32"), np.array(size, "int32")
        nodes.add("CropAndResize", image, regions, *crops, mode=mode, extrapolation_value=2.5)
    nodes.check(vdevices)


def _typed(nodes: Nodes) -> onnx.ModelProto:
    model = nodes.model()
    for info in model.graph.output:
        info.type.CopyFrom(helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, None))
    return model


@pytest.mark.slow
def test_packed_and_separate_operands_of_attention_agree():  # ONNX Runtime has them on GPUs only
    nodes = Nodes()
    packed = nodes.floats(2, 4, 2, 3, 4)
    unpacked = [np.ascontiguousarray(packed[:, :, :, i]).reshape(2, 4, 8) for i in range(3)]
    nodes.add("MultiHeadAttention", *unpacked, num_heads=2)
    nodes.add("MultiHeadAttention", packed, num_heads=2)
    nodes.add("MultiHeadAttention", unpacked[0], np.ascontiguousarray(packed[:, :, :, 1:]), num_heads=2)
    main = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(_typed(nodes))))["main"]
    first, *rest = [result.numpy() for result in main(**nodes.feeds)]
    for other in rest:
        np.testing.assert_allclose(other, first, 1e-5, 1e-6)


def test_unknown_ops_of_the_domain_are_refused_by_name():
    nodes = Nodes()
    nodes.add("BifurcationDetector", nodes.floats(2))
    with pytest.raises(rh.HeteroError, match="BifurcationDetector.*com.microsoft"):
        rh.from_onnx(_typed(nodes))


def test_a_name_in_two_domains_is_two_ops():
    converters = {domain: CONVERTERS[domain, "Attention"] for domain in ("", MICROSOFT)}
    assert converters[""] != converters[MICROSOFT]
    assert ("", "QGemm") not in CONVERTERS
