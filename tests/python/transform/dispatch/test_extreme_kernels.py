"""Largest and smallest elements of floats: infinities count, and the first of equals is found."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from relax_hetero.transform.dispatch.numpy_kernels import extreme_legalizations


def run(name, array, axis, keepdims):
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(array.shape, str(array.dtype)))
    with builder.function("main", [x]):
        with builder.dataflow():
            output = builder.emit_output(getattr(op, name)(x, axis, keepdims))
        builder.emit_func_output(output)
    mod = relax.transform.LegalizeOps(extreme_legalizations())(builder.get())
    return relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())["main"](tvm.runtime.tensor(array)).numpy()


@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize("name", ["max", "min", "argmax", "argmin"])
@pytest.mark.parametrize("keepdims", [False, True])
def test_as_numpy(name, keepdims, dtype):
    array = np.random.default_rng(2).integers(-3, 4, (3, 4, 5)).astype(dtype)  # with equal ones among them
    if dtype == "float32":
        array[0, :, 1], array[1, :, 2], array[2, :, 3] = -np.inf, np.inf, (np.inf, -np.inf, 0.0, np.inf)
    expected = getattr(np, name)(array, axis=1, keepdims=keepdims)
    np.testing.assert_array_equal(run(name, array, 1, keepdims), expected)


@pytest.mark.parametrize("axis", [None, [0, 2], [-1]])
def test_over_several_axes(axis):
    array = np.full((2, 3, 4), -np.inf, "float32")
    array[1, 2, 3] = 1.5
    expected = array.max(axis=None if axis is None else tuple(axis))
    np.testing.assert_array_equal(run("max", array, axis, False), expected)
