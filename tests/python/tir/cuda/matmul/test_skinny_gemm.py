"""Products of few rows by a packed weight on GPUs, by the interpreter of their kernels."""

from __future__ import annotations

import numpy as np
import pytest
from tvm.target import Target

from cuda_reports import reports_of, sources_of
from gpu_interpreter import run
from relax_hetero.encoding import PackedLayout
from relax_hetero.encoding.expression import Expression
from relax_hetero.encoding.problem import Epilogue, MatmulProblem, Operand
from relax_hetero.errors import EncodingError
from relax_hetero.target.element_types import bytes_of, numpy_dtype
from relax_hetero.target.gpu_target import gpu_target_of
from relax_hetero.tir.commands.graph_functions import launched_early
from relax_hetero.tir.commands.table_kernel import is_one_launch
from relax_hetero.tir.cuda.core.launch import READS_EARLY
from relax_hetero.tir.cuda.matmul.skinny_gemm import WEIGHT_BYTES, SkinnyPlan, skinny_gemm_kernel, skinny_plan
from seeds import fresh_rng

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


def test_unsupported_problems_are_refused():
    plain = problem_of(1, 64, 64)
    rhs = Operand((64, 64), "float16", ("k", "n"), PackedLayout.identity(2))
    problem = MatmulProblem(plain.lhs, rhs, plain.result, "float32")
    with pytest.raises(EncodingError, match="not packed"):
        skinny_gemm_kernel(problem, GPU)
