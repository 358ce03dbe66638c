"""SettlePackedResults: results of packed functions end where their variables are."""

import numpy as np
import tvm
from tvm.ir import assert_structural_equal
from tvm.script import relax as R

import relax_hetero as rh
from modules import ir_module
from relax_hetero.transform import SettlePackedResults

V4 = {"kind": "llvm", "mcpu": "x86-64-v4"}
V2 = {"kind": "llvm", "mcpu": "x86-64-v2"}


def test_before_and_after():
    @ir_module(V4, (V2, 1), pure=False)
    def Before(x: R.Tensor((4,), "float32", "llvm:1")) -> R.Tensor((4,), "float32", "llvm:1"):
        y = R.call_packed("test.settle.twice", x, ty_args=(R.Tensor((4,), "float32", "llvm:1"),))
        z = R.call_packed("vm.builtin.copy", y, ty_args=(R.Tensor((4,), "float32", "llvm:1"),))
        return z

    @ir_module(V4, (V2, 1), pure=False)
    def Expected(x: R.Tensor((4,), "float32", "llvm:1")) -> R.Tensor((4,), "float32", "llvm:1"):
        y_packed = R.call_packed("test.settle.twice", x, ty_args=(R.Tensor((4,), "float32", "llvm:1"),))
        _ = R.call_packed(
            "relax_hetero.check_returned",
            y_packed,
            R.str("packed function 'test.settle.twice'"),
            R.prim_value(-1),
            R.prim_value(1),
            R.str("float32"),
            R.prim_value(4),
            ty_args=(R.Tuple([]),),
        )
        y: R.Tensor((4,), "float32", "llvm:1") = R.to_vdevice(y_packed, "llvm:1")
        z = R.call_packed("vm.builtin.copy", y, ty_args=(R.Tensor((4,), "float32", "llvm:1"),))
        return z

    assert_structural_equal(SettlePackedResults()(Before), Expected)


def test_a_function_that_returns_on_the_first_cpu():
    tvm.register_global_func("test.settle.twice", lambda x: tvm.runtime.tensor(2 * x.numpy()), override=True)

    @ir_module(V4, (V2, 1))
    def Mod(x: R.Tensor((4,), "float32", "llvm:1")) -> R.Tensor((4,), "float32", "llvm:1"):
        with R.dataflow():
            y = R.call_pure_packed("test.settle.twice", x, ty_args=(R.Tensor((4,), "float32", "llvm:1"),))
            z = R.exp(y)
            R.output(z)
        return z

    x = np.random.default_rng(0).random(4, "float32")
    out = rh.vm.VirtualMachine(rh.compile(Mod))["main"](x)
    assert out.device == tvm.cpu(1)
    np.testing.assert_allclose(out.numpy(), np.exp(2 * x), rtol=1e-6)


def test_fields_of_tuples_are_moved():
    tvm.register_global_func(
        "test.settle.pair",
        lambda x: [tvm.runtime.tensor(x.numpy() + 1), [tvm.runtime.tensor(x.numpy() + 2)]],
        override=True,
    )

    @ir_module(V4, (V2, 1))
    def Mod(x: R.Tensor((4,), "float32", "llvm:1")) -> R.Tensor((4,), "float32", "llvm:1"):
        with R.dataflow():
            both = R.call_pure_packed(
                "test.settle.pair",
                x,
                ty_args=(R.Tuple(R.Tensor((4,), "float32", "llvm:1"), R.Tuple(R.Tensor((4,), "float32", "llvm:1"))),),
            )
            inner = both[1]
            y = R.multiply(both[0], inner[0])
            R.output(y)
        return y

    x = np.random.default_rng(0).random(4, "float32")
    out = rh.vm.VirtualMachine(rh.compile(Mod))["main"](x)
    assert out.device == tvm.cpu(1)
    np.testing.assert_allclose(out.numpy(), (x + 1) * (x + 2), rtol=1e-6)
