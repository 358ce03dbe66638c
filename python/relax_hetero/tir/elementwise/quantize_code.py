"""The end of a requantization, ``cast(clip(add(round(x), zero), low, high), "uint8")``, as few instructions on vectors.

A float32 between the bounds is rounded by adding a number so large that its last place is one: the integer, halves to
even, is then in the low bits, and a byte is what is left when the others are cut off. That takes an addition where
rounding, adding the zero point and converting to an integer take an instruction each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.expression import Expression, Term
from ..math import vector_math

QUANTIZE = "quantize"
"""No op of an expression's text: its parameters are the zero point, the bounds and the type, of a float32 argument."""


def with_quantize(expression: Expression, dtypes: Sequence[str]) -> Expression:
    """The expression with `QUANTIZE` in place of the ops it stands for.

    Parameters
    ----------
    expression : Expression
    dtypes : sequence of str
        Element types of its operands.
    """
    if not any(term.op == "round" for term in expression.terms()):
        return expression
    done: dict[Term, Term] = {}
    for term in expression.terms():
        found = _quantize(term, dtypes)
        args, op, params = (term.args, term.op, term.params) if found is None else ((found[0],), QUANTIZE, found[1])
        done[term] = Term(op, tuple(done[arg] for arg in args), params)
    return Expression(done[expression.term])


def _quantize(term: Term, dtypes: Sequence[str]) -> tuple[Term, tuple[Any, ...]] | None:
    """What is quantized by a term, and how; None for a term that is no requantization to bytes."""
    if term.op != "cast" or term.params[0] not in ("int8", "uint8") or term.args[0].op != "clip":
        return None
    dtype, bounds, inner = str(term.params[0]), term.args[0].params, term.args[0].args[0]
    zero = 0.0
    if inner.op == "add" and inner.args[1].op == "number":
        inner, zero = inner.args[0], float(inner.args[1].params[0])
    numbers = (zero, *map(float, bounds))
    limits = np.iinfo(dtype)
    fits = all(number.is_integer() and limits.min <= number <= limits.max for number in numbers)
    if inner.op != "round" or not fits or Expression(inner.args[0]).dtype(dtypes) != "float32":
        return None
    return inner.args[0], (*map(int, numbers), dtype)


def quantize(x: tirx.Expr, zero: int, low: int, high: int, dtype: str) -> tirx.Expr:
    """round(x) + zero, halves to even, between `low` and `high`, of a float32 expression; for NaN any byte."""
    x = vector_math.clamp(x, float(low - zero), float(high - zero))
    raw = vector_math.once(vector_math.bits(x + vector_math.constant(x, vector_math.ROUNDER)))
    # The rounder's own bits end in a byte of zeros.
    moved = raw + vector_math.constant(raw, zero) if zero else raw
    return T.cast(moved, vector_math.dtype_of(raw).replace("int32", dtype))
