"""Chains and ops of whole models on a GPU, and cut over the GPU and the CPU, against the CPU's numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import relax_hetero as rh
from models.running import GPU, assert_both_devices_hold_ops, assert_same, needs_gpu, outputs_of

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "apps" / "onnx_backend"))

pytestmark = [pytest.mark.gpu, needs_gpu]


MAKERS: list[Callable[[Build], None]] = []
SAMPLE = 12
"""Tests that share a sample of ONNX's suite."""


class Build:
    """A graph under construction, with its inputs."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.inputs: dict[str, np.ndarray] = {}
        self.outputs: list[str] = []

    def input(self, *shape: int, dtype: str = "float32") -> str:
        return self.argument(self.rng.standard_normal(shape).astype(dtype))

    def argument(self, array: np.ndarray) -> str:
        name = f"x{len(self.inputs)}"
        self.inputs[name] = array
        return name

    def constant(self, array: object, dtype: str = "float32") -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(array, dtype), name))
        return name

    def weight(self, *shape: int, scale: float = 1.0) -> str:
        return self.constant(self.rng.standard_normal(shape) * scale)

    def node(self, op: str, *inputs: str, is_output: bool = False, **attributes: object) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name=name, **attributes))
        if is_output:
            self.outputs.append(name)
        return name

    def model(self, opset: int = 18) -> onnx.ModelProto:
        outputs = self.outputs or [self.nodes[-1].output[0]]
        inputs = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in self.inputs.items()
        ]
        empty = [helper.make_empty_tensor_value_info(name) for name in outputs]
        graph = helper.make_graph(self.nodes, "g", inputs, empty, self.weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
        return onnx.shape_inference.infer_shapes(model, strict_mode=True)


def chain(make: Callable[[Build], None]) -> Callable[[Build], None]:
    MAKERS.append(make)
    return make


def attention(b: Build, heads: int, rows: int, size: int, masked: Callable[[str], str], scaled_first: bool) -> None:
    q, k, v = (b.input(1, heads, rows, size) for _ in range(3))
    eighth = b.constant(size**0.5)
    if scaled_first:
        q = b.node("Div", q, eighth)
    scores = b.node("MatMul", q, b.node("Transpose", k, perm=[0, 1, 3, 2]))
    scores = scores if scaled_first else b.node("Div", scores, eighth)
    weights = b.node("Softmax", masked(scores), axis=-1)
    out = b.node("Transpose", b.node("MatMul", weights, v), perm=[0, 2, 1, 3])
    out = b.node("Reshape", out, b.constant([1, rows, heads * size], "int64"))
    out = b.node("MatMul", out, b.weight(heads * size, 96, scale=0.1))
    b.node("Add", out, b.weight(96))


@chain
def causal_product_divide_where(b: Build) -> None:
    """GPT-2's attention."""
    below = b.constant(np.tril(np.ones((1, 1, 33, 33))), "bool")
    attention(b, 3, 33, 16, lambda s: b.node("Where", below, s, b.constant(-1e4)), False)


@chain
def divided_query_and_where(b: Build) -> None:
    """DistilBERT's attention; the mask comes with the call."""
    mask = b.argument((np.arange(40) >= 31).astype("int64").reshape(1, 1, 1, 40))
    empty = b.node("Equal", mask, b.constant(1, "int64"))
    empty = b.node("Expand", empty, b.constant([1, 2, 40, 40], "int64"))
    attention(b, 2, 40, 32, lambda s: b.node("Where", empty, b.constant(np.finfo("float32").min), s), True)


@chain
def grouped_convolution_and_batch_norm(b: Build) -> None:
    """ShuffleNet's unit: grouped 1×1, shuffle, depthwise, grouped 1×1, residual."""

    def norm(x: str, c: int) -> str:
        vectors = [b.constant(b.rng.uniform(0.5, 1.5, c)), b.weight(c), b.weight(c)]
        return b.node("BatchNormalization", x, *vectors, b.constant(b.rng.uniform(0.5, 1.5, c)))

    x = b.input(1, 24, 14, 14)
    y = b.node("Relu", norm(b.node("Conv", x, b.weight(12, 8, 1, 1, scale=0.3), group=3), 12))
    y = b.node("Reshape", y, b.constant([1, 3, 4, 14, 14], "int64"))
    y = b.node("Reshape", b.node("Transpose", y, perm=[0, 2, 1, 3, 4]), b.constant([1, 12, 14, 14], "int64"))
    y = norm(b.node("Conv", y, b.weight(12, 1, 3, 3, scale=0.3), group=12, pads=[1, 1, 1, 1]), 12)
    y = norm(b.node("Conv", y, b.weight(24, 4, 1, 1, scale=0.3), group=3), 24)
    b.node("Relu", b.node("Add", y, x))


@chain
def positions_of_extremes(b: Build) -> None:
    x = b.argument(b.rng.integers(0, 9, (5, 37, 11)).astype("float32"))
    for op in ("ArgMax", "ArgMin"):
        for axis, last, keep in ((0, 0, 1), (1, 1, 0), (-1, 0, 0)):
            b.node(op, x, axis=axis, select_last_index=last, keepdims=keep, is_output=True)


@chain
def scattered_numbers(b: Build) -> None:
    x, update = b.input(9, 8), b.input(40, 8)
    rows = b.argument(b.rng.integers(0, 9, (40, 8)))
    for reduction in ("add", "mul", "max", "min"):
        b.node("ScatterElements", x, rows, update, axis=0, reduction=reduction, is_output=True)
    once = b.argument(b.rng.permutation(9)[:4].reshape(4, 1))
    b.node("ScatterND", x, once, b.input(4, 8), is_output=True)


@chain
def best_boxes(b: Build) -> None:
    corners = b.rng.uniform(0, 1, (1, 60, 4)).astype("float32")
    boxes, scores = b.argument(corners), b.argument(b.rng.uniform(0, 1, (1, 2, 60)).astype("float32"))
    limits = b.constant([7], "int64"), b.constant([0.4]), b.constant([0.3])
    b.node("NonMaxSuppression", boxes, b.node("Sqrt", scores), *limits)


@chain
def sorted_and_summed(b: Build) -> None:
    x = b.input(6, 300)
    b.node("CumSum", x, b.constant(1, "int64"), is_output=True)
    b.node("CumSum", x, b.constant(0, "int64"), reverse=1, exclusive=1, is_output=True)
    values, places = "top", "where"
    b.nodes.append(helper.make_node("TopK", [x, b.constant([9], "int64")], [values, places], name="best", axis=1))
    b.outputs += [values, places]


@chain
def remainders_in_float16(b: Build) -> None:
    x, y = b.input(7, 33, dtype="float16"), b.argument(b.rng.uniform(0.5, 2, (7, 33)).astype("float16"))
    b.node("Abs", b.node("Mod", x, y, fmod=1))


@chain
def triangles(b: Build) -> None:
    x = b.input(3, 17, 23)
    b.node("Trilu", x, b.constant(2, "int64"), upper=1, is_output=True)
    b.node("Trilu", x, b.constant(-3, "int64"), upper=0, is_output=True)


@chain
def pooled_and_resized(b: Build) -> None:
    x = b.input(2, 5, 19, 23)
    pooled = b.node("AveragePool", x, kernel_shape=[3, 3], pads=[1, 0, 1, 1], strides=[2, 1], is_output=True)
    b.node("MaxPool", x, kernel_shape=[2, 3], strides=[2, 2], ceil_mode=1, is_output=True)
    scales = b.constant([1, 1, 2.0, 1.5])
    b.node("Resize", pooled, "", scales, mode="linear", is_output=True)
    b.node("Resize", pooled, "", scales, mode="nearest", is_output=True)
    b.node("GlobalAveragePool", x, is_output=True)


@chain
def norms(b: Build) -> None:
    x = b.input(3, 40, 130)
    y = b.node("LayerNormalization", x, b.weight(130), b.weight(130), axis=-1, is_output=True)
    b.node("Softmax", y, axis=1, is_output=True)
    b.node("LogSoftmax", y, axis=-1, is_output=True)
    ones, zeros = b.constant(np.ones(40)), b.constant(np.zeros(40))
    b.node("InstanceNormalization", x, ones, zeros, is_output=True)
    for op in ("ReduceMean", "ReduceL2", "ReduceMax", "ReduceProd", "ReduceLogSumExp"):
        b.node(op, x, b.constant([0, 2], "int64"), keepdims=0, is_output=True)


@chain
def a_recurrence_of_both_directions(b: Build) -> None:
    x = b.input(11, 2, 20)
    weights = b.weight(2, 96, 20, scale=0.3), b.weight(2, 96, 24, scale=0.3), b.weight(2, 192, scale=0.1)
    b.node("Tanh", b.node("LSTM", x, *weights, hidden_size=24, direction="bidirectional"))


def results(build: Build, vdevices: list[object], placement: dict[str, str] | None) -> list[np.ndarray]:
    executable = rh.compile(rh.from_onnx(build.model(), vdevices=vdevices, placement=placement))
    if placement:
        assert_both_devices_hold_ops(executable)
    return outputs_of(executable, build.inputs)


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("cut", [False, True], ids=["gpu", "gpu and cpu"])
def test_numbers_of_a_cpu(make: Callable[[Build], None], cut: bool):
    build = Build()
    make(build)
    expected = results(build, ["llvm"], None)
    if not cut:
        assert_same(results(build, [GPU], None), expected)
        return
    placement = {node.name: f"vdevice:{1 - index % 2}" for index, node in enumerate(build.nodes)}
    assert_same(results(build, ["llvm", GPU], placement), expected)


@pytest.mark.parametrize("configuration", ["d", "e"])
@pytest.mark.parametrize(
    "name",
    [
        "test_triu_zero",
        "test_tril_zero",
        "test_attention_4d_causal_bf16",
        "test_attention_4d_padded_kv_bf16",
        "test_attention_4d_attn_mask_bool",
        "test_attention_4d_attn_mask_bool_4d",
        "test_attention_4d_fp16",
        "test_causal_conv_with_state_decode_step_expanded",
        "test_argmax_negative_axis_keepdims_random_select_last_index",
        "test_mod_mixed_sign_float16",
        "test_nonmaxsuppression_two_classes",
        "test_scatternd_add",
        "test_Conv2d_groups",
    ],
)
def test_cases_of_onnx_that_stock_schedules_miss(name: str, configuration: str, monkeypatch: pytest.MonkeyPatch):
    """Stock schedules compute wrong numbers for some, and lack code for others."""
    from conformance.cases import case_names
    from conformance.outcome import PASSED

    if name not in case_names():
        pytest.skip("this version of onnx lacks the case")
    outcome = outcome_on_a_gpu(name, configuration, monkeypatch)
    assert (outcome.status, outcome.detail) == (PASSED, "")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("part", range(SAMPLE))
def test_a_sample_of_onnx_cases(part: int, monkeypatch: pytest.MonkeyPatch):
    """Every 25th case of ONNX's suite: right, or refused by name."""
    from conformance.cases import case_names
    from conformance.outcome import PASSED, REFUSED

    for name in case_names()[part * 25 :: 25 * SAMPLE]:
        outcome = outcome_on_a_gpu(name, "d", monkeypatch)
        assert outcome.status in (PASSED, REFUSED), f"{name}: {outcome.status}: {outcome.detail}"


def outcome_on_a_gpu(name: str, configuration: str, monkeypatch: pytest.MonkeyPatch):
    import json

    from conformance.backends import GPU_VARIABLE
    from conformance.outcome import run_case

    monkeypatch.setenv(GPU_VARIABLE, GPU if isinstance(GPU, str) else json.dumps(GPU))
    return run_case(name, configuration)
