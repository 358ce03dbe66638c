"""LowerPinnedStorage: storage in pinned memory comes from the run-time, other storage stays as it is."""

from tvm.ir import assert_structural_equal
from tvm.script import relax as R
from tvm.script import tirx as T

from modules import ir_module
from relax_hetero.transform import LowerPinnedStorage

CUDA = {"kind": "cuda", "arch": "sm_90"}


def test_storage_in_pinned_memory_comes_from_the_run_time():
    @ir_module("llvm", CUDA, pure=False)
    def Before(x: R.Tensor(("n",), "float32", "llvm:0")):
        n = T.int64()
        s: R.Any = R.memory.alloc_storage(R.shape([n * 4]), 0, "pinned", "uint8")
        a: R.Tensor((n,), "float32") = R.memory.alloc_tensor(s, 0, R.shape([n]), "float32", 0)
        t: R.Any = R.memory.alloc_storage(R.shape([64]), 0, "global", "uint8")
        b: R.Tensor((16,), "float32") = R.memory.alloc_tensor(t, 0, R.shape([16]), "float32", 0)
        R.memory.kill_storage(s)
        return (a, b)

    @ir_module("llvm", CUDA, pure=False)
    def Expected(x: R.Tensor(("n",), "float32", "llvm:0")):
        n = T.int64()
        s: R.Any = R.call_packed("relax_hetero.pinned_storage", R.shape([n * 4]), 0, ty_args=R.Any)
        a: R.Tensor((n,), "float32") = R.call_packed(
            "runtime.TVMTensorCreateView", s, R.shape([n]), R.dtype("float32"), 0, ty_args=R.Tensor((n,), "float32")
        )
        t: R.Any = R.memory.alloc_storage(R.shape([64]), 0, "global", "uint8")
        b: R.Tensor((16,), "float32") = R.memory.alloc_tensor(t, 0, R.shape([16]), "float32", 0)
        R.memory.kill_storage(s)
        return (a, b)

    assert_structural_equal(LowerPinnedStorage()(Before), Expected)
