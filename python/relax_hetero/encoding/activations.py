"""Recognition of activations that exporters write as basic ops: naming them selects their faster code.

``multiply(multiply(x0, add(erf(divide(x0, 1.4142135)), 1.0)), 0.5)`` is ``gelu(x0)``. (Source: Hendrycks and Gimpel,
"Gaussian error linear units", for both forms.)
"""

from __future__ import annotations

import math
from collections import Counter
from functools import cache

from .expression import Expression, Term

_SQRT_HALF = math.sqrt(0.5)
_TANH_INNER, _TANH_CUBE = math.sqrt(2 / math.pi), 0.044715
_TOLERANCE = 1e-5  # relative tolerance: exporters round the constants to single precision, or write six digits


def named(expression: Expression) -> Expression:
    """The expression with gelu and its tanh form replaced by their functions.

    Parameters
    ----------
    expression : Expression
        Expression over floating-point operands of at most 32 bits.
    """

    # From the outside in, so that a product is matched with all its factors.
    @cache
    def visit(term: Term) -> Term:
        term = (_gelu(term) if term.op in ("multiply", "divide") else None) or term
        return Term(term.op, tuple(map(visit, term.args)), term.params)

    return Expression(visit(expression.term))


def _gelu(term: Term) -> Term | None:
    """A product as a gelu times its other factors; None if it is not one."""
    number, factors = _factors(term)
    for factor in factors:
        gate = _plus_one(factor)
        if gate is None or gate.op not in ("erf", "tanh"):
            continue
        x = _erf_argument(gate.args[0]) if gate.op == "erf" else _tanh_argument(gate.args[0])
        if x is None:
            continue
        scale, x_factors = _factors(x)
        rest = factors.copy()
        rest[factor] -= 1
        if x_factors - rest:
            continue
        result = Term("gelu" if gate.op == "erf" else "gelu_tanh", (x,))
        for remaining in (rest - x_factors).elements():
            result = Term("multiply", (result, remaining))
        # x (1 + erf(x / sqrt(2))) is twice gelu(x).
        number = 2 * number / scale
        return result if _close(number, 1) else Term("multiply", (result, Term("number", (), (number,))))
    return None


def _factors(term: Term) -> tuple[float, Counter[Term]]:
    """A term as a number times a product of terms that are not products themselves."""
    if term.op == "number":
        return float(term.params[0]), Counter()
    if term.op == "square":
        number, factors = _factors(term.args[0])
        return number * number, factors + factors
    if term.op == "multiply":
        (a, left), (b, right) = map(_factors, term.args)
        return a * b, left + right
    if term.op == "divide" and term.args[1].op == "number" and term.args[1].params[0]:
        number, factors = _factors(term.args[0])
        return number / float(term.args[1].params[0]), factors
    return 1.0, Counter([term])


def _plus_one(term: Term) -> Term | None:
    """``a`` if the term is ``a + 1``, else None."""
    if term.op != "add":
        return None
    a, b = term.args
    if a.op == "number":
        a, b = b, a
    return a if b.op == "number" and _close(float(b.params[0]), 1) else None


def _erf_argument(term: Term) -> Term | None:
    """``x`` if the term is ``x / sqrt(2)``, else None."""
    if term.op not in ("multiply", "divide"):
        return None
    a, b = term.args
    if term.op == "multiply" and a.op == "number":
        a, b = b, a
    if b.op != "number":
        return None
    expected = 1 / _SQRT_HALF if term.op == "divide" else _SQRT_HALF
    return a if _close(float(b.params[0]), expected) else None


def _tanh_argument(term: Term) -> Term | None:
    """``x`` if the term is ``sqrt(2 / pi) (x + 0.044715 x^3)``, else None."""
    number, factors = _factors(term)
    if not _close(number, _TANH_INNER) or sum(factors.values()) != 1:
        return None
    (total,) = factors
    if total.op != "add":
        return None
    for x, cube in (total.args, total.args[::-1]):
        scale, x_factors = _factors(x)
        cube_scale, cube_factors = _factors(cube)
        if cube_factors == x_factors + x_factors + x_factors and _close(cube_scale, _TANH_CUBE * scale**3):
            return x
    return None


def _close(actual: float, expected: float) -> bool:
    return math.isclose(actual, expected, rel_tol=_TOLERANCE)
