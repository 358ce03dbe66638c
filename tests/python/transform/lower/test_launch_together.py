"""LaunchTogether: nothing but launches between the command buffers of a mesh's GPUs."""

import tvm
from tvm.ir import assert_structural_equal
from tvm.script import relax as R
from tvm.script import tirx as T

from modules import ir_module
from relax_hetero.artifact.commands import RegionSpec
from relax_hetero.transform import LaunchTogether
from relax_hetero.transform.ir.rewriting import copy_module
from relax_hetero.transform.record.region_attrs import with_region

CUDA = {"kind": "cuda", "arch": "sm_90"}


def with_regions(mod: tvm.IRModule) -> tvm.IRModule:
    """The module, with its PrimFuncs as command buffers of the device in their names."""
    functions = dict(mod.functions.items())
    for gv, func in mod.functions.items():
        if gv.name_hint.startswith("graph_"):
            region = RegionSpec(gv.name_hint, "main", int(gv.name_hint[-1]), (), (), (), 0, ())
            functions[gv] = with_region(func, region)
    return copy_module(mod, functions)


@ir_module(CUDA, (CUDA, 1))
class Before:
    @T.prim_func(private=True, s_tir=True)
    def graph_0(a: T.handle, b: T.handle):
        T.evaluate(0)

    @T.prim_func(private=True, s_tir=True)
    def graph_1(a: T.handle, b: T.handle):
        T.evaluate(0)

    @R.function(private=True, pure=False)
    def called(x: R.Tensor((2,), "int64", "cuda:0")) -> R.Tensor((2,), "int64"):
        cls = Before
        s: R.Any = R.memory.alloc_storage(R.shape([64]), 0, "global", "uint8")
        a: R.Tensor((2,), "int64") = R.memory.alloc_tensor(s, 0, R.shape([2]), "int64", 0)
        cls.graph_0(x, a)
        R.memory.kill_tensor(s)
        return a

    @R.function(pure=False)
    def main(x: R.Tensor((2,), "int64", "cuda:0")) -> R.Tensor((2,), "int64"):
        cls = Before
        m: R.Tensor((2,), "int64") = R.call_packed("relax_hetero.peer_memory", 0, 64, 0, 1, ty_args=R.Any)
        n: R.Tensor((2,), "int64") = R.call_packed("relax_hetero.peer_memory", 1, 64, 0, 1, ty_args=R.Any)
        s: R.Any = R.memory.alloc_storage(R.shape([64]), 0, "global", "uint8")
        a: R.Tensor((2,), "int64") = R.memory.alloc_tensor(s, 0, R.shape([2]), "int64", 0)
        cls.graph_0(m, a)
        R.memory.kill_tensor(m)
        t: R.Any = R.memory.alloc_storage(R.shape([64]), 1, "global", "uint8")
        b: R.Tensor((2,), "int64") = R.memory.alloc_tensor(t, 0, R.shape([2]), "int64", 1)
        cls.graph_1(n, b)
        R.memory.kill_tensor(n)
        _ = R.call_packed("test.read", a, ty_args=R.Any)
        # The second launch of a GPU comes after what the first one releases.
        u: R.Any = R.memory.alloc_storage(R.shape([64]), 1, "global", "uint8")
        c: R.Tensor((2,), "int64") = R.memory.alloc_tensor(u, 0, R.shape([2]), "int64", 1)
        cls.graph_1(b, c)
        R.memory.kill_tensor(b)
        d: R.Tensor((2,), "int64") = R.memory.alloc_tensor(t, 0, R.shape([2]), "int64", 1)
        cls.graph_1(c, d)
        R.memory.kill_tensor(c)
        return d


@ir_module(CUDA, (CUDA, 1))
class Expected:
    @T.prim_func(private=True, s_tir=True)
    def graph_0(a: T.handle, b: T.handle):
        T.evaluate(0)

    @T.prim_func(private=True, s_tir=True)
    def graph_1(a: T.handle, b: T.handle):
        T.evaluate(0)

    @R.function(private=True, pure=False)
    def called(x: R.Tensor((2,), "int64", "cuda:0")) -> R.Tensor((2,), "int64"):
        cls = Expected
        s: R.Any = R.memory.alloc_storage(R.shape([64]), 0, "global", "uint8")
        a: R.Tensor((2,), "int64") = R.memory.alloc_tensor(s, 0, R.shape([2]), "int64", 0)
        cls.graph_0(x, a)
        R.call_packed("relax_hetero.await_launches", ty_args=R.Tuple())
        R.memory.kill_tensor(s)
        return a

    @R.function(pure=False)
    def main(x: R.Tensor((2,), "int64", "cuda:0")) -> R.Tensor((2,), "int64"):
        cls = Expected
        m: R.Tensor((2,), "int64") = R.call_packed("relax_hetero.peer_memory", 0, 64, 0, 1, ty_args=R.Any)
        n: R.Tensor((2,), "int64") = R.call_packed("relax_hetero.peer_memory", 1, 64, 0, 1, ty_args=R.Any)
        s: R.Any = R.memory.alloc_storage(R.shape([64]), 0, "global", "uint8")
        a: R.Tensor((2,), "int64") = R.memory.alloc_tensor(s, 0, R.shape([2]), "int64", 0)
        t: R.Any = R.memory.alloc_storage(R.shape([64]), 1, "global", "uint8")
        b: R.Tensor((2,), "int64") = R.memory.alloc_tensor(t, 0, R.shape([2]), "int64", 1)
        cls.graph_0(m, a)
        cls.graph_1(n, b)
        R.call_packed("relax_hetero.await_launches", ty_args=R.Tuple())
        R.memory.kill_tensor(m)
        R.memory.kill_tensor(n)
        _ = R.call_packed("test.read", a, ty_args=R.Any)
        u: R.Any = R.memory.alloc_storage(R.shape([64]), 1, "global", "uint8")
        c: R.Tensor((2,), "int64") = R.memory.alloc_tensor(u, 0, R.shape([2]), "int64", 1)
        d: R.Tensor((2,), "int64") = R.memory.alloc_tensor(t, 0, R.shape([2]), "int64", 1)
        cls.graph_1(b, c)
        R.call_packed("relax_hetero.await_launches", ty_args=R.Tuple())
        R.memory.kill_tensor(b)
        cls.graph_1(c, d)
        R.call_packed("relax_hetero.await_launches", ty_args=R.Tuple())
        R.memory.kill_tensor(c)
        return d


def test_launches_follow_each_other():
    after = LaunchTogether()(with_regions(Before))
    assert_structural_equal(after, with_regions(Expected))
    assert_structural_equal(LaunchTogether()(after), after)


def test_a_module_without_shared_memory_is_left_alone():
    @ir_module(CUDA, pure=False)
    def alone(x: R.Tensor((2,), "int64", "cuda:0")):
        y: R.Any = R.call_packed("test.read", x, ty_args=R.Any)
        return y

    for mod in (alone, Before):  # the PrimFuncs of `Before` are not command buffers
        assert_structural_equal(LaunchTogether()(mod), mod)
