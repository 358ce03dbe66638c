"""Elements taken at indices that are in bounds: as numpy takes them, and quietly."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

import relax_hetero as rh
from relax_hetero.transform.dispatch.numpy_kernels import take_legalizations


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("index", [np.array(2), np.array([2, 0]), np.array([[1, 1, 0], [0, 2, 1]])])
def test_as_numpy(axis, index, capfd):
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((3, 4, 5), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            gathered = builder.emit(op.take(x, relax.const(index, "int64"), axis, "fast"))
            output = builder.emit_output(gathered)
        builder.emit_func_output(output)
    mod = relax.transform.LegalizeOps(take_legalizations())(builder.get())
    array = np.random.default_rng(0).standard_normal((3, 4, 5)).astype("float32")
    actual = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())["main"](tvm.runtime.tensor(array)).numpy()
    np.testing.assert_array_equal(actual, np.take(array, index, axis))
    assert "in bound" not in capfd.readouterr().err


def test_a_short_number_of_a_joined_tensor():
    """A kernel that joins tensors compares positions with int64 extents."""
    builder = relax.BlockBuilder()
    x, y = (relax.Var(name, relax.TensorType((2, 4), "float32")) for name in "xy")
    with builder.function("main", [x, y]):
        with builder.dataflow():
            joined = builder.emit(op.concat([x, y], 0))
            output = builder.emit_output(builder.emit(op.take(joined, relax.const(3, "int32"), 0)))
        builder.emit_func_output(output)
    arrays = np.arange(16, dtype="float32").reshape(2, 2, 4)
    actual = rh.vm.VirtualMachine(rh.compile(builder.get()))["main"](*arrays).numpy()
    np.testing.assert_array_equal(actual, arrays[1, 1])
