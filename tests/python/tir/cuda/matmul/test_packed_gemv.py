"""Products of a row, or a few, whose weight fits in shared memory, by the interpreter of their kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cuda_reports import compile_source, reports_of, sources_of
from gpu_interpreter import run
from machine_code import disassembled, nvdisasm
from relax_hetero.encoding.problem import SentSum
from relax_hetero.target.element_types import numpy_dtype
from relax_hetero.tir.commands.graph_functions import launched_early
from relax_hetero.tir.commands.table_kernel import is_one_launch
from relax_hetero.tir.cuda.core.launch import READS_EARLY
from relax_hetero.tir.cuda.matmul.cuda_matmul import cuda_matmul_kernel
from relax_hetero.tir.cuda.matmul.packed_gemv import packed_gemv_kernel, shared_bytes, unsupported_reason
from seeds import fresh_rng
from tir.cuda.gpu_runs import needs_gpu, run_on_gpu
from tir.cuda.matmul.test_skinny_gemm import BIAS_RELU, GPU, SHARED_BYTES, TARGET, problem_of


def check(problem, tolerance=1e-3, is_on_gpu=False):
    """The kernel's result against float64, of a kernel that is one launch."""
    rng, func = fresh_rng(), packed_gemv_kernel(problem)
    assert is_one_launch(func)
    numbers = [rng.standard_normal(each.shape).astype(numpy_dtype(each.dtype)) for each in problem.parameters[:-1]]
    lhs, rhs, *extra = numbers
    want = lhs.astype("float64") @ rhs.astype("float64")
    if extra:
        want = np.maximum(want + extra[0], 0) + extra[1].astype("float64")
    arguments = [lhs, problem.rhs.layout.pack(rhs), *extra]
    if is_on_gpu:
        result = run_on_gpu(func, arguments, want.shape, problem.result.dtype)
    else:
        result = np.full(want.shape, np.nan).astype(numpy_dtype(problem.result.dtype))
        run(func, *arguments, result)
    assert np.abs(result.astype("float64") - want).max() <= tolerance * np.abs(want).max()


@pytest.mark.parametrize(
    ("problem", "tolerance"),
    [
        (problem_of(1, 128, 256, result="float32"), 1e-5),  # warps without a tile
        (problem_of(3, 100, 576, epilogue=BIAS_RELU), 1e-3),  # a block beyond the columns, warps with one tile more
        (problem_of(8, 70, 64 * 75, "bfloat16"), 1e-2),  # registers of rows are used again; no whole vectors
        (problem_of(5, 16, 64, "bfloat16", epilogue=BIAS_RELU), 1e-2),
    ],
)
def test_products(problem, tolerance):
    check(problem, tolerance)


@pytest.mark.parametrize(("n", "k", "blocks"), [(5120, 2048, 3), (2048, 4096, 1), (576, 7168, 1)])
def test_all_blocks_are_resident_with_their_weights(n, k, blocks):
    problem = problem_of(1, n, k)
    assert unsupported_reason(problem, GPU) == ""
    (source,) = sources_of(launched_early(cuda_matmul_kernel(problem, GPU)), TARGET)
    assert b"use_programtic_dependent_launch" in source.data.kernels
    kernel = packed_gemv_kernel(problem)
    (report,) = reports_of(kernel, TARGET)
    assert report.registers * 256 * blocks <= 1 << 16 and report.spill_stores == 0
    assert n * k * 2 < blocks * GPU.multiprocessors * shared_bytes(1, k) and shared_bytes(1, k) * blocks <= SHARED_BYTES
    assert list(kernel.attrs[READS_EARLY]) == [1]


@pytest.mark.skipif(nvdisasm() is None, reason="no nvdisasm")
def test_only_the_weight_is_loaded_before_the_wait():
    problem = problem_of(1, 2048, 1024, result="float32", epilogue="add(x0, cast(x2, 'float32'))")
    (source,) = sources_of(launched_early(packed_gemv_kernel(problem)), TARGET)
    text = disassembled(compile_source(source).code)
    assert text.rindex("UBLKCP") < text.index("ACQBULK") < text.index("LDG") < text.rindex("LDG") < text.index("HMMA")


def test_other_products_are_left_to_other_kernels():
    one = problem_of(1, 1024, 128)
    assert unsupported_reason(one, GPU) == ""
    others = [
        problem_of(2, 1024, 128), problem_of("s0", 1024, 128), problem_of(1, 1024, 96), problem_of(1, 64, 128),
        problem_of(1, 1024, 128, "int8", "int32", "int32"), problem_of(1, 1024, 128, "float32", tf32=True),
        problem_of(1, 50257, 4096), problem_of(1, 1024, 128, batch=(2,)), replace(one, second=one.rhs),
        replace(one, sent=SentSum(0, 2, 0, 1 << 20)),
    ]  # fmt: skip
    assert all(unsupported_reason(problem, GPU) for problem in others)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n", "k"), [(1, 5120, 2048), (8, 2048, 4096), (3, 2568, 2112), (1, 576, 7168)])
def test_on_a_gpu(m, n, k):
    for dtype, tolerance in (("float16", 1e-3), ("bfloat16", 1e-2)):
        problem = problem_of(m, n, k, dtype, epilogue=BIAS_RELU)
        check(problem, tolerance, is_on_gpu=True)
