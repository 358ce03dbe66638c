"""`UpdateVDevice`: what refers to a vdevice follows it, the input module does not change."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import tvm
import tvm_ffi
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from modules import ir_module
from relax_hetero.op import hinted_vdevice
from relax_hetero.target.vdevice import same_object, vdevices_of
from relax_hetero.transform import UpdateVDevice
from relax_hetero.transform.ir.rewriting import relax_functions, walk_bindings
from relax_hetero.transform.placement import update_vdevice

SM90 = {"kind": "cuda", "arch": "sm_90"}
SM80 = {"kind": "cuda", "arch": "sm_80"}


def used_vdevices(mod: tvm.IRModule) -> Iterator[relax.VDevice]:
    """Every reference to a vdevice below the functions of the module, except in hints (which hold none)."""
    vdevices: list[relax.VDevice] = []
    in_call = (
        relax.Call,
        lambda call: call.attrs and tvm_ffi.structural_walk(call.attrs, (relax.VDevice, vdevices.append)),
    )
    for _, func in relax_functions(mod):
        tvm_ffi.structural_walk(func, [(relax.VDevice, vdevices.append), in_call])
        tvm_ffi.structural_walk(func.ty, (relax.VDevice, vdevices.append))
    for gvar in mod.get_global_vars():
        tvm_ffi.structural_walk(gvar.ty, (relax.VDevice, vdevices.append))
    yield from vdevices


def assert_shares_one_list(mod: tvm.IRModule) -> None:
    listed = vdevices_of(mod)
    for vdevice in used_vdevices(mod):
        assert any(same_object(vdevice, entry) for entry in listed), vdevice


def check(before: tvm.IRModule, expected: tvm.IRModule, *args: object) -> None:
    text = before.script()
    after = UpdateVDevice(*args)(before)
    tvm.ir.assert_structural_equal(after, expected)
    assert before.script() == text
    assert_shares_one_list(after)
    relax.analysis.well_formed(after)
    again = tvm.script.from_source(after.script())
    tvm.ir.assert_structural_equal(again, expected)


def test_replaces_by_index():
    """Only the one at the index, not its equal in kind or physical device."""

    @ir_module("llvm", SM90, (SM90, 1))
    def Before(x: R.Tensor((2, 3), "float32", "cuda:0"), y: R.Tensor((2, 3), "float32", "cuda:1")):
        a = R.to_vdevice(y, "cuda:0")
        b: R.Tensor((2, 3), "float32", "cuda:0") = R.add(x, a)
        c = R.to_vdevice(b, "llvm")
        return c

    @ir_module("llvm", (SM80, 5), (SM90, 1))
    def Expected(x: R.Tensor((2, 3), "float32", "cuda:0"), y: R.Tensor((2, 3), "float32", "cuda:1")):
        a = R.to_vdevice(y, "cuda:0")
        b: R.Tensor((2, 3), "float32", "cuda:0") = R.add(x, a)
        c = R.to_vdevice(b, "llvm")
        return c

    check(Before, Expected, rh.VDevice(SM80, 5), 1)


def test_appends():
    @ir_module("llvm")
    def Before(x: R.Tensor((2, 3), "float32", "llvm")):
        return x

    @ir_module("llvm", "llvm:1")
    def Expected(x: R.Tensor((2, 3), "float32", "llvm:0")):
        return x

    check(Before, Expected, rh.VDevice("llvm", 1))


def test_appends_to_nothing():
    @ir_module()
    def Before(x: R.Tensor((2, 3), "float32")):
        return x

    after = UpdateVDevice(rh.VDevice("llvm"))(Before)
    assert len(vdevices_of(after)) == 1
    assert vdevices_of(Before) == []


def test_resets_by_position():
    """A swap: each old vdevice is succeeded by the new one at its position, not by its equal elsewhere."""

    @ir_module("llvm", SM90)
    def Before(x: R.Tensor((2, 3), "float32", "llvm")):
        y = R.to_vdevice(x, "cuda")
        return y

    @ir_module(SM90, "llvm", "c:1")
    def Expected(x: R.Tensor((2, 3), "float32", "cuda")):
        y = R.to_vdevice(x, "llvm")
        return y

    swapped = [*reversed(vdevices_of(Before)), rh.VDevice("c", 1)]
    check(Before, Expected, swapped)


def test_types_everywhere():
    """Tuples, functions, match_cast, `If`, calls between functions, `out_ty`, symbolic shapes, returns."""

    @ir_module("llvm", "llvm:1")
    class Before:
        @R.function
        def callee(x: R.Tensor(("n",), "float32", "llvm:1")) -> R.Tensor(("n",), "float32", "llvm:1"):
            return x

        @R.function
        def main(
            x: R.Tensor(("n",), "float32", "llvm:1"),
            t: R.Tuple(
                R.Tensor(("n",), "float32", "llvm:1"), R.Tuple(R.Tensor(ndim=2, dtype="int8", vdevice="llvm:1"))
            ),
            f: R.Callable((R.Tensor(("n",), "float32", "llvm:1"),), R.Tensor(("n",), "float32", "llvm:1"), True),
            cond: R.Tensor((), "bool", "llvm:0"),
        ) -> R.Tuple(R.Tensor(("n",), "float32", "llvm:1"), R.Tensor(ndim=1, dtype="float32", vdevice="llvm:1")):
            n = T.int64()
            cls = Before
            a = cls.callee(x)
            b = R.match_cast(a, R.Tensor((n,), "float32", "llvm:1"))
            c = R.call_dps_packed("kernel", (b,), out_ty=R.Tensor((n,), "float32", "llvm:1"))
            if cond:
                d = f(c)
                e = d
            else:
                g: R.Tensor((n,), "float32", "llvm:1") = R.exp(c)
                e = g
            h = (e, t[0])
            return h

    @ir_module("llvm", SM90)
    class Expected:
        @R.function
        def callee(x: R.Tensor(("n",), "float32", "cuda")) -> R.Tensor(("n",), "float32", "cuda"):
            return x

        @R.function
        def main(
            x: R.Tensor(("n",), "float32", "cuda"),
            t: R.Tuple(R.Tensor(("n",), "float32", "cuda"), R.Tuple(R.Tensor(ndim=2, dtype="int8", vdevice="cuda"))),
            f: R.Callable((R.Tensor(("n",), "float32", "cuda"),), R.Tensor(("n",), "float32", "cuda"), True),
            cond: R.Tensor((), "bool", "llvm:0"),
        ) -> R.Tuple(R.Tensor(("n",), "float32", "cuda"), R.Tensor(ndim=1, dtype="float32", vdevice="cuda")):
            n = T.int64()
            cls = Expected
            a = cls.callee(x)
            b = R.match_cast(a, R.Tensor((n,), "float32", "cuda"))
            c = R.call_dps_packed("kernel", (b,), out_ty=R.Tensor((n,), "float32", "cuda"))
            if cond:
                d = f(c)
                e = d
            else:
                g: R.Tensor((n,), "float32", "cuda") = R.exp(c)
                e = g
            h = (e, t[0])
            return h

    check(Before, Expected, rh.VDevice(SM90), 1)


def test_meshes():
    """Devices of a mesh follow their successors; a mesh needs one for each device, and equal ones."""

    @ir_module("llvm", "llvm:1")
    def before(x: R.Tensor((4, 8), "float32", "llvm[0:2]")):
        y = rh.op.hint_on_device(R.exp(x), "llvm[0:2]")
        z = R.to_vdevice(y, "llvm[0:2]")
        return z

    @ir_module("llvm", (SM90, 0), (SM90, 1))
    def expected(x: R.Tensor((4, 8), "float32", "cuda[0:2]")):
        y = rh.op.hint_on_device(R.exp(x), "cuda[0:2]")
        z = R.to_vdevice(y, "cuda[0:2]")
        return z

    devices = vdevices_of(expected)
    after = update_vdevice.succeed_vdevices(before, devices[1:], devices)
    tvm.ir.assert_structural_equal(after, expected)
    with pytest.raises(rh.VDeviceError, match=r"llvm:0\+llvm:1 .* lacks a successor, but parameter 'x'"):
        UpdateVDevice(devices[1:2])(before)
    with pytest.raises(rh.VDeviceError, match="expected equal targets"):
        UpdateVDevice(devices[:2])(before)


def test_constants():
    listed = [rh.VDevice("llvm"), rh.VDevice("c", 1)]
    value = tvm.runtime.tensor(np.ones(2, "float32"))
    constant = tvm.ir.GenericConst(value, relax.TensorType((2,), "float32", listed[0]))
    x = relax.Var("x", relax.TensorType((2,), "float32", listed[0]))
    builder = relax.BlockBuilder(tvm.IRModule({}, global_infos={"vdevice": listed}))
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.op.add(x, constant)))
    before = builder.get()
    after = UpdateVDevice(rh.VDevice(SM90), 0)(before)
    assert_shares_one_list(after)
    (binding,) = walk_bindings(after["main"].body)
    assert binding.value.args[1].ty.vdevice.target.kind.name == "cuda"
    assert constant.ty.vdevice.target.kind.name == "llvm"
    np.testing.assert_array_equal(binding.value.args[1].value.numpy(), np.ones(2, "float32"))


def test_adopts_copies_of_what_is_listed():
    """TVM compares vdevices by identity; a type with an equal copy then counts as 'not in the module'."""
    copy = rh.VDevice("llvm")
    x = relax.Var("x", relax.TensorType((2,), "float32", copy))
    func = relax.Function([x], relax.SeqExpr([], x), relax.TensorType((2,), "float32", rh.VDevice("c", 1)))
    mod = tvm.IRModule({"f": func}, global_infos={"vdevice": [rh.VDevice("llvm")]})
    after = UpdateVDevice(rh.VDevice("c", 1))(mod)
    assert_shares_one_list(after)


ANY_VDEVICE = st.builds(
    rh.VDevice, st.sampled_from(["llvm", "c", SM90]), st.integers(0, 2), st.sampled_from(["global", "shared"])
)


def chain(vdevices: list[relax.VDevice], stops: list[int]) -> tvm.IRModule:
    """A value that travels along `stops`, positions in the list."""
    x = relax.Var("x", relax.TensorType((2,), "float32", vdevices[stops[0]]))
    builder = relax.BlockBuilder(tvm.IRModule({}, global_infos={"vdevice": vdevices}))
    with builder.function("main", [x]):
        value: relax.Expr = x
        for stop in stops:
            value = builder.emit(rh.op.hint_on_device(rh.op.to_vdevice(value, vdevices[stop]), vdevices[stop]))
        builder.emit_func_output(value)
    return builder.get()


@given(st.data())
def test_any_reset_keeps_positions_and_one_object(data):
    vdevices = data.draw(st.lists(ANY_VDEVICE, min_size=1, max_size=4))
    positions = st.integers(0, len(vdevices) - 1)
    stops = data.draw(st.lists(positions, min_size=1, max_size=5))
    new = data.draw(st.lists(ANY_VDEVICE, min_size=len(vdevices), max_size=6))
    before = chain(vdevices, stops)
    text = before.script()
    after = UpdateVDevice(new)(before)
    assert_shares_one_list(after)
    assert before.script() == text
    listed = vdevices_of(after)
    travelled = [binding.value for binding in walk_bindings(after["main"].body)]
    for call, stop in zip(travelled[::2], stops, strict=True):
        assert same_object(call.attrs.dst_vdevice, listed[stop])
    for call, stop in zip(travelled[1::2], stops, strict=True):
        assert same_object(hinted_vdevice(call, listed), listed[stop])
    tvm.ir.assert_structural_equal(UpdateVDevice(vdevices)(UpdateVDevice(new[: len(vdevices)])(before)), before)
