"""`placement=`: where the bindings, inputs, outputs and transfers of an imported model end."""

import pytest
from onnx import TensorProto, helper, parser
from tvm import relax

import relax_hetero as rh
from relax_hetero.target.vdevice import device_name, vdevices_of
from relax_hetero.transform import UpdateVDevice
from relax_hetero.transform.placement.realize_vdevice import collect_placement

CPU_AND_C = ["llvm", "c"]
CPU_AND_GPU = ["llvm", {"kind": "cuda", "arch": "sm_90"}]

CHAIN = """
    <ir_version: 8, opset_import: ["" : 17]>
    g (float[4] x, float[4] z) => (float[4] d, float[4] b)
    <float[4] w = {1, 2, 3, 4}> {
        [first] a = Add(x, w)
        [second] b = Add(a, z)
        [third] c = Mul(b, w)
        [fourth] d = Add(b, c)
    }"""


def devices_of(mod):
    """Names of the devices of parameters and bindings of main, by variable."""
    listed = vdevices_of(mod)
    devices = {param.name: device_name(param.ty.vdevice, listed) for param in mod["main"].params}
    for block in mod["main"].body.blocks:
        for binding in block.bindings:
            devices[binding.var.name] = device_name(binding.var.ty.vdevice, listed)
    return devices


def transfers(mod):
    return [
        binding.var.name
        for block in mod["main"].body.blocks
        for binding in block.bindings
        if isinstance(binding.value, relax.Call) and binding.value.op.name == "relax.to_vdevice"
    ]


def imported(text, vdevices, **options):
    mod = rh.from_onnx(parser.parse_model(text), vdevices=vdevices, **options)
    relax.analysis.well_formed(mod)
    return mod


def test_without_rules_all_is_on_the_first_device():
    mod = imported(CHAIN, CPU_AND_C)
    assert set(devices_of(mod).values()) == {"llvm:0"}
    assert transfers(mod) == []


def test_nodes_are_where_the_rules_put_them():
    mod = imported(CHAIN, CPU_AND_C, placement={"third": "c", "Add": "llvm"})
    devices = devices_of(mod)
    assert {name: devices[name] for name in ("first", "second", "third", "fourth")} == {
        "first": "llvm:0",
        "second": "llvm:0",
        "third": "c:0",
        "fourth": "llvm:0",
    }
    assert len(transfers(mod)) == 2


def test_inputs_live_on_the_device_of_their_first_use():
    devices = devices_of(imported(CHAIN, CPU_AND_C, placement={"second": "c"}))
    assert (devices["x"], devices["z"]) == ("llvm:0", "c:0")


def test_outputs_live_where_they_are_made():
    mod = imported(CHAIN, CPU_AND_C, placement={"fourth": "c"})
    fields = mod["main"].ret_ty.fields
    assert [device_name(field.vdevice, vdevices_of(mod)) for field in fields] == ["c:0", "llvm:0"]


def test_a_value_is_transferred_once():
    mod = imported(CHAIN, CPU_AND_C, placement=[("first", "llvm"), ("second", "llvm"), ("*", "c")])
    assert len(transfers(mod)) == 1


def test_weights_live_where_they_are_used():
    mod = imported(CHAIN, CPU_AND_C, placement={"third": "c"})
    by_name = {b.var.name: b.value for block in mod["main"].body.blocks for b in block.bindings}
    listed = vdevices_of(mod)
    assert device_name(by_name["first"].args[1].ty.vdevice, listed) == "llvm:0"
    assert device_name(by_name["third"].args[1].ty.vdevice, listed) == "c:0"


def test_devices_may_be_given_in_many_ways():
    vdevices = [rh.VDevice("llvm", 0), rh.VDevice("llvm", 1)]
    for device in ("llvm:1", "vdevice:1", vdevices[1]):
        assert devices_of(imported(CHAIN, vdevices, placement={"third": device}))["third"] == "llvm:1"


def test_shapes_are_read_on_the_host_and_arrive_where_they_are_used():
    mod = imported(
        """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[N, M] x) => (float[N, M] y) {
            s = Shape(x) f = Cast<to = 1>(s) p = ReduceProd<keepdims = 0>(f) y = Mul(x, p)
        }
        """,
        CPU_AND_GPU,
        placement={"*": "cuda"},
    )
    listed = vdevices_of(mod)
    for block in mod["main"].body.blocks:
        for binding in block.bindings:
            on_host = binding.value.op.name == "relax.shape_to_tensor"
            assert device_name(binding.var.ty.vdevice, listed) == ("llvm:0" if on_host else "cuda:0")
    assert len(transfers(mod)) == 1


def test_nodes_in_branches_are_placed():
    mod = imported(
        """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[4] x, bool c) => (float[4] y) {
            y = If(c) <then_branch = t () => (float[4] p) { [inner] q = Neg(x) p = Relu(q) },
                       else_branch = e () => (float[4] r) { r = Abs(x) }>
        }""",
        CPU_AND_C,
        placement={"inner": "c"},
    )
    values = [binding.value for block in mod["main"].body.blocks for binding in block.bindings]
    (branching,) = (value for value in values if isinstance(value, relax.If))
    inner = [binding.var for block in branching.true_branch.blocks for binding in block.bindings]
    placed = {var.name: device_name(var.ty.vdevice, vdevices_of(mod)) for var in inner}
    assert placed["inner"] == "c:0"
    assert placed["If_0/then_branch/Relu_1"] == "llvm:0"


def test_a_report_says_where_each_node_is():
    with collect_placement() as reports:
        imported(CHAIN, CPU_AND_C, placement={"third": "c"})
    entries = {entry.variable: entry.device for entry in reports[-1].entries}
    assert entries["third"] == "c:0" and entries["fourth"] == "llvm:0"


def test_auto_places_by_the_cost_model():
    cheap_products = rh.frontend.CostModel(
        [rh.frontend.DeviceCost(1e9, 1e12, 0), rh.frontend.DeviceCost(1e12, 1e9, 0)],
        {(0, 1): rh.frontend.LinkCost(1e15, 0), (1, 0): rh.frontend.LinkCost(1e15, 0)},
        host=0,
    )
    text = """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[64, 64] x) => (float[64, 64] y) { [product] p = MatMul(x, x) [sum] y = Add(p, x) }"""
    devices = devices_of(imported(text, CPU_AND_C, placement="auto", cost_model=cheap_products))
    assert (devices["product"], devices["sum"]) == ("c:0", "llvm:0")
    assert set(devices_of(imported(text, CPU_AND_C, placement="auto")).values()) == {"llvm:0"}


def test_auto_for_throughput_uses_both_devices():
    costs = rh.frontend.CostModel(
        [rh.frontend.DeviceCost(1e9, 1e12, 0)] * 2,
        {(0, 1): rh.frontend.LinkCost(1e12, 0), (1, 0): rh.frontend.LinkCost(1e12, 0)},
        host=0,
    )
    text = """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[64, 64] x) => (float[64, 64] y) { [first] p = MatMul(x, x) [second] y = MatMul(p, p) }"""
    devices = devices_of(imported(text, CPU_AND_C, placement="auto", cost_model=costs, objective="throughput"))
    # Inputs and outputs are on the host.
    assert {devices["first"], devices["second"]} == {"llvm:0", "c:0"}
    assert len(set(devices_of(imported(text, CPU_AND_C, placement="auto", cost_model=costs)).values())) == 1


def test_an_unknown_objective_is_refused():
    with pytest.raises(rh.PlacementError, match="objective is 'speed'"):
        imported(CHAIN, CPU_AND_C, placement="auto", objective="speed")


def test_a_pattern_that_matches_nothing():
    with pytest.raises(rh.FrontendError, match="'fith' matches no node.*'first'"):
        imported(CHAIN, CPU_AND_C, placement={"fith": "c"})


def test_the_reasons_travel_with_the_module(tmp_path):
    model = helper.make_model(
        helper.make_graph(
            [
                helper.make_node("Exp", ["x"], ["a"], name="first"),
                helper.make_node("Relu", ["a"], ["y"], name="second"),
            ],
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
    )
    mod = rh.from_onnx(model, vdevices=["llvm", {"kind": "llvm", "mcpu": "x86-64-v2"}], placement={"Relu": "llvm:1"})
    placement = rh.compile(mod).metadata.placement
    reasons = {entry["variable"]: entry["reason"] for entry in placement if entry["kind"] == "op"}
    assert reasons == {"first": "no rule matches: default device", "second": "rule 'Relu'"}
    changed = UpdateVDevice(rh.VDevice("c", 1), 1)(mod)
    kinds = {entry["device"] for entry in rh.compile(changed).metadata.placement}
    assert kinds == {"llvm:0", "c:0"}
