"""A model on two devices that the tests of reports look at."""

import numpy as np
from tvm.script import ir as I
from tvm.script import relax as R

import relax_hetero as rh

ANY_CPU = {"kind": "llvm", "mcpu": "x86-64" if "x86" in str(rh.native("llvm").attrs["mtriple"]) else "generic"}


@I.ir_module
class Model:
    I.module_global_infos({"vdevice": [I.vdevice(ANY_CPU, 0), I.vdevice(ANY_CPU, 1)]})

    @R.function
    def main(
        x: R.Tensor(("n", 16), "float32", "llvm:0"),
        w: R.Tensor((16, 8), "float32", "llvm:1"),
        b: R.Tensor((8,), "float32", "llvm:1"),
    ):
        with R.dataflow():
            y = R.exp(x)
            z = R.add(R.matmul(R.to_vdevice(y, "llvm:1"), w), b)
            s = R.nn.softmax(z)
            R.output(s)
        return s


ARGUMENTS = [np.ones((4, 16), "float32"), np.ones((16, 8), "float32"), np.zeros(8, "float32")]
