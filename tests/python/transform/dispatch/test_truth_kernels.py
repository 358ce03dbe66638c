"""Truth values are compared as numpy does it, on CPUs of several targets, and where comparisons fuse."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

import relax_hetero as rh

OPS = {
    "equal": np.equal,
    "not_equal": np.not_equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "add": np.add,
    "multiply": np.multiply,
}


@pytest.mark.parametrize("target", ["llvm", {"kind": "llvm"}], ids=["native", "generic"])
def test_comparisons(target):
    builder = relax.BlockBuilder()
    a, b = relax.Var("a", relax.TensorType((5, 64), "bool")), relax.Var("b", relax.TensorType((3, 5, 1), "bool"))
    with builder.function("main", [a, b]):
        truths = [builder.emit(getattr(relax.op, name)(a, b)) for name in OPS]
        fused = builder.emit(relax.op.where(relax.op.logical_not(truths[0]), relax.op.minimum(truths[2], a), b))
        builder.emit_func_output(relax.Tuple([*truths, fused]))
    mod = rh.transform.UpdateVDevice(rh.VDevice(target))(builder.get())
    rng = np.random.default_rng(0)
    x, y = rng.random((5, 64)) < 0.5, rng.random((3, 5, 1)) < 0.5
    results = [result.numpy() for result in rh.vm.VirtualMachine(rh.compile(mod))["main"](x, y)]
    for result, want in zip(results, (reference(x, y) for reference in OPS.values()), strict=False):
        np.testing.assert_array_equal(result, want, strict=True)
    np.testing.assert_array_equal(results[-1], np.where(~np.equal(x, y), np.less(x, y) & x, y))
