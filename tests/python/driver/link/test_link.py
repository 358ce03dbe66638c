"""Linking: each target's kernels are compiled alone, with its own features (upstream rows 4 and 5)."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from relax_hetero.driver.link.link import build_group, group_by_target
from relax_hetero.errors import BuildError
from relax_hetero.target.vdevice import with_vdevices
from relax_hetero.transform import BindTargets
from seeds import fresh_rng

V4 = {"kind": "llvm", "mcpu": "x86-64-v4", "mtriple": "x86_64-unknown-linux-gnu"}
V2 = {"kind": "llvm", "mcpu": "x86-64-v2", "mtriple": "x86_64-unknown-linux-gnu"}


@I.ir_module
class TwoTargets:
    I.module_global_infos({"vdevice": [I.vdevice(V2, 0), I.vdevice(V4, 1)]})

    @T.prim_func(private=True, s_tir=True)
    def scale(a: T.Buffer((1024,), "float32"), b: T.Buffer((1024,), "float32")):
        for i in T.vectorized(1024):
            b[i] = a[i] * T.float32(2)

    @R.function
    def main(x: R.Tensor((1024,), "float32", "llvm:0")) -> R.Tensor((1024,), "float32", "llvm:1"):
        with R.dataflow():
            y = R.call_tir(TwoTargets.scale, (x,), out_ty=R.Tensor((1024,), "float32", "llvm:0"))
            y1: R.Tensor((1024,), "float32", "llvm:1") = R.to_vdevice(y, "llvm:1")
            z = R.call_tir(TwoTargets.scale, (y1,), out_ty=R.Tensor((1024,), "float32", "llvm:1"))
            R.output(z)
        return z


def _assembly(mod):
    """Assembly text by mcpu, each target's own module."""
    groups = group_by_target(mod, tvm.target.Target("llvm"))
    return {
        target.attrs["mcpu"]: build_group(target, group, tvm.target.Target("llvm")).inspect_source("asm")
        for target, group in groups
    }


def test_two_cpu_targets_compile_with_their_own_features():
    named = relax.transform.AttachGlobalSymbol()(BindTargets()(TwoTargets))
    funcs = {
        gv: f.with_attr("global_symbol", gv.name_hint) for gv, f in named.functions.items() if gv.name_hint != "main"
    }
    assembly = _assembly(tvm.IRModule(funcs))
    assert "zmm" in assembly["x86-64-v4"] and "scale_llvm_1" in assembly["x86-64-v4"]
    assert "zmm" not in assembly["x86-64-v2"] and "ymm" not in assembly["x86-64-v2"]
    # Stock TVM compiles both for the first target it meets.
    stock = tvm.tirx.build(tvm.IRModule(funcs), target=tvm.target.Target(V2)).inspect_source("asm")
    assert "scale_llvm_1" in stock and "zmm" not in stock


def test_two_cpu_targets_run():
    exe = rh.compile(TwoTargets)
    kinds = [module.kind for module in exe.module.imports]
    assert kinds.count("llvm") >= 2
    x = np.random.default_rng(0).random(1024, "float32")
    np.testing.assert_array_equal(rh.vm.VirtualMachine(exe)["main"](x).numpy(), 4 * x)


def test_functions_without_kernels_need_no_compiler_of_c(monkeypatch):
    monkeypatch.setenv("PATH", "")
    for name in ("CXX", "CC"):
        monkeypatch.delenv(name, raising=False)
    builder, devices = relax.BlockBuilder(), [rh.VDevice("llvm", 0), rh.VDevice("llvm", 1)]
    x = relax.Var("x", relax.TensorType((3,), "float32", devices[0]))
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.op.to_vdevice(x, devices[1])))
    vm = rh.vm.VirtualMachine(rh.compile(with_vdevices(builder.get(), devices)))
    value = fresh_rng().standard_normal(3).astype("float32")
    np.testing.assert_array_equal(vm["main"](value).numpy(), value)


def test_cuda_kernels_are_built_as_device_code():
    """Without a GPU: the CUDA source stands in the module, for cuda functions only."""
    if tvm.get_global_func("target.build.cuda", allow_missing=True) is None:
        pytest.skip("this TVM cannot generate CUDA code")
    cuda = tvm.target.Target({"kind": "cuda", "arch": "sm_90"})
    sequential, bound = _copy_kernels()
    host = tvm.target.Target("llvm")
    with pytest.raises(BuildError, match=r"'sequential'.*'cuda' binds no GPU threads"):
        build_group(cuda, tvm.IRModule({"sequential": sequential.with_attr("target", cuda)}), host)
    with pytest.raises(BuildError, match=r"'bound'.*'llvm' binds GPU threads"):
        build_group(host, tvm.IRModule({"bound": bound}), host)
    try:
        library = build_group(cuda, tvm.IRModule({"bound": bound.with_attr("target", cuda)}), host)
    except BuildError as error:  # a machine without nvcc or nvrtc
        pytest.skip(str(error))
    assert [module.kind for module in library.imports] == ["cuda"]


def _copy_kernels():
    @T.prim_func(s_tir=True)
    def sequential(a: T.Buffer((64,), "float32"), b: T.Buffer((64,), "float32")):
        T.func_attr({"global_symbol": "sequential"})
        for i in range(64):
            b[i] = a[i]

    @T.prim_func(s_tir=True)
    def bound(a: T.Buffer((64,), "float32"), b: T.Buffer((64,), "float32")):
        T.func_attr({"global_symbol": "bound"})
        for i in T.thread_binding(64, thread="threadIdx.x"):
            b[i] = a[i]

    return sequential, bound


def test_kind_without_code_generator_is_refused():
    sequential, _ = _copy_kernels()
    missing = next(
        (
            kind
            for kind in ("metal", "vulkan", "opencl", "rocm", "hexagon")
            if tvm.get_global_func(f"target.build.{kind}", allow_missing=True) is None
        ),
        None,
    )
    if missing is None:
        pytest.skip("this TVM generates code for everything")
    with pytest.raises(BuildError, match=rf"'{missing}' \(sequential.*no code generator.*llvm"):
        target = tvm.target.Target(missing)
        build_group(target, tvm.IRModule({"sequential": sequential}), tvm.target.Target("llvm"))


def test_a_kernel_that_does_not_compile_is_named():
    @T.prim_func(s_tir=True)
    def broken(a: T.Buffer((64,), "float32")):
        T.func_attr({"global_symbol": "broken"})
        a[0] = T.float32(1)
        T.evaluate(T.tvm_storage_sync("shared"))  # a GPU barrier

    good, _ = _copy_kernels()
    with pytest.raises(BuildError, match=r"'broken'.*llvm"):
        target = tvm.target.Target("llvm")
        build_group(target, tvm.IRModule({"broken": broken, "sequential": good}), target)
