"""Kernels for command buffers that are recorded by hand, on two CPU devices."""

import numpy as np
import tvm
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T


@tvm.register_global_func("relax_hetero.test.fail_if_negative", override=True)
def fail_if_negative(value):
    if value < 0:
        raise ArithmeticError(f"{value} is negative")


@I.ir_module
class Kernels:
    """Each kernel is called nowhere but by hand, except `shift`, which a model on llvm:1 calls."""

    I.module_global_infos({"vdevice": [I.vdevice("llvm", 0), I.vdevice("llvm", 1)]})

    @T.prim_func(s_tir=True)
    def scale(a: T.handle, b: T.handle, factor: T.float32):
        n = T.int64()
        A = T.match_buffer(a, (n,), "float32")
        B = T.match_buffer(b, (n,), "float32")
        for i in range(n):
            with T.sblock("scale"):
                vi = T.axis.spatial(n, i)
                B[vi] = A[vi] * factor

    @T.prim_func(s_tir=True)
    def add(A: T.Buffer((16,), "float32"), B: T.Buffer((16,), "float32"), C: T.Buffer((16,), "float32")):
        for i in range(16):
            with T.sblock("add"):
                vi = T.axis.spatial(16, i)
                C[vi] = A[vi] + B[vi]

    @T.prim_func(s_tir=True)
    def accumulate(A: T.Buffer((16,), "float32"), B: T.Buffer((16,), "float32")):
        for i in range(16):
            with T.sblock("accumulate"):
                vi = T.axis.spatial(16, i)
                B[vi] = B[vi] + A[vi]

    @T.prim_func(s_tir=True)
    def mark(A: T.Buffer((4, 3, 2), "int32"), x: T.int64, y: T.int64, z: T.int64):
        T.func_attr({"relax_hetero.workgroups": 3})
        with T.sblock("root"):
            T.reads()
            T.writes()
            A[x, y, z] = A[x, y, z] + T.int32(1)

    @T.prim_func(s_tir=True)
    def count_positive(A: T.Buffer((16,), "float32"), counts: T.Buffer((3,), "int32")):
        with T.sblock("root"):
            T.reads()
            T.writes()
            counts[0] = T.int32(0)
            counts[1] = T.int32(1)
            counts[2] = T.int32(2)
            for i in range(16):
                if A[i] > T.float32(0):
                    counts[0] = counts[0] + T.int32(1)

    @T.prim_func(s_tir=True)
    def above(A: T.Buffer((16,), "float32"), limit: T.int32, flag: T.Buffer((1,), "int32")):
        with T.sblock("root"):
            T.reads()
            T.writes()
            flag[0] = T.if_then_else(A[0] > T.Cast("float32", limit), T.int32(1), T.int32(0))

    @T.prim_func(s_tir=True)
    def refuse(A: T.Buffer((1,), "int32")):
        with T.sblock("root"):
            T.reads()
            T.writes()
            T.evaluate(T.call_packed("relax_hetero.test.fail_if_negative", A[0]))

    @T.prim_func(s_tir=True)
    def shift(A: T.Buffer((16,), "float32"), B: T.Buffer((16,), "float32")):
        for i in range(16):
            with T.sblock("shift"):
                vi = T.axis.spatial(16, i)
                B[vi] = A[vi] + T.float32(1)

    @R.function
    def main(x: R.Tensor((16,), "float32", "llvm:1")):
        cls = Kernels
        with R.dataflow():
            y = R.call_tir(cls.shift, (x,), out_ty=R.Tensor((16,), "float32", "llvm:1"))
            z = R.call_tir(cls.shift, (y,), out_ty=R.Tensor((16,), "float32", "llvm:1"))
            R.output(z)
        return z


def floats(count, seed):
    """Fresh numbers without a pattern."""
    return np.random.default_rng(seed).standard_normal(count).astype("float32")
