"""The greater and the lesser of two numbers, NaN included: one definition for every kernel and every fusion of it.

``tirx.max`` is a comparison and a choice, which take the second operand where one is NaN, so that a NaN would be seen
or not as the operands happen to stand; and TVM's simplifier swaps and drops operands as if numbers were total. Here the
result is NaN where an operand is, as in numpy. Beside a constant that takes no instruction more, on two variables it
takes a comparison and a choice more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tvm
import tvm_ffi
from tvm import tirx

from ..core.builder import Expr, vector_type


def maximum(a: Expr, b: Expr) -> Expr:
    """The greater of two expressions of one type; NaN where one of them is."""
    return _extreme(a, b, tirx.max, tirx.GT)


def minimum(a: Expr, b: Expr) -> Expr:
    """The lesser of two expressions of one type; NaN where one of them is."""
    return _extreme(a, b, tirx.min, tirx.LT)


def is_nan(x: Expr) -> Expr:
    """Return whether a floating-point expression is NaN, by its bits.

    TVM would simplify ``x != x`` to false, and generates a call for each lane of ``isnan`` of a vector.
    """
    dtype, lanes = str(x.ty.dtype).partition("x")[0], x.ty.dtype.lanes
    integer, infinity = _BITS[dtype]
    raw = tirx.reinterpret(tvm.ir.PrimType(vector_type(integer, lanes)), x)
    kind = str(raw.ty.dtype)
    return tirx.bitwise_and(raw, tirx.const(tirx.max_value(integer).value, kind)) > tirx.const(infinity, kind)


_BITS = {
    "float16": ("int16", 0x7C00),
    "bfloat16": ("int16", 0x7F80),
    "float32": ("int32", 0x7F800000),
    "float64": ("int64", 0x7FF0000000000000),
}
"""Bits of an element type: the integer of its size, and the bits of infinity."""


def index_wins(one: Sequence[Expr], other: Sequence[Expr], largest: bool, last: bool) -> Expr:
    """True if the first of two pairs of index and value is the one that is looked for; NaN comes before all numbers."""
    is_more = one[1] > other[1] if largest else one[1] < other[1]
    is_before = one[0] > other[0] if last else one[0] < other[0]
    of_numbers = tirx.any(is_more, tirx.all(tirx.EQ(one[1], other[1]), is_before))
    if "float" not in str(one[1].ty.dtype):
        return of_numbers
    return tirx.Select(is_nan(one[1]), tirx.any(tirx.Not(is_nan(other[1])), is_before), of_numbers)


def _extreme(a: Expr, b: Expr, of_total: type, is_ahead: type) -> Expr:
    if "float" not in str(a.ty.dtype):
        return of_total(a, b)
    for one, other in ((a, b), (b, a)):
        if _is_number(other):  # a NaN loses every comparison, and is what is left
            return tirx.Select(is_ahead(other, one), other, one)
    # Nested comparisons alone would be simplified as if numbers were total.
    return tirx.Select(is_nan(a), a, tirx.Select(is_ahead(a, b), a, b))


def _is_number(x: Expr) -> bool:
    scalar = x.value if isinstance(x, tirx.Broadcast) else x
    return isinstance(scalar, tirx.FloatImm) and not math.isnan(scalar.value)


def is_maximum(value: Expr) -> bool | None:
    """True for what `maximum` makes of two variables, False for `minimum`; None of other expressions."""
    inner = value.false_value if isinstance(value, tirx.Select) else None
    if not isinstance(inner, tirx.Select) or not isinstance(inner.condition, (tirx.GT, tirx.LT)):
        return None
    wanted = (maximum if isinstance(inner.condition, tirx.GT) else minimum)(inner.true_value, inner.false_value)
    return isinstance(inner.condition, tirx.GT) if tvm_ffi.structural_equal(value, wanted) else None


def operands(value: Expr) -> tuple[Expr, Expr]:
    """The two expressions of which `maximum` or `minimum` made one."""
    return value.false_value.true_value, value.false_value.false_value
