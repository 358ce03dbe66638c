"""`placement="auto"` under limits of memory."""

import itertools

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import relax_hetero as rh
from frontend.plan_problems import links
from relax_hetero.frontend import CostModel, DeviceCost, auto_placement
from relax_hetero.frontend.auto import auto_placement as placing
from relax_hetero.frontend.auto.auto_placement import best_window
from relax_hetero.frontend.auto.plan_costs import PADDING, PlanCosts, call_ticks
from relax_hetero.frontend.auto.plan_search import best_plan
from relax_hetero.frontend.auto.work_graph import OUTSIDE, Work, WorkGraph, WorkUnit, WorkValue
from relax_hetero.tools.cli import cli

# The second device is ten times as fast.
DEVICES = [DeviceCost(1e9, 1e30, 0), DeviceCost(1e10, 1e30, 0)]


def chain(work, weights, size=1.0, limit=None):
    """Units in a row, their weights in bytes, or by constant; inputs and results are the host's, device 0."""
    weights = [found if isinstance(found, dict) else {i: found} for i, found in enumerate(weights)]
    units = [WorkUnit([str(i)], [Work(w, 0)], found) for i, (w, found) in enumerate(zip(work, weights, strict=True))]
    values = [WorkValue(size, i - 1 if i else OUTSIDE, [i]) for i in range(len(units))]
    values.append(WorkValue(size, len(units) - 1, [OUTSIDE]))
    model = CostModel(DEVICES, links(2, 0, 1e12, 1e-6), 0)
    return PlanCosts(WorkGraph(units, values), model, {} if limit is None else {1: limit})


def best_of_all(costs):
    plans = (list(plan) for plan in itertools.product(range(2), repeat=len(costs.ops)))
    return min(call_ticks(costs, plan) for plan in plans if not any(costs.excess_bytes(plan)))


@given(
    st.lists(st.tuples(st.sampled_from([1e6, 3e6, 1e7]), st.sampled_from([0.0, 100.0, 300.0])), min_size=2, max_size=9),
    st.floats(0.1, 1.0),
)
@settings(max_examples=40)
def test_of_few_units_the_plan_is_the_best_that_fits(units, share):
    work, weights = zip(*units, strict=True)
    limit = int(share * sum(weights) * PADDING) + 3
    costs = chain(work, weights, limit=limit)
    plan = best_plan(costs, [0] * len(work), "latency")
    assert not any(costs.excess_bytes(plan))
    assert call_ticks(costs, plan) == best_of_all(costs)


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_of_many_units_most_of_the_limit_is_used(objective):
    costs = chain([1e7] * 90, [1000.0] * 90, limit=int(60 * 1000 * PADDING) + 10)
    plan = best_plan(costs, [0] * 90, objective, extra_starts=best_window(costs))
    assert costs.excess_bytes(plan) == (0,)
    if objective == "latency":
        assert sum(plan) == 60


def test_constants_that_units_share_count_once():
    costs = chain([1e7] * 4, [{9: 1000.0}, {9: 1000.0, 1: 500.0}, {}, {9: 1000.0}], limit=2100)
    assert costs.bytes_on(1, [1] * 4) == 1500 * PADDING + 3
    assert costs.bytes_on(1, [1, 1, 0, 0]) == 1500 * PADDING + 2
    assert costs.bytes_on(1, [0, 0, 0, 1]) == 1000 * PADDING + 2
    assert best_plan(costs, [0] * 4, "latency") == [1] * 4
    assert costs.limits == {}  # everything fits


@given(st.lists(st.integers(0, 1), min_size=1, max_size=8), st.data())
@settings(max_examples=50)
def test_values_count_while_they_live(plan, data):
    """Compared with a walk over the program that keeps the set of live values of each device."""
    count = len(plan)
    values = []
    for producer in (OUTSIDE, *range(count)):
        possible = [*range(producer + 1, count), OUTSIDE]
        readers = data.draw(st.lists(st.sampled_from(possible), unique=True, max_size=3))
        values += [WorkValue(float(data.draw(st.integers(1, 9))), producer, readers)] if readers else []
    assume(values)
    units = [WorkUnit([str(i)], [Work(1, 0)]) for i in range(count)]
    costs = PlanCosts(WorkGraph(units, values), CostModel(DEVICES, links(2, 0), 0))
    peak = [0.0, 0.0]
    for now in range(count + 1):
        there = [0.0, 0.0]
        for value in values:
            readers = [count if reader == OUTSIDE else reader for reader in value.readers]
            if costs.device_of(value.producer, plan) == 1:
                begin, end = max(value.producer, 0), max(readers)
            else:
                here = [reader for reader in readers if reader < count and plan[reader] == 1]
                begin, end = (min(here), max(here)) if here else (1, 0)
            crosses = {costs.device_of(unit, plan) for unit in (value.producer, *value.readers)} != {1}
            there[crosses] += value.size if begin <= now <= end else 0
        peak = list(map(max, peak, there))
    assert costs.values_on(1, plan) == sum(peak)


def test_values_that_joining_units_read_take_no_memory():
    """A product, an addition and a maximum are one kernel, which writes while it reads; a second product follows."""
    work = [Work(1, 0), Work(1, 0, is_kernel=False), Work(1, 0, is_kernel=False), Work(1, 0)]
    sizes = [100.0, 20.0, 20.0, 20.0, 3.0]
    units = [WorkUnit([str(i)], [each]) for i, each in enumerate(work)]
    values = [WorkValue(size, i - 1, [i if i < 4 else OUTSIDE]) for i, size in enumerate(sizes)]
    costs = PlanCosts(WorkGraph(units, values), CostModel(DEVICES, links(2, 0), 1))
    assert costs.values_on(1, [1] * 4) == 120
    assert costs.values_on(1, [1, 1, 0, 1]) == 100 + 20  # operand and result of the third one cross
    values[1].readers.append(3)
    costs = PlanCosts(WorkGraph(units, values), CostModel(DEVICES, links(2, 0), 1))
    assert costs.values_on(1, [1] * 4) == 120


def test_feature_maps_that_cross_are_there_in_two_orders_for_a_moment():
    """Convolutions store channels last; a copy for another device stores them first."""
    units = [WorkUnit([str(i)], [Work(1, 0)]) for i in range(3)]
    for is_map, peak in ((False, 10 + 20), (True, 2 * 10 + 2 * 20)):
        values = [WorkValue(5.0, OUTSIDE, [0]), *(WorkValue(10.0 * (i + 1), i, [i + 1], is_map) for i in range(2))]
        costs = PlanCosts(WorkGraph(units, values), CostModel(DEVICES, links(2, 0), 0))
        assert costs.values_on(1, [0, 1, 0]) == peak


def layers(count, width):
    rng = np.random.default_rng(0)
    nodes = [helper.make_node("MatMul", [f"x{i}", f"w{i}"], [f"x{i + 1}"], name=f"layer{i}") for i in range(count)]
    weights = [numpy_helper.from_array(rng.random((width, width), "float32"), f"w{i}") for i in range(count)]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [8, width]) for name in ("x0", f"x{count}")]
    graph = helper.make_graph(nodes, "layers", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def test_a_model_is_divided_so_that_its_machine_fits():
    """The second CPU device stands for a GPU; the machine counts by the executable's own memory plan."""
    model, limit = layers(6, 256), 1_000_000  # each layer has 262,144 bytes
    costs = CostModel([DeviceCost(1e9, 1e12, 0), DeviceCost(1e12, 1e12, 0)], links(2, 0), 0)
    plan = auto_placement(model, ["llvm", "llvm"], costs, memory_limit={"llvm:1": limit})
    assert sorted(plan.assignments.values()) == ["llvm:0"] * 3 + ["llvm:1"] * 3
    mod = rh.from_onnx(model, ["llvm", "llvm"], "auto", cost_model=costs, memory_limit={"llvm:1": "1 MB"})
    vm = rh.vm.VirtualMachine(rh.compile(mod), memory_limit={"llvm:1": limit})
    x = np.ones((8, 256), "float32")
    reference = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))
    np.testing.assert_allclose(vm["main"](x).numpy(), reference["main"](x).numpy(), rtol=1e-4)


def test_windows_that_cpus_may_transform_count_so():
    windows = np.ones((32, 32, 3, 3), "float32")
    names = ["x", *(f"y{i}" for i in range(6))]
    nodes = [helper.make_node("Conv", [names[i], f"w{i}"], [names[i + 1]], f"n{i}", pads=[1] * 4) for i in range(6)]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 32, 24, 24]) for name in (names[0], names[-1])]
    weights = [numpy_helper.from_array(windows * (i + 1), f"w{i}") for i in range(6)]
    model = helper.make_model(
        helper.make_graph(nodes, "g", ends[:1], ends[1:], weights), opset_imports=[helper.make_opsetid("", 17)]
    )
    model.ir_version = 8
    target = {"kind": "llvm", "mcpu": "x86-64-v4", "num-cores": 2}
    devices = [rh.VDevice(target, index) for index in range(2)]
    # So slow a link that all is on one device: the second one, if it fits there.
    speeds = [DeviceCost(1e9, 1e12, 0), DeviceCost(1e12, 1e12, 0)]
    costs = CostModel(speeds, links(2, 0, bandwidth=1e12, latency=0.028), 0)
    values = 3 * 4 * 32 * 24 * 24
    for limit, device in ((6 * windows.nbytes + values, 0), (6 * windows.nbytes * 16 // 9 + 8192 + values, 1)):
        mod = rh.from_onnx(model, devices, "auto", cost_model=costs, memory_limit={"llvm:1": limit})
        executable = rh.compile(mod)
        assert {op["device_index"] for op in executable.metadata.placement if op["kind"] == "op"} == {device}
    assert all(op["form"].startswith("F(2x2") for op in executable.metadata.encodings["ops"])
    assert 0 < executable.memory_plan.needs("main", {}, 1)[1].total <= limit


def test_a_limit_that_nothing_fits():
    with pytest.raises(rh.PlacementError, match=r"no placement within memory_limit.* bytes on .*:0, .* limit is 1,000"):
        auto_placement(layers(2, 64), ["llvm", "c"], memory_limit=1000)


def test_the_memory_of_a_gpu_is_a_limit_by_itself(monkeypatch):
    costs = CostModel([DeviceCost(1e9, 1e12, 0), DeviceCost(1e12, 1e12, 0)], links(2, 0), 0)
    monkeypatch.setattr(placing, "_gpu_memory", lambda vdevice: int(vdevice.vdevice_id) * 1_000_000)
    plan = auto_placement(layers(6, 256), ["llvm", "llvm"], costs)
    assert sorted(plan.assignments.values()) == ["llvm:0"] * 3 + ["llvm:1"] * 3
    assert set(auto_placement(layers(3, 256), ["llvm", "llvm"], costs).assignments.values()) == {"llvm:1"}


def test_limits_are_checked():
    with pytest.raises(rh.HeteroError, match=r"memory_limit\['llvm'\] is 'much'"):
        auto_placement(layers(1, 8), ["llvm", "c"], memory_limit={"llvm": "much"})
    with pytest.raises(rh.VDeviceError, match="cuda"):
        auto_placement(layers(1, 8), ["llvm", "c"], memory_limit={"cuda:0": 10})
    with pytest.raises(rh.FrontendError, match="only placement='auto' reads"):
        rh.from_onnx(layers(1, 8), ["llvm"], memory_limit=10)


def test_the_command_line(tmp_path):
    onnx.save(layers(2, 8), str(tmp_path / "model.onnx"))

    def explain(*options):
        done = CliRunner().invoke(cli, ["explain", str(tmp_path / "model.onnx"), "--summary", *options])
        return done.exit_code, done.output

    assert explain("--place-auto", "--memory-limit", "llvm=1GB")[0] == 0
    code, output = explain("--place-auto", "--memory-limit", "llvm:0=10")
    assert code == 1 and "no placement within memory_limit" in output
    assert explain("--memory-limit", "llvm:0=10") == (code, output)
    assert explain("--place", "*=llvm", "--memory-limit", "llvm:0=10")[0] == 2
    assert explain("--place-auto", "--memory-limit", "10")[0] == 2
