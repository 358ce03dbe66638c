"""Conflicts name the op, the variable, both devices and where each comes from."""

import re

import pytest
import tvm
from tvm import relax
from tvm.script import relax as R

import relax_hetero as rh
from modules import ir_module
from relax_hetero.op import encode_hint
from relax_hetero.transform import RealizeVDevice


def refused(mod: tvm.IRModule, *texts: str, error: type[Exception] = rh.PlacementError) -> str:
    """The message, which holds all texts in this order. A module that is refused is refused again."""
    before = tvm.ir.save_json(mod)
    with pytest.raises(error) as caught:
        RealizeVDevice()(mod)
    message = str(caught.value)
    assert re.search(".*".join(re.escape(text) for text in texts), message), message
    with pytest.raises(error, match=re.escape(message)):
        RealizeVDevice()(mod)
    assert tvm.ir.save_json(mod) == before
    return message


def test_rfc_conflict():
    @ir_module("llvm", "cuda")
    def Mod(x: R.Tensor((2, 3), "float32"), y: R.Tensor((2, 3), "float32")):
        a = R.hint_on_device(x, tvm.cpu())
        b = R.hint_on_device(y, tvm.cuda())  # b is on different device from a
        c = R.add(a, b)  # Error occurs, conflict is found
        return c

    message = refused(
        Mod,
        "relax.add binding 'c' in function 'main': two devices meet: ",
        "'a' is on llvm:0 (from the hint_on_device of 'a' in 'main'), but ",
        "'b' is on cuda:0 (from the hint_on_device of 'b' in 'main')",
    )
    assert "insert_copies=True" in message and "to_vdevice" in message


def test_devices_that_meet_far_from_where_they_are_fixed():
    """The op is one where they meet; the origins are what was written, not what TVM inferred from it."""

    @ir_module("llvm", "cuda")
    def Mod(x: R.Tensor((2, 3), "float32", "cuda"), y: R.Tensor((2, 3), "float32")) -> R.Tensor(
        (2, 3), "float32", "llvm"
    ):
        t = (y, x)
        b = R.concat((t[0], t[1]))
        d = R.concat((b, b))
        e = R.strided_slice(d, axes=[0], begin=[0], end=[2])
        return e

    refused(
        Mod,
        "return of function 'main': two devices meet: ",
        "'result' is on llvm:0 (from the return annotation of 'main')",
        "'e' is on cuda:0 (from the annotation of parameter 'x' of 'main')",
    )


def test_parameter_annotation_against_transfer():
    @ir_module("llvm", "llvm:1")
    def Mod(x: R.Tensor((2, 3), "float32", "llvm:0"), y: R.Tensor((2, 3), "float32")):
        a = R.to_vdevice(y, "llvm:1")
        b = R.matmul(x, R.permute_dims(a))
        return b

    refused(
        Mod,
        "relax.matmul binding 'b'",
        "'x' is on llvm:0 (from the annotation of parameter 'x' of 'main')",
        "is on llvm:1 (from the to_vdevice of 'a' in 'main')",
    )


def test_return_annotation_against_parameter():
    @ir_module("llvm", "llvm:1")
    def Mod(x: R.Tensor((2, 3), "float32", "llvm:0"), y: R.Tensor((2, 3), "float32")) -> R.Tuple(
        R.Tensor((2, 3), "float32"), R.Tensor((2, 3), "float32", "llvm:1")
    ):
        return (y, x)

    refused(
        Mod,
        "return of function 'main'",
        "'x' is on llvm:0",
        "'result[1]' is on llvm:1 (from the return annotation of 'main')",
    )


def test_if_branches():
    @ir_module("llvm", "llvm:1")
    def Mod(
        c: R.Tensor((), "bool"), x: R.Tensor((2,), "float32", "llvm:0"), y: R.Tensor((2,), "float32", "llvm:1")
    ) -> R.Tensor((2,), "float32"):
        if c:
            r: R.Tensor((2,), "float32") = x
        else:
            r: R.Tensor((2,), "float32") = y
        return r

    refused(Mod, "If binding 'r' in function 'main'", "llvm:1", "parameter 'y'", "llvm:0", "parameter 'x'")


def test_match_cast():
    @ir_module("llvm", "llvm:1")
    def Mod(x: R.Tensor((2,), "float32")):
        a = R.hint_on_device(x, tvm.cpu(0))
        y = R.match_cast(a, R.Tensor((2,), "float32", "llvm:1"))
        return y

    refused(
        Mod, "match_cast binding 'y'", "'a' is on llvm:0", "'y' is on llvm:1 (from the match_cast of 'y' in 'main')"
    )


def test_out_ty():
    @ir_module("llvm", "llvm:1")
    def Mod(x: R.Tensor((2,), "float32")):
        y = R.call_dps_packed(
            "f", (x,), out_ty=[R.Tensor((2,), "float32", "llvm:0"), R.Tensor((2,), "float32", "llvm:1")]
        )
        return y

    refused(Mod, "relax.call_dps_packed binding 'y'", "'y[0]' is on llvm:0", "'y[1]' is on llvm:1")


def test_argument_against_callee():
    """The origin inside the callee is named, too."""

    @ir_module("llvm", "llvm:1")
    class Mod:
        @R.function
        def f(z: R.Tensor((2,), "float32")):
            a: R.Tensor((2,), "float32", "llvm:1") = R.exp(z)
            return a

        @R.function
        def main(x: R.Tensor((2,), "float32", "llvm:0")) -> R.Tensor((2,), "float32"):
            cls = Mod
            y: R.Tensor((2,), "float32") = cls.f(x)
            return y

    refused(
        Mod,
        "call of 'f' binding 'y' in function 'main'",
        "the call of 'f' is on llvm:1 (from function 'f', from the annotation of 'a' in 'f')",
    )


def test_two_hints_in_round_two():
    @ir_module("llvm", "llvm:1")
    def Mod(x: R.Tensor((2,), "float32")):
        a = R.exp(x)
        b = R.hint_on_device(x, tvm.cpu(0))
        c = R.hint_on_device(a, tvm.cpu(1))
        return (b, c)

    refused(
        Mod, "relax.exp binding 'a' in function 'main'", "is hinted for llvm:0", "'b'", "is hinted for llvm:1", "'c'"
    )


def test_two_hints_for_one_value():
    @ir_module("llvm", "llvm:1")
    def Mod(x: R.Tensor((2,), "float32")):
        b = R.hint_on_device(x, tvm.cpu(0))
        c = R.hint_on_device(x, tvm.cpu(1))
        return (b, c)

    refused(Mod, "relax.hint_on_device binding 'c'", "'x' is hinted for llvm:0", "'b'", "llvm:1", "'c'")


def test_two_hints_are_fine_where_the_value_is_fixed():
    @ir_module("llvm", "llvm:1")
    def Mod(x: R.Tensor((2,), "float32", "llvm:0")):
        b = R.hint_on_device(x, tvm.cpu(0))
        c = R.hint_on_device(x, tvm.cpu(1))
        return (b, c)

    result = RealizeVDevice()(Mod)["main"].ret_ty
    assert [int(field.vdevice.vdevice_id) for field in result.fields] == [0, 1]


def test_hints_in_caller_and_callee():
    @ir_module("llvm", "llvm:1")
    class Mod:
        @R.function
        def f(z: R.Tensor((2,), "float32")):
            a = R.hint_on_device(z, tvm.cpu(1))
            return a

        @R.function
        def main(x: R.Tensor((2,), "float32")):
            cls = Mod
            y = cls.f(x)
            b = R.hint_on_device(x, tvm.cpu(0))
            return (y, b)

    refused(
        Mod, "call of 'f' binding 'y'", "hinted for llvm:1 (from the hint_on_device of 'a' in 'f')", "hinted for llvm:0"
    )


def test_annotation_of_a_transfer_that_disagrees_with_it():
    devices = [rh.VDevice("llvm"), rh.VDevice("llvm", 1)]
    x = relax.Var("x", relax.TensorType([2], "float32"))
    for call in (relax.op.to_vdevice(x, devices[1]), encode_hint(x, devices[1], devices)):
        ty = relax.TensorType([2], "float32", devices[0])
        y = relax.Var("y", ty)
        seq = relax.SeqExpr([relax.BindingBlock([relax.VarBinding(y, call)])], y)
        mod = tvm.IRModule({"main": relax.Function([x], seq, ty)})
        mod.update_global_info("vdevice", devices)
        refused(mod, call.op.name, "'y' in function 'main' is to llvm:1, but its annotation says llvm:0")


def test_device_that_is_not_in_the_list():
    x = relax.Var("x", relax.TensorType([2], "float32", rh.VDevice("llvm", 7)))
    mod = tvm.IRModule({"main": relax.Function([x], x, x.ty)})
    mod.update_global_info("vdevice", [rh.VDevice("llvm")])
    refused(mod, "'x' in function 'main'", "vdevice_id=7", "available: llvm:0")


def test_hint_for_a_device_the_module_does_not_have():
    devices = [rh.VDevice("llvm")]
    x = relax.Var("x", relax.TensorType([2], "float32"))
    y = relax.Var("y", x.ty)
    call = relax.op.hint_on_device(x, tvm.cuda(3))
    seq = relax.SeqExpr([relax.BindingBlock([relax.VarBinding(y, call)])], y)
    mod = tvm.IRModule({"main": relax.Function([x], seq, x.ty)})
    mod.update_global_info("vdevice", devices)
    refused(mod, "relax.hint_on_device binding 'y' in function 'main'", "cuda", "3", "llvm:0", error=rh.HeteroError)


def test_nested_calls_are_not_normal_form():
    devices = [rh.VDevice("llvm")]
    x = relax.Var("x", relax.TensorType([2], "float32"))
    y = relax.Var("y", x.ty)
    inner = relax.Call(tvm.ir.Op.get("relax.exp"), [x], ret_ty=x.ty)
    outer = relax.Call(tvm.ir.Op.get("relax.exp"), [inner], ret_ty=x.ty)
    seq = relax.SeqExpr([relax.BindingBlock([relax.VarBinding(y, outer)])], y)
    mod = tvm.IRModule({"main": relax.Function([x], seq, x.ty)})
    mod.update_global_info("vdevice", devices)
    refused(mod, "relax.exp binding 'y' in function 'main'", "nested Call", "relax.transform.Normalize()")


def test_undefined_variable():
    device = rh.VDevice("llvm")
    x, y = (relax.Var(name, relax.TensorType([2], "float32")) for name in "xy")
    seq = relax.SeqExpr([], y)
    mod = tvm.IRModule({"main": relax.Function([x], seq, x.ty)})
    mod.update_global_info("vdevice", [device])
    refused(mod, "return of function 'main'", "variable 'y' is used where it is not defined")


def test_message_does_not_depend_on_the_order_of_functions():
    @ir_module("llvm", "llvm:1")
    class Mod:
        @R.function
        def one(x: R.Tensor((2,), "float32", "llvm:0")):
            a = R.concat((x, x))
            return a

        @R.function
        def two(x: R.Tensor((2,), "float32", "llvm:0"), y: R.Tensor((2,), "float32", "llvm:1")):
            a = R.concat((x, y))
            return a

    message = refused(Mod, "relax.concat binding 'a' in function 'two'")
    turned = tvm.IRModule(dict(reversed(list(Mod.functions.items()))), global_infos=Mod.global_infos)
    assert refused(turned, "function 'two'") == message
