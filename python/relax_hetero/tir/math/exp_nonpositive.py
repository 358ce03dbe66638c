"""The exponential where its argument is known not to be positive, as in a softmax: two thirds of the instructions.

Results below 2^-125 are zero: those of -inf, and those that vanish in a sum beside the 1 that the greatest gives.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from .vector_math import EXP_P, LN2_HI, LN2_LO, LOG2_E, ROUNDER, bits, constant, from_bits, once, polynomial

_LEAST = -87.0
"""Between this and 0 the power of two is a normal number."""


def exp_nonpositive(x: tirx.Expr) -> tirx.Expr:
    """e^x of a float32 expression that is not above zero, within 2 units in the last place; NaN stays."""
    x = once(x)
    shifted = once(x * constant(x, LOG2_E) + constant(x, ROUNDER))
    n = once(shifted - constant(x, ROUNDER))
    r = once(x - n * constant(x, LN2_HI) - n * constant(x, LN2_LO))
    mantissa = once(polynomial(r, EXP_P) * (r * r) + r + constant(x, 1.0))
    raw = once(bits(shifted))  # n in two's complement in the low bits
    scale = once(from_bits(T.shift_left(raw, constant(raw, 23)) + constant(raw, 0x3F800000)))
    return once(T.Select(x < constant(x, _LEAST), constant(x, 0.0), mantissa * scale))
