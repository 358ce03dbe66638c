"""FormDispatches: ops become kernels; nothing crosses devices; targets survive (upstream rows 3 and 18)."""

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.ir import assert_structural_equal
from tvm.script import relax as R
from tvm.script import tirx as T

from modules import ir_module
from relax_hetero.target.vdevice import same_object
from relax_hetero.transform import FormDispatches, RealizeVDevice
from relax_hetero.transform.dispatch import form_dispatches
from relax_hetero.transform.ir.rewriting import walk_bindings

V4 = {"kind": "llvm", "mcpu": "x86-64-v4"}
V2 = {"kind": "llvm", "mcpu": "x86-64-v2"}


@pytest.fixture(autouse=True)
def as_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels as fusing leaves them; what scheduling makes of them has tests of its own."""
    monkeypatch.setattr(form_dispatches, "schedule_cpu", lambda mod: mod)


def test_one_device():
    @ir_module(V4, (V2, 1))
    def Before(x: R.Tensor((4,), "float32", "llvm:1")) -> R.Tensor((4,), "float32", "llvm:1"):
        with R.dataflow():
            y: R.Tensor((4,), "float32", "llvm:1") = R.exp(x)
            z: R.Tensor((4,), "float32", "llvm:1") = R.add(y, x)
            R.output(z)
        return z

    @ir_module(V4, (V2, 1))
    class Expected:
        @T.prim_func(private=True, s_tir=True)
        def fused_tir_exp_add(x: T.Buffer((T.int64(4),), "float32"), out: T.Buffer((T.int64(4),), "float32")):
            T.func_attr(
                {
                    "relax_hetero.ops": ["exp", "add"],
                    "relax_hetero.tied": [[0, 1]],
                    "target": T.target(V2),
                    "tirx.noalias": True,
                }
            )
            y = T.sblock_alloc_buffer((T.int64(4),))
            for i in range(T.int64(4)):
                with T.sblock("compute"):
                    v = T.axis.spatial(T.int64(4), i)
                    y[v] = T.exp(x[v])
            for i in range(T.int64(4)):
                with T.sblock("T_add"):
                    v = T.axis.spatial(T.int64(4), i)
                    out[v] = y[v] + x[v]

        @R.function
        def main(x: R.Tensor((4,), "float32", "llvm:1")) -> R.Tensor((4,), "float32", "llvm:1"):
            with R.dataflow():
                z = R.call_tir(Expected.fused_tir_exp_add, (x,), out_ty=R.Tensor((4,), "float32", "llvm:1"))
                R.output(z)
            return z

    after = FormDispatches()(Before)
    assert_structural_equal(after, Expected)
    assert_structural_equal(FormDispatches()(after), Expected)


def test_two_devices_share_no_kernel():
    """The same chain on both devices: two kernels, each with its target; the transfer stays between them."""

    @ir_module(V4, (V2, 1))
    def Before(x: R.Tensor((4,), "float32", "llvm:0")) -> R.Tensor((4,), "float32", "llvm:1"):
        with R.dataflow():
            a = R.exp(x)
            b = R.tanh(a)
            c: R.Tensor((4,), "float32", "llvm:1") = R.to_vdevice(b, "llvm:1")
            d = R.exp(c)
            e = R.tanh(d)
            R.output(e)
        return e

    after = FormDispatches()(RealizeVDevice()(Before))
    values = [b.value for b in walk_bindings(after["main"])]
    kernels = [v.args[0] for v in values if v.op.name == "relax.call_tir"]
    assert [v.op.name for v in values] == ["relax.call_tir", "relax.to_vdevice", "relax.call_tir"]
    assert [after.functions[k].attrs["target"].attrs["mcpu"] for k in kernels] == ["x86-64-v4", "x86-64-v2"]


def test_stock_fuse_tir_drops_the_target():
    """The reason the target is put back; when this fails, BindTargets after fusing may go."""

    @ir_module(V2)
    def Mod(x: R.Tensor((4,), "float32", "llvm:0")) -> R.Tensor((4,), "float32", "llvm:0"):
        with R.dataflow():
            y = R.exp(x)
            z = R.tanh(y)
            R.output(z)
        return z

    steps = [relax.transform.LegalizeOps(), relax.transform.AnnotateTIROpPattern()]
    fused = tvm.transform.Sequential([*steps, relax.transform.FuseOps(), relax.transform.FuseTIR()])(Mod)
    assert [f.attrs.get("target") for f in fused.functions.values() if isinstance(f, tirx.PrimFunc)] == [None]


def test_folded_constants_are_placed():
    bb = relax.BlockBuilder()
    devices = [relax.VDevice(V4, 0), relax.VDevice(V2, 1)]
    x = relax.Var("x", relax.TensorType((4,), "float32", devices[1]))
    with bb.function("main", [x]):
        with bb.dataflow():
            w = bb.emit(relax.op.exp(relax.const(np.zeros(4, "float32"))))
            y = bb.emit_output(relax.op.add(x, w))
        bb.emit_func_output(y)
    mod = bb.get()
    mod.update_global_info("vdevice", devices)
    after = FormDispatches()(RealizeVDevice()(mod))
    (binding,) = walk_bindings(after["main"])
    constant = binding.value.args[1].fields[1]
    assert isinstance(constant, tvm.ir.GenericConst)
    np.testing.assert_array_equal(constant.value.numpy(), np.ones(4, "float32"))
    assert same_object(constant.ty.vdevice, devices[1])


def test_user_kernels_are_placed_like_any_op():
    @ir_module(V4, (V2, 1))
    class Before:
        @T.prim_func(private=True, s_tir=True)
        def twice(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")):
            for i in range(4):
                with T.sblock("b"):
                    v = T.axis.spatial(4, i)
                    b[v] = a[v] * T.float32(2)

        @R.function
        def main(x: R.Tensor((4,), "float32", "llvm:1")) -> R.Tensor((4,), "float32", "llvm:1"):
            y = R.call_tir(Before.twice, (x,), out_ty=R.Tensor((4,), "float32"))
            return y

    after = FormDispatches()(RealizeVDevice()(Before))
    assert after["twice"].attrs["target"].attrs["mcpu"] == "x86-64-v2"
