"""CheckSizeDivisors: a size that is divided by a size of 0 is an error, wherever it is computed."""

import numpy as np
import pytest
import tvm
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from modules import ir_module
from relax_hetero.transform import CheckSizeDivisors
from relax_hetero.transform.ir.remarks import remarks_of


@I.ir_module
class Before:
    @T.prim_func(s_tir=True)
    def shape_func(H: T.Buffer((T.int64(4),), "int64")):
        T.func_attr({"tirx.is_host_func": True})
        H[T.int64(2)] = H[T.int64(0)] // H[T.int64(1)]
        H[T.int64(3)] = H[T.int64(0)] // T.int64(2)


@I.ir_module
class Expected:
    @T.prim_func(s_tir=True)
    def shape_func(H: T.Buffer((T.int64(4),), "int64")):
        T.func_attr({"tirx.is_host_func": True, "relax_hetero.divisors_checked": True})
        if H[T.int64(1)] == T.int64(0):
            T.call_packed("relax_hetero.refuse", T.int64(0), T.int64(0), T.int64(0), T.int64(0))
        else:
            H[T.int64(2)] = H[T.int64(0)] // H[T.int64(1)]
        H[T.int64(3)] = H[T.int64(0)] // T.int64(2)


def test_functions_that_compute_shapes_say_so_before_each_store():
    after = CheckSizeDivisors()(Before)
    tvm.ir.assert_structural_equal(after["shape_func"], Expected["shape_func"])
    assert [check.subject for check in remarks_of(after).checks] == ["size"]
    assert CheckSizeDivisors()(after).same_as(after)


@I.ir_module
class Positions:
    @T.prim_func(s_tir=True)
    def rows(x: T.Buffer((24,), "float32"), m: T.int64):
        for i in range(24):
            x[i] = T.Cast("float32", T.Cast("int64", i) // m)


def test_divisions_of_positions_are_not_meant():
    assert CheckSizeDivisors()(Positions).same_as(Positions)


# The size of a result: TVM's function computes it.
@ir_module()
def Result(x: R.Tensor(("n",), "float32"), y: R.Tensor(("m",), "float32")):
    n = T.int64()
    m = T.int64()
    with R.dataflow():
        a = R.exp(R.full((n // m, 2), R.const(1.0), "float32"))
        R.output(a)
    return a


# A size that only kernels of a command buffer compute.
@ir_module()
def Inside(x: R.Tensor(("n",), "float32"), y: R.Tensor(("m",), "float32")):
    n = T.int64()
    m = T.int64()
    with R.dataflow():
        a = R.sum(R.exp(R.full((n // m, 2), R.const(1.0), "float32")), axis=[0, 1])
        b = R.nn.softmax(R.add(x, a))
        R.output(b)
    return b


@pytest.mark.parametrize("mod", [Result, Inside])
def test_a_call_is_refused_and_the_machine_goes_on(mod):
    vm = rh.vm.VirtualMachine(rh.compile(mod, cache=False))
    six, two, none = (np.ones(count, "float32") for count in (6, 2, 0))
    first = vm["main"](six, two)
    for refused in (lambda: vm["main"](six, none), lambda: vm.submit("main", six, none).result(60)):
        with pytest.raises(rh.HeteroError, match="a size.* is divided by a size that is 0|expected m > 0 .m = 0."):
            refused()
    np.testing.assert_array_equal(vm["main"](six, two).numpy(), first.numpy())
