"""Code generation of elementwise expressions: `tir.elementwise.expression_code` with CUDA's math functions.

CUDA's ``expf``, ``erff`` and ``tanhf`` are accurate to 2 ulp and take fewer instructions than the vectorized
polynomials for CPUs. All other ops, and the rules for NaN, rounding, casts and division by zero, are shared with CPUs,
so that a model gets the same results on both.

bfloat16 is loaded and stored as bits, as on CPUs, but rounded by the GPU's instruction.

Results that are rounded to 16 bits use cheaper approximations (`_gelu_of_halves`, `_silu_of_halves`), as activations
dominate the epilogues of tensor core products.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.expression import Expression
from ....target.element_types import HALF_TYPES
from ...core.builder import Expr
from ...elementwise import expression_code
from ...elementwise.expression_code import Ops
from ...elementwise.expression_ops import FLOAT_OPS, INT_OPS
from ...math import vector_math
from ...math.casts import BITS, lower_to_integers
from . import ptx
from .dialect import has_ptx
from .launch import local


def emit(expression: Expression, values: Sequence[Expr], dtypes: Sequence[str], rounded: str = "") -> Expr:
    """Emit an expression of scalars, in a function whose registers are "local"; see `expression_code.emit`.

    Parameters
    ----------
    rounded : str
        Type to which the caller rounds the result, if any.

    Returns
    -------
    PrimExpr
        A scalar of `expression.dtype(dtypes)`.

    Raises
    ------
    EncodingError
        If two operands of an op differ in type, or an op does not exist for a type.
    """
    last = expression.term
    if last.op == "cast" and last.params[0] in HALF_TYPES:
        last, rounded = last.args[0], last.params[0]
    is_rounded_gelu = last.op == "gelu" and rounded in HALF_TYPES
    return expression_code.emit(expression, values, dtypes, 1, _ops_of_halves if is_rounded_gelu else ops_for)


def ops_for(dtype: str) -> Ops:
    """Ops for an element type, float64 included."""
    if dtype in HALF_TYPES and has_ptx():
        return _HALF_OPS
    return _FLOAT_OPS if "float" in dtype else INT_OPS


def _ops_of_halves(dtype: str) -> Ops:
    return _HALF_OPS if dtype == "float32" and has_ptx() else ops_for(dtype)


def _sigmoid(x: Expr) -> Expr:
    return vector_math.constant(x, 1.0) / _one_plus_exp_of_negative(x)


def _silu(x: Expr) -> Expr:
    # NaN for -inf, as on CPUs. For large negative numbers, e^-x overflows and the quotient is -0.
    return x / _one_plus_exp_of_negative(x)


def _one_plus_exp_of_negative(x: Expr) -> Expr:
    return vector_math.constant(x, 1.0) + T.exp(x * vector_math.constant(x, -1.0))


def _silu_of_halves(x: Expr) -> Expr:
    return x * ptx.quick_sigmoid(x)


def _gelu(x: Expr) -> Expr:
    return _half_times_one_plus(x, T.erf(x * vector_math.constant(x, 0.70710678118654752)))


# Coefficients of x, x^3, x^5, ... of the normal distribution's integral from 0 to x, fitted to minimize the error of x
# times the integral. The polynomial may exceed the limit 1/2 where the integral is within the error of it (results are
# clipped); the last coefficient is positive, so that it stays above from there on.
_NORMAL_INTEGRAL_COEFFICIENTS = (
    0.39876481890678406, -0.06608258932828903, 0.009647008031606674, -0.0010562196839600801, 8.450021414319053e-05,
    -4.745080786960898e-06, 1.7522036444006517e-07, -3.788144464778043e-09, 3.611771992595436e-11,
)  # fmt: skip


def _gelu_of_halves(x: Expr) -> Expr:
    """gelu by a polynomial: 11 instructions, less than half of those of `_gelu`.

    The absolute error is at most 4.2e-5; the relative error 1.6e-4 near zero and 8e-5 for positive x, less than half of
    float16's rounding error. It is large only for the tiny results far below zero.
    """
    square = vector_math.once(x * x)
    polynomial = vector_math.constant(x, _NORMAL_INTEGRAL_COEFFICIENTS[-1])
    for coefficient in reversed(_NORMAL_INTEGRAL_COEFFICIENTS[:-1]):
        polynomial = polynomial * square + vector_math.constant(x, coefficient)
    probability = local(1, "float32")
    ptx.multiply_add_clipped(probability[0], x, vector_math.once(polynomial), vector_math.constant(x, 0.5))
    return x * probability[0]


def _gelu_tanh(x: Expr) -> Expr:
    linear, cubic = 0.79788456080286536, 0.79788456080286536 * 0.044715
    inner = x * (vector_math.constant(x, linear) + x * x * vector_math.constant(x, cubic))
    return _half_times_one_plus(x, T.tanh(inner))


def _half_times_one_plus(x: Expr, gate: Expr) -> Expr:
    half = vector_math.once(x * vector_math.constant(x, 0.5))
    return half * gate + half


_FLOAT_OPS: Ops = {
    **FLOAT_OPS,
    "exp": T.exp,
    "exp_nonpositive": T.exp,
    "log": T.log,
    "tanh": T.tanh,
    "erf": T.erf,
    "rsqrt": T.rsqrt,
    "sigmoid": _sigmoid,
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
}


_HALF_OPS: Ops = {**_FLOAT_OPS, "gelu": _gelu_of_halves, "silu": _silu_of_halves, "sigmoid": ptx.quick_sigmoid}


def _bits_by_instruction(call: tvm.ir.Call) -> tirx.Expr:
    """Lower `casts.bfloat16_bits` to the GPU's instruction; to integer ops for vectors."""
    x = call.args[0]
    if x.ty.dtype.lanes > 1:
        return lower_to_integers(call)
    return tirx.reinterpret("uint16", tirx.Cast("bfloat16", x))


tirx.op.register_intrin_lowering(BITS, "cuda", f=_bits_by_instruction)
