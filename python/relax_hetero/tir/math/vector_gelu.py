"""Gaussian error linear units of float32 vectors; see `vector_math`.

They are within 4 units in the last place *of x*: what is left of x far below zero is next to nothing, and rounded so.
So a ratio of polynomials will do for erf and tanh; their coefficients are positive, so that nothing cancels.
"""

from __future__ import annotations

from itertools import zip_longest

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from .vector_math import clamp, constant, once

# tanh(x) = x P(x^2) / Q(x^2) for |x| <= 9.02, relative error 2.1e-8; beyond, tanh is 1 in float32.
_TANH_RATIONAL_LIMIT = 9.02
_TANH_P = (1.0, 0.133797199, 0.00349403615, 2.0583504e-05, 1.33190987e-08)
_TANH_Q = (1.0, 0.467130363, 0.0258710813, 0.000328309485, 7.76203592e-07)

# erf(x) = x P(x^2) / Q(x^2) for |x| <= 3.925, relative error 1.9e-8; beyond, erf is 1 in float32.
_ERF_RATIONAL_LIMIT = 3.925
_ERF_P = (1.12837911, 0.190595433, 0.0527695194, 0.00377262034, 0.000284844718, 2.0460102e-06)
_ERF_Q = (1.0, 0.502243519, 0.114183411, 0.0149833411, 0.00116387394, 3.80476558e-05)


def gelu(x: tirx.Expr) -> tirx.Expr:
    """x (1 + erf(x / sqrt(2))) / 2."""
    x = once(x)
    half = once(x * constant(x, 0.5))
    return once(half * _odd_rational(x * constant(x, 0.70710678118654752), _ERF_RATIONAL_LIMIT, _ERF_P, _ERF_Q) + half)


def gelu_tanh(x: tirx.Expr) -> tirx.Expr:
    """x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2."""
    x = once(x)
    half = once(x * constant(x, 0.5))
    inner = x * (constant(x, 0.79788456080286536) + x * x * constant(x, 0.79788456080286536 * 0.044715))
    return once(half * _odd_rational(inner, _TANH_RATIONAL_LIMIT, _TANH_P, _TANH_Q) + half)


def _odd_rational(x: tirx.Expr, limit: float, p: tuple[float, ...], q: tuple[float, ...]) -> tirx.Expr:
    """x P(x^2) / Q(x^2), and exactly 1 or -1 from the limit on: what is left of gelu far below zero is zero."""
    x = clamp(x, -limit, limit)
    square = once(x * x)
    fourth = once(square * square)
    ratio = x * _paired(square, fourth, p) / _paired(square, fourth, q)
    one, edge = constant(x, 1.0), constant(x, limit)
    below = T.Select(x <= constant(x, -limit), constant(x, -1.0), ratio)
    return once(T.Select(x >= edge, one, below))


def _paired(x: tirx.Expr, square: tirx.Expr, coefficients: tuple[float, ...]) -> tirx.Expr:
    """A polynomial as one in x^2 whose coefficients are linear in x: half the roundings one after the other."""
    pairs = [
        constant(x, low) if high is None else constant(x, high) * x + constant(x, low)
        for low, high in zip_longest(coefficients[::2], coefficients[1::2])
    ]
    result = pairs[-1]
    for pair in reversed(pairs[:-1]):
        result = result * square + pair
    return result
