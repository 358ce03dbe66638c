"""BindTargets: kernels have the target of the device that calls them."""

import pytest
import tvm
from tvm.ir import assert_structural_equal
from tvm.script import relax as R
from tvm.script import tirx as T

from modules import callees, ir_module
from relax_hetero.errors import BuildError
from relax_hetero.transform import BindTargets

V4 = {"kind": "llvm", "mcpu": "x86-64-v4"}
V2 = {"kind": "llvm", "mcpu": "x86-64-v2"}


def test_one_device():
    @ir_module(V4, (V2, 1))
    class Before:
        @T.prim_func(private=True, s_tir=True)
        def twice(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")):
            for i in range(4):
                with T.sblock("b"):
                    v = T.axis.spatial(4, i)
                    b[v] = a[v] * T.float32(2)

        @R.function
        def main(x: R.Tensor((4,), "float32", "llvm:1")) -> R.Tensor((4,), "float32", "llvm:1"):
            y = R.call_tir(Before.twice, (x,), out_ty=R.Tensor((4,), "float32", "llvm:1"))
            return y

    @ir_module(V4, (V2, 1))
    class Expected:
        @T.prim_func(private=True, s_tir=True)
        def twice(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")):
            T.func_attr({"target": T.target(V2)})
            for i in range(4):
                with T.sblock("b"):
                    v = T.axis.spatial(4, i)
                    b[v] = a[v] * T.float32(2)

        @R.function
        def main(x: R.Tensor((4,), "float32", "llvm:1")) -> R.Tensor((4,), "float32", "llvm:1"):
            y = R.call_tir(Expected.twice, (x,), out_ty=R.Tensor((4,), "float32", "llvm:1"))
            return y

    after = BindTargets()(Before)
    assert_structural_equal(after, Expected)
    assert_structural_equal(BindTargets()(after), Expected)


@ir_module(V4, (V2, 1))
class TwoCallers:
    @T.prim_func(private=True, s_tir=True)
    def helper(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")):
        for i in range(4):
            b[i] = a[i] * T.float32(2)

    @T.prim_func(private=True, s_tir=True)
    def outer(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")):
        TwoCallers.helper(a.data, b.data)

    @R.function
    def main(x: R.Tensor((4,), "float32", "llvm:0"), z: R.Tensor((4,), "float32", "llvm:1")):
        cls = TwoCallers
        y = R.call_tir(cls.outer, (x,), out_ty=R.Tensor((4,), "float32", "llvm:0"))
        w = R.call_tir(cls.outer, (z,), out_ty=R.Tensor((4,), "float32", "llvm:1"))
        w2 = R.call_tir(cls.outer, (w,), out_ty=R.Tensor((4,), "float32", "llvm:1"))
        return (y, w2)


def test_two_devices_get_a_copy_each_with_their_callees():
    after = BindTargets()(TwoCallers)
    targets = {
        gv.name_hint: f.attrs["target"].attrs["mcpu"] for gv, f in after.functions.items() if gv.name_hint != "main"
    }
    assert targets == {
        "outer": "x86-64-v4",
        "helper": "x86-64-v4",
        "outer_llvm_1": "x86-64-v2",
        "helper_llvm_1": "x86-64-v2",
    }
    assert "helper_llvm_1" in callees(after["outer_llvm_1"].body)
    called = [b.value.args[0].name_hint for b in after["main"].body.blocks[0].bindings[:3]]
    assert called == ["outer", "outer_llvm_1", "outer_llvm_1"]
    assert "target" not in TwoCallers["outer"].attrs  # the input is not changed


def test_function_of_another_kind_is_refused():
    @ir_module(V4)
    class Mod:
        @T.prim_func(private=True, s_tir=True)
        def kernel(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")):
            T.func_attr({"target": T.target({"kind": "cuda", "arch": "sm_90"})})
            for i in T.thread_binding(4, thread="threadIdx.x"):
                b[i] = a[i]

        @R.function
        def main(x: R.Tensor((4,), "float32", "llvm")) -> R.Tensor((4,), "float32", "llvm"):
            y = R.call_tir(Mod.kernel, (x,), out_ty=R.Tensor((4,), "float32", "llvm"))
            return y

    with pytest.raises(BuildError, match=r"'kernel'.*'y' in function 'main'.*'cuda'.*llvm:0.*'llvm'"):
        BindTargets()(Mod)


def test_module_without_vdevices_is_unchanged():
    @ir_module()
    def Mod(x: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
        return R.exp(x)

    assert_structural_equal(BindTargets()(Mod), Mod)
    assert isinstance(BindTargets(), tvm.transform.Pass)
