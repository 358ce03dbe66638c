"""PlanMemoryPerDevice: no storage is shared across devices (upstream row 1)."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from modules import ir_module
from relax_hetero.transform import PlanMemoryPerDevice

V4 = {"kind": "llvm", "mcpu": "x86-64-v4"}
V2 = {"kind": "llvm", "mcpu": "x86-64-v2"}


def test_storage_is_reused_within_a_device_only():
    @ir_module(V4, (V2, 1))
    class Before:
        @T.prim_func(private=True, s_tir=True)
        def kernel(a: T.handle, b: T.handle):
            T.evaluate(0)

        @R.function(pure=False)
        def main(x: R.Tensor((4,), "float32", "llvm:0"), z: R.Tensor((4,), "float32", "llvm:1")):
            cls = Before
            a: R.Tensor((4,), "float32", "llvm:0") = R.builtin.alloc_tensor(R.shape([4]), "float32", 0)
            cls.kernel(x, a)
            b: R.Tensor((4,), "float32", "llvm:0") = R.builtin.alloc_tensor(R.shape([4]), "float32", 0)
            cls.kernel(a, b)
            c: R.Tensor((4,), "float32", "llvm:1") = R.builtin.alloc_tensor(R.shape([4]), "float32", 1)
            cls.kernel(z, c)
            d: R.Tensor((4,), "float32", "llvm:0") = R.builtin.alloc_tensor(R.shape([4]), "float32", 0)
            cls.kernel(b, d)
            return R.tuple()

    @ir_module(V4, (V2, 1))
    class Expected:
        """a and d share one storage on device 0, b has its own, c is alone on device 1."""

        @T.prim_func(private=True, s_tir=True)
        def kernel(a: T.handle, b: T.handle):
            T.evaluate(0)

        @R.function(pure=False)
        def main(x: R.Tensor((4,), "float32", "llvm:0"), z: R.Tensor((4,), "float32", "llvm:1")):
            cls = Expected
            s: R.Any = R.memory.alloc_storage(R.shape([64]), 0, "global", "uint8")
            a: R.Tensor((4,), "float32", "llvm:0") = R.memory.alloc_tensor(s, 0, R.shape([4]), "float32", 0)
            cls.kernel(x, a)
            t: R.Any = R.memory.alloc_storage(R.shape([64]), 0, "global", "uint8")
            b: R.Tensor((4,), "float32", "llvm:0") = R.memory.alloc_tensor(t, 0, R.shape([4]), "float32", 0)
            cls.kernel(a, b)
            u: R.Any = R.memory.alloc_storage(R.shape([64]), 1, "global", "uint8")
            c: R.Tensor((4,), "float32", "llvm:1") = R.memory.alloc_tensor(u, 0, R.shape([4]), "float32", 1)
            cls.kernel(z, c)
            d: R.Tensor((4,), "float32", "llvm:0") = R.memory.alloc_tensor(s, 0, R.shape([4]), "float32", 0)
            cls.kernel(b, d)
            return R.tuple()

    assert_structural_equal(PlanMemoryPerDevice()(Before), Expected)
    # Stock TVM puts c into storage that a had on device 0.
    assert sorted(_storages(relax.transform.StaticPlanBlockMemory()(Before))) == [(0, "global"), (0, "global")]


def _storages(mod):
    calls = [b.value for block in mod["main"].body.blocks for b in block.bindings]
    return [
        (int(c.args[1].value), c.args[2].value)
        for c in calls
        if isinstance(c, relax.Call) and getattr(c.op, "name", "") == "relax.memory.alloc_storage"
    ]


def test_module_without_allocations_is_unchanged():
    @ir_module()
    def Mod(x: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
        return x

    assert_structural_equal(PlanMemoryPerDevice()(Mod), Mod)


@pytest.mark.parametrize("shape", [(4,), (3, 5)])
def test_the_upstream_failure_runs(shape):
    """`a=exp(x@0); b=tanh(a); c=to(b,1); d=exp(c); e=tanh(d)` fails in stock TVM."""
    bb = relax.BlockBuilder()
    devices = [rh.VDevice(V4, 0), rh.VDevice(V2, 1)]
    x = relax.Var("x", relax.TensorType(shape, "float32", devices[0]))
    with bb.function("main", [x]):
        with bb.dataflow():
            b = bb.emit(relax.op.tanh(bb.emit(relax.op.exp(x))))
            c = bb.emit(relax.op.to_vdevice(b, devices[1]))
            e = bb.emit_output(relax.op.tanh(bb.emit(relax.op.exp(c))))
        bb.emit_func_output(e)
    mod = bb.get()
    mod.update_global_info("vdevice", devices)
    vm = rh.vm.VirtualMachine(rh.compile(mod), [tvm.cpu(0), tvm.cpu(1)])
    data = np.random.default_rng(0).random(shape, "float32")
    out = vm["main"](data)
    assert out.device == tvm.cpu(1)
    np.testing.assert_allclose(out.numpy(), np.tanh(np.exp(np.tanh(np.exp(data)))), rtol=1e-5)


def test_branches_share_no_storage():
    """Stock TVM hands the else branch storage that only the then branch allocated, and the process dies."""

    @ir_module(V4, (V2, 1))
    def Mod(c: R.Tensor((), "bool", "llvm:1"), x: R.Tensor((64,), "float32", "llvm:0")) -> R.Tensor(
        (64,), "float32", "llvm:0"
    ):
        if c:
            a = R.call_dps_packed("test.plan.exp", (x,), out_ty=R.Tensor((64,), "float32", "llvm:0"))
            b = R.exp(a)
            b1 = R.exp(b)
            y = R.multiply(b1, b1)
        else:
            a = R.exp(x)
            b = R.multiply(a, a)
            y = R.exp(b)
        return y

    tvm.register_global_func("test.plan.exp", lambda x, out: out.copyfrom(np.exp(x.numpy())), override=True)
    vm = rh.vm.VirtualMachine(rh.compile(Mod))
    x = np.random.default_rng(0).random(64, "float32") / 4
    for _ in range(3):
        np.testing.assert_allclose(vm["main"](np.array(True), x).numpy(), np.exp(np.exp(np.exp(x))) ** 2, rtol=1e-4)
        np.testing.assert_allclose(vm["main"](np.array(False), x).numpy(), np.exp(np.exp(x) ** 2), rtol=1e-4)


def test_operands_of_packed_functions_are_not_reused():
    """A packed function may return an operand; stock TVM takes operands for free after the call."""
    tvm.register_global_func("test.plan.same", lambda x: x, override=True)

    @ir_module(V4, (V2, 1))
    def Mod(x: R.Tensor((4,), "float32", "llvm:1")) -> R.Tensor((4,), "float32", "llvm:1"):
        with R.dataflow():
            a = R.exp(x)
            b = R.call_pure_packed("test.plan.same", a, ty_args=(R.Tensor((4,), "float32", "llvm:1"),))
            c = R.call_dps_packed("test.plan.triple", (x,), out_ty=R.Tensor((4,), "float32", "llvm:1"))
            d = R.call_dps_packed("test.plan.triple", (c,), out_ty=R.Tensor((4,), "float32", "llvm:1"))
            e = R.add(b, d)
            R.output(e)
        return e

    tvm.register_global_func("test.plan.triple", lambda x, out: out.copyfrom(3 * x.numpy()), override=True)
    vm = rh.vm.VirtualMachine(rh.compile(Mod))
    x = np.random.default_rng(0).random(4, "float32")
    np.testing.assert_allclose(vm["main"](x).numpy(), np.exp(x) + 9 * x, rtol=1e-5)


def test_the_source_of_a_transfer_between_cpus_outlives_its_result():
    """The result is the operand by another device's name: nothing on either device may take its storage."""

    @ir_module(V4, (V2, 1))
    class Mod:
        @T.prim_func(private=True, s_tir=True)
        def kernel(a: T.handle, b: T.handle):
            T.evaluate(0)

        @R.function(pure=False)
        def main(x: R.Tensor((4,), "float32", "llvm:0")):
            cls = Mod
            a: R.Tensor((4,), "float32", "llvm:0") = R.builtin.alloc_tensor(R.shape([4]), "float32", 0)
            cls.kernel(x, a)
            b: R.Tensor((4,), "float32", "llvm:1") = R.call_packed(
                "relax_hetero.to_device", a, 1, 0, ty_args=(R.Tensor((4,), "float32", "llvm:1"),)
            )
            c: R.Tensor((4,), "float32", "llvm:0") = R.builtin.alloc_tensor(R.shape([4]), "float32", 0)
            cls.kernel(x, c)
            d: R.Tensor((4,), "float32", "llvm:1") = R.builtin.alloc_tensor(R.shape([4]), "float32", 1)
            cls.kernel(b, d)
            e: R.Tensor((4,), "float32", "llvm:0") = R.builtin.alloc_tensor(R.shape([4]), "float32", 0)
            cls.kernel(c, e)
            return R.tuple()

    # c cannot reuse the storage of a, which b aliases until d is computed; e can.
    assert _storages(PlanMemoryPerDevice()(Mod)) == [(0, "global"), (0, "global"), (1, "global")]


def test_buffers_of_transfers_share_storage_with_values_of_the_device():
    @ir_module(V4, "cuda")
    class Mod:
        @T.prim_func(private=True, s_tir=True)
        def kernel(a: T.handle, b: T.handle):
            T.evaluate(0)

        @R.function(pure=False)
        def main(x: R.Tensor((4,), "float32", "cuda:0")):
            cls = Mod
            r: R.Tensor((4,), "float32", "llvm:0") = R.builtin.alloc_tensor(R.shape([4]), "float32", 0)
            a: R.Tensor((4,), "float32", "llvm:0") = R.call_packed(
                "relax_hetero.to_device", x, 0, 0, r, ty_args=(R.Tensor((4,), "float32", "llvm:0"),)
            )
            b: R.Tensor((4,), "float32", "llvm:0") = R.builtin.alloc_tensor(R.shape([4]), "float32", 0)
            cls.kernel(a, b)
            s: R.Tensor((4,), "float32", "cuda:0") = R.builtin.alloc_tensor(R.shape([4]), "float32", 1)
            c: R.Tensor((4,), "float32", "cuda:0") = R.call_packed(
                "relax_hetero.to_device", b, 1, 0, s, ty_args=(R.Tensor((4,), "float32", "cuda:0"),)
            )
            t: R.Tensor((4,), "float32", "llvm:0") = R.builtin.alloc_tensor(R.shape([4]), "float32", 0)
            d: R.Tensor((4,), "float32", "llvm:0") = R.call_packed(
                "relax_hetero.to_device", c, 0, 0, t, ty_args=(R.Tensor((4,), "float32", "llvm:0"),)
            )
            e: R.Tensor((4,), "float32", "llvm:0") = R.builtin.alloc_tensor(R.shape([4]), "float32", 0)
            cls.kernel(d, e)
            return R.tuple()

    # r and t share storage, so do b and e; s shares with none.
    assert sorted(_storages(PlanMemoryPerDevice()(Mod))) == [(0, "global"), (0, "global"), (1, "global")]


def test_results_have_storage_outside_of_the_plan():
    @ir_module(V4)
    class Mod:
        @T.prim_func(private=True, s_tir=True)
        def kernel(a: T.handle, b: T.handle):
            T.evaluate(0)

        @R.function(private=True, pure=False)
        def same(x: R.Tensor((4,), "float32", "llvm:0")) -> R.Tensor((4,), "float32", "llvm:0"):
            return x

        @R.function(pure=False)
        def main(x: R.Tensor((4,), "float32", "llvm:0")):
            cls = Mod
            a: R.Tensor((4,), "float32", "llvm:0") = R.builtin.alloc_tensor(R.shape([4]), "float32", 0)
            cls.kernel(x, a)
            b: R.Tensor((4,), "float32", "llvm:0") = cls.same(a)
            c: R.Tensor((4,), "float32", "llvm:0") = R.builtin.alloc_tensor(R.shape([4]), "float32", 0)
            cls.kernel(b, c)
            v: R.Tensor((2, 2), "float32", "llvm:0") = R.reshape(c, R.shape([2, 2]))
            return (x, (v,))

    assert _storages(PlanMemoryPerDevice()(Mod)) == []
