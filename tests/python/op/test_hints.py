"""`hint_on_device`: what it accepts, and that its stock attributes always mean one vdevice."""

from __future__ import annotations

import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax
from tvm.script import relax as R

import relax_hetero as rh
from modules import ir_module
from relax_hetero.errors import PlacementError, VDeviceError
from relax_hetero.op import encode_hint, hinted_vdevice, is_hint
from relax_hetero.target.vdevice import lookup, physical, same_object, vdevices_of

SM90 = {"kind": "cuda", "arch": "sm_90"}
SM80 = {"kind": "cuda", "arch": "sm_80"}
X = relax.Var("x", relax.TensorType((2, 3), "float32"))

ANY_VDEVICE = st.builds(
    rh.VDevice, st.sampled_from(["llvm", "c", SM90, SM80]), st.integers(0, 1), st.sampled_from(["global", "shared"])
)


def module(*vdevices: relax.VDevice) -> tvm.IRModule:
    return tvm.IRModule({}, global_infos={"vdevice": list(vdevices)})


def hinted(mod: tvm.IRModule, device, **options) -> relax.VDevice:
    """The vdevice that `rh.op.hint_on_device` means in `mod`."""
    builder = relax.BlockBuilder(mod)
    with builder.function("main", [X]):
        call = rh.op.hint_on_device(X, device, **options)
        builder.emit_func_output(builder.emit(call))
    assert is_hint(call)
    return hinted_vdevice(call, vdevices_of(mod))


@given(st.lists(ANY_VDEVICE, min_size=1, max_size=6), st.data())
def test_every_vdevice_can_be_hinted(vdevices, data):
    """Also where several share a physical device, a scope, or everything."""
    index = data.draw(st.sampled_from(range(len(vdevices))))
    call = encode_hint(X, vdevices[index], vdevices)
    assert same_object(hinted_vdevice(call, vdevices), vdevices[index])
    by_name = encode_hint(X, f"vdevice:{index}", vdevices)
    tvm.ir.assert_structural_equal(call, by_name)
    assert (call.attrs.device_type, call.attrs.index) == physical(vdevices[index])


@given(st.lists(ANY_VDEVICE, min_size=1, max_size=6), st.integers(0, 1))
def test_a_device_means_the_first_that_matches(vdevices, number):
    mod = module(*vdevices)
    for device in (tvm.cpu(number), tvm.cuda(number)):
        try:
            expected = lookup(device, vdevices)
        except VDeviceError:
            with pytest.raises(VDeviceError, match="no vdevice is on"):
                hinted(mod, device)
        else:
            assert same_object(hinted(mod, device), expected)


def test_stock_attributes():
    """Hints are exactly the stock ones wherever these suffice."""
    vdevices = [rh.VDevice("llvm"), rh.VDevice(SM90, 1), rh.VDevice("llvm", 0, "shared")]
    tvm.ir.assert_structural_equal(encode_hint(X, "cuda", vdevices), relax.op.hint_on_device(X, tvm.cuda(1)))
    tvm.ir.assert_structural_equal(encode_hint(X, "llvm", vdevices), relax.op.hint_on_device(X, tvm.cpu(0)))
    tvm.ir.assert_structural_equal(encode_hint(X, "llvm:1", vdevices), relax.op.hint_on_device(X, tvm.cpu(0), "shared"))


def test_stock_hint_without_scope_takes_the_first_of_the_device():
    vdevices = [rh.VDevice("llvm", 0, "shared"), rh.VDevice("llvm", 0, "local")]
    assert same_object(hinted_vdevice(relax.op.hint_on_device(X, tvm.cpu(0)), vdevices), vdevices[0])
    assert same_object(hinted_vdevice(relax.op.hint_on_device(X, tvm.cpu(0), "local"), vdevices), vdevices[1])
    with pytest.raises(VDeviceError, match=r"memory_scope 'warp'; available: llvm:0 \(shared\), llvm:1 \(local\)"):
        hinted_vdevice(relax.op.hint_on_device(X, tvm.cpu(0), "warp"), vdevices)


@pytest.mark.parametrize("position", ["vdevice:1", "vdevice:7"])
def test_position_that_does_not_fit(position):
    vdevices = [rh.VDevice("llvm"), rh.VDevice(SM90)]
    with pytest.raises(VDeviceError, match=position):
        hinted_vdevice(relax.op.hint_on_device(X, tvm.cpu(0), position), vdevices)


def test_memory_scope():
    mod = module(rh.VDevice("llvm", 0, "shared"), rh.VDevice("llvm"), rh.VDevice(SM90))
    listed = vdevices_of(mod)
    assert same_object(hinted(mod, tvm.cpu(0)), listed[0])
    assert same_object(hinted(mod, tvm.cpu(0), memory_scope="global"), listed[1])
    assert same_object(hinted(mod, "llvm:0", memory_scope="shared"), listed[0])
    with pytest.raises(VDeviceError, match="'llvm:0' has memory_scope 'shared', not 'global'"):
        hinted(mod, "llvm:0", memory_scope="global")


@pytest.mark.parametrize("device", ["metal", "llvm:1", "llvm:", tvm.cuda(0), rh.VDevice("c"), None])
def test_wrong_device(device):
    with pytest.raises(VDeviceError, match="available: llvm:0"):
        hinted(module(rh.VDevice("llvm")), device)


@pytest.mark.parametrize("device", ["llvm", tvm.cpu(0), rh.VDevice("llvm")])
def test_no_module(device):
    with pytest.raises(VDeviceError, match="module under construction, and there is none"):
        rh.op.hint_on_device(X, device)
    with pytest.raises(VDeviceError, match="declares no vdevices"):
        hinted(tvm.IRModule({}), device)


@pytest.mark.parametrize("operand", [3, "x", None, [X, 3], relax.ShapeExpr([2]), relax.Var("o", relax.ObjectType())])
def test_wrong_operand(operand):
    builder = relax.BlockBuilder(module(rh.VDevice("llvm")))
    with builder.function("main", [X]):
        with pytest.raises(PlacementError, match="hint_on_device needs"):
            rh.op.hint_on_device(operand, "llvm")
        builder.emit_func_output(X)


def test_tvmscript_and_builder_agree():
    @ir_module("llvm", SM90, SM80)
    def Expected(x: R.Tensor((2, 3), "float32"), t: R.Tuple(R.Tensor((2,), "float32"), R.Shape([2]))):
        with R.dataflow():
            a = R.hint_on_device(x, "cuda:1")
            b = R.hint_on_device((a, (x,)), tvm.cpu())
            c = R.hint_on_device(t, "cuda")
            R.output(b, c)
        return (b, c)

    x = relax.Var("x", relax.TensorType((2, 3), "float32"))
    t = relax.Var("t", relax.TupleType([relax.TensorType((2,), "float32"), relax.ShapeType([2])]))
    builder = relax.BlockBuilder(module(*vdevices_of(Expected)))
    with builder.function("main", [x, t]):
        with builder.dataflow():
            a = builder.emit(rh.op.hint_on_device(x, "cuda:1"))
            b = builder.emit_output(rh.op.hint_on_device((a, (x,)), tvm.cpu()))
            c = builder.emit_output(rh.op.hint_on_device(t, "cuda"))
        builder.emit_func_output(relax.Tuple([b, c]))
    tvm.ir.assert_structural_equal(builder.get(), Expected)
    tvm.ir.assert_structural_equal(tvm.script.from_source(Expected.script()), Expected)
