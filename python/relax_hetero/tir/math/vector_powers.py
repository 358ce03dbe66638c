"""Powers, logarithms to other bases and hyperbolic functions of float32 vectors; see `vector_math`.

They are within 4 units in the last place of float64 over all of float32. `power` computes the logarithm in float64,
whose rounding error the exponent multiplies.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from .vector_math import (
    absolute,
    bits,
    clamp,
    constant,
    dtype_of,
    exp_parts,
    from_bits,
    log,
    log_parts,
    of_positive,
    once,
    polynomial,
    rounded,
    scaled,
    with_sign,
)

# 2^r = 1 + r P(r) for |r| <= 1/2, relative error 2e-9.
_EXP2_P = (0.693147182, 0.240226477, 0.0555033237, 0.00961843692, 0.0013398875, 0.00015353362)
# 10^r = 1 + r P(r) for |r| <= log10(2)/2, relative error 2e-9.
_EXP10_P = (2.30258512, 2.65094876, 2.03464985, 1.17129266, 0.542025149, 0.206321672)
# sinh(x) = x + x^3 P(x^2) for |x| < 1, relative error 5.6e-11.
_SINH_P = (0.166666672, 0.00833335053, 0.000198360663, 2.81743951e-06)
# log2(m) = 2 s / log(2) + s^3 P(s^2) with s = (m - 1) / (m + 1), sqrt(1/2) <= m < sqrt(2), relative error 9e-14.
_LOG2_P = (0.9617966940577407, 0.5770779532020172, 0.412208400389526, 0.31993485471238803, 0.28253821274375124)

_LOG2_E, _LOG10_E, _LN2 = 1.44269504088896341, 0.43429448190325183, 0.69314718055994531
_LOG2_10 = 3.32192809488736235
# log10(2) in two parts: the first has 7 significant bits, so that its product with an exponent is exact.
_LOG10_2_HI, _LOG10_2_LO = 0.30078125, 0.0002487456639811952
_MAX = 3.4028234663852886e38
_ROUNDER64 = 6755399441055744.0
"""1.5 * 2^52: adding it leaves a float64 rounded to an integer, in two's complement in the low bits."""
_SQRT_HALF_HIGH = 0x3FE6A09E  # the high half of sqrt(1/2) in float64


def exp2(x: tirx.Expr) -> tirx.Expr:
    """2^x."""
    x = clamp(x, -151.0, 129.0)
    exponent, n = rounded(x)
    r = once(x - n)
    mantissa, scale = scaled(polynomial(r, _EXP2_P) * r + constant(x, 1.0), exponent)
    return once(mantissa * scale)


def exp10(x: tirx.Expr) -> tirx.Expr:
    """10^x."""
    x = clamp(x, -46.0, 39.0)
    exponent, n = rounded(x * constant(x, _LOG2_10))
    r = once(x - n * constant(x, _LOG10_2_HI) - n * constant(x, _LOG10_2_LO))
    mantissa, scale = scaled(polynomial(r, _EXP10_P) * r + constant(x, 1.0), exponent)
    return once(mantissa * scale)


def log2(x: tirx.Expr) -> tirx.Expr:
    """The logarithm to base 2; exact of powers of two."""
    x = once(x)
    exponent, f, rest = log_parts(x)
    return of_positive(x, (f + rest) * constant(x, _LOG2_E) + exponent)


def log10(x: tirx.Expr) -> tirx.Expr:
    """The logarithm to base 10."""
    x = once(x)
    exponent, f, rest = log_parts(x)
    low = (f + rest) * constant(x, _LOG10_E) + exponent * constant(x, _LOG10_2_LO)
    return of_positive(x, low + exponent * constant(x, _LOG10_2_HI))


def log1p(x: tirx.Expr) -> tirx.Expr:
    """log(1 + x): -inf of -1, NaN below."""
    x = once(x)
    one = constant(x, 1.0)
    u = once(x + one)
    # The logarithm's share of the rounding error of u.
    correction = (x - once(u - one)) / u
    log_u = once(log(u))
    result = T.Select(tirx.And(u > constant(x, 0.0), u <= constant(x, _MAX)), log_u + correction, log_u)
    return once(T.Select(tirx.EQ(u, one), x, result))


def sinh(x: tirx.Expr) -> tirx.Expr:
    """The hyperbolic sine."""
    x = once(x)
    magnitude, square = once(absolute(x)), once(x * x)
    half = _half_exp(magnitude)
    small = magnitude * (square * polynomial(square, _SINH_P)) + magnitude
    large = half - constant(x, 0.25) / half
    return once(with_sign(T.Select(magnitude < constant(x, 1.0), small, large), x))


def cosh(x: tirx.Expr) -> tirx.Expr:
    """The hyperbolic cosine."""
    half = _half_exp(once(absolute(once(x))))
    return once(half + constant(half, 0.25) / half)


def asinh(x: tirx.Expr) -> tirx.Expr:
    """The inverse of sinh."""
    x = once(x)
    magnitude = once(absolute(x))
    square = once(magnitude * magnitude)
    near = square / (constant(x, 1.0) + T.sqrt(square + constant(x, 1.0))) + magnitude
    return once(with_sign(_log1p_or_twice(magnitude, near), x))


def acosh(x: tirx.Expr) -> tirx.Expr:
    """The inverse of cosh: NaN below 1."""
    x = once(x)
    above = once(x - constant(x, 1.0))
    result = _log1p_or_twice(x, above + T.sqrt(above * (above + constant(x, 2.0))))
    return once(T.Select(x < constant(x, 1.0), _nan(x), result))


def atanh(x: tirx.Expr) -> tirx.Expr:
    """The inverse of tanh: infinite of 1 and -1, NaN beyond."""
    x = once(x)
    magnitude = once(absolute(x))
    result = log1p((magnitude + magnitude) / (constant(x, 1.0) - magnitude)) * constant(x, 0.5)
    return once(with_sign(T.Select(magnitude > constant(x, 1.0), _nan(x), result), x))


def square(x: tirx.Expr) -> tirx.Expr:
    """x^2."""
    x = once(x)
    return x * x


def cube(x: tirx.Expr) -> tirx.Expr:
    """x^3."""
    x = once(x)
    return x * x * x


def power(x: tirx.Expr, y: tirx.Expr) -> tirx.Expr:
    """x^y like C's pow: 1 where x is 1 or y is 0, NaN for negative x where y is not an integer."""
    x, y = once(x), once(y)
    one, zero = constant(x, 1.0), constant(x, 0.0)
    magnitude, exponent = once(absolute(x)), once(absolute(y))
    integer = once(T.cast(clamp(T.Select(tirx.EQ(y, y), y, zero), -16777216.0, 16777216.0), _single_int(x)))
    is_small_integer = tirx.EQ(T.cast(integer, dtype_of(x)), y)
    odd = T.Select(is_small_integer, T.shift_left(integer, constant(integer, 31)), constant(integer, 0))
    wide = dtype_of(x).replace("float32", "float64")
    product = T.cast(y, wide) * _wide_log2(magnitude)
    # One to the power of infinity is one.
    product = T.Select(tirx.And(tirx.EQ(magnitude, one), exponent > constant(x, _MAX)), tirx.const(0.0, wide), product)
    mantissa, scale = _wide_exp2(product)
    signed = from_bits(T.bitwise_xor(bits(mantissa * scale), T.bitwise_and(bits(x), odd)))
    undefined = tirx.And(tirx.And(x < zero, x >= constant(x, -_MAX)), exponent < constant(x, 16777216.0))
    result = T.Select(tirx.And(undefined, tirx.Not(is_small_integer)), _nan(x), signed)
    return once(T.Select(tirx.Or(tirx.EQ(x, one), tirx.EQ(y, zero)), one, result))


def _wide_log2(x: tirx.Expr) -> tirx.Expr:
    """The logarithm to base 2 in float64 of a nonnegative float32; for 0 and infinity, -1e300 and 1e300."""
    wide = dtype_of(x).replace("float32", "float64")
    value = once(T.cast(x, wide))
    raw = once(T.reinterpret(wide.replace("float", "int"), value))
    high = T.cast(T.shift_right(raw, constant(raw, 32)), _single_int(x))
    exponent = once(T.shift_right(high - constant(high, _SQRT_HALF_HIGH), constant(high, 20)))
    shift = T.shift_left(T.cast(exponent, dtype_of(raw)), constant(raw, 52))
    m = once(T.reinterpret(wide, raw - shift))
    s = once((m - constant(m, 1.0)) / (m + constant(m, 1.0)))
    u = once(s * s)
    result = s * (polynomial(u, _LOG2_P) * u + constant(m, 2 * _LOG2_E)) + T.cast(exponent, wide)
    result = T.Select(value > constant(value, _MAX), constant(value, 1e300), result)
    result = T.Select(value > constant(value, 0.0), result, constant(value, -1e300))
    return once(T.Select(tirx.EQ(value, value), result, value))


def _wide_exp2(x: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr]:
    """2^x of float64 as a product of two float32."""
    x = clamp(x, -151.0, 129.0)
    wide = dtype_of(x)
    raw = T.reinterpret(wide.replace("float", "int"), x + constant(x, _ROUNDER64))
    exponent = once(T.cast(raw, wide.replace("float64", "int32")))
    r = once(T.cast(x - T.cast(exponent, wide), wide.replace("float64", "float32")))
    return scaled(polynomial(r, _EXP2_P) * r + constant(r, 1.0), exponent)


def _half_exp(x: tirx.Expr) -> tirx.Expr:
    """e^x / 2 for x >= 0, which overflows later than e^x."""
    mantissa, scale = exp_parts(x, 0.0, 91.0)
    return once(mantissa * (scale * constant(x, 0.5)))


def _log1p_or_twice(x: tirx.Expr, near: tirx.Expr) -> tirx.Expr:
    """log(1 + near), or log(2 x) where x is so large that its square might overflow."""
    large = x >= constant(x, 268435456.0)
    return log1p(T.Select(large, x, near)) + T.Select(large, constant(x, _LN2), constant(x, 0.0))


def _nan(x: tirx.Expr) -> tirx.Expr:
    raw = bits(x)
    return from_bits(T.bitwise_or(raw, constant(raw, 0x7FC00000)))


def _single_int(x: tirx.Expr) -> str:
    return dtype_of(x).replace("float", "int")
