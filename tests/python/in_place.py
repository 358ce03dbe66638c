"""A module that overwrites its argument, which callers keep, and reads it afterwards."""

from __future__ import annotations

from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T


@I.ir_module
class InPlace:
    @T.prim_func(private=True, s_tir=True)
    def increment(a: T.Buffer((4,), "float32")):
        for i in range(4):
            with T.sblock("increment"):
                vi = T.axis.spatial(4, i)
                a[vi] = a[vi] + T.float32(1)

    @R.function
    def main(x: R.Tensor((4,), "float32")):
        cls = InPlace
        with R.dataflow():
            y = R.call_tir_inplace(cls.increment, (x,), out_ty=R.Tensor((4,), "float32"), inplace_indices=[0])
            twice = R.add(y, y)
            R.output(y, twice)
        return (y, twice)
