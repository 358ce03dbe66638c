"""Devices that stock passes lose are written back, and the placement rules find nothing left to do."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import relax as R
from tvm.script import tirx as T

from modules import ir_module
from relax_hetero import get_pipeline
from relax_hetero.target.vdevice import same_vdevice, vdevices_of
from relax_hetero.transform import collect_placement
from relax_hetero.transform.dispatch.keep_devices import keep_devices
from relax_hetero.transform.ir.rewriting import walk_bindings
from relax_hetero.transform.placement.realize_vdevice import realize_vdevice

V4 = {"kind": "llvm", "mcpu": "x86-64-v4"}
V2 = {"kind": "llvm", "mcpu": "x86-64-v2"}


def test_results_are_where_their_operands_are():
    """A tuple op as LegalizeOps leaves it: neither its results nor their readers name a device."""

    @ir_module(V4, (V2, 1))
    def Before(x: R.Tensor((4,), "float32", "llvm:1")) -> R.Tensor((4,), "float32", "llvm:1"):
        with R.dataflow():
            both = R.call_dps_packed(
                "pair", (x,), out_ty=[R.Tensor((4,), dtype="float32"), R.Tensor((4,), dtype="float32")]
            )
            first = both[0]
            y = R.call_dps_packed("one", (first,), out_ty=R.Tensor((4,), dtype="float32"))
            R.output(y)
        return y

    @ir_module(V4, (V2, 1))
    def Expected(x: R.Tensor((4,), "float32", "llvm:1")) -> R.Tensor((4,), "float32", "llvm:1"):
        with R.dataflow():
            both = R.call_dps_packed(
                "pair", (x,), out_ty=[R.Tensor((4,), "float32", "llvm:1"), R.Tensor((4,), "float32", "llvm:1")]
            )
            first = both[0]
            y = R.call_dps_packed("one", (first,), out_ty=R.Tensor((4,), "float32", "llvm:1"))
            R.output(y)
        return y

    after = keep_devices(Before)
    assert_structural_equal(after, Expected)
    assert keep_devices(after) is after
    assert realize_vdevice(after)[0] is after


def test_a_constant_lives_where_it_is_read():
    """A constant without a device: read on both, and transferred to one of them."""

    @ir_module(V4, (V2, 1))
    def Before(x: R.Tensor((4,), "float32", "llvm:0"), y: R.Tensor((4,), "float32", "llvm:1")) -> R.Tuple(
        R.Tensor((4,), "float32", "llvm:0"), R.Tensor((4,), "float32", "llvm:1")
    ):
        with R.dataflow():
            a = R.add(x, R.const(1.0, "float32"))
            there = R.to_vdevice(R.const(2.0, "float32"), "llvm:1")
            b = R.multiply(y, there)
            R.output(a, b)
        return (a, b)

    after = keep_devices(Before)
    a, there, b = walk_bindings(after["main"])
    first, second = vdevices_of(after)
    assert same_vdevice(a.value.args[1].ty.vdevice, first)
    assert isinstance(there.value, tvm.ir.GenericConst)
    assert same_vdevice(there.value.ty.vdevice, second)
    assert isinstance(b.value.args[1], relax.Var)
    assert realize_vdevice(after)[0] is after


def test_variables_keep_the_devices_they_had():
    """A variable that is known by name keeps its type, whatever devices its operands have."""

    @ir_module(V4, (V2, 1))
    def Mod(shape: R.Shape(["n"])) -> R.Tensor(("n",), "float32"):
        n = T.int64()
        y = R.call_dps_packed("ones", (shape,), out_ty=R.Tensor((n,), "float32"))
        return y

    ty = next(iter(walk_bindings(Mod["main"]))).var.ty
    old = relax.Var("y", relax.TensorType(ty.shape, "float32", vdevices_of(Mod)[1]))
    (binding,) = walk_bindings(keep_devices(Mod, {"main": {"y": old}})["main"])
    assert same_vdevice(binding.var.ty.vdevice, vdevices_of(Mod)[1])
    assert same_vdevice(binding.value.ty_args[0].vdevice, vdevices_of(Mod)[1])


def test_a_module_is_placed_once():
    """The placement rules run when a pipeline starts; later passes keep what they found."""

    @ir_module(V4, (V2, 1))
    def Mod(x: R.Tensor((4, 4), "float32", "llvm:0")):
        with R.dataflow():
            y = R.matmul(x, R.permute_dims(x))
            z = R.to_vdevice(R.nn.softmax(y), "llvm:1")
            w = R.split(R.exp(z), 2)
            R.output(w)
        return w

    with collect_placement() as reports:
        get_pipeline()(Mod)
    assert len(reports) == 1
