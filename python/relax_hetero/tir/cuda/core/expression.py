"""Elementwise expressions as code of one thread: `tir.elementwise.expression_code` with CUDA's own functions.

CUDA's ``expf``, ``erff`` and ``tanhf`` are within 2 units in the last place and take fewer instructions than the
polynomials that CPUs need for vectors. All other ops, and the rules for NaN, rounding, casts and division by zero, are
those of CPUs, so that a model gets the same numbers on both.

bfloat16 is loaded and stored by its bits, as on CPUs; the rounding is the GPU's instruction.

What is rounded to 16 bits anyway takes a shorter way: `_gelu_of_halves`, `_silu_of_halves`. Beside a product on tensor
cores it is what takes the time.
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
from .launch import local


def emit(expression: Expression, values: Sequence[Expr], dtypes: Sequence[str], rounded: str = "") -> Expr:
    """An expression over scalars, within a function whose registers are "local"; see `expression_code.emit`.

    Parameters
    ----------
    rounded : str
        The type that the caller rounds the result to, if any.

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
    """The ops of GPUs for an element type; floating-point ones of float64, too."""
    if dtype in HALF_TYPES:
        return _HALF_OPS
    return _FLOAT_OPS if "float" in dtype else INT_OPS


def _ops_of_halves(dtype: str) -> Ops:
    return _HALF_OPS if dtype == "float32" else ops_for(dtype)


def _sigmoid(x: Expr) -> Expr:
    return vector_math.constant(x, 1.0) / _one_plus_exp_of_negative(x)


def _silu(x: Expr) -> Expr:
    # Of -inf NaN, as on CPUs: of a number far below zero, e^-x is infinite and the quotient -0.
    return x / _one_plus_exp_of_negative(x)


def _one_plus_exp_of_negative(x: Expr) -> Expr:
    return vector_math.constant(x, 1.0) + T.exp(x * vector_math.constant(x, -1.0))


def _silu_of_halves(x: Expr) -> Expr:
    return x * ptx.quick_sigmoid(x)


def _gelu(x: Expr) -> Expr:
    return _half_times_one_plus(x, T.erf(x * vector_math.constant(x, 0.70710678118654752)))


# Of the normal distribution's integral from 0 to x, an odd function: factors of x, x^3, x^5, ... They are the best ones
# for x times it, where the sum may exceed the integral's limit of 1/2 as soon as the integral has come within the same
# error of it; the last is positive, so that it stays above from there on.
_INTEGRAL = (
    0.39876481890678406, -0.06608258932828903, 0.009647008031606674, -0.0010562196839600801, 8.450021414319053e-05,
    -4.745080786960898e-06, 1.7522036444006517e-07, -3.788144464778043e-09, 3.611771992595436e-11,
)  # fmt: skip


def _gelu_of_halves(x: Expr) -> Expr:
    """gelu by a polynomial: 11 instructions where `_gelu` takes more than twice as many.

    The absolute error is at most 4.2e-5; relative to the result, 1.6e-4 near zero and 8e-5 for positive x: less than
    half of float16's rounding error. Only far below zero, where results are small, it is many of their last places.
    """
    square = vector_math.once(x * x)
    factor = vector_math.constant(x, _INTEGRAL[-1])
    for coefficient in reversed(_INTEGRAL[:-1]):
        factor = factor * square + vector_math.constant(x, coefficient)
    share = local(1, "float32")
    ptx.multiply_add_clipped(share[0], x, vector_math.once(factor), vector_math.constant(x, 0.5))
    return x * share[0]


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
    """`casts.bfloat16_bits` by the GPU's instruction; by integers where vectors are asked for."""
    x = call.args[0]
    if x.ty.dtype.lanes > 1:
        return lower_to_integers(call)
    return tirx.reinterpret("uint16", tirx.Cast("bfloat16", x))


tirx.op.register_intrin_lowering(BITS, "cuda", f=_bits_by_instruction)
