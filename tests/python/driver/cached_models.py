"""A module that is compiled again and again, and whether it computes what it should."""

import numpy as np
from tvm import relax
from tvm.script import relax as R

import relax_hetero as rh
from modules import ir_module

X = np.random.default_rng(0).standard_normal((3, 8)).astype("float32")
W = np.random.default_rng(1).standard_normal((8, 5)).astype("float32")


@ir_module({"kind": "llvm", "mcpu": "x86-64-v3"})
def Linear(x: R.Tensor((3, 8), "float32"), w: R.Tensor((8, 5), "float32")):
    R.func_attr({"num_input": 1})
    with R.dataflow():
        y = R.nn.relu(R.matmul(x, w))
        R.output(y)
    return y


def bound(weight=W, mod=Linear):
    return relax.transform.BindParams("main", {"w": weight})(mod)


def compiled(cache=True, weight=W, **options):
    return rh.compile(Linear, {"w": weight}, cache=cache, **options)


def check(exe, weight=W):
    actual = rh.vm.VirtualMachine(exe)["main"](X).numpy()
    np.testing.assert_allclose(actual, np.maximum(X @ weight, 0), rtol=1e-5)
