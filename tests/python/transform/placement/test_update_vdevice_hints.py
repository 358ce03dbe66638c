"""`UpdateVDevice`: hints follow too, and what it refuses."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax
from tvm.script import relax as R

import relax_hetero as rh
from modules import ir_module
from relax_hetero.errors import VDeviceError
from relax_hetero.op import hinted_vdevice, is_hint
from relax_hetero.target.vdevice import same_object, vdevice_index, vdevices_of, with_vdevices
from relax_hetero.transform import UpdateVDevice
from relax_hetero.transform.ir.rewriting import walk_bindings

SM90 = {"kind": "cuda", "arch": "sm_90"}
SM80 = {"kind": "cuda", "arch": "sm_80"}


class TestHints:
    def hinted(self, mod: tvm.IRModule) -> list[int]:
        listed = vdevices_of(mod)
        return [
            vdevice_index(hinted_vdevice(binding.value, listed), listed)
            for binding in walk_bindings(mod["main"].body)
            if is_hint(binding.value)
        ]

    def module(self) -> tvm.IRModule:
        @ir_module("llvm", "c", ("llvm", 0, "shared"), "c:2")
        def Module(x: R.Tensor((2,), "float32")):
            with R.dataflow():
                a = R.hint_on_device(x, "vdevice:0")
                b = R.hint_on_device(a, "vdevice:1")
                c = R.hint_on_device(b, "vdevice:2")
                d = R.hint_on_device(c, "vdevice:3")
                R.output(d)
            return d

        return Module

    @pytest.mark.parametrize(
        ("new", "index"),
        [
            (rh.VDevice(SM90), 0),
            (rh.VDevice(SM90), 1),
            (rh.VDevice("llvm", 7), 2),
            (rh.VDevice("llvm"), 3),
            (rh.VDevice("llvm"), None),
            ([rh.VDevice("c"), rh.VDevice("llvm"), rh.VDevice(SM90), rh.VDevice("llvm", 0, "shared")], None),
            ([rh.VDevice("llvm")] * 4, None),
        ],
    )
    def test_follow(self, new, index):
        after = UpdateVDevice(new, index)(self.module())
        if isinstance(new, list) and same_object(new[0], new[1]):
            assert self.hinted(after) == [0, 0, 0, 0]
        else:
            assert self.hinted(after) == [0, 1, 2, 3]

    def test_stock_hint_may_name_a_device_to_come(self):
        """A module without vdevices, hinted with stock operators, then given its list."""
        x = relax.Var("x", relax.TensorType((2,), "float32"))
        builder = relax.BlockBuilder()
        with builder.function("main", [x]):
            builder.emit_func_output(builder.emit(relax.op.hint_on_device(x, tvm.cuda(0))))
        after = UpdateVDevice([rh.VDevice("llvm"), rh.VDevice(SM90)])(builder.get())
        assert self.hinted(after) == [1]

    def test_without_successor(self):
        with pytest.raises(VDeviceError, match="llvm:1 .* variable 'c' in function 'main' uses it; the new list is"):
            UpdateVDevice([rh.VDevice("llvm"), rh.VDevice("c")])(self.module())


class TestRefused:
    def module(self) -> tvm.IRModule:
        @ir_module("llvm", "c:1", "c:2")
        def Module(x: R.Tensor((2,), "float32", "llvm"), cond: R.Tensor((), "bool", "llvm")):
            if cond:
                inside = R.to_vdevice(x, "c:0")
                y = R.to_vdevice(inside, "llvm")
            else:
                y = x
            return y

        return Module

    @pytest.mark.parametrize("index", [-1, 3, 100])
    def test_index_out_of_range(self, index):
        with pytest.raises(VDeviceError, match=f"index {index} is out of range, the module has 3 vdevices"):
            UpdateVDevice(rh.VDevice("llvm"), index)(self.module())

    @pytest.mark.parametrize(
        ("new", "index"),
        [("llvm", None), (None, None), (["llvm"], None), ([rh.VDevice("llvm")], 0), (rh.VDevice("llvm"), "0")]
        + [(rh.VDevice("llvm"), True)],
    )
    def test_arguments_at_once(self, new, index):
        with pytest.raises(VDeviceError, match="UpdateVDevice"):
            UpdateVDevice(new, index)

    def test_used_without_successor(self):
        with pytest.raises(VDeviceError) as error:
            UpdateVDevice([rh.VDevice("llvm")])(self.module())
        assert "c:0" in str(error.value)
        assert "variable 'inside' in function 'main'" in str(error.value)
        assert "the new list is llvm:0" in str(error.value)
        with pytest.raises(VDeviceError, match="parameter 'x' of function 'main' uses it; the new list is nothing"):
            UpdateVDevice([])(self.module())

    def test_unused_may_go(self):
        after = UpdateVDevice(vdevices_of(self.module())[:2])(self.module())
        assert len(vdevices_of(after)) == 2

    def test_vdevice_of_no_list(self):
        foreign = with_vdevices(self.module(), [rh.VDevice(SM90)])
        with pytest.raises(VDeviceError, match="a vdevice that the module does not list"):
            UpdateVDevice(rh.VDevice("llvm", 9))(foreign)
