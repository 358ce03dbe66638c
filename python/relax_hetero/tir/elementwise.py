"""Elementwise expressions as vector code: in the epilogue of a product, and alone.

Rules of arithmetic
-------------------
- An op means what the Relax op of its name means, and NaN goes through `maximum`, `minimum`, `relu` and `clip` as it
  does in numpy. `round` rounds halves to even. Integer `divide` truncates.
- 16-bit floats are computed in float32, from loads to the store, and rounded where the expression casts and where the
  result is stored: more exact than op by op, and cheaper.
- A cast of a float to an integer truncates; what does not fit is undefined, as in Relax.
- An integer division never traps, whatever padding holds: by zero, the result is the dividend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..encoding.expression import Expression
from ..errors import EncodingError
from . import vector_math

Number = bool | int | float


@dataclass(frozen=True)
class _Value:
    """An operand or intermediate: its nominal type, and its value in the type that it is computed in."""

    dtype: str
    value: tirx.Expr


def computed_in(dtype: str) -> str:
    """The element type that arithmetic on `dtype` is done in."""
    return "float32" if dtype in ("float16", "bfloat16") else dtype


def emit(expression: Expression, values: Sequence[tirx.Expr], dtypes: Sequence[str], lanes: int) -> tirx.Expr:
    """An expression over vectors; called while a PrimFunc is being built, where it binds intermediates.

    Parameters
    ----------
    expression : Expression
    values : sequence of PrimExpr
        The operands, of `lanes` lanes each (scalars where `lanes` is 1; a scalar operand is broadcast otherwise).
    dtypes : sequence of str
        Element types of the operands. A value may be in the type itself or in the one of `computed_in`.
    lanes : int

    Returns
    -------
    PrimExpr
        Of `expression.dtype(dtypes)`, and `lanes` lanes.

    Raises
    ------
    EncodingError
        If two operands of an op differ in type, or an op does not exist for a type.
    """
    operands = []
    for value, dtype in zip(values, dtypes, strict=True):
        vector = cast(value, computed_in(dtype))
        if lanes > 1 and vector.ty.dtype.lanes == 1:
            vector = T.broadcast(vector, lanes)
        operands.append(_Value(dtype, vector if dtype == "bool" else T.bind(vector)))

    def apply(op: str, args: list[Any], params: tuple[Any, ...]) -> Any:
        if op == "number":
            return params[0]
        if op == "cast":
            return _cast(_known(expression, args[0]), params[0])
        known = [arg for arg in args if isinstance(arg, _Value)]
        if not known:
            raise EncodingError(f"{op} in expression {expression} has numbers only; their type is unknown")
        if any(arg.dtype != known[0].dtype for arg in known):
            found = sorted({arg.dtype for arg in known})
            raise EncodingError(f"{op} in expression {expression} meets element types {found}; expected one")
        like = known[0]
        terms = [arg.value if isinstance(arg, _Value) else vector_math.constant(like.value, arg) for arg in args]
        function = (_FLOAT_OPS if _is_float(like.dtype) else _INT_OPS).get(op)
        if function is None or (op in _FLOAT32_OPS and like.dtype == "float64"):
            raise EncodingError(f"{op} in expression {expression} does not exist for {like.dtype}")
        return _Value(like.dtype, T.bind(function(*terms, *params)))

    result = _known(expression, expression.evaluate(operands, apply))
    return cast(result.value, result.dtype)


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
        wide = T.cast(T.reinterpret(_vector("uint16", lanes), value), _vector("uint32", lanes))
        single = T.reinterpret(_vector("float32", lanes), T.shift_left(wide, vector_math.constant(wide, 16)))
        return cast(single, dtype)
    if dtype == "bfloat16":
        rounded = T.reinterpret(_vector("uint32", lanes), round_to_bfloat16(cast(value, "float32")))
        high = T.cast(T.shift_right(rounded, vector_math.constant(rounded, 16)), _vector("uint16", lanes))
        return T.reinterpret(_vector("bfloat16", lanes), high)
    return T.cast(value, _vector(dtype, lanes))


def _vector(dtype: str, lanes: int) -> str:
    return f"{dtype}x{lanes}" if lanes > 1 else dtype


def _known(expression: Expression, value: Any) -> _Value:
    if not isinstance(value, _Value):
        raise EncodingError(f"expression {expression} is a number; its type is unknown")
    return value


def _is_float(dtype: str) -> bool:
    return "float" in dtype


def _cast(value: _Value, dtype: str) -> _Value:
    if dtype == "bfloat16" and value.dtype != dtype:
        return _Value(dtype, round_to_bfloat16(cast(value.value, "float32")))
    if dtype == "float16":
        return _Value(dtype, T.bind(cast(cast(value.value, "float16"), "float32")))
    if dtype == "bool":
        # Not bound: TVM's analyzer fails on bound vectors of bool.
        return _Value(dtype, tirx.NE(value.value, vector_math.constant(value.value, 0)))
    return _Value(dtype, T.bind(cast(value.value, computed_in(dtype))))


def round_to_bfloat16(x: tirx.Expr) -> tirx.Expr:
    """A float32 expression rounded to the nearest bfloat16 (halves to even), as float32."""
    raw = T.bind(vector_math.bits(x))
    one = vector_math.constant(raw, 1)
    odd = T.bitwise_and(T.shift_right(raw, vector_math.constant(raw, 16)), one)
    rounded = T.bitwise_and(raw + vector_math.constant(raw, 0x7FFF) + odd, vector_math.constant(raw, -0x10000))
    return T.bind(T.Select(T.isnan(x), x, vector_math.from_bits(rounded)))


# ---- ops ----


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
    return vector_math.absolute(x) if x.ty.dtype.type_code == _FLOAT32.type_code and x.ty.dtype.bits == 32 else T.abs(x)


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


_FLOAT32 = tvm.DataType("float32")

_ARITHMETIC: dict[str, Callable[..., tirx.Expr]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "relu": lambda x: vector_math.at_least(x, 0),
    "square": _square,
    "leaky_relu": _leaky_relu,
    "clip": _clip,
}
_FLOAT32_OPS: dict[str, Callable[..., tirx.Expr]] = {
    name: getattr(vector_math, name)
    for name in ("exp", "log", "tanh", "erf", "sigmoid", "silu", "gelu", "gelu_tanh")
}
_FLOAT_OPS: dict[str, Callable[..., tirx.Expr]] = {
    **_ARITHMETIC,
    **_FLOAT32_OPS,
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
_INT_OPS: dict[str, Callable[..., tirx.Expr]] = {
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
