"""Kernels in C may hold infinities and NaN, and take magnitudes."""

import numpy as np
import onnx.parser
import pytest
import tvm
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from relax_hetero.driver.link.c_literals import with_c_literals


@I.ir_module
class Before:
    @T.prim_func(s_tir=True)
    def main(x: T.Buffer((4,), "float32"), y: T.Buffer((4,), "float32")):
        for i in range(4):
            y[i] = T.max(T.fabs(x[i]), T.float32("-inf"))


@I.ir_module
class Expected:
    @T.prim_func(s_tir=True)
    def main(x: T.Buffer((4,), "float32"), y: T.Buffer((4,), "float32")):
        for i in range(4):
            y[i] = T.max(
                T.call_pure_extern("float32", "__builtin_fabsf", x[i]), -T.call_pure_extern("float32", "__builtin_inff")
            )


def test_they_are_calls_of_built_ins():
    after = with_c_literals(Before["main"])
    tvm.ir.assert_structural_equal(after, Expected["main"], map_free_vars=True)
    assert with_c_literals(after).same_as(after)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
def test_numbers_are_those_of_numpy(dtype, value):
    number = float(value)

    @I.ir_module
    class Sum:
        @R.function
        def main(x: R.Tensor((5,), dtype)) -> R.Tensor((5,), dtype):
            return R.where(R.greater(x, R.const(0, dtype)), R.add(x, R.const(number, dtype)), x)

    mod = Sum
    mod.update_global_info("vdevice", [rh.VDevice("c")])
    x = np.array([-1, 1, 0, 3, -2], dtype)
    actual = rh.vm.VirtualMachine(rh.compile(mod))["main"](x).numpy()
    np.testing.assert_array_equal(actual, np.where(x > 0, x + np.array(number, dtype), x))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_magnitudes_and_finite_tests(dtype):
    @I.ir_module
    class Finite:
        @R.function
        def main(x: R.Tensor((5,), dtype)):
            with R.dataflow():
                gv = (R.abs(R.multiply(x, R.const(1, dtype))), R.isfinite(x), R.isinf(x), R.isnan(x))
                R.output(gv)
            return gv

    Finite.update_global_info("vdevice", [rh.VDevice("c")])
    x = np.array([-1, np.inf, -np.inf, np.nan, 2], dtype)
    actual = rh.vm.VirtualMachine(rh.compile(Finite))["main"](x)
    for ours, expected in zip(actual, (np.abs(x), np.isfinite(x), np.isinf(x), np.isnan(x)), strict=True):
        np.testing.assert_array_equal(ours.numpy(), expected)


def test_global_maxima():
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[2, 3, 4, 4] x) => (float[2, 3, 1, 1] y) { y = GlobalMaxPool(x) }""")
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 4)).astype("float32")
    machine = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model, vdevices=["c"])))
    np.testing.assert_array_equal(machine["main"](x).numpy(), x.max((2, 3), keepdims=True))


def test_names_of_nodes():
    """Parameters of a command buffer have the names of values, which are not always identifiers of C."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[16, 32] x) => (float[16, 32] z) { a = MatMul(x, w) y = Relu(a) z = MatMul(y, w) }""")
    w = np.random.default_rng(0).standard_normal((32, 32)).astype("float32")
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    for node, name in zip(model.graph.node, ("/layer.0/a", "/layer.0/b", "/layer.0/c@1"), strict=True):
        node.name = name
    x = np.eye(16, 32, dtype="float32")
    actual = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model, vdevices=["c"])))["main"](x)
    np.testing.assert_allclose(np.asarray(actual), np.maximum(w[:16], 0) @ w, rtol=1e-4, atol=1e-4)
