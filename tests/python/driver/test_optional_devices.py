"""`rh.compile(optional=...)`: executables on machines without the device. (GPU 99 is always absent.)"""

import json

import numpy as np
import onnx
import pytest
import tvm
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper
from tvm.script import relax as R

import relax_hetero as rh
from modules import ir_module
from relax_hetero.artifact.container import open_container
from relax_hetero.target.vdevice import vdevices_of
from relax_hetero.tools.cli import cli

GPU = rh.VDevice({"kind": "cuda", "arch": "sm_90a"}, 98)
OTHER = rh.VDevice({"kind": "cuda", "arch": "sm_90a"}, 99)
X = np.random.default_rng(0).standard_normal((4, 32)).astype("float32")


def layers(vdevices, devices):
    """A model with one product for each device, and the product of its weights."""
    rng = np.random.default_rng(1)
    count = len(devices)
    nodes = [helper.make_node("MatMul", [f"x{i}", f"w{i}"], [f"x{i + 1}"], name=f"layer{i}") for i in range(count)]
    arrays = [rng.standard_normal((32, 32)).astype("float32") for _ in range(count)]
    weights = [numpy_helper.from_array(array, f"w{i}") for i, array in enumerate(arrays)]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 32]) for name in ("x0", f"x{count}")]
    graph = helper.make_graph(nodes, "layers", ends[:1], ends[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    placement = {f"layer{i}": device for i, device in enumerate(devices)}
    return rh.from_onnx(model, vdevices, placement), np.linalg.multi_dot([X, *arrays])


@pytest.fixture(scope="module")
def cut():
    mod, expected = layers(["llvm", GPU], ["llvm:0", "cuda:0", "llvm:0"])
    return rh.compile(mod, optional=["cuda:0"]), expected


def check(vm, expected):
    np.testing.assert_allclose(vm["main"](X).numpy(), expected, rtol=1e-4, atol=1e-4)


def test_a_machine_without_the_gpu_runs_on_the_cpu(cut, caplog):
    exe, expected = cut
    with caplog.at_level("INFO", "relax_hetero"):
        vm = rh.vm.VirtualMachine(exe)
    assert "runs without cuda:0" in caplog.text and "does not have" in caplog.text
    check(vm, expected)
    assert [device.dlpack_device_type() for device in vm.devices] == [1]
    np.testing.assert_allclose(vm.submit("main", X).result().numpy(), expected, rtol=1e-4, atol=1e-4)
    assert not vm.executable.metadata.schedules  # one device: nothing is cut


def test_the_numbers_are_those_of_the_model_on_the_cpu(cut):
    plain = rh.vm.VirtualMachine(rh.compile(layers(["llvm"], ["llvm:0"] * 3)[0]))
    np.testing.assert_array_equal(rh.vm.VirtualMachine(cut[0])["main"](X).numpy(), plain["main"](X).numpy())


def test_an_exported_library_has_both_versions(cut, tmp_path):
    exe, expected = cut
    exe.export_library(tmp_path / "model.so")
    loaded = rh.load(tmp_path / "model.so", verify=True)
    assert loaded.metadata.optional == (1,) and len(loaded.versions) == 1
    check(rh.vm.VirtualMachine(loaded), expected)
    loaded.export_library(tmp_path / "again.so", key=b"0123456789abcdef")
    again = rh.load(tmp_path / "again.so", key=b"0123456789abcdef")
    check(rh.vm.VirtualMachine(again), expected)
    check(rh.vm.VirtualMachine(rh.load(tmp_path / "again.so", copy=True)), expected)


def test_versions_share_constants_in_the_file(tmp_path):
    @ir_module(({"kind": "cuda", "arch": "sm_90a"}, 98))
    def Model(x: R.Tensor((1 << 20,), "float32"), w: R.Tensor((1 << 20,), "float32")):
        y = R.add(x, w)
        return y

    w = np.ones(1 << 20, "float32")
    exe = rh.compile(Model, {"w": w}, optional="cuda:0", cache=False)
    exe.export_library(tmp_path / "model.so")
    assert (tmp_path / "model.so").stat().st_size < 1.5 * w.nbytes
    vm = rh.vm.VirtualMachine(rh.load(tmp_path / "model.so"))  # no CPU in the module: this one
    np.testing.assert_array_equal(vm["main"](w).numpy(), 2 * w)


def test_devices_and_limits_go_by_the_names_of_the_whole(cut):
    exe, expected = cut
    for devices in ({"llvm:0": "cpu:1", "cuda:0": "cuda:97"}, ["cpu:1", "cuda:97"]):
        vm = rh.vm.VirtualMachine(exe, devices, memory_limit={"cuda:0": "1 MB", "llvm:0": "2 MB"})
        assert vm.devices == [tvm.cpu(1)]
        check(vm, expected)
    with pytest.raises(rh.MemoryLimitError, match="llvm:0"):
        rh.vm.VirtualMachine(exe, memory_limit={"cuda:0": "1 MB", "llvm:0": 100})
    with pytest.raises(rh.BindingError, match="compiled for a cuda device"):
        rh.vm.VirtualMachine(exe, {"cuda:0": "cpu:1"})
    with pytest.raises(rh.BindingError, match="vulkan"):
        rh.vm.VirtualMachine(exe, {"vulkan:0": "cpu:1"})


def test_of_two_optional_devices_the_first_that_is_absent_decides(monkeypatch):
    """A second CPU device stands in for a present GPU."""
    mod, expected = layers(["llvm", GPU, OTHER], ["llvm:0", "cuda:0", "cuda:1"])
    exe = rh.compile(mod, optional=["cuda:1", "cuda:0"])
    assert exe.metadata.optional == (2, 1)
    vdevice_ids = [[spec.vdevice_id for spec in version.devices if spec.kind == "cuda"] for version in exe.versions]
    assert vdevice_ids == [[99], []]  # the last named goes first
    check(rh.vm.VirtualMachine(exe), expected)
    from relax_hetero.vm.file import versions

    def only_the_first_is_absent(_name, spec, device):
        if spec.vdevice_id == 98:
            raise rh.BindingError("absent")
        return device

    monkeypatch.setattr(versions, "check_device", only_the_first_is_absent)
    assert versions.version_for_devices(exe, None)[0] is exe.versions[0]
    monkeypatch.setattr(versions, "check_device", lambda _name, _spec, device: device)
    assert versions.version_for_devices(exe, None)[0] is exe


def test_hints_and_functions_follow():
    @ir_module(({"kind": "cuda", "arch": "sm_90a"}, 98), "llvm")
    class Model:
        @R.function
        def inner(z: R.Tensor((3,), "float32")):
            a = R.multiply(z, z)
            return a

        @R.function
        def main(x: R.Tensor((3,), "float32", "llvm:0"), n: R.Tensor((3,), "float32", "cuda:0")):
            cls = Model
            y = R.to_vdevice(x, "cuda:0")
            h = R.hint_on_device(n, tvm.cuda(98))
            a = cls.inner(R.add(y, h))
            b = cls.inner(x)
            return (R.to_vdevice(a, "llvm:0"), b)

    vm = rh.vm.VirtualMachine(rh.compile(Model, optional="cuda"))
    x = np.array([1, 2, 3], "float32")
    a, b = vm["main"](x, x)
    np.testing.assert_array_equal(a.numpy(), 4 * x * x)
    np.testing.assert_array_equal(b.numpy(), x * x)
    assert len(vdevices_of(Model)) == 2  # the module is as it was


def test_both_versions_come_from_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RELAX_HETERO_CACHE", str(tmp_path / "cache"))
    mod, expected = layers(["llvm", GPU], ["llvm:0", "cuda:0"])
    for state in ("miss", "hit"):
        exe = rh.compile(mod, optional="cuda:0", cache=True)
        assert [exe.metadata.cache.state, exe.versions[0].metadata.cache.state] == [state] * 2
        exe.export_library(tmp_path / "model.so")
        check(rh.vm.VirtualMachine(exe), expected)
        check(rh.vm.VirtualMachine(rh.load(tmp_path / "model.so")), expected)


@pytest.mark.parametrize(
    ("optional", "message"),
    [
        ("llvm:0", "optional: llvm:0 is a CPU"),
        (["cuda:1"], "optional: no vdevice 'cuda:1'"),
        (["cuda:0", "vdevice:1"], "optional: cuda:0 is given twice"),
        ([3], "optional: a vdevice is named by"),
    ],
)
def test_wrong_names(optional, message):
    with pytest.raises(rh.HeteroError, match=message):
        rh.compile(layers(["llvm", GPU], ["llvm:0", "cuda:0"])[0], optional=optional)


def test_a_lowered_module_is_refused():
    mod = rh.get_pipeline()(layers(["llvm", GPU], ["llvm:0", "cuda:0"])[0])
    with pytest.raises(rh.BuildError, match="before LowerToVM"):
        rh.compile(mod, optional="cuda:0")


def test_a_device_that_is_not_optional_has_to_be_there():
    exe = rh.compile(layers(["llvm", GPU], ["llvm:0", "cuda:0"])[0])
    with pytest.raises(rh.BindingError, match="cuda:0 is to run on"):
        rh.vm.VirtualMachine(exe)


def test_a_header_that_says_nonsense(cut, tmp_path):
    cut[0].export_library(tmp_path / "model.so")
    container = open_container(tmp_path / "model.so")
    for versions in (7, [{"metadata": ""}], [{"metadata": "", "constants": 99}], [{"metadata": "", "constants": -1}]):
        container.header["versions"] = versions
        with pytest.raises(ValueError, match="versions"):
            container.versions()


def test_the_command_line(tmp_path):
    gpu = '{"kind": "cuda", "arch": "sm_90a"}'
    nodes = [helper.make_node("Relu", ["x"], ["y"], name="first"), helper.make_node("Exp", ["y"], ["z"], name="second")]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [8]) for name in "xz"]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:])
    model, library = tmp_path / "model.onnx", tmp_path / "model.so"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), str(model))
    options = ["--vdevice", "llvm", "--vdevice", gpu, "--place", "second=cuda:0", "--optional", "cuda:0"]

    def run(*arguments):
        code = CliRunner().invoke(cli, [str(argument) for argument in arguments])
        return code.exit_code, code.output

    code, output = run("compile", model, "-o", library, *options, "--no-cache", "--json")
    assert code == 0, output
    assert [device["optional"] for device in json.loads(output[output.index("{") :])["devices"]] == [False, True]
    code, output = run("explain", library, "--summary")
    assert code == 0 and "cuda:0 (optional)" in output
    code, output = run("explain", model, *options, "--json")
    assert json.loads(output[output.index("{") :])["optional"] == ["cuda:0"]
    code, output = run("run", library, "--optional", "cuda:0")
    assert code == 2 and "--optional" in output
    code, output = run("run", model, *options[:-1], "cuda:7")
    assert code == 1 and "optional: no vdevice 'cuda:7'" in output
    if not tvm.cuda(0).exist:
        assert run("run", library, "--check", "--onnx", model)[0] == 0
