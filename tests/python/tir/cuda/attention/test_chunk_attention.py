"""Chunks of tokens over pages by mma.sync and by wgmma, by the interpreter of GPU kernels and on GPUs."""

from __future__ import annotations

import numpy as np
import pytest
from tvm.target import Target

from cuda_reports import reports_of
from gpu_interpreter import run
from relax_hetero.errors import EncodingError
from relax_hetero.target.element_types import numpy_dtype
from relax_hetero.target.gpu_target import gpu_target_of
from relax_hetero.tir.cuda.attention.attention_plan import chunk_plan, paged_plan, wgmma_chunk_plan
from relax_hetero.tir.cuda.attention.cuda_attention import cuda_cached_attention_kernel
from relax_hetero.tir.cuda.attention.mma_attention import mma_attention_kernel
from relax_hetero.tir.cuda.attention.page_append import page_append_kernel
from relax_hetero.tir.cuda.attention.wgmma_attention import wgmma_attention_kernel
from seeds import fresh_rng
from tir.cuda.attention.paged_cases import Call, case, check
from tir.cuda.attention.paged_runs import on_gpu
from tir.cuda.gpu_runs import needs_gpu

TARGET = Target({"kind": "cuda", "arch": "sm_90a"})
GPU = gpu_target_of(TARGET)
OLD_GPU = gpu_target_of(Target({"kind": "cuda", "arch": "sm_90"}))
LARGE = case((300,), 32, 8, 128, chunk=300, rotary="halves", rotated=128)
WINDOW = {"window": 40, "softcap": 3.0, "has_q_norm": True, "has_k_norm": True, "dtype": "float32"}
PADDED = {"chunk": 40, "padded": 3, "rotary": "pairs", "rotated": 16}

MMA = {
    "from the beginning": case((0,), chunk=70, rotary="halves", rotated=32),
    "behind others, padded": case((100,), heads=2, kv_heads=1, **PADDED),
    "window, softcap, norms": case((70,), heads=2, kv_heads=1, chunk=65, **WINDOW),
    "sinks": case((20,), heads=4, kv_heads=2, chunk=50, sinks=True, dtype="bfloat16"),
    "wide, one row": case((64,), heads=2, kv_heads=2, size=256, chunk=1, dtype="bfloat16", page_dtype="bfloat16"),
}
WGMMA = {
    "behind others, padded": case((100,), heads=1, kv_heads=1, **PADDED),
    "window, softcap, norms": case((190,), heads=1, kv_heads=1, chunk=10, **WINDOW),
    "size of no stripes, sinks": case((20,), heads=2, kv_heads=1, size=48, chunk=70, sinks=True),
    "sinks, softcap": case((20,), heads=2, kv_heads=1, chunk=20, sinks=True, softcap=2.0),
}
ON_GPU = {
    "large": LARGE,
    "rows of two tiles": case((0,), chunk=165, padded=5, dtype="bfloat16", page_dtype="bfloat16"),
}
KERNELS = [
    *((mma_attention_kernel, 32, 2, MMA[name]) for name in MMA),
    *((wgmma_attention_kernel, 64, 2, WGMMA[name]) for name in WGMMA),
]
NAMES = [*(f"mma, {name}" for name in MMA), *(f"wgmma, {name}" for name in WGMMA)]
KERNELS_ON_GPU = [
    *((mma_attention_kernel, 32, 2, chosen) for chosen in MMA.values()),
    *((wgmma_attention_kernel, 128, 3, chosen) for chosen in (*WGMMA.values(), *ON_GPU.values())),
]


@pytest.mark.parametrize(("kernel", "rows", "stages", "chosen"), KERNELS, ids=NAMES)
def test_against_float64(kernel, rows, stages, chosen):
    call = Call(chosen, fresh_rng())
    work = call.work
    out = np.full((work.rows, work.heads * work.size), np.nan, numpy_dtype(work.dtype))
    arguments = call.arguments()
    pages = arguments[1] = call.pages.copy()
    run(page_append_kernel(work.append_problem, GPU), *arguments, arch="sm_90a")
    run(kernel(work.problem, GPU, paged_plan(work.problem, rows, stages)), *arguments, out, arch="sm_90a")
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
        run(page_append_kernel(work.append_problem, GPU), *arguments, arch="sm_90a")
        kernel = mma_attention_kernel(work.problem, GPU, paged_plan(work.problem, 32, 2))
        run(kernel, *arguments, out, arch="sm_90a")
        return out[: end - begin]

    pages = call.pages.copy()
    full = rows_of(0, 70)
    pages = call.pages.copy()
    np.testing.assert_array_equal(np.concatenate([rows_of(0, 29), rows_of(29, 70)]), full)


@pytest.mark.slow
def test_no_accumulator_is_waited_for():
    (report,) = reports_of(wgmma_attention_kernel(LARGE.work.problem, GPU), TARGET)
    assert (report.spill_stores, report.serialized) == (0, "")


@pytest.mark.parametrize(
    ("chosen", "gpu", "has_wgmma"),
    [(LARGE, GPU, True), (LARGE, OLD_GPU, False), (WGMMA["behind others, padded"], GPU, False)],
)
def test_which_chunks_are_multiplied_by_wgmma(chosen, gpu, has_wgmma):
    assert ("ptx.wgmma" in str(cuda_cached_attention_kernel(chosen.work.problem, gpu))) == has_wgmma


def test_rows_of_blocks():
    large = LARGE.work.problem
    assert (wgmma_chunk_plan(large, GPU).rows, chunk_plan(large, OLD_GPU).rows) == (128, 128)
    with pytest.raises(EncodingError, match="sm_90 lacks wgmma"):
        wgmma_attention_kernel(large, OLD_GPU)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("kernel", "rows", "stages", "chosen"), KERNELS_ON_GPU, ids=[*NAMES, *ON_GPU])
def test_on_a_gpu(kernel, rows, stages, chosen):
    call = Call(chosen, fresh_rng())
    problem, append = call.work.problem, page_append_kernel(call.work.append_problem, GPU)
    check(call, *on_gpu(kernel(problem, GPU, paged_plan(problem, rows, stages)), call, append))


@pytest.mark.gpu
@needs_gpu
def test_a_large_model_by_mma_on_a_gpu():
    call = Call(LARGE, fresh_rng())
    append = page_append_kernel(call.work.append_problem, GPU)
    check(call, *on_gpu(mma_attention_kernel(call.work.problem, GPU), call, append))
