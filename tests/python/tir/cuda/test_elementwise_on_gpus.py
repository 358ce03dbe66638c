"""Elementwise kernels of GPUs, run by the interpreter, against the same expressions on a CPU and against numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tvm.target import Target

from gpu_interpreter import run
from relax_hetero.encoding import PackedLayout
from relax_hetero.encoding.expression import Expression
from relax_hetero.encoding.problem import ElementwiseProblem, Operand
from relax_hetero.errors import EncodingError
from relax_hetero.target.element_types import numpy_dtype
from relax_hetero.target.gpu_target import gpu_target_of
from relax_hetero.tir.commands.table_kernel import is_one_launch
from relax_hetero.tir.cuda.cuda_elementwise import elementwise_kernel
from seeds import fresh_rng
from tir.cuda.gpu_runs import needs_gpu, run_on_gpu
from tir.elementwise.test_elementwise import FLOAT_OPS, INT_OPS, TRANSCENDENTAL
from tir.kernel_runs import poisoned, stored

GPU = gpu_target_of(Target({"kind": "cuda", "arch": "sm_90a"}))


def solved(text, arrays, shape, maps=None, layout=None, symbols=None, how=None):
    """Result of an expression's kernel for arrays; operands of the whole shape are stored like the result."""
    names = tuple(f"d{i}" for i in range(len(shape)))
    layout = layout or PackedLayout.identity(len(shape))
    maps = maps or [names] * len(arrays)
    expression = Expression.parse(text)
    dtype = expression.dtype([str(a.dtype) for a in arrays])

    def operand(extents, index_map, element, own):
        dims = tuple((symbols or {}).get(n, e) for n, e in zip(index_map, extents, strict=True))
        return Operand(tuple(dims), element, tuple(index_map), own)

    layouts = [layout if m == names else PackedLayout.identity(len(m)) for m in maps]
    operands = [operand(a.shape, m, str(a.dtype), own) for a, m, own in zip(arrays, maps, layouts, strict=True)]
    kernel = elementwise_kernel(
        ElementwiseProblem(expression, tuple(operands), operand(shape, names, dtype, layout)), GPU
    )
    assert is_one_launch(kernel)
    inputs = [stored(a, own, 0) for a, own in zip(arrays, layouts, strict=True)]
    if how is not None:
        return how(kernel, inputs, shape, dtype)
    out = poisoned(layout.packed_shape(shape), dtype).numpy().copy()
    run(kernel, *inputs, out)
    return layout.unpack(out, shape)


SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-42, 3e38, -3e38, 0.5, 1.5, 2.5, -87.5, 88.5, 100.0]


def pair(dtype):
    rng = fresh_rng()
    a, b = (np.concatenate([numbers, rng.standard_normal(51) * 5]) for numbers in (SPECIAL, SPECIAL[::-1]))
    with np.errstate(over="ignore"):
        return a.astype(numpy_dtype(dtype)), b.astype(numpy_dtype(dtype))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_ops_of_floats(dtype):
    """Same results as on CPUs: NaN propagates, halves round to even, half precision is computed in single."""
    a, b = pair(dtype)
    for text, reference in list(FLOAT_OPS.items())[:: 1 if dtype == "float32" else 3]:
        actual = solved(text, [a, b][: Expression.parse(text).num_operands], a.shape)
        assert str(actual.dtype) == dtype
        with np.errstate(all="ignore"):
            expected = reference(a.astype("float32"), b.astype("float32")).astype("float32").astype(a.dtype)
        tolerance = 2e-7 if text.startswith("add(mul") and dtype == "float32" else 0
        np.testing.assert_allclose(actual.astype("float32"), expected.astype("float32"), rtol=tolerance, err_msg=text)


def test_functions_of_floats():
    a, _ = pair("float32")
    wide = a.astype("float64")
    with np.errstate(all="ignore"):
        for op in sorted(TRANSCENDENTAL):
            expected = Expression.parse(f"{op}(x0)").evaluate([wide])
            actual = solved(f"{op}(x0)", [a], a.shape)
            np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected), err_msg=op)
            atol = 4 * np.spacing(np.where(np.isfinite(a), np.abs(a), 0)) if "gelu" in op else 1e-44
            single = expected.astype("float32")
            close = (actual == single) | np.isnan(single) | (np.abs(actual - single) <= 2.5e-7 * np.abs(single) + atol)
            assert close.all(), (op, a[~close], actual[~close], single[~close])


@pytest.mark.parametrize("text", ["gelu(x0)", "cast(gelu(cast(x0, 'float32')), 'float16')"])
def test_gelu_of_halves(text):
    """A polynomial's error is less than the rounding's, of all float16 numbers there are; ends and NaN are right."""
    bits = np.arange(1 << 16, dtype="uint16")[:: 1 if text == "gelu(x0)" else 97]
    a = bits.view("float16")
    actual = solved(text, [a], a.shape).astype("float64")
    wide = a.astype("float64")
    with np.errstate(all="ignore"):
        expected = wide * (1 + np.vectorize(math.erf)(wide / np.sqrt(2))) / 2
        rounding = np.spacing(np.abs(expected).astype("float16")).astype("float64")
        relative = np.where(wide > -0.5, 1.6e-4 * np.abs(expected), 4.2e-5)
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
    defined = ~np.isnan(expected)
    number = defined & np.isfinite(expected)
    np.testing.assert_array_equal(actual[defined & ~number], expected[defined & ~number])
    assert (np.abs(actual[number] - expected[number]) <= (relative + rounding / 2)[number]).all()
    assert (actual[number & (wide < -6)] == 0).all()


@pytest.mark.parametrize("dtype", ["int8", "int32"])
def test_ops_of_integers(dtype):
    rng = fresh_rng()
    a, b = (rng.integers(-128, 128, 77).astype(dtype) for _ in range(2))
    for text, reference in INT_OPS.items():
        actual = solved(text, [a, b][: Expression.parse(text).num_operands], a.shape)
        np.testing.assert_array_equal(actual, reference(a, b).astype(dtype), err_msg=text)
    quotient = np.where(b == 0, a, np.trunc(a / np.where(b == 0, 1, b)))
    np.testing.assert_array_equal(solved("divide(x0, x1)", [a, b], a.shape), quotient.astype(dtype))


def test_casts_and_choices():
    a, b = pair("float32")
    condition = fresh_rng().random(a.size) < 0.5
    actual = solved("where(x2, x0, where(x2, x1, -1.5))", [a, b, condition], a.shape)
    np.testing.assert_array_equal(actual, np.where(condition, a, np.float32(-1.5)))
    least = -(2**31)
    with np.errstate(invalid="ignore"):
        inside = np.abs(a) < 2**31
        np.testing.assert_array_equal(
            solved("cast(x0, 'int32')", [a], a.shape), np.where(inside, np.where(inside, a, 0).astype("int64"), least)
        )
    scaled = solved("cast(clip(add(round(divide(x0, 0.5)), 3), 0, 255), 'uint8')", [a], a.shape)
    number = ~np.isnan(a)
    np.testing.assert_array_equal(scaled[number], np.clip(np.round(a[number] / 0.5) + 3, 0, 255).astype("uint8"))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_operands_that_broadcast(dynamic):
    rng = fresh_rng()
    shape = (3, 7, 24)
    x, other = rng.standard_normal((2, *shape)).astype("float16")
    column, row, one = (rng.standard_normal(s).astype("float16") for s in ((24,), (3, 1, 1), (1,)))
    names = ("d0", "d1", "d2")
    maps = [names, names, ("d2",), ("d0", "1", "1"), ("1",)]
    symbols = {"d0": "s0", "d1": "s1", "d2": "s2"} if dynamic else {}
    text = "add(add(add(x0, x1), x2), multiply(x3, x4))"
    arrays = [x, other, column, row, one]
    actual = solved(text, arrays, shape, maps, symbols=symbols)
    wide = [array.astype("float32") for array in arrays]
    expected = wide[0] + wide[1] + wide[2] + wide[3] * wide[4]
    np.testing.assert_allclose(actual.astype("float32"), expected, rtol=2**-10, atol=1e-3)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    "layout",
    ["pack<outer=[0, 1] inner=[0:8, 1:64] +swizzle>", "pack<outer=[1, 0] inner=[1:32]>", "pack<outer=[1, 0] inner=[]>"],
)
def test_packed_results(layout, dynamic):
    rng = fresh_rng()
    x, bias = rng.standard_normal((13, 70)).astype("float16"), rng.standard_normal((70,)).astype("float16")
    symbols = {"d0": "s0"} if dynamic else {}
    maps = [("d0", "d1"), ("d1",)]
    actual = solved("add(x0, x1)", [x, bias], x.shape, maps, PackedLayout.parse(layout), symbols)
    np.testing.assert_array_equal(actual, (x.astype("float32") + bias.astype("float32")).astype("float16"))


def test_lengths_that_vectors_do_not_fill():
    for n in (1, 7, 1023, 4096):
        x = fresh_rng().standard_normal(n).astype("float16")
        np.testing.assert_array_equal(solved("relu(x0)", [x], (n,)), np.maximum(x, 0))
        np.testing.assert_array_equal(solved("relu(x0)", [x], (n,), symbols={"d0": "s0"}), np.maximum(x, 0))
    assert solved("relu(x0)", [np.zeros((0, 4), "float32")], (0, 4)).size == 0


def test_operands_packed_otherwise_are_refused():
    packed = Operand((8, 8), "float32", ("d0", "d1"), PackedLayout((1, 0)))
    plain = Operand((8, 8), "float32", ("d0", "d1"), PackedLayout.identity(2))
    with pytest.raises(EncodingError, match="expected the result's"):
        elementwise_kernel(ElementwiseProblem(Expression.parse("relu(x0)"), (packed,), plain), GPU)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_on_a_gpu(dtype):
    """All ops of floats, in vectors and in the tail after them, and operands that broadcast."""
    a, b = pair(dtype)
    for text, reference in FLOAT_OPS.items():
        actual = solved(text, [a, b][: Expression.parse(text).num_operands], a.shape, how=run_on_gpu)
        with np.errstate(all="ignore"):
            expected = reference(a.astype("float32"), b.astype("float32")).astype("float32").astype(a.dtype)
        rtol = 2e-7 if dtype == "float32" else 0
        np.testing.assert_allclose(actual.astype("float32"), expected.astype("float32"), rtol=rtol, err_msg=text)
    x = fresh_rng().standard_normal((33, 72)).astype(a.dtype)
    maps = [("d0", "d1"), ("d1",), ("d0", "1")]
    actual = solved("add(multiply(x0, x1), x2)", [x, x[0], x[:, :1].copy()], x.shape, maps, how=run_on_gpu)
    wide = x.astype("float32")
    expected = wide * wide[0] + wide[:, :1]
    ulp = {"float32": 2**-23, "float16": 2**-11, "bfloat16": 2**-8}[dtype]
    np.testing.assert_allclose(actual.astype("float32"), expected, rtol=ulp, atol=ulp)
