"""Attention on Hopper's tensor cores, by the interpreter of GPU kernels."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tvm
from tvm.target import Target

from cuda_reports import compile_source, reports_of, sources_of
from gpu_interpreter import run
from machine_code import disassembled, nvdisasm
from relax_hetero.errors import EncodingError
from relax_hetero.target.gpu_target import gpu_target_of
from relax_hetero.tir.cuda.attention.attention_plan import AttentionPlan, wgmma_plan
from relax_hetero.tir.cuda.attention.wgmma_attention import REGISTERS, wgmma_attention_kernel
from seeds import fresh_rng
from tir.attention_runs import case, problem_of
from tir.cuda.attention.attention_on_gpus import check

TARGET = Target({"kind": "cuda", "arch": "sm_90a"})
GPU = gpu_target_of(TARGET)
IS_HOPPER = tvm.runtime.enabled("cuda") and tvm.cuda(0).exist and tvm.cuda(0).compute_version == "9.0"
needs_hopper = pytest.mark.skipif(not IS_HOPPER, reason="needs an NVIDIA GPU of compute capability 9.0")
BY_HEADS = ("b h m d", "b g n d", "b g n e", "b h m e")
ADDED = "add(multiply(x0, 0.25), x1)"
CHOSEN = "where(x1, multiply(x0, 0.25), -inf)"
RNG = np.random.default_rng(7)


def half(*sizes, **options):
    return case(*sizes, dtype=options.pop("dtype", "float16"), **options)


def mask(*shape, hidden=0.3):
    """Bool: which scores count."""
    return RNG.random(shape) >= hidden


def lines(*shape):
    """Added numbers, some of which hide a score."""
    numbers = RNG.standard_normal(shape).astype("float32")
    return np.where(RNG.random(shape) < 0.2, np.finfo("float32").min, numbers).astype("float32")


CASES = {
    "edges": (half(1, 2, 2, 70, 200, 64, 64), AttentionPlan(128, 64, 2)),
    "one tile": (half(2, 1, 1, 40, 33, 32, 32, maps=BY_HEADS), None),
    "three warpgroups": (half(1, 1, 1, 192, 256, 64, 64, maps=BY_HEADS, dtype="bfloat16"), AttentionPlan(192, 128, 2)),
    "beside others": (half(1, 1, 1, 100, 260, 32, 32), AttentionPlan(128, 64, 2, overlaps_own_product=False)),
    "near heads": (
        half(1, 3, 3, 200, 260, 32, 32, symbolic=True, causal="bottom_right", maps=BY_HEADS),
        AttentionPlan(128, 64, 2, heads_per_group=2),
    ),
    "slices of a tensor": (half(1, 2, 2, 20, 50, 40, 24, starts=(8, 16, 24)), None),
    "nothing is aligned": (half(1, 3, 3, 17, 21, 19, 13), None),
    "wide": (half(1, 1, 1, 16, 70, 256, 200, maps=BY_HEADS), None),
    "keys by columns": (half(1, 1, 1, 20, 72, 64, 64, maps=("b h m d", "b g d n", "b g e n", "b h m e")), None),
    "causal": (half(1, 1, 1, 150, 150, 64, 64, causal="top_left"), AttentionPlan(128, 64, 2)),
    "causal, more keys": (half(1, 1, 1, 70, 200, 64, 64, causal="bottom_right"), AttentionPlan(64, 64, 2)),
    "causal, rows without keys": (half(1, 1, 1, 100, 40, 32, 32, causal="bottom_right"), AttentionPlan(64, 32, 2)),
    "zero for no keys": (
        half(1, 1, 1, 100, 40, 32, 32, causal="bottom_right", nan_to_zero=True),
        AttentionPlan(64, 32, 2),
    ),
    "padding": (half(2, 2, 2, 40, 100, 32, 32, mask=lines(2, 1, 1, 100), scores=ADDED), None),
    "added by row": (half(1, 2, 2, 40, 100, 32, 32, mask=lines(1, 2, 40, 100), scores=ADDED), None),
    "hidden": (half(1, 2, 2, 40, 100, 32, 32, mask=mask(1, 1, 40, 100), scores=CHOSEN), None),
    "all hidden": (
        half(1, 1, 1, 20, 40, 32, 32, mask=mask(1, 1, 20, 1, hidden=0.5), scores=CHOSEN, nan_to_zero=True),
        None,
    ),
    "groups": (half(1, 4, 2, 90, 64, 32, 32), None),
    "heads together": (half(2, 8, 2, 3, 64, 32, 32, maps=BY_HEADS), None),
    "heads together, hidden": (
        half(1, 4, 1, 5, 64, 32, 32, mask=mask(1, 4, 5, 64), scores=CHOSEN, causal="bottom_right"),
        None,
    ),
    "shared keys": (half(1, 4, 2, 3, 300, 64, 64, causal="bottom_right"), AttentionPlan(64, 64, 2, 4, 2)),
    "shared keys, not aligned": (half(1, 1, 1, 9, 130, 32, 30), AttentionPlan(64, 32, 2, 3)),
    "blocks without keys": (
        half(1, 1, 1, 70, 100, 32, 32, causal="bottom_right", mask=lines(1, 1, 1, 100), scores=ADDED),
        AttentionPlan(64, 32, 1, 4),
    ),
    "symbolic": (half(2, 2, 1, 70, 90, 64, 64, symbolic=True), AttentionPlan(64, 64, 2)),
    "symbolic, causal, shared keys": (
        half(1, 2, 2, 3, 200, 32, 32, symbolic=True, causal="bottom_right", mask=lines(1, 1, 3, 200), scores=ADDED),
        AttentionPlan(64, 64, 2, 2),
    ),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name):
    one, plan = CASES[name]
    check(one, lambda problem: wgmma_attention_kernel(problem, GPU, plan), fresh_rng())


@pytest.mark.parametrize("split_keys", [1, 2])
@pytest.mark.parametrize("low", [np.finfo("float32").min, -1e30])
def test_rows_that_a_mask_hides_by_low_numbers(low, split_keys):
    lowest = np.zeros((1, 1, 5, 64), "float32")
    lowest[..., 0, :] = lowest[..., 1, 32:] = lowest[..., 2, :32] = low
    one = half(1, 1, 1, 5, 64, 32, 32, mask=lowest, scores=ADDED)
    plan = AttentionPlan(64, 32, 1, split_keys)
    check(one, lambda problem: wgmma_attention_kernel(problem, GPU, plan), fresh_rng())


def test_no_keys_at_all():
    one = half(1, 1, 1, 3, 1, 32, 32, symbolic=True, mask=lines(1, 1, 3, 1), scores=ADDED, nan_to_zero=True)
    func = wgmma_attention_kernel(problem_of(one), GPU)
    query, result = np.ones((1, 3, 32), "float16"), np.full((1, 3, 32), np.nan, "float16")
    nothing, empty_mask = np.zeros((1, 0, 32), "float16"), np.zeros((1, 1, 3, 0), "float32")
    run(func, query, nothing, nothing, empty_mask, result)
    assert (result == 0).all()


def test_misfits_are_named():
    for problem, gpu, reason in (
        (half(1, 1, 1, 8, 8, 8, 8), gpu_target_of(Target({"kind": "cuda", "arch": "sm_80"})), "sm_80 lacks wgmma"),
        (case(1, 1, 1, 8, 8, 8, 8), GPU, "element types .'float32'., expected one of"),
        (half(1, 1, 1, 8, 8, 264, 8), GPU, "heads of 264 and 8, expected at most 256"),
        (half(1, 1, 1, 8, 0, 8, 8), GPU, "an extent is 0"),
    ):
        with pytest.raises(EncodingError, match=reason):
            wgmma_attention_kernel(problem_of(problem), gpu)


@pytest.mark.slow
@pytest.mark.parametrize(
    "one",
    [
        half(1, 64, 64, 4096, 4096, 128, 128, maps=BY_HEADS),
        half(1, 64, 64, 4096, 4096, 64, 64, maps=BY_HEADS),
        half(1, 64, 64, 4096, 4096, 128, 128, maps=BY_HEADS, causal="top_left"),
        half(1, 64, 64, 4096, 4096, 64, 64, maps=BY_HEADS, causal="top_left"),
        half(1, 32, 32, 8, 8192, 128, 128, maps=BY_HEADS),
        half(1, 8, 8, 2048, 2048, 256, 256, maps=BY_HEADS),
        half(16, 12, 12, 512, 512, 64, 64, mask=np.zeros((16, 1, 1, 512), "float32"), scores=ADDED),
    ],
)
def test_registers_suffice_and_tensor_cores_do_not_wait(one):
    (report,) = reports_of(wgmma_attention_kernel(problem_of(one), GPU), TARGET)
    assert report.serialized == "" and not report.touched
    assert report.spill_stores == report.stack == 0


@pytest.mark.slow
@pytest.mark.skipif(nvdisasm() is None, reason="needs nvdisasm")
def test_powers_are_computed_while_values_are_added_up():
    one = half(1, 64, 64, 4096, 4096, 64, 64, maps=BY_HEADS)
    (source,) = sources_of(wgmma_attention_kernel(problem_of(one), GPU), TARGET)
    code = disassembled(compile_source(source).code)
    overlaps_own_product = re.search(r"DEPBAR\.LE gsb0, 0x1(.*?)DEPBAR\.LE gsb0, 0x0", code, re.DOTALL)
    assert overlaps_own_product is not None
    assert overlaps_own_product[1].count("MUFU.EX2") >= 64


@pytest.mark.parametrize("consumers", [2, 3])
def test_warpgroups_take_no_more_registers_than_a_launch_has(consumers):
    # A launch gives every thread as many as fit, in eights; setmaxnreg waits for ever for more than that.
    producers, multipliers = REGISTERS[consumers]
    assert producers + consumers * multipliers <= (1 + consumers) * (65536 // (128 * (1 + consumers)) // 8 * 8)


def test_plans_keep_the_gpu_busy():
    def plan(*sizes, **options):
        return wgmma_plan(problem_of(half(*sizes, maps=BY_HEADS, **options)), GPU)

    assert plan(1, 64, 64, 4096, 4096, 128, 128).rows == 128
    assert plan(1, 64, 64, 4096, 4096, 64, 64).rows == 192
    assert plan(16, 12, 12, 128, 128, 64, 64).rows == 64  # several blocks a multiprocessor
    assert plan(1, 12, 12, 128, 128, 64, 64).rows == 64  # more blocks
    assert plan(1, 16, 16, 1000, 1000, 80, 80).rows == 128  # 128 blocks at once, not 256
    assert plan(1, 8, 8, 2048, 2048, 256, 256).stages == 2  # shared memory holds two tiles of 80 keys
    assert plan(1, 64, 64, 4096, 4096, 64, 64, causal="top_left").heads_per_group == 16  # a third of the cache
    assert plan(1, 6, 6, 197, 197, 64, 64).keys == 112  # two tiles of about as many
    few = plan(1, 32, 32, 8, 8192, 128, 128)
    assert few.split_keys == 3 and few.heads_per_tile == 1
    assert plan(1, 32, 8, 8, 8192, 128, 128).heads_per_tile == 4


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name):
    one, plan = CASES[name]
    check(one, lambda problem: wgmma_attention_kernel(problem, GPU, plan), fresh_rng(), on_gpu=True)
