"""ScheduleCPU: where vectors and threads are, which kernels stay as they are, and what becomes of the others."""

from __future__ import annotations

import logging
import re

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax, tirx
from tvm.ir import assert_structural_equal
from tvm.relax import op
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T
from tvm_ffi import structural_walk

import relax_hetero as rh
from modules import ir_module
from relax_hetero.driver.link.llvm_kernels import build_llvm
from relax_hetero.transform import ScheduleCPU, collect_fusions
from relax_hetero.transform.dispatch.schedule_cpu import schedule_cpu
from seeds import fresh_rng
from tir.kernel_runs import TARGETS, VECTOR_NAMES, target_of
from transform.scheduled_ops import Build, Operands, check, f32, formed, kernels, pool, results

LARGE = 1 << 20
WIDEST = VECTOR_NAMES[0]
PLAIN = {"kind": "llvm", "mcpu": "x86-64"}
NEWER = {"kind": "llvm", "mcpu": "x86-64-v2", "num-cores": 2}


def loops(func: tirx.PrimFunc, kind: tirx.ForKind) -> list[tirx.For]:
    nodes: list[tirx.For] = []
    structural_walk(func.body, (tirx.For, nodes.append))
    return [loop for loop in nodes if loop.kind == kind]


def scheduled(build: Build, operands: Operands, target: str = WIDEST) -> tirx.PrimFunc:
    (func,) = kernels(schedule_cpu(formed(build, operands, target)))
    return func


def test_before_and_after():
    """A kernel of four elements: one vector, and the value used twice stays in a register."""

    @ir_module({"kind": "llvm", "mcpu": "x86-64"})
    class Before:
        @T.prim_func(private=True, s_tir=True)
        def relu(x: T.Buffer((T.int64(2), T.int64(2)), "float32"), y: T.Buffer((T.int64(2), T.int64(2)), "float32")):
            T.func_attr({"target": T.target({"kind": "llvm", "mcpu": "x86-64"}), "tirx.noalias": True})
            t = T.sblock_alloc_buffer((T.int64(2), T.int64(2)))
            for i, j in T.grid(T.int64(2), T.int64(2)):
                with T.sblock("twice"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    t[vi, vj] = x[vi, vj] * T.float32(2)
            for i, j in T.grid(T.int64(2), T.int64(2)):
                with T.sblock("relu"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    y[vi, vj] = T.Select(t[vi, vj] < T.float32(0), T.float32(0), t[vi, vj])

    after = ScheduleCPU()(Before)
    (func,) = kernels(after)
    (vectors,) = {int(loop.extent) for loop in loops(func, tirx.ForKind.VECTORIZED)}
    assert vectors == 4
    assert not loops(func, tirx.ForKind.SERIAL) and not loops(func, tirx.ForKind.PARALLEL)
    assert_structural_equal(func.attrs, kernels(Before)[0].with_attr("relax_hetero.tied", [[0, 1]]).attrs)
    assert_structural_equal(ScheduleCPU()(after), after)  # nothing is scheduled twice
    x = np.float32([[1, -1], [np.nan, 3]])
    out = tvm.runtime.tensor(np.zeros((2, 2), "float32"))
    tvm.compile(tvm.IRModule({"f": func.with_attr("global_symbol", "f")}), target=func.attrs["target"])["f"](
        tvm.runtime.tensor(x), out
    )
    np.testing.assert_array_equal(out.numpy(), np.float32([[2, 0], [np.nan, 6]]))


V3 = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v3", "num-cores": 2}


def test_two_stages_become_one_loop_of_vectors():
    @I.ir_module
    class Before:
        @T.prim_func(private=True, s_tir=True)
        def shift_and_scale(x: T.Buffer((4, 32), "float32"), y: T.Buffer((4, 32), "float32")):
            T.func_attr({"target": T.target(V3)})
            t = T.sblock_alloc_buffer((4, 32), "float32")
            for i, j in T.grid(4, 32):
                with T.sblock("shift"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    t[vi, vj] = x[vi, vj] + T.float32(1)
            for i, j in T.grid(4, 32):
                with T.sblock("scale"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    y[vi, vj] = t[vi, vj] * T.float32(2)

    @I.ir_module
    class Expected:
        """Two vectors at a time: the work is too small to wake a thread for."""

        @T.prim_func(private=True, s_tir=True)
        def shift_and_scale(x: T.Buffer((4, 32), "float32"), y: T.Buffer((4, 32), "float32")):
            T.func_attr({"relax_hetero.tied": [[0, 1]], "target": T.target(V3)})
            with T.sblock("root"):
                T.reads()
                T.writes()
                a = T.decl_buffer((T.int64(128),), data=x.data)
                b = T.decl_buffer((T.int64(128),), data=y.data)
                for i, j in T.grid(T.int64(4), T.int64(2)):
                    for lane in T.vectorized(T.int64(8)):
                        b[T.Cast("int64", i) * T.int64(32) + T.Cast("int64", j * T.int64(16) + lane)] = (
                            a[T.Cast("int64", i) * T.int64(32) + T.Cast("int64", j * T.int64(16) + lane)] + T.float32(1)
                        ) * T.float32(2)
                    for lane in T.vectorized(T.int64(8)):
                        b[T.Cast("int64", i) * T.int64(32) + T.Cast("int64", j * T.int64(16) + T.int64(8) + lane)] = (
                            a[T.Cast("int64", i) * T.int64(32) + T.Cast("int64", j * T.int64(16) + T.int64(8) + lane)]
                            + T.float32(1)
                        ) * T.float32(2)

    assert_structural_equal(schedule_cpu(Before), Expected)


def test_large_work_is_parallel_and_small_is_not():
    assert len(loops(scheduled(op.exp, [f32(LARGE)]), tirx.ForKind.PARALLEL)) == 1
    assert not loops(scheduled(op.exp, [f32(64)]), tirx.ForKind.PARALLEL)
    assert not loops(scheduled(op.exp, [f32(LARGE)], "sse"), tirx.ForKind.PARALLEL)  # this target has one core


def test_tasks_are_as_many_as_cores():
    (loop,) = loops(scheduled(pool("max", "NHWC", 3, 2, 1), [f32(1, 112, 112, 64)]), tirx.ForKind.PARALLEL)
    assert int(loop.extent) == TARGETS[WIDEST]["num-cores"]


@pytest.mark.parametrize("find", [op.argmax, op.argmin])
def test_a_search_reads_blocks_as_vectors(find: Build):
    """Not an element of each block at a time, and few statements: nine blocks of 64 elements."""
    vectors = loops(scheduled(lambda x: find(x, -1), [f32(2, 576)]), tirx.ForKind.VECTORIZED)
    assert max(int(loop.extent) for loop in vectors) == 16 and len(vectors) < 80


@pytest.mark.parametrize("name", VECTOR_NAMES)
def test_padding_leaves_no_condition_inside_of_the_image(name: str):
    func = scheduled(pool("max", "NHWC", 3, 1, 1), [f32(1, 30, 30, 64)], name)
    inner = [loop for loop in loops(func, tirx.ForKind.SERIAL) if isinstance(loop.extent, tirx.IntImm)]
    free = []
    for loop in inner:
        conditions: list[tirx.Stmt] = []
        structural_walk(loop.body, [(tirx.IfThenElse, conditions.append), (tvm.ir.Call, conditions.append)])
        free.append(not conditions)
    assert any(free)


def test_concat_is_copies_without_a_choice():
    func = scheduled(lambda x, y: op.concat([x, y], 1), [f32(40, 96), f32(40, 32)])
    calls: list[tvm.ir.Call] = []
    structural_walk(func.body, (tvm.ir.Call, calls.append))
    assert not [call for call in calls if call.op.name == "prim.if_then_else"]


@pytest.mark.skipif("avx512" not in VECTOR_NAMES, reason="looks at AVX-512 code")
@pytest.mark.parametrize(
    ("build", "operands"),
    [
        (lambda x: op.erf(x), [f32(40, 100)]),
        (lambda x: op.permute_dims(x, [1, 0]), [f32(64, 48)]),
        (lambda x: op.sum(x, -1), [f32(40, 100)]),
        (pool("max", "NHWC", 3, 2, 1), [f32(1, 28, 28, 64)]),
        (pool("max", "NCHW", 3, 2, 1), [f32(1, 8, 30, 66)]),
    ],
)
def test_vectors_in_the_assembly(build, operands):
    """Whole vectors, no calls of the C library, and no accumulator that lives in memory."""
    func = scheduled(build, operands, "avx512").with_attr("global_symbol", "kernel")
    text = build_llvm(target_of("avx512"), tvm.IRModule({"kernel": func})).inspect_source("asm")
    hot = [line for line in text.splitlines() if "zmm" in line]
    assert hot and not [line for line in hot if "(%rsp)" in line]
    assert not re.search(r"call\S*\s+(erff|expf|maxf)", text)


def test_other_devices_and_forms_are_left_alone():
    operands = [f32(1, 10, 9, 20)]
    build = lambda x: op.nn.adaptive_avg_pool2d(x, (3, 4), layout="NHWC")  # noqa: E731 (windows of several sizes)
    before = formed(build, operands, WIDEST)
    with collect_fusions() as report:
        after = schedule_cpu(before)
    assert all(new.same_as(old) for new, old in zip(kernels(after), kernels(before), strict=True))
    assert [d.op for d in report.missed] == ["adaptive_avg_pool2d"]
    for_c = formed(op.exp, [f32(64)], "c")
    assert kernels(schedule_cpu(for_c))[0].same_as(kernels(for_c)[0])


def test_kernels_in_place_are_left_alone():
    @I.ir_module
    class Module:
        @T.prim_func(private=True, s_tir=True)
        def shifted(x: T.Buffer((T.int64(9),), "float32")):
            T.func_attr({"target": T.target({"kind": "llvm", "mcpu": "x86-64"}), "tirx.noalias": True})
            t = T.sblock_alloc_buffer((T.int64(9),))
            for i in range(T.int64(9)):
                with T.sblock("before"):
                    v = T.axis.spatial(T.int64(9), i)
                    t[v] = x[T.max(v - T.int64(1), T.int64(0))]
            for i in range(T.int64(9)):
                with T.sblock("after"):
                    v = T.axis.spatial(T.int64(9), i)
                    x[v] = t[v]

    assert_structural_equal(schedule_cpu(Module), Module)


def test_equal_kernels_are_scheduled_once(monkeypatch: pytest.MonkeyPatch):
    import relax_hetero.transform.dispatch.schedule_cpu as module

    calls: list[str] = []
    original = module.schedule
    monkeypatch.setattr(module, "schedule", lambda func, machine: calls.append("") or original(func, machine))
    (func,) = kernels(formed(op.exp, [f32(64)], WIDEST))
    module.schedule_cpu(tvm.IRModule({"one": func, "two": func}))
    assert len(calls) == 1


def test_a_rule_that_fails_costs_no_model(monkeypatch: pytest.MonkeyPatch):
    import relax_hetero.transform.dispatch.schedule_cpu as module

    def fail(*_args: object) -> tirx.PrimFunc:
        raise RuntimeError("of a rule")

    monkeypatch.setattr(module, "schedule", fail)
    with pytest.raises(AssertionError, match="kernel tir_exp stays unscheduled"):  # the log of tests (conftest.py)
        schedule_cpu(formed(op.exp, [f32(64)], WIDEST))
    monkeypatch.setattr(module, "_log", logging.getLogger("relax_hetero"))
    before = formed(op.exp, [f32(64)], WIDEST)
    with collect_fusions() as report:
        after = schedule_cpu(before)
    assert_structural_equal(after, before)
    assert "RuntimeError: of a rule" in report.missed[0].reason


def test_two_devices():
    """Both devices' kernels are scheduled, each for its own target, and the model gives what numpy gives."""

    @ir_module(PLAIN, (NEWER, 1))
    def Module(x: R.Tensor((3, 70), "float32", "llvm:0")) -> R.Tensor((3,), "float32", "llvm:1"):
        with R.dataflow():
            y: R.Tensor((3, 70), "float32", "llvm:0") = R.abs(x)
            z: R.Tensor((3, 70), "float32", "llvm:1") = R.to_vdevice(y, "llvm:1")
            s: R.Tensor((3,), "float32", "llvm:1") = R.max(z, axis=[1])
            R.output(s)
        return s

    machine = rh.vm.VirtualMachine(rh.compile(Module), devices=[tvm.cpu(0), tvm.cpu(1)])
    x = fresh_rng().standard_normal((3, 70)).astype("float32")
    np.testing.assert_array_equal(machine["main"](x).numpy(), np.abs(x).max(1))


extents = st.integers(1, 40)
SEEDS = st.integers(0, 2**32 - 1)


@settings(max_examples=12, deadline=None)
@given(data=st.data(), a=extents, b=extents, c=extents)
def test_random_maps(data: st.DataObject, a: int, b: int, c: int):
    """Permuted, padded, sliced and broadcast reads, in one kernel."""
    order = data.draw(st.permutations([0, 1, 2]))
    shape = [[a, b, c][order.index(d)] for d in range(3)]
    before, after = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    axis = data.draw(st.integers(0, 2))
    widths = [0] * 6
    widths[2 * axis], widths[2 * axis + 1] = before, after

    def build(x: relax.Var, y: relax.Var) -> relax.Expr:
        moved = op.multiply(op.permute_dims(x, order), y)
        return op.nn.relu(op.add(op.nn.pad(moved, widths), relax.const(0.5)))

    check(
        build,
        [f32(*shape), f32(c)],
        [data.draw(st.sampled_from(VECTOR_NAMES))],
        np.random.default_rng(data.draw(SEEDS)),
    )


@settings(max_examples=12, deadline=None)
@given(data=st.data(), a=extents, b=extents, c=extents)
def test_random_reductions(data: st.DataObject, a: int, b: int, c: int):
    axes = sorted(data.draw(st.sets(st.integers(0, 2), min_size=1)))
    reduce = data.draw(st.sampled_from([op.sum, op.max, op.mean]))
    keep = data.draw(st.booleans())

    def build(x: relax.Var) -> relax.Expr:
        return op.nn.relu(reduce(op.multiply(x, x), axes, keepdims=keep))

    target = data.draw(st.sampled_from(VECTOR_NAMES))
    mod = schedule_cpu(formed(build, [f32(a, b, c)], target))
    x = np.random.default_rng(data.draw(SEEDS)).standard_normal((a, b, c)).astype("float32")
    exact = {op.sum: np.sum, op.max: np.max, op.mean: np.mean}[reduce](
        x.astype("float64") ** 2, tuple(axes), keepdims=keep
    )
    np.testing.assert_allclose(results(mod, [x])[0], exact, rtol=1e-5, atol=1e-5)
