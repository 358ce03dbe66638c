"""Files run in TVM's own virtual machine with the model's inputs alone, as programs without Python call them."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace

import numpy as np
import onnx.parser
import pytest
import tvm
import tvm_ffi
from tvm.script import relax as R

import relax_hetero as rh
from in_place import InPlace
from modules import ir_module
from relax_hetero.vm.file import standalone
from relax_hetero.vm.file.standalone import description

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files run without Python on Linux only")

WEIGHT = np.random.default_rng(0).standard_normal((8, 8)).astype("float32")


# A step of a decoder on two devices: a row is written to a cache, and the cache is read.
@ir_module("llvm", "llvm:1")
def Decoder(
    cache: R.Tensor(("n", 8), "float32", "llvm:0"),
    row: R.Tensor((1, 8), "float32", "llvm:0"),
    place: R.Tensor((1, 1), "int64", "llvm:0"),
    weight: R.Tensor((8, 8), "float32", "llvm:1"),
):
    with R.dataflow():
        new = R.scatter_nd(cache, place, R.multiply(row, R.const(2.0, "float32")))
        there = R.to_vdevice(R.nn.relu(new), "llvm:1")
        result = R.exp(R.matmul(R.nn.relu(R.matmul(there, weight)), weight))
        R.output(new, result)
    return (new, result, weight, row)


def tensor(array, device=0):
    result = tvm.runtime.empty(array.shape, str(array.dtype), tvm.cpu(device))
    result.copyfrom(array)
    return result


def load(path, *devices):
    """TVM's virtual machine for a file, on these CPU devices; the last one is the host."""
    machine = tvm_ffi.load_module(str(path))["vm_load_executable"]()
    machine["vm_initialization"](*(number for device in devices for number in (1, device, 2)))
    return machine


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    executable = rh.compile(Decoder, params={"weight": WEIGHT}, donate=["cache"])
    assert {region.device for region in executable.metadata.regions} >= {1}
    assert {dispatch.device for dispatch in executable.metadata.dispatches.values()} >= {0, 1}
    path = tmp_path_factory.mktemp("decoder") / "decoder.so"
    executable.export_library(path, key=b"signed with 16 bytes")
    return path


def arguments(n=6):
    generator = np.random.default_rng(n)
    draw = (generator.standard_normal((rows, 8)).astype("float32") for rows in (n, 1))
    return [tensor(array) for array in (*draw, np.array([[n - 2]]))]


@pytest.mark.parametrize("devices", [(0, 1, 1), (3, 5, 5)])
def test_two_devices_and_command_buffers_give_the_bits_of_python(decoder, devices):
    machine, ours = load(decoder, *devices), rh.vm.VirtualMachine(rh.load(decoder))
    for n in (6, 9, 6):
        expected = [each.numpy() for each in ours["main"](*arguments(n))]
        values = [tensor(each.numpy(), devices[0]) for each in arguments(n)]
        results = machine["main"](*values)
        assert [each.device.index for each in results] == [devices[0], devices[1], devices[1], devices[0]]
        for actual, wanted in zip(results, expected, strict=True):
            np.testing.assert_array_equal(actual.numpy(), wanted)
        assert results[0].data_ptr() == values[0].data_ptr()  # donated
        np.testing.assert_array_equal(results[3].numpy(), values[1].numpy())
        assert results[3].data_ptr() != values[1].data_ptr()  # results share no memory with other arguments
        results[2].copyfrom(np.zeros((8, 8), "float32"))  # or with weights


def test_arguments_are_checked(decoder):
    machine = load(decoder, 0, 1, 1)
    cache, row, place = arguments()
    wide = tensor(np.zeros((6, 16), "float32"))
    misaligned = tensor(np.zeros(17, "float32"))._create_view((1, 8), "float32", 4)
    for index, value, message in (
        (0, tensor(cache.numpy(), 1), r"'cache': found float32\[6, 8\] on device 1:1, expected float32\[n, 8\] on"),
        (0, wide, r"'cache': found float32\[6, 16\] on device 1:0, expected float32\[n, 8\] on device 1:0"),
        (1, tensor(row.numpy().astype("float64")), r"'row': found float64\[1, 8\]"),
        (1, tensor(np.zeros(8, "float32")), r"'row': found float32\[8\]"),
        (1, 3, "'row': found no tensor, expected float32"),
        (1, misaligned, "'row': found the address .* expected a multiple of 16"),
        (1, cache._create_view((1, 8), "float32", 0), "arguments 'cache', which the call overwrites, and 'row' share"),
    ):
        values = [cache, row, place]
        values[index] = value
        with pytest.raises(ValueError, match=message):
            machine["main"](*values)
    machine["main"](cache, row, place)  # the machine is as good as before


def test_arguments_that_a_call_writes_to_are_copied(tmp_path):
    rh.compile(InPlace).export_library(tmp_path / "model.so")
    machine, x = load(tmp_path / "model.so", 0), tensor(np.zeros(4, "float32"))
    for _ in range(2):
        np.testing.assert_array_equal(machine["main"](x)[0].numpy(), np.ones(4))
    np.testing.assert_array_equal(x.numpy(), np.zeros(4))


def test_results_share_no_memory_with_each_other(tmp_path):
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        net (float[2] x) => (float[2] y, float[2] z) { y = Exp(x) z = Identity(y) }""")
    rh.compile(rh.from_onnx(model)).export_library(tmp_path / "model.so")
    y, z = load(tmp_path / "model.so", 0)["main"](tensor(np.zeros(2, "float32")))
    np.testing.assert_array_equal([y.numpy(), z.numpy()], np.ones((2, 2)))
    assert y.data_ptr() != z.data_ptr()


def test_tensors_in_tuples_are_checked(tmp_path):
    @ir_module("llvm")
    def module(pair: R.Tuple(R.Tensor((4,), "float32"), R.Tensor((4,), "float32"))):
        with R.dataflow():
            y = R.add(pair[0], pair[1])
            R.output(y)
        return y

    rh.compile(module).export_library(tmp_path / "model.so")
    machine, x = load(tmp_path / "model.so", 0), tensor(np.arange(4, dtype="float32"))
    assert machine["main"]((x, x)).numpy().tolist() == [0, 2, 4, 6]
    with pytest.raises(ValueError, match="'pair': found the address .* expected a multiple of 16"):
        machine["main"]((x, tensor(np.zeros(5, "float32"))._create_view((4,), "float32", 4)))


def test_default_values(tmp_path):
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        net (float[2] x, float[2] w) => (float[2] y) <float[2] w = {1, 2}> { y = Add(x, w) }""")
    rh.compile(rh.from_onnx(model)).export_library(tmp_path / "model.so")
    machine, x = load(tmp_path / "model.so", 0), tensor(np.zeros(2, "float32"))
    assert machine["main"](x, None).numpy().tolist() == [1, 2]
    assert machine["main"](x, tensor(np.array([3, 4], "float32"))).numpy().tolist() == [3, 4]


def test_upper_bounds_of_sizes(tmp_path):
    """The error is the one of Python, for a size that the second input determines."""

    @ir_module()
    def model(w: R.Tensor((4,), "float32"), x: R.Tensor(("m", 4), "float32"), y: R.Tensor(("n", 4), "float32")):
        R.func_attr({"tir_var_upper_bound": {"m": 8, "n": 2}})
        with R.dataflow():
            z = (R.exp(R.add(x, w)), R.exp(y))
            R.output(z)
        return z

    executable = rh.compile(model)
    executable.export_library(tmp_path / "model.so")
    machine, ours = load(tmp_path / "model.so", 0), rh.vm.VirtualMachine(executable)
    w = tensor(np.zeros(4, "float32"))
    for rows, columns in ((9, 1), (8, 3)):
        x, y = (tensor(np.zeros((count, 4), "float32")) for count in (rows, columns))
        with pytest.raises(rh.BindingError) as expected:
            ours["main"](w, x, y)
        with pytest.raises(ValueError) as raised:
            machine["main"](w, x, y)
        assert str(raised.value) == str(expected.value) and "expected at most" in str(raised.value)
    assert machine["main"](w, x, tensor(np.zeros((2, 4), "float32")))[1].numpy().tolist() == [[1] * 4] * 2


def test_a_file_that_was_replaced_after_its_code_was_loaded(decoder, tmp_path):
    path = shutil.copy(decoder, tmp_path / "model.so")
    machine = load(path, 0, 1, 1)
    shutil.copy(decoder, tmp_path / "other.so")
    os.replace(tmp_path / "other.so", path)
    with pytest.raises(RuntimeError, match=r"model.so was replaced after its code was loaded: load it again"):
        machine["main"](*arguments())


def test_an_executable_in_memory_needs_our_machine():
    executable = rh.compile(InPlace)
    machine = executable.module["vm_load_executable"]()
    machine["vm_initialization"](1, 0, 2)
    with pytest.raises(rh.HeteroError, match=r"expected rh.vm.VirtualMachine, or a file of Executable.export_library"):
        machine["main"](tensor(np.zeros(4, "float32")))


def test_names_become_strings_of_c():
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]> net (float[2] x) => (float[2] y) { y = Exp(x) }""")
    model.graph.input[0].name = model.graph.node[0].input[0] = 'naïve "x"\\'
    text = description(rh.compile(rh.from_onnx(model)).metadata, [])
    assert r'"na\303\257ve \042x\042\134"' in text


def test_vectors_of_sve_have_the_length_of_the_code(decoder, tmp_path, monkeypatch):
    """Also in programs without Python; a file for an A64FX is imitated."""
    metadata = rh.load(decoder).metadata
    for cpu, size in (("generic", 0), ("neoverse-v2", 0), ("neoverse-v1", 32), ("a64fx", 64)):
        device = rh.vm.DeviceSpec(f'{{"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "{cpu}"}}')
        devices = (device, *metadata.devices[1:])
        tables = description(replace(metadata, devices=devices), [0] * len(metadata.constants))
        assert f"rh_sve_bytes = {size};" in tables
    monkeypatch.setattr(standalone, "sve_bytes", lambda spec: 64)
    path = tmp_path / "wide.so"
    rh.compile(Decoder, params={"weight": WEIGHT}, donate=["cache"]).export_library(path)
    with pytest.raises(RuntimeError, match="compiled for vectors of SVE of 512 bits, which this process lacks"):
        load(path, 0, 1, 1)["main"](*arguments())
