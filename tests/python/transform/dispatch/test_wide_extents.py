"""Kernels of users with 32-bit extents run alone and among ops that TVM fuses."""

import numpy as np
import pytest
import tvm
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from relax_hetero.transform.dispatch.canonical_extents import widen_extents
from seeds import fresh_rng


@I.ir_module
class Narrow:
    @T.prim_func(private=True, s_tir=True)
    def repeat_scaled(p: T.handle, q: T.handle):
        n = T.int32()
        m = T.int32()
        a = T.match_buffer(p, (n, m), "float32")
        b = T.match_buffer(q, (n * 2, m + 1), "float32")
        scaled = T.alloc_buffer((n, m), "float32")
        for i, j in T.grid(n, m):
            with T.sblock("scale"):
                v, w = T.axis.remap("SS", [i, j])
                scaled[v, w] = a[v, w] * T.Cast("float32", n)
        for i, j in T.grid(n * 2, m + 1):
            with T.sblock("repeat"):
                v, w = T.axis.remap("SS", [i, j])
                b[v, w] = T.if_then_else(w < m, scaled[v // 2, T.min(w, m - 1)], T.Cast("float32", w * n))

    @T.prim_func(private=True, s_tir=True)
    def row_sums(a: T.Buffer((4, 6), "float32"), b: T.Buffer((4,), "float32")):
        for i, j in T.grid(4, 6):
            with T.sblock("sum"):
                v, w = T.axis.remap("SR", [i, j])
                with T.init():
                    b[v] = T.float32(0)
                b[v] = b[v] + a[v, w]

    @T.prim_func(private=True, s_tir=True)
    def times(p: T.handle, k: T.int32, q: T.handle):
        n = T.int32()
        a = T.match_buffer(p, (n,), "float32")
        b = T.match_buffer(q, (n,), "float32")
        for i in range(n):
            with T.sblock("times"):
                v = T.axis.spatial(n, i)
                b[v] = a[v] * T.Cast("float32", k)

    @T.prim_func(private=True, s_tir=True)
    def without_blocks(a: T.Buffer((16,), "float32"), b: T.Buffer((16,), "float32")):
        for i in range(16):
            b[i] = a[i] + T.Cast("float32", i)

    @R.function
    def symbolic(x: R.Tensor(("n", "m"), "float32")):
        n = T.int64()
        m = T.int64()
        cls = Narrow
        with R.dataflow():
            before = R.add(x, R.const(1, "float32"))
            made = R.call_tir(cls.repeat_scaled, (before,), out_ty=R.Tensor((n * 2, m + 1), "float32"))
            y = R.add(made, R.const(1, "float32"))
            R.output(y)
        return y

    @R.function
    def reduced(x: R.Tensor((4, 6), "float32")):
        cls = Narrow
        with R.dataflow():
            before = R.add(x, R.const(1, "float32"))
            made = R.call_tir(cls.row_sums, (before,), out_ty=R.Tensor((4,), "float32"))
            y = R.negative(R.add(made, R.const(1, "float32")))
            R.output(y)
        return y

    @R.function
    def with_a_number(x: R.Tensor(("n",), "float32")):
        n = T.int64()
        cls = Narrow
        with R.dataflow():
            before = R.add(x, R.const(1, "float32"))
            made = R.call_tir(cls.times, (before, R.prim_value(T.int32(3))), out_ty=R.Tensor((n,), "float32"))
            y = R.add(made, R.const(1, "float32"))
            R.output(y)
        return y

    @R.function
    def blockless(x: R.Tensor((16,), "float32")):
        cls = Narrow
        with R.dataflow():
            before = R.add(x, R.const(1, "float32"))
            made = R.call_tir(cls.without_blocks, (before,), out_ty=R.Tensor((16,), "float32"))
            y = R.add(made, R.const(1, "float32"))
            R.output(y)
        return y


def repeated(x):
    n, m = x.shape
    left = np.repeat((x + 1) * n, 2, axis=0)
    return np.concatenate([left, np.full((2 * n, 1), m * n)], axis=1) + 1


CASES = {
    "symbolic": ((6, 5), repeated),
    "reduced": ((4, 6), lambda x: -((x + 1).sum(axis=1) + 1)),
    "with_a_number": ((7,), lambda x: (x + 1) * 3 + 1),
    "blockless": ((16,), lambda x: x + 2 + np.arange(16)),
}


@pytest.fixture(scope="module")
def machine():
    return rh.vm.VirtualMachine(rh.compile(Narrow))


@pytest.mark.parametrize("name", CASES)
def test_kernels_with_narrow_extents_stand_between_fused_ops(machine, name):
    shape, reference = CASES[name]
    x = fresh_rng().random(shape, "float32")
    np.testing.assert_allclose(machine[name](x).numpy(), reference(x), rtol=1e-5)


def test_extents_become_wide_and_arithmetic_stays():
    @I.ir_module
    class Expected:
        @T.prim_func(private=True, s_tir=True)
        def times(p: T.handle, k: T.int32, q: T.handle):
            n = T.int64()
            a = T.match_buffer(p, (n,), "float32")
            b = T.match_buffer(q, (n,), "float32")
            for i in range(T.Cast("int32", n)):
                with T.sblock("times"):
                    v = T.axis.spatial(T.Cast("int32", n), i)
                    b[v] = a[v] * T.Cast("float32", k)

    widened = widen_extents(Narrow)
    tvm.ir.assert_structural_equal(widened["times"], Expected["times"])
    assert widen_extents(widened).same_as(widened)
