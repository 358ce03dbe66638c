"""The graph of a module as data, at each stage of compilation."""

import json

import numpy as np
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import relax_hetero as rh
from relax_hetero.report.shown_module import UNPLACED, module_data
from relax_hetero.transform.pipeline import pipeline_steps
from report.toy_model import Model


def after(last: str, mod: tvm.IRModule = Model) -> tvm.IRModule:
    for step in pipeline_steps():
        mod = step.run(mod)
        if step.name == last:
            return mod
    raise AssertionError(last)


def nodes_of(data, function="main"):
    return [(n["kind"], n["name"], n["op"], n["device"]) for n in data["nodes"] if n["function"] == function]


def edges_of(data):
    names = {n["id"]: n["name"] for n in data["nodes"]}
    return [(names[e["from"]], names[e["to"]]) for e in data["edges"]]


def test_a_placed_module():
    data = json.loads(json.dumps(module_data(after("RealizeVDevice"), "toy")))
    assert (data["schema"], data["kind"], data["title"]) == (1, "module", "toy")
    assert nodes_of(data) == [
        ("input", "x", None, "llvm:0"),
        ("input", "w", None, "llvm:1"),
        ("input", "b", None, "llvm:1"),
        ("op", "y", "relax.exp", "llvm:0"),
        ("transfer", "lv1", "relax.to_vdevice", "llvm:1"),
        ("op", "lv2", "relax.matmul", "llvm:1"),
        ("op", "z", "relax.add", "llvm:1"),
        ("op", "s", "relax.nn.softmax", "llvm:1"),
        ("output", "output", None, "llvm:1"),
    ]
    assert edges_of(data) == [
        *(("x", "y"), ("y", "lv1"), ("lv1", "lv2"), ("w", "lv2"), ("lv2", "z"), ("b", "z"), ("z", "s")),
        ("s", "output"),
    ]
    assert [edge["transfer"] for edge in data["edges"]] == [False, True, True, False, False, False, False, False]
    assert data["nodes"][1]["values"] == [{"shape": [16, 8], "dtype": "float32", "bytes": 512, "layout": None}]
    assert data["nodes"][3]["values"][0]["shape"] == ["n", 16] and data["nodes"][3]["values"][0]["bytes"] is None
    assert data["nodes"][3]["reason"].startswith("follows 'x'")
    assert data["functions"] == [{"name": "main", "inputs": [0, 1, 2], "outputs": [8]}]
    assert [(d["name"], d["ops"], d["transfers_in"], d["param_bytes"]) for d in data["devices"]] == [
        ("llvm:0", 1, 0, 0),
        ("llvm:1", 3, 1, 512 + 32),
    ]
    assert data["notes"] == ["4 ops on 2 devices, 1 transfer."]


def test_kernels_are_nodes_with_their_ops():
    data = module_data(after("FormDispatches"))
    assert [node[2] for node in nodes_of(data) if node[0] == "op"] == ["exp", "pack", "matmul, add, softmax"]
    kernels = {group["kernel"]: [data["nodes"][node]["name"] for node in group["nodes"]] for group in data["groups"]}
    assert kernels["tir_exp"] == ["y"] and len(kernels) == 3
    assert {group["precision"] for group in data["groups"]} == {"f32"}


def test_a_command_buffer_names_its_kernels():
    data = module_data(after("FormCommandBuffers"))
    region = next(group for group in data["groups"] if group["region"])
    assert region["notes"][0].startswith("runs 2 kernels: pack_16x8_llvm_0, matmul_Dx8x16")
    assert data["nodes"][region["nodes"][0]]["op"] == "main_commands (2 kernels)"


def test_a_lowered_module_looks_like_the_one_before_without_its_bookkeeping():
    data = module_data(after("LowerToVM"))
    assert [(node[0], node[2], node[3]) for node in nodes_of(data)] == [
        ("input", None, "llvm:0"),
        *[("input", None, "llvm:1")] * 2,
        ("op", "exp", "llvm:0"),
        ("transfer", "relax_hetero.to_device", "llvm:1"),
        ("op", "main_commands (2 kernels)", "llvm:1"),
        ("output", None, "llvm:1"),
    ]
    assert edges_of(data)[:3] == [("x", "alloc"), ("alloc", "lv1"), ("w", "alloc1")]


def test_fused_functions_are_groups_of_their_ops():
    fuse = [relax.transform.LegalizeOps(), relax.transform.AnnotateTIROpPattern(), relax.transform.FuseOps()]
    data = module_data(tvm.transform.Sequential(fuse)(rh.transform.RealizeVDevice()(Model)))
    assert [function["name"] for function in data["functions"]] == ["main"]
    group = next(group for group in data["groups"] if len(group["nodes"]) == 2)
    assert group["kernel"].startswith("fused_matmul") and group["device"] == "llvm:1"
    assert all(data["nodes"][node]["group"] == group["id"] for node in group["nodes"])


def test_stock_modules_without_devices_tuples_and_branches():
    @I.ir_module
    class Stock:
        @R.function
        def main(x: R.Tensor((4,), "float32"), c: R.Tensor((), "bool")):
            parts = R.split(x, 2)
            left = parts[0]
            if c:
                r = R.exp(left)
            else:
                r = R.sin(parts[1])
            t = (r, left)
            return t

    data = module_data(Stock)
    assert {node["device"] for node in data["nodes"]} == {UNPLACED}
    assert [device["name"] for device in data["devices"]] == [UNPLACED]
    assert {node[2] for node in nodes_of(data) if node[0] == "op"} == {"relax.split", "if", "relax.exp", "relax.sin"}
    edges = edges_of(data)
    assert ("parts", "output_1") in edges and ("c", "r") in edges and ("r", "output_0") in edges
    assert len(data["functions"][0]["outputs"]) == 2


def test_constants_are_nodes_once_each():
    weight = relax.const(np.ones((4,), "float32"))
    x = relax.Var("x", relax.TensorType((4,), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        y = builder.emit(relax.op.add(x, weight))
        builder.emit_func_output(builder.emit(relax.op.multiply(y, weight)))
    data = module_data(builder.get())
    assert [node[0] for node in nodes_of(data)].count("constant") == 1
    assert data["devices"][0]["constant_bytes"] == 16
    assert sum(edge["bytes"] == 16 and edge["value"] == "constant" for edge in data["edges"]) == 2
