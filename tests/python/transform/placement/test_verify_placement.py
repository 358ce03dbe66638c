"""verify_placement: errors in placed modules."""

import re

import pytest
import tvm
from tvm import relax
from tvm.script import relax as R

from modules import ir_module
from relax_hetero import PlacementError, VDevice
from relax_hetero.transform import RealizeVDevice, verify_placement

DEVICES = [VDevice("llvm"), VDevice("llvm", 1)]
HERE, THERE = (relax.TensorType([2], "float32", device) for device in DEVICES)
FREE = relax.TensorType([2], "float32")


def module(params, bindings, result, ret_ty=None) -> tvm.IRModule:
    seq = relax.SeqExpr([relax.BindingBlock(bindings)] if bindings else [], result)
    relax.expr._update_type(seq, result.ty)
    mod = tvm.IRModule({"main": relax.Function(params, seq, ret_ty or result.ty)})
    mod.update_global_info("vdevice", DEVICES)
    return mod


def call(name, args, ty, **rest) -> relax.Call:
    return relax.Call(tvm.ir.Op.get(name), args, rest.get("attrs"), rest.get("ty_args"), ret_ty=ty)


def bound(name, value, ty=None) -> tuple[relax.Var, relax.VarBinding]:
    var = relax.Var(name, ty or value.ty)
    return var, relax.VarBinding(var, value)


def refused(mod: tvm.IRModule, *texts: str) -> None:
    with pytest.raises(PlacementError, match=".*".join(map(re.escape, texts))):
        verify_placement(mod)


def test_good_module():
    x = relax.Var("x", HERE)
    y, first = bound("y", call("relax.exp", [x], HERE))
    z, second = bound("z", call("relax.to_vdevice", [y], THERE, attrs=relax.op.to_vdevice(y, DEVICES[1]).attrs))
    verify_placement(module([x], [first, second], z))


def test_parameter_without_device():
    x = relax.Var("x", FREE)
    refused(module([x], [], x), "parameter binding 'x' in function 'main': a tensor lacks a device")


def test_device_that_is_equal_but_another_object():
    x = relax.Var("x", relax.TensorType([2], "float32", VDevice("llvm", 1)))
    refused(module([x], [], x), "'x' in function 'main'", "llvm:1", "not the module's own vdevice object")


def test_device_that_is_not_in_the_list():
    x = relax.Var("x", relax.TensorType([2], "float32", VDevice("llvm", 5)))
    refused(module([x], [], x), "'x' in function 'main'", "vdevice_id=5")


def test_binding_without_device():
    x = relax.Var("x", HERE)
    y, binding = bound("y", call("relax.exp", [x], FREE))
    refused(module([x], [binding], y), "relax.exp binding 'y' in function 'main': a tensor lacks a device")


def test_op_over_two_devices():
    x, y = relax.Var("x", HERE), relax.Var("y", THERE)
    z, binding = bound("z", call("relax.add", [x, y], HERE))
    refused(
        module([x, y], [binding], z),
        "relax.add binding 'z' in function 'main': operand 'x' is on llvm:0, operand 'y' on llvm:1",
    )


def test_result_elsewhere():
    x = relax.Var("x", HERE)
    z, binding = bound("z", call("relax.exp", [x], THERE))
    refused(module([x], [binding], z), "relax.exp binding 'z'", "operand 'x' is on llvm:0, the result on llvm:1")


def test_out_ty_elsewhere():
    x = relax.Var("x", HERE)
    args = [relax.ExternFunc("f"), relax.Tuple([x])]
    z, binding = bound("z", call("relax.call_dps_packed", args, HERE, ty_args=[THERE]))
    refused(module([x], [binding], z), "relax.call_dps_packed binding 'z'", "out_ty on llvm:1")


def test_constant_without_device():
    x = relax.Var("x", HERE)
    z, binding = bound("z", call("relax.add", [x, relax.const([1.0, 2.0], "float32")], HERE))
    refused(module([x], [binding], z), "relax.add binding 'z'", "a tensor lacks a device")


def test_alias_elsewhere():
    x = relax.Var("x", HERE)
    y, binding = bound("y", x, THERE)
    refused(module([x], [binding], y), "value binding 'y'", "the variable is on llvm:1, the value on llvm:0")


def test_tuple_field_elsewhere():
    x = relax.Var("x", HERE)
    t, binding = bound("t", relax.Tuple([x, x]), tvm.ir.TupleType([HERE, THERE]))
    refused(module([x], [binding], t), "value binding 't'", "llvm:1", "llvm:0")


def test_match_cast_elsewhere():
    x = relax.Var("x", HERE)
    y = relax.Var("y", THERE)
    refused(module([x], [relax.MatchCast(y, x, THERE)], y), "match_cast binding 'y'", "llvm:1", "llvm:0")


def test_return_elsewhere():
    x = relax.Var("x", HERE)
    refused(module([x], [], x, THERE), "return of function 'main'", "llvm:1", "llvm:0")


def test_leftover_hint():
    x = relax.Var("x", HERE)
    y, binding = bound("y", call("relax.hint_on_device", [x], HERE, attrs=relax.op.hint_on_device(x, tvm.cpu()).attrs))
    refused(module([x], [binding], y), "relax.hint_on_device binding 'y'", "run RealizeVDevice")


def test_transfer_elsewhere():
    x = relax.Var("x", HERE)
    y, binding = bound("y", call("relax.to_vdevice", [x], HERE, attrs=relax.op.to_vdevice(x, DEVICES[1]).attrs))
    refused(module([x], [binding], y), "relax.to_vdevice binding 'y'", "copies to llvm:1")


def test_transfer_to_a_copy_of_a_vdevice():
    x = relax.Var("x", HERE)
    attrs = relax.op.to_vdevice(x, VDevice("llvm", 1)).attrs
    y, binding = bound("y", call("relax.to_vdevice", [x], THERE, attrs=attrs))
    refused(module([x], [binding], y), "relax.to_vdevice binding 'y'", "own vdevice object")


def test_condition_that_is_not_on_the_host():
    x, c = relax.Var("x", HERE), relax.Var("c", relax.TensorType([], "bool", DEVICES[0]))
    branches = [relax.SeqExpr([], x), relax.SeqExpr([], x)]
    for branch in branches:
        relax.expr._update_type(branch, HERE)
    value = relax.If(c, *branches)
    relax.expr._update_type(value, HERE)
    y, binding = bound("y", value)
    refused(module([x, c], [binding], y), "If binding 'y'", "the host reads 'c', which is on llvm:0, not llvm:1")


def test_shape_read_elsewhere():
    x = relax.Var("x", relax.TensorType([2], "int64", DEVICES[0]))
    s, binding = bound("s", call("relax.tensor_to_shape", [x], relax.ShapeType(ndim=2)))
    refused(module([x], [binding], s), "relax.tensor_to_shape binding 's'", "the host reads 'x'")


def test_branch_elsewhere():
    x, y = relax.Var("x", HERE), relax.Var("y", THERE)
    c = relax.Var("c", relax.TensorType([], "bool", DEVICES[1]))
    branches = [relax.SeqExpr([], x), relax.SeqExpr([], y)]
    for branch in branches:
        relax.expr._update_type(branch, branch.body.ty)
    value = relax.If(c, *branches)
    relax.expr._update_type(value, HERE)
    z, binding = bound("z", value)
    refused(module([x, y, c], [binding], z), "If binding 'z'", "llvm:0, a branch on llvm:1")


def test_argument_elsewhere():
    z = relax.Var("z", THERE)
    x = relax.Var("x", HERE)
    gvar = tvm.ir.GlobalVar("f")
    callee = relax.Function([z], relax.SeqExpr([], z), THERE)
    relax.expr._update_type(gvar, callee.ty)
    y, binding = bound("y", relax.Call(gvar, [x], ret_ty=THERE))
    mod = module([x], [binding], y)
    mod[gvar] = callee
    refused(mod, "call of 'f' binding 'y' in function 'main': the parameter is on llvm:1, the argument 'x' on llvm:0")


def test_local_functions_are_checked():
    x, z = relax.Var("x", HERE), relax.Var("z", FREE)
    seq = relax.SeqExpr([], z)
    relax.expr._update_type(seq, FREE)
    inner = relax.Function([z], seq, FREE)
    f = relax.Var("f", relax.FuncType([HERE], HERE))
    refused(module([x], [relax.VarBinding(f, inner)], x), "parameter binding 'z' in function 'main'", "lacks a device")


def test_free_modules_have_nothing_to_check():
    @ir_module()
    def Mod(x: R.Tensor((2,), "float32")):
        return R.exp(x)

    verify_placement(Mod)


def test_the_passs_results_verify():
    @ir_module("llvm", "llvm:1")
    def Mod(c: R.Tensor((), "bool"), x: R.Tensor((2,), "float32")):
        if c:
            y = R.exp(x)
        else:
            y = R.tanh(x)
        return y

    refused(Mod, "parameter binding 'c' in function 'main'")
    verify_placement(RealizeVDevice()(Mod))
