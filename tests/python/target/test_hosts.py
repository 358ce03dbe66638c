"""Hosts in vdevices: names, look-ups, TVMScript, placement and errors; the CPU of a host that reads a tensor."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper, save_model
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import relax as R
from tvm.script import tirx as T
from tvm.target import Target

import relax_hetero as rh
from modules import ir_module
from relax_hetero.artifact.metadata import device_names
from relax_hetero.driver.compile import device_spec
from relax_hetero.errors import BuildError, HeteroError, PlacementError, VDeviceError
from relax_hetero.frontend import CostModel
from relax_hetero.target.hosts import (
    NETWORK_BYTES_PER_SECOND,
    NETWORK_LATENCY_SECONDS,
    host_of,
    hosts_of,
    is_native,
    on_host,
)
from relax_hetero.target.vdevice import (
    device_identifier,
    device_name,
    host_vdevice,
    lookup,
    parse_vdevices,
    same_object,
    same_vdevice,
    vdevices_of,
)
from relax_hetero.tools.cli import cli
from relax_hetero.transform import RealizeVDevice, UpdateVDevice, verify_placement

A = {"kind": "llvm", "keys": ["cpu", "host:a"]}
B = {"kind": "llvm", "keys": ["cpu", "host:b"]}
GPU = {"kind": "cuda", "arch": "sm_90"}


def names(entries: list) -> list[str]:
    vdevices = parse_vdevices(entries)
    return [f"{device_name(v, vdevices)} {v.vdevice_id}" for v in vdevices]


@ir_module(A, B)
def TwoHosts(x: R.Tensor((4,), "float32", "a/llvm:0"), y: R.Tensor((4,), "float32", "b/llvm")):
    z = R.to_vdevice(x, "b/llvm:0")
    w = R.add(z, y)
    return w


class TestNames:
    def test_numbers_count_per_host(self):
        entries = ["a/llvm", "b/llvm", "a/llvm", "b/nvidia/nvidia-h100", "b/cuda:3", "b/nvidia/nvidia-h100"]
        found = ["a/llvm:0 0", "b/llvm:0 0", "a/llvm:1 1", "b/cuda:0 0", "b/cuda:1 3", "b/cuda:2 1"]
        assert names(entries) == found

    def test_a_tag_is_not_a_host(self):
        assert names(["nvidia/nvidia-h100"]) == ["cuda:0 0"]
        assert names(["nvidia/llvm"]) == ["nvidia/llvm:0 0"]

    def test_a_target_in_json_after_its_host(self):
        (vdevice,) = parse_vdevices(['b/{"kind": "llvm", "mcpu": "x86-64-v3"}'])
        assert host_of(vdevice) == "b" and str(vdevice.target.attrs["mcpu"]) == "x86-64-v3"
        assert not is_native(vdevice.target)

    def test_the_name_of_a_kind_means_the_hardware_of_the_host(self):
        for vdevice in (rh.VDevice("llvm", host="b"), *parse_vdevices(["b/llvm", "b/cuda:1"])):
            assert host_of(vdevice) == "b" and is_native(vdevice.target)
        assert "mcpu" not in parse_vdevices("b/llvm")[0].target.attrs
        assert not is_native(rh.VDevice({"kind": "llvm"}, host="b").target)

    @pytest.mark.parametrize("host", ["", "b c", "b/c", "-b", "b:0", "ü", 3, ["b"], b"b"])
    def test_malformed_hosts(self, host):
        with pytest.raises(VDeviceError, match="host must be a name of letters") as error:
            rh.VDevice("llvm", host=host)
        assert repr(host) in str(error.value)

    @pytest.mark.parametrize(
        "entry", ["b/", "/llvm", "b /llvm", "b/gpu", "b/llvm:x", "a/b/llvm", "b/nvidia/none", "b/{}"]
    )
    def test_malformed_entries(self, entry):
        with pytest.raises(VDeviceError, match=r"vdevices\[1\]: "):
            parse_vdevices(["a/llvm", entry])

    @given(st.lists(st.sampled_from(["a/llvm", "b/llvm", "b/c", "c.d-e/llvm"]), min_size=1, max_size=6))
    def test_names_lead_back(self, entries):
        vdevices = parse_vdevices(entries)
        for vdevice in vdevices:
            name = device_name(vdevice, vdevices)
            assert same_object(lookup(name, vdevices), vdevice)
            assert device_identifier(vdevice, vdevices).isidentifier()
        assert hosts_of(vdevices) == list(dict.fromkeys(entry.split("/")[0] for entry in entries))
        assert device_names([device_spec(v, False) for v in vdevices]) == [device_name(v, vdevices) for v in vdevices]


class TestLookup:
    vdevices = parse_vdevices(["a/llvm", "b/llvm", "b/llvm"])

    @pytest.mark.parametrize(
        ("name", "position"),
        [("a/llvm", 0), ("b/llvm", 1), ("b/llvm:1", 2), ("b/vdevice:1", 2), ("llvm:1", 1), ("vdevice:2", 2)]
        + [("b/llvm:1:global", 2)],
    )
    def test_finds(self, name, position):
        assert same_object(lookup(name, self.vdevices), self.vdevices[position])

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("c/llvm", "no vdevice is on host 'c'"),
            ("a/llvm:1", "there is 1 of kind 'llvm'"),
            ("a/cuda", "no vdevice of kind 'cuda'"),
            ("/llvm", "is not a vdevice name"),
            ("a/b/llvm", "is not a vdevice name"),
        ],
    )
    def test_nothing_matches(self, name, message):
        with pytest.raises(VDeviceError, match=message) as error:
            lookup(name, self.vdevices)
        assert repr(name) in str(error.value) and "available: a/llvm:0, b/llvm:0, b/llvm:1" in str(error.value)

    def test_alike_on_two_hosts_is_not_the_same(self):
        assert not same_vdevice(*(rh.VDevice("llvm", host=host) for host in "ab"))
        assert not same_vdevice(rh.VDevice({"kind": "llvm"}), rh.VDevice({"kind": "llvm"}, host="a"))
        assert same_vdevice(*(rh.VDevice("llvm", host="a") for _ in range(2)))


class TestTargets:
    def test_off_a_host_is_the_target_before(self):
        for config in ({"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 4}, GPU):
            target = Target(config)
            there = on_host(target, "b", native=True)
            assert host_of(there) == "b" and is_native(there)
            assert host_of(on_host(there, "c")) == "c" and not is_native(on_host(there, "c"))
            assert_structural_equal(on_host(there, None), target)
            assert on_host(target, None).same_as(target)

    def test_the_host_target_of_a_gpu_stays(self):
        target = Target(GPU, host={"kind": "llvm", "mcpu": "x86-64-v3"})
        assert str(on_host(target, "b").host.attrs["mcpu"]) == "x86-64-v3"


class TestTVMScript:
    def test_printed_modules_read_back(self):
        read = tvm.script.from_source(TwoHosts.script(show_meta=True))
        assert_structural_equal(read, TwoHosts)
        assert hosts_of(vdevices_of(read)) == ["a", "b"]

    def test_annotations_are_the_vdevices_of_the_module(self):
        a, b = vdevices_of(TwoHosts)
        x, y = TwoHosts["main"].params
        assert same_object(x.ty.vdevice, a) and same_object(y.ty.vdevice, b)
        binding = TwoHosts["main"].body.blocks[0].bindings[0]
        assert same_object(binding.value.attrs.dst_vdevice, b)

    def test_off_and_onto_hosts(self):
        off = UpdateVDevice([rh.VDevice({"kind": "llvm"}, number) for number in range(2)])(TwoHosts)
        assert hosts_of(vdevices_of(off)) == []
        assert [int(param.ty.vdevice.vdevice_id) for param in off["main"].params] == [0, 1]
        assert_structural_equal(UpdateVDevice(vdevices_of(TwoHosts))(off), TwoHosts)


@pytest.fixture
def two_layers(tmp_path) -> str:
    """The path of a model of two products, the second of which is named ``/upper/matmul``."""
    generator = np.random.default_rng(0)
    weights = [numpy_helper.from_array(generator.random((8, 8), "float32"), name) for name in ("w0", "w1")]
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["y"], name="/lower/matmul"),
        helper.make_node("MatMul", ["y", "w1"], ["z"], name="/upper/matmul"),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 8]) for name in "xz"]
    model = helper.make_model(
        helper.make_graph(nodes, "two", ends[:1], ends[1:], weights),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    save_model(model, tmp_path / "two.onnx")
    return str(tmp_path / "two.onnx")


def devices_of(mod: tvm.IRModule) -> list[str]:
    """The devices of the results of "main"'s calls, in order."""
    vdevices = vdevices_of(mod)
    return [
        device_name(binding.var.ty.vdevice, vdevices)
        for block in mod["main"].body.blocks
        for binding in block.bindings
        if isinstance(binding.value, relax.Call)
    ]


class TestPlacement:
    def test_rules_name_hosts(self, two_layers):
        for mod in (
            rh.from_onnx(two_layers, vdevices=["a/llvm", "b/llvm"], placement={"/upper/*": "b/llvm"}),
            rh.place(rh.from_onnx(two_layers), {"/upper/*": "b/llvm"}, ["a/llvm", "b/llvm"]),
        ):
            assert devices_of(mod) == ["a/llvm:0", "b/llvm:0", "b/llvm:0"]

    def test_rules_of_a_host_that_is_not_there(self, two_layers):
        with pytest.raises(VDeviceError, match="no vdevice is on host 'c'.*available: a/llvm:0, b/llvm:0"):
            rh.from_onnx(two_layers, vdevices=["a/llvm", "b/llvm"], placement={"/upper/*": "c/llvm"})

    def test_hints_and_transfers(self):
        vdevices = parse_vdevices(["a/llvm", "b/llvm", "c/llvm"])
        builder = relax.BlockBuilder(tvm.IRModule(global_infos={"vdevice": vdevices}))
        x = relax.Var("x", relax.TensorType((4,), "float32"))
        with builder.function("main", [x]):
            y = builder.emit(rh.op.hint_on_device(builder.emit(relax.op.exp(x)), "b/llvm"))
            z = builder.emit(relax.op.negative(builder.emit(rh.op.to_vdevice(y, "c/llvm:0"))))
            builder.emit_func_output(z)
        placed = RealizeVDevice()(builder.get())
        verify_placement(placed)
        assert devices_of(placed) == ["b/llvm:0", "c/llvm:0", "c/llvm:0"]

    def test_conflicts_name_hosts(self):
        @ir_module(A, B)
        def Before(x: R.Tensor((4, 4), "float32", "a/llvm:0"), y: R.Tensor((4, 4), "float32", "b/llvm")):
            z = R.matmul(x, y)
            return z

        with pytest.raises(PlacementError, match="'x' is on a/llvm:0 .*, but 'y' is on b/llvm:0"):
            RealizeVDevice()(Before)
        copied = RealizeVDevice(insert_copies=True)(Before)
        assert devices_of(copied) == ["a/llvm:0", "a/llvm:0"]

    @pytest.mark.parametrize("objective", ["latency", "throughput"])
    def test_auto(self, two_layers, objective):
        mod = rh.from_onnx(two_layers, vdevices=["a/llvm", "b/llvm"], placement="auto", objective=objective)
        assert devices_of(mod) == ["a/llvm:0"] * 2  # a network costs more than two small products

    def test_links_between_hosts_are_a_network(self):
        costs = CostModel.for_vdevices(parse_vdevices(["a/llvm", "b/llvm", "b/c", "b/nvidia/nvidia-h100"]))
        for ends in [(0, 1), (1, 0), (0, 3), (3, 0)]:
            assert (costs.links[ends].bandwidth, costs.links[ends].latency) == (
                NETWORK_BYTES_PER_SECOND,
                NETWORK_LATENCY_SECONDS,
            )
        for ends in [(1, 2), (1, 3)]:
            assert costs.links[ends].latency < NETWORK_LATENCY_SECONDS

    def test_cores_of_hosts_are_their_own(self):
        vdevices = [rh.VDevice({"kind": "llvm", "num-cores": 4096}, host=host) for host in "ab"]
        both, single = CostModel.for_vdevices(vdevices), CostModel.for_vdevices(vdevices[:1])
        assert both.devices[0] == both.devices[1] == single.devices[0]


class TestReaders:
    def test_the_last_cpu_of_the_own_host(self):
        vdevices = parse_vdevices(["a/llvm", "b/llvm", "b/nvidia/nvidia-h100", "b/llvm", "c/nvidia/nvidia-h100"])
        actual = [host_vdevice(vdevices, each) for each in vdevices]
        assert [None if each is None else vdevices.index(each) for each in actual] == [0, 3, 3, 3, None]
        assert same_object(host_vdevice(vdevices), vdevices[0])

    def test_shapes_and_conditions_are_read_on_the_own_host(self):
        @ir_module(A, {"kind": "cuda", "arch": "sm_90", "keys": ["cuda", "gpu", "host:b"]}, B)
        def Before(s: R.Tensor((2,), "int64", "a/llvm"), t: R.Tensor((2,), "int64", "b/cuda")):
            k = T.int64()
            first = R.tensor_to_shape(s)
            second = R.tensor_to_shape(t)
            return (first, second)

        placed = RealizeVDevice()(Before)
        verify_placement(placed)
        vdevices = vdevices_of(placed)
        read = [
            device_name(binding.value.args[0].ty.vdevice, vdevices)
            for block in placed["main"].body.blocks
            for binding in block.bindings
            if binding.value.op.name == "relax.tensor_to_shape"
        ]
        assert read == ["a/llvm:0", "b/llvm:0"]


class TestRefused:
    def test_compiling_for_one_process(self):
        with pytest.raises(BuildError, match=r"on hosts \('a', 'b'\).*rh.cluster.Cluster"):
            rh.compile(TwoHosts)

    def test_some_with_a_host_and_some_without(self, two_layers):
        message = "vdevice 0 of the list names no host, and others do \\('b'\\)"
        with pytest.raises(VDeviceError, match=message):
            rh.from_onnx(two_layers, vdevices=["llvm", "b/llvm"], placement={"/upper/*": "b/llvm"})
        module = rh.from_onnx(two_layers, vdevices=["a/llvm", "b/llvm"], placement={"/upper/*": "b/llvm"})
        with pytest.raises(VDeviceError, match=message):
            rh.place(module, {}, vdevices=["llvm", "b/llvm"])
        module.update_global_info("vdevice", [rh.VDevice("llvm"), rh.VDevice("llvm", host="b")])
        with pytest.raises(VDeviceError, match=message):
            RealizeVDevice()(module)
        with pytest.raises(HeteroError, match=message):
            CostModel.for_vdevices(parse_vdevices(["llvm", "b/llvm"]))


def test_explain_shows_hosts(two_layers):
    options = ["--vdevice", "a/llvm", "--vdevice", "b/llvm", "--place", "/upper/*=b/llvm"]
    shown = CliRunner().invoke(cli, ["explain", two_layers, *options])
    assert shown.exit_code == 0, shown.output
    assert "transfer from a/llvm:0" in shown.output and "b/llvm:0" in shown.output
    assert not any(f" {name} " in shown.output for name in ("llvm:0", "llvm:1")), "a device without its host"
    refused = CliRunner().invoke(cli, ["compile", two_layers, *options, "-o", f"{two_layers}.so"])
    assert refused.exit_code != 0 and "on hosts" in refused.output and "generic" not in refused.output
