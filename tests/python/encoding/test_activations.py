"""Decomposed activations are recognized, and nothing else is."""

from __future__ import annotations

import numpy as np
import pytest

from relax_hetero.encoding.activations import named
from relax_hetero.encoding.expression import Expression

GELU = "multiply(multiply({x}, add(erf(divide({x}, 1.4142135381698608)), 1.0)), 0.5)"
TANH = (
    "multiply(multiply(0.5, {x}), add(1.0, tanh(multiply(0.7978845608028654, "
    "add({x}, multiply(0.044715, multiply(multiply({x}, {x}), {x})))))))"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GELU.format(x="x0"), "gelu(x0)"),
        (GELU.format(x="add(x0, x1)"), "gelu(add(x0, x1))"),
        (GELU.format(x="multiply(x0, x1)"), "gelu(multiply(x0, x1))"),
        ("multiply(x0, multiply(0.5, add(1.0, erf(multiply(0.70710678, x0)))))", "gelu(x0)"),
        ("multiply(multiply(x0, 0.5), add(erf(multiply(x0, 0.70710678)), 1.0))", "gelu(x0)"),
        ("multiply(x0, add(erf(divide(x0, 1.41421356)), 1.0))", "multiply(gelu(x0), 2.0)"),
        ("divide(multiply(x0, add(erf(divide(x0, 1.41421356)), 1.0)), 2.0)", "gelu(x0)"),
        ("multiply(" + GELU.format(x="x0") + ", x1)", "multiply(gelu(x0), x1)"),
        ("relu(" + GELU.format(x="add(x0, x1)") + ")", "relu(gelu(add(x0, x1)))"),
        (TANH.format(x="x0"), "gelu_tanh(x0)"),
        (TANH.format(x="add(x0, x1)"), "gelu_tanh(add(x0, x1))"),
    ],
)
def test_recognized(text: str, expected: str) -> None:
    assert str(named(Expression.parse(text))) == expected


@pytest.mark.parametrize(
    "text",
    [
        "multiply(x1, add(erf(divide(x0, 1.4142135)), 1.0))",  # another factor
        "multiply(x0, add(erf(divide(x0, 1.5)), 1.0))",  # another scale
        "multiply(x0, add(erf(divide(x0, 1.4142135)), 2.0))",
        "multiply(x0, add(erf(x0), 1.0))",
        "multiply(x0, add(tanh(x0), 1.0))",
        "add(x0, erf(divide(x0, 1.4142135)))",
        "multiply(x0, add(erf(multiply(x1, x0)), 1.0))",
    ],
)
def test_left_alone(text: str) -> None:
    assert str(named(Expression.parse(text))) == text


@pytest.mark.parametrize("text", [GELU.format(x="multiply(x0, 3.0)"), TANH.format(x="multiply(x0, 3.0)")])
@pytest.mark.parametrize("x", [-2.5, -0.3, 0.0, 0.7, 1.9])
def test_the_value_stays_where_the_operand_has_a_factor(text: str, x: float) -> None:
    expression = Expression.parse(text)
    assert "gelu" in str(named(expression))
    operand = np.array(x)
    actual, expected = named(expression).evaluate([operand]), expression.evaluate([operand])
    assert actual == pytest.approx(expected, rel=1e-5, abs=1e-9)
