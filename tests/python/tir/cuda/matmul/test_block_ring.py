"""Products with weights of few bits that come through a ring of stages, by the interpreter of GPU kernels."""

from __future__ import annotations

import dataclasses

import pytest

from cuda_reports import reports_of
from relax_hetero.tir.cuda.matmul.cuda_quantized_matmul import quantized_matmul_kernel
from relax_hetero.tir.cuda.matmul.ring_body import RingPlan, ring_plan
from tir.cuda.gpu_runs import needs_gpu
from tir.cuda.matmul.test_block_product_on_gpus import GPU, OLD_GPU, TARGET, check, problem_of

SMALL = dataclasses.replace(GPU, multiprocessors=1)


@pytest.mark.parametrize(
    ("problem", "m", "plan"),
    [
        (problem_of(1, 40, 512, "float16", 64, zeros="uint8"), 1, RingPlan(1, 1, 2, 1, run=2, stages=2)),
        (
            problem_of(1, 50, 320, "float16", 32, epilogue="cast(relu(add(x0, x1)), 'float16')"),
            1,
            RingPlan(1, 1, 2, 1, run=1, stages=3),
        ),
        (problem_of(2, 20, 192, "bfloat16", 64, "float32", "float32"), 2, RingPlan(1, 1, 2, 1, run=1, stages=4)),
        (problem_of(2, 35, 160, "float16", 16, bits=8), 2, RingPlan(1, 1, 2, 1, run=2, stages=2)),
        (problem_of(1, 20, 1024, "float16", 128), 1, RingPlan(1, 1, 4, 1, run=2, stages=2)),
    ],
)
def test_products(problem, m, plan):
    check(problem, m, plan, tolerance=1e-3 if problem.epilogue else 1e-6, gpu=SMALL)


def test_which_products_have_a_ring():
    def plan_of(m, n=4096, depth=4096, dtype="float16", block=32, gpu=GPU):
        plan = ring_plan(problem_of(m, n, depth, dtype, block), gpu)
        return plan and (plan.run, plan.stages)

    assert plan_of(1) == (2, 5)
    assert plan_of(2, depth=1024) == (1, 11)
    assert plan_of(3) is None, "more rows are as fast with weights in registers"
    assert plan_of("s0") is None
    assert plan_of(1, depth=512) is None, "too few chunks for all warps"
    assert plan_of(1, depth=4104) is None, "a column has whole chunks"
    assert plan_of(1, dtype="float32") is None
    assert plan_of(1, depth=4096, block=4096) is None, "a stage has whole blocks"
    assert plan_of(1, gpu=OLD_GPU) is None


def test_one_block_per_multiprocessor():
    kernel = quantized_matmul_kernel(problem_of(1, 14336, 4096, "float16", 32), GPU)
    (report,) = reports_of(kernel, TARGET)
    assert report.spill_stores == 0
    assert f"({(115 << 10)},)" in kernel.script(), "more than half of the shared memory"


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("m", "n", "depth", "block", "zeros"),
    [(1, 9000, 4096, 32, ""), (1, 300, 2880, 32, "float32"), (2, 4096, 11008, 128, "uint8"), (2, 32000, 2048, 32, "")],
)
def test_on_a_gpu(m, n, depth, block, zeros):
    problem = problem_of(m, n, depth, "float16", block, zeros=zeros)
    assert ring_plan(problem, GPU)
    check(problem, m, tolerance=1e-5, is_on_gpu=True)
