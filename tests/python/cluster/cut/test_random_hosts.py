"""Random graphs and whole models, cut anywhere over hosts: the bits of the same cut in one process."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import relax_hetero as rh
from cluster.step_by_step import check_same, hosted
from driver.random_graphs import modules
from models import quantized_graphs
from models.attention_graphs import bert
from models.test_random_graphs import drawn, random_shape
from models.zoo import inputs_of, minilm, node_names, random_model
from relax_hetero.cluster.call_plan import Program
from seeds import fresh_seed

LEISURELY: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
KERNELS = st.integers(2, 3).flatmap(lambda count: modules(hosted(*"abc"[:count])))


def check_kernels(graph: tuple[tvm.IRModule, list[tuple[int, ...]]], seed: int) -> None:
    mod, shapes = graph
    generator = np.random.default_rng(seed)
    check_same(mod, [[generator.standard_normal(shape).astype("float32") for shape in shapes]])


def test_random_kernels():
    settings(max_examples=5, **LEISURELY)(given(KERNELS, st.integers(0, 1 << 30))(check_kernels))()


@pytest.mark.slow
def test_many_random_kernels():
    settings(max_examples=150, **LEISURELY)(given(KERNELS, st.integers(0, 1 << 30))(check_kernels))()


def check_model(model: onnx.ModelProto, calls: list[list[np.ndarray]], draw: random.Random, switches: int) -> Program:
    """A model that goes to a random host before some random nodes, and before every node without `switches`."""
    hosts = "abc"[: draw.randint(2, 3)]
    names = node_names(model)
    changes = {0, *draw.sample(range(len(names)), min(switches or len(names), len(names)))}
    placement, host = {}, ""
    for number, name in enumerate(names):
        host = draw.choice(hosts.replace(host, "") or hosts) if number in changes else host
        placement[name] = f"{host}/llvm"
    return check_same(rh.from_onnx(model, vdevices=hosted(*hosts), placement=placement), calls)


@pytest.mark.parametrize("case", [0, 1, *(pytest.param(case, marks=pytest.mark.slow) for case in range(2, 60))])
def test_random_layers(case: int):
    """Convolutions, products, norms and the nodes between them, every node on any host."""
    draw = random.Random(fresh_seed())
    model, inputs = drawn(draw, random_shape(draw), draw.randint(3, 8))
    check_model(model, [list(inputs.values())], draw, 0)


@pytest.mark.parametrize("case", [0, *(pytest.param(case, marks=pytest.mark.slow) for case in range(1, 10))])
def test_a_symbolic_batch(case: int):
    draw = random.Random(fresh_seed())
    model = bert(batch="n")
    calls = [list(inputs_of(bert(batch=batch), batch).values()) for batch in (1, 3)]
    check_model(model, calls, draw, 4)


@pytest.mark.slow  # cuts do not depend on types
@pytest.mark.parametrize("case", range(6))
@pytest.mark.parametrize("make", ["encoder_layer", "residual_network"])
def test_quantized(make: str, case: int):
    draw = random.Random(fresh_seed())
    model = quantized_graphs.quantized(getattr(quantized_graphs, make))
    check_model(model, [list(quantized_graphs.inputs_of(model, case).values())], draw, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [partial(minilm, 2, 16), *(partial(random_model, each) for each in ("resnet50", "squeezenet"))]
)
@pytest.mark.parametrize("case", range(2))
def test_whole_models(make: Any, case: int):
    draw = random.Random(fresh_seed())
    model = make()
    check_model(model, [list(inputs_of(model).values())], draw, draw.randint(1, 6))
