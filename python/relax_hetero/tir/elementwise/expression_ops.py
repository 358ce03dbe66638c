"""Vector arithmetic of every op of an elementwise expression, and the end of a requantization in few instructions.

A requantization ends ``cast(clip(add(round(x), zero), low, high), "uint8")``. A clipped float32 is rounded by adding a
number so large that its last bit is worth 1: the integer, halves to even, is then in the low bits, and a truncation
gives the byte. That takes one addition in place of a rounding, an addition of the zero point and a conversion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.expression import Expression, Term, split_sum
from ...encoding.functions import FUNCTIONS
from ..math import vector_math
from ..math.extremes import maximum, minimum

Number = bool | int | float


def _leaky_relu(x: tirx.Expr, alpha: Number) -> tirx.Expr:
    return T.Select(x > vector_math.constant(x, 0), x, x * vector_math.constant(x, alpha))


def _clip(x: tirx.Expr, low: Number, high: Number) -> tirx.Expr:
    if low != float("-inf"):
        x = vector_math.at_least(x, low)
    return x if high == float("inf") else vector_math.at_most(x, high)


def _absolute_float(x: tirx.Expr) -> tirx.Expr:
    return vector_math.absolute(x) if str(x.ty.dtype).startswith("float32") else T.abs(x)


def _divide_int(a: tirx.Expr, b: tirx.Expr) -> tirx.Expr:
    zero, one = vector_math.constant(b, 0), vector_math.constant(b, 1)
    if str(b.ty.dtype).startswith("uint"):
        return T.truncdiv(a, T.Select(tirx.EQ(b, zero), one, b))
    # The minimum integer divided by -1 traps like a division by zero.
    by_minus_one = tirx.EQ(b, vector_math.constant(b, -1))
    safe = T.Select(tirx.Or(by_minus_one, tirx.EQ(b, zero)), one, b)
    return T.Select(by_minus_one, zero - a, T.truncdiv(a, safe))


def _negative_float(x: tirx.Expr) -> tirx.Expr:
    # 0 - x would lose the sign of a zero.
    return x * vector_math.constant(x, -1)


_ARITHMETIC: dict[str, Callable[..., tirx.Expr]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "relu": lambda x: vector_math.at_least(x, 0),
    "square": lambda x: x * x,
    "leaky_relu": _leaky_relu,
    "clip": _clip,
}
FLOAT64_OPS: dict[str, Callable[..., tirx.Expr]] = {
    **_ARITHMETIC,
    "divide": lambda a, b: a / b,
    "maximum": maximum,
    "minimum": minimum,
    "abs": _absolute_float,
    "negative": _negative_float,
    "sqrt": T.sqrt,
    "rsqrt": vector_math.rsqrt,
    "round": T.nearbyint,
    "floor": T.floor,
    "ceil": T.ceil,
}
FLOAT_OPS = {
    **FLOAT64_OPS,
    **{
        name: getattr(vector_math, name)
        for name, function in FUNCTIONS.items()
        if function.is_approximated and not function.formula
    },
}
INT_OPS: dict[str, Callable[..., tirx.Expr]] = {
    **_ARITHMETIC,
    "divide": _divide_int,
    "maximum": T.max,
    "minimum": T.min,
    "abs": T.abs,
    "negative": lambda x: vector_math.constant(x, 0) - x,
    **dict.fromkeys(("round", "floor", "ceil"), lambda x: x),
}


QUANTIZE = "quantize"
"""An internal op of a float32 argument with the parameters zero point, bounds and type; texts cannot name it."""


def with_quantize(expression: Expression, dtypes: Sequence[str]) -> Expression:
    """The expression with `QUANTIZE` in place of the ops that end a requantization.

    `dtypes`: element types of the operands.
    """
    if not any(term.op == "round" for term in expression.terms()):
        return expression
    done: dict[Term, Term] = {}
    for term in expression.terms():
        match = _match_quantize(term, dtypes)
        args, op, params = (term.args, term.op, term.params) if match is None else ((match[0],), QUANTIZE, match[1])
        done[term] = Term(op, tuple(done[arg] for arg in args), params)
    return Expression(done[expression.term])


def _match_quantize(term: Term, dtypes: Sequence[str]) -> tuple[Term, tuple[Any, ...]] | None:
    """Operand and parameters of a requantization to bytes; None for other terms."""
    if term.op != "cast" or term.params[0] not in ("int8", "uint8") or term.args[0].op != "clip":
        return None
    dtype, bounds = str(term.params[0]), term.args[0].params
    inner, zero = split_sum(term.args[0].args[0])
    numbers = (zero, *map(float, bounds))
    limits = np.iinfo(dtype)
    fits = all(number.is_integer() and limits.min <= number <= limits.max for number in numbers)
    if inner.op != "round" or not fits or Expression(inner.args[0]).dtype(dtypes) != "float32":
        return None
    return inner.args[0], (*map(int, numbers), dtype)


def quantize(x: tirx.Expr, zero: int, low: int, high: int, dtype: str) -> tirx.Expr:
    """round(x) + zero of a float32 expression, halves to even, clipped to `low` and `high`; for NaN any byte."""
    x = vector_math.clamp(x, float(low - zero), float(high - zero))
    raw = vector_math.once(vector_math.bits(x + vector_math.constant(x, vector_math.ROUNDER)))
    # The rounder's own bits end in a byte of zeros.
    shifted = raw + vector_math.constant(raw, zero) if zero else raw
    return T.cast(shifted, vector_math.dtype_of(raw).replace("int32", dtype))
