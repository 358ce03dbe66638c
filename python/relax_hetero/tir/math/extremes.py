"""Maximum and minimum with NaN: one definition for every kernel and every fusion of it.

``tirx.max`` is a comparison and a selection, which takes the second operand where one is NaN, so that the result would
depend on the order of operands; and TVM's simplifier swaps and drops operands as if numbers were totally ordered. Here
the result is NaN where an operand is, as in numpy. With a constant operand that takes no further instruction, with two
variables a further comparison and selection.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from ..core.builder import Expr, vector_type


def maximum(a: Expr, b: Expr) -> Expr:
    """The maximum of two expressions of one type; NaN where one of them is."""
    return _extreme(a, b, tirx.max, tirx.GT)


def minimum(a: Expr, b: Expr) -> Expr:
    """The minimum of two expressions of one type; NaN where one of them is."""
    return _extreme(a, b, tirx.min, tirx.LT)


def is_nan(x: Expr) -> Expr:
    """Return whether a floating-point expression is NaN, by its bits.

    TVM simplifies ``x != x`` to false, and generates one call per lane for ``isnan`` of a vector.
    """
    return _exceeds_infinity(_bits_of(x), x)


def _bits_of(x: Expr) -> Expr:
    integer, _ = _BITS[str(x.ty.dtype).partition("x")[0]]
    return tirx.reinterpret(tvm.ir.PrimType(vector_type(integer, x.ty.dtype.lanes)), x)


def _exceeds_infinity(bits: Expr, x: Expr) -> Expr:
    """Return whether the bits of `x`, as an integer of at least its size, are those of NaN."""
    integer, infinity = _BITS[str(x.ty.dtype).partition("x")[0]]
    kind = str(bits.ty.dtype)
    return tirx.bitwise_and(bits, tirx.const(tirx.max_value(integer).value, kind)) > tirx.const(infinity, kind)


_BITS = {
    "float16": ("int16", 0x7C00),
    "bfloat16": ("int16", 0x7F80),
    "float32": ("int32", 0x7F800000),
    "float64": ("int64", 0x7FF0000000000000),
}
"""The integer type of an element type's size, and the bits of infinity."""


def index_wins(one: Sequence[Expr], other: Sequence[Expr], largest: bool, last: bool) -> Expr:
    """True if the first of two pairs of index and value wins an argmax or argmin; NaN wins against all numbers."""
    is_more = one[1] > other[1] if largest else one[1] < other[1]
    is_before = one[0] > other[0] if last else one[0] < other[0]
    if "float" not in str(one[1].ty.dtype):
        return tirx.any(is_more, tirx.all(tirx.EQ(one[1], other[1]), is_before))
    # Without a choice, which would be a branch on GPUs. Comparisons with NaN are false.
    one_is_nan, other_is_nan = is_nan(one[1]), is_nan(other[1])
    are_equal = tirx.any(tirx.EQ(one[1], other[1]), tirx.all(one_is_nan, other_is_nan))
    return tirx.any(is_more, tirx.all(one_is_nan, tirx.Not(other_is_nan)), tirx.all(are_equal, is_before))


def _extreme(a: Expr, b: Expr, plain_op: type, is_ahead: type) -> Expr:
    if "float" not in str(a.ty.dtype):
        return plain_op(a, b)
    for one, other in ((a, b), (b, a)):
        if _is_number(other):  # comparisons with NaN are false, which selects NaN
            return tirx.Select(is_ahead(other, one), other, one)
    # TVM would simplify nested comparisons alone as if numbers were totally ordered.
    return tirx.Select(is_nan(a), a, tirx.Select(is_ahead(a, b), a, b))


def _is_number(x: Expr) -> bool:
    scalar = x.value if isinstance(x, tirx.Broadcast) else x
    return isinstance(scalar, tirx.FloatImm) and not math.isnan(scalar.value)


def is_maximum(value: Expr) -> bool | None:
    """True for a `maximum` of two variables, False for a `minimum`, None for other expressions."""
    inner = value.false_value if isinstance(value, tirx.Select) else None
    if not isinstance(inner, tirx.Select) or not isinstance(inner.condition, (tirx.GT, tirx.LT)):
        return None
    a, b = inner.true_value, inner.false_value
    if "float" not in str(a.ty.dtype):
        return None
    expected = (maximum if isinstance(inner.condition, tirx.GT) else minimum)(a, b)
    # TVM widens the integers in conditions of kernels that it makes of TE.
    wide = tirx.Select(_exceeds_infinity(_bits_of(a).astype("int64"), a), a, inner)
    is_extreme = any(tvm_ffi.structural_equal(value, each) for each in (expected, wide))
    return isinstance(inner.condition, tirx.GT) if is_extreme else None


def operands(value: Expr) -> tuple[Expr, Expr]:
    """The operands of a `maximum` or `minimum` of two variables."""
    return value.false_value.true_value, value.false_value.false_value


def reduced_shape(shape: Sequence[Any], axes: Sequence[int], keepdims: bool) -> list[Any]:
    """Shape of a reduction over some axes."""
    return [1 if axis in axes else extent for axis, extent in enumerate(shape) if keepdims or axis not in axes]


def source_index(position: Sequence[Any], reduced: dict[int, Any], rank: int, keepdims: bool) -> list[Any]:
    """Position in a reduction's operand, given that in its result, and the index along each reduced axis."""
    others = iter([index for axis, index in enumerate(position) if not (keepdims and axis in reduced)])
    return [reduced[axis] if axis in reduced else next(others) for axis in range(rank)]
