"""Elements taken at indices that are in bounds: as numpy takes them, and quietly."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

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
