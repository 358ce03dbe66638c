"""Models compiled where CUDA is hidden, run by TVM's runtime alone; launches that need more than a plain one."""

import os
import subprocess
import sys

import numpy as np
import pytest
import tvm
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from modules import ir_module
from relax_hetero.artifact import graph_layout

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not tvm.cuda(0).exist, reason="needs an NVIDIA GPU")]

IS_HOPPER = tvm.cuda(0).exist and tvm.cuda(0).compute_version == "9.0"
hopper = pytest.mark.skipif(not IS_HOPPER, reason="needs a GPU of compute capability 9.0")


@ir_module({"kind": "cuda", "arch": "sm_90a"})
class Launches:
    """200 KB of shared memory, clusters of four blocks, and kernels that begin before the one before them has ended."""

    @T.prim_func(private=True, s_tir=True)
    def reverse(A: T.Buffer((4 * 51200,), "float32"), C: T.Buffer((4 * 51200,), "float32")):
        T.func_attr({"op_pattern": 8, "tirx.is_scheduled": True})
        with T.sblock("root"):
            S = T.sblock_alloc_buffer((51200,), "float32", scope="shared.dyn")
            for b in T.thread_binding(4, thread="blockIdx.x"):
                for t in T.thread_binding(256, thread="threadIdx.x"):
                    for j in range(200):
                        with T.sblock("S"):
                            vb, vt, vj = T.axis.remap("SSS", [b, t, j])
                            S[vj * 256 + vt] = A[vb * 51200 + vj * 256 + vt]
                    for j in range(200):
                        with T.sblock("C"):
                            vb, vt, vj = T.axis.remap("SSS", [b, t, j])
                            C[vb * 51200 + vj * 256 + vt] = S[51199 - vj * 256 - vt]

    @T.prim_func(private=True, s_tir=True)
    def in_clusters(A: T.Buffer((4 * 51200,), "float32"), C: T.Buffer((4 * 51200,), "float32")):
        T.func_attr({"op_pattern": 8, "tirx.is_scheduled": True})
        with T.sblock("root"):
            for b in T.thread_binding(800, thread="blockIdx.x"):
                for _c in T.thread_binding(4, thread="clusterCtaIdx.x"):
                    for t in T.thread_binding(256, thread="threadIdx.x"):
                        with T.sblock("C"):
                            vb, vt = T.axis.remap("SS", [b, t])
                            C[vb * 256 + vt] = A[vb * 256 + vt] + T.float32(1)

    @T.prim_func(private=True, s_tir=True)
    def early(A: T.Buffer((4 * 51200,), "float32"), C: T.Buffer((4 * 51200,), "float32")):
        T.func_attr(
            {
                "op_pattern": 8,
                "tirx.is_scheduled": True,
                "tirx.kernel_launch_params": ["tirx.use_programtic_dependent_launch"],
            }
        )
        with T.sblock("root"):
            for b in T.thread_binding(800, thread="blockIdx.x"):
                for t in T.thread_binding(256, thread="threadIdx.x"):
                    T.evaluate(T.ptx["griddepcontrol.wait"]())
                    T.evaluate(T.ptx["griddepcontrol.launch_dependents"]())
                    with T.sblock("C"):
                        vb, vt = T.axis.remap("SS", [b, t])
                        C[vb * 256 + vt] = A[vb * 256 + vt] * T.float32(2)

    @R.function
    def main(x: R.Tensor((4 * 51200,), "float32", "cuda:0")):
        cls = Launches
        with R.dataflow():
            a = R.call_tir(cls.early, (x,), out_ty=R.Tensor((4 * 51200,), "float32", "cuda:0"))
            b = R.call_tir(cls.early, (a,), out_ty=R.Tensor((4 * 51200,), "float32", "cuda:0"))
            c = R.call_tir(cls.reverse, (b,), out_ty=R.Tensor((4 * 51200,), "float32", "cuda:0"))
            d = R.call_tir(cls.in_clusters, (c,), out_ty=R.Tensor((4 * 51200,), "float32", "cuda:0"))
            e = R.call_tir(cls.early, (d,), out_ty=R.Tensor((4 * 51200,), "float32", "cuda:0"))
            f = R.call_tir(cls.early, (e,), out_ty=R.Tensor((4 * 51200,), "float32", "cuda:0"))
            R.output(f)
        return f


def launched(x):
    return (4 * x.reshape(4, 51200)[:, ::-1].reshape(-1) + 1) * 4


COMPILE = """
import sys
import tvm_ffi.libinfo as libinfo

load = libinfo.load_lib_ctypes


def without_cuda(*args, **kwargs):
    if "tvm_runtime_cuda" in (*args, *kwargs.values()):
        raise OSError("hidden")
    return load(*args, **kwargs)


libinfo.load_lib_ctypes = without_cuda
import tvm

assert tvm.get_global_func("ffi.Module.create.cuda", allow_missing=True) is None
import importlib.util

spec = importlib.util.spec_from_file_location("models", sys.argv[1])
models = sys.modules["models"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(models)
import relax_hetero as rh

rh.compile(models.Launches, cache=False).export_library(sys.argv[2])
"""

RUN = """
import sys
import numpy as np
import tvm_ffi
import relax_hetero as rh
from tvm.base import _RUNTIME_ONLY


@tvm_ffi.register_global_func("tvm_callback_cuda_compile", override=True)
def compile_source(code):
    raise RuntimeError("source is compiled")


assert _RUNTIME_ONLY
vm = rh.vm.VirtualMachine(rh.load(sys.argv[1]))
for _ in range(3):
    x = np.random.default_rng(0).standard_normal(4 * 51200).astype("float32")
    np.save(sys.argv[2], vm["main"](x).numpy())
"""


@hopper
def test_compiled_without_a_gpu_and_run_without_a_compiler(tmp_path):
    path, result = tmp_path / "model.so", tmp_path / "result.npy"
    python(tmp_path, COMPILE, __file__, path, CUDA_VISIBLE_DEVICES="")
    assert b"__global__" not in path.read_bytes()
    python(tmp_path, RUN, path, result, TVM_USE_RUNTIME_LIB="1", CUDA_DISABLE_PTX_JIT="1", PATH="/nonexistent")
    x = np.random.default_rng(0).standard_normal(4 * 51200).astype("float32")
    np.testing.assert_allclose(np.load(result), launched(x), rtol=1e-6, atol=1e-6)


def python(folder, code, *args, **environment):
    script = folder / "script.py"
    script.write_text(code)
    command = [sys.executable, str(script), *map(str, args)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


@hopper
def test_launches_of_all_kinds_in_a_graph():
    vm = rh.vm.VirtualMachine(rh.compile(Launches, cache=False))
    (graph,) = vm.graphs
    results = []
    for _ in range(50):  # inputs and results at other addresses each time
        x = np.random.default_rng(len(results)).standard_normal(4 * 51200).astype("float32")
        results.append((x, vm["main"](tvm.runtime.tensor(x, tvm.cuda(0)))))
    for x, y in results:
        np.testing.assert_allclose(y.numpy(), launched(x), rtol=1e-6, atol=1e-6)
    assert graph._words[graph_layout.GRAPH] != 0  # recorded, not launched kernel by kernel


@hopper
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_100"])
def test_code_for_other_gpus_is_refused(arch):
    @ir_module()
    def Exp(x: R.Tensor((16,), "float32")):
        return R.exp(x)

    mod = Exp.clone()
    mod.update_global_info("vdevice", [rh.VDevice({"kind": "cuda", "arch": arch})])
    with pytest.raises(rh.BindingError, match=f"cuda:0 was compiled for {arch}.*of compute capability 9.0"):
        rh.vm.VirtualMachine(rh.compile(mod, cache=False))
