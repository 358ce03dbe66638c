"""LowerToVM: a module of dispatches and transfers, before and after, as the virtual machine runs it."""

import pytest
import tvm
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from modules import ir_module
from relax_hetero import BuildError
from relax_hetero.artifact.memory_spec import FunctionMemory, Live, StorageSpec
from relax_hetero.transform import LowerToVM
from relax_hetero.transform.lower.annotate_memory import memory_of

V4 = {"kind": "llvm", "mcpu": "x86-64-v4"}
V2 = {"kind": "llvm", "mcpu": "x86-64-v2"}


@ir_module(V4, (V2, 1))
class Before:
    @T.prim_func(private=True, s_tir=True)
    def twice(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
        T.evaluate(0)

    @R.function
    def main(x: R.Tensor((4,), "float32", "llvm:0")):
        cls = Before
        with R.dataflow():
            a = R.call_tir(cls.twice, (x,), out_ty=R.Tensor((4,), "float32", "llvm:0"))
            b = R.call_tir(cls.twice, (a,), out_ty=R.Tensor((4,), "float32", "llvm:0"))
            c: R.Tensor((4,), "float32", "llvm:1") = R.to_vdevice(b, "llvm:1")
            y = R.call_tir(cls.twice, (c,), out_ty=R.Tensor((4,), "float32", "llvm:1"))
            R.output(y)
        return y


# Messages of the machine for an argument or a result that contradicts its type.
OF_X = (
    'ErrorContext(fn=main, loc=param[0], param=x, annotation=R.Tensor((4,), dtype="float32", '
    'vdevice="llvm:-1:global")) '
)
OF_RESULT = 'ErrorContext(fn=main, loc=return, annotation=R.Tensor((4,), dtype="float32", vdevice="llvm:-1:global")) '


@ir_module(V4, (V2, 1))
class Expected:
    """Each result has storage of its own device; what was read for the last time is freed there."""

    I.module_attrs({"relax_hetero.lowered": 2, "relax_hetero.public": ["main"], "relax_hetero.public_kernels": []})

    @T.prim_func(s_tir=True)
    def twice(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
        with T.sblock("root"):
            T.reads()
            T.writes()
            T.evaluate(0)

    @R.function
    def main(x: R.Tensor((4,), "float32", "llvm:0")) -> R.Tensor((4,), "float32", "llvm:1"):
        R.func_attr({"relax.force_pure": True})
        cls = Expected
        shape_heap: R.Any = R.null_value()
        R.call_packed("vm.builtin.check_tensor_info", x, 1, R.dtype("float32"), R.str(OF_X), ty_args=(R.Tuple,))
        R.call_packed("vm.builtin.match_shape", x, shape_heap, 1, 0, 4, R.str(OF_X), ty_args=(R.Tuple,))
        storage: R.Any = R.vm.alloc_storage(R.shape([64]), 0, R.dtype("uint8"), R.str("global"))
        a: R.Tensor((4,), "float32") = R.vm.alloc_tensor(storage, 0, R.shape([4]), R.dtype("float32"), 0)
        R.vm.kill_object(storage)
        cls.twice(x, a)
        storage_1: R.Any = R.vm.alloc_storage(R.shape([64]), 0, R.dtype("uint8"), R.str("global"))
        b: R.Tensor((4,), "float32") = R.vm.alloc_tensor(storage_1, 0, R.shape([4]), R.dtype("float32"), 0)
        R.vm.kill_object(storage_1)
        cls.twice(a, b)
        R.vm.kill_object(a)
        c: R.Tensor((4,), "float32", "llvm:1") = R.call_packed(
            "relax_hetero.to_device", b, 1, 0, ty_args=(R.Tensor((4,), "float32", "llvm:1"),)
        )
        R.vm.kill_object(b)
        storage_2: R.Any = R.vm.alloc_storage(R.shape([16]), 1, R.dtype("uint8"), R.str("global"))
        y: R.Tensor((4,), "float32") = R.vm.alloc_tensor(storage_2, 0, R.shape([4]), R.dtype("float32"), 1)
        R.vm.kill_object(storage_2)
        cls.twice(c, y)
        R.vm.kill_object(c)
        R.call_packed("vm.builtin.match_shape", y, shape_heap, 1, 0, 4, R.str(OF_RESULT), ty_args=(R.Tuple,))
        return y


def test_dispatches_and_transfers_become_calls_of_the_machine():
    lowered = LowerToVM()(Before)
    (memory,) = memory_of(lowered)
    assert memory == FunctionMemory(
        "main",
        storages=(
            StorageSpec(0, 64, 0, 1, "value", "twice"),
            StorageSpec(0, 64, 1, 3, "value", "twice"),
            StorageSpec(1, 16, 3, -1, "result", "twice"),
        ),
        tensors=(Live(0, 16, 0, 1), Live(1, 16, 1, 3), Live(2, 16, 3, 3)),
        results=(16,),
    )
    lowered["main"] = lowered["main"].without_attr("relax_hetero.memory")
    assert_structural_equal(lowered, Expected)


def test_a_lowered_module_is_left_alone():
    lowered = LowerToVM()(Before)
    assert LowerToVM()(lowered).same_as(lowered)


def test_memory_that_was_planned_for_one_device_is_refused():
    """Stock StaticPlanBlockMemory knows no devices; before it, and with one device, any stage will do."""
    stock = relax.transform
    steps = [stock.ToNonDataflow(), stock.RemovePurityChecking(), stock.CallTIRRewrite()]
    allocated = tvm.transform.Sequential(steps)(Before)
    assert LowerToVM()(allocated) is not None
    planned = [stock.StaticPlanBlockMemory(), stock.LowerAllocTensor(), stock.KillAfterLastUse()]
    for count in range(2, len(planned) + 1):
        with pytest.raises(BuildError, match=r"function 'main' has memory that was planned before.*2 vdevices"):
            LowerToVM()(tvm.transform.Sequential(planned[:count])(allocated))
