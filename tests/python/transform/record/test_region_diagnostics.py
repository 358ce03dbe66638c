"""Reasons why runs ended, in words."""

from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from modules import ir_module
from relax_hetero.transform.ir.remarks import remarks_of
from relax_hetero.transform.record.form_command_buffers import form_command_buffers
from relax_hetero.transform.record.region_attrs import regions_of


@ir_module("llvm")
class Ends:
    @T.prim_func(private=True)
    def double(A: T.Buffer((16,), "float32"), B: T.Buffer((16,), "float32")):
        T.func_attr({"op_pattern": 8})
        for i in range(16):
            B[i] = A[i] + A[i]

    @T.prim_func(private=True)
    def every_other(a: T.handle, b: T.handle):
        T.func_attr({"op_pattern": 8})
        A = T.match_buffer(a, (16,), "float32", strides=(T.int64(1),))
        B = T.match_buffer(b, (16,), "float32")
        for i in range(16):
            B[i] = A[i]

    @R.function(pure=False)
    def packed(x: R.Tensor((16,), "float32", "llvm:0")):
        cls = Ends
        a = R.call_tir(cls.double, (x,), out_ty=R.Tensor((16,), "float32", "llvm:0"))
        b = R.call_tir(cls.double, (a,), out_ty=R.Tensor((16,), "float32", "llvm:0"))
        c: R.Tensor((16,), "float32", "llvm:0") = R.call_packed("f", b, ty_args=[R.Tensor((16,), "float32", "llvm:0")])
        return c

    @R.function(pure=False)
    def calls(x: R.Tensor((16,), "float32", "llvm:0")):
        cls = Ends
        a = R.call_tir(cls.double, (x,), out_ty=R.Tensor((16,), "float32", "llvm:0"))
        b = R.call_tir(cls.double, (a,), out_ty=R.Tensor((16,), "float32", "llvm:0"))
        c: R.Tensor((16,), "float32", "llvm:0") = cls.packed(b)
        return c

    @R.function
    def checked(x: R.Tensor((16,), "float32", "llvm:0")):
        cls = Ends
        a = R.call_tir(cls.double, (x,), out_ty=R.Tensor((16,), "float32", "llvm:0"))
        b = R.call_tir(cls.double, (a,), out_ty=R.Tensor((16,), "float32", "llvm:0"))
        c = R.call_tir(cls.every_other, (b,), out_ty=R.Tensor((16,), "float32", "llvm:0"))
        return c

    @R.function
    def whole(x: R.Tensor((16,), "float32", "llvm:0")):
        cls = Ends
        a = R.call_tir(cls.double, (x,), out_ty=R.Tensor((16,), "float32", "llvm:0"))
        b = R.call_tir(cls.double, (a,), out_ty=R.Tensor((16,), "float32", "llvm:0"))
        return b


def test_the_reasons_for_the_ends_of_runs():
    mod = form_command_buffers(rh.transform.FormDispatches()(rh.transform.RealizeVDevice()(Ends)))
    assert {region.function: region.ended_by for region in regions_of(mod)} == {
        "packed": "call of f (c)",
        "calls": "call of packed (c)",
        "checked": "kernel every_other (c)",
        "whole": "end of block",
    }
    (single,) = remarks_of(mod).single_calls
    assert (single.function, single.kernel, single.why) == (
        "checked",
        "every_other",
        "it cannot be called as a plain function",
    )
