"""Products with weights of few bits that come in stages, by the interpreter of GPU kernels."""

from __future__ import annotations

import dataclasses

import pytest

from cuda_reports import reports_of
from relax_hetero.tir.cuda.matmul.cuda_quantized_matmul import quantized_matmul_kernel
from relax_hetero.tir.cuda.matmul.staged_body import StagedPlan, staged_plan
from tir.cuda.gpu_runs import needs_gpu
from tir.cuda.matmul.test_block_product_on_gpus import GPU, TARGET, check, problem_of

SMALL = dataclasses.replace(GPU, multiprocessors=1)


@pytest.mark.parametrize(
    ("problem", "m", "plan"),
    [
        (problem_of(1, 40, 512, "float16", 64, zeros="uint8"), 1, StagedPlan(1, 1, 2, 1, stages=2)),
        (problem_of(17, 52, 256, "float16", 32), 17, StagedPlan(2, 3, 2, 1, stages=3)),
        (problem_of(9, 40, 128, "bfloat16", 64, "float32", "float32"), 9, StagedPlan(2, 2, 1, 1, stages=1)),
        (problem_of(12, 20, 128, "bfloat16", 16, bits=8), 12, StagedPlan(1, 2, 2, 1, stages=2)),
    ],
)
def test_products(problem, m, plan):
    check(problem, m, plan, gpu=SMALL)


def test_which_products_have_stages():
    def fragments(m, n, depth=4096, dtype="float16", block=32):
        plan = staged_plan(problem_of(m, n, depth, dtype, block), GPU)
        return plan and plan.fragments

    assert (fragments(32, 14336), fragments(32, 4096)) == (7, 2), "blocks for most multiprocessors"
    assert fragments(16, 4096) is None
    assert fragments(33, 4096) is None
    assert fragments("s0", 4096) is None
    assert fragments(32, 4096, depth=640) is None, "warps have equal parts of k"
    assert fragments(32, 4096, dtype="float32") is None
    assert fragments(32, 4096, block=128) is None, "a chunk has whole blocks"


@pytest.mark.slow
def test_weights_on_their_way_take_no_registers():
    (report,) = reports_of(quantized_matmul_kernel(problem_of(32, 14336, 4096, "float16", 32), GPU), TARGET)
    assert report.spill_stores == 0


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("m", "n", "depth", "block", "zeros"),
    [
        (32, 9000, 4096, 32, ""),
        (32, 14330, 4096, 32, ""),
        (30, 30000, 512, 32, "uint8"),
        (17, 4096, 14336, 32, "uint8"),
        (25, 500, 1024, 64, "float32"),
    ],
)
def test_on_a_gpu(m, n, depth, block, zeros):
    problem = problem_of(m, n, depth, "float16", block, zeros=zeros)
    assert staged_plan(problem, GPU)
    check(problem, m, tolerance=1e-5, is_on_gpu=True)
