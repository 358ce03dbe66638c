"""Modules compiled with command buffers compute what they compute without: every kind of kernel, value and failure."""

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh

V4 = {"kind": "llvm", "mcpu": "x86-64-v4"}
V2 = {"kind": "llvm", "mcpu": "x86-64-v2"}


def flat(out):
    """The arrays of nested tuples of tensors."""
    return [array for field in out for array in flat(field)] if isinstance(out, tuple) else [out.numpy()]


def regions(exe):
    """How many command buffers an executable has."""
    return len(exe.metadata.regions)


def machines(mod, buffers=1):
    """A machine with command buffers, and one without."""
    exe = rh.compile(mod)
    assert regions(exe) == buffers
    return rh.vm.VirtualMachine(exe), rh.vm.VirtualMachine(rh.compile(mod, command_buffers=False))


def same(mod, *calls, buffers=1):
    """The results of `main` for each of several argument lists, which both machines agree on; other calls between."""
    on, off = machines(mod, buffers)
    results = []
    for args in calls:
        got, want = flat(on["main"](*args)), flat(off["main"](*args))
        assert [(a.shape, a.dtype) for a in got] == [(a.shape, a.dtype) for a in want]
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)
        results.append(got)
    for args, want in zip(calls, results, strict=True):  # again: nothing is left over from the calls between
        for a, b in zip(flat(on["main"](*args)), want, strict=True):
            np.testing.assert_array_equal(a, b)
    return results


def normal(*shape, dtype="float32", seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int64", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("shape", [(), (1,), (7, 3), (0, 3)])
def test_element_types_and_extents(dtype, shape):
    """Each value copies the one before the last, and reads the last one too: else it would be a view, and no kernel."""
    axes = len(shape)

    def copy():
        a, b, c = (tvm.tirx.decl_buffer(shape, dtype, buffer) for buffer in "abc")
        indices = [tvm.tirx.Var(f"i{axis}", "int64") for axis in range(axes)]
        stores = [tvm.tirx.BufferStore(c, tvm.tirx.BufferLoad(source, indices), indices) for source in (b, a)]
        body = tvm.tirx.SeqStmt(stores)
        for index, extent in zip(reversed(indices), reversed(shape), strict=True):
            body = tvm.tirx.For(index, tvm.tirx.const(0, "int64"), tvm.tirx.const(extent, "int64"), 0, body)
        return tvm.tirx.PrimFunc([a, b, c], body).with_attr({"op_pattern": 8})

    ty = relax.TensorType(shape, dtype)
    builder = relax.BlockBuilder()
    x, y = relax.Var("x", ty), relax.Var("y", ty)
    with builder.function("main", [x, y]):
        with builder.dataflow():
            values = [x, y]
            for i in range(6):
                values.append(builder.emit(relax.call_tir(builder.add_func(copy(), f"copy{i}"), values[-2:], ty)))
            out = builder.emit_output(relax.Tuple(values[-2:]))
        builder.emit_func_output(out)
    rng = np.random.default_rng(len(shape))
    np_dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    arrays = [rng.integers(0, 2 if dtype == "bool" else 100, shape).astype(np_dtype) for _ in range(4)]
    for got, want in zip(same(builder.get(), arrays[:2], arrays[2:]), (arrays[:2], arrays[2:]), strict=True):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a.astype("float64"), b.astype("float64"))


@I.ir_module
class Shared:
    """Kernels of several results, of scalars and of symbolic extents."""

    I.module_global_infos({"vdevice": [I.vdevice(V4, 0)]})

    @T.prim_func(private=True, s_tir=True)
    def parts(a: T.handle, b: T.handle, c: T.handle):
        """Twice and minus `a`."""
        T.func_attr({"op_pattern": 8})
        n = T.int64()
        A = T.match_buffer(a, (n, 3), "float32")
        B = T.match_buffer(b, (n, 3), "float32")
        C = T.match_buffer(c, (n, 3), "float32")
        for i, j in T.grid(n, 3):
            B[i, j] = A[i, j] * T.float32(2)
            C[i, j] = T.float32(0) - A[i, j]

    @T.prim_func(private=True, s_tir=True)
    def times(a: T.handle, k: T.int64, b: T.handle):
        """`a` times `k`, flat."""
        T.func_attr({"op_pattern": 8})
        n = T.int32()
        A = T.match_buffer(a, (n, 3), "float32")
        B = T.match_buffer(b, (n * 3,), "float32")
        for i, j in T.grid(n, 3):
            B[i * 3 + j] = A[i, j] * T.Cast("float32", k)

    @T.prim_func(private=True, s_tir=True)
    def plus(a: T.handle, b: T.handle, c: T.handle):
        T.func_attr({"op_pattern": 8})
        n = T.int64()
        A = T.match_buffer(a, (n,), "float32")
        B = T.match_buffer(b, (n,), "float32")
        C = T.match_buffer(c, (n,), "float32")
        for i in range(n):
            C[i] = A[i] + B[i]

    @R.function
    def main(x: R.Tensor(("n", 3), "float32", "llvm:0"), k: R.Prim("int64")):
        n = T.int64()
        cls = Shared
        with R.dataflow():
            p = R.call_tir(
                cls.parts, (x,), out_ty=[R.Tensor((n, 3), "float32", "llvm:0"), R.Tensor((n, 3), "float32", "llvm:0")]
            )
            double = p[0]
            minus = p[1]
            t = R.call_tir(cls.times, (double, k), out_ty=R.Tensor((n * 3,), "float32", "llvm:0"))
            u = R.call_tir(cls.times, (minus, n), out_ty=R.Tensor((n * 3,), "float32", "llvm:0"))
            v = R.call_tir(cls.plus, (t, u), out_ty=R.Tensor((n * 3,), "float32", "llvm:0"))
            w = R.call_tir(cls.plus, (v, v), out_ty=R.Tensor((n * 3,), "float32", "llvm:0"))
            square = R.reshape(w, R.shape([n, 3]))
            again = square
            q = R.call_tir(
                cls.parts,
                (again,),
                out_ty=[R.Tensor((n, 3), "float32", "llvm:0"), R.Tensor((n, 3), "float32", "llvm:0")],
            )
            gv = (p, minus, square, w, q, w)
            R.output(gv)
        return gv


def test_tuples_views_scalars_and_symbolic_extents():
    calls = [(normal(n, 3), k) for n, k in ((1, 2), (5, -3), (0, 1), (64, 0))]
    for (x, k), (double, minus, *rest) in zip(calls, same(Shared, *calls), strict=True):
        np.testing.assert_array_equal(double, 2 * x)
        np.testing.assert_array_equal(minus, -x)
        twice = minus2, square, w, double2, minus3, w2 = rest
        flat = 2 * ((2 * x) * np.float32(k) + -x * np.float32(len(x))).ravel()
        for got, want in zip(twice, (-x, flat, flat, 2 * flat, -flat, flat), strict=True):
            np.testing.assert_allclose(got.ravel(), want.ravel(), rtol=1e-6)


@I.ir_module
class OnlyInProducts:
    """The symbol is in expressions and shapes only: no tensor's extent says it."""

    I.module_global_infos({"vdevice": [I.vdevice(V4, 0)]})

    @T.prim_func(private=True, s_tir=True)
    def grow(a: T.handle, b: T.handle):
        T.func_attr({"op_pattern": 8})
        n = T.int64()
        A = T.match_buffer(a, (n,), "float32")
        B = T.match_buffer(b, (n,), "float32")
        for i in range(n):
            B[i] = A[i] + T.Cast("float32", i)

    @R.function
    def main(s: R.Shape(["n"]), x: R.Tensor(("n * 2",), "float32", "llvm:0")):
        n = T.int64()
        cls = OnlyInProducts
        with R.dataflow():
            a = R.call_tir(cls.grow, (x,), out_ty=R.Tensor((n * 2,), "float32", "llvm:0"))
            b = R.call_tir(cls.grow, (a,), out_ty=R.Tensor((n * 2,), "float32", "llvm:0"))
            c = R.call_tir(cls.grow, (b,), out_ty=R.Tensor((n * 2,), "float32", "llvm:0"))
            R.output(c)
        return c


def test_symbols_that_no_extent_says():
    on, off = machines(OnlyInProducts)
    for n in (3, 0, 20):
        x = normal(2 * n)
        want = x + 3 * np.arange(2 * n, dtype="float32")
        for machine in (on, off):
            got = machine["main"](tvm.runtime.ShapeTuple([n]) if hasattr(tvm.runtime, "ShapeTuple") else (n,), x)
            np.testing.assert_allclose(got.numpy(), want, rtol=1e-6)


@I.ir_module
class Branches:
    I.module_global_infos({"vdevice": [I.vdevice(V4, 0), I.vdevice(V2, 1)]})

    @T.prim_func(private=True, s_tir=True)
    def double(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
        T.func_attr({"op_pattern": 8})
        for i in range(4):
            B[i] = A[i] * T.float32(2)

    @T.prim_func(private=True, s_tir=True)
    def next(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
        T.func_attr({"op_pattern": 8})
        for i in range(4):
            B[i] = A[i] + T.float32(1)

    @R.function
    def main(x: R.Tensor((4,), "float32", "llvm:0"), choice: R.Tensor((), "bool", "llvm:1")):
        cls = Branches
        a = R.call_tir(cls.double, (x,), out_ty=R.Tensor((4,), "float32", "llvm:0"))
        b = R.call_tir(cls.next, (a,), out_ty=R.Tensor((4,), "float32", "llvm:0"))
        if choice:
            c = R.call_tir(cls.double, (b,), out_ty=R.Tensor((4,), "float32", "llvm:0"))
            d = R.call_tir(cls.double, (c,), out_ty=R.Tensor((4,), "float32", "llvm:0"))
            e = d
        else:
            f = R.call_tir(cls.next, (a,), out_ty=R.Tensor((4,), "float32", "llvm:0"))
            g = R.call_tir(cls.next, (f,), out_ty=R.Tensor((4,), "float32", "llvm:0"))
            e = g
        t = R.to_vdevice(e, "llvm:1")
        h = R.call_tir(cls.double, (t,), out_ty=R.Tensor((4,), "float32", "llvm:1"))
        i = R.call_tir(cls.next, (h,), out_ty=R.Tensor((4,), "float32", "llvm:1"))
        return (i, b)


def test_branches_and_two_devices():
    x = normal(4)
    (yes, _), (no, _) = same(Branches, (x, np.array(True)), (x, np.array(False)), buffers=4)
    np.testing.assert_array_equal(yes, (2 * x + 1) * 8 + 1)
    np.testing.assert_array_equal(no, (2 * x + 2) * 2 + 1)


def chain(kernel, count=3, target=V4, shape=(4,)):
    """A module whose `main` runs a kernel of one float tensor again and again."""
    device = rh.VDevice(target)
    ty = relax.TensorType(shape, "float32", device)
    builder = relax.BlockBuilder()
    x = relax.Var("x", ty)
    with builder.function("main", [x]):
        value = x
        with builder.dataflow():
            for _ in range(count):
                value = builder.emit(relax.call_tir(builder.add_func(kernel, "kernel"), (value,), ty))
            out = builder.emit_output(value)
        builder.emit_func_output(out)
    mod = builder.get()
    mod.update_global_info("vdevice", [device])
    return mod


@T.prim_func(private=True, s_tir=True)
def asks(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
    """Calls a packed function, which may fail."""
    T.func_attr({"op_pattern": 8})
    T.evaluate(T.call_packed("test.command_buffers.ask", A[0]))
    for i in range(4):
        B[i] = A[i] + T.float32(1)


@pytest.mark.parametrize("target", [V4, "c"])
def test_a_kernel_that_fails_ends_the_call(target):
    asked = []

    def ask(value):
        asked.append(value)
        if value > 1.5:
            raise ValueError("more than 1.5")

    tvm.register_global_func("test.command_buffers.ask", ask, override=True)
    on, off = machines(chain(asks, target=target))
    for machine in (on, off):
        asked.clear()
        np.testing.assert_array_equal(machine["main"](np.full(4, -2, "float32")).numpy(), 1)
        assert asked == [-2, -1, 0]
        asked.clear()
        with pytest.raises(Exception, match="more than 1.5"):
            machine["main"](np.ones(4, "float32"))
        assert asked == [1, 2]
        np.testing.assert_array_equal(machine["main"](np.full(4, -3, "float32")).numpy(), 0)


@T.prim_func(private=True, s_tir=True)
def turns(A: T.Buffer((2, 24, 40), "float32"), B: T.Buffer((2, 24, 40), "float32")):
    """Has a temporary that is too large for the stack, written as a whole before any of it is read."""
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


def planned(mod, command_buffers):
    """Bytes that a lowered module sets aside for what it computes."""
    lowered = rh.get_pipeline(command_buffers)(mod)
    found = []
    relax.analysis.post_order_visit(
        lowered["main"],
        lambda e: (
            found.append(int(e.args[0].values[0]))
            if isinstance(e, relax.Call) and getattr(e.op, "name", "").endswith("alloc_storage")
            else None
        ),
    )
    return sum(found)


def test_arenas_take_no_more_than_storage_did():
    """Tensors of several sizes, one of which lives on: a region's arena against TVM's planning of all of them."""
    device = rh.VDevice(V4)
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((64, 96), "float32", device))
    with builder.function("main", [x]):
        with builder.dataflow():
            value = first = x
            for width in (512, 64, 256, 32, 96):
                weight = relax.const(normal(int(value.ty.shape.values[1]), width))
                value = builder.emit(relax.op.nn.relu(builder.emit(relax.op.matmul(value, weight))))
            out = builder.emit_output(relax.op.nn.softmax(builder.emit(relax.op.add(value, first))))
        builder.emit_func_output(out)
    mod = builder.get()
    mod.update_global_info("vdevice", [device])
    with_buffers, without = planned(mod, True), planned(mod, False)
    assert 64 * 512 * 4 <= with_buffers <= without
