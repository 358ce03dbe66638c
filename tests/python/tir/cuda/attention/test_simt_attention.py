"""Attention by plain threads of GPUs, by the interpreter of GPU kernels."""

from __future__ import annotations

import numpy as np
import pytest
from tvm.target import Target

from relax_hetero.target.gpu_target import gpu_target_of
from relax_hetero.tir.cuda.attention.cuda_attention import cuda_attention_kernel
from relax_hetero.tir.cuda.attention.simt_attention import PLANS, choose_simt_plan, simt_attention_kernel
from seeds import fresh_rng
from tir.attention_runs import case, problem_of
from tir.cuda.attention.attention_on_gpus import check
from tir.cuda.gpu_runs import needs_gpu

GPU = gpu_target_of(Target({"kind": "cuda", "arch": "sm_90a"}))
OLD = gpu_target_of(Target({"kind": "cuda", "arch": "sm_52"}))
RNG = np.random.default_rng(9)
BY_HEADS = ("b h m d", "b g n d", "b g n e", "b h m e")
ADDED = "add(multiply(x0, 0.25), x1)"
CHOSEN = "where(x1, multiply(x0, 0.25), -inf)"

CASES = {
    "edges": (case(1, 2, 2, 70, 100, 36, 70), PLANS[0]),
    "not aligned": (case(2, 1, 1, 19, 70, 17, 9, causal="bottom_right"), PLANS[1]),
    "groups together": (case(1, 4, 2, 3, 50, 16, 16, maps=BY_HEADS, causal="bottom_right"), None),
    "rows without keys": (case(1, 1, 1, 40, 20, 8, 8, causal="bottom_right", nan_to_zero=True), PLANS[2]),
    "added": (
        case(1, 2, 2, 20, 70, 16, 16, mask=RNG.standard_normal((1, 2, 20, 70)).astype("float32"), scores=ADDED),
        PLANS[1],
    ),
    "hidden": (case(1, 1, 1, 20, 30, 16, 16, mask=RNG.random((1, 1, 1, 30)) > 0.4, scores=CHOSEN), PLANS[3]),
    "halves": (case(1, 1, 1, 20, 30, 16, 16, dtype="bfloat16"), PLANS[1]),
    "symbolic": (case(2, 2, 1, 20, 70, 16, 16, symbolic=True, causal="top_left"), PLANS[1]),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name):
    one, plan = CASES[name]
    check(one, lambda problem: simt_attention_kernel(problem, GPU, plan), fresh_rng())


def test_every_gpu_has_a_kernel():
    large = case(1, 2, 2, 70, 100, 256, 256)
    assert choose_simt_plan(problem_of(large), OLD, 1).rows == 16  # 48 KB of shared memory
    for one, arch, name in (
        (large, "sm_52", "simt"),
        (case(1, 2, 2, 70, 100, 64, 64, dtype="float16"), "sm_60", "simt"),
        (case(1, 2, 2, 70, 100, 64, 64, dtype="float16"), "sm_89", "mma"),
        (case(1, 2, 2, 70, 100, 300, 64, dtype="float16"), "sm_90a", "simt"),
        (case(1, 2, 2, 70, 100, 64, 64, dtype="float16"), "sm_90a", "wgmma"),
    ):
        text = str(cuda_attention_kernel(problem_of(one), gpu_target_of(Target({"kind": "cuda", "arch": arch}))))
        kind = "wgmma" if "ptx.wgmma" in text else "mma" if "ptx.mma" in text else "simt"
        assert kind == name, arch


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name):
    one, plan = CASES[name]
    check(one, lambda problem: simt_attention_kernel(problem, GPU, plan), fresh_rng(), on_gpu=True)
