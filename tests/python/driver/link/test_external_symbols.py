"""Kernels may call functions of this process, and no others."""

import numpy as np
import pytest
import tvm
from tvm.script import tirx as T

import relax_hetero as rh
from relax_hetero.errors import BuildError


def calling(symbol):
    @T.prim_func(private=True)
    def kernel(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")):
        for i in range(4):
            b[i] = T.call_extern("float32", symbol, a[i])

    bb = tvm.relax.BlockBuilder()
    callee = bb.add_func(kernel, "kernel")
    x = tvm.relax.Var("x", tvm.relax.TensorType((4,), "float32"))
    with bb.function("main", [x]):
        call = tvm.relax.call_tir(callee, [x], tvm.relax.TensorType((4,), "float32"))
        bb.emit_func_output(bb.emit(call))
    return bb.get()


def test_a_function_of_the_c_library_is_called():
    x = np.random.default_rng(0).random(4, "float32")
    out = rh.vm.VirtualMachine(rh.compile(calling("expf")))["main"](x)
    np.testing.assert_allclose(out.numpy(), np.exp(x), rtol=1e-5)


def test_an_undefined_function_is_refused():
    """It would end the process when called."""
    with pytest.raises(BuildError, match="kernel 'kernel' calls the external function 'no_such_function'"):
        rh.compile(calling("no_such_function"))
