"""Attention on Hopper's tensor cores, by the interpreter of GPU kernels."""

from __future__ import annotations

import pytest
from tvm.target import Target

from tir.cuda.attention.attention_on_gpus import check
from tir.attention_runs import case
from relax_hetero.target.gpu_target import gpu_target_of
from relax_hetero.tir.cuda.attention.attention_plan import AttentionPlan
from relax_hetero.tir.cuda.attention.wgmma_attention import wgmma_attention_kernel
from seeds import fresh_rng

TARGET = Target({"kind": "cuda", "arch": "sm_90a"})
GPU = gpu_target_of(TARGET)


def solved(one, plan=None):
    check(one, lambda problem: wgmma_attention_kernel(problem, GPU, plan), fresh_rng())


def test_tiles_of_keys_and_rows_that_do_not_fill_them():
    solved(case(1, 2, 2, 70, 200, 64, 64, dtype="float16"), AttentionPlan(2, 64, 2))
