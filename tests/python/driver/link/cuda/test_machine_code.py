"""CUDA kernels become machine code on a machine without a GPU: parallel, kept, in files, and refused by name."""

import io
import subprocess
import sys
from dataclasses import replace

import pytest
import tvm
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from cuda_reports import sources_of
from relax_hetero.artifact.cache_folder import CacheFolder
from relax_hetero.driver.link.cuda import compilers, machine_code, nvrtc_worker
from relax_hetero.driver.link.cuda.compilers import NvccCompiler, NvrtcCompiler, find_compiler
from relax_hetero.driver.link.cuda.machine_code import compile_kernels
from relax_hetero.driver.link.link import any_host
from relax_hetero.errors import BuildError

SM90A = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})


@pytest.fixture(autouse=True)
def compiler():
    try:
        return find_compiler()
    except BuildError as error:
        pytest.skip(str(error))


def copy_kernel(name):
    @T.prim_func(s_tir=True)
    def copy(A: T.Buffer((64,), "float32"), B: T.Buffer((64,), "float32")):
        with T.sblock("root"):
            for t in T.thread_binding(64, thread="threadIdx.x"):
                with T.sblock("B"):
                    i = T.axis.spatial(64, t)
                    B[i] = A[i]

    return copy.with_attr("global_symbol", name)


def sources(*names):
    return [source for name in names for source in sources_of(copy_kernel(name), SM90A)]


def test_kernels_are_kept_one_by_one(tmp_path, monkeypatch):
    folder = CacheFolder(tmp_path / "cache")
    done = []
    first = compile_kernels(sources("one", "two", "one"), folder, done.append)
    assert sorted(done) == [1, 2] and first[0] == first[2] != first[1]  # equal ones once
    files = sorted(folder.path.glob("*.cubin"))
    assert len(files) == 2
    compiled = []
    compile_one = machine_code._compile
    monkeypatch.setattr(machine_code, "_compile", lambda c, s: compiled.append(s.names) or compile_one(c, s))
    assert compile_kernels(sources("one", "three"), folder)[0] == first[0]
    assert compiled == [("three_kernel",)]
    files[0].write_bytes(files[0].read_bytes()[:-1])  # damaged
    assert compile_kernels(sources("one", "two"), folder) == first[:2]
    assert len(compiled) == 2
    folder.clear()
    assert not list(folder.path.iterdir())


def test_a_folder_that_others_may_write_is_not_used(tmp_path):
    tmp_path.chmod(0o777)
    assert compile_kernels(sources("one"), CacheFolder(tmp_path))[0][:4] == b"\x7fELF"
    assert not list(tmp_path.iterdir())


def test_a_kernel_that_does_not_compile_is_named():
    good, bad = sources("good", "bad")
    bad = replace(bad, text=bad.text + "int x = unknown_name;")
    with pytest.raises(
        BuildError, match=r"kernel 'bad_kernel' does not compile for target .*sm_90a.*error: .*unknown_name"
    ):
        compile_kernels([good, bad])


def test_an_architecture_that_the_compiler_does_not_know():
    (source,) = sources("one")
    old = replace(source, target=tvm.target.Target({"kind": "cuda", "arch": "sm_30"}))
    with pytest.raises(BuildError, match=r"kernel 'one_kernel' does not compile for target .*sm_30"):
        compile_kernels([old])


def test_no_compiler_at_all(monkeypatch):
    compilers._find_paths.cache_clear()
    monkeypatch.setattr(compilers, "cuda_libraries", lambda pattern: [])
    monkeypatch.setattr(compilers, "nvcc_path", lambda: None)
    try:
        with pytest.raises(BuildError, match=r"found neither NVRTC.*nor nvcc; expected.*relax-hetero\[cuda\]"):
            compile_kernels(sources("one"))
    finally:
        compilers._find_paths.cache_clear()


def test_a_compiler_that_dies_is_reported(compiler, tmp_path):
    if not isinstance(compiler, NvrtcCompiler):
        pytest.skip("NVRTC is not here")
    (source,) = sources("one")
    with compiler:
        worker = compiler._idle_worker()
        worker._process.kill()
        compiler._idle_workers.append(worker)
        with pytest.raises(BuildError, match="its process ended with -9"):
            compiler.compile(source.text, "sm_90a")
    with pytest.raises(BuildError, match="has ended"):  # and no process is left behind
        compiler.compile(source.text, "sm_90a")
    broken = tmp_path / "libnvrtc.so.13"
    broken.write_bytes(b"no library")
    with (
        NvrtcCompiler(broken, compiler.includes) as other,
        pytest.raises(BuildError, match=r"libnvrtc.so.13.*ended with 1"),
    ):
        other.compile(source.text, "sm_90a")


def test_a_compiler_that_cannot_be_started_is_reported(tmp_path):
    path = tmp_path / "nvcc"
    path.write_text("no program")
    with pytest.raises(BuildError, match=r"nvcc \(.*nvcc\) cannot be started: .*Permission denied"):
        NvccCompiler(path)


def test_a_truncated_reply_is_not_code(compiler):
    if not isinstance(compiler, NvrtcCompiler):
        pytest.skip("NVRTC is not here")
    with compiler:
        worker = compiler._idle_worker()
        worker._process.kill()
        stream = io.BytesIO()
        nvrtc_worker.write_message(stream, {"log": "", "bytes": 8}, b"half")
        stream.seek(0)
        worker._process.stdout.close()
        worker._process.stdout = stream
        with pytest.raises(BuildError, match="its process ended with -9"):
            worker.compile({})


def test_all_element_types_compile_with_each_compiler(compiler):
    """The brief headers stand for libcu++'s in all that TVM's code includes."""
    nvcc = compilers.nvcc_path()
    text = "".join(source.text for source in sources_of(_casts, SM90A))
    for each in [compiler, *([NvccCompiler(nvcc)] if nvcc and isinstance(compiler, NvrtcCompiler) else [])]:
        with each:
            assert each.compile(text, "sm_90a").code[:4] == b"\x7fELF"


@T.prim_func(s_tir=True)
def _casts(
    A: T.Buffer((64,), "float16"),
    B: T.Buffer((64,), "bfloat16"),
    C: T.Buffer((64,), "float8_e4m3fn"),
    D: T.Buffer((64,), "int64"),
    E: T.Buffer((64,), "uint8"),
    F: T.Buffer((64,), "float32"),
):
    T.func_attr({"global_symbol": "casts"})
    with T.sblock("root"):
        for t in T.thread_binding(64, thread="threadIdx.x"):
            with T.sblock("F"):
                i = T.axis.spatial(64, t)
                F[i] = (
                    T.Cast("float32", A[i])
                    + T.Cast("float32", B[i])
                    + T.Cast("float32", C[i])
                    + T.Cast("float32", D[i])
                    + T.Cast("float32", E[i])
                    + T.max_value("float32")
                    + T.infinity("float32")
                )


@I.ir_module
class OnCuda:
    I.module_global_infos({"vdevice": [I.vdevice({"kind": "cuda", "arch": "sm_90a"}), I.vdevice("llvm")]})

    @R.function
    def main(x: R.Tensor((64,), "float32", "cuda:0")):
        with R.dataflow():
            y = R.exp(x)
            z = R.cumsum(y)
            h = R.to_vdevice(z, "llvm:0")
            out = R.add(h, R.const(1.0))
            R.output(out)
        return out


LOADS = """
import sys
import tvm, tvm_ffi
formats = []

@tvm_ffi.register_global_func("ffi.Module.load_from_bytes.cuda", override=True)
def load(data):
    formats.append(bytes(data)[8:13])
    assert b"sm_90a" in bytes(data) and b"\\x7fELF" in bytes(data)
    return tvm.tirx.build(tvm.IRModule({}), target="llvm")

print(tvm.runtime.load_module(sys.argv[1]).kind, set(formats), len(formats) > 1)
"""


def test_files_hold_machine_code_where_there_is_no_gpu(tmp_path):
    steps = {}
    exe = rh.compile(
        OnCuda, cache=False, progress=lambda step, done, total: steps.setdefault(step, []).append((done, total))
    )
    assert steps["CUDA kernels"][-1][0] == steps["CUDA kernels"][-1][1] > 1
    path = tmp_path / "model.so"
    exe.export_library(path)
    data = path.read_bytes()
    assert b"__global__" not in data and b"sm_90a" in data
    if tvm.get_global_func("ffi.Module.create.cuda", allow_missing=True) is None:
        script = tmp_path / "loads.py"
        script.write_text(LOADS)
        done = subprocess.run([sys.executable, str(script), str(path)], capture_output=True, text=True, check=False)
        assert done.stdout.strip() == "relax.VMExecutable {b'cubin'} True", done.stderr
    again = rh.load(path)
    again.export_library(tmp_path / "again.so")
    assert (tmp_path / "again.so").read_bytes() == data


def test_host_code_without_a_cpu_device_runs_on_any_cpu():
    """A file compiled on a new CPU launches kernels on an old one: no manifest entry could tell what it needs."""
    exe = rh.compile(OnGpuAlone, cache=False)
    texts = [part.inspect_source("asm") for part in exe.module.imports if part.kind == "llvm"]
    assert texts and not any(register in text for text in texts for register in ("zmm", "ymm", "{%k"))
    assert str(any_host().attrs["mtriple"]) == str(rh.native("llvm").attrs["mtriple"])


@I.ir_module
class OnGpuAlone:
    I.module_global_infos({"vdevice": [I.vdevice({"kind": "cuda", "arch": "sm_90a"})]})

    @R.function
    def main(x: R.Tensor(("n", 64), "float32", "cuda:0")):
        n = T.int64()
        with R.dataflow():
            y = R.exp(x)
            z = R.reshape(y, (64, n))
            R.output(z)
        return z
