"""The interpreter of GPU kernels: results equal numpy's, and each kind of fault is found."""

import ml_dtypes
import numpy as np
import pytest
from tvm.script import tirx as T

from gpu_interpreter import KernelFault, run

NO_BARRIERS = ("s_tir.ThreadSync",)
"""TVM puts barriers where it finds none."""


@T.prim_func(s_tir=True)
def product(a: T.handle, b: T.handle, c: T.handle):
    m = T.int64()
    A = T.match_buffer(a, (m, 64), "float16")
    B = T.match_buffer(b, (64, 64), "float16")
    C = T.match_buffer(c, (m, 64), "float32")
    with T.sblock("root"):
        for bx in T.thread_binding((m + 31) // 32, thread="blockIdx.x"):
            for tx in T.thread_binding(128, thread="threadIdx.x"):
                As = T.alloc_buffer((32, 64), "float16", scope="shared")
                Bs = T.alloc_buffer((64, 64), "float16", scope="shared.dyn")
                acc = T.alloc_buffer((16,), "float32", scope="local")
                for i in T.unroll(16):
                    acc[i] = T.float32(0)
                for i in T.serial(2):
                    for v in T.vectorized(8):
                        if bx * 32 + i * 16 + tx // 8 < m:
                            As[i * 16 + tx // 8, tx % 8 * 8 + v] = A[bx * 32 + i * 16 + tx // 8, tx % 8 * 8 + v]
                for i in T.serial(4):
                    for v in T.vectorized(8):
                        Bs[i * 16 + tx // 8, tx % 8 * 8 + v] = B[i * 16 + tx // 8, tx % 8 * 8 + v]
                for k in T.serial(64):
                    for j in T.unroll(16):
                        acc[j] = acc[j] + T.Cast("float32", As[tx // 4, k]) * T.Cast("float32", Bs[k, tx % 4 * 16 + j])
                if bx * 32 + tx // 4 < m:
                    for j in T.unroll(16):
                        C[bx * 32 + tx // 4, tx % 4 * 16 + j] = T.tanh(acc[j])


def operands(m: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    left, right = (rng.standard_normal((rows, 64)).astype("float16") for rows in (m, 64))
    return left, right, np.full((m, 64), np.nan, "float32")


def test_product_through_shared_memory() -> None:
    left, right, result = operands(50)
    run(product, left, right, result, strict=False)
    # Sums of 50 float32 are rounded in an order of their own.
    np.testing.assert_allclose(result, np.tanh(left.astype("float64") @ right), rtol=1e-6, atol=5e-6)


def test_shared_memory_that_nobody_wrote() -> None:
    with pytest.raises(KernelFault, match="As is read and was never written, in thread 72 of block 1"):
        run(product, *operands(50))


def test_race_in_shared_memory() -> None:
    with pytest.raises(KernelFault, match=r"(?s)race: thread .* reads shared memory.*no barrier is between.*acc\[0\]"):
        run(product, *operands(64), leave_out=NO_BARRIERS)


@T.prim_func(s_tir=True)
def sums(X: T.Buffer((5, 256), "float32"), Y: T.Buffer((5,), "float32"), far: T.int32):
    with T.sblock("root"):
        for bx in T.thread_binding(5, thread="blockIdx.x"):
            for tx in T.thread_binding(256, thread="threadIdx.x"):
                part = T.alloc_buffer((8,), "float32", scope="shared")
                own = T.alloc_buffer((1,), "float32", scope="local")
                own[0] = X[bx, tx + far]
                for i in T.unroll(5):
                    own[0] = own[0] + T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), own[0], 16 >> i, 32, 32)
                if tx % 32 == 0:
                    part[tx // 32] = own[0]
                if tx < 32:
                    own[0] = T.if_then_else(tx < 8, part[tx], T.float32(0))
                    for i in T.unroll(5):
                        own[0] = own[0] + T.tvm_warp_shuffle_down(T.uint32(0xFFFFFFFF), own[0], 16 >> i, 32, 32)
                    if tx == 0:
                        Y[bx] = own[0]


def test_sum_by_shuffles() -> None:
    values, result = np.random.default_rng(1).random((5, 256), np.float32), np.full(5, np.nan, np.float32)
    run(sums, values, result, 0)
    np.testing.assert_allclose(result, values.sum(axis=1), rtol=1e-6)


def test_index_beyond_a_buffer() -> None:
    with pytest.raises(KernelFault, match=r"out of range: index 1280 of X, .* thread 255 of block 4"):
        run(sums, np.zeros((5, 256), np.float32), np.zeros(5, np.float32), 1)


def test_shared_memory_written_by_another_warp() -> None:
    with pytest.raises(KernelFault, match="race: thread 1 of block 0 reads .* thread 32 of block 0 wrote"):
        run(sums, np.zeros((5, 256), np.float32), np.zeros(5, np.float32), 0, leave_out=NO_BARRIERS)


@T.prim_func(s_tir=True)
def partly(X: T.Buffer((64,), "int32"), limit: T.int32, kind: T.int32):
    with T.sblock("root"):
        for _bx in T.thread_binding(1, thread="blockIdx.x"):
            for tx in T.thread_binding(64, thread="threadIdx.x"):
                if kind == 0:
                    if tx < limit:
                        T.tvm_storage_sync("shared")
                if kind == 1:
                    if tx < limit:
                        X[tx] = T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), tx, 1, 32, 32)
                if kind == 2:
                    X[tx // 2] = tx
                if kind == 3:
                    X[tx] = X[63 - tx]


@pytest.mark.parametrize(
    ("limit", "kind", "text"),
    [
        (32, 0, "hangs: __syncthreads of block 0 is not reached by all threads: 32 of 64 wait, not thread .32."),
        (40, 0, "__syncthreads is not reached by all threads: thread 40 of block 0 passes it by"),
        (40, 1, "a shuffle is not reached by all threads of the warp of thread 32"),
        (0, 2, "race: .* in the same statement"),
        (0, 3, "race: thread 0 of block 0 writes X, cell 0, which thread 63 of block 0 read"),
    ],
)
def test_faults(limit: int, kind: int, text: str) -> None:
    with pytest.raises(KernelFault, match=text):
        run(partly, np.zeros(64, np.int32), limit, kind)


def test_no_faults() -> None:
    numbers = np.zeros(64, np.int32)
    run(partly, numbers, 64, 0)
    run(partly, numbers, 32, 1)
    np.testing.assert_array_equal(numbers[:32], np.arange(32) ^ 1)


@T.prim_func(s_tir=True)
def blocks_write(X: T.Buffer((64,), "float32")):
    with T.sblock("root"):
        for _bx in T.thread_binding(2, thread="blockIdx.x"):
            for tx in T.thread_binding(64, thread="threadIdx.x"):
                X[tx] = T.float32(1)


def test_blocks_that_write_the_same() -> None:
    with pytest.raises(KernelFault, match="race: thread 0 of block [01] .*thread 0 of block [01]"):
        run(blocks_write, np.zeros(64, np.float32))


@T.prim_func(s_tir=True)
def counts(X: T.Buffer((300,), "int32"), Y: T.Buffer((10,), "int32"), Z: T.Buffer((300,), "float32")):
    with T.sblock("root"):
        for bx in T.thread_binding(2, thread="blockIdx.x"):
            for tx in T.thread_binding(160, thread="threadIdx.x"):
                bins = T.alloc_buffer((10,), "int32", scope="shared")
                i = T.alloc_buffer((1,), "int32", scope="local")
                if tx < 10:
                    bins[tx] = 0
                T.tvm_storage_sync("shared")
                if bx * 160 + tx < 300:
                    T.evaluate(T.call_extern("int32", "atomicAdd", T.address_of(bins[X[bx * 160 + tx]]), 1))
                T.tvm_storage_sync("shared")
                if tx < 10:
                    T.evaluate(T.call_extern("int32", "atomicAdd", T.address_of(Y[tx]), bins[tx]))
                i[0] = 0
                while i[0] < X[T.min(bx * 160 + tx, 299)]:
                    i[0] = i[0] + 2
                if bx * 160 + tx < 300:
                    Z[bx * 160 + tx] = T.Cast("float32", i[0])


def test_atomics_and_loops_of_different_length() -> None:
    values = np.random.default_rng(2).integers(0, 10, 300).astype(np.int32)
    actual, rounds = np.zeros(10, np.int32), np.full(300, np.nan, np.float32)
    run(counts, values, actual, rounds)
    np.testing.assert_array_equal(actual, np.bincount(values, minlength=10))
    np.testing.assert_array_equal(rounds, (values + 1) // 2 * 2)


@T.prim_func(s_tir=True)
def converted(
    X: T.Buffer((64,), "bfloat16"), Y: T.Buffer((64,), "float8_e4m3fn"), Z: T.Buffer((64,), "int8"), q: T.int32
):
    with T.sblock("root"):
        for _bx in T.thread_binding(1, thread="blockIdx.x"):
            for tx in T.thread_binding(64, thread="threadIdx.x"):
                Y[tx] = T.Cast("float8_e4m3fn", T.Cast("float32", X[tx]) * T.float32(100))
                Z[tx] = T.Cast("int8", T.max(-128, T.min(127, T.truncdiv(tx - 32, 3) * q)))


def test_narrow_types() -> None:
    values = (np.arange(64) - 30).astype(ml_dtypes.bfloat16)
    eight, ints = np.zeros(64, ml_dtypes.float8_e4m3fn), np.zeros(64, np.int8)
    run(converted, values, eight, ints, 7)
    want = np.clip(values.astype(np.float32) * 100, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(eight.astype(np.float32), want.astype(np.float32))
    np.testing.assert_array_equal(ints, np.clip(np.trunc((np.arange(64) - 32) / 3) * 7, -128, 127))
