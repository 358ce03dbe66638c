"""Chunks of tokens over pages on GPUs, by the interpreter of GPU kernels."""

from __future__ import annotations

import numpy as np
import pytest
from tvm.target import Target

from gpu_interpreter import run
from relax_hetero.target.element_types import numpy_dtype
from relax_hetero.target.gpu_target import gpu_target_of
from relax_hetero.tir.cuda.paged.cuda_cached_attention import page_append_kernel
from relax_hetero.tir.cuda.paged.paged_chunk import ChunkPlan, paged_chunk_kernel
from seeds import fresh_rng
from tir.cuda.gpu_runs import needs_gpu
from tir.cuda.paged.paged_cases import Call, case, check
from tir.cuda.paged.paged_runs import on_gpu

GPU = gpu_target_of(Target({"kind": "cuda", "arch": "sm_90a"}))
PLAN = ChunkPlan(2, 2)

CASES = {
    "from the beginning": case((0,), chunk=70, rotary="halves", rotated=32),
    "behind others, padded": case((100,), heads=2, kv_heads=1, chunk=40, padded=3, rotary="pairs", rotated=16),
    "window, softcap, norms": case(
        (70,), heads=2, kv_heads=1, chunk=65, window=40, softcap=3.0, has_q_norm=True, has_k_norm=True, dtype="float32"
    ),
    "wide, one row": case((64,), heads=2, kv_heads=2, size=256, chunk=1, dtype="bfloat16", page_dtype="bfloat16"),
}


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name):
    call = Call(CASES[name], fresh_rng())
    work = call.work
    out = np.full((work.rows, work.heads * work.size), np.nan, numpy_dtype(work.dtype))
    arguments = call.arguments()
    pages = arguments[1] = call.pages.copy()
    run(page_append_kernel(work, GPU), *arguments, arch="sm_90a")
    run(paged_chunk_kernel(work, GPU, PLAN), *arguments, out, arch="sm_90a")
    check(call, out, pages)


@pytest.mark.slow
def test_a_chunk_that_is_cut_has_the_same_bits():
    """The same kernel computes both; its last rows are of no sequence then."""
    call = Call(case((100,), heads=2, kv_heads=1, chunk=70, window=40, rotary="halves", rotated=32), fresh_rng())
    work = call.work
    qkv, _, table, sequences, positions, rotation = call.arguments()

    def rows_of(begin: int, end: int) -> np.ndarray:
        """The result of some rows, whose keys and values come into the pages."""
        out = np.full((work.rows, work.heads * work.size), np.nan, numpy_dtype(work.dtype))
        rolled = [np.roll(array, -begin, axis=0) for array in (qkv, sequences, positions, rotation)]
        rolled[1][end - begin :] = -1
        arguments = [rolled[0], pages, table, *rolled[1:]]
        run(page_append_kernel(work, GPU), *arguments, arch="sm_90a")
        run(paged_chunk_kernel(work, GPU, PLAN), *arguments, out, arch="sm_90a")
        return out[: end - begin]

    pages = call.pages.copy()
    full = rows_of(0, 70)
    pages = call.pages.copy()
    np.testing.assert_array_equal(np.concatenate([rows_of(0, 29), rows_of(29, 70)]), full)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name):
    call = Call(CASES[name], fresh_rng())
    check(call, *on_gpu(paged_chunk_kernel(call.work, GPU, PLAN), call, page_append_kernel(call.work, GPU)))


@pytest.mark.gpu
@needs_gpu
def test_a_large_model_on_a_gpu():
    call = Call(case((300,), 32, 8, 128, chunk=300, rotary="halves", rotated=128), fresh_rng())
    check(call, *on_gpu(paged_chunk_kernel(call.work, GPU), call, page_append_kernel(call.work, GPU)))
