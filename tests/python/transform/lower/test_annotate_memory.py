"""AnnotateMemory: what lowered functions allocate, and from when to when."""

import json

import numpy as np
import pytest
import tvm
from tvm.ir import assert_structural_equal
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from modules import ir_module
from relax_hetero.artifact.memory_spec import CallStep, FunctionMemory, Live, StorageSpec
from relax_hetero.artifact.typed_data import to_data
from relax_hetero.transform import LowerToVM
from relax_hetero.transform.ir.module_attrs import MEMORY
from relax_hetero.transform.lower.annotate_memory import AnnotateMemory, memory_of
from seeds import fresh_rng

V4 = {"kind": "llvm", "mcpu": "x86-64-v4"}
V2 = {"kind": "llvm", "mcpu": "x86-64-v2"}


def noted(mod: tvm.IRModule) -> dict[str, FunctionMemory]:
    return {memory.name: memory for memory in memory_of(AnnotateMemory()(mod))}


def test_storage_shared_by_two_tensors_and_a_view_that_keeps_one():
    @ir_module(V4, (V2, 1))
    class Mod:
        @T.prim_func(private=True, s_tir=True)
        def kernel(a: T.handle, b: T.handle):
            T.evaluate(0)

        @R.function(pure=False)
        def main(x: R.Tensor((4,), "float32", "llvm:1")) -> R.Tensor((2, 2), "float32"):
            cls = Mod
            s: R.Any = R.memory.alloc_storage(R.shape([64]), 1, "global", "uint8")
            a: R.Tensor((4,), "float32") = R.memory.alloc_tensor(s, 0, R.shape([4]), "float32", 1)
            cls.kernel(x, a)
            v: R.Tensor((2, 2), "float32") = R.reshape(a, R.shape([2, 2]))
            t: R.Any = R.memory.alloc_storage(R.shape([48]), 1, "global", "uint8")
            b: R.Tensor((2, 2), "float32") = R.memory.alloc_tensor(t, 0, R.shape([2, 2]), "float32", 1)
            R.memory.kill_tensor(a)
            cls.kernel(v, b)
            R.memory.kill_tensor(v)
            c: R.Tensor((8,), "int8") = R.memory.alloc_tensor(s, 0, R.shape([8]), "int8", 1)
            cls.kernel(b, c)
            R.memory.kill_tensor(c)
            R.memory.kill_tensor(b)
            return b

    memory = noted(Mod)["main"]
    assert memory.storages == (
        StorageSpec(1, 64, 0, 2, "value", "kernel"),
        StorageSpec(1, 48, 1, -1, "result", "kernel"),
    )
    # a is read, as a view, by the second kernel; b by the third; c by nobody.
    assert memory.tensors == (Live(0, 16, 0, 1), Live(1, 16, 1, 2), Live(0, 8, 2, 2))
    # Before and after differ in this attribute alone.
    expected = Mod.clone()
    expected["main"] = Mod["main"].with_attr(MEMORY, json.dumps(to_data(memory)))
    assert_structural_equal(AnnotateMemory()(Mod), expected)


def test_arguments_and_results_of_called_functions():
    @ir_module(V4, (V2, 1))
    class Mod:
        @T.prim_func(private=True, s_tir=True)
        def kernel(a: T.handle, b: T.handle):
            T.evaluate(0)

        @R.function(private=True, pure=False)
        def twice(y: R.Tensor(("k", 2), "float32", "llvm:1")) -> R.Tensor(("k", 2), "float32", "llvm:1"):
            cls = Mod
            k = T.int64()
            s: R.Any = R.memory.alloc_storage(R.shape([k * 8]), 1, "global", "uint8")
            a: R.Tensor((k, 2), "float32", "llvm:1") = R.memory.alloc_tensor(s, 0, R.shape([k, 2]), "float32", 1)
            cls.kernel(y, a)
            return a

        @R.function(pure=False)
        def main(x: R.Tensor(("n", 2), "float32", "llvm:0")) -> R.Tuple(R.Tensor(("n", 2), "float32", "llvm:1")):
            cls = Mod
            n = T.int64()
            s: R.Any = R.memory.alloc_storage(R.shape([n * 8]), 1, "global", "uint8")
            room: R.Tensor((n, 2), "float32", "llvm:1") = R.memory.alloc_tensor(s, 0, R.shape([n, 2]), "float32", 1)
            moved: R.Tensor((n, 2), "float32", "llvm:1") = R.call_packed(
                "relax_hetero.to_device", x, 1, 0, room, ty_args=(R.Tensor((n, 2), "float32", "llvm:1"),)
            )
            R.memory.kill_tensor(room)
            once: R.Tensor((n, 2), "float32", "llvm:1") = cls.twice(moved)
            R.memory.kill_tensor(moved)
            result: R.Tuple(R.Tensor((n, 2), "float32", "llvm:1")) = (once,)
            R.memory.kill_tensor(once)
            return result

    memory = noted(Mod)
    assert memory["twice"].storages == (StorageSpec(1, "(k * 8)", 0, -1, "result", "kernel"),)
    assert memory["main"].storages == (
        StorageSpec(1, "(n * 8)", 0, 1, "transfer", "a transfer"),
        StorageSpec(1, "8*n", 2, -1, "result", "twice"),
    )
    assert memory["main"].calls == (CallStep(1, "twice", {"k": "n"}),)


def test_branches_are_read_one_after_the_other():
    @ir_module(V4, (V2, 1))
    def Mod(c: R.Tensor((), "bool", "llvm:1"), x: R.Tensor((64,), "float32", "llvm:0")) -> R.Tensor(
        (64,), "float32", "llvm:0"
    ):
        if c:
            y = R.call_dps_packed("test.note.f", (x,), out_ty=R.Tensor((64,), "float32", "llvm:0"))
        else:
            z = R.call_dps_packed("test.note.f", (x,), out_ty=R.Tensor((64,), "float32", "llvm:0"))
            y = R.call_dps_packed("test.note.f", (z,), out_ty=R.Tensor((64,), "float32", "llvm:0"))
        return y

    (memory,) = memory_of(LowerToVM()(Mod))
    # One of the two results leaves the call; both are counted as what may.
    assert sorted((storage.use, storage.nbytes) for storage in memory.storages) == [
        ("result", 256),
        ("result", 256),
        ("value", 256),
    ]


@pytest.mark.parametrize("bound", [None, 12])
def test_sizes_are_planned_by_upper_bounds(bound):
    @ir_module(V4)
    class Mod:
        @T.prim_func(private=True, s_tir=True)
        def kernel(a: T.handle, b: T.handle):
            T.evaluate(0)

        @R.function
        def main(x: R.Tensor(("n",), "float32", "llvm:0")) -> R.Tensor(("n",), "float32", "llvm:0"):
            cls = Mod
            n = T.int64()
            with R.dataflow():
                y = R.call_tir(cls.kernel, (x,), out_ty=R.Tensor((n,), "float32", "llvm:0"))
                z = R.call_tir(cls.kernel, (y,), out_ty=R.Tensor((n,), "float32", "llvm:0"))
                R.output(z)
            return z

    if bound is not None:
        Mod["main"] = Mod["main"].with_attr("tir_var_upper_bound", {"n": bound})
    (memory,) = memory_of(LowerToVM()(Mod))
    values = [storage.nbytes for storage in memory.storages if storage.use == "value"]
    assert memory.upper_bounds == ({} if bound is None else {"n": bound})
    assert values == (["((((n * 4) + 63) // 64) * 64)"] if bound is None else [64])


def test_a_region_may_read_a_variable_that_is_a_constant():
    @ir_module(V2, (V2, 1))
    def Mod(x: R.Tensor((6,), "float32", "llvm:0")):
        with R.dataflow():
            a = R.exp(x)
            extents: R.Tensor((1,), "int64", "llvm:1") = R.shape_to_tensor(R.shape_of(a))
            there = R.add(extents, extents)
            here = R.to_vdevice(there, "llvm:0")
            doubled = R.add(here, here)
            scores = R.tanh(a)
            R.output(doubled, scores)
        return (doubled, scores)

    exe = rh.compile(Mod)
    slots = {region.name: len(region.slots) for region in exe.metadata.regions}
    steps = [step for memory in exe.metadata.memory for step in memory.regions]
    assert steps and all(len(step.slots) == slots[step.region] for step in steps)
    x = fresh_rng().standard_normal(6).astype("float32")
    doubled, scores = rh.vm.VirtualMachine(exe)["main"](x)
    np.testing.assert_array_equal(doubled.numpy(), [24])
    np.testing.assert_allclose(scores.numpy(), np.tanh(np.exp(x)), rtol=1e-5)
