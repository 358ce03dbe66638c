"""Rounding to bytes: exact against numpy on every kind of CPU, saturating, and as few instructions as it may take."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest
from tvm import runtime

from relax_hetero.encoding import Expression, PackedLayout
from relax_hetero.encoding.problem import ElementwiseProblem, Operand, RowsProblem
from relax_hetero.encoding.row_program import RowProgram
from relax_hetero.tir.elementwise.elementwise import elementwise_kernel
from relax_hetero.tir.elementwise.expression_ops import with_quantize
from relax_hetero.tir.rows.rows import rows_kernel
from seeds import fresh_rng
from tir.kernel_runs import NAMES, assembly, built, cpu_named, poisoned

LIMITS = {"uint8": (0, 255), "int8": (-128, 127)}


def quantize(value, zero, dtype, low=None, high=None):
    """The text of QuantizeLinear."""
    bounds = [
        float(given if given is not None else limit) for given, limit in zip((low, high), LIMITS[dtype], strict=True)
    ]
    moved = f"add(round({value}), {float(zero)})" if zero else f"round({value})"
    return f"cast(clip({moved}, {bounds[0]}, {bounds[1]}), '{dtype}')"


def quantized(x, zero, dtype, low=None, high=None):
    """The same in numpy."""
    limits = LIMITS[dtype]
    bounds = (limits[0] if low is None else low, limits[1] if high is None else high)
    return np.clip(np.round(x) + zero, *bounds).astype(dtype)


def flat(shape, dtype, names=("d0",)):
    return Operand(shape, dtype, names, PackedLayout.identity(len(names)))


CASES = [("uint8", 0, None, None), ("uint8", 255, None, None), ("uint8", 3, 3, 200), ("int8", 0, None, None)]
CASES += [("int8", -128, None, None), ("int8", 127, -5, 127)]


@pytest.mark.parametrize("target", NAMES)
def test_every_number_is_rounded_to_even_and_held(target, tmp_path):
    rng = fresh_rng()
    x = np.concatenate([rng.uniform(-600, 600, 300), np.arange(-300, 300) + 0.5, 2.0 ** np.arange(-149, 128)])
    x = np.concatenate([x, -x, [np.inf, -np.inf, 0.0, -0.0]]).astype("float32")
    functions = {}
    for number, (dtype, zero, low, high) in enumerate(CASES):
        expression = Expression.parse(quantize("x0", zero, dtype, low, high))
        problem = ElementwiseProblem(expression, (flat(x.shape, "float32"),), flat(x.shape, dtype))
        functions[f"kernel{number}"] = elementwise_kernel(problem, cpu_named(target))
    module = built(functions, target, tmp_path)
    for number, (dtype, zero, low, high) in enumerate(CASES):
        out = poisoned(x.shape, dtype)
        module[f"kernel{number}"](runtime.tensor(x), out)
        np.testing.assert_array_equal(out.numpy(), quantized(x, zero, dtype, low, high))


@pytest.mark.parametrize("target", NAMES)
def test_rows_of_bytes(target, tmp_path):
    """A softmax of dequantized bytes, quantized: what waits for the next pass over a row must not be rounded."""
    rng = fresh_rng()
    x = rng.integers(0, 256, (5, 37)).astype("uint8")
    floats = "multiply(subtract(cast(x0, 'float32'), 131.0), 0.04)"
    share = f"divide(exp(subtract({floats}, r0)), r1)"
    text = (
        f"r0 = max({floats}); r1 = sum(exp(subtract({floats}, r0))); {quantize(f'multiply({share}, 256.0)', 2, 'int8')}"
    )
    names = ("d0", "n")
    problem = RowsProblem(RowProgram.parse(text), (flat(x.shape, "uint8", names),), flat(x.shape, "int8", names))
    out = poisoned(x.shape, "int8")
    built({"rows": rows_kernel(problem, cpu_named(target))}, target, tmp_path)["rows"](runtime.tensor(x), out)
    exponential = np.exp(
        (x.astype("float64") - 131) * 0.04 - ((x.astype("float64") - 131) * 0.04).max(1, keepdims=True)
    )
    exact = exponential / exponential.sum(1, keepdims=True) * 256 + 2
    assert np.abs(out.numpy() - np.clip(exact, -128, 127)).max() <= 0.5001


def test_other_clips_and_casts_stay():
    for text, types in {
        quantize("x0", 3, "uint8"): ["float64"],
        "cast(clip(add(round(x0), 2.5), 0.0, 255.0), 'uint8')": ["float32"],
        "cast(clip(round(x0), 0.0, 300.0), 'uint8')": ["float32"],
        "cast(clip(x0, 0.0, 255.0), 'uint8')": ["float32"],
        "cast(clip(round(x0), 0.0, 255.0), 'int32')": ["float32"],
    }.items():
        expression = Expression.parse(text)
        assert with_quantize(expression, types) == expression
    assert str(with_quantize(Expression.parse(quantize("x0", 3, "int8")), ["float32"])) == (
        "quantize(x0, 3, -128, 127, 'int8')"
    )


def test_a_vector_takes_six_instructions_between_load_and_store():
    problem = ElementwiseProblem(
        Expression.parse(quantize("multiply(cast(x0, 'float32'), 0.5)", 3, "uint8")),
        (flat((4096,), "int32"),),
        flat((4096,), "uint8"),
    )
    text = assembly(elementwise_kernel(problem, cpu_named("avx512")), "avx512")
    counts = Counter(re.findall(r"^\s+(v\w+)\s[^#\n]*%zmm", text, re.MULTILINE))
    vectors = counts["vpmovdb"]
    assert vectors > 0
    for instruction in ("vcvtdq2ps", "vmulps", "vmaxps", "vminps", "vaddps"):
        assert counts[instruction] == vectors, counts
    assert not set(counts) & {"vrndscaleps", "vcvttps2dq", "vpsubd"}
