"""Products with weights of few bits that come in stages, by the interpreter of GPU kernels."""

from __future__ import annotations

import dataclasses

import pytest

from relax_hetero.tir.cuda.matmul.block_stages import StagedPlan
from tir.cuda.matmul.test_block_product_on_gpus import GPU, check, problem_of

SMALL = dataclasses.replace(GPU, multiprocessors=1)


@pytest.mark.parametrize(
    ("problem", "m", "plan"),
    [
        (problem_of(2, 20, 256, "float32", 32), 2, StagedPlan(1, 1, 2, 1, run=1, stages=2)),
        (problem_of(1, 40, 512, "float16", 64, zeros="uint8"), 1, StagedPlan(1, 1, 2, 1, run=2, stages=2)),
        (
            problem_of(17, 52, 256, "float16", 32),
            17,
            StagedPlan(2, 3, 2, 1, run=1, stages=3, holds_rows=False),
        ),
        (
            problem_of(9, 40, 128, "bfloat16", 128, "float32", "float32"),
            9,
            StagedPlan(2, 2, 1, 1, run=2, stages=1, holds_rows=False),
        ),
        (
            problem_of(12, 20, 128, "bfloat16", 16, bits=8),
            12,
            StagedPlan(1, 2, 2, 1, run=1, stages=2, holds_rows=False),
        ),
    ],
)
def test_products(problem, m, plan):
    check(problem, m, plan, gpu=SMALL)
