"""Attention by mma.sync, by the interpreter of GPU kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tvm.target import Target

from relax_hetero.errors import EncodingError
from relax_hetero.target.gpu_target import gpu_target_of
from relax_hetero.tir.cuda.attention.mma_attention import mma_attention_kernel
from seeds import fresh_rng
from tir.attention_runs import case, problem_of
from tir.cuda.attention.attention_on_gpus import check
from tir.cuda.gpu_runs import needs_gpu

GPU = gpu_target_of(Target({"kind": "cuda", "arch": "sm_80"}))
RNG = np.random.default_rng(11)
BY_HEADS = ("b h m d", "b g n d", "b g n e", "b h m e")
CHOSEN = "where(x1, multiply(x0, 0.25), -inf)"
ADDED = "add(multiply(x0, 0.25), x1)"
NEAR = np.where(abs(np.arange(40)[:, None] - np.arange(150) + 50) < 12, 0, -1e30).astype("float32")[None, None]
"""Whole tiles of keys are hidden from a row, before and after those that it sees."""

CASES = {
    "edges": case(1, 2, 2, 70, 150, 72, 40, dtype="float16"),
    "groups together": case(1, 4, 2, 3, 70, 32, 32, maps=BY_HEADS, causal="bottom_right", dtype="bfloat16"),
    "rows without keys": case(1, 1, 1, 40, 20, 8, 8, causal="bottom_right", nan_to_zero=True, dtype="float16"),
    "hidden": case(1, 1, 1, 20, 80, 16, 16, mask=RNG.random((1, 1, 20, 80)) > 0.4, scores=CHOSEN, dtype="float16"),
    "hidden by a sum": case(1, 1, 1, 40, 150, 16, 16, mask=NEAR, scores=ADDED, dtype="float16"),
    "not aligned": case(1, 2, 2, 21, 33, 19, 13, dtype="float16", causal="top_left"),
    "wide, symbolic": case(1, 1, 1, 20, 70, 256, 160, symbolic=True, dtype="float16"),
}


SINGLES = {
    "edges": case(1, 2, 2, 70, 150, 72, 40),
    "groups together": case(1, 4, 2, 3, 70, 32, 32, maps=BY_HEADS, causal="bottom_right"),
    "not aligned, hidden": case(1, 1, 1, 21, 83, 19, 13, mask=RNG.random((1, 1, 21, 83)) > 0.4, scores=CHOSEN),
    "hidden by a sum": case(1, 1, 1, 40, 150, 16, 16, mask=NEAR, scores=ADDED),
    "wide, symbolic": case(1, 1, 1, 20, 70, 128, 96, symbolic=True),
}


def tf32_kernel(problem):
    return mma_attention_kernel(replace(problem, tf32=True), GPU)


@pytest.mark.parametrize("name", SINGLES)
def test_float32_by_tf32(name):
    check(SINGLES[name], tf32_kernel, fresh_rng(), "sm_80", unit=2.0**-10)


def test_float32_is_exact_where_nothing_says_otherwise():
    with pytest.raises(EncodingError, match="element types"):
        mma_attention_kernel(problem_of(SINGLES["edges"]), GPU)
    with pytest.raises(EncodingError, match="heads of 136 and 8, expected at most 128"):
        tf32_kernel(problem_of(case(1, 1, 1, 8, 8, 136, 8)))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name):
    check(CASES[name], lambda problem: mma_attention_kernel(problem, GPU), fresh_rng(), "sm_80")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name):
    check(CASES[name], lambda problem: mma_attention_kernel(problem, GPU), fresh_rng(), "sm_80", on_gpu=True)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", SINGLES)
def test_float32_by_tf32_on_a_gpu(name):
    check(SINGLES[name], tf32_kernel, fresh_rng(), "sm_80", on_gpu=True, unit=2.0**-10)
