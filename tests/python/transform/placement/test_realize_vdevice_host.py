"""The host reads shapes, conditions, prints and assertions, and makes tensors of shapes: never a conflict."""

import pytest
import tvm
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import relax as R
from tvm.script import tirx as T

from modules import ir_module, ops_of
from relax_hetero.transform import RealizeVDevice, verify_placement


def place(before: tvm.IRModule) -> tvm.IRModule:
    after = RealizeVDevice()(before)
    verify_placement(after)
    relax.analysis.well_formed(after)
    assert_structural_equal(RealizeVDevice()(after), after)
    return after


def test_tensor_to_shape():
    """Two reads share one transfer; the value itself stays where it is."""

    @ir_module("cuda", "llvm")
    def Before(x: R.Tensor((2,), "int64", "cuda"), y: R.Tensor((6,), "float32", "cuda")):
        n, m = T.int64(), T.int64()
        a = R.add(x, x)
        s = R.tensor_to_shape(a)
        s1 = R.match_cast(s, R.Shape([n, m]))
        t = R.tensor_to_shape(a)
        r = R.reshape(y, R.shape([n, m]))
        return (r, a, t)

    @ir_module("cuda", "llvm")
    def Expected(x: R.Tensor((2,), "int64", "cuda"), y: R.Tensor((6,), "float32", "cuda")):
        n, m = T.int64(), T.int64()
        a: R.Tensor((2,), "int64", "cuda") = R.add(x, x)
        h: R.Tensor((2,), "int64", "llvm") = R.to_vdevice(a, "llvm")
        s = R.tensor_to_shape(h)
        s1 = R.match_cast(s, R.Shape([n, m]))
        t = R.tensor_to_shape(h)
        r: R.Tensor((n, m), "float32", "cuda") = R.reshape(y, R.shape([n, m]))
        return (r, a, t)

    assert_structural_equal(place(Before), Expected)


def test_condition_print_and_assertion():
    @ir_module("cuda", "llvm", pure=False)
    def Before(c: R.Tensor((), "bool", "cuda"), x: R.Tensor((2,), "float32", "cuda")):
        p = R.print(x, c, format="{} {}")
        q = R.assert_op(c, x, format="no {}")
        if c:
            r = R.exp(x)
        else:
            r = R.tanh(x)
        return r

    after = place(Before)
    assert ops_of(after).count("relax.to_vdevice") == 2  # c and x, once each
    assert after["main"].ret_ty.vdevice.target.kind.name == "cuda"


def test_the_host_is_the_last_cpu():
    @ir_module("llvm", "c:1", "cuda")
    def Before(x: R.Tensor((2,), "int64", "llvm")):
        s = R.tensor_to_shape(x)
        return s

    binding = place(Before)["main"].body.blocks[0].bindings[0]
    assert binding.var.ty.vdevice.target.kind.name == "c"


def test_without_a_cpu_the_machine_reads_it_where_it_is():
    @ir_module("cuda", "cuda:1")
    def Before(c: R.Tensor((), "bool", "cuda:1"), x: R.Tensor((2,), "int64"), n: R.Shape(ndim=2)):
        s = R.tensor_to_shape(x)
        t = R.shape_to_tensor(n)
        if c:
            r = R.add(x, t)
        else:
            r = R.subtract(x, t)
        return (s, r)

    after = place(Before)
    assert "relax.to_vdevice" not in ops_of(after)


def test_shape_to_tensor_is_made_by_the_host():
    @ir_module("cuda", "llvm")
    def Before(x: R.Tensor((2,), "int64", "cuda"), n: R.Shape(ndim=2)):
        with R.dataflow():
            t = R.shape_to_tensor(n)
            a = R.add(x, t)
            s = R.tensor_to_shape(t)
            R.output(a, s)
        return (a, s)

    @ir_module("cuda", "llvm")
    def Expected(x: R.Tensor((2,), "int64", "cuda"), n: R.Shape(ndim=2)):
        with R.dataflow():
            h: R.Tensor((2,), "int64", "llvm") = R.shape_to_tensor(n)
            t: R.Tensor((2,), "int64", "cuda") = R.to_vdevice(h, "cuda")
            a: R.Tensor((2,), "int64", "cuda") = R.add(x, t)
            s = R.tensor_to_shape(h)
            R.output(a, s)
        return (a, s)

    assert_structural_equal(place(Before), Expected)


def test_shape_to_tensor_that_the_host_reads_stays_on_the_host():
    @ir_module("cuda", "llvm")
    def Before(n: R.Shape(ndim=2)):
        t = R.shape_to_tensor(n)
        s = R.tensor_to_shape(t)
        return s

    after = place(Before)
    assert "relax.to_vdevice" not in ops_of(after)


def test_constants_and_scalars_need_no_transfer():
    @ir_module("cuda", "llvm")
    def Before(x: R.Tensor((2,), "float32", "cuda")):
        s = R.tensor_to_shape(R.const([1, 2], "int64"))
        if R.const(True):
            r = R.exp(x)
        else:
            r = R.tanh(x)
        return (s, r)

    after = place(Before)
    assert "relax.to_vdevice" not in ops_of(after)


@pytest.mark.parametrize("packed", ["vm.builtin.tensor_to_shape"])
def test_builtins_of_the_machine_that_read_tensors(packed):
    @ir_module("cuda", "llvm")
    def Before(x: R.Tensor((2,), "int64", "cuda")):
        s = R.call_pure_packed(packed, x, ty_args=R.Shape(ndim=2))
        return s

    assert ops_of(place(Before)).count("relax.to_vdevice") == 1
