"""One file: exported, loaded, mapped; and every file that is none."""

import json
import os
import shutil
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm.script import relax as R

import relax_hetero as rh
from modules import ir_module
from relax_hetero.artifact import container as container_format
from relax_hetero.vm.device.tensors import bytes_of, nbytes_of

X = np.ones(1024, "float32")
DATA = np.arange(1024, dtype="float32")


@pytest.fixture(scope="module")
def exported(lifted, tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "model.so"
    lifted.export_library(path)
    return path


@pytest.fixture
def copy(exported, tmp_path):
    return shutil.copy(exported, tmp_path / "copy.so")


def check(exe):
    y, d = rh.vm.VirtualMachine(exe)["main"](X)
    np.testing.assert_array_equal(y.numpy(), X + DATA)
    np.testing.assert_array_equal(d.numpy(), DATA)


def test_a_loaded_executable_is_the_exported_one(lifted, exported):
    exe = rh.load(exported)
    assert exe.metadata == lifted.metadata
    assert exe.signature("main") == lifted.signature("main")
    check(exe)
    check(rh.load(str(exported), verify=True))


def test_nothing_but_the_file_is_left(exported):
    assert os.listdir(exported.parent) == ["model.so"]


def test_weights_are_mapped_and_shared_by_devices(exported):
    exe = rh.load(exported)
    vm = rh.vm.VirtualMachine(exe, {"llvm:1": "cpu:7"})
    first, second = vm._constants.values
    assert (str(first.device), str(second.device)) == ("cpu:0", "cpu:7")
    # Equal constants were exported once; both devices read the same bytes of the file.
    assert first.data_ptr() == second.data_ptr() == exe._container.weight(0).ctypes.data
    assert first.data_ptr() % 64 == 0
    assert vm._constants is rh.vm.VirtualMachine(exe, ["cpu:0", "cpu:7"])._constants
    assert mapped_file(first.data_ptr()) == str(exported)


def mapped_file(address):
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            if begin <= address < end:
                return line.split()[-1]


WEIGHTS = 1 << 26


@pytest.fixture(scope="module")
def heavy(lifted, tmp_path_factory):
    """A file with 64 MB of weights."""
    big = np.zeros(WEIGHTS // 4, "float32")
    path = tmp_path_factory.mktemp("heavy") / "big.so"
    spec = rh.vm.ConstantSpec("big", big.shape, "float32", 0)
    metadata = rh.vm.Metadata(lifted.devices, 0, {}, (spec,))
    rh.vm.Executable(lifted.module, metadata, [tvm.runtime.tensor(big)]).export_library(path)
    return path


def test_loading_reads_no_weights(heavy):
    before = bytes_read()
    vm = rh.vm.VirtualMachine(rh.load(heavy))
    assert bytes_read() - before < WEIGHTS // 4
    (weight,) = vm._constants.values
    assert weight.shape == (WEIGHTS // 4,) and nbytes_of(weight) == WEIGHTS
    assert mapped_file(weight.data_ptr()) == str(heavy)


@pytest.mark.timing
def test_loading_leaves_weights_out_of_memory(heavy):
    before = resident_bytes()
    vm = rh.vm.VirtualMachine(rh.load(heavy))
    assert resident_bytes() - before < WEIGHTS // 4
    assert nbytes_of(vm._constants.values[0]) == WEIGHTS


def bytes_read():
    """Bytes that this process has read from files so far; pages of mapped files do not count."""
    with open("/proc/self/io") as counters:
        return int(counters.readline().removeprefix("rchar: "))


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_every_element_type_is_kept(lifted, tmp_path):
    import ml_dtypes

    arrays = [
        np.array([1, 2, 3], ml_dtypes.bfloat16),
        np.array([True, False]),
        np.array(3, "int64"),
        np.zeros((0, 3), "float16"),
        np.array([0.5], ml_dtypes.float8_e4m3fn),
    ]
    specs = [rh.vm.ConstantSpec(str(i), a.shape, str(a.dtype), i % 2) for i, a in enumerate(arrays)]
    metadata = rh.vm.Metadata(lifted.devices, 0, {}, tuple(specs))
    path = tmp_path / "kinds.so"
    rh.vm.Executable(lifted.module, metadata, [tvm.runtime.tensor(a) for a in arrays]).export_library(path)
    for tensor, array in zip(rh.load(path).constants, arrays, strict=True):
        assert str(tensor.dtype) == str(array.dtype)
        assert tensor.shape == array.shape
        assert bytes_of(tensor).tobytes() == array.tobytes()


def test_a_loaded_executable_exports_itself(exported, tmp_path):
    again = tmp_path / "again.so"
    exe = rh.load(exported)
    exe.export_library(again)
    assert again.read_bytes() == exported.read_bytes()
    exe.export_library(exported)  # onto the file it is mapped from
    check(exe)
    check(rh.load(again))


def test_exporting_over_a_loaded_file(lifted, chain, tmp_path):
    path = tmp_path / "model.so"
    lifted.export_library(path)
    first = rh.load(path)
    machine = rh.vm.VirtualMachine(first)
    chain.export_library(path)
    second = rh.load(path)
    check(first)
    np.testing.assert_array_equal(machine["main"](X)[1].numpy(), DATA)
    z, _ = rh.vm.VirtualMachine(second)["main"](np.zeros((1, 4), "float32"), np.ones(4, "float32"))
    np.testing.assert_array_equal(z.numpy(), np.full((1, 4), 2))


def test_many_files_and_machines_come_and_go(exported):
    for _ in range(20):
        check(rh.load(exported))


@ir_module({"kind": "cuda", "arch": "sm_90"})
def OnCuda(x: R.Tensor((64,), "float32", "cuda:0")):
    with R.dataflow():
        y: R.Tensor((64,), "float32", "cuda:0") = R.exp(x)
        R.output(y)
    return y


def test_code_for_absent_devices_can_be_loaded_and_looked_at(tmp_path, monkeypatch):
    rh.compile(OnCuda).export_library(tmp_path / "model.so")
    monkeypatch.chdir(tmp_path)
    exe = rh.load("model.so")
    monkeypatch.chdir("/")
    assert [device.kind for device in exe.devices] == ["cuda"]
    assert exe.signature("main").inputs[0].shape == (64,)
    with pytest.raises(rh.BindingError, match="cuda:0 is to run on cuda:99, which this machine does not have"):
        rh.vm.VirtualMachine(exe, ["cuda:99"])
    exe.export_library(tmp_path / "again.so")


# Files that are not executables.


def refused(path, message):
    with pytest.raises(rh.BuildError, match=message) as caught:
        rh.load(path)
    assert str(path) in str(caught.value)


def test_missing_files_and_folders(tmp_path):
    refused(tmp_path / "none.so", "No such file or directory; expected a file of Executable.export_library")
    refused(tmp_path, "found a folder, expected a regular file")
    refused("/dev/zero", "found a device, expected a regular file")
    os.mkfifo(tmp_path / "fifo.so")
    refused(tmp_path / "fifo.so", "found a FIFO, expected a regular file")


@pytest.mark.parametrize("content", [b"", b"x", b"\x00" * 10_000, b"GGUF" * 1000])
def test_foreign_files(tmp_path, content):
    path = tmp_path / "foreign.so"
    path.write_bytes(content)
    refused(path, "expected a whole file of Executable.export_library")


def test_a_plain_shared_library(lifted, tmp_path):
    path = tmp_path / "plain.so"
    lifted.module.export_library(str(path))
    refused(path, "found a shared library without this library's footer")


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.99, 0.9999])
def test_truncated_files(copy, keep):
    os.truncate(copy, int(os.path.getsize(copy) * keep))
    refused(copy, "expected a whole file")


def test_appended_bytes(copy):
    with open(copy, "ab") as file:
        file.write(b"more")
    refused(copy, "expected a whole file")


@pytest.mark.parametrize(
    ("place", "message"), [(5000, "code is corrupt"), (-100, "metadata is corrupt"), (-20, "footer")]
)
def test_flipped_bytes(copy, place, message):
    flip(copy, place)
    refused(copy, message)


def flip(path, place):
    with open(path, "r+b") as file:
        file.seek(place, os.SEEK_END if place < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0xFF]))


@given(st.floats(0, 1, exclude_max=True), st.integers(1, 255))
def test_any_flipped_byte_is_found_or_harmless(exported, tmp_path_factory, place, bits):
    data = bytearray(exported.read_bytes())
    data[int(place * len(data))] ^= bits
    path = tmp_path_factory.mktemp("flipped") / "model.so"
    path.write_bytes(data)
    try:
        exe = rh.load(path, verify=True)
    except rh.BuildError as error:
        assert str(path) in str(error)
    else:  # it was in the padding between weights
        check(exe)


def test_flipped_weights_are_found_on_request(exported, copy):
    flip(copy, rh.load(exported)._container.weights[0].offset + 5)
    rh.load(copy)
    with pytest.raises(rh.BuildError, match="weight 0 is corrupt: checksum"):
        rh.load(copy, verify=True)


def test_other_format_version(copy):
    rewrite_footer(copy, version=container_format.FORMAT_VERSION + 1)
    refused(
        copy, f"found format version {container_format.FORMAT_VERSION + 1}, expected {container_format.FORMAT_VERSION}"
    )


def rewrite_footer(path, version):
    body, checksum = container_format._BODY, container_format._CHECKSUM
    with open(path, "r+b") as file:
        file.seek(-(body.size + checksum.size), os.SEEK_END)
        fields = list(body.unpack(file.read(body.size)))
        fields[1] = version
        packed = body.pack(*fields)
        file.seek(-(body.size + checksum.size), os.SEEK_END)
        file.write(packed + checksum.pack(zlib.crc32(packed)))


def rewrite_header(path, target, change):
    old = container_format.open_container(path)
    header = {**{key: value for key, value in old.header.items() if key != "weights"}, **change}
    library = target.with_suffix(".lib")
    end = struct.unpack_from("<Q", old.data[-28:-20].tobytes())[0]
    library.write_bytes(old.data[:end].tobytes())
    container_format.write_container(target, library, header, [old.weight(i) for i in range(len(old.weights))])


def test_other_tvm_version(exported, tmp_path):
    path = tmp_path / "old.so"
    rewrite_header(exported, path, {"tvm": "0.19.0"})
    refused(path, f"compiled by TVM 0.19.0, expected {tvm.__version__}")


def test_metadata_of_another_shape(exported, tmp_path):
    path = tmp_path / "odd.so"
    rewrite_header(exported, path, {"metadata": json.dumps({"devices": []})})
    refused(path, "the metadata cannot be read: a part of it is missing, or of another kind: KeyError")


def test_fewer_weights_than_constants(exported, tmp_path):
    path = tmp_path / "few.so"
    old = container_format.open_container(exported)
    container_format.write_container(path, exported, {k: v for k, v in old.header.items() if k != "weights"}, [])
    refused(path, "the metadata cannot be read: 0 weights for 2 constants")


def test_code_for_another_machine(exported, tmp_path):
    library = tmp_path / "library"
    library.write_bytes(b"\x7fELF" + b"\0" * 500)
    path = tmp_path / "other.so"
    header = {k: v for k, v in container_format.open_container(exported).header.items() if k != "weights"}
    container_format.write_container(path, library, header, [DATA.view("uint8")] * 2)
    refused(path, "its code cannot be loaded")


# Exports that fail.


def test_a_link_keeps_leading_to_its_file(exported, copy, tmp_path):
    os.symlink(copy, tmp_path / "link.so")
    rh.load(exported).export_library(tmp_path / "link.so")
    assert os.readlink(tmp_path / "link.so") == str(copy)
    check(rh.load(tmp_path / "link.so"))


def test_paths_that_cannot_be_written(lifted, tmp_path):
    with pytest.raises(rh.BuildError, match="there is no folder"):
        lifted.export_library(tmp_path / "none" / "model.so")
    with pytest.raises(rh.BuildError, match="found a folder"):
        lifted.export_library(tmp_path)


@pytest.mark.parametrize(
    ("environment", "message"),
    [({"PATH": "/nowhere"}, "none on PATH"), ({"CXX": "/nowhere/cxx"}, "'/nowhere/cxx', which is not a program")],
)
def test_exporting_without_a_c_compiler(lifted, tmp_path, monkeypatch, environment, message):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setitem(sys.modules, "ziglang", None)  # as where it is not installed
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(rh.BuildError, match=f"needs a C compiler: found {message}"):
        lifted.export_library(tmp_path / "model.so")
    assert not os.listdir(tmp_path)
    check(lifted)  # running needs none


def test_a_failing_linker_leaves_the_old_file(lifted, copy, monkeypatch):
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(rh.BuildError, match="linking failed"):
        lifted.export_library(copy)
    check(rh.load(copy))


CHECK = """
import sys
import numpy as np
import relax_hetero as rh
exe = rh.load(sys.argv[1])
vm = rh.vm.VirtualMachine(exe, {"llvm:1": "cpu:3"})
y, d = vm["main"](np.ones(1024, "float32"))
assert str(d.device) == "cpu:3"
np.testing.assert_array_equal(y.numpy(), np.arange(1024) + 1)
assert "tvm.relax" not in sys.modules
try:
    vm["main"](np.ones(3, "float32"))
except rh.BindingError as error:
    assert "dimension 0 is 3, expected 1024" in str(error)
print(vm.profile("main", np.ones(1024, "float32")))
exe.export_library(sys.argv[2])
rh.load(sys.argv[2])
assert not any("libtvm_compiler" in line for line in open("/proc/self/maps"))
"""


@pytest.mark.parametrize("compiler", ["unused", "absent"])
def test_with_tvms_runtime_only(exported, tmp_path, compiler):
    script = tmp_path / "check.py"
    script.write_text(CHECK)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PATH": "/nowhere"}
    if compiler == "unused":
        env["TVM_USE_RUNTIME_LIB"] = "1"
    else:
        env["PYTHONPATH"] = f"{runtime_only_tvm(tmp_path)}{os.pathsep}{env['PYTHONPATH']}"
    done = subprocess.run(
        [sys.executable, script, exported, tmp_path / "again.so"], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "(allocation, shapes, bytecode)" in done.stdout


def runtime_only_tvm(folder):
    """A copy of the tvm package, by links, whose lib folder lacks the compiler."""
    package = folder / "site" / "tvm"
    (package / "lib").mkdir(parents=True)
    source = os.path.dirname(tvm.__file__)
    for name in os.listdir(source):
        if name not in ("lib", "__pycache__"):
            os.symlink(os.path.join(source, name), package / name)
    for name in os.listdir(os.path.join(source, "lib")):
        if "compiler" not in name:
            shutil.copy(os.path.join(source, "lib", name), package / "lib" / name)
    return package.parent
