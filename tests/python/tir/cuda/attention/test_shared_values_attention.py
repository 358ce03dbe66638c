"""Attention over pages whose keys are the values, of tokens and of chunks, by the interpreter of GPU kernels."""

from __future__ import annotations

import numpy as np
import pytest
from tvm.target import Target

from cuda_reports import reports_of
from gpu_interpreter import run
from relax_hetero.encoding.resolver import resolver_or_default
from relax_hetero.errors import EncodingError
from relax_hetero.target.element_types import numpy_dtype
from relax_hetero.target.gpu_target import gpu_target_of
from relax_hetero.tir.cuda.attention.attention_plan import shared_values_plan
from relax_hetero.tir.cuda.attention.page_append import page_append_kernel
from relax_hetero.tir.cuda.attention.shared_values_attention import shared_values_kernel
from seeds import fresh_rng
from tir.cuda.attention.paged_cases import Call, case, check, replace
from tir.cuda.attention.paged_runs import on_gpu
from tir.cuda.gpu_runs import needs_gpu

TARGETS = [Target({"kind": "cuda", "arch": arch}) for arch in ("sm_90", "sm_90a")]
GPU = gpu_target_of(TARGETS[1])
LATENT = {"size": 576, "kv_heads": 1, "rotary": "pairs", "rotated": 64, "shared_values": 512}
SMALL = {"size": 96, "kv_heads": 1, "rotary": "pairs", "rotated": 32, "shared_values": 64}

DECODE = {
    "page edges": (case((0, 1, 63, 64, 65), heads=16, **SMALL), 1),
    "20 heads, two blocks of a cluster": (case((130, 70), heads=20, **SMALL, padded=1), 2),
    "three blocks, norm, sinks, window": (
        case((300,), heads=3, **SMALL, has_k_norm=True, sinks=True, window=150, dtype="float32"),
        3,
    ),
    "two heads of keys, bfloat16": (
        case((70,), 8, 2, 128, shared_values=128, softcap=3.0, dtype="bfloat16", page_dtype="bfloat16"),
        1,
    ),
    "DeepSeek V2 Lite": (case((70,), heads=16, **LATENT, scale=0.07), 2),
}
CHUNKS = {
    "from the beginning": case((0,), heads=2, chunk=70, **SMALL),
    "behind others, padded, sinks": case((100,), heads=3, chunk=40, **SMALL, padded=3, sinks=True, dtype="float32"),
    "window, norm": case((70,), heads=1, chunk=65, **SMALL, window=40, has_k_norm=True),
    "DeepSeek V2 Lite": case((60,), heads=1, chunk=9, **LATENT, scale=0.07, dtype="bfloat16", page_dtype="bfloat16"),
    "wgmma, two blocks": case((30,), heads=2, chunk=100, **{**SMALL, "shared_values": 64}),
    "wgmma, padded, sinks, window": case(
        (100,), heads=1, chunk=70, **SMALL, padded=3, sinks=True, window=90, dtype="float32"
    ),
    "wgmma, softcap, no shared columns of keys": case(
        (0,), 2, 1, 128, chunk=64, shared_values=128, softcap=3.0, dtype="bfloat16", page_dtype="bfloat16"
    ),
    "wgmma, DeepSeek V2 Lite": case((60,), heads=1, chunk=64, **LATENT, scale=0.07),
}


def kernels(chosen):
    """Kernels before the last one, and that, of a case of `DECODE` or `CHUNKS`."""
    work, split = (chosen[0].work, chosen[1]) if isinstance(chosen, tuple) else (chosen.work, 1)
    appends = resolver_or_default(TARGETS[0]).appends_in_own_kernel(work.problem)
    plan = None if work.is_chunk else replace(shared_values_plan(work.problem, GPU), split_keys=split)
    kernel = shared_values_kernel(work.problem, GPU, plan)
    assert ("ptx.wgmma" in str(kernel)) == (work.is_chunk and work.rows >= 64)
    return [page_append_kernel(work.append_problem, GPU)] * appends, kernel


_CASES = [(name, chosen) for cases in (DECODE, CHUNKS) for name, chosen in cases.items()]


@pytest.mark.parametrize(
    "chosen",
    [pytest.param(chosen, id=name, marks=[pytest.mark.slow] * ("Lite" in name)) for name, chosen in _CASES],
)
def test_against_float64(chosen):
    call = Call(chosen[0] if isinstance(chosen, tuple) else chosen, fresh_rng())
    work = call.work
    out = np.full((work.rows, work.heads * work.value_size), np.nan, numpy_dtype(work.dtype))
    arguments = call.arguments()
    pages = arguments[1] = call.pages.copy()
    before, kernel = kernels(chosen)
    for one in before:
        run(one, *arguments, arch="sm_90a")
    run(kernel, *arguments, out, arch="sm_90a")
    check(call, out, pages)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: str(target.attrs["arch"]))
@pytest.mark.parametrize("size", [64, 576, 640])
@pytest.mark.parametrize("chunk", [0, 512])
def test_registers(target, size, chunk):
    work = case((5000,), **{**LATENT, "size": size, "shared_values": min(size, 512)}, heads=128, chunk=chunk).work
    (report,) = reports_of(shared_values_kernel(work.problem, gpu_target_of(target)), target)
    assert (report.spill_stores, report.serialized) == (0, "")


@pytest.mark.parametrize(
    ("heads", "rows", "heads_per_tile", "split_keys"), [(16, 1, 16, 8), (128, 1, 16, 8), (20, 64, 10, 1), (17, 1, 1, 5)]
)
def test_plans_of_decoding(heads, rows, heads_per_tile, split_keys):
    work = replace(case((5000,), **LATENT, heads=heads).work, rows=rows)
    plan = shared_values_plan(work.problem, GPU)
    assert (plan.heads_per_tile, plan.split_keys, plan.rows) == (heads_per_tile, split_keys, 16)


def test_unsupported_problems_name_the_reason():
    for size, values, reason in [
        (576, 500, "500 elements of keys that are values, expected a multiple of 64"),
        (672, 512, "heads of 672, expected a multiple of 32, at most 640"),
    ]:
        work = case((3,), heads=16, kv_heads=1, size=size, shared_values=values).work
        with pytest.raises(EncodingError, match=reason):
            shared_values_kernel(work.problem, GPU)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("chosen", [*DECODE.values(), *CHUNKS.values()], ids=[*DECODE, *CHUNKS])
def test_on_a_gpu(chosen):
    call = Call(chosen[0] if isinstance(chosen, tuple) else chosen, fresh_rng())
    before, kernel = kernels(chosen)
    check(call, *on_gpu(kernel, call, *before))
