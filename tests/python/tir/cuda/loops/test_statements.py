"""PrimFuncs of any form: statements in launches, parallel where iterations are independent."""

import sys
from pathlib import Path

import numpy as np
import tvm
from tvm.script import tirx as T
from tvm_ffi import structural_walk

from relax_hetero.target.gpu_target import gpu_target_of
from relax_hetero.tir.cuda.loops import schedule
from relax_hetero.tir.cuda.loops.statements import is_independent

sys.path.insert(0, str(Path(__file__).parents[1]))
from on_cpu import run

TARGET = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})


@T.prim_func(s_tir=True)
def compact(x: T.Buffer((8, 100), "float32"), y: T.Buffer((8, 100), "float32")):
    for i in range(8):
        count = T.alloc_buffer((1,), "int64")
        count[0] = T.int64(0)
        for j in range(100):
            y[i, j] = T.float32(0)
        for j in range(100):
            if x[i, j] > T.float32(0):
                y[i, count[0]] = x[i, j]
                count[0] = count[0] + T.int64(1)


@T.prim_func(s_tir=True)
def running(x: T.Buffer((100,), "float32"), y: T.Buffer((100,), "float32")):
    y[0] = x[0]
    for i in range(1, 100):
        y[i] = y[i - 1] + x[i]


@T.prim_func(s_tir=True)
def rows(x: T.Buffer((60,), "float32"), y: T.Buffer((60,), "float32")):
    for i in range(6):
        for j in range(10):
            y[i * 10 + j] = x[i * 10 + 9 - j]


@T.prim_func(s_tir=True)
def large_temporary(x: T.Buffer((4000,), "float32"), y: T.Buffer((4000,), "float32")):
    with T.sblock("root"):
        t = T.alloc_buffer((4000,), "float32")
        for i in range(4000):
            t[3999 - i] = x[i]
        for i in range(4000):
            y[i] = t[i] + t[0]


@T.prim_func(s_tir=True)
def triangle(x: T.Buffer((8, 8), "float32"), y: T.Buffer((8, 8), "float32")):
    for i in range(8):
        for j in range(i):
            y[i, j] = x[j, i]


@T.prim_func(s_tir=True)
def counted(x: T.Buffer((60,), "float32"), n: T.Buffer((1,), "int32"), y: T.Buffer((60,), "float32")):
    for i in range(n[0]):
        y[i] = x[i]


def threads_of(func):
    extents = {}

    def on_loop(loop):
        if loop.thread_binding is not None:
            extents.setdefault(str(loop.thread_binding.thread_tag), []).append(int(loop.extent))

    structural_walk(func.body, (tvm.tirx.For, on_loop))
    return extents


def scheduled(func):
    return schedule(func.with_attr("target", TARGET), gpu_target_of(TARGET))


def test_iterations_with_places_of_their_own_are_independent():
    assert is_independent(compact.body) and is_independent(rows.body)
    assert not is_independent(running.body.seq[1])


def test_a_loop_over_rows_is_parallel():
    x, y = np.random.default_rng(0).standard_normal((8, 100)).astype("float32"), np.full((8, 100), 7, "float32")
    run(scheduled(compact), x, y)
    for i in range(8):
        positive = x[i][x[i] > 0]
        np.testing.assert_array_equal(y[i], np.pad(positive, (0, 100 - len(positive))))


def test_a_loop_that_reads_what_it_wrote_runs_in_one_thread():
    x, y = np.random.default_rng(0).standard_normal(100).astype("float32"), np.full(100, 7, "float32")
    func = scheduled(running)
    run(func, x, y)
    np.testing.assert_allclose(y, np.cumsum(x), rtol=1e-5)


def test_flat_places_of_inner_loops():
    x, y = np.arange(60, dtype="float32"), np.zeros(60, "float32")
    run(scheduled(rows), x, y)
    np.testing.assert_array_equal(y, x.reshape(6, 10)[:, ::-1].ravel())


def test_launches_have_extents_known_to_the_host():
    """A launch has as many blocks as the host can tell: not by loops around, and not by what lies on the device."""
    x, y = np.arange(64, dtype="float32").reshape(8, 8), np.zeros((8, 8), "float32")
    run(scheduled(triangle), x, y)
    np.testing.assert_array_equal(y, np.tril(x.T, -1))
    x, y = np.arange(60, dtype="float32"), np.zeros(60, "float32")
    func = scheduled(counted)
    assert threads_of(func)["blockIdx.x"] == [1]
    run(func, x, np.array([7], "int32"), y)
    np.testing.assert_array_equal(y, np.where(x < 7, x, 0))


def test_temporaries_between_launches_are_memory_of_the_device():
    x, y = np.arange(4000, dtype="float32"), np.zeros(4000, "float32")
    func = scheduled(large_temporary)
    assert len(threads_of(func)["blockIdx.x"]) == 2
    run(func, x, y)
    np.testing.assert_array_equal(y, x[::-1] + x[-1])
