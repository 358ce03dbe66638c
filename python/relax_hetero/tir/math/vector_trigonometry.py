"""Trigonometric functions of float32 vectors; see `vector_math`.

Arguments up to 2^20 are reduced in float64, with pi/2 in two parts; the first has 33 bits, so that its multiples are
exact. Vectors with a larger argument use the C library.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from .vector_math import absolute, bits, constant, dtype_of, from_bits, once, polynomial, rarely, with_sign

# sin(r) = r + r^3 P(r^2), cos(r) = 1 - r^2/2 + r^4 Q(r^2) for |r| <= pi/4, relative errors 3.6e-9 and 9.5e-11.
_SIN_P = (-0.166666552, 0.008332178, -0.000195172994)
_COS_Q = (0.0416666456, -0.00138873677, 2.44384519e-05)
# atan(t) = t + t^3 P(t^2) for |t| <= tan(pi/8), relative error 6.6e-10.
_ATAN_P = (-0.333333164, 0.199984893, -0.142438486, 0.105960011, -0.0608345307)
# asin(t) = t + t^3 P(t^2) for |t| <= 1/2, relative error 2.8e-10.
_ASIN_P = (0.166666597, 0.0750051066, 0.0445157215, 0.031817615, 0.0144025981, 0.0375652127)

_PI, _HALF_PI, _QUARTER_PI = 3.14159265358979324, 1.57079632679489662, 0.78539816339744831
_TWO_OVER_PI = 0.63661977236758134
_HALF_PI_HI, _HALF_PI_LO = 1.5707963267341256, 6.0771005065061922e-11
_TAN_EIGHTH_PI, _TAN_THREE_EIGHTHS_PI = 0.41421356237309505, 2.41421356237309505
_ROUNDER = 6755399441055744.0  # as in `vector_powers`
_MAX_REDUCED = 1048576.0


def sin(x: tirx.Expr) -> tirx.Expr:
    """The sine."""
    x = once(x)
    return _odd(x, _reduce(x, _sine, T.sin))


def cos(x: tirx.Expr) -> tirx.Expr:
    """The cosine."""
    return _reduce(once(x), lambda quadrant, r: _sine(once(quadrant + constant(quadrant, 1)), r), T.cos)


def tan(x: tirx.Expr) -> tirx.Expr:
    """The tangent."""

    def tangent(quadrant: tirx.Expr, r: tirx.Expr) -> tirx.Expr:
        sine, cosine, odd = _sin_polynomial(r), _cos_polynomial(r), _is_odd(quadrant)
        return T.Select(odd, constant(r, 0.0) - cosine, sine) / T.Select(odd, sine, cosine)

    x = once(x)
    return _odd(x, _reduce(x, tangent, T.tan))


def atan(x: tirx.Expr) -> tirx.Expr:
    """The arc tangent."""
    x = once(x)
    a, one = once(absolute(x)), constant(x, 1.0)
    far, middle = a > constant(x, _TAN_THREE_EIGHTHS_PI), a > constant(x, _TAN_EIGHTH_PI)
    numerator = T.Select(far, constant(x, -1.0), T.Select(middle, a - one, a))
    denominator = T.Select(far, a, T.Select(middle, a + one, one))
    base = T.Select(far, constant(x, _HALF_PI), T.Select(middle, constant(x, _QUARTER_PI), constant(x, 0.0)))
    t = once(numerator / denominator)
    square = once(t * t)
    return once(with_sign(t * (square * polynomial(square, _ATAN_P)) + t + base, x))


def asin(x: tirx.Expr) -> tirx.Expr:
    """The arc sine: NaN beyond 1 and -1."""
    x = once(x)
    near_one, p = _asin_parts(x)
    return once(with_sign(T.Select(near_one, constant(x, _HALF_PI) - (p + p), p), x))


def acos(x: tirx.Expr) -> tirx.Expr:
    """The arc cosine: NaN beyond 1 and -1."""
    x = once(x)
    near_one, p = _asin_parts(x)
    negative = x < constant(x, 0.0)
    twice = once(p + p)
    near = T.Select(negative, constant(x, _PI) - twice, twice)
    half = constant(x, _HALF_PI)
    return once(T.Select(near_one, near, T.Select(negative, half + p, half - p)))


def _asin_parts(x: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr]:
    """Return whether |x| > 1/2, and asin(sqrt((1 - |x|) / 2)) if so, else asin(|x|)."""
    a = once(absolute(x))
    near_one = a > constant(x, 0.5)
    z = once(T.Select(near_one, (constant(x, 1.0) - a) * constant(x, 0.5), a * a))
    s = once(T.Select(near_one, T.sqrt(z), a))
    return near_one, once(s * (z * polynomial(z, _ASIN_P)) + s)


def _reduce(
    x: tirx.Expr, of_quadrant: Callable[[tirx.Expr, tirx.Expr], tirx.Expr], library: Callable[[tirx.Expr], tirx.Expr]
) -> tirx.Expr:
    wide = dtype_of(x).replace("float32", "float64")
    value = once(T.cast(x, wide))
    raw = T.reinterpret(wide.replace("float", "int"), value * constant(value, _TWO_OVER_PI) + constant(value, _ROUNDER))
    quadrant = once(T.cast(raw, dtype_of(x).replace("float", "int")))
    n = once(T.cast(quadrant, wide))
    r = value - n * constant(value, _HALF_PI_HI) - n * constant(value, _HALF_PI_LO)
    result = once(of_quadrant(quadrant, once(T.cast(r, dtype_of(x)))))
    return once(rarely(once(absolute(x)) > constant(x, _MAX_REDUCED), library(x), result))


def _odd(x: tirx.Expr, value: tirx.Expr) -> tirx.Expr:
    """`value` of an odd function, whose zeros have the sign of `x`."""
    return once(T.Select(tirx.EQ(x, constant(x, 0.0)), x, value))


def _sine(quadrant: tirx.Expr, r: tirx.Expr) -> tirx.Expr:
    """sin(quadrant * pi/2 + r)."""
    value = T.Select(_is_odd(quadrant), _cos_polynomial(r), _sin_polynomial(r))
    sign = T.shift_left(T.bitwise_and(quadrant, constant(quadrant, 2)), constant(quadrant, 30))
    return from_bits(T.bitwise_xor(bits(value), sign))


def _is_odd(quadrant: tirx.Expr) -> tirx.Expr:
    return tirx.NE(T.bitwise_and(quadrant, constant(quadrant, 1)), constant(quadrant, 0))


def _sin_polynomial(r: tirx.Expr) -> tirx.Expr:
    square = once(r * r)
    return once(r * (square * polynomial(square, _SIN_P)) + r)


def _cos_polynomial(r: tirx.Expr) -> tirx.Expr:
    square = once(r * r)
    return once(square * square * polynomial(square, _COS_Q) - square * constant(r, 0.5) + constant(r, 1.0))
