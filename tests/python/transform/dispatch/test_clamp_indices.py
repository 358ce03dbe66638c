"""ClampIndices: with any indices and divisors, a kernel touches its own tensors only, and never ends the process."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import tirx as T

from modules import check_pass
from relax_hetero.transform import ClampIndices
from seeds import fresh_rng

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


@I.ir_module
class Before:
    @T.prim_func(s_tir=True)
    def gather(x: T.Buffer((10,), "float32"), index: T.Buffer((4,), "int32"), y: T.Buffer((4,), "float32")):
        for i in range(4):
            with T.sblock("gather"):
                v = T.axis.spatial(4, i)
                T.reads(x[index[v]], index[v])
                T.writes(y[v])
                y[v] = x[index[v]]

    @T.prim_func(s_tir=True)
    def scatter(index: T.Buffer((4,), "int32"), y: T.Buffer((10,), "float32")):
        for i in range(4):
            y[index[i]] = T.float32(1)

    @T.prim_func(s_tir=True)
    def remainder(a: T.Buffer((4,), "int32"), b: T.Buffer((4,), "int32"), y: T.Buffer((4,), "int32")):
        for i in range(4):
            y[i] = a[i] % b[i]


@I.ir_module
class Expected:
    @T.prim_func(s_tir=True)
    def gather(x: T.Buffer((10,), "float32"), index: T.Buffer((4,), "int32"), y: T.Buffer((4,), "float32")):
        T.func_attr({"relax_hetero.bounded": True})
        for i in range(4):
            with T.sblock("gather"):
                v = T.axis.spatial(4, i)
                T.reads(x[0:10], index[v])
                T.writes(y[v])
                y[v] = x[T.max(T.min(index[v], 9), 0)]

    @T.prim_func(s_tir=True)
    def scatter(index: T.Buffer((4,), "int32"), y: T.Buffer((10,), "float32")):
        T.func_attr({"relax_hetero.bounded": True})
        for i in range(4):
            if index[i] >= 0 and index[i] < 10:
                y[index[i]] = T.float32(1)

    @T.prim_func(s_tir=True)
    def remainder(a: T.Buffer((4,), "int32"), b: T.Buffer((4,), "int32"), y: T.Buffer((4,), "int32")):
        T.func_attr({"relax_hetero.bounded": True})
        for i in range(4):
            y[i] = a[i] % T.Select(b[i] == 0 or b[i] == -1, 1, b[i])


def test_indices_and_divisors_from_memory_are_bounded():
    check_pass(ClampIndices(), Before, Expected)


@I.ir_module
class Trusted:
    @T.prim_func(s_tir=True)
    def clip(x: T.Buffer((10,), "float32"), index: T.Buffer((4,), "int32"), y: T.Buffer((4,), "float32")):
        for i in range(4):
            y[i] = x[T.max(T.min(index[i], 9), 0)] / x[i]


def test_proven_indices_are_left_alone():
    assert ClampIndices()(Trusted).same_as(Trusted)


def test_positions_are_trusted_and_divided_by_sizes():
    n, m = (tvm.tirx.Var(name, "int64") for name in "nm")
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((n, m), "float32"))
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.op.reshape(x, (m, n))))
    legal = relax.transform.LegalizeOps()(builder.get())
    assert "//" in legal.script() or "%" in legal.script()
    assert ClampIndices()(legal).same_as(legal)


@I.ir_module
class Threads:
    @T.prim_func(s_tir=True)
    def gather(x: T.Buffer((10,), "float32"), index: T.Buffer((4,), "int32"), y: T.Buffer((4,), "float32")):
        for i in T.thread_binding(4, thread="threadIdx.x"):
            y[i] = x[index[i]]


def test_kernels_of_gpu_threads_are_left_as_written():
    assert ClampIndices()(Threads).same_as(Threads)


def run(mod, name, *arrays):
    built = tvm.tirx.build(mod[name].with_attr("global_symbol", name), "llvm")
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    built[name](*tensors)
    return tensors[-1].numpy()


def test_foreign_memory_is_neither_read_nor_written():
    rng = fresh_rng()
    mod = ClampIndices()(Before)
    scatter = tvm.tirx.build(mod["scatter"].with_attr("global_symbol", "scatter"), "llvm")["scatter"]
    x = rng.standard_normal(10).astype("float32")
    extremes = [2**31 - 1, -(2**31), 10, -1, 0, 9]
    for _ in range(20):
        index = rng.choice(np.array([*extremes, *rng.integers(-(2**31), 2**31, 4)], "int32"), 4)
        np.testing.assert_array_equal(run(mod, "gather", x, index, np.zeros(4, "float32")), x[np.clip(index, 0, 9)])
        # The tensor is a part of a larger one, which is to stay as it is.
        memory, want = np.zeros(64, "float32"), np.zeros(64, "float32")
        start = (-memory.ctypes.data // 4) % 16 + 16
        scatter(tvm.runtime.tensor(index), tvm.runtime.from_dlpack(memory[start : start + 10]))
        want[[start + i for i in index if 0 <= i < 10]] = 1
        np.testing.assert_array_equal(memory, want)


def extreme_pairs(dtype, rng):
    info = np.iinfo(dtype)
    special = np.array([info.min, info.max, 0, 1, 2, info.max - 1, info.max // 2], dtype)
    if info.min < 0:
        special = np.append(special, np.array([-1, -2], dtype))
    values = np.concatenate([special, rng.integers(info.min, info.max, 20, dtype=dtype, endpoint=True)])
    a, b = np.meshgrid(values, values)
    return np.ascontiguousarray(a.ravel()), np.ascontiguousarray(b.ravel())


def towards_zero(x, y):
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


QUOTIENTS = {
    "divide": towards_zero,
    "floor_divide": lambda x, y: x // y,
    "mod": lambda x, y: x - y * towards_zero(x, y),
    "floor_mod": lambda x, y: x % y,
}


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integer_division_by_anything(dtype):
    """Python's exact integers, wrapped to the type; 0 where the divisor is."""
    a, b = extreme_pairs(dtype, fresh_rng())
    builder = relax.BlockBuilder()
    x, y = (relax.Var(name, relax.TensorType((len(a),), dtype)) for name in "xy")
    with builder.function("main", [x, y]):
        results = [builder.emit(getattr(relax.op, name)(x, y)) for name in QUOTIENTS]
        builder.emit_func_output(relax.Tuple(results))
    legal = ClampIndices()(relax.transform.LegalizeOps()(builder.get()))
    machine = relax.VirtualMachine(tvm.compile(legal, "llvm"), tvm.cpu())
    actual = machine["main"](tvm.runtime.tensor(a), tvm.runtime.tensor(b))
    bits = np.iinfo(dtype).bits
    for name, result in zip(QUOTIENTS, actual, strict=True):
        exact = [0 if y == 0 else QUOTIENTS[name](x, y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
        wrapped = np.array([value % 2**bits for value in exact], f"uint{bits}").view(dtype)
        np.testing.assert_array_equal(result.numpy(), wrapped, err_msg=name)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_shifts_by_anything(dtype):
    """Shifts by the width or more, and by a negative number, leave 0, or the sign of a negative number."""
    a, b = extreme_pairs(dtype, fresh_rng())
    builder = relax.BlockBuilder()
    x, y = (relax.Var(name, relax.TensorType((len(a),), dtype)) for name in "xy")
    with builder.function("main", [x, y]):
        results = [builder.emit(op(x, y)) for op in (relax.op.left_shift, relax.op.right_shift)]
        builder.emit_func_output(relax.Tuple(results))
    legal = ClampIndices()(relax.transform.LegalizeOps()(builder.get()))
    machine = relax.VirtualMachine(tvm.compile(legal, "llvm"), tvm.cpu())
    left, right = machine["main"](tvm.runtime.tensor(a), tvm.runtime.tensor(b))
    bits = np.iinfo(dtype).bits
    pairs = [(x, y if 0 <= y < bits else bits) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    want = np.array([(x << y) % 2**bits for x, y in pairs], f"uint{bits}").view(dtype)
    np.testing.assert_array_equal(left.numpy(), want)
    np.testing.assert_array_equal(right.numpy(), np.array([x >> y for x, y in pairs], dtype))
