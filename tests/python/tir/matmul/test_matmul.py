"""Products of row-major operands and packed weights: types, machines, sizes, symbols, special values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hetero.encoding.packed_layout import PackedLayout
from relax_hetero.encoding.problem import MatmulProblem
from relax_hetero.errors import EncodingError
from relax_hetero.target.cpu_target import cpu_target_of
from relax_hetero.tir.matmul.matmul import matmul_kernel
from seeds import fresh_rng
from tir.kernel_runs import HOST_ARCH
from tir.products_of import (
    AVX2,
    AVX512,
    SSE,
    C,
    assert_close,
    check,
    compile_kernel,
    operand,
    plain_problem,
    random_array,
    run_kernel,
    run_stored,
)

pytestmark = pytest.mark.sampled(7)

F32 = ("float32", "float32", "float32")
U8S8 = ("uint8", "int8", "int32")
S8S8 = ("int8", "int8", "int32")
S16S8 = ("int16", "int8", "int32")
BF16 = ("bfloat16", "bfloat16", "float32")
F16 = ("float16", "float16", "float32")
TYPES = {"f32": F32, "f64": ("float64",) * 3, "bf16": BF16, "f16": F16, "u8s8": U8S8, "s8s8": S8S8}
if HOST_ARCH == "x86_64":  # AArch64 has no products of int16 by bytes
    TYPES["s16s8"] = S16S8
TARGETS = {"avx512": AVX512, "avx2": AVX2, "sse": SSE, "c": C}
needs_prefetch = pytest.mark.skipif(HOST_ARCH != "x86_64", reason="only products of x86 prefetch")
SIZES = [(1, 10, 100), (15, 37, 7), (7, 33, 17), (63, 65, 70)]


def _check_plain(
    target: tvm.target.Target, sizes: tuple[int, int, int], types: tuple[str, str, str], **options
) -> None:
    rng = fresh_rng()
    m, k, n = sizes
    a, b = random_array(rng, (m, k), types[0]), random_array(rng, (k, n), types[1])
    problem = plain_problem(target, sizes, types, **options)
    check(problem, target, [a, b], a.astype("float64") @ b.astype("float64"), k)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("name", ["avx512", "avx2"])
def test_static(name: str, types: tuple[str, str, str], sizes: tuple[int, int, int]) -> None:
    _check_plain(TARGETS[name], sizes, types)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "types"),
    [("avx512", F32), *(pytest.param(*case, marks=pytest.mark.slow) for case in [("avx2", F32), ("avx512", BF16)])],
)
def test_rows_have_the_same_bits(name: str, types: tuple[str, str, str]) -> None:
    """Alone and among others: tiles of several panels, blocks of k within a tile and from tile to tile."""
    rng, (k, n) = fresh_rng(), (2600, 100)
    a, b = random_array(rng, (9, k), types[0]), random_array(rng, (k, n), types[1])
    results = [
        run_kernel(plain_problem(TARGETS[name], (m, k, n), types), TARGETS[name], [a[:m], b], (m, n)) for m in (1, 2, 9)
    ]
    assert_close(results[2], a.astype("float64") @ b.astype("float64"), types[2], k)
    for few in results[:2]:
        np.testing.assert_array_equal(few, results[2][: len(few)])


@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("name", ["sse", "c"])
def test_static_on_small_machines(name: str, types: tuple[str, str, str]) -> None:
    if name == "c" and types in (BF16, F16):
        pytest.skip("C lacks a type for them")
    _check_plain(TARGETS[name], (15, 37, 7), types)


@pytest.mark.parametrize("types", [F32, U8S8, S8S8, BF16], ids=["f32", "u8s8", "s8s8", "bf16"])
@pytest.mark.parametrize("name", ["avx512", "avx2"])
def test_one_symbolic_kernel_serves_all_sizes(name: str, types: tuple[str, str, str]) -> None:
    target, rng = TARGETS[name], fresh_rng()
    problem = plain_problem(target, (1, 1, 1), types, symbolic="mkn")
    executable = compile_kernel(problem, target)
    for m, k, n in [
        *SIZES,
        (0, 4, 4),
        (4, 0, 4),
        (4, 4, 0),
        (2, 3, 40),
        (3, 9, 64),
        (5, 1, 1),
        (8, 1100, 33),
        (20, 2500, 5),
    ]:
        a, b = random_array(rng, (m, k), types[0]), random_array(rng, (k, n), types[1])
        got = run_stored(executable, problem, target, [a, problem.rhs.layout.pack(b)], (m, n))
        assert_close(got, a.astype("float64") @ b.astype("float64"), types[2], k)


@pytest.mark.parametrize("symbolic", ["m", "n", "k"])
@pytest.mark.parametrize("name", ["avx512", "c"])
def test_one_symbolic_extent(name: str, symbolic: str) -> None:
    _check_plain(TARGETS[name], (13, 37, 41), F32, symbolic=symbolic)


@settings(max_examples=15, deadline=None)
@given(m=st.integers(0, 40), k=st.integers(0, 70), n=st.integers(0, 100), types=st.sampled_from([F32, S8S8, BF16]))
def test_any_size(m: int, k: int, n: int, types: tuple[str, str, str]) -> None:
    _check_plain(AVX512, (m, k, n), types)


@pytest.mark.parametrize("sizes", [(32, 4096, 64), (8, 4096, 64), (128, 2500, 40)], ids=str)
@pytest.mark.parametrize("types", [F32, BF16], ids=["f32", "bf16"])
def test_long_sums_keep_their_precision(types: tuple[str, str, str], sizes: tuple[int, int, int]) -> None:
    _check_plain(AVX512, sizes, types)


@pytest.mark.parametrize("result", ["bfloat16", "float16"])
def test_result_of_another_type(result: str) -> None:
    _check_plain(AVX512, (9, 1700, 35), F32, result=result)


@needs_prefetch
def test_large_right_operand_is_prefetched_without_harm() -> None:
    _check_plain(AVX512, (30, 700, 600), F32)
    text = compile_kernel(plain_problem(AVX512, (30, 700, 600)), AVX512).mod.inspect_source("asm")
    assert "prefetch" in text


@needs_prefetch
@pytest.mark.parametrize("types", [F32, U8S8, BF16], ids=["f32", "u8s8", "bf16"])
def test_any_number_of_rows_prefetches_without_harm(types: tuple[str, str, str]) -> None:
    k, n = 701, 600
    problem, rng = plain_problem(AVX512, (1, k, n), types, symbolic="m"), fresh_rng()
    executable = compile_kernel(problem, AVX512)
    assert "prefetch" in executable.mod.inspect_source("asm")
    b = random_array(rng, (k, n), types[1])
    for m in (0, 1, 2, 3, 7, 8, 20, 45, 130):
        a = random_array(rng, (m, k), types[0])
        got = run_stored(executable, problem, AVX512, [a, problem.rhs.layout.pack(b)], (m, n))
        assert_close(got, a.astype("float64") @ b.astype("float64"), types[2], k)


@pytest.mark.parametrize("symbolic", ["", "mkn"])
@pytest.mark.parametrize("types", [F32, BF16], ids=["f32", "bf16"])
def test_nan_and_infinity_as_numpy(types: tuple[str, str, str], symbolic: str) -> None:
    rng = fresh_rng()
    a, b = random_array(rng, (11, 35), types[0]), random_array(rng, (35, 37), types[1])
    a[3, 34], a[5, 2], b[7, 36], b[34, 0] = np.nan, np.inf, -np.inf, np.inf
    problem = plain_problem(AVX512, (11, 35, 37), types, symbolic=symbolic)
    got = run_kernel(problem, AVX512, [a, b], (11, 37)).astype("float64")
    with np.errstate(invalid="ignore"):
        want = a.astype("float64") @ b.astype("float64")
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(np.isinf(got), np.isinf(want))


@pytest.mark.parametrize("types", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("symbolic", ["", "mkn"])
def test_padding_with_nan_does_not_leak(types: tuple[str, str, str], symbolic: str) -> None:
    rng = fresh_rng()
    problem = plain_problem(AVX512, (5, 34, 37), types, symbolic=symbolic)
    a, b = random_array(rng, (5, 34), types[0]), random_array(rng, (34, 37), types[1])
    stored = problem.rhs.layout.pack(b)
    width = stored.shape[2]
    stored[37 // width, :, 37 % width :] = np.nan  # columns from 37 on
    got = run_stored(compile_kernel(problem, AVX512), problem, AVX512, [a, stored], (5, 37))
    assert_close(got, a.astype("float64") @ b.astype("float64"), "float32", 34)


@pytest.mark.parametrize("types", [S8S8, BF16], ids=["s8s8", "bf16"])
def test_rows_of_ragged_k_are_not_read_beyond_their_end(types: tuple[str, str, str]) -> None:
    """The neighbour of a row's last element is NaN (or large), in the next row."""
    rng = fresh_rng()
    a, b = random_array(rng, (9, 33), types[0]), random_array(rng, (33, 20), types[1])
    a[:, 0] = np.nan if types is BF16 else 127
    b[0] = 0
    problem = plain_problem(AVX512, (9, 33, 20), types)
    got = run_kernel(problem, AVX512, [a, b], (9, 20))
    want = a.astype("float64") @ b.astype("float64")
    if types is BF16:
        assert np.isnan(got).all()
        a[1:, 0] = 0
        got, want = run_kernel(problem, AVX512, [a, b], (9, 20))[1:], (a[1:].astype("float64") @ b.astype("float64"))
    assert_close(got, want, types[2], 33)


def test_unknown_element_types_are_refused_by_name() -> None:
    problem = MatmulProblem(
        operand((4, 4), "float32", "mk"),
        operand((4, 4), "int8", "kn", PackedLayout((1, 0), (1,), (32,))),
        operand((4, 4), "float32", "mn"),
        "float32",
    )
    with pytest.raises(EncodingError, match=r"float32 \* int8 -> float32"):
        matmul_kernel(problem, cpu_target_of(AVX512))


@pytest.mark.parametrize("sizes", [(1, 300, 77), (1, 64, 512), (2, 33, 161), (3, 7, 5), (5, 40, 400), (8, 130, 1000)])
@pytest.mark.parametrize("name", TARGETS)
def test_few_rows_over_a_row_major_right_operand(name: str, sizes: tuple[int, int, int]) -> None:
    rng, (m, k, n) = fresh_rng(), sizes
    problem = plain_problem(TARGETS[name], sizes)
    problem = replace(problem, rhs=replace(problem.rhs, layout=PackedLayout.identity(2)))
    a, b = random_array(rng, (m, k), "float32"), random_array(rng, (k, n), "float32")
    check(problem, TARGETS[name], [a, b], a.astype("float64") @ b.astype("float64"), k)
