"""Chunks of tokens over pages by Hopper's warpgroups, by the interpreter of GPU kernels and on GPUs."""

from __future__ import annotations

import numpy as np
import pytest
from tvm.target import Target

from cuda_reports import reports_of
from gpu_interpreter import run
from relax_hetero.errors import EncodingError
from relax_hetero.target.element_types import numpy_dtype
from relax_hetero.target.gpu_target import gpu_target_of
from relax_hetero.tir.cuda.paged.cuda_cached_attention import page_append_kernel, wgmma_chunk_kernel, wgmma_chunk_plan
from relax_hetero.tir.cuda.paged.paged_chunk import ChunkPlan
from seeds import fresh_rng
from tir.cuda.gpu_runs import needs_gpu
from tir.cuda.paged.paged_cases import Call, case, check
from tir.cuda.paged.paged_runs import on_gpu

TARGET = Target({"kind": "cuda", "arch": "sm_90a"})
GPU = gpu_target_of(TARGET)
OLD_GPU = gpu_target_of(Target({"kind": "cuda", "arch": "sm_90"}))
LARGE = case((300,), 32, 8, 128, chunk=300, rotary="halves", rotated=128)

CASES = {
    "behind others, padded": case((100,), heads=1, kv_heads=1, chunk=40, padded=3, rotary="pairs", rotated=16),
    "window, softcap, norms": case(
        (190,), heads=1, kv_heads=1, chunk=10, window=40, softcap=3.0, has_q_norm=True, has_k_norm=True, dtype="float32"
    ),
}
MORE = {
    "large": LARGE,
    "rows of two tiles": case((0,), chunk=165, padded=5, dtype="bfloat16", page_dtype="bfloat16"),
    **CASES,
}


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name):
    call = Call(CASES[name], fresh_rng())
    work = call.work
    out = np.full((work.rows, work.heads * work.size), np.nan, numpy_dtype(work.dtype))
    arguments = call.arguments()
    pages = arguments[1] = call.pages.copy()
    run(page_append_kernel(work, GPU), *arguments, arch="sm_90a")
    run(wgmma_chunk_kernel(work, GPU, ChunkPlan(4, 2)), *arguments, out, arch="sm_90a")
    check(call, out, pages)


@pytest.mark.slow
def test_no_accumulator_is_waited_for():
    (report,) = reports_of(wgmma_chunk_kernel(LARGE.work, GPU, wgmma_chunk_plan(LARGE.work, GPU)), TARGET)
    assert (report.spill_stores, report.serialized) == (0, "")


def test_which_chunks_have_this_kernel():
    assert wgmma_chunk_plan(CASES["behind others, padded"].work, GPU) is None, "fewer rows than a block has"
    assert wgmma_chunk_plan(LARGE.work, OLD_GPU) is None
    with pytest.raises(EncodingError, match="sm_90: it lacks wgmma"):
        wgmma_chunk_kernel(LARGE.work, OLD_GPU, ChunkPlan(8, 2))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", MORE)
def test_on_a_gpu(name):
    call = Call(MORE[name], fresh_rng())
    kernel = wgmma_chunk_kernel(call.work, GPU, ChunkPlan(8, 3))
    check(call, *on_gpu(kernel, call, page_append_kernel(call.work, GPU)))
