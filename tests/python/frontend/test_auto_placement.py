"""The cost model and the search for the cheapest plan."""

import dataclasses
import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper, parser

import relax_hetero as rh
from relax_hetero.frontend import CostModel, DeviceCost, LinkCost, auto_placement
from relax_hetero.frontend.auto_placement import _Planner
from relax_hetero.frontend.work_graph import OUTSIDE, Unit, Value, WorkGraph
from relax_hetero.vdevice import parse_vdevices

GPU = {"kind": "cuda", "arch": "sm_90"}


def links(num_devices, host, bandwidth=1e10, latency=1e-6):
    places = sorted({*range(num_devices), host})
    return {(a, b): LinkCost(bandwidth, latency) for a in places for b in places if a != b}


@st.composite
def problems(draw, num_devices):
    count = draw(st.integers(1, 6))
    rates = st.sampled_from([1e9, 1e10, 1e11, 1e12])
    units = [Unit([str(i)], [(draw(st.sampled_from([0.0, 1e6, 1e8])), draw(st.floats(0, 1e6)))]) for i in range(count)]
    values = []
    for maker in (OUTSIDE, *range(count)):
        readers = draw(st.lists(st.sampled_from([*range(maker + 1, count), OUTSIDE]), unique=True, max_size=4))
        if readers:
            values.append(Value(draw(st.floats(1, 1e6)), maker, readers))
    host = draw(st.sampled_from([-1, 0, num_devices - 1]))
    places = sorted({*range(num_devices), host})
    devices = [DeviceCost(draw(rates), draw(rates), draw(st.floats(0, 1e-5))) for _ in range(num_devices)]
    roads = {(a, b): LinkCost(draw(rates), draw(st.floats(0, 1e-5))) for a in places for b in places if a != b}
    return WorkGraph(units, values), CostModel(devices, roads, host)


def plans(graph, model):
    count = len(model.devices)
    planner = _Planner(graph, model)
    singles = [planner.cost([device] * len(graph.units)) for device in range(count)]
    found = planner.cost(planner.improve([singles.index(min(singles))] * len(graph.units)))
    best = min(planner.cost(plan) for plan in itertools.product(range(count), repeat=len(graph.units)))
    return found, best, min(singles)


@given(problems(2))
@settings(max_examples=60)
def test_the_plan_for_two_devices_is_the_best_there_is(problem):
    found, best, _ = plans(*problem)
    assert found == best


@given(problems(3))
def test_the_plan_for_three_is_never_worse_than_one_device(problem):
    found, best, single = plans(*problem)
    assert best <= found <= single


def test_a_value_goes_to_a_device_once():
    # One maker that only the first device is good at, three readers that only the second is good at.
    units = [Unit(["a"], [(1e9, 0)]), *(Unit([name], [(0, 1e9)]) for name in "bcd")]
    graph = WorkGraph(units, [Value(1e6, 0, [1, 2, 3])])
    model = CostModel([DeviceCost(1e12, 1e9, 0), DeviceCost(1e9, 1e12, 0)], links(2, -1, latency=0), -1)
    planner = _Planner(graph, model)
    plan = planner.improve([0, 0, 0, 0])
    assert plan == [0, 1, 1, 1]
    assert planner.cost(plan) == pytest.approx(1e12 * (1e-3 + 3e-3 + 1e6 / 1e10))


def mlp(batch, width, layers):
    rng = np.random.default_rng(0)
    nodes, weights, value = [], [], "x"
    for layer in range(layers):
        weights.append(numpy_helper.from_array(rng.standard_normal((width, width)).astype("float32"), f"w{layer}"))
        nodes.append(helper.make_node("MatMul", [value, f"w{layer}"], [f"m{layer}"], name=f"layer{layer}/MatMul"))
        nodes.append(helper.make_node("Relu", [f"m{layer}"], [f"r{layer}"], name=f"layer{layer}/Relu"))
        value = f"r{layer}"
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, width]) for name in ("x", value)]
    graph = helper.make_graph(nodes, "mlp", info[:1], info[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def test_large_products_go_to_the_gpu_and_small_ones_stay():
    large = auto_placement(mlp(512, 1024, 3), ["llvm", GPU])
    assert set(large.assignments.values()) == {"cuda:0"}
    small = auto_placement(mlp(1, 16, 3), ["llvm", GPU])
    assert set(small.assignments.values()) == {"llvm:0"}
    for plan in (large, small):
        assert plan.estimate_seconds <= min(plan.single_device_estimates.values())
        assert set(plan.single_device_estimates) == {"llvm:0", "cuda:0"}
    assert set(large.assignments) == {f"layer{i}/{op}" for i in range(3) for op in ("MatMul", "Relu")}


def test_the_cost_model_decides():
    model = CostModel([DeviceCost(1e9, 1e12, 0), DeviceCost(1e12, 1e9, 0)], links(2, 0, bandwidth=1e15, latency=0), 0)
    plan = auto_placement(mlp(64, 64, 2), ["llvm", "c"], model)
    assert plan.assignments == {
        "layer0/MatMul": "c:0", "layer0/Relu": "llvm:0", "layer1/MatMul": "c:0", "layer1/Relu": "llvm:0",
    }  # fmt: skip
    slower_links = dataclasses.replace(model, links=links(2, 0, latency=1))
    assert len(set(auto_placement(mlp(64, 64, 2), ["llvm", "c"], slower_links).assignments.values())) == 1


def test_a_module_is_planned_by_its_bindings():
    mod = rh.from_onnx(mlp(512, 1024, 1))
    plan = auto_placement(mod, ["llvm", GPU])
    assert plan.assignments == {"layer0/MatMul": "cuda:0", "layer0/Relu": "cuda:0"}


def test_an_if_stays_together():
    model = parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 17]>
        g (float[512, 512] x, bool c) => (float[512, 512] y) {
            [choice] y = If(c) <
                then_branch = t () => (float[512, 512] p) { [product] p = MatMul(x, x) },
                else_branch = e () => (float[512, 512] q) { q = Relu(x) }>
        }""")
    assignments = auto_placement(model, ["llvm", GPU]).assignments
    assert set(assignments) == {"choice", "product", "choice/else_branch/Relu_0"}
    assert len(set(assignments.values())) == 1


def test_symbolic_dimensions_have_the_models_extent():
    model = mlp(1, 1024, 1)
    for info in (*model.graph.input, *model.graph.output):
        info.type.tensor_type.shape.dim[0].dim_param = "batch"
    costs = CostModel.for_vdevices(parse_vdevices(["llvm", GPU]))
    few = auto_placement(model, ["llvm", GPU], dataclasses.replace(costs, symbolic_extent=1))
    many = auto_placement(model, ["llvm", GPU], dataclasses.replace(costs, symbolic_extent=4096))
    assert many.single_device_estimates["llvm:0"] > 100 * few.single_device_estimates["llvm:0"]


def test_defaults_know_vector_widths_and_cores():
    targets = [
        {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v2", "num-cores": 4},
        {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v4", "num-cores": 4},
        {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v4", "num-cores": 8},
        GPU,
        {"kind": "cuda", "arch": "sm_75"},
        "vulkan",
    ]
    flops = [device.flops for device in CostModel.for_vdevices(parse_vdevices(targets)).devices]
    assert flops[1] == 4 * flops[0] and flops[2] == 2 * flops[1]
    assert flops[3] > flops[4] > flops[2]
    assert flops[5] > 0


def test_without_a_cpu_the_host_is_implicit():
    model = CostModel.for_vdevices(parse_vdevices([GPU]))
    assert model.host == -1
    assert model.transfer_seconds(1e6, -1, 0) > 1e-5


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (CostModel([DeviceCost(1, 1, 0)]), "1 devices for 2 vdevices"),
        (CostModel([DeviceCost(1, 1, 0)] * 2, {}, 0), r"no link between devices \(0, 1\)"),
        (CostModel([DeviceCost(1, 1, 0)] * 2, links(2, 0), 2), "host is device 2 of 2"),
    ],
)
def test_a_cost_model_that_does_not_fit(model, message):
    with pytest.raises(rh.VDeviceError, match=message):
        auto_placement(mlp(1, 4, 1), ["llvm", "c"], model)


def test_five_thousand_nodes_are_planned_in_seconds():
    rng = np.random.default_rng(0)
    count = 5000
    units = [Unit([str(i)], [(10 ** rng.uniform(3, 9), 10 ** rng.uniform(3, 7))]) for i in range(count)]
    values = [
        Value(10 ** rng.uniform(3, 6.5), i, sorted({i + 1, min(count - 1, i + int(rng.integers(1, 300)))}))
        for i in range(count - 1)
    ]
    model = CostModel([DeviceCost(1e11, 8e10, 1e-7), DeviceCost(1e12, 2e10, 1e-6)], links(2, 0), 0)
    planner = _Planner(WorkGraph(units, values), model)
    singles = [planner.cost([device] * count) for device in range(2)]
    start = time.perf_counter()
    found = planner.improve([singles.index(min(singles))] * count)
    assert time.perf_counter() - start < 10
    assert planner.cost(found) < min(singles)
    assert set(found) == {0, 1}
