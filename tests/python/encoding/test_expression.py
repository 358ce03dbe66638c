"""Elementwise expressions as text, types, and substitution."""

from __future__ import annotations

import math

import numpy as np
import pytest

from relax_hetero.encoding import Expression
from relax_hetero.encoding.expression import Term
from relax_hetero.errors import EncodingError


@pytest.mark.parametrize(
    "text",
    [
        "x0",
        "maximum(add(x0, x1), 0.0)",
        "cast(clip(round(multiply(cast(x0, 'float32'), x1)), -128.0, 127.0), 'int8')",
        "leaky_relu(x0, 0.01)",
        "minimum(x0, inf)",
        "add(x0, -3)",
    ],
)
def test_text_round_trips(text):
    assert str(Expression.parse(text)) == text
    assert Expression.parse(str(Expression.parse(text))) == Expression.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        *("", "add(x0)", "x", "y0", "pow(x0, 2)", "x0 + x1", "clip(x0, 1.0)", "add(x0, x1", "x\u0663", "x0\0"),
        *("'abc'", "-'abc'", "relu('abc')", "add(x0, True)", "add(x0, 1j)", "add(x0, None)", "relu(x0, axis=1)"),
        *("clip(x0, 'a', 'b')", "clip(x0, x1, x2)", "leaky_relu(x0, 'a')"),
        *("cast(x0, 3)", "cast(x0, 'nope')", "cast(x0, 'int4')", "cast(x0, 'handle')", "cast(x0, True)"),
        *("relu(" * 5000 + "x0" + ")" * 5000, "-" * 5000 + "1"),
    ],
    ids=lambda text: repr(text[:20]),
)
def test_text_that_is_not_an_expression(text):
    with pytest.raises(EncodingError):
        Expression.parse(text)


def test_not_a_number_is_a_number():
    (number, *_) = Expression.parse("add(nan, x0)").terms()
    assert math.isnan(number.params[0])


def test_operands_and_types():
    expression = Expression.parse("add(cast(x1, 'float32'), multiply(x3, 2.0))")
    assert expression.num_operands == 4
    assert expression.dtype(["int8", "int32", "int8", "float32"]) == "float32"
    with pytest.raises(EncodingError, match=r"add in expression .* mixes element types \['float16', 'float32'\]"):
        expression.dtype(["int8", "int32", "int8", "float16"])


def test_equal_terms_are_evaluated_once():
    calls = []

    def apply(op, args, params):
        calls.append(op)
        return params[0] if op == "number" else sum(args) if op == "add" else math.prod(args)

    assert Expression.parse("multiply(add(x0, 1), add(x0, 1))").fold([3], apply) == 16
    assert calls == ["number", "add", "multiply"]


def test_evaluation_computes_in_the_type_of_its_operands():
    x = np.array([-3.0, 0.5, 2.0], "float32")
    value = Expression.parse("where(cast(x1, 'int8'), clip(multiply(x0, 3), -1.5, 2.5), leaky_relu(x0, 0.5))").evaluate(
        [x, np.array([1.0, 2.0, 0.5], "float32")]
    )
    assert value.dtype == "float32" and value.tolist() == [-1.5, 1.5, 2.0]
    assert Expression.parse("divide(x0, 2)").evaluate([np.array([-7, 7], "int8")]).tolist() == [-3, 3]


def test_gelu_far_below_zero_loses_no_digits():
    (actual,) = Expression.parse("gelu(x0)").evaluate([np.array([-10.0])])
    assert actual == pytest.approx(-7.61985302416e-23, rel=1e-9)


def test_substitution():
    outer = Expression.parse("maximum(add(x0, x1), x0)")
    inner = Expression.parse("multiply(x0, 2.0)")
    merged = outer.substitute([inner, Expression.operand(1)])
    assert str(merged) == "maximum(add(multiply(x0, 2.0), x1), multiply(x0, 2.0))"
    assert merged.terms()[0] == Term("operand", (), (0,))
