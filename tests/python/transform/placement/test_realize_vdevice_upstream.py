"""Defects of stock TVM 0.27's placement, and the behaviour here (rows 6, 7, 10 and 15 of the known defects).

Where stock behaviour is asserted, a newer TVM that mends it fails the test, so that the workaround can go.
"""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from modules import ir_module, ops_of
from relax_hetero.op import encode_hint
from relax_hetero.target.vdevice import same_object
from relax_hetero.transform import RealizeVDevice, verify_placement

StockRealizeVDevice = relax.transform.RealizeVDevice


def vdevice_ids(func: relax.Function) -> list[int]:
    types = [param.ty for param in func.params] + [func.ret_ty]
    return [int(ty.vdevice.vdevice_id) if ty.vdevice is not None else -1 for ty in types]


# --- row 6: the device rules of n-ary ops differ ---------------------------------------------------------------------


def nary_ops(here: relax.Var, there: relax.Var) -> dict[str, relax.Expr]:
    return {
        "add": relax.op.add(here, there),
        "matmul": relax.op.matmul(here, there),
        "concat": relax.op.concat([here, there]),
        "where": relax.op.where(relax.op.greater(here, here), here, there),
        "layer_norm": relax.op.nn.layer_norm(here, there, there, axes=[0, 1]),
    }


STOCK_RULE = {"add": "raises", "matmul": "loses", "concat": "loses", "where": "loses", "layer_norm": "first"}


@pytest.mark.parametrize("op", STOCK_RULE)
def test_row_6_stock_rules_differ(op):
    devices = [rh.VDevice("llvm"), rh.VDevice("llvm", 1)]
    here, there = (relax.Var(f"x{i}", relax.TensorType([2, 2], "float32", devices[i])) for i in range(2))
    builder = relax.BlockBuilder()
    with builder.function("main", [here, there]):
        if STOCK_RULE[op] == "raises":
            with pytest.raises(Exception, match="same VDevice"):
                builder.emit(nary_ops(here, there)[op])
            builder.emit_func_output(here)
            return
        result = builder.emit(nary_ops(here, there)[op])
        builder.emit_func_output(result)
    assert (result.ty.vdevice is None) == (STOCK_RULE[op] == "loses")


@pytest.mark.parametrize("op", STOCK_RULE)
def test_row_6_one_rule_for_all_ops(op):
    """One op, two devices: an error that names it; with copies, the op goes with its first placed operand."""
    devices = [rh.VDevice("llvm"), rh.VDevice("llvm", 1)]
    x, y = (relax.Var(name, relax.TensorType([2, 2], "float32")) for name in "xy")
    builder = relax.BlockBuilder()
    with builder.function("main", [x, y]):
        here = builder.emit(encode_hint(x, devices[0], devices))
        there = builder.emit(encode_hint(y, devices[1], devices))
        result = builder.emit(nary_ops(here, there)[op])
        builder.emit_func_output(result)
    mod = builder.get()
    mod.update_global_info("vdevice", devices)
    with pytest.raises(rh.PlacementError, match=f"relax.*{op}.*llvm:0.*llvm:1"):
        RealizeVDevice()(mod)
    placed = RealizeVDevice(insert_copies=True)(mod)
    verify_placement(placed)
    assert vdevice_ids(placed["main"]) == [0, 1, 0]


# --- row 7: RealizeVDevice -------------------------------------------------------------------------------------------


def conflicting() -> tvm.IRModule:
    @ir_module("llvm", "llvm:1")
    def Mod(x: R.Tensor((2,), "float32"), y: R.Tensor((2,), "float32")):
        a = R.hint_on_device(x, tvm.cpu(0))
        b = R.hint_on_device(y, tvm.cpu(1))
        c = R.add(a, b)
        return c

    return Mod


def test_row_7_conflicts():
    # Stock: the first that is visited wins, or inference stops with a message about binary operators.
    with pytest.raises(Exception) as caught:
        placed = StockRealizeVDevice()(conflicting())
        raise AssertionError(f"placed without a word: {vdevice_ids(placed['main'])}")
    assert "'c'" not in str(caught.value)
    with pytest.raises(rh.PlacementError, match="relax.add binding 'c'.*llvm:0.*llvm:1"):
        RealizeVDevice()(conflicting())


def test_row_7_return_annotation_against_parameter():
    @ir_module("llvm", "llvm:1")
    def Mod(x: R.Tensor((2,), "float32", "llvm:0")) -> R.Tensor((2,), "float32", "llvm:1"):
        a = R.concat((x,))
        b = R.call_pure_packed("f", a, ty_args=R.Tensor((2,), "float32"))
        return b

    stock = StockRealizeVDevice()(Mod)  # the call has operand and result on different devices, and nothing says so
    assert vdevice_ids(stock["main"]) == [0, 1] and "relax.to_vdevice" not in ops_of(stock)
    with pytest.raises(rh.PlacementError):
        verify_placement(stock)
    with pytest.raises(rh.PlacementError, match="return annotation of 'main'"):
        RealizeVDevice()(Mod)
    placed = RealizeVDevice(insert_copies=True)(Mod)
    verify_placement(placed)
    assert vdevice_ids(placed["main"]) == [0, 1]


def test_row_7_condition_is_not_tied_to_branches():
    @ir_module("llvm", "llvm:1")
    def Mod(c: R.Tensor((), "bool"), x: R.Tensor((2,), "float32", "llvm:1")):
        if c:
            r = R.exp(x)
        else:
            r = R.tanh(x)
        return r

    assert vdevice_ids(StockRealizeVDevice()(Mod)["main"]) == [1, 1, 1]
    assert vdevice_ids(RealizeVDevice()(Mod)["main"]) == [0, 1, 1]


def test_row_7_calls_spread_devices():
    @ir_module("llvm", "llvm:1")
    class Mod:
        @R.function
        def callee(x: R.Tensor((2,), "float32")):
            a = R.exp(x)
            return a

        @R.function
        def main(x: R.Tensor((2,), "float32", "llvm:1")):
            cls = Mod
            a = cls.callee(x)
            return a

    assert vdevice_ids(StockRealizeVDevice()(Mod)["callee"]) == [-1, -1]
    assert vdevice_ids(RealizeVDevice()(Mod)["callee"]) == [1, 1]


def test_row_7_hint_on_a_result_places_what_makes_it():
    """Through a tuple-returning op, where stock only copies."""

    @ir_module("llvm", "llvm:1")
    def Mod(x: R.Tensor((4,), "float32")):
        s = R.split(x, 2)
        a = s[0]
        b = R.hint_on_device(a, tvm.cpu(1))
        return b

    placed = RealizeVDevice()(Mod)
    assert vdevice_ids(placed["main"]) == [1, 1] and "relax.to_vdevice" not in ops_of(placed)


# --- row 10: vdevices compare by identity in places ------------------------------------------------------------------


def test_row_10_copies_of_a_vdevice():
    """A type that names an equal vdevice which is another object: stock tools do not know it, the pass mends it."""
    own = [rh.VDevice("llvm"), rh.VDevice("llvm", 1)]
    x = relax.Var("x", relax.TensorType([2], "float32", rh.VDevice("llvm", 1)))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.op.exp(x)))
    mod = builder.get()
    mod.update_global_info("vdevice", own)
    placed = RealizeVDevice()(mod)
    verify_placement(placed)
    assert all(same_object(ty.vdevice, own[1]) for ty in (placed["main"].params[0].ty, placed["main"].ret_ty))


# --- row 15: annotated sub-functions ---------------------------------------------------------------------------------


@ir_module("llvm", "llvm:1")
class SubFunction:
    @T.prim_func(s_tir=True)
    def double(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")):
        for i in range(4):
            with T.sblock("double"):
                v = T.axis.spatial(4, i)
                b[v] = a[v] * T.float32(2)

    @R.function
    def sub(x: R.Tensor((4,), "float32", "llvm:1")) -> R.Tensor((4,), "float32", "llvm:1"):
        y = R.negative(x)
        return y

    @R.function
    def main(x: R.Tensor((4,), "float32", "llvm:1")) -> R.Tensor((4,), "float32", "llvm:1"):
        cls = SubFunction
        a = R.call_tir(cls.double, (x,), out_ty=R.Tensor((4,), "float32", "llvm:1"))
        b: R.Tensor((4,), "float32", "llvm:1") = cls.sub(a)
        return b


def test_row_15_stock_cannot_compile_it():
    with pytest.raises(ValueError, match="Argument 0 type mismatch"):
        tvm.compile(StockRealizeVDevice()(SubFunction), target="llvm")


def test_row_15_annotated_function_called_with_a_kernels_result():
    verify_placement(RealizeVDevice()(SubFunction))
    machine = rh.vm.VirtualMachine(rh.compile(SubFunction))
    result = machine["main"](np.arange(4, dtype="float32"))
    np.testing.assert_array_equal(result.numpy(), [0, -2, -4, -6])
    assert result.device.index == 1
