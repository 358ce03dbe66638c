"""Whole models as a GPU would run them, kernel after kernel by the interpreter: ONNX Runtime's results, no fault."""

import random
from typing import Any

import numpy as np
import pytest
from tvm.script import ir as I
from tvm.script import relax as R

import relax_hetero as rh
from gpu_interpreter.models import InterpretedModel
from models.running import assert_same, expected_outputs
from models.test_random_graphs import Graph
from relax_hetero.target.vdevice import with_vdevices

HOPPER = {"kind": "cuda", "arch": "sm_90a"}


@I.ir_module
class Layer:
    @R.function
    def main(
        x: R.Tensor(("n", 64), "float16"), w: R.Tensor((64, 96), "float16"), b: R.Tensor((96,), "float16")
    ) -> R.Tensor(("n", 96), "float16"):
        with R.dataflow():
            y = R.matmul(x, w)
            z = R.nn.gelu(R.add(y, b))
            s = R.nn.softmax(z, axis=-1)
            R.output(s)
        return s


def test_a_layer_is_two_kernels() -> None:
    rng = np.random.default_rng(0)
    x, w, b = ((rng.standard_normal(shape) * 0.3).astype("float16") for shape in ((5, 64), (64, 96), (96,)))
    model = InterpretedModel(with_vdevices(Layer, [rh.VDevice(HOPPER)]))
    result = model(x, w, b)
    want = rh.vm.VirtualMachine(rh.compile(Layer, cache=False))["main"](x, w, b).numpy()
    np.testing.assert_allclose(result.astype("float32"), want.astype("float32"), atol=1e-3)
    assert len(model.launched) == 2


@I.ir_module
class Heads:
    @R.function
    def main(x: R.Tensor((1, 40, 48), "float32"), mask: R.Tensor((1, 1, 1, 40), "float32")) -> R.Tensor(
        (1, 40, 48), "float32"
    ):
        with R.dataflow():
            q = R.permute_dims(R.reshape(x, R.shape([1, 40, 3, 16])), axes=[0, 2, 1, 3])
            k = R.permute_dims(R.reshape(x, R.shape([1, 40, 3, 16])), axes=[0, 2, 3, 1])
            scores = R.multiply(R.matmul(q, k), R.const(0.25, "float32"))
            p = R.nn.softmax(R.add(scores, mask), axis=-1)
            y = R.reshape(R.permute_dims(R.matmul(p, q), axes=[0, 2, 1, 3]), R.shape([1, 40, 48]))
            R.output(y)
        return y


def test_float32_attention_is_one_kernel_where_it_may_be_rounded() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 40, 48)).astype("float32")
    mask = np.where(rng.random((1, 1, 1, 40)) < 0.3, np.finfo("float32").min, 0).astype("float32")
    want = rh.vm.VirtualMachine(rh.compile(Heads, cache=False))["main"](x, mask).numpy()
    placed = with_vdevices(Heads, [rh.VDevice(HOPPER)])
    exact, rounded = InterpretedModel(placed), InterpretedModel(rh.transform.ToMixedPrecision("tfloat32")(placed))
    np.testing.assert_allclose(exact(x, mask), want, atol=1e-5)
    np.testing.assert_allclose(rounded(x, mask), want, atol=5e-3)
    assert len(exact.launched) > 1 and len(rounded.launched) == 1


def check(seed: int, vdevices: list[Any]) -> None:
    """A random graph, as `models/test_random_graphs.py` draws it for GPUs."""
    draw = random.Random(seed)
    ends = draw.randint(1, 2), draw.choice([1, 3, 5, 8, 16, 17])
    shape = (*ends, draw.randint(3, 12), draw.randint(3, 12)) if draw.random() < 0.6 else (*ends, draw.randint(2, 96))
    graph = Graph(draw, shape)
    for _ in range(draw.randint(2, 9)):
        graph.grow()
    used = {name for node in graph.nodes for name in node.input}
    if "x" not in used:
        pytest.skip("no node reads the input")
    outs = [node.name for node in graph.nodes if node.name not in used]
    model, inputs = graph.model(graph.nodes, {"x": graph.input}, outs), {"x": graph.input}
    placement = None
    if len(vdevices) > 1:
        placement = {node.name: f"vdevice:{draw.randrange(len(vdevices))}" for node in graph.nodes}
    result = InterpretedModel(rh.from_onnx(model, vdevices=vdevices, placement=placement))(graph.input)
    assert_same(list(result) if isinstance(result, tuple) else [result], expected_outputs(model, inputs))


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 80))])
def test_random_graphs(seed: int) -> None:
    """Odd seeds are cut over a GPU and the CPU, every fourth is for a GPU without wgmma."""
    gpu = {"kind": "cuda", "arch": "sm_80"} if seed % 4 == 2 else HOPPER
    check(seed, ["llvm", gpu] if seed % 2 else [gpu])
