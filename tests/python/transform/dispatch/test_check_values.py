"""CheckValues: checked operands, the kernels that check them, and checks at compile time."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from modules import ir_module
from relax_hetero.artifact.checks import RECORD, WORDS, CheckSpec
from relax_hetero.errors import BuildError
from relax_hetero.tir.checks import CheckProblem, check_kernel, reporting_kernel
from relax_hetero.transform import CheckValues, RecordRemarks
from relax_hetero.transform.ir.module_attrs import STRICT
from relax_hetero.transform.ir.remarks import remarks_of

CUDA = {"kind": "cuda", "arch": "sm_90"}


@ir_module("llvm")
def Before(
    x: R.Tensor(("n", 4), "float32", "llvm:0"),
    index: R.Tensor((3,), "int32", "llvm:0"),
    a: R.Tensor((3,), "int64", "llvm:0"),
):
    with R.dataflow():
        y: R.Tensor((3, 4), "float32", "llvm:0") = R.take(x, index, axis=0, mode="fast")
        z: R.Tensor((3,), "int64", "llvm:0") = R.floor_divide(a, a)
        R.output(y, z)
    return y, z


def expected(index_kernel, divisor_kernel):
    @I.ir_module(check_well_formed=False)
    class Expected:
        I.module_global_infos({"vdevice": [I.vdevice("llvm")]})

        @R.function
        def main(
            x: R.Tensor(("n", 4), "float32", "llvm:0"),
            index: R.Tensor((3,), "int32", "llvm:0"),
            a: R.Tensor((3,), "int64", "llvm:0"),
        ):
            n = T.int64()
            with R.dataflow():
                y_checked: R.Tensor((3,), "int64", "llvm:0") = R.call_tir(
                    index_kernel, (index, T.int64(0), n), out_ty=R.Tensor((3,), "int64", "llvm:0")
                )
                y: R.Tensor((3, 4), "float32", "llvm:0") = R.take(x, y_checked, axis=0, mode="fast")
                z_checked: R.Tensor((3,), "int64", "llvm:0") = R.call_tir(
                    divisor_kernel, (a, T.int64(1)), out_ty=R.Tensor((3,), "int64", "llvm:0")
                )
                z: R.Tensor((3,), "int64", "llvm:0") = R.floor_divide(a, z_checked)
                R.output(y, z)
            return y, z

    return Expected


def test_indices_and_divisors_are_read_through_a_check():
    after = CheckValues()(Before)
    named = {gv.name_hint: gv for gv in after.get_global_vars()}
    kernels = [
        check_kernel(problem).without_attr("global_symbol").with_attr("op_pattern", 8)
        for problem in (CheckProblem((3,), "int32"), CheckProblem((3,), "int64", is_divisor=True))
    ]
    for name, kernel in zip(("check_values", "check_values_1"), kernels, strict=True):
        tvm.ir.assert_structural_equal(after[name], kernel)
    Expected = expected(named["check_values"], named["check_values_1"])
    tvm.ir.assert_structural_equal(after["main"].body, Expected["main"].body, map_free_vars=True)
    where = "of variable {!r} in function 'main'"
    assert remarks_of(after).checks == (
        CheckSpec("index", f"op relax.take {where.format('y')}"),
        CheckSpec("divisor", f"op relax.floor_divide {where.format('z')}"),
    )
    assert CheckValues()(after).same_as(after)


@ir_module("llvm")
def Harmless(x: R.Tensor((10, 4), "float32", "llvm:0"), index: R.Tensor((3,), "int64", "llvm:0")):
    with R.dataflow():
        a: R.Tensor((3, 4), "float32", "llvm:0") = R.take(x, index, axis=0, mode="clip")
        b: R.Tensor((3, 4), "float32", "llvm:0") = R.divide(a, a)
        c: R.Tensor((3,), "int64", "llvm:0") = R.floor_divide(index, R.const([1, -2, 3], "int64"))
        d: R.Tensor((2, 4), "float32", "llvm:0") = R.take(x, R.const([0, 9], "int64"), axis=0, mode="fast")
        R.output(b, c, d)
    return b, c, d


def test_nothing_is_checked_that_cannot_be_wrong():
    assert CheckValues()(Harmless).same_as(Harmless)


def module_of(vdevice, index, data_rows=10, op=None):
    """A module that takes rows at constant indices, or divides by them."""
    device = relax.VDevice(vdevice, 0, "global")
    x = relax.Var("x", relax.TensorType((data_rows, 4), "float32", device))
    a = relax.Var("a", relax.TensorType((len(index),), "int64", device))
    ty = relax.TensorType((len(index),), "int64", device)
    constant = tvm.ir.GenericConst(tvm.runtime.tensor(np.array(index, "int64")), ty)
    call = relax.op.take(x, constant, 0, "fast") if op is None else op(a, constant)
    kind = relax.TensorType((len(index), 4), "float32", device) if op is None else ty
    relax.expr._update_type(call, kind)
    y = relax.Var("y", kind)
    body = relax.SeqExpr([relax.BindingBlock([relax.VarBinding(y, call)])], y)
    relax.expr._update_type(body, kind)
    func = relax.Function([x, a], body, kind)
    return tvm.IRModule({"main": func.with_attr("global_symbol", "main")}, global_infos={"vdevice": [device]})


@pytest.mark.parametrize("vdevice", ["llvm", CUDA])
@pytest.mark.parametrize("index", [10, -11, 2**63 - 1, -(2**63)])
def test_an_index_that_is_known_and_wrong_is_refused_at_once(vdevice, index):
    with pytest.raises(BuildError, match=rf"relax.take of variable 'y' .*: index {index} is out of range, .* -10 to 9"):
        CheckValues()(module_of(vdevice, [0, index]))


def test_a_known_index_is_counted_from_the_front_now():
    after = CheckValues()(module_of("llvm", [0, -1, -10]))
    constant = after["main"].body.blocks[0].bindings[0].value.args[1]
    assert constant.value.numpy().tolist() == [0, 9, 0]


def test_a_constant_divisor_of_0_is_refused_at_once():
    with pytest.raises(BuildError, match="relax.mod of variable 'y' in function 'main': an integer is divided by 0"):
        CheckValues()(module_of("llvm", [1, 0], op=relax.op.mod))


@ir_module(CUDA, "llvm")
def OnGpu(x: R.Tensor((10, 4), "float32", "cuda:0"), index: R.Tensor((3,), "int64", "cuda:0")):
    with R.dataflow():
        y: R.Tensor((3, 4), "float32", "cuda:0") = R.take(x, index, axis=0, mode="fast")
        R.output(y)
    return y


def test_on_a_gpu_negative_indices_are_counted_from_the_front():
    after = CheckValues()(OnGpu)
    counted, gathered = after["main"].body.blocks[0].bindings
    assert counted.value.args[0].name_hint == "from_front" and gathered.value.args[1].same_as(counted.var)
    assert remarks_of(after).checks is None
    assert CheckValues()(after).same_as(after)


def strict_expected(kernel, record, key):
    @I.ir_module(check_well_formed=False)
    class Expected:
        I.module_global_infos({"vdevice": [I.vdevice(CUDA), I.vdevice("llvm")]})

        @R.function
        def main(x: R.Tensor((10, 4), "float32", "cuda:0"), index: R.Tensor((3,), "int64", "cuda:0")):
            with R.dataflow():
                y_checked: R.Tensor((3,), "int64", "cuda:0") = R.call_tir(
                    kernel, (index, record, key, T.int64(10)), out_ty=R.Tensor((3,), "int64", "cuda:0")
                )
                y: R.Tensor((3, 4), "float32", "cuda:0") = R.take(x, y_checked, axis=0, mode="fast")
                R.output(y)
            return y

    return Expected


def test_strict_checks_of_a_gpu_report_to_its_record():
    after = CheckValues()(OnGpu.with_attr(STRICT, True))
    (named,) = [gv for gv in after.get_global_vars() if gv.name_hint == "check_values"]
    kernel = reporting_kernel(CheckProblem((3,), "int64")).without_attr("global_symbol").with_attr("op_pattern", 8)
    tvm.ir.assert_structural_equal(after[named], kernel)
    (check,) = remarks_of(after).checks
    assert check == CheckSpec("index", "op relax.take of variable 'y' in function 'main'")
    device = after.global_infos["vdevice"][0]
    record = tvm.ir.GenericConst(
        tvm.runtime.tensor(np.frombuffer(RECORD, "int32")), relax.TensorType((WORDS,), "int32", device)
    )
    Expected = strict_expected(named, record, tvm.tirx.IntImm("int64", check.key))
    tvm.ir.assert_structural_equal(after["main"].body, Expected["main"].body, map_free_vars=True)
    assert CheckValues()(after).same_as(after)


def test_checks_of_a_gpu_share_one_record():
    both = CheckValues()(module_of(CUDA, [0]).with_attr(STRICT, True))
    assert remarks_of(both).checks is None  # a known index needs none
    device = relax.VDevice(CUDA)
    x, i = (relax.Var(name, relax.TensorType((4,), "int64", device)) for name in "xi")
    builder = relax.BlockBuilder()
    with builder.function("main", [x, i]):
        gathered = builder.emit(relax.op.take(x, i, 0, "fast"))
        builder.emit_func_output(builder.emit(relax.op.mod(gathered, i)))
    mod = builder.get()
    mod.update_global_info("vdevice", [device])
    after = CheckValues()(mod.with_attr(STRICT, True))
    calls = [b.value for b in after["main"].body.blocks[0].bindings if b.value.op.name == "relax.call_tir"]
    assert len(calls) == 2 and calls[0].args[1].fields[1].same_as(calls[1].args[1].fields[1])
    assert len(remarks_of(after).checks) == 2


def test_strict_checks_need_a_device_that_can_report():
    mod = module_of({"kind": "vulkan"}, [1], op=relax.op.mod)
    call = mod["main"].body.blocks[0].bindings[0].value
    divisor = relax.op.mod(call.args[0], call.args[0])
    relax.expr._update_type(divisor, call.ty)
    y = relax.Var("y", call.ty)
    body = relax.SeqExpr([relax.BindingBlock([relax.VarBinding(y, divisor)])], y)
    relax.expr._update_type(body, call.ty)
    mod["main"] = relax.Function(mod["main"].params, body, call.ty).with_attr("global_symbol", "main")
    with pytest.raises(BuildError, match="relax.mod of variable 'y' .* kind 'vulkan': strict checks need a CPU or a"):
        CheckValues()(mod.with_attr(STRICT, True))


def test_numbers_of_checks_continue_after_existing_ones():
    first = CheckValues()(RecordRemarks()(Before))
    main = Before["main"].with_attr("global_symbol", "other")
    both = tvm.IRModule({**dict(first.functions.items()), tvm.ir.GlobalVar("other"): main}, attrs=first.attrs)
    both = tvm.IRModule(dict(both.functions.items()), attrs=first.attrs, global_infos=first.global_infos)
    checks = remarks_of(CheckValues()(both)).checks
    assert len(checks) == 4 and all("'other'" in check.where for check in checks[2:])
