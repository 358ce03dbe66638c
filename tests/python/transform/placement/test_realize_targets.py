"""RealizeTargets: a kind alone means the hardware of this machine."""

import pytest
import tvm
from tvm.script import relax as R

import relax_hetero as rh
from modules import check_pass, ir_module
from relax_hetero.transform import RealizeTargets

NATIVE = rh.native("llvm")
OWN = {"kind": "llvm", "mcpu": "x86-64" if "x86" in str(NATIVE.attrs["mtriple"]) else "generic"}


def test_a_kind_alone_becomes_this_cpu():
    @ir_module("llvm", (OWN, 1))
    def Before(x: R.Tensor((4,), "float32", "llvm:0")) -> R.Tensor((4,), "float32", "llvm:1"):
        y: R.Tensor((4,), "float32", "llvm:1") = R.to_vdevice(x, "llvm:1")
        return y

    @ir_module(NATIVE, (OWN, 1))
    def Expected(x: R.Tensor((4,), "float32", "llvm:0")) -> R.Tensor((4,), "float32", "llvm:1"):
        y: R.Tensor((4,), "float32", "llvm:1") = R.to_vdevice(x, "llvm:1")
        return y

    check_pass(RealizeTargets(), Before, Expected)


def test_nothing_to_do():
    @ir_module("llvm", NATIVE)
    def Mod(x: R.Tensor((4,), "float32", "llvm:0")) -> R.Tensor((4,), "float32", "llvm:0"):
        return x

    assert RealizeTargets()(Mod).same_as(Mod)


def test_a_cpu_that_is_not_known():
    mod = tvm.IRModule({})
    mod.update_global_info("vdevice", [tvm.relax.VDevice(tvm.target.Target({"kind": "llvm", "mcpu": "znver44"}), 0)])
    with pytest.raises(rh.VDeviceError, match="mcpu 'znver44' is not a CPU that LLVM knows .*; did you mean 'znver4'"):
        RealizeTargets()(mod)
    with pytest.raises(rh.VDeviceError, match="'fooo' begins with 'fooo', which is not an architecture"):
        rh.VDevice({"kind": "llvm", "mtriple": "fooo"})


def test_names_that_the_list_of_llvm_lacks():
    rh.VDevice({"kind": "llvm", "mtriple": "arm64-apple-macos", "mcpu": "apple-m1"})
