"""What every op of an elementwise expression is as vector arithmetic, and conversions between element types."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..core.builder import vector_type
from ..math import vector_math
from ..math.bfloat16_bits import bfloat16_bits
from ..math.exp_nonpositive import exp_nonpositive
from ..math.vector_gelu import gelu, gelu_tanh

Number = bool | int | float


def cast(value: tirx.Expr, dtype: str) -> tirx.Expr:
    """`value` converted to an element type, its lanes kept.

    Between bfloat16 and others by way of the bits: TVM's own casts of bfloat16 convert the bits as if they were a
    number where the value is bound, and vanish in pairs, rounding and all.
    """
    found = value.ty.dtype
    lanes = found.lanes
    element = str(found).partition("x")[0]
    if element == dtype:
        return value
    if element == "bfloat16":
        wide = T.cast(T.reinterpret(vector_type("uint16", lanes), value), vector_type("uint32", lanes))
        single = T.reinterpret(vector_type("float32", lanes), T.shift_left(wide, vector_math.constant(wide, 16)))
        return cast(single, dtype)
    if dtype == "bfloat16":
        return T.reinterpret(vector_type("bfloat16", lanes), bfloat16_bits(cast(value, "float32")))
    return T.cast(value, vector_type(dtype, lanes))


def round_to_bfloat16(x: tirx.Expr) -> tirx.Expr:
    """A float32 expression rounded to the nearest bfloat16 (halves to even), as float32."""
    return vector_math.once(cast(cast(x, "bfloat16"), "float32"))


def _maximum(a: tirx.Expr, b: tirx.Expr) -> tirx.Expr:
    # NaN in b is the result of the comparison's false side. (Nested comparisons would be simplified as if total.)
    return T.Select(T.isnan(a), a, T.Select(a > b, a, b))


def _minimum(a: tirx.Expr, b: tirx.Expr) -> tirx.Expr:
    return T.Select(T.isnan(a), a, T.Select(a < b, a, b))


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
    # The least integer by -1 traps like a division by zero.
    by_minus_one = tirx.EQ(b, vector_math.constant(b, -1))
    safe = T.Select(tirx.Or(by_minus_one, tirx.EQ(b, zero)), one, b)
    return T.Select(by_minus_one, zero - a, T.truncdiv(a, safe))


def _square(x: tirx.Expr) -> tirx.Expr:
    return x * x


def _negative(x: tirx.Expr) -> tirx.Expr:
    return vector_math.constant(x, 0) - x


def _negative_float(x: tirx.Expr) -> tirx.Expr:
    # 0 - x would lose the sign of a zero.
    return x * vector_math.constant(x, -1)


def _same(x: tirx.Expr) -> tirx.Expr:
    return x


_ARITHMETIC: dict[str, Callable[..., tirx.Expr]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "relu": lambda x: vector_math.at_least(x, 0),
    "square": _square,
    "leaky_relu": _leaky_relu,
    "clip": _clip,
}
FLOAT32_OPS: dict[str, Callable[..., tirx.Expr]] = {
    name: getattr(vector_math, name) for name in ("exp", "log", "tanh", "erf", "sigmoid", "silu")
}
FLOAT32_OPS.update(gelu=gelu, gelu_tanh=gelu_tanh)
# No op of an expression's text: plans of kernels put it where they know the argument.
FLOAT32_OPS["exp_nonpositive"] = exp_nonpositive
FLOAT_OPS: dict[str, Callable[..., tirx.Expr]] = {
    **_ARITHMETIC,
    **FLOAT32_OPS,
    "divide": lambda a, b: a / b,
    "maximum": _maximum,
    "minimum": _minimum,
    "abs": _absolute_float,
    "negative": _negative_float,
    "sqrt": T.sqrt,
    "rsqrt": vector_math.rsqrt,
    "round": T.nearbyint,
    "floor": T.floor,
    "ceil": T.ceil,
}
INT_OPS: dict[str, Callable[..., tirx.Expr]] = {
    **_ARITHMETIC,
    "divide": _divide_int,
    "maximum": T.max,
    "minimum": T.min,
    "abs": T.abs,
    "negative": _negative,
    "round": _same,
    "floor": _same,
    "ceil": _same,
}
