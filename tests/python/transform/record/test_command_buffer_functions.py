"""The functions that FormCommandBuffers leaves: constants among the operands, kernels and their raw twins."""

import numpy as np
import tvm
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import relax as R
from tvm.script import tirx as T

from modules import ir_module
from relax_hetero.transform import FormCommandBuffers
from relax_hetero.transform.ir.module_attrs import COMMANDS
from transform.outlines import V4, called


@ir_module(V4)
class Sums:
    @T.prim_func(private=True, s_tir=True)
    def sum(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32"), C: T.Buffer((4,), "float32")):
        T.evaluate(0)


def sums_of(first, second):
    """A module that adds two constants to its parameter, one after the other."""
    (device,) = Sums.global_infos["vdevice"]
    ty = relax.TensorType((4,), "float32", device)
    x = relax.Var("x", ty)
    kernel = Sums.get_global_var("sum")
    builder = relax.BlockBuilder(Sums)
    with builder.function("main", [x]):
        with builder.dataflow():
            a = builder.emit(relax.call_tir(kernel, (x, relax.const(first, ty)), ty))
            b = builder.emit(relax.call_tir(kernel, (a, relax.const(second, ty)), ty))
            c = builder.emit_output(relax.call_tir(kernel, (b, relax.const(first, ty)), ty))
        builder.emit_func_output(c)
    return builder.get()


def test_constants_follow_the_inputs():
    first, second = (tvm.runtime.tensor(np.full(4, value, "float32")) for value in (1, 2))
    after = FormCommandBuffers()(sums_of(first, second))
    (call,) = (b.value for b in after["main"].body.blocks[0].bindings if isinstance(b.value, relax.Call))
    x, *constants = call.args[1].fields
    assert isinstance(x, relax.Var)
    assert [constant.value.numpy()[0] for constant in constants] == [1, 2, 1]
    assert [param.name for param in after["main_commands"].params[:4]] == [
        "x",
        "constant_0",
        "constant_1",
        "constant_2",
    ]


def test_a_run_that_nobody_reads_makes_no_buffer():
    @ir_module(V4)
    class Before:
        @T.prim_func(private=True, s_tir=True)
        def one(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
            T.evaluate(0)

        @R.function
        def main(x: R.Tensor((4,), "float32", "llvm:0")):
            cls = Before
            a = R.call_tir(cls.one, (x,), out_ty=R.Tensor((4,), "float32", "llvm:0"))
            b = R.call_tir(cls.one, (a,), out_ty=R.Tensor((4,), "float32", "llvm:0"))
            return x

    after = FormCommandBuffers()(Before)
    assert not any(COMMANDS in func.attrs for func in after.functions.values())


def test_kernels_keep_their_names_unless_others_call_them():
    """A kernel that is called outside too, or is public, stays; its raw twin has another name."""

    @ir_module(V4)
    class Before:
        @T.prim_func(private=True, s_tir=True)
        def inside(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
            T.evaluate(0)

        @T.prim_func(private=True, s_tir=True)
        def both(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
            T.evaluate(0)

        @T.prim_func(s_tir=True)
        def shown(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
            T.func_attr({"global_symbol": "shown"})
            T.evaluate(0)

        @R.function(pure=False)
        def main(x: R.Tensor((4,), "float32", "llvm:0")):
            cls = Before
            a = R.call_tir(cls.inside, (x,), out_ty=R.Tensor((4,), "float32", "llvm:0"))
            b = R.call_tir(cls.both, (a,), out_ty=R.Tensor((4,), "float32", "llvm:0"))
            c = R.call_tir(cls.shown, (b,), out_ty=R.Tensor((4,), "float32", "llvm:0"))
            _ = R.call_packed("test.effect", c, ty_args=(R.Object,))
            d = R.call_tir(cls.both, (c,), out_ty=R.Tensor((4,), "float32", "llvm:0"))
            return d

    after = FormCommandBuffers()(Before)
    assert called(after, "main_commands") == ["inside", "both_raw", "shown_raw"]
    assert "global_symbol" not in after["shown_raw"].attrs
    assert_structural_equal(after["both"].params, Before["both"].params, map_free_vars=True)
    assert after["shown"].attrs["global_symbol"] == "shown"
