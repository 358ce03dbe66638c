"""Targets of PrimFuncs follow the vdevices they are called on; uses are found by name."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from modules import ir_module
from relax_hetero.transform import UpdateVDevice
from relax_hetero.transform.ir.rewriting import walk_bindings
from relax_hetero.transform.placement.update_vdevice import first_use

SM90 = {"kind": "cuda", "arch": "sm_90"}
SM80 = {"kind": "cuda", "arch": "sm_80"}


def test_call_tir_and_prim_func_targets():
    @ir_module(SM90, {"kind": "llvm", "mcpu": "skylake"})
    class Before:
        @T.prim_func(private=True, s_tir=True)
        def add_one(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")):
            T.func_attr({"target": T.target({"kind": "llvm", "mcpu": "skylake"})})
            for i in range(4):
                with T.sblock("b"):
                    v = T.axis.spatial(4, i)
                    b[v] = a[v] + T.float32(1)

        @T.prim_func(private=True, s_tir=True)
        def on_gpu(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")):
            T.func_attr({"target": T.target(SM90, host="llvm")})
            for i in range(4):
                with T.sblock("b"):
                    v = T.axis.spatial(4, i)
                    b[v] = a[v] + T.float32(2)

        @R.function
        def main(x: R.Tensor((4,), "float32", "llvm")):
            cls = Before
            with R.dataflow():
                a = R.call_tir(cls.add_one, (x,), out_ty=R.Tensor((4,), "float32", "llvm"))
                b = R.call_tir_inplace(cls.add_one, (a, a), [1], out_ty=R.Tensor((4,), "float32", "llvm"))
                c = R.to_vdevice(b, "cuda")
                d = R.call_tir(cls.on_gpu, (c,), out_ty=R.Tensor((4,), "float32", "cuda"))
                R.output(d)
            return d

    after = UpdateVDevice([rh.VDevice(SM80, 1), rh.VDevice("c", 2)])(Before)
    assert after["add_one"].attrs["target"].kind.name == "c"
    assert after["on_gpu"].attrs["target"].arch == "sm_80"
    assert after["on_gpu"].attrs["target"].host.kind.name == "llvm"
    names = [str(binding.var.ty.vdevice.target.kind.name) for binding in walk_bindings(after["main"].body)]
    assert names == ["c", "c", "cuda", "cuda"]
    assert Before["add_one"].attrs["target"].kind.name == "llvm"
    assert Before["on_gpu"].attrs["target"].arch == "sm_90"


def two_of_one_target(first: str, second: str) -> tvm.IRModule:
    source = f'''
# from tvm.script import ir as I
# from tvm.script import relax as R
# from tvm.script import tirx as T

@I.ir_module
class Module:
    I.module_global_infos({{"vdevice": [I.vdevice("c"), I.vdevice("c", 1)]}})
    @T.prim_func(private=True, s_tir=True)
    def kernel(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")):
        T.func_attr({{"target": T.target("c")}})
        for i in range(4):
            with T.sblock("b"):
                v = T.axis.spatial(4, i)
                b[v] = a[v] + T.float32(1)
    @R.function
    def main(x: R.Tensor((4,), "float32", "{first}"), y: R.Tensor((4,), "float32", "{second}")):
        cls = Module
        a = R.call_tir(cls.kernel, (x,), out_ty=R.Tensor((4,), "float32", "{first}"))
        b = R.call_tir(cls.kernel, (y,), out_ty=R.Tensor((4,), "float32", "{second}"))
        return (a, b)
'''
    return tvm.script.from_source(source)


@pytest.mark.parametrize(
    ("first", "second", "target"), [("c:0", "c:0", "c"), ("c:1", "c:1", "llvm"), ("c:0", "c:1", "c")]
)
def test_vdevices_that_shared_a_target(first, second, target):
    """A PrimFunc follows the vdevices it is called on; if those diverge, it stays."""
    after = UpdateVDevice(rh.VDevice("llvm", 1), 1)(two_of_one_target(first, second))
    assert after["kernel"].attrs["target"].kind.name == target


def test_first_use_of_a_return():
    only_return = rh.VDevice("c", 7)
    func = relax.Function([], relax.Tuple([]), relax.TensorType(ndim=1, vdevice=only_return))
    assert first_use(tvm.IRModule({"f": func}), only_return) == "the return of function 'f'"
