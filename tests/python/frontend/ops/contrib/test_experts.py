"""Mixtures of experts against ONNX Runtime, and against numpy in float64 where it has them on GPUs only."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import relax_hetero as rh
from device_pairs import TWO_DEVICES
from frontend.ops.contrib.contrib_nodes import MICROSOFT, Nodes
from seeds import fresh_rng

ROWS, EXPERTS, WIDTH, INNER = 6, 4, 32, 16


class Experts(Nodes):
    """Nodes of MoE and QMoE."""

    def mix(self, is_batched: bool = False, **more: Any) -> None:
        columns = INNER * (2 if more.get("swiglu_fusion") else 1)
        x = self.floats(2, ROWS // 2, WIDTH) if is_batched else self.floats(ROWS, WIDTH)
        layers = [
            part
            for shape in ((columns, WIDTH), (WIDTH, INNER))
            for part in (self.floats(EXPERTS, *shape), self.floats(EXPERTS, shape[0]))
        ]
        self.add("MoE", x, self.floats(ROWS, EXPERTS) * 3, *layers, constant=(2, 3, 4, 5), **more)

    def mix_bits(self, bits: int, block: int, zeros: bool, **more: Any) -> None:
        columns = INNER * (2 if more.get("swiglu_fusion") else 1)
        layers, points = [], []
        for rows, depth in ((columns, WIDTH), (WIDTH, INNER)):
            codes = self.random.integers(0, 256, (EXPERTS, rows, depth * bits // 8), dtype=np.uint8)
            blocks = depth // block if block else 1
            scales = self.floats(EXPERTS, rows, blocks) * 2.0**-bits
            layers += [codes, scales.astype("float32") if block else scales[..., 0], self.floats(EXPERTS, rows)]
            sizes = (rows, -(-blocks * bits // 8)) if block else (rows * bits // 8,)
            points.append(self.random.integers(0, 256, (EXPERTS, *sizes), dtype=np.uint8) if zeros else None)
        inputs = [self.floats(ROWS, WIDTH), self.floats(ROWS, EXPERTS) * 3, *layers, *[None] * 3, *points]
        while inputs[-1] is None:
            inputs.pop()
        indices = [index for index in range(2, len(inputs)) if inputs[index] is not None]
        attributes = {"expert_weight_bits": bits, "normalize_routing_weights": 1, **more}
        self.add("QMoE", *inputs, constant=indices, **attributes, **({"block_size": block} if block else {}))


def test_experts_of_a_few_bits_compute_the_rows_that_chose_them():
    nodes = Experts()
    nodes.mix_bits(4, 16, True, k=2, activation_type="silu")
    model = nodes.model()
    model.graph.output[0].type.CopyFrom(helper.make_tensor_type_proto(1, None))
    executable = rh.compile(rh.from_onnx(model))
    kernels = [call for call in executable.metadata.fusions["dispatches"] if call["precision"] == "int4*f32"]
    assert [call["ops"][0] for call in kernels] == ["block_matmul"] * 2
    (actual,) = [rh.vm.VirtualMachine(executable)["main"](**nodes.feeds).numpy()]
    values = {**nodes.feeds, **nodes.weights}
    x, logits = values["x0_0"].astype("float64"), values["x0_1"].astype("float64")
    layers = []
    for first, point in ((2, 11), (5, 12)):
        codes, scales, bias, packed = (values[f"x0_{index}"] for index in (first, first + 1, first + 2, point))
        fields = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:2], -1).astype("float64")
        points = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:2], -1)[..., : scales.shape[-1]]
        layers.append(((fields - np.repeat(points, 16, -1)) * np.repeat(scales, 16, -1), bias.astype("float64")))
    expected = np.zeros_like(x)
    for row, scores in enumerate(logits):
        chosen = np.argsort(-scores)[:2]
        for expert, share in zip(chosen, np.exp(scores[chosen]) / np.exp(scores[chosen]).sum(), strict=True):
            (first, first_bias), (second, second_bias) = layers
            gate = first[expert] @ x[row] + first_bias[expert]
            expected[row] += share * (second[expert] @ (gate * sigmoid(gate)) + second_bias[expert])
    np.testing.assert_allclose(actual, expected, 1e-4, 1e-4)


# Kernels of a few bits round activations to 16 bits: 1.6e-5 of the largest in a block (docs/explanation/precision.md).
ROUNDED = 1e-4
SWIGLU = {"activation_type": "swiglu", "swiglu_fusion": 1}


@pytest.mark.slow
def test_a_few_of_them():
    nodes = Experts()
    nodes.mix(k=2, activation_type="silu", normalize_routing_weights=1, is_batched=True)
    nodes.mix_bits(4, 16, True, k=2, **SWIGLU)
    nodes.check(["llvm"], atol=ROUNDED)


@pytest.mark.slow
@pytest.mark.parametrize("vdevices", [["llvm"], TWO_DEVICES])
def test_all_that_onnx_runtime_has(vdevices):
    nodes = Experts()
    for activation in ("relu", "gelu", "identity"):
        nodes.mix(k=2, activation_type=activation)
    nodes.mix(k=3, **SWIGLU, activation_alpha=1.7, activation_beta=1.0, swiglu_limit=1.0)
    for bits in (2, 4):
        nodes.mix_bits(bits, 16, False, k=2, **SWIGLU)
    for bits in (4, 8):
        nodes.mix_bits(bits, 0, bits == 4, k=2, activation_type="silu")
    nodes.check(vdevices, atol=ROUNDED)


def sparse_mixer(logits: np.ndarray) -> np.ndarray:
    """Weights of the two best experts of every row, as Phi 3.5 has them."""
    result = np.zeros_like(logits)
    for row, scores in enumerate(logits):
        rest = scores.copy()
        for _ in range(2):
            best = int(rest.argmax())
            is_near = (rest[best] - scores) / np.maximum(np.abs(scores), rest[best]) <= 0.02
            powers = np.where(is_near & np.isfinite(rest), np.exp(rest - rest[best]), 0)
            result[row, best] = powers[best] / powers.sum()
            rest[best] = -np.inf
    return result


def best_two(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    shares = powers / powers.sum(-1, keepdims=True)
    return np.where(logits >= np.sort(logits)[:, -2:-1], shares, 0)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize(
    ("options", "is_third", "activate", "mix"),
    [
        ({"activation_type": "silu", "use_sparse_mixer": 1}, True, lambda g, x: g * sigmoid(g) * x, sparse_mixer),
        pytest.param(
            {"activation_type": "geglu", "swiglu_fusion": 2}, False, lambda g, x: gelu(g) * x, best_two,
            marks=pytest.mark.slow,
        ),
        pytest.param({"activation_type": "relu2"}, True, lambda g, x: np.maximum(g, 0) ** 2 * x, best_two,
                     marks=pytest.mark.slow),
        pytest.param(
            {"activation_type": "swiglu", "swiglu_fusion": 0, "swiglu_limit": 0.5, "swiglu_limit_after_activation": 1},
            True, lambda g, x: np.minimum(g * sigmoid(g), 0.5) * np.clip(x, -0.5, 0.5), best_two,
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_forms_of_gpus(options, is_third, activate, mix):
    rng, is_fused = fresh_rng(), bool(options.get("swiglu_fusion"))
    layers = {"w1": (INNER * (1 + is_fused), WIDTH), "w2": (WIDTH, INNER)} | (
        {"w3": (INNER, WIDTH)} if is_third else {}
    )
    weights = {name: rng.uniform(-1, 1, (EXPERTS, *shape)).astype("float32") for name, shape in layers.items()}
    x, logits = rng.standard_normal((ROWS, WIDTH)), rng.uniform(1, 1.05, (ROWS, EXPERTS))
    feeds = {"x": x.astype("float32"), "router": logits.astype("float32")}
    names = ["x", "router", "w1", "", "w2", *(["", "w3"] if is_third else [])]
    node = helper.make_node("MoE", names, ["y"], "mix", domain=MICROSOFT, k=2, **options)
    graph = helper.make_graph(
        [node],
        "mixture",
        [helper.make_tensor_value_info(name, 1, ["rows", value.shape[1]]) for name, value in feeds.items()],
        [helper.make_tensor_value_info("y", 1, None)],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    actual = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))["main"](**feeds).numpy()

    shares, expected = mix(feeds["router"].astype("float64")), np.zeros((ROWS, WIDTH))
    for expert in range(EXPERTS):
        own = {name: value[expert].astype("float64") for name, value in weights.items()}
        gate = feeds["x"] @ own["w1"].T
        gate, linear = np.split(gate, 2, -1) if is_fused else (gate, feeds["x"] @ own["w3"].T)
        expected += shares[:, expert : expert + 1] * (activate(gate, linear) @ own["w2"].T)
    np.testing.assert_allclose(actual, expected, 1e-4, 1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quant_type": "fp8"}, "quant_type 'fp8', expected 'int'"),
        ({"weights_prepacked": 1}, "weights_prepacked=1"),
        ({"expert_weight_bits": 3}, "weights of 3 bits"),
        ({"k": 9}, "found k 9, expected 1 to its 4 experts"),
        ({"activation_type": "tanh"}, "activation_type 'tanh' is unknown"),
    ],
)
def test_refused_forms(options, message):
    nodes = Experts()
    nodes.mix_bits(4, 16, False)
    model: onnx.ModelProto = nodes.model()
    node = model.graph.node[0]
    remaining = [attribute for attribute in node.attribute if attribute.name not in options]
    del node.attribute[:]
    node.attribute.extend([*remaining, *(helper.make_attribute(name, value) for name, value in options.items())])
    model.graph.output[0].type.CopyFrom(helper.make_tensor_type_proto(1, None))
    with pytest.raises(rh.FrontendError, match=f"QMoE node 'node0': .*{message}"):
        rh.from_onnx(model)
