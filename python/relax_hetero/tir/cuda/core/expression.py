"""Elementwise expressions as code of one thread: `tir.elementwise.expression_code` with CUDA's own functions.

CUDA's ``expf``, ``erff`` and ``tanhf`` are within 2 units in the last place and take fewer instructions than the
polynomials that CPUs need for vectors. All other ops, and the rules for NaN, rounding, casts and division by zero, are
those of CPUs, so that a model gets the same numbers on both.

bfloat16 is loaded and stored by its bits, as on CPUs; the rounding is the GPU's instruction.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.expression import Expression
from ...core.builder import Expr
from ...elementwise import expression_code
from ...elementwise.expression_code import Ops
from ...elementwise.expression_ops import FLOAT_OPS, INT_OPS
from ...math import vector_math
from ...math.casts import BITS, by_integers


def emit(expression: Expression, values: Sequence[Expr], dtypes: Sequence[str]) -> Expr:
    """An expression over scalars, within a function whose registers are "local"; see `expression_code.emit`.

    Returns
    -------
    PrimExpr
        A scalar of `expression.dtype(dtypes)`.

    Raises
    ------
    EncodingError
        If two operands of an op differ in type, or an op does not exist for a type.
    """
    return expression_code.emit(expression, values, dtypes, 1, ops_for)


def ops_for(dtype: str) -> Ops:
    """The ops of GPUs for an element type; floating-point ones of float64, too."""
    return _FLOAT_OPS if "float" in dtype else INT_OPS


def _sigmoid(x: Expr) -> Expr:
    return vector_math.constant(x, 1.0) / _one_plus_exp_of_negative(x)


def _silu(x: Expr) -> Expr:
    # Of -inf NaN, as on CPUs: of a number far below zero, e^-x is infinite and the quotient -0.
    return x / _one_plus_exp_of_negative(x)


def _one_plus_exp_of_negative(x: Expr) -> Expr:
    return vector_math.constant(x, 1.0) + T.exp(x * vector_math.constant(x, -1.0))


def _gelu(x: Expr) -> Expr:
    return _half_times_one_plus(x, T.erf(x * vector_math.constant(x, 0.70710678118654752)))


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


def _bits_by_instruction(call: tvm.ir.Call) -> tirx.Expr:
    """`casts.bfloat16_bits` by the GPU's instruction; by integers where vectors are asked for."""
    x = call.args[0]
    if x.ty.dtype.lanes > 1:
        return by_integers(call)
    return tirx.reinterpret("uint16", tirx.Cast("bfloat16", x))


tirx.op.register_intrin_lowering(BITS, "cuda", f=_bits_by_instruction)
