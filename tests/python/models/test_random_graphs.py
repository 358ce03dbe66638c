"""Random small ONNX graphs with ops of image models and transformers, on one and two devices, against ONNX Runtime."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

import relax_hetero as rh
from device_pairs import TWO_DEVICES
from gpu_interpreter.models import InterpretedModel
from models.running import GPU, assert_same, expected_outputs, needs_gpu, outputs_of


class Graph:
    """A graph that grows node by node; every node is run at once, so that later ones know its shape."""

    def __init__(self, draw: random.Random, shape: tuple[int, ...]) -> None:
        self.draw = draw
        self.rng = np.random.default_rng(draw.randrange(2**16))
        self.input = self.rng.standard_normal(shape).astype("float32")
        self.values: dict[str, np.ndarray] = {"x": self.input}
        self.weights: dict[str, np.ndarray] = {}
        self.nodes: list[onnx.NodeProto] = []

    def weight(self, *shape: int, scale: float = 1.0) -> str:
        return self.constant((self.rng.standard_normal(shape) * scale).astype("float32"))

    def constant(self, array: Any) -> str:
        name = f"w{len(self.weights)}"
        self.weights[name] = np.asarray(array)
        return name

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        out = f"v{len(self.nodes)}"
        node = helper.make_node(op, inputs, [out], name=out, **attributes)
        arrays = {name: self.values[name] for name in inputs if name in self.values}
        self.values[out] = expected_outputs(self.model([node], arrays, [out]), arrays)[0]
        self.nodes.append(node)
        return out

    def model(self, nodes: list[onnx.NodeProto], inputs: dict[str, np.ndarray], outs: list[str]) -> onnx.ModelProto:
        used = {name for node in nodes for name in node.input}
        given_ = [helper.make_tensor_value_info(name, 1, array.shape) for name, array in inputs.items()]
        outputs = [helper.make_tensor_value_info(name, 1, None) for name in outs]
        stored = [numpy_helper.from_array(array, name) for name, array in self.weights.items() if name in used]
        graph = helper.make_graph(nodes, "g", given_, outputs, stored)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    def latest(self, rank: int | None = None) -> str | None:
        names = [name for name, array in self.values.items() if rank in (None, array.ndim)]
        return self.draw.choice(names[-3:]) if names else None

    def like(self, shape: tuple[int, ...]) -> str:
        return self.draw.choice([name for name, array in self.values.items() if array.shape == shape])

    def grow(self) -> None:
        """One more step."""
        steps = [self.conv, self.conv, self.pool, self.shuffle, self.squeeze, self.residual, self.softmax]
        self.draw.choice([*steps, self.norm, self.product, self.activation, self.transpose, self.concat])()

    def conv(self) -> None:
        x = self.latest(4)
        if x is None:
            return
        channels, height, width = self.values[x].shape[1:]
        groups = self.draw.choice([1, 1, channels, *(g for g in (2, 3, 4) if channels % g == 0)])
        window = [self.draw.randint(1, min(3, size)) for size in (height, width)]
        w = self.weight(groups * self.draw.randint(1, 9), channels // groups, *window, scale=0.3)
        pads = [self.draw.randint(0, 1) for _ in range(4)]
        y = self.node("Conv", x, w, group=groups, pads=pads, strides=[self.draw.randint(1, 2) for _ in range(2)])
        if self.draw.random() < 0.5:
            self.node(self.draw.choice(["Relu", "HardSwish", "Sigmoid"]), y)

    def pool(self) -> None:
        x = self.latest(4)
        if x is not None and min(self.values[x].shape[2:]) > 2:
            op = self.draw.choice(["MaxPool", "AveragePool"])
            self.node(op, x, kernel_shape=[3, 3], pads=[1, 0, 1, 1], strides=[2, 1], ceil_mode=self.draw.randint(0, 1))

    def shuffle(self) -> None:
        x = self.latest(4)
        if x is not None and self.values[x].shape[1] % 2 == 0:
            n, c, h, w = self.values[x].shape
            split = self.node("Reshape", x, self.constant([n, 2, c // 2, h, w]))
            turned = self.node("Transpose", split, perm=[0, 2, 1, 3, 4])
            self.node("Reshape", turned, self.constant([n, c, h, w]))

    def squeeze(self) -> None:
        x = self.latest(4)
        if x is not None:
            c = self.values[x].shape[1]
            gate = self.node("Conv", self.node("GlobalAveragePool", x), self.weight(c, c, 1, 1, scale=c**-0.5))
            self.node("Mul", x, self.node("Sigmoid", gate))

    def residual(self) -> None:
        x = self.latest()
        self.node("Add", x, self.like(self.values[x].shape))

    def concat(self) -> None:
        x = self.latest(4)
        if x is not None:
            self.node("Concat", x, self.like(self.values[x].shape), axis=1)

    def softmax(self) -> None:
        x = self.latest()
        self.node("Softmax", x, axis=self.draw.randrange(self.values[x].ndim))

    def norm(self) -> None:
        x = self.latest()
        y = self.node("LayerNormalization", x, self.weight(self.values[x].shape[-1]), epsilon=1e-2)
        if self.draw.random() < 0.3:
            self.node("Softmax", y)

    def product(self) -> None:
        x = self.latest()
        k, n = self.values[x].shape[-1], self.draw.choice([1, 8, 17, 32])
        self.node("Add", self.node("MatMul", x, self.weight(k, n, scale=k**-0.5)), self.weight(n))

    def activation(self) -> None:
        self.node(self.draw.choice(["Relu", "Tanh", "Erf", "Abs", "Elu"]), self.latest())

    def transpose(self) -> None:
        x = self.latest()
        self.node("Transpose", x, perm=self.draw.sample(range(self.values[x].ndim), self.values[x].ndim))


def drawn(draw: random.Random, shape: tuple[int, ...], steps: int) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A graph of so many steps, whose outputs are all values that nothing reads, and its inputs."""
    graph = Graph(draw, shape)
    for _ in range(steps):
        graph.grow()
    if not graph.nodes:
        graph.node("Relu", "x")
    used = {name for node in graph.nodes for name in node.input}
    outs = [node.name for node in graph.nodes if node.name not in used or draw.random() < 0.1]
    inputs = {"x": graph.input} if "x" in used else {}
    return graph.model(graph.nodes, inputs, outs), inputs


def check(draw: random.Random, shape: tuple[int, ...], steps: int, vdevices: list[object] | None) -> None:
    """Compile a graph of so many steps, cut anywhere, and compare its outputs."""
    model, inputs = drawn(draw, shape, steps)
    placement = None
    if vdevices is not None and len(vdevices) > 1:
        placement = {node.name: f"vdevice:{draw.randrange(len(vdevices))}" for node in model.graph.node}
    module = rh.from_onnx(model, vdevices=vdevices, placement=placement)
    assert_same(outputs_of(rh.compile(module), inputs), expected_outputs(model, inputs))


def random_shape(draw: random.Random) -> tuple[int, ...]:
    """Feature maps and rows of sizes that vectors and tiles of a GPU do and do not divide."""
    ends = draw.randint(1, 2), draw.choice([1, 3, 5, 8, 16, 17, 64])
    return (*ends, draw.randint(3, 19), draw.randint(3, 19)) if draw.random() < 0.6 else (*ends, draw.randint(2, 96))


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.randoms(), st.tuples(st.integers(1, 2), st.sampled_from([3, 8, 17]), st.integers(3, 9), st.integers(3, 9)))
def test_feature_maps(draw, shape):
    check(draw, shape, draw.randint(2, 7), draw.choice([None, TWO_DEVICES]))


@settings(max_examples=14, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.randoms(), st.tuples(st.integers(1, 2), st.sampled_from([1, 5, 16]), st.sampled_from([8, 24, 33])))
def test_rows(draw, shape):
    check(draw, shape, draw.randint(2, 7), draw.choice([None, TWO_DEVICES]))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("seed", range(int(os.environ.get("RELAX_HETERO_GPU_GRAPHS", "40"))))
def test_on_a_gpu(seed: int):
    """``RELAX_HETERO_GPU_GRAPHS=300 pytest -n 16 -m gpu``; odd ones are cut over the GPU and the CPU."""
    draw = random.Random(seed)
    check(draw, random_shape(draw), draw.randint(2, 9), ["llvm", GPU] if seed % 2 else [GPU])


@pytest.mark.parametrize("seed", [0, 5, 9, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 310))])
def test_kernels_of_a_gpu_by_the_interpreter(seed: int):
    """Every kernel that the passes make for an H100, without one."""
    draw = random.Random(seed)
    model, inputs = drawn(draw, random_shape(draw), draw.randint(2, 9))
    gpu = {"kind": "cuda", "arch": "sm_90a"}
    actual = InterpretedModel(rh.from_onnx(model, vdevices=[gpu]))(*inputs.values())
    actual = actual if isinstance(actual, tuple) else (actual,)
    assert_same([np.asarray(array) for array in actual], expected_outputs(model, inputs))


def test_a_softmax_of_a_norm_keeps_values_scaled_once_a_row():
    graph = Graph(random.Random(0), (2, 5, 24))
    graph.node("Softmax", graph.node("LayerNormalization", "x", graph.weight(24)))
    model, inputs = graph.model(graph.nodes, {"x": graph.input}, ["v1"]), {"x": graph.input}
    assert_same(outputs_of(rh.compile(rh.from_onnx(model)), inputs), expected_outputs(model, inputs))
