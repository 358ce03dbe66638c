"""LowerTransfers: `to_vdevice` becomes the run-time's own `to_device`."""

from tvm.ir import assert_structural_equal
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from relax_hetero.transform import LowerTransfers

V4 = {"kind": "llvm", "mcpu": "x86-64-v4"}
V2 = {"kind": "llvm", "mcpu": "x86-64-v2"}


def test_transfer_becomes_a_call():
    @I.ir_module
    class Before:
        I.module_global_infos({"vdevice": [I.vdevice(V4, 0), I.vdevice(V2, 1)]})

        @R.function(pure=False)
        def main(x: R.Tensor((4,), "float32", "llvm:0")) -> R.Tensor((4,), "float32", "llvm:1"):
            y: R.Tensor((4,), "float32", "llvm:1") = R.to_vdevice(x, "llvm:1")
            return y

    @I.ir_module
    class Expected:
        I.module_global_infos({"vdevice": [I.vdevice(V4, 0), I.vdevice(V2, 1)]})

        @R.function(pure=False)
        def main(x: R.Tensor((4,), "float32", "llvm:0")) -> R.Tensor((4,), "float32", "llvm:1"):
            room: R.Tensor((4,), "float32", "llvm:1") = R.builtin.alloc_tensor(R.shape([4]), "float32", 1, "global")
            y: R.Tensor((4,), "float32", "llvm:1") = R.call_packed(
                "relax_hetero.to_device", x, 1, 0, room, ty_args=(R.Tensor((4,), "float32", "llvm:1"),)
            )
            return y

    after = LowerTransfers()(Before)
    assert_structural_equal(after, Expected)
    assert_structural_equal(LowerTransfers()(after), Expected)


def test_in_place_writers_need_a_new_tensor():
    @I.ir_module
    class Before:
        I.module_global_infos({"vdevice": [I.vdevice(V4, 0), I.vdevice(V2, 1)]})

        @T.prim_func(private=True, s_tir=True)
        def increment(a: T.Buffer((4,), "float32")):
            for i in range(4):
                a[i] = a[i] + T.float32(1)

        @R.function(pure=False)
        def main(x: R.Tensor((4,), "float32", "llvm:0")) -> R.Tensor((4,), "float32", "llvm:1"):
            y: R.Tensor((4,), "float32", "llvm:1") = R.to_vdevice(x, "llvm:1")
            z = R.call_tir_inplace(
                Before.increment, (y,), inplace_indices=0, out_ty=R.Tensor((4,), "float32", "llvm:1")
            )
            return z

    call = LowerTransfers()(Before)["main"].body.blocks[0].bindings[1].value
    assert [int(arg.value) for arg in call.args[1:3]] == [1, 1]


def test_a_tensor_of_unknown_shape_gets_no_room():
    @I.ir_module
    class Before:
        I.module_global_infos({"vdevice": [I.vdevice(V4, 0), I.vdevice(V2, 1)]})

        @R.function(pure=False)
        def main(x: R.Tensor(ndim=2, dtype="float32", vdevice="llvm:0")):
            y: R.Tensor(ndim=2, dtype="float32", vdevice="llvm:1") = R.to_vdevice(x, "llvm:1")
            return y

    (binding,) = LowerTransfers()(Before)["main"].body.blocks[0].bindings
    assert len(binding.value.args) == 3
