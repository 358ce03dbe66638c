"""Modules compute the same with and without command buffers: every kind of value."""

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from models.with_and_without import V4, machines, normal, same

V2 = {"kind": "llvm", "mcpu": "x86-64-v2"}


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int64", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("shape", [(), (1,), (7, 3), (0, 3)])
def test_element_types_and_extents(dtype, shape):
    """Each value copies the one before the last, and reads the last one too: else it would be a view, not a kernel."""
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
    """The symbol occurs in expressions and shapes only: no tensor has it as an extent."""

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


def planned(mod, command_buffers):
    """Bytes that a lowered module allocates for its values."""
    lowered = rh.get_pipeline(command_buffers)(mod)
    sizes = []
    relax.analysis.post_order_visit(
        lowered["main"],
        lambda e: (
            sizes.append(int(e.args[0].values[0]))
            if isinstance(e, relax.Call) and getattr(e.op, "name", "").endswith("alloc_storage")
            else None
        ),
    )
    return sum(sizes)


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
