"""ScheduleGPU: kernels of GPUs bind blocks and threads, others are left as they are."""

from tvm.ir import assert_structural_equal
from tvm.script import ir as I
from tvm.script import tirx as T

from relax_hetero.transform import ScheduleGPU

CUDA = {"kind": "cuda", "arch": "sm_90"}
CPU = {"kind": "llvm", "mcpu": "x86-64-v3"}


@I.ir_module
class Before:
    @T.prim_func(private=True, s_tir=True)
    def on_gpu(A: T.Buffer((5, 3), "float32"), B: T.Buffer((3, 5), "float32")):
        T.func_attr({"target": T.target(CUDA)})
        for i, j in T.grid(3, 5):
            with T.sblock("twice"):
                vi, vj = T.axis.remap("SS", [i, j])
                B[vi, vj] = A[vj, vi] * T.float32(2)

    @T.prim_func(private=True, s_tir=True)
    def on_cpu(A: T.Buffer((64, 32), "float32"), B: T.Buffer((64, 32), "float32")):
        T.func_attr({"target": T.target(CPU)})
        for i, j in T.grid(64, 32):
            with T.sblock("twice"):
                vi, vj = T.axis.remap("SS", [i, j])
                B[vi, vj] = A[vi, vj] * T.float32(2)


@I.ir_module
class Expected:
    @T.prim_func(private=True, s_tir=True)
    def on_gpu(A: T.Buffer((5, 3), "float32"), B: T.Buffer((3, 5), "float32")):
        T.func_attr({"target": T.target(CUDA), "tirx.is_scheduled": True})
        with T.sblock("root"):
            T.reads()
            T.writes()
            for v in T.thread_binding(T.int64(1), thread="blockIdx.x"):
                for w in T.thread_binding(T.int64(64), thread="threadIdx.x"):
                    a = T.decl_buffer((T.int64(15),), data=A.data, layout=None)
                    b = T.decl_buffer((T.int64(15),), data=B.data, layout=None)
                    if v * T.int64(64) + w < T.int64(15):
                        made = T.alloc_local((1,))
                        made[T.int64(0)] = a[
                            (v * T.int64(64) + w) % T.int64(5) * T.int64(3) + (v * T.int64(64) + w) // T.int64(5)
                        ] * T.float32(2)
                        b[(v * T.int64(64) + w) // T.int64(5) * T.int64(5) + (v * T.int64(64) + w) % T.int64(5)] = made[
                            T.int64(0)
                        ]

    @T.prim_func(private=True, s_tir=True)
    def on_cpu(A: T.Buffer((64, 32), "float32"), B: T.Buffer((64, 32), "float32")):
        T.func_attr({"target": T.target(CPU)})
        for i, j in T.grid(64, 32):
            with T.sblock("twice"):
                vi, vj = T.axis.remap("SS", [i, j])
                B[vi, vj] = A[vi, vj] * T.float32(2)


def test_kernels_of_gpus_bind_threads():
    after = ScheduleGPU()(Before)
    assert_structural_equal(after, Expected)
    assert_structural_equal(ScheduleGPU()(after), Expected)


def test_a_module_without_gpus_is_the_module_itself():
    only_cpu = Before.clone()
    del only_cpu["on_gpu"]
    assert ScheduleGPU()(only_cpu).same_as(only_cpu)
