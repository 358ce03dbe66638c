"""Every kind of kernel in a command buffer: those that fail, fork, call others, are called by others, need room."""

from functools import partial

import numpy as np
import pytest
import tvm
from tvm import relax, te
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from models.with_and_without import V4, chain, machines, normal, same


@T.prim_func(private=True, s_tir=True)
def asks(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
    """Calls a packed function, which may fail."""
    T.func_attr({"op_pattern": 8})
    T.evaluate(T.call_packed("test.command_buffers.ask", A[0]))
    for i in range(4):
        B[i] = A[i] + T.float32(1)


@pytest.mark.parametrize("target", [V4, "c"])
def test_a_kernel_that_fails_ends_the_call(target):
    values = []

    def ask(value):
        values.append(value)
        if value > 1.5:
            raise ValueError("more than 1.5")

    tvm.register_global_func("test.command_buffers.ask", ask, override=True)
    on, off = machines(chain(asks, target=target))
    for machine in (on, off):
        values.clear()
        np.testing.assert_array_equal(machine["main"](np.full(4, -2, "float32")).numpy(), 1)
        assert values == [-2, -1, 0]
        values.clear()
        with pytest.raises(Exception, match="more than 1.5"):
            machine["main"](np.ones(4, "float32"))
        assert values == [1, 2]
        np.testing.assert_array_equal(machine["main"](np.full(4, -3, "float32")).numpy(), 0)


@T.prim_func(private=True, s_tir=True)
def turns(A: T.Buffer((2, 24, 40), "float32"), B: T.Buffer((2, 24, 40), "float32")):
    """Kernel with a temporary that is too large for the stack, fully written before it is read."""
    T.func_attr({"op_pattern": 8})
    with T.sblock("root"):
        doubled = T.alloc_buffer((1920,), "float32")
        for i in range(1920):
            doubled[i] = A[i // 960, i // 40 % 24, i % 40] * T.float32(2)
        for i in range(1920):
            B[i // 960, i // 40 % 24, i % 40] = doubled[1919 - i] + T.float32(1)


def test_kernels_with_temporaries_join_where_this_library_builds_them():
    x = normal(2, 24, 40)
    want = x
    for _ in range(3):
        want = want.ravel()[::-1].reshape(x.shape) * np.float32(2) + np.float32(1)
    mod = chain(turns, shape=(2, 24, 40))
    on, _ = machines(mod)
    np.testing.assert_array_equal(on["main"](x).numpy(), want)
    on, _ = machines(chain(turns, target="c", shape=(2, 24, 40)), buffers=0)
    np.testing.assert_array_equal(on["main"](x).numpy(), want)
    stock = tvm.compile(mod, target=tvm.target.Target(V4), relax_pipeline=rh.get_pipeline())
    machine = relax.VirtualMachine(stock, tvm.cpu())
    np.testing.assert_array_equal(machine["main"](tvm.runtime.tensor(x)).numpy(), want)


def _one_more(a, last, i):
    return a[te.min(i, last)] + 1


def growing(count, target):
    """A module of distinct kernels: each adds one, and appends a copy of its last element."""
    device = rh.VDevice(target)
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((16,), "float32", device))
    with builder.function("main", [x]):
        value = x
        with builder.dataflow():
            for width in range(16, 16 + count):
                a = te.placeholder((width,), "float32", "a")
                computed = te.compute((width + 1,), partial(_one_more, a, width - 1))
                kernel = te.create_prim_func([a, computed]).with_attr("op_pattern", 8)
                ty = relax.TensorType((width + 1,), "float32", device)
                value = builder.emit(relax.call_tir(builder.add_func(kernel, f"step_{width}"), (value,), ty))
            out = builder.emit_output(value)
        builder.emit_func_output(out)
    mod = builder.get()
    mod.update_global_info("vdevice", [device])
    return mod


@pytest.mark.sampled(3)
@pytest.mark.parametrize("target", [V4, "c"])
def test_no_kernel_is_inlined_where_it_could_be_reordered(target):
    """A kernel loads what the one before stored, through variables that TVM tells LLVM are different memory."""
    mod, x = growing(90, target), np.arange(16, dtype="float32")
    want = np.concatenate([x, np.full(90, 15, "float32")]) + np.float32(90)
    on = rh.vm.VirtualMachine(rh.compile(mod))
    np.testing.assert_array_equal(on["main"](x).numpy(), want)
    if target != "c":
        stock = tvm.compile(mod, target=tvm.target.Target(V4), relax_pipeline=rh.get_pipeline())
        machine = relax.VirtualMachine(stock, tvm.cpu())
        np.testing.assert_array_equal(machine["main"](tvm.runtime.tensor(x)).numpy(), want)


def test_kernels_that_fork_threads_or_assert():
    @T.prim_func(private=True, s_tir=True)
    def kernel(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
        T.func_attr({"op_pattern": 8})
        assert A[0] < T.float32(10), "the first is ten or more"
        for i in T.parallel(4):
            B[i] = A[i] * T.float32(3)

    on, _ = machines(chain(kernel))
    np.testing.assert_array_equal(on["main"](np.ones(4, "float32")).numpy(), 27)
    with pytest.raises(Exception, match="the first is ten or more"):
        on["main"](np.full(4, 2, "float32"))
    np.testing.assert_array_equal(on["main"](np.ones(4, "float32")).numpy(), 27)


def test_arguments_at_any_address_numpy_has():
    """Vectors of the widest registers, whose aligned instructions fault on addresses like these."""

    @T.prim_func(private=True, s_tir=True)
    def kernel(A: T.Buffer((64,), "float32"), B: T.Buffer((64,), "float32")):
        T.func_attr({"op_pattern": 8})
        for i in range(4):
            for j in T.vectorized(16):
                B[i * 16 + j] = A[i * 16 + j] * T.float32(3)

    on, _ = machines(chain(kernel, shape=(64,)))
    memory = np.zeros(64 * 4 + 128, "uint8")
    for offset in (0, 16, 32, 48):
        start = -memory.ctypes.data % 64 + offset
        x = memory[start : start + 256].view("float32")
        x[:] = normal(64)
        np.testing.assert_allclose(on["main"](x).numpy(), 27 * x, rtol=1e-6)


@I.ir_module
class Nested:
    """`inner` is called by Relax, in a run and after it, and by another kernel; `shown` has a symbol."""

    I.module_global_infos({"vdevice": [I.vdevice(V4, 0)]})

    @T.prim_func(private=True, s_tir=True)
    def inner(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
        T.func_attr({"op_pattern": 8})
        for i in range(4):
            B[i] = A[i] + T.float32(1)

    @T.prim_func(private=True, s_tir=True)
    def helper(a: T.handle("float32"), b: T.handle("float32")):
        A = T.decl_buffer((4,), "float32", data=a)
        B = T.decl_buffer((4,), "float32", data=b)
        for i in range(4):
            B[i] = A[i] * T.float32(2)

    @T.prim_func(private=True, s_tir=True)
    def outer(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
        T.func_attr({"op_pattern": 8})
        Nested.helper(A.data, B.data)

    @T.prim_func(s_tir=True)
    def shown(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
        T.func_attr({"op_pattern": 8, "global_symbol": "shown"})
        for i in range(4):
            B[i] = A[i] - T.float32(5)

    @R.function(pure=False)
    def main(x: R.Tensor((4,), "float32", "llvm:0")):
        cls = Nested
        a = R.call_tir(cls.inner, (x,), out_ty=R.Tensor((4,), "float32", "llvm:0"))
        b = R.call_tir(cls.outer, (a,), out_ty=R.Tensor((4,), "float32", "llvm:0"))
        c = R.call_tir(cls.shown, (b,), out_ty=R.Tensor((4,), "float32", "llvm:0"))
        _ = R.call_packed("test.command_buffers.effect", c, ty_args=(R.Object,))
        d = R.call_tir(cls.inner, (c,), out_ty=R.Tensor((4,), "float32", "llvm:0"))
        return d


def test_kernels_that_others_call_too():
    seen = []
    tvm.register_global_func("test.command_buffers.effect", lambda c: seen.append(c.numpy().copy()), override=True)
    x = normal(4)
    ((got,),) = same(Nested, (x,))
    np.testing.assert_allclose(got, (x + 1) * 2 - 4, rtol=1e-6)
    assert len(seen) == 3
    exe = rh.compile(Nested)
    out = tvm.runtime.tensor(np.zeros(4, "float32"))
    (library,) = (library for library in exe.module.imports if library.implements_function("shown"))
    library["shown"](tvm.runtime.tensor(x), out)
    np.testing.assert_array_equal(out.numpy(), x - np.float32(5))
