"""LowerTransfers: `to_vdevice` becomes the run-time's own `to_device`."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from modules import ir_module
from relax_hetero.transform import LowerTransfers

V4 = {"kind": "llvm", "mcpu": "x86-64-v4"}
V2 = {"kind": "llvm", "mcpu": "x86-64-v2"}


def test_transfer_becomes_a_call():
    @ir_module(V4, "cuda", pure=False)
    def Before(x: R.Tensor((4,), "float32", "llvm:0")) -> R.Tensor((4,), "float32", "cuda:0"):
        y: R.Tensor((4,), "float32", "cuda:0") = R.to_vdevice(x, "cuda:0")
        return y

    @ir_module(V4, "cuda", pure=False)
    def Expected(x: R.Tensor((4,), "float32", "llvm:0")) -> R.Tensor((4,), "float32", "cuda:0"):
        room: R.Tensor((4,), "float32", "cuda:0") = R.builtin.alloc_tensor(R.shape([4]), "float32", 1, "global")
        y: R.Tensor((4,), "float32", "cuda:0") = R.call_packed(
            "relax_hetero.to_device", x, 1, 0, room, ty_args=(R.Tensor((4,), "float32", "cuda:0"),)
        )
        return y

    after = LowerTransfers()(Before)
    assert_structural_equal(after, Expected)
    assert_structural_equal(LowerTransfers()(after), Expected)


def test_between_cpus_the_result_is_the_operand():
    """They share their memory: no allocation, and no copy."""

    @ir_module(V4, (V2, 1), pure=False)
    def Before(x: R.Tensor((4,), "float32", "llvm:0")) -> R.Tensor((4,), "float32", "llvm:1"):
        y: R.Tensor((4,), "float32", "llvm:1") = R.to_vdevice(x, "llvm:1")
        return y

    @ir_module(V4, (V2, 1), pure=False)
    def Expected(x: R.Tensor((4,), "float32", "llvm:0")) -> R.Tensor((4,), "float32", "llvm:1"):
        y: R.Tensor((4,), "float32", "llvm:1") = R.call_packed(
            "relax_hetero.to_device", x, 1, 0, ty_args=(R.Tensor((4,), "float32", "llvm:1"),)
        )
        return y

    assert_structural_equal(LowerTransfers()(Before), Expected)


def test_in_place_writers_need_a_new_tensor():
    @ir_module(V4, (V2, 1))
    class Before:
        @T.prim_func(private=True, s_tir=True)
        def increment(a: T.Buffer((4,), "float32")):
            for i in range(4):
                a[i] = a[i] + T.float32(1)

        @R.function(pure=False)
        def main(x: R.Tensor((4,), "float32", "llvm:0")) -> R.Tensor((4,), "float32", "llvm:1"):
            y: R.Tensor((4,), "float32", "llvm:1") = R.to_vdevice(x, "llvm:1")
            z = R.call_tir_inplace(
                Before.increment, (y,), inplace_indices=0, out_ty=R.Tensor((4,), "float32", "llvm:1")
            )
            return z

    call = LowerTransfers()(Before)["main"].body.blocks[0].bindings[1].value
    assert [int(arg.value) for arg in call.args[1:3]] == [1, 1]


def test_a_tensor_of_unknown_shape_gets_no_room():
    @ir_module(V4, (V2, 1), pure=False)
    def Before(x: R.Tensor(ndim=2, dtype="float32", vdevice="llvm:0")):
        y: R.Tensor(ndim=2, dtype="float32", vdevice="llvm:1") = R.to_vdevice(x, "llvm:1")
        return y

    (binding,) = LowerTransfers()(Before)["main"].body.blocks[0].bindings
    assert len(binding.value.args) == 3


def late_reader():
    """Both operands of the last addition were transferred; the planner must reuse neither, nor their sources."""
    bb = relax.BlockBuilder()
    devices = [rh.VDevice(V4, 0), rh.VDevice(V2, 1)]
    x = relax.Var("x", relax.TensorType((5, 37), "float32", devices[0]))
    with bb.function("main", [x]):
        with bb.dataflow():
            a = bb.emit(relax.op.exp(x))
            b = bb.emit(relax.op.tanh(a))
            b1 = bb.emit(relax.op.to_vdevice(b, devices[1]))
            a1 = bb.emit(relax.op.to_vdevice(a, devices[1]))
            c = bb.emit(relax.op.exp(b1))
            c0 = bb.emit(relax.op.to_vdevice(c, devices[0]))
            d = bb.emit(relax.op.add(relax.op.exp(x), c0))
            d1 = bb.emit(relax.op.to_vdevice(d, devices[1]))
            e = bb.emit_output(relax.op.add(relax.op.add(a1, c), relax.op.add(b1, d1)))
        bb.emit_func_output(e)
    mod = bb.get()
    mod.update_global_info("vdevice", devices)
    return mod


@pytest.mark.parametrize("devices", [None, [tvm.cpu(0), tvm.cpu(0)], [tvm.cpu(3), tvm.cpu(3)]])
def test_results_of_transfers_outlive_their_sources(devices):
    """Also where both vdevices are one physical device, and a transfer returns its operand."""
    vm = rh.vm.VirtualMachine(rh.compile(late_reader()), devices)
    x = np.random.default_rng(0).random((5, 37), "float32")
    a = np.exp(x)
    b = np.tanh(a)
    c = np.exp(b)
    for _ in range(3):
        np.testing.assert_allclose(vm["main"](x).numpy(), a + c + (b + (a + c)), rtol=1e-5)


def test_writing_in_place_leaves_the_source_alone():
    @ir_module(V4, (V2, 1))
    class Mod:
        @T.prim_func(private=True, s_tir=True)
        def increment(a: T.Buffer((4,), "float32")):
            for i in range(4):
                with T.sblock("a"):
                    v = T.axis.spatial(4, i)
                    a[v] = a[v] + T.float32(1)

        @R.function
        def main(x: R.Tensor((4,), "float32", "llvm:0")):
            with R.dataflow():
                a = R.exp(x)
                b: R.Tensor((4,), "float32", "llvm:1") = R.to_vdevice(a, "llvm:1")
                c = R.call_tir_inplace(
                    Mod.increment, (b,), inplace_indices=0, out_ty=R.Tensor((4,), "float32", "llvm:1")
                )
                d = R.tanh(a)
                R.output(c, d)
            return (c, d)

    x = np.random.default_rng(0).random(4, "float32")
    for devices in (None, [tvm.cpu(0), tvm.cpu(0)]):
        c, d = rh.vm.VirtualMachine(rh.compile(Mod), devices)["main"](x)
        np.testing.assert_allclose(c.numpy(), np.exp(x) + 1, rtol=1e-6)
        np.testing.assert_allclose(d.numpy(), np.tanh(np.exp(x)), rtol=1e-6)
