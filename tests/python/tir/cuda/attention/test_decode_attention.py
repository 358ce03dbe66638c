"""Decoding over pages on GPUs, by the interpreter of GPU kernels."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tvm.target import Target

from gpu_interpreter import run
from relax_hetero.errors import EncodingError
from relax_hetero.target.element_types import numpy_dtype
from relax_hetero.target.gpu_target import gpu_target_of
from relax_hetero.tir.cuda.attention.attention_plan import decode_plan, paged_plan
from relax_hetero.tir.cuda.attention.decode_attention import decode_attention_kernel
from seeds import fresh_rng
from tir.cuda.attention.paged_cases import Call, case, check
from tir.cuda.attention.paged_runs import on_gpu
from tir.cuda.gpu_runs import needs_gpu

GPU = gpu_target_of(Target({"kind": "cuda", "arch": "sm_90a"}))
ONE, TWO = 1, 2
"""Blocks of a cluster."""

CASES = {
    "page edges, rotated halves": (case((0, 1, 63, 64, 65), rotary="halves", rotated=32), ONE),
    "two blocks of a cluster, norms, pairs": (
        case((130, 0), rotary="pairs", rotated=16, has_q_norm=True, has_k_norm=True, dtype="float32"),
        TWO,
    ),
    "window, softcap, padded": (
        case((200, 5), window=70, softcap=3.0, padded=1, page_dtype="bfloat16", dtype="bfloat16"),
        TWO,
    ),
    "one head of keys, halves in part": (
        case((70,), heads=3, kv_heads=1, size=80, rotary="halves", rotated=40, page_dtype="bfloat16"),
        TWO,
    ),
    "more pages than stages": (case((200, 191), kv_heads=1, heads=2, rotary="halves", rotated=32), ONE),
    "three blocks of a cluster": (case((263, 30), rotary="halves", rotated=32), 3),
    "blocks of a cluster without a result": (case((500,), heads=1, kv_heads=1, size=16), 8),
    "sinks": (case((263, 3, 70), heads=6, kv_heads=2, sinks=True, padded=1), 3),
    "sinks, softcap": (case((70,), sinks=True, softcap=2.0, dtype="bfloat16"), ONE),
    "a full tile of heads": (case((64,), heads=16, kv_heads=1, size=16), ONE),
    "wide": (case((66,), heads=4, kv_heads=1, size=256, rotary="halves", rotated=256), ONE),
}


def kernel(work, split, teams=1):
    plan = dataclasses.replace(paged_plan(work.problem, 16, 2, split), teams=teams)
    return decode_attention_kernel(work.problem, GPU, plan)


@pytest.mark.parametrize("rows", [1, 2, 8, 64])
@pytest.mark.parametrize("window", [0, 70, 5000])
def test_a_plan_for_many_pages_is_that_for_any_more(rows, window):
    work = dataclasses.replace(case((64,)).work, rows=rows, window=window)
    plans = {decode_plan(dataclasses.replace(work, max_pages=pages).problem, GPU) for pages in (24, 100, 2048)}
    assert len(plans) == 1


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name):
    chosen, split = CASES[name]
    call = Call(chosen, fresh_rng())
    out = np.full((call.work.rows, call.work.heads * call.work.size), np.nan, numpy_dtype(call.work.dtype))
    arguments = call.arguments()
    pages = arguments[1] = call.pages.copy()
    run(kernel(call.work, split), *arguments, out, arch="sm_90a")
    check(call, out, pages)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["more pages than stages", "sinks", "blocks of a cluster without a result"])
def test_teams_of_warps_split_the_pages_of_a_block(name):
    chosen, split = CASES[name]
    call = Call(chosen, fresh_rng())
    out, arguments = np.full((call.work.rows, call.work.heads * call.work.size), np.nan, "float16"), call.arguments()
    arguments[1] = call.pages.copy()
    run(kernel(call.work, split, teams=2), *arguments, out, arch="sm_90a")
    check(call, out, arguments[1])


def test_pages_that_are_not_there_are_left_out():
    call = Call(case((70,), heads=2, kv_heads=1, size=16, slots=2), fresh_rng())
    out = np.full((1, 32), np.nan, "float16")
    call.table[1, 0] = -1
    pages = call.pages.copy()
    run(
        kernel(call.work, ONE),
        call.qkv,
        pages,
        call.table,
        call.sequences,
        call.positions,
        out,
        arch="sm_90a",
    )
    call.history[0] = call.history[0][:, 64:]
    want, _ = call.expected()
    np.testing.assert_allclose(out.astype("float64"), want, rtol=4e-3, atol=4e-3)


def test_a_block_asks_for_no_more_pages_than_it_has():
    def plan(rows):
        work = Call(case((500,), 32, 8, 128), fresh_rng()).work
        chosen = decode_plan(dataclasses.replace(work, rows=rows, max_pages=8).problem, GPU)
        return chosen.split_keys, chosen.stages

    # A GPU holds 120 blocks of clusters of four on its 132 multiprocessors: 256 of them would take two rounds.
    assert (plan(8), plan(32)) == ((3, 3), (1, 3))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("rows", "kv_heads", "want"), [(1, 4, (8, 2)), (1, 8, (8, 1)), (8, 4, (6, 1)), (32, 4, (2, 1))]
)
def test_pages_are_split_over_all_multiprocessors(rows, kv_heads, want):
    """Pages are split over the blocks of a cluster, and over teams of the blocks if these are few."""
    work = dataclasses.replace(Call(case((500,), 32, kv_heads, 128), fresh_rng()).work, rows=rows, max_pages=65)
    plan = decode_plan(work.problem, GPU)
    assert (plan.split_keys, plan.teams) == want
    assert plan.teams * plan.stages * 2 * 64 * 128 * 2 < GPU.shared_bytes


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name):
    chosen, split = CASES[name]
    call = Call(chosen, fresh_rng())
    check(call, *on_gpu(kernel(call.work, split), call))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("rows", [1, 8])
def test_a_large_model_on_a_gpu(rows):
    lengths = tuple(range(500, 500 + 37 * rows, 37))
    call = Call(case(lengths, 32, 8, 128, rotary="halves", rotated=128), fresh_rng())
    check(call, *on_gpu(decode_attention_kernel(call.work.problem, GPU), call))


def test_unsupported_problems_name_the_reason():
    with pytest.raises(EncodingError, match="heads of 24, expected a multiple of 16"):
        decode_attention_kernel(case((3,), size=24).work.problem, GPU)
    with pytest.raises(EncodingError, match="17 query heads per key head, expected at most 16"):
        decode_attention_kernel(case((3,), heads=17, kv_heads=1).work.problem, GPU)
    with pytest.raises(EncodingError, match="sm_80 lacks bulk copies"):
        decode_attention_kernel(case((3,)).work.problem, gpu_target_of(Target({"kind": "cuda", "arch": "sm_80"})))
