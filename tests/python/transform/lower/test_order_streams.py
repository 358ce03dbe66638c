"""OrderStreams: copies of constants to a GPU begin before readers of other memory have ended; storage alternates."""

import numpy as np
import tvm
from tvm import relax
from tvm.ir import GenericConst, assert_structural_equal
from tvm.script import relax as R
from tvm.script import tirx as T
from tvm_ffi import structural_map

from modules import ir_module
from relax_hetero.transform import LowerTransfers, OrderStreams, PlanMemoryPerDevice
from relax_hetero.transform.ir.rewriting import copy_module, op_name, walk_bindings

CUDA = {"kind": "cuda", "arch": "sm_90"}


def test_copies_wait_for_readers_of_their_memory():
    @ir_module("llvm", CUDA, pure=False)
    def Before(w: R.Tensor((64,), "uint8", "llvm:0")):
        s: R.Any = R.memory.alloc_storage(R.shape([64]), 1, "streamed", "uint8")
        a_buffer: R.Tensor((64,), "uint8") = R.memory.alloc_tensor(s, 0, R.shape([64]), "uint8", 1)
        a: R.Tensor((64,), "uint8") = R.call_packed("relax_hetero.stream_to_device", w, 1, 0, a_buffer, ty_args=R.Any)
        t: R.Any = R.memory.alloc_storage(R.shape([64]), 1, "streamed", "uint8")
        _ = R.call_packed("test.read", a, ty_args=R.Any)
        b_buffer: R.Tensor((64,), "uint8") = R.memory.alloc_tensor(t, 0, R.shape([64]), "uint8", 1)
        b: R.Tensor((64,), "uint8") = R.call_packed("relax_hetero.stream_to_device", w, 1, 0, b_buffer, ty_args=R.Any)
        c_buffer: R.Tensor((64,), "uint8") = R.memory.alloc_tensor(s, 0, R.shape([64]), "uint8", 1)
        c: R.Tensor((64,), "uint8") = R.call_packed("relax_hetero.stream_to_device", w, 1, 0, c_buffer, ty_args=R.Any)
        _1 = R.call_packed("test.read", b, ty_args=R.Any)
        _2 = R.call_packed("test.read", c, ty_args=R.Any)
        d_buffer: R.Tensor((64,), "uint8") = R.memory.alloc_tensor(t, 0, R.shape([64]), "uint8", 1)
        d: R.Tensor((64,), "uint8") = R.call_packed("relax_hetero.stream_to_device", w, 1, 0, d_buffer, ty_args=R.Any)
        return d

    @ir_module("llvm", CUDA, pure=False)
    def Expected(w: R.Tensor((64,), "uint8", "llvm:0")):
        s: R.Any = R.memory.alloc_storage(R.shape([64]), 1, "global", "uint8")
        a_buffer: R.Tensor((64,), "uint8") = R.memory.alloc_tensor(s, 0, R.shape([64]), "uint8", 1)
        a: R.Tensor((64,), "uint8") = R.call_packed("relax_hetero.stream_to_device", w, 1, 0, a_buffer, ty_args=R.Any)
        t: R.Any = R.memory.alloc_storage(R.shape([64]), 1, "global", "uint8")
        _ = R.call_packed("test.read", a, ty_args=R.Any)
        b_buffer: R.Tensor((64,), "uint8") = R.memory.alloc_tensor(t, 0, R.shape([64]), "uint8", 1)
        b: R.Tensor((64,), "uint8") = R.call_packed("relax_hetero.stream_to_device", w, 1, 0, b_buffer, ty_args=R.Any)
        c_buffer: R.Tensor((64,), "uint8") = R.memory.alloc_tensor(s, 0, R.shape([64]), "uint8", 1)
        # After the work before the copy of b, which includes the reader of a.
        c: R.Tensor((64,), "uint8") = R.call_packed("relax_hetero.stream_to_device", w, 1, 1, c_buffer, ty_args=R.Any)
        _1 = R.call_packed("test.read", b, ty_args=R.Any)
        _2 = R.call_packed("test.read", c, ty_args=R.Any)
        d_buffer: R.Tensor((64,), "uint8") = R.memory.alloc_tensor(t, 0, R.shape([64]), "uint8", 1)
        # b was read after the copy of c had been launched.
        d: R.Tensor((64,), "uint8") = R.call_packed("relax_hetero.stream_to_device", w, 1, 0, d_buffer, ty_args=R.Any)
        return d

    after = OrderStreams()(Before)
    assert_structural_equal(after, Expected)
    assert_structural_equal(OrderStreams()(after), Expected)


def test_memory_of_copies_alternates():
    @ir_module("llvm", CUDA, pure=False)
    class Before:
        @T.prim_func(private=True, s_tir=True)
        def kernel(a: T.handle, b: T.handle):
            T.evaluate(0)

        @R.function(pure=False)
        def main(w: R.Tensor((64,), "uint8", "llvm:0"), y: R.Tensor((4,), "float32", "cuda:0")):
            cls = Before
            a_buffer: R.Tensor((64,), "uint8", "cuda:0") = R.builtin.alloc_tensor(R.shape([64]), "uint8", 1, "streamed")
            a: R.Tensor((64,), "uint8", "cuda:0") = R.call_packed(
                "relax_hetero.stream_to_device", w, 1, 0, a_buffer, ty_args=R.Any
            )
            cls.kernel(a, y)
            b_buffer: R.Tensor((64,), "uint8", "cuda:0") = R.builtin.alloc_tensor(R.shape([64]), "uint8", 1, "streamed")
            b: R.Tensor((64,), "uint8", "cuda:0") = R.call_packed(
                "relax_hetero.stream_to_device", w, 1, 0, b_buffer, ty_args=R.Any
            )
            cls.kernel(b, y)
            c_buffer: R.Tensor((64,), "uint8", "cuda:0") = R.builtin.alloc_tensor(R.shape([64]), "uint8", 1, "streamed")
            c: R.Tensor((64,), "uint8", "cuda:0") = R.call_packed(
                "relax_hetero.stream_to_device", w, 1, 0, c_buffer, ty_args=R.Any
            )
            cls.kernel(c, y)
            return R.tuple()

    bindings = list(walk_bindings(PlanMemoryPerDevice()(Before)["main"]))
    tensors = [binding.value.args[0] for binding in bindings if op_name(binding.value) == "relax.memory.alloc_tensor"]
    storages = [binding.var for binding in bindings if op_name(binding.value) == "relax.memory.alloc_storage"]
    assert tensors == [storages[0], storages[1], storages[0]]


def test_constants_of_a_cpu_are_streamed_to_a_gpu():
    @ir_module("llvm", CUDA, pure=False)
    def Before(w: R.Tensor((64,), "uint8", "llvm:0"), x: R.Tensor((4,), "float32", "cuda:0")):
        y: R.Tensor((64,), "uint8", "cuda:0") = R.hetero.stream(w, x)
        return y

    @ir_module("llvm", CUDA, pure=False)
    def Expected(w: R.Tensor((64,), "uint8", "llvm:0"), x: R.Tensor((4,), "float32", "cuda:0")):
        y_buffer: R.Tensor((64,), "uint8", "cuda:0") = R.builtin.alloc_tensor(R.shape([64]), "uint8", 1, "streamed")
        y: R.Tensor((64,), "uint8", "cuda:0") = R.call_packed(
            "relax_hetero.stream_to_device", w, 1, 0, y_buffer, ty_args=R.Tensor((64,), "uint8", "cuda:0")
        )
        return y

    def bound(mod):
        param = mod["main"].params[0]
        constant = GenericConst(tvm.runtime.tensor(np.arange(64, dtype="uint8")), param.ty)
        body = structural_map(mod["main"].body, (relax.Var, lambda var: constant if var.same_as(param) else var))
        function = relax.Function(mod["main"].params[1:], body, mod["main"].ret_ty, is_pure=False)
        return copy_module(mod, {next(iter(mod.functions)): function})

    assert_structural_equal(LowerTransfers()(bound(Before)), bound(Expected))
    # A value may change: its copy is an ordinary transfer.
    *_, binding = walk_bindings(LowerTransfers()(Before)["main"])
    assert binding.value.op.global_symbol == "relax_hetero.to_device"
