"""Kernels of rows against numpy in float64: any length, any operands, every kind of CPU."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import runtime

from relax_hetero.encoding import PackedLayout
from relax_hetero.encoding.problem import Operand, RowsProblem
from relax_hetero.encoding.row_program import RowProgram
from relax_hetero.errors import EncodingError
from relax_hetero.tir.rows.rows import rows_kernel
from seeds import fresh_rng
from tir.kernel_runs import NAMES, VECTOR_NAMES, assembly, built, cpu_named, poisoned

pytestmark = pytest.mark.sampled(7)

SOFTMAX = "r0 = max(x0); r1 = sum(exp(subtract(x0, r0))); multiply(exp(subtract(x0, r0)), divide(1.0, r1))"
NORM = (
    "r0 = mean(x0); r1 = mean(square(subtract(x0, r0)));"
    " add(multiply(multiply(subtract(x0, r0), rsqrt(add(r1, 1e-05))), x1), x2)"
)
LENGTHS = (1, 3, 15, 16, 17, 100, 257, 768, 1000, 4097)


def problem(text, arrays, maps, shape, names, dtype, symbols=None) -> RowsProblem:
    """Operands by their index maps; `symbols` names the dimensions that are symbolic."""

    def operand(extents, index_map, element):
        dims = tuple((symbols or {}).get(n, e) for n, e in zip(index_map, extents, strict=True))
        return Operand(dims, element, tuple(index_map), PackedLayout.identity(len(dims)))

    operands = tuple(operand(a.shape, m, str(a.dtype)) for a, m in zip(arrays, maps, strict=True))
    return RowsProblem(RowProgram.parse(text), operands, operand(shape, names, dtype))


def run_all(cases: Sequence[tuple[RowsProblem, Sequence[np.ndarray]]], target, folder, shapes=None) -> list[np.ndarray]:
    """The results of several problems, compiled at once."""
    functions = {f"rows{i}": rows_kernel(case, cpu_named(target)) for i, (case, _) in enumerate(cases)}
    module, results = built(functions, target, folder), []
    for i, (case, arrays) in enumerate(cases):
        out = poisoned(case.result.shape if shapes is None else shapes[i], case.result.dtype)
        module[f"rows{i}"](*(runtime.tensor(array) for array in arrays), out)
        results.append(out.numpy())
    return results


def softmax(x):
    with np.errstate(invalid="ignore"):
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)


def norm(x, scale, shift):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale + shift


@pytest.mark.parametrize("target", NAMES)
def test_softmax_and_norm_of_any_length(target, tmp_path):
    rng = fresh_rng()
    cases, expected = [], []
    for n in LENGTHS:
        x = rng.standard_normal((2, 3, n)).astype("float32") * 5
        scale, shift = rng.standard_normal((2, n)).astype("float32")
        maps = [("d0", "d1", "n"), ("n",), ("n",)]
        cases.append((problem(SOFTMAX, [x], maps[:1], x.shape, maps[0], "float32"), [x]))
        expected.append(softmax(x.astype("float64")))
        cases.append((problem(NORM, [x, scale, shift], maps, x.shape, maps[0], "float32"), [x, scale, shift]))
        expected.append(norm(*(a.astype("float64") for a in (x, scale, shift))))
    for actual, want in zip(run_all(cases, target, tmp_path), expected, strict=True):
        np.testing.assert_allclose(actual, want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("target", NAMES)
@pytest.mark.parametrize("rows", [1, 2, 7, 200])
def test_symbolic_rows_and_columns(target, rows, tmp_path):
    """One kernel for every length; 200 long rows are shared by the cores."""
    rng = fresh_rng()
    lengths = (1, 15, 16, 64, 70, 1000)
    cases, expected, shapes = [], [], []
    symbols = {"d0": "s0", "n": "s1"}
    for n in lengths:
        x = rng.standard_normal((rows, n)).astype("float32")
        cases.append((problem(SOFTMAX, [x], [("d0", "n")], x.shape, ("d0", "n"), "float32", symbols), [x]))
        expected.append(softmax(x.astype("float64")))
        shapes.append(x.shape)
    first = built({"rows": rows_kernel(cases[0][0], cpu_named(target))}, target, tmp_path)["rows"]
    for (_, arrays), want, shape in zip(cases, expected, shapes, strict=True):
        out = poisoned(shape, "float32")
        first(*map(runtime.tensor, arrays), out)
        np.testing.assert_allclose(out.numpy(), want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("target", NAMES)
def test_reductions_of_every_kind(target, tmp_path):
    rng = fresh_rng()
    kinds = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "prod": np.prod}
    cases, expected = [], []
    for kind, function in kinds.items():
        for n in (1, 16, 61, 300):
            for dtype in ("float32", "float64"):
                x = rng.uniform(0.9, 1.1, (5, n)).astype(dtype)
                text = f"r0 = {kind}(x0); r0"
                cases.append((problem(text, [x], [("d0", "n")], (5, 1), ("d0", "1"), dtype), [x]))
                expected.append(function(x.astype("float64"), -1, keepdims=True))
    for actual, want in zip(run_all(cases, target, tmp_path), expected, strict=True):
        np.testing.assert_allclose(actual, want, rtol=1e-4 if actual.dtype == "float32" else 1e-12)


@pytest.mark.parametrize("target", NAMES)
def test_rows_of_infinities_and_nan(target, tmp_path):
    """Masked scores vanish, a row of nothing but masks is NaN, and NaN stays: in a sum, a maximum and a minimum."""
    rng = fresh_rng()
    x = rng.standard_normal((7, 70)).astype("float32")
    x[0, 3:] = -np.inf
    x[1] = -np.inf
    x[2, 69] = np.nan
    x[3, 5] = np.inf
    x[4] = -3e38
    x[5, 1:] = -200.0
    one_value = [f"r0 = {kind}(x0); r0" for kind in ("max", "min", "sum")]
    cases = [(problem(SOFTMAX, [x], [("d0", "n")], x.shape, ("d0", "n"), "float32"), [x])]
    cases += [(problem(text, [x], [("d0", "n")], (7, 1), ("d0", "1"), "float32"), [x]) for text in one_value]
    actual, greatest, least, total = run_all(cases, target, tmp_path)
    with np.errstate(invalid="ignore", over="ignore"):
        np.testing.assert_allclose(actual, softmax(x.astype("float64")), rtol=1e-6, atol=1e-37)
        assert (actual[0, 3:] == 0).all()
        np.testing.assert_array_equal(greatest, x.max(-1, keepdims=True))
        np.testing.assert_array_equal(least, x.min(-1, keepdims=True))
        np.testing.assert_array_equal(np.isnan(total), np.isnan(x.sum(-1, keepdims=True)))


@pytest.mark.parametrize("target", NAMES)
def test_operands_that_broadcast(target, tmp_path):
    """Scalars, one value a row, one a column, masks of some dimensions, conditions; values kept between the passes."""
    rng = fresh_rng()
    b, h, m, n = 2, 3, 5, 37
    x = rng.standard_normal((b, h, m, n)).astype("float32")
    mask = np.where(rng.random((b, 1, 1, n)) < 0.3, -np.inf, 0).astype("float32")
    bias = rng.standard_normal((m, n)).astype("float32")
    scale = rng.standard_normal((b, h, m, 1)).astype("float32")
    keep = rng.random((h, 1, n)) < 0.8
    keep[..., 0], mask[..., 0] = True, 0
    number = np.float32(rng.standard_normal(())).reshape(())
    masked = "where(x4, add(add(multiply(multiply(x0, x3), x5), x1), x2), -inf)"
    text = f"r0 = max({masked}); r1 = sum(exp(subtract({masked}, r0))); divide(exp(subtract({masked}, r0)), r1)"
    arrays = [x, mask, bias, scale, keep, number]
    full = ("d0", "d1", "d2", "n")
    maps = [full, ("d0", "1", "1", "n"), ("d2", "n"), ("d0", "d1", "d2", "1"), ("d1", "1", "n"), ()]
    (actual,) = run_all([(problem(text, arrays, maps, x.shape, full, "float32"), arrays)], target, tmp_path)
    scores = np.where(keep, x.astype("float64") * scale * number + mask + bias, -np.inf)
    np.testing.assert_allclose(actual, softmax(scores), rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize("target", VECTOR_NAMES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_computed_in_single(target, dtype, tmp_path):
    rng = fresh_rng()
    element = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
    cases, expected = [], []
    for n in (5, 32, 131):
        x = (rng.standard_normal((4, n)) * 3).astype(element)
        scale, shift = rng.standard_normal((2, n)).astype(element)
        maps = [("d0", "n"), ("n",), ("n",)]
        cases.append((problem(SOFTMAX, [x], maps[:1], x.shape, maps[0], dtype), [x]))
        expected.append(softmax(x.astype("float64")))
        cases.append((problem(NORM, [x, scale, shift], maps, x.shape, maps[0], dtype), [x, scale, shift]))
        expected.append(norm(*(a.astype("float64") for a in (x, scale, shift))))
    ulp = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    for actual, want in zip(run_all(cases, target, tmp_path), expected, strict=True):
        np.testing.assert_allclose(actual.astype("float64"), want, rtol=1.1 * ulp, atol=1e-6)


@pytest.mark.parametrize("target", VECTOR_NAMES)
def test_the_exponential_of_a_softmax_is_exact_to_two_ulps(target, tmp_path):
    x = np.concatenate([[0.0], -np.geomspace(1e-6, 86.9, 4000)]).astype("float32")
    text = "r0 = max(x0); exp(subtract(x0, r0))"
    (actual,) = run_all([(problem(text, [x], [("n",)], x.shape, ("n",), "float32"), [x])], target, tmp_path)
    want = np.exp(x.astype("float64"))
    assert (np.abs(actual - want) / np.spacing(want.astype("float32"))).max() <= 2.0


@pytest.mark.skipif("avx512" not in NAMES, reason="needs AVX-512")
@pytest.mark.parametrize("n", [128, 1000])
def test_no_calls_and_no_spills(n):
    names = ("d0", "d1", "n")
    x = np.zeros((12, 128, n), "float32")
    case = problem(SOFTMAX, [x], [names], x.shape, names, "float32")
    lines = assembly(rows_kernel(case, cpu_named("avx512")), "avx512").splitlines()
    assert not [line for line in lines if "zmm" in line and "(%rsp)" in line]
    assert not [line for line in lines if "call" in line and any(f in line for f in ("exp", "max"))]


def test_packed_operands_and_rows_of_nothing_are_refused():
    tiles = PackedLayout.parse("pack<outer=[0, 1] inner=[0:8]>")
    plain = PackedLayout.identity(2)
    cpu = cpu_named("avx512")
    result = Operand((8, 5), "float32", ("d0", "n"), plain)
    with pytest.raises(EncodingError, match="row-major"):
        rows_kernel(
            RowsProblem(RowProgram.parse(SOFTMAX), (Operand((8, 5), "float32", ("d0", "n"), tiles),), result), cpu
        )
    one = Operand((8, 1), "float32", ("d0", "1"), plain)
    with pytest.raises(EncodingError, match="no operand that runs along"):
        rows_kernel(RowsProblem(RowProgram.parse("r0 = sum(x0); r0"), (one,), one), cpu)


# Programs of two reductions at random, of ops that are defined everywhere and do not blow up.
_UNARY = {"tanh": np.tanh, "sigmoid": lambda a: 1 / (1 + np.exp(-a)), "abs": np.abs, "square": np.square}
_BINARY = {"add": np.add, "subtract": np.subtract, "multiply": np.multiply, "maximum": np.maximum}


@st.composite
def expressions(draw, leaves, depth=2):
    """Text, and the function of the leaves' values that it means."""
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        name = draw(st.sampled_from(leaves))
        return name, lambda values: values[name]
    if draw(st.booleans()):
        op = draw(st.sampled_from(sorted(_UNARY)))
        text, inner = draw(expressions(leaves, depth - 1))
        return f"{op}({text})", lambda values: _UNARY[op](inner(values))
    op = draw(st.sampled_from(sorted(_BINARY)))
    (left, first), (right, second) = draw(expressions(leaves, depth - 1)), draw(expressions(leaves, depth - 1))
    return f"{op}({left}, {right})", lambda values: _BINARY[op](first(values), second(values))


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_random_programs(data, tmp_path_factory):
    leaves, parts, functions = ["x0", "x1", "x2"], [], []
    for number in range(data.draw(st.integers(0, 2))):
        kind = data.draw(st.sampled_from(["mean", "max", "min"]))
        text, function = data.draw(expressions(leaves))
        parts.append(f"r{number} = {kind}({text})")
        functions.append((kind, function))
        leaves = [*leaves, f"r{number}"]
    text, result = data.draw(expressions(leaves))
    program = "; ".join([*parts, f"add({text}, add(add(x0, x1), x2))"])
    n, rows = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 9))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    arrays = [rng.uniform(-1, 1, shape).astype("float32") for shape in ((rows, n), (n,), (rows, 1))]
    values = {f"x{i}": np.broadcast_to(array, (rows, n)).astype("float64") for i, array in enumerate(arrays)}
    for number, (kind, function) in enumerate(functions):
        reduced = getattr(np, kind)(function(values), -1, keepdims=True)
        values[f"r{number}"] = np.broadcast_to(reduced, (rows, n))
    want = result(values) + values["x0"] + values["x1"] + values["x2"]
    case = problem(program, arrays, [("d0", "n"), ("n",), ("d0", "1")], (rows, n), ("d0", "n"), "float32")
    (actual,) = run_all([(case, arrays)], VECTOR_NAMES[0], tmp_path_factory.mktemp("rows"))
    np.testing.assert_allclose(actual, want, rtol=1e-4, atol=1e-4)
