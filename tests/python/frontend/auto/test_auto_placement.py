"""`placement="auto"` of ONNX models and modules."""

import dataclasses
import json
import re

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

import relax_hetero as rh
from frontend.plan_problems import links
from relax_hetero.frontend import CostModel, DeviceCost, auto_placement
from relax_hetero.frontend.auto import cost_model
from relax_hetero.target.vdevice import VDevice, native, parse_vdevices
from relax_hetero.transform.ir.remarks import remarks_of

GPU = {"kind": "cuda", "arch": "sm_90"}


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
    graph = parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 17]>
        g (float[64, 64] x) => (float[64, 64] z) {
            [product] y = MatMul(x, x)
            [relu] r = Relu(y)
            [turned] z = Transpose(r)
        }""")
    plan = auto_placement(graph, ["llvm", "c"], model)
    assert plan.assignments == {"product": "c:0", "relu": "c:0", "turned": "llvm:0"}
    slower_links = dataclasses.replace(model, links=links(2, 0, latency=1))
    assert len(set(auto_placement(graph, ["llvm", "c"], slower_links).assignments.values())) == 1


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


def test_a_loop_stays_together_and_its_trips_count():
    text = """
        <ir_version: 9, opset_import: ["" : 17]>
        g (float[512, 512] x, int64 m) => (float[512, 512] y) <int64 many = {1000}> {
            [loop] y = Loop(TRIPS, , x) <
                body = b (int64 i, bool c, float[512, 512] v) => (bool go, float[512, 512] v2) {
                    go = Identity(c) [product] v2 = MatMul(v, x) }>
        }"""
    many = auto_placement(parser.parse_model(text.replace("TRIPS", "many")), ["llvm", GPU])
    assert many.assignments == {"loop": "cuda:0", "product": "cuda:0"}
    model = parser.parse_model(text.replace("TRIPS", "m"))
    few = auto_placement(model, ["llvm", GPU])
    assert many.single_device_estimates["llvm:0"] > 2 * few.single_device_estimates["llvm:0"]
    assert set(auto_placement(rh.from_onnx(model), ["llvm", GPU]).assignments) >= {"loop"}


def test_an_op_whose_device_would_save_little_stays_with_the_model():
    """The last op would be faster on the host, to which its result goes in any case."""
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[64, 64] x, float[64, 64] w) => (float[64, 64] y) { [up] h = MatMul(x, w) [end] y = Softmax(h) }""")
    costs = [DeviceCost(1e12, 1e12, 0, {"float32": 1e9}), DeviceCost(1e12, 1e12, 1e-6)]
    plan = auto_placement(model, ["llvm", "llvm"], CostModel(costs, links(2, 0, bandwidth=1e12, latency=1e-5), 0))
    assert set(plan.assignments.values()) == {"llvm:1"}
    assert plan.reasons["end"].startswith("auto, a second device saves too little: 1")


def test_every_row_has_its_reason(tmp_path):
    """Times on each device, the transfers that staying saves, and the limit that kept work away; also in a library."""
    model = mlp(64, 64, 3)
    for info in (*model.graph.input, *model.graph.output):
        info.type.tensor_type.shape.dim[0].dim_param = "batch"
    costs = [DeviceCost(1e9, 1e12, 0), DeviceCost(1e12, 1e12, 0)]
    model_of = CostModel(costs, links(2, 0, bandwidth=1e12, latency=1e-7), 0, symbolic_extent=32)
    devices, limit = ["llvm", "llvm"], {"llvm:1": 40_000}  # one of the three weights, of 16,384 bytes
    mod = rh.from_onnx(model, devices, "auto", cost_model=model_of, memory_limit=limit)
    rh.compile(mod).export_library(tmp_path / "model.so")
    about = rh.load(tmp_path / "model.so").metadata
    reasons = {entry["variable"]: entry["reason"] for entry in about.placement if entry["kind"] == "op"}
    places = {entry["variable"]: entry["device"] for entry in about.placement if entry["kind"] == "op"}
    assert set(places.values()) == {"llvm:0", "llvm:1"} and set(reasons) == set(places)
    for variable, reason in reasons.items():
        other = "llvm:0" if places[variable] == "llvm:1" else "llvm:1"
        assert re.match(f"auto, .*: .*s here, .*s on {other}", reason), reason
    products = [reason for name, reason in reasons.items() if "MatMul" in name and places[name] == "llvm:0"]
    assert products and all("of the limit of 40,000 bytes on llvm:1 other work leaves" in reason for reason in products)
    transfers = [entry["reason"] for entry in about.placement if entry["kind"] == "transfer"]
    assert any("auto, about" in reason and "8,192 bytes" in reason for reason in transfers)
    assert about.placement_estimate["assumed_sizes"] == {"batch": 32}
    assert not any("annotation of" in entry["reason"] for entry in about.placement)


@pytest.mark.usefixtures("free_exchanges")
def test_parts_on_a_mesh_have_the_reason_of_their_node():
    module = rh.from_onnx(mlp(4, 16, 2), ONE_CORE, {"*": "llvm[0:2]"})
    entries = [entry for entry in remarks_of(module).placement.entries if entry.kind == "op"]
    assert {entry.device for entry in entries if "@" in entry.variable} == {"llvm:1"}
    assert {entry.reason for entry in entries} == {"rule '*'"}


def test_staying_saves_transfers():
    model = CostModel([DeviceCost(1e9, 1e12, 0), DeviceCost(1e12, 1e12, 0)], links(2, 0, latency=1), 0)
    plan = auto_placement(mlp(4, 8, 1), ["llvm", "llvm"], model)
    assert plan.reasons["layer0/MatMul"] == (
        "auto, staying saves transfers: 512 ns here, 0.512 ns on llvm:1; transfers there and back would take 2 s more"
    )
    assert plan.assumed_sizes == {} and plan.figures == "tables"


def test_symbolic_dimensions_have_the_models_extent():
    model = mlp(1, 1024, 1)
    for info in (*model.graph.input, *model.graph.output):
        info.type.tensor_type.shape.dim[0].dim_param = "batch"
    costs = CostModel.for_vdevices(parse_vdevices(["llvm", GPU]))
    few = auto_placement(model, ["llvm", GPU], dataclasses.replace(costs, symbolic_extent=1))
    many = auto_placement(model, ["llvm", GPU], dataclasses.replace(costs, symbolic_extent=4096))
    assert many.single_device_estimates["llvm:0"] > 100 * few.single_device_estimates["llvm:0"]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (CostModel([DeviceCost(1, 1, 0)]), "1 devices for 2 vdevices"),
        (CostModel([DeviceCost(1, 1, 0)] * 2, {}, 0), r"no link between devices \(0, 1\)"),
        (CostModel([DeviceCost(1, 1, 0)] * 2, links(2, 0), 2), "host is device 2 of 2"),
        (CostModel([DeviceCost(1, 1, 0)] * 2, links(2, 0), 0, queues=[0]), "queues are .0.; expected"),
        (CostModel([DeviceCost(1, 1, 0)] * 2, links(2, 0), 0, queues=[0, -1]), "queues are .0, -1.; expected"),
    ],
)
def test_a_cost_model_that_does_not_fit(model, message):
    with pytest.raises(rh.VDeviceError, match=message):
        auto_placement(mlp(1, 4, 1), ["llvm", "c"], model)


ONE_CORE = [VDevice({**native("llvm").export(), "num-cores": 1}, index) for index in (0, 1)]


def test_equal_halves_go_to_two_equal_devices_for_throughput():
    plan = auto_placement(mlp(1024, 512, 4), ONE_CORE, objective="throughput")
    by_layer = [{plan.assignments[f"layer{i}/{op}"] for op in ("MatMul", "Relu")} for i in range(4)]
    assert by_layer in ([{a}, {a}, {b}, {b}] for a, b in (("llvm:0", "llvm:1"), ("llvm:1", "llvm:0")))
    assert plan.objective == "throughput"
    assert plan.estimate_seconds == max(plan.busy_seconds.values())
    assert plan.estimate_seconds < 0.51 * min(plan.single_device_estimates.values())
    assert min(plan.busy_seconds.values()) > 0.98 * plan.estimate_seconds


def test_one_call_of_the_same_stays_on_one_device():
    plan = auto_placement(mlp(1024, 512, 4), ONE_CORE)
    (used,) = set(plan.assignments.values())
    assert plan.objective == "latency"
    assert plan.estimate_seconds == plan.single_device_estimates[used]
    assert plan.busy_seconds[used] == pytest.approx(plan.estimate_seconds)


@pytest.mark.parametrize(("devices", "chosen"), [(ONE_CORE, "llvm:0"), (["c", *ONE_CORE], "llvm:0")])
def test_of_equal_cpus_the_first_is_taken(devices, chosen):
    """All read the caller's arrays in place; a slower device before them changes nothing."""
    plan = auto_placement(mlp(64, 512, 2), devices)
    assert set(plan.assignments.values()) == {chosen}


def test_one_call_overlaps_independent_branches_where_devices_have_cores_of_their_own(monkeypatch):
    model = parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 17]>
        g (float[512, 512] x) => (float[512, 512] y) {
            [left0] a = MatMul(x, x) [left1] b = MatMul(a, a)
            [right0] c = MatMul(x, x) [right1] d = MatMul(c, c)
            [join] y = Add(b, d) }""")
    monkeypatch.setattr(cost_model, "num_cores", lambda: 2)
    plan = auto_placement(model, ONE_CORE)
    assert plan.assignments["left0"] == plan.assignments["left1"]
    assert plan.assignments["right0"] == plan.assignments["right1"] != plan.assignments["left0"]
    assert plan.estimate_seconds < 0.55 * min(plan.single_device_estimates.values())
    monkeypatch.setattr(cost_model, "num_cores", lambda: 1)
    assert len(set(auto_placement(model, ONE_CORE).assignments.values())) == 1


def test_a_small_gain_of_one_call_is_not_believed():
    def small_beside_large(columns):
        return parser.parse_model(f"""
            <ir_version: 9, opset_import: ["" : 17]>
            g (float[512, 512] x, float[512, {columns}] z) => (float[512, 512] y, float[512, {columns}] v) {{
                [large] y = MatMul(x, x) [small] v = MatMul(x, z) }}""")

    costs = CostModel([DeviceCost(1e9, 1e12, 0)] * 2, links(2, 0), 0)
    for columns, devices in ((16, 1), (256, 2)):
        plan = auto_placement(small_beside_large(columns), ["llvm", "c"], costs)
        assert len(set(plan.assignments.values())) == devices


def test_the_estimates_as_json():
    plan = auto_placement(mlp(64, 64, 1), ["llvm", "c"])
    assert json.loads(json.dumps(plan.to_json())) == {
        "objective": "latency",
        "seconds": plan.estimate_seconds,
        "busy_seconds": plan.busy_seconds,
        "single_device_seconds": plan.single_device_estimates,
        "assumed_sizes": {},
        "figures": "tables",
    }


def test_an_unknown_objective_is_refused():
    with pytest.raises(rh.PlacementError, match="objective is 'speed'; expected 'latency' or 'throughput'"):
        auto_placement(mlp(1, 4, 1), ["llvm", "c"], objective="speed")
