from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from seeds import fresh_rng
from tir.attention_runs import case, check, compiled
from tir.products_of import AVX2, SSE
from tir.products_of import AVX512 as BF16

pytestmark = pytest.mark.sampled(6)

NO_BF16 = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v4", "num-cores": 2})
TARGETS = {"bf16": BF16, "avx512": NO_BF16, "avx2": AVX2, "sse": SSE}


@pytest.fixture
def rng() -> np.random.Generator:
    return fresh_rng()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_ragged_sizes(target: tvm.target.Target, dtype: str, rng: np.random.Generator) -> None:
    check(case(2, 3, 1, 21, 37, 20, 33, dtype=dtype), target, rng)


BLOCKS = (1, 530, 1025)


@pytest.mark.parametrize("keys", BLOCKS)
def test_several_blocks_and_an_odd_key(keys: int, rng: np.random.Generator) -> None:
    check(case(1, 2, 2, 19, keys, 64, 40, dtype="bfloat16"), BF16, rng)


@pytest.mark.slow
def test_several_blocks_in_one_kernel(rng: np.random.Generator) -> None:
    cases = [case(1, 2, 2, 19, keys, 64, 40, dtype="bfloat16", symbolic=True) for keys in BLOCKS]
    kernel = compiled(cases[0], BF16)
    for one in cases:
        check(one, BF16, rng, kernel=kernel)


def test_operands_that_are_not_stored_in_pairs(rng: np.random.Generator) -> None:
    """An odd width, slices that begin between two pairs, keys stored with their numbers last."""
    check(case(1, 2, 2, 9, 19, 7, 16, dtype="bfloat16"), BF16, rng)
    check(case(1, 2, 2, 9, 19, 16, 16, dtype="bfloat16", starts=(3, 0, 5)), BF16, rng)
    maps = ("b h d m", "b g d n", "b g e n", "b m h*e")
    check(case(1, 2, 2, 9, 19, 16, 16, dtype="bfloat16", maps=maps), BF16, rng)


def test_slices_of_one_tensor(rng: np.random.Generator) -> None:
    check(case(2, 4, 4, 13, 19, 24, 40, dtype="bfloat16", starts=(16, 96, 7)), BF16, rng)


def test_hardly_a_query(rng: np.random.Generator) -> None:
    for dtype in ("bfloat16", "float16"):
        check(case(1, 4, 2, 1, 70, 40, 33, dtype=dtype), BF16, rng)


@pytest.mark.parametrize("causal", ["top_left", "bottom_right"])
def test_causal(causal: str, rng: np.random.Generator) -> None:
    check(case(1, 2, 2, 50, 651, 16, 16, dtype="bfloat16", causal=causal), BF16, rng)


def test_masks_and_rows_without_keys(rng: np.random.Generator) -> None:
    mask = rng.random((2, 1, 21, 37)) < 0.5
    mask[1, 0, 3] = False
    options = {"scores": "where(x1, multiply(x0, 0.25), -inf)", "mask": mask, "nan_to_zero": True}
    check(case(2, 2, 1, 21, 37, 16, 16, dtype="bfloat16", **options), BF16, rng)


@pytest.mark.slow
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    sizes=st.tuples(*(st.integers(1, limit) for limit in (2, 3, 40, 600, 40, 40))),
    share=st.integers(1, 3),
    seed=st.integers(0, 1 << 30),
)
def test_any_sizes(sizes: tuple[int, ...], share: int, seed: int) -> None:
    b, g, m, n, d, e = sizes
    check(case(b, g * share, g, m, n, d, e, dtype="bfloat16"), BF16, np.random.default_rng(seed))
