"""LowerLoopRows: rows are written by a kernel on CPUs, by the packed function elsewhere."""

from tvm.ir import assert_structural_equal
from tvm.script import relax as R

from modules import ir_module
from relax_hetero.tir.write_row import write_row_kernel
from relax_hetero.transform import LowerLoopRows

V4 = {"kind": "llvm", "mcpu": "x86-64-v4"}


@ir_module(V4, "cuda")
class Before:
    @R.function(pure=False)
    def main(
        rows: R.Tensor(dtype="float32", ndim=2, vdevice="llvm:0"),
        row: R.Tensor((4,), "float32", "llvm:0"),
        trip: R.Tensor((), "int64", "llvm:0"),
    ) -> R.Tensor(dtype="float32", ndim=2, vdevice="llvm:0"):
        more: R.Tensor(dtype="float32", ndim=2, vdevice="llvm:0") = R.call_packed(
            "relax_hetero.write_row", rows, row, trip, ty_args=(R.Tensor(dtype="float32", ndim=2, vdevice="llvm:0"),)
        )
        return more

    @R.function(pure=False)
    def on_gpu(
        rows: R.Tensor(dtype="float32", ndim=2, vdevice="cuda:0"),
        row: R.Tensor((4,), "float32", "cuda:0"),
        trip: R.Tensor((), "int64", "cuda:0"),
    ) -> R.Tensor(dtype="float32", ndim=2, vdevice="cuda:0"):
        more: R.Tensor(dtype="float32", ndim=2, vdevice="cuda:0") = R.call_packed(
            "relax_hetero.write_row", rows, row, trip, ty_args=(R.Tensor(dtype="float32", ndim=2, vdevice="cuda:0"),)
        )
        return more


def test_rows_of_cpus_are_written_by_a_kernel():
    after = LowerLoopRows()(Before)
    write, same = after["main"].body.blocks[0].bindings
    assert write.value.op.same_as(after.get_global_var("write_row"))
    assert [arg.name for arg in write.value.args] == ["rows", "row", "trip"]
    assert same.var.name == "more" and same.value.op.global_symbol == "vm.builtin.copy"
    assert same.value.args[0].same_as(after["main"].params[0])
    kernel = after["write_row"]
    assert str(kernel.attrs["target"]) == str(after.global_infos["vdevice"][0].target)
    assert_structural_equal(kernel.body, write_row_kernel(1, "float32").body, map_free_vars=True)
    assert_structural_equal(after["on_gpu"], Before["on_gpu"])
    assert_structural_equal(LowerLoopRows()(after), after)
