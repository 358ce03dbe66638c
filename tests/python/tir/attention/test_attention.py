from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from marks import slow_but_for
from relax_hetero.errors import EncodingError
from relax_hetero.target.cpu_target import cpu_target_of
from relax_hetero.tir.attention.attention import attention_kernel
from relax_hetero.tir.attention.attention_spec import vector_plan
from seeds import fresh_rng
from tir.attention_runs import case, check, compiled, problem_of
from tir.kernel_runs import HOST_ARCH
from tir.products_of import AVX2, AVX512, SSE

pytestmark = pytest.mark.sampled(6)

TARGETS = {"avx512": AVX512, "avx2": AVX2, "sse": SSE}


@pytest.fixture
def rng() -> np.random.Generator:
    return fresh_rng()


RAGGED = [(2, 3, 1, 21, 37, 20, 33), (1, 2, 2, 9, 530, 16, 8)]


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("sizes", RAGGED)
def test_ragged_sizes(target: tvm.target.Target, sizes: tuple[int, ...], rng: np.random.Generator) -> None:
    check(case(*sizes), target, rng)


@pytest.mark.parametrize("target", slow_but_for(TARGETS, ["sse"]))
@pytest.mark.parametrize("sizes", RAGGED)
def test_ragged_symbolic_sizes(target: str, sizes: tuple[int, ...], rng: np.random.Generator) -> None:
    check(case(*sizes, symbolic=True), TARGETS[target], rng)


@pytest.mark.parametrize("width", [3, 32, 64, 80, 128])
def test_widths(width: int, rng: np.random.Generator) -> None:
    check(case(1, 2, 2, 24, 40, width, width), AVX512, rng)


def test_hardly_a_query_or_key(rng: np.random.Generator) -> None:
    for target in TARGETS.values():
        check(case(1, 4, 2, 1, 70, 40, 33), target, rng)
    check(case(2, 2, 1, 2, 1100, 64, 64, causal="bottom_right"), AVX512, rng)
    check(case(1, 2, 2, 1, 19, 24, 40, maps=("b h m d", "b g d n", "b g e n", "b m h*e")), AVX512, rng)
    check(case(1, 2, 2, 1, 19, 24, 40, starts=(16, 96, 7)), AVX512, rng)
    check(case(1, 4, 4, 5, 1, 8, 8), AVX512, rng)
    check(case(1, 4, 4, 0, 5, 8, 8), AVX512, rng)


@pytest.mark.parametrize(("queries", "symbolic"), [(1, False), (2, True), (13, False), (13, True)])
def test_heads_that_share_keys(queries: int, symbolic: bool, rng: np.random.Generator) -> None:
    """Queries of several heads are rows of one tile, which reads their keys once."""
    mask = rng.standard_normal((2, 12, queries, 600)).astype("float32")
    grouped = case(2, 12, 3, queries, 600, 40, 33, symbolic=symbolic, mask=mask, scores="add(multiply(x0, 0.25), x1)")
    grouped.causal = "bottom_right"
    assert symbolic or vector_plan(problem_of(grouped), cpu_target_of(AVX512)).heads == 4
    check(grouped, AVX512, rng)


@pytest.mark.parametrize(
    "maps",
    [
        ("b h m d", "b g n d", "b g n e", "b h m e"),
        ("b m h d", "b n g d", "b n g e", "b m h e"),
        ("b h d m", "b g d n", "b g e n", "b m h*e"),
        ("m b h*d", "n b g*d", "n b g*e", "m b h*e"),
    ],
)
def test_heads_lie_anyhow(maps: tuple[str, str, str, str], rng: np.random.Generator) -> None:
    check(case(2, 4, 2, 13, 19, 24, 40, maps=maps), AVX512, rng)


def test_slices_of_one_tensor(rng: np.random.Generator) -> None:
    check(case(2, 4, 4, 13, 19, 24, 40, starts=(16, 96, 7)), AVX512, rng)


@pytest.mark.parametrize("shape", [(2, 1, 1, 37), (2, 1, 21, 37), (1, 4, 21, 37), (1, 1, 21, 1)])
def test_masks_that_are_added(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    mask = rng.standard_normal(shape).astype("float32")
    if shape[-1] > 1:
        mask[rng.random(shape) < 0.2] = -1e9
    check(case(2, 4, 2, 21, 37, 16, 16, scores="add(multiply(x0, 0.25), x1)", mask=mask), AVX512, rng)


@pytest.mark.parametrize("keys", [37, 1100])
@pytest.mark.parametrize("nan_to_zero", [False, True])
def test_conditions_and_rows_without_keys(keys: int, nan_to_zero: bool, rng: np.random.Generator) -> None:
    mask = rng.random((2, 1, 21, keys)) < 0.5
    mask[1, 0, 3] = False
    mask[0, 0, 20] = False
    options = {"scores": "where(x1, multiply(x0, 0.25), -inf)", "mask": mask, "nan_to_zero": nan_to_zero}
    check(case(2, 2, 1, 21, keys, 16, 16, **options), AVX512, rng)
    if keys == 37:
        check(case(2, 2, 1, 21, keys, 16, 16, **options), AVX2, rng)


def test_a_whole_block_of_keys_that_is_masked(rng: np.random.Generator) -> None:
    mask = np.zeros((1, 1, 1, 1200), bool)
    mask[..., 1100:] = True
    check(case(1, 2, 2, 10, 1200, 16, 16, scores="where(x1, multiply(x0, 0.25), -inf)", mask=mask), AVX512, rng)


@pytest.mark.parametrize("causal", ["top_left", "bottom_right"])
@pytest.mark.parametrize("sizes", [(300, 1100), (50, 40), (40, 50), (1, 20)])
def test_causal(causal: str, sizes: tuple[int, int], rng: np.random.Generator) -> None:
    m, n = sizes
    check(case(1, 2, 2, m, n, 16, 16, causal=causal), AVX512, rng)


@pytest.mark.slow  # as is the next test, with fewer queries
def test_causal_and_symbolic(rng: np.random.Generator) -> None:
    check(case(2, 3, 1, 13, 530, 24, 33, causal="bottom_right", symbolic=True), AVX512, rng)


@pytest.mark.slow
def test_any_number_of_queries_in_one_kernel(rng: np.random.Generator) -> None:
    # One and two are read with keys as they lie, seven are a tile of four and single ones.
    ones = [
        case(2, 4, 2, queries, 530, 40, 33, causal="bottom_right", symbolic=True, starts=(16, 96, 7))
        for queries in (1, 2, 7)
    ]
    kernel = compiled(ones[0], AVX512)
    for one in ones:
        check(one, AVX512, rng, kernel=kernel)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", slow_but_for(["bfloat16", "float16"], ["bfloat16"]))
def test_hardly_a_query_of_16_bits_and_symbolic(dtype: str, rng: np.random.Generator) -> None:
    check(case(1, 4, 2, 1, 70, 40, 32, symbolic=True, dtype=dtype), AVX512, rng)


def test_scores_that_overflow_without_their_maximum(rng: np.random.Generator) -> None:
    check(case(1, 2, 2, 16, 1030, 16, 16), AVX512, rng, scale=200.0)


@pytest.mark.parametrize("keys", [37, 1100])
def test_nan_and_infinity_stay_in_their_rows(keys: int, rng: np.random.Generator) -> None:
    mask = rng.standard_normal((1, 1, 9, keys)).astype("float32")
    mask[0, 0, 1, 3], mask[0, 0, 4, keys - 1], mask[0, 0, 7, 0] = np.nan, np.inf, np.nan
    check(case(1, 2, 2, 9, keys, 16, 16, scores="add(multiply(x0, 0.25), x1)", mask=mask), AVX512, rng)


@pytest.mark.slow
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    sizes=st.tuples(*(st.integers(1, limit) for limit in (2, 3, 40, 600, 40, 40))),
    share=st.integers(1, 3),
    causal=st.sampled_from(["", "top_left"]),
    symbolic=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_any_sizes(sizes: tuple[int, ...], share: int, causal: str, symbolic: bool, seed: int) -> None:
    b, g, m, n, d, e = sizes
    one = case(b, g * share, g, m, n, d, e, causal=causal, symbolic=symbolic)
    check(one, AVX512, np.random.default_rng(seed))


@pytest.mark.skipif(HOST_ARCH != "x86_64", reason="reads assembly of x86")
def test_registers_hold_the_tile() -> None:
    function = attention_kernel(problem_of(case(1, 12, 12, 128, 128, 64, 64)), cpu_target_of(AVX512))
    text = tvm.compile(tvm.IRModule({"attention": function}), target=AVX512).mod.inspect_source("asm")
    products = [line for line in text.splitlines() if "vfmadd231ps" in line and "zmm" in line]
    assert products
    assert not [line for line in products if "rsp" in line]
    assert "callq\texp" not in text
    assert "TVMBackendAllocWorkspace" not in text


def test_other_types_are_refused() -> None:
    problem = problem_of(case(1, 1, 1, 8, 8, 8, 8, dtype="float64"))
    with pytest.raises(EncodingError, match="expected operands of one of float32, bfloat16, float16"):
        attention_kernel(problem, cpu_target_of(AVX512))


@pytest.mark.parametrize(("queries", "keys", "causal"), [(5, 70, ""), (1, 530, "bottom_right")])
def test_a_target_of_scalars(queries: int, keys: int, causal: str, rng: np.random.Generator) -> None:
    """Kernels without vectors are there for targets outside of the tables."""
    check(case(2, 4, 2, queries, keys, 20, 33, causal=causal), tvm.target.Target("c"), rng)
