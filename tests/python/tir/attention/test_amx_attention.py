"""Attention by tile registers (Intel AMX): emulated here, and as machine code."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import tvm

from relax_hetero.target.cpu_target import cpu_target_of
from relax_hetero.tir.attention.attention import attention_kernel
from seeds import fresh_rng
from tir.attention_runs import Case, Kernel, case, check, problem_of
from tir.kernel_runs import runs_here
from tir.matmul.tile_emulator import emulated, emulator, products_so_far
from tir.products_of import AVX512

pytestmark = pytest.mark.skipif(not runs_here("avx512"), reason="emulated tiles stand beside vectors of AVX-512")

XEON = tvm.target.Target({"kind": "llvm", "mcpu": "sapphirerapids", "num-cores": 2})


@pytest.fixture
def rng() -> np.random.Generator:
    return fresh_rng()


def _compiled(one: Case) -> Kernel:
    emulator()
    function = attention_kernel(problem_of(one), cpu_target_of(XEON))
    executable = tvm.compile(tvm.IRModule({"attention": emulated(function)}), target=AVX512)
    return Kernel(executable, function.params[-1].shape)


def _check(one: Case, rng: np.random.Generator, kernel: Kernel | None = None, by_tiles: bool = True) -> None:
    before = products_so_far()
    check(one, AVX512, rng, kernel=kernel or _compiled(one))
    assert (products_so_far() > before) == by_tiles


SIZES = [(1, 2, 1, 70, 100, 64, 64), (2, 2, 2, 17, 33, 48, 40), (1, 1, 1, 5, 300, 96, 72), (1, 3, 3, 40, 16, 6, 20)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_ragged_sizes(sizes: tuple[int, ...], rng: np.random.Generator) -> None:
    _check(case(*sizes, dtype="bfloat16"), rng)


@pytest.mark.slow
def test_symbolic_sizes_in_one_kernel(rng: np.random.Generator) -> None:
    sizes = [(1, 2, 1, 45, 530, 40, 24), (2, 2, 1, 3, 7, 40, 24), (1, 2, 1, 64, 256, 40, 24)]
    kernel = _compiled(case(*sizes[0], dtype="bfloat16", symbolic=True))
    for one in sizes:
        _check(case(*one, dtype="bfloat16", symbolic=True), rng, kernel)
    _check(case(1, 2, 1, 2, 70, 40, 24, dtype="bfloat16", symbolic=True), rng, kernel, by_tiles=False)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("causal", ["bottom_right", "top_left"])
def test_causal(causal: str, rng: np.random.Generator) -> None:
    _check(case(1, 2, 2, 50, 351, 16, 16, dtype="bfloat16", causal=causal), rng)


def test_masks_and_rows_without_keys(rng: np.random.Generator) -> None:
    mask = rng.random((2, 1, 21, 37)) < 0.5
    mask[1, 0, 3] = False
    options = {"scores": "where(x1, multiply(x0, 0.25), -inf)", "mask": mask, "nan_to_zero": True}
    _check(case(2, 2, 1, 21, 37, 16, 16, dtype="bfloat16", **options), rng)


@pytest.mark.slow
def test_masks_that_are_added(rng: np.random.Generator) -> None:
    added = rng.standard_normal((1, 2, 1, 37)).astype("float32")
    _check(case(1, 2, 1, 21, 37, 16, 16, dtype="bfloat16", scores="add(multiply(x0, 0.25), x1)", mask=added), rng)


@pytest.mark.slow
def test_slices_of_one_tensor(rng: np.random.Generator) -> None:
    _check(case(2, 4, 4, 13, 19, 24, 40, dtype="bfloat16", starts=(16, 96, 7)), rng)


def test_without_permission_the_same_kernel_multiplies_by_vectors(rng: np.random.Generator) -> None:
    one = case(1, 2, 2, 40, 60, 32, 32, dtype="bfloat16")
    kernel = _compiled(one)
    permission = ctypes.c_int.in_dll(emulator(), "tiles_permission")
    permission.value = 0
    try:
        _check(one, rng, kernel, by_tiles=False)
    finally:
        permission.value = 1


def test_tiles_stay_in_registers() -> None:
    one = case(1, 12, 12, 128, 128, 64, 64, dtype="bfloat16")
    kernel = attention_kernel(problem_of(one), cpu_target_of(XEON))
    assembly = tvm.compile(tvm.IRModule({"attention": kernel}), target=XEON).mod.inspect_source("asm")
    code = assembly.splitlines()
    products, loads, stores = (sum(f"\t{word}" in line for line in code) for word in ("tdp", "tileload", "tilestored"))
    assert products == loads > 2 * stores > 0
    assert not any("tileload" in line and "(%rsp" in line for line in code)
    assert all(word in assembly for word in ("ldtilecfg", "tilerelease", "syscall"))
