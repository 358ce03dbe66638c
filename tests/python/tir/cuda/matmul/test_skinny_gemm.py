"""Products of few rows by a packed weight on GPUs, by the interpreter of their kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tvm.target import Target

from cuda_reports import compile_source, reports_of, sources_of
from gpu_interpreter import run
from machine_code import disassembled, nvdisasm
from relax_hetero.encoding import PackedLayout
from relax_hetero.encoding.expression import Expression
from relax_hetero.encoding.problem import Epilogue, MatmulProblem, Operand, SentSum
from relax_hetero.errors import EncodingError
from relax_hetero.target.element_types import bytes_of, numpy_dtype
from relax_hetero.target.gpu_target import gpu_target_of
from relax_hetero.tir.commands.graph_functions import launched_early
from relax_hetero.tir.commands.table_kernel import is_one_launch
from relax_hetero.tir.cuda.core.launch import READS_EARLY
from relax_hetero.tir.cuda.matmul.skinny_gemm import (
    WEIGHT_BYTES,
    SkinnyPlan,
    sends_words,
    skinny_gemm_kernel,
    skinny_plan,
)
from seeds import fresh_rng
from tir.cuda.matmul.sent_words import ADDRESSES, SENT, SentWords

TARGET = Target({"kind": "cuda", "arch": "sm_90a"})
GPU = gpu_target_of(TARGET)
SHARED_BYTES = 227 << 10
"""Shared memory of a multiprocessor that blocks may use."""
BIAS_RELU = "cast(add(relu(add(x0, x1)), cast(x2, 'float32')), '{}')"


def problem_of(m, n, k, dtype="float16", acc="float32", result="", epilogue="", batch=(), tf32=False):
    """A product of m rows (a name: symbolic); `batch` is of all operands."""
    rank, result = len(batch) + 2, result or dtype
    names = tuple(f"b{i}" for i in range(len(batch)))
    last = (rank - 1, rank - 2)
    packed = PackedLayout((*range(rank - 2), *last), last, (64, 128 // bytes_of(dtype)), swizzle=True)
    plain = PackedLayout.identity
    text = epilogue.format(result) or (f"cast(x0, '{result}')" if result != acc else "x0")
    of_columns = Operand((n,), "float32", ("n",), plain(1))
    residual = Operand((*batch, m, n), dtype, (*names, "m", "n"), plain(rank))
    return MatmulProblem(
        Operand((*batch, m, k), dtype, (*names, "m", "k"), plain(rank)),
        Operand((*batch, k, n), dtype, (*names, "k", "n"), packed),
        Operand((*batch, m, n), result, (*names, "m", "n"), plain(rank)),
        acc,
        None,
        Epilogue(Expression.parse(text), (of_columns, residual) if epilogue else ()),
        tf32=tf32,
    )


def check(problem, m, plan=None, tolerance=1e-3):
    """The kernel's result against numpy's, of a kernel that is one launch."""
    rng = fresh_rng()
    func = skinny_gemm_kernel(problem, GPU, plan)
    assert is_one_launch(func)

    def values(operand):
        shape = tuple(m if isinstance(extent, str) else extent for extent in operand.shape)
        kind = numpy_dtype(operand.dtype)
        if kind.kind in "iu":
            return rng.integers(-100, 100, shape).astype(kind)
        return rng.standard_normal(shape).astype(kind)

    lhs, rhs, *extra = (values(operand) for operand in problem.parameters[:-1])
    want = lhs.astype("float64") @ rhs.astype("float64")
    if extra:
        want = np.maximum(want + extra[0], 0) + extra[1].astype("float64")
    result = np.full(want.shape, 77).astype(numpy_dtype(problem.result.dtype))
    run(func, lhs, problem.rhs.layout.pack(rhs), *extra, result)
    assert np.abs(result.astype("float64") - want).max() <= tolerance * np.abs(want).max()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("problem", "m", "plan"),
    [
        (problem_of(1, 128, 256), 1, SkinnyPlan(1, 2, 2)),  # stages are used again
        (problem_of(3, 100, 520, epilogue=BIAS_RELU), 3, SkinnyPlan(4, 3, 2)),  # edges, parts of unequal size
        (problem_of(1, 64, 64), 1, SkinnyPlan(2, 4, 4)),  # fewer steps than parts of k
        (problem_of(33, 190, 1000), 33, SkinnyPlan(4, 3, 2, evicts_first=True)),
        (problem_of("s0", 70, 130, epilogue=BIAS_RELU), 5, SkinnyPlan(2, 4, 4)),  # rows by the call
        (problem_of("s0", 70, 130), 70, SkinnyPlan(1, 5, 3)),  # two tiles of rows
        (problem_of(9, 64, 700), 9, SkinnyPlan(2, 2, 4)),  # fewer stages of weights
        (problem_of(2, 66, 70, batch=(3,)), 2, None),
        (problem_of(9, 190, 300, epilogue=BIAS_RELU), 9, SkinnyPlan(2, 2, 2)),
    ],
)
def test_products(problem, m, plan):
    check(problem, m, plan)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("m", "n", "k", "plan"),
    [
        (5, 100, 520, SkinnyPlan(4, 3, 2)),  # edges, parts of unequal size
        (33, 190, 1000, SkinnyPlan(2, 3, 2)),
        (17, 72, 99, SkinnyPlan(1, 2, 2)),  # rows that are not aligned
        (1, 64, 64, None),
    ],
)
def test_two_products_of_the_same_rows(m, n, k, plan):
    problem = problem_of(m, n, k)
    bias = Operand((n,), "float32", ("n",), PackedLayout.identity(1))
    gated = Epilogue(Expression.parse("cast(add(multiply(silu(x1), x0), x2), 'float16')"), (bias,))
    problem = replace(problem, second=problem.rhs, epilogue=gated)
    rng = fresh_rng()
    lhs, up, gate = (rng.standard_normal(shape).astype("float16") for shape in ((m, k), (k, n), (k, n)))
    shift, result = rng.standard_normal(n).astype("float32"), np.full((m, n), np.nan, "float16")
    kernel = skinny_gemm_kernel(problem, GPU, plan)
    assert is_one_launch(kernel) and list(kernel.attrs[READS_EARLY]) == [1, 2]
    run(kernel, lhs / np.float16(8), *(problem.rhs.layout.pack(weight) for weight in (up, gate)), shift, result)
    x0, x1 = (lhs.astype("float64") / 8 @ weight for weight in (up, gate))
    want = x1 / (1 + np.exp(-x1)) * x0 + shift
    assert np.abs(result - want).max() <= 1e-3 * np.abs(want).max()
    assert not sends_words(replace(problem, result=replace(problem.result, dtype="float32")))


@pytest.mark.parametrize("rows", [1, 32, 64])
def test_blocks_of_two_products(rows):
    """One of them fits a multiprocessor where each can have its own, else two, as those of one product."""
    weights, row_bytes = 2 * WEIGHT_BYTES, 128 * -(-rows // 16) * 16
    for columns, are_alone in ((7168, True), (14336, False)):
        problem = problem_of(rows, columns, 4096)
        plan = skinny_plan(replace(problem, second=problem.rhs), GPU)
        assert plan.split == 1
        assert (2 * (plan.stages * weights + plan.row_stages * row_bytes) > SHARED_BYTES) == are_alone
    gated = Epilogue(Expression.parse("cast(multiply(x1, x0), 'float16')"))
    (report,) = reports_of(skinny_gemm_kernel(replace(problem, second=problem.rhs, epilogue=gated), GPU), TARGET)
    assert report.serialized == "" and not report.touched and report.spill_stores == 0 and report.registers <= 96


@pytest.mark.skipif(nvdisasm() is None, reason="needs nvdisasm")
def test_steps_take_few_instructions():
    """Descriptors are computed in uniform registers, and blocks of a cluster do not wait for writes to memory."""
    (source,) = sources_of(skinny_gemm_kernel(problem_of(32, 4096, 2048), GPU), TARGET)
    text = disassembled(compile_source(source).code)
    assert text.count("HGMMA") >= 8 and text.count("R2UR") <= 4
    assert "STAS" in text and "MEMBAR.ALL.GPU" not in text


def test_rows_that_are_not_aligned():
    check(problem_of(17, 72, 99, "bfloat16", epilogue=BIAS_RELU), 17, SkinnyPlan(2, 4, 4), 1e-2)


def test_integers_and_rounded_operands():
    check(problem_of(9, 70, 300, "int8", "int32", "int32"), 9, SkinnyPlan(2, 4, 4), 0)
    check(problem_of(2, 64, 40, "float32", tf32=True), 2, None, 2e-3)


def test_results_that_are_wider_than_sums():
    check(problem_of(9, 70, 64, result="float64"), 9)


def test_blocks_of_split_k_are_resident_together():
    assert skinny_plan(problem_of(1, 4096, 4096), GPU).split > skinny_plan(problem_of(1, 50257, 4096), GPU).split == 1
    assert skinny_plan(problem_of(1, 4096, 64), GPU).split == 1


@pytest.mark.parametrize("rows", [1, 16, 32, 64])
def test_one_block_of_a_long_split_fits_a_multiprocessor(rows):
    """Then all blocks get an equal share, even if they begin beside those of the launch before."""
    long, short = skinny_plan(problem_of(rows, 4096, 14336), GPU), skinny_plan(problem_of(rows, 4096, 2048), GPU)
    assert 64 * long.split <= GPU.multiprocessors
    row_bytes = 128 * -(-rows // 16) * 16
    sizes = [plan.stages * WEIGHT_BYTES + plan.row_stages * row_bytes for plan in (long, short)]
    assert 2 * sizes[0] > SHARED_BYTES > 2 * sizes[1]


def test_weights_make_room_where_two_of_them_do_not_fit_the_cache():
    assert not skinny_plan(problem_of(1, 4096, 1024), GPU).evicts_first
    assert skinny_plan(problem_of(1, 4096, 4096), GPU).evicts_first
    for evicts_first in (False, True):
        kernel = skinny_gemm_kernel(problem_of(1, 64, 64), GPU, SkinnyPlan(1, 2, 2, evicts_first=evicts_first))
        (source,) = sources_of(kernel, TARGET)
        assert ("L2::cache_hint" in source.text) == evicts_first


def test_a_launch_may_begin_before_the_end_of_the_one_before():
    func = skinny_gemm_kernel(problem_of(1, 4096, 4096), GPU)
    assert list(func.attrs[READS_EARLY]) == [1], "the weight, where it is a constant"
    (source,) = sources_of(launched_early(func), TARGET)
    assert b"use_programtic_dependent_launch" in source.data.kernels
    (report,) = reports_of(func, TARGET)
    assert report.serialized == "" and not report.touched and report.spill_stores == 0
    assert report.registers <= 64, "four blocks share a multiprocessor"


@pytest.mark.parametrize("plan", [None, SkinnyPlan(4, 2, 2)])
def test_the_result_is_sent_to_other_gpus(plan, monkeypatch):
    """After the epilogue."""
    m, n, k = 5, 68, 260
    problem = replace(problem_of(m, n, k, result="float32", epilogue=BIAS_RELU), sent=SENT)
    sent, rng = SentWords(monkeypatch, (m, n)), fresh_rng()
    lhs, rhs = (rng.standard_normal(shape).astype("float16") for shape in ((m, k), (k, n)))
    bias, residual = rng.standard_normal(n).astype("float32"), rng.standard_normal((m, n)).astype("float16")
    result = np.full((m, n), 77, "float32")
    kernel = skinny_gemm_kernel(problem, GPU, plan)
    run(kernel, lhs, problem.rhs.layout.pack(rhs), ADDRESSES, bias, residual, result)
    for each in (result, *sent.results):
        np.testing.assert_allclose(each, np.maximum(lhs.astype("float64") @ rhs + bias, 0) + residual, atol=1e-2)
    (report,) = reports_of(kernel, TARGET)
    assert report.spill_stores == 0 and report.registers <= 64


@pytest.mark.parametrize(("m", "is_sent"), [(8, False), (8, True), (9, True)])
@pytest.mark.sampled(1)
def test_the_sum_of_few_rows_begins_after_the_last_loads(m, is_sent):
    problem = problem_of(m, 64, 512, result="float32")
    problem = replace(problem, sent=SENT) if is_sent else problem
    text = skinny_gemm_kernel(problem, GPU).script()
    assert (text.index("launch_dependents") > text.rindex("T.ptx.cp(")) == (is_sent and m == 8)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("m", "n", "how", "is_sent"),
    [
        (32, 4096, {}, True),
        (5, 68, {"epilogue": BIAS_RELU}, True),
        (5, 70, {}, False),  # no whole vectors
        (64, 4096, {}, False),  # a long sum
        ("s0", 64, {}, False),
        (5, 68, {"result": "float16"}, False),
        (5, 68, {"batch": (2,)}, False),
    ],
)
def test_products_that_can_send(m, n, how, is_sent):
    problem = problem_of(m, n, 64, **{"result": "float32", **how})
    assert sends_words(problem) == is_sent
    if not is_sent:
        with pytest.raises(
            EncodingError, match=r"is sent, expected a static, row-major one of float32 for a short sum"
        ):
            skinny_gemm_kernel(replace(problem, sent=SentSum(0, 2, 0, 1 << 20)), GPU)


def test_unsupported_problems_are_refused():
    plain = problem_of(1, 64, 64)
    rhs = Operand((64, 64), "float16", ("k", "n"), PackedLayout.identity(2))
    problem = MatmulProblem(plain.lhs, rhs, plain.result, "float32")
    with pytest.raises(EncodingError, match="not packed"):
        skinny_gemm_kernel(problem, GPU)
