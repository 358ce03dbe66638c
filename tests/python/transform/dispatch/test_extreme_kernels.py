"""Largest and smallest elements of floats: infinities count, and the first of equals is found."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op
from tvm.script import relax as R

import relax_hetero as rh
from gpu_interpreter.models import InterpretedModel
from modules import ir_module
from relax_hetero.transform.dispatch import sort_kernels
from relax_hetero.transform.dispatch.numpy_kernels import extreme_legalizations


def machine_of(array, compute):
    """A function of one operand, with these kernels and no others."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(array.shape, str(array.dtype)))
    with builder.function("main", [x]):
        with builder.dataflow():
            output = builder.emit_output(compute(x))
        builder.emit_func_output(output)
    mod = relax.transform.LegalizeOps(extreme_legalizations(sort_kernels.legalizations()))(builder.get())
    return relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())["main"]


def run(name, array, axis, keepdims):
    function = machine_of(array, lambda x: getattr(op, name)(x, axis, keepdims))
    return function(tvm.runtime.tensor(array)).numpy()


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


def rows_with_ties(width):
    """Rows with equal elements, with NaN, and of infinities."""
    rows = np.random.default_rng(width).integers(-99, 99, (2, 3, width)).astype("float32")
    rows[0, 1, width // 2 :], rows[0, 2, 1::2], rows[1, 0], rows[1, 1] = np.nan, np.nan, -np.inf, np.inf
    return rows


def search(rows, device):
    """A module that searches rows for the largest and the smallest elements, and the results of numpy."""

    @ir_module(device)
    def module(x: R.Tensor(rows.shape, "float32")):
        with R.dataflow():
            top = R.topk(x, 1, -1, "both", True, "int32")
            values, indices = top[0], top[1]
            largest, smallest = R.argmax(x, axis=-1, keepdims=True), R.argmin(x, axis=-1)
            R.output(values, indices, largest, smallest)
        return (values, indices, largest, smallest)

    largest = rows.argmax(-1)[..., None]
    return module, (np.take_along_axis(rows, largest, -1), largest, largest, rows.argmin(-1))


@pytest.mark.parametrize("width", [64, 576, 1001])  # four blocks; blocks of 64; none
def test_blocks_of_rows(width):
    rows = rows_with_ties(width)
    module, expected = search(rows, "llvm")
    for ours, numpys in zip(rh.vm.VirtualMachine(rh.compile(module))["main"](rows), expected, strict=True):
        np.testing.assert_array_equal(ours.numpy(), numpys)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("width", [3, 77, 1100])  # a thread, a warp, a block for each row
def test_the_largest_element_on_a_gpu(width):
    rows = rows_with_ties(width)
    module, expected = search(rows, {"kind": "cuda", "arch": "sm_90a"})
    for ours, numpys in zip(InterpretedModel(module)(rows), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(ours), numpys)
