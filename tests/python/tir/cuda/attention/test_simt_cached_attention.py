"""Attention over pages without tensor cores, by the interpreter of GPU kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tvm.target import Target

from gpu_interpreter import run
from relax_hetero.errors import EncodingError
from relax_hetero.target.element_types import numpy_dtype
from relax_hetero.target.gpu_target import gpu_target_of
from relax_hetero.tir.cuda.attention.cuda_attention import cuda_cached_attention_kernel
from relax_hetero.tir.cuda.core.dialect import dialect_of
from seeds import fresh_rng
from tir.cuda.attention.paged_cases import Call, case, check

GPU = gpu_target_of(Target({"kind": "opencl", "max_shared_memory_per_block": 32 << 10}))

CASES = {
    "page edges, rotated halves": case((0, 63, 64), rotary="halves", rotated=32),
    "norms, pairs, float32": case(
        (130, 0), rotary="pairs", rotated=16, has_q_norm=True, has_k_norm=True, dtype="float32", page_dtype="float32"
    ),
    "window, softcap, padded": case(
        (200, 5), window=70, softcap=3.0, padded=1, page_dtype="bfloat16", dtype="bfloat16"
    ),
    "one head of keys, sinks": case((70,), heads=3, kv_heads=1, size=80, rotary="halves", rotated=40, sinks=True),
    "a chunk": case((70,), heads=2, kv_heads=1, size=16, chunk=5, padded=2, window=40, dtype="float32"),
    "several tokens of each sequence": case((62, 3), heads=2, kv_heads=1, size=16, verify=3),
    "keys that are values": case((66,), heads=2, kv_heads=1, size=96, shared_values=64, dtype="float32"),
}


def call_on_gpu(call: Call) -> np.ndarray:
    """The result of both kernels; pages are written in place."""
    work, arguments = call.work, call.arguments()
    arguments[1] = pages = call.pages.copy()
    out = np.full((work.rows, work.heads * work.value_size), np.nan, numpy_dtype(work.dtype))
    with dialect_of(GPU):
        append, kernel = (cuda_cached_attention_kernel(each, GPU) for each in (work.append_problem, work.problem))
    run(append, *arguments)
    run(kernel, *arguments, out)
    assert not out[call.valid :].astype("float32").any()  # padding
    check(call, out, pages)
    return out


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name):
    call_on_gpu(Call(CASES[name], fresh_rng()))


def test_what_no_kernel_reads_is_refused():
    problem = case((3,), size=12, rotary="").work.problem
    for wrong, message in (
        (problem, "heads of 12 and values of 12, expected multiples of 8"),
        (replace(case((3,), page_dtype="float32").work, page_dtype="int8").problem, "pages of int8"),
    ):
        with pytest.raises(EncodingError, match=message):
            cuda_cached_attention_kernel(wrong, GPU)
