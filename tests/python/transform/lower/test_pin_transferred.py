"""PinTransferred: values that a CPU computes and sends to a GPU are in pinned memory."""

import gc

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from modules import ir_module
from relax_hetero.artifact.metadata import body_symbol
from relax_hetero.driver.compile import memory_plan_of
from relax_hetero.transform import FormSchedules, LowerToVM, PinTransferred
from relax_hetero.vm.device import memory_pools
from relax_hetero.vm.device.builtins import running_on
from relax_hetero.vm.device.cuda_library import CudaLibrary
from seeds import fresh_rng
from vm.fake_cuda import FakeCuda

CUDA = {"kind": "cuda", "arch": "sm_90"}


def test_large_values_sent_to_a_gpu_are_pinned():
    """Sent values of 128 KB and views of them are pinned; values that stay and smaller ones are not."""

    @ir_module("llvm", CUDA)
    class Before:
        @T.prim_func(private=True, s_tir=True)
        def kernel(a: T.handle, b: T.handle):
            T.evaluate(0)

        @R.function(pure=False)
        def main(x: R.Tensor((32768,), "float32", "llvm:0"), room: R.Tensor(ndim=1, dtype="float32", vdevice="cuda:0")):
            cls = Before
            a: R.Tensor((32768,), "float32", "llvm:0") = R.builtin.alloc_tensor(R.shape([32768]), "float32", 0)
            cls.kernel(x, a)
            b: R.Tensor((32768,), "float32", "llvm:0") = R.builtin.alloc_tensor(R.shape([32768]), "float32", 0)
            cls.kernel(a, b)
            c: R.Tensor((32767,), "float32", "llvm:0") = R.builtin.alloc_tensor(R.shape([32767]), "float32", 0)
            cls.kernel(a, c)
            d: R.Tensor((65536,), "int16", "llvm:0") = R.builtin.alloc_tensor(R.shape([65536]), "int16", 0)
            cls.kernel(b, d)
            e: R.Tensor((256, 256), "int16", "llvm:0") = R.reshape(d, R.shape([256, 256]))
            cls.kernel(b, a)
            p = R.call_packed("relax_hetero.to_device", a, 1, 0, room, ty_args=R.Tensor(ndim=1, dtype="float32"))
            q = R.call_packed("relax_hetero.to_device", c, 1, 0, room, ty_args=R.Tensor(ndim=1, dtype="float32"))
            r = R.call_packed("relax_hetero.to_device", e, 1, 0, ty_args=R.Tensor(ndim=2, dtype="int16"))
            return (p, q, r)

    @ir_module("llvm", CUDA)
    class Expected:
        @T.prim_func(private=True, s_tir=True)
        def kernel(a: T.handle, b: T.handle):
            T.evaluate(0)

        @R.function(pure=False)
        def main(x: R.Tensor((32768,), "float32", "llvm:0"), room: R.Tensor(ndim=1, dtype="float32", vdevice="cuda:0")):
            cls = Expected
            a: R.Tensor((32768,), "float32", "llvm:0") = R.builtin.alloc_tensor(
                R.shape([32768]), "float32", 0, "pinned"
            )
            cls.kernel(x, a)
            b: R.Tensor((32768,), "float32", "llvm:0") = R.builtin.alloc_tensor(R.shape([32768]), "float32", 0)
            cls.kernel(a, b)
            c: R.Tensor((32767,), "float32", "llvm:0") = R.builtin.alloc_tensor(R.shape([32767]), "float32", 0)
            cls.kernel(a, c)
            d: R.Tensor((65536,), "int16", "llvm:0") = R.builtin.alloc_tensor(R.shape([65536]), "int16", 0, "pinned")
            cls.kernel(b, d)
            e: R.Tensor((256, 256), "int16", "llvm:0") = R.reshape(d, R.shape([256, 256]))
            cls.kernel(b, a)
            p = R.call_packed("relax_hetero.to_device", a, 1, 0, room, ty_args=R.Tensor(ndim=1, dtype="float32"))
            q = R.call_packed("relax_hetero.to_device", c, 1, 0, room, ty_args=R.Tensor(ndim=1, dtype="float32"))
            r = R.call_packed("relax_hetero.to_device", e, 1, 0, ty_args=R.Tensor(ndim=2, dtype="int16"))
            return (p, q, r)

    after = PinTransferred()(Before)
    assert_structural_equal(after, Expected)
    assert_structural_equal(PinTransferred()(after), Expected)


def scopes(func):
    """The memory scopes of a function's allocations, by variable."""
    by_name = {}

    def look(body):
        for block in body.blocks:
            for binding in block.bindings:
                value = binding.value
                if isinstance(value, relax.If):
                    look(value.true_branch)
                    look(value.false_branch)
                elif getattr(getattr(value, "op", None), "name", "") == "relax.builtin.alloc_tensor":
                    by_name[binding.var.name] = value.args[3].value

    look(func.body)
    return by_name


def test_branches_other_cpus_and_symbolic_sizes():
    """Both branches of a sent value, also under another CPU's name; values on a GPU, and values sent to a CPU, stay."""

    @ir_module("llvm", "llvm:1", CUDA, pure=False)
    def Mod(x: R.Tensor(("n", "k"), "float32", "llvm:0"), c: R.Tensor((), "bool", "llvm:1")):
        n, k = T.int64(), T.int64()
        R.func_attr({"tir_var_upper_bound": {"k": 32}})
        if c:
            a: R.Tensor((n,), "float32", "llvm:0") = R.builtin.alloc_tensor(R.shape([n]), "float32", 0)
            y: R.Tensor((n,), "float32", "llvm:0") = a
        else:
            b: R.Tensor((n,), "float32", "llvm:0") = R.builtin.alloc_tensor(R.shape([n]), "float32", 0)
            y: R.Tensor((n,), "float32", "llvm:0") = b
        z = R.call_packed("relax_hetero.to_device", y, 1, 0, ty_args=R.Tensor((n,), "float32", "llvm:1"))
        p = R.call_packed("relax_hetero.to_device", z, 2, 0, ty_args=R.Tensor((n,), "float32", "cuda:0"))
        d: R.Tensor((k, 1023), "float32", "llvm:0") = R.builtin.alloc_tensor(R.shape([k, 1023]), "float32", 0)
        q = R.call_packed("relax_hetero.to_device", d, 2, 0, ty_args=R.Tensor((k, 1023), "float32", "cuda:0"))
        e: R.Tensor((k, 1024), "float32", "llvm:0") = R.builtin.alloc_tensor(R.shape([k, 1024]), "float32", 0)
        r = R.call_packed("relax_hetero.to_device", e, 2, 0, ty_args=R.Tensor((k, 1024), "float32", "cuda:0"))
        f: R.Tensor((n,), "float32", "llvm:0") = R.builtin.alloc_tensor(R.shape([n]), "float32", 0)
        s = R.call_packed("relax_hetero.to_device", f, 1, 0, ty_args=R.Tensor((n,), "float32", "llvm:1"))
        g: R.Tensor((n,), "float32", "cuda:0") = R.builtin.alloc_tensor(R.shape([n]), "float32", 2)
        t = R.call_packed("relax_hetero.to_device", g, 2, 1, ty_args=R.Tensor((n,), "float32", "cuda:0"))
        return (p, q, r, s, t)

    by_name = scopes(PinTransferred()(Mod)["main"])
    assert by_name == {"a": "pinned", "b": "pinned", "d": "global", "e": "pinned", "f": "global", "g": "global"}


# On the CPU two tensors that a GPU gets and one that it does not; all three leave.
@ir_module("llvm", CUDA)
def Pipeline(x: R.Tensor((256, 512), "float32", "llvm:0"), w: R.Tensor((512, 512), "float32", "llvm:0")):
    with R.dataflow():
        a: R.Tensor((256, 512), "float32", "llvm:0") = R.exp(x)
        stays: R.Tensor((256, 512), "float32", "llvm:0") = R.tanh(a)
        b: R.Tensor((512, 512), "float32", "llvm:0") = R.exp(w)
        there: R.Tensor((256, 512), "float32", "cuda:0") = R.to_vdevice(a, "cuda:0")
        there_too: R.Tensor((512, 512), "float32", "cuda:0") = R.to_vdevice(b, "cuda:0")
        y: R.Tensor((256, 512), "float32", "cuda:0") = R.matmul(there, there_too)
        R.output(stays, y)
    return (y, stays)


def pinned_bytes(func):
    return [
        int(b.value.args[0].values[0])
        for block in func.body.blocks
        for b in block.bindings
        if isinstance(b.value, relax.Call) and getattr(b.value.op, "global_symbol", "") == "relax_hetero.pinned_storage"
    ]


def formed(mod):
    """A module whose dispatches are formed."""
    for step in rh.get_pipeline(command_buffers=False).passes:
        mod = step(mod)
        if step.info.name == "FormDispatches":
            return mod


def test_results_of_steps_that_a_later_step_sends():
    mod = FormSchedules()(formed(Pipeline))
    lowered = LowerToVM()(mod)
    functions = {gv.name_hint: func for gv, func in lowered.functions.items() if isinstance(func, relax.Function)}
    assert pinned_bytes(functions.pop("main")) == [256 * 512 * 4, 512 * 512 * 4]
    assert sorted(sum((pinned_bytes(func) for func in functions.values()), [])) == [256 * 512 * 4, 512 * 512 * 4]


def test_the_memory_plan_counts_it():
    """Plan of a call that runs alone; pinned memory is the CPU's, and `stays` is a result."""
    mod = formed(Pipeline)
    cpu, _ = memory_plan_of(mod).at("main").devices
    assert (cpu.transient, cpu.results) == ((256 + 512) * 512 * 4, 256 * 512 * 4)


@ir_module("llvm")
class Doubled:
    """x + x by way of a tensor in pinned memory and of one that is not; both are returned."""

    @T.prim_func(private=True, s_tir=True)
    def double(x: T.handle, y: T.handle):
        n = T.int64()
        X = T.match_buffer(x, (n, T.int64(4)), "float32")
        Y = T.match_buffer(y, (n, T.int64(4)), "float32")
        for i, j in T.grid(n, T.int64(4)):
            with T.sblock("Y"):
                vi, vj = T.axis.remap("SS", [i, j])
                Y[vi, vj] = X[vi, vj] + X[vi, vj]

    @R.function(pure=False)
    def main(x: R.Tensor(("n", 4), "float32", "llvm:0")):
        n = T.int64()
        cls = Doubled
        t: R.Tensor((n, 4), "float32", "llvm:0") = R.builtin.alloc_tensor(R.shape([n, 4]), "float32", 0, "pinned")
        cls.double(x, t)
        y: R.Tensor((n, 4), "float32", "llvm:0") = R.builtin.alloc_tensor(R.shape([n, 4]), "float32", 0, "pinned")
        cls.double(t, y)
        z: R.Tensor((n, 4), "float32", "llvm:0") = R.builtin.alloc_tensor(R.shape([n, 4]), "float32", 0)
        cls.double(t, z)
        return (y, z)


@pytest.fixture(scope="module")
def doubled():
    return rh.compile(Doubled)


def test_a_machine_without_gpus_takes_plain_memory(doubled):
    vm = rh.vm.VirtualMachine(doubled, [tvm.cpu(2)])
    for rows in (0, 3, 20_000):
        x = fresh_rng().random((rows, 4), "float32")
        for result in vm["main"](x):
            assert str(result.device) == "cpu:2"
            np.testing.assert_array_equal(result.numpy(), 4 * x)
    symbols = {row.symbol for row in vm.profile("main", np.ones((3, 4), "float32")).rows}
    assert symbols == {"double", "shape_func", "(allocation, shapes, bytecode)"}


def test_with_a_gpu_it_is_pinned_and_given_back(doubled, monkeypatch):
    cuda = FakeCuda()
    library = CudaLibrary(cuda.library, cuda.library)
    monkeypatch.setattr(memory_pools, "cuda_library", lambda: library)
    monkeypatch.setattr(memory_pools, "TRANSFER_BYTES", 4 * memory_pools.PINNED_BYTES)
    monkeypatch.setattr(memory_pools, "_pools", {})
    machine = doubled.runnable_module()["vm_load_executable"]()
    machine["vm_initialization"](1, 0, 2, 1, 0, 2)
    # Each size twice; beyond the limit the first of both (TVM's machine has the last result still), and then none.
    for nbytes, is_pinned, in_blocks in (
        (memory_pools.PINNED_BYTES // 2, False, 0),
        (memory_pools.PINNED_BYTES, True, 2 * memory_pools.PINNED_BYTES),
        (3 * memory_pools.PINNED_BYTES, False, 4 * memory_pools.PINNED_BYTES),
        (5 * memory_pools.PINNED_BYTES, False, 0),
    ):
        x = fresh_rng().random((nbytes // 16, 4), "float32")
        with running_on((tvm.cpu(0), tvm.cuda(0)), ("global", "global")):
            y, z = machine[body_symbol("main")](tvm.runtime.tensor(x))
        np.testing.assert_array_equal(y.numpy(), 4 * x)
        np.testing.assert_array_equal(z.numpy(), 4 * x)
        assert library.is_pinned(y.data_ptr()) == is_pinned and not library.is_pinned(z.data_ptr())
        assert sum(pool.nbytes for pool in memory_pools._pools.values()) == in_blocks
        del y, z
        gc.collect()
