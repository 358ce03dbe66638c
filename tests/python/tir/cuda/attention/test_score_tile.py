"""Scales of score expressions, which the softmax fuses, and bounds, which say whether its exponents overflow."""

from __future__ import annotations

import math

import pytest

from relax_hetero.encoding.expression import Expression
from relax_hetero.tir.cuda.attention.score_tile import plain_scale, score_bound


@pytest.mark.parametrize(
    ("text", "scale", "bound"),
    [
        ("multiply(x0, 0.25)", 0.25, math.inf),
        ("divide(multiply(x0, 3.0), 2.0)", 1.5, math.inf),
        ("multiply(x0, -1.0)", None, math.inf),
        ("multiply(tanh(multiply(x0, 0.1)), 30.0)", None, 30.0),
        ("divide(tanh(x0), -4.0)", None, 0.25),
        ("divide(tanh(x0), 0.0)", None, math.inf),
        ("add(multiply(tanh(x0), 30.0), x1)", None, math.inf),
    ],
)
def test_scales_and_bounds(text, scale, bound):
    expression = Expression.parse(text)
    assert (plain_scale(expression), score_bound(expression.term)) == (scale, bound)
