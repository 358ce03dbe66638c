"""Functions of float32 vectors as arithmetic, because ``T.exp`` of a vector becomes one libm call per lane.

Every function takes and returns a float32 expression of any number of lanes, and is called inside of a PrimFunc's body
(it binds intermediates). Only arithmetic, comparison and reinterpretation are used, so the same formulas serve the LLVM
and ``c`` targets; the one exception, sqrt, is an instruction on both.

Against float64 the results are within 4 units in the last place over all of float32, with infinities, NaN, denormals
and signed zeros as IEEE 754 has them; gelu, see its coefficients, is within 4 units of its argument's last place.

The coefficients are minimax fits (iteratively reweighted least squares in float64), with the error of the fit itself.

Infinity and NaN are made from the operand's bits: TVM's C code generator cannot write such constants.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from contextvars import ContextVar
from itertools import zip_longest

import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..core.builder import stored

# tanh(x) = x + x^3 P(x^2) for |x| < 0.625, relative error 4.5e-9.
_TANH_SMALL = (-0.333332802, 0.133313837, -0.0537340027, 0.0206181305, -0.00567931253)

# erf(x) = x + x P(x^2) for |x| < 0.92, relative error 1.7e-8, and 1 - exp(-P(x)) for 0.92 <= x <= 3.93, error 1.5e-9.
_ERF_SMALL = (0.12837915, -0.376124943, 0.112818028, -0.0267655669, 0.00499098016, -0.000597689362)
_ERF_LARGE = (
    0.000191925366, 1.12768963, 0.637161137, 0.103948022, -0.0222338696, 0.00304473191, -0.000196069951,
)  # fmt: skip
_ERF_LIMIT = 3.93  # beyond, erf is 1 in float32

# Ratios of polynomials for gelu, whose positive coefficients avoid cancellation. gelu is within 4 units in the last
# place *of x*: far below zero it is almost zero, with a larger relative error.
# tanh(x) = x P(x^2) / Q(x^2) for |x| <= 9.02, relative error 2.1e-8; beyond, tanh is 1 in float32.
_TANH_RATIONAL_LIMIT = 9.02
_TANH_P = (1.0, 0.133797199, 0.00349403615, 2.0583504e-05, 1.33190987e-08)
_TANH_Q = (1.0, 0.467130363, 0.0258710813, 0.000328309485, 7.76203592e-07)

# erf(x) = x P(x^2) / Q(x^2) for |x| <= 3.925, relative error 1.9e-8; beyond, erf is 1 in float32.
_ERF_RATIONAL_LIMIT = 3.925
_ERF_P = (1.12837911, 0.190595433, 0.0527695194, 0.00377262034, 0.000284844718, 2.0460102e-06)
_ERF_Q = (1.0, 0.502243519, 0.114183411, 0.0149833411, 0.00116387394, 3.80476558e-05)

# exp(r) = 1 + r + r^2 P(r) for |r| <= log(2)/2, relative error 3.3e-9.
EXP_P = (0.49999994, 0.166665152, 0.041668456, 0.00836941879, 0.00138131483)

# log(1 + f) = f - f^2/2 + f^3 P(f) for sqrt(1/2) <= 1 + f < sqrt(2), relative error 7.6e-10.
_LOG_P = (
    0.333333135, -0.250000089, 0.200021341, -0.166680068, 0.1421922, -0.124051243, 0.118903495, -0.11679738,
    0.0674664378,
)  # fmt: skip

_MIN_EXPONENT_ARGUMENT = -87.0  # minimum argument of `exp_nonpositive` for which the power of two is a normal number

LOG2_E = 1.44269504088896341
# log(2) in two parts: the first has 9 significant bits, so that its product with an exponent is exact.
LN2_HI, LN2_LO = 0.693359375, -2.12194440e-4
ROUNDER, ROUNDER_BITS = 12582912.0, 0x4B400000
"""1.5 * 2^23: adding it leaves a float32 rounded to an integer, in two's complement in the low bits."""
_MAX = 3.4028234663852886e38
_MIN_NORMAL = 1.1754943508222875e-38
_SQRT_HALF_BITS = 0x3F3504F3


# Variables that `once` has bound in the expression that is being written, outermost first; None among statements.
_let_bindings: ContextVar[list[tuple[tirx.Var, tirx.Expr]] | None] = ContextVar("_let_bindings", default=None)


def as_expression(function: Callable[..., tirx.Expr], *operands: tirx.Expr) -> tirx.Expr:
    """Value of a function of this module as one expression, where statements cannot be written.

    Values used more than once are bound by ``Let``; TVM's simplifier would substitute them, so it must not see it.
    """
    bindings: list[tuple[tirx.Var, tirx.Expr]] = []
    token = _let_bindings.set(bindings)
    try:
        result = function(*operands)
    finally:
        _let_bindings.reset(token)
    for var, value in reversed(bindings):
        result = tirx.Let(var, value, result)
    return result


def once(value: tirx.Expr) -> tirx.Expr:
    """A value that is computed once, however often it is used.

    It is stored in memory that LLVM makes a register. TVM's simplifier substitutes bound variables wherever they are
    used, so that code with a chain of selections doubles at each of them: an epilogue with gelu took half a minute to
    compile. It does not look into memory.
    """
    bindings = _let_bindings.get()
    if bindings is not None:
        var = tirx.Var(f"v{len(bindings)}", value.ty)
        bindings.append((var, value))
        return var
    return stored(value)


def rarely(condition: tirx.Expr, value: tirx.Expr, otherwise: tirx.Expr) -> tirx.Expr:
    """A selection per lane; inside `as_expression`, `value` is computed only if the condition holds for some lane."""
    if _let_bindings.get() is None:
        return T.Select(condition, value, otherwise)
    return tvm.ir.Call("prim.if_then_else", [condition, value, otherwise], ret_ty=otherwise.ty)


def dtype_of(x: tirx.Expr) -> str:
    """The type of a TIR expression as text, lanes included: ``"float32x16"``."""
    return str(x.ty.dtype)


def constant(x: tirx.Expr, value: float) -> tirx.Expr:
    """`value` in the type of `x`, lanes included."""
    dtype = dtype_of(x)
    if dtype == "float32" and not (math.isfinite(value) and float(f"{value:e}") == _round_to_float32(value)):
        return _from_literal_bits(value)
    return tirx.const(value, dtype)


def _from_literal_bits(value: float) -> tirx.Expr:
    """A float32 number by its bits: TVM's C code generator prints only 7 digits of a float.

    The bits are the xor of two numbers, which is not folded: a literal lacks an address to reinterpret.
    """
    (raw,) = struct.unpack("i", struct.pack("f", value))
    halves = tirx.IntImm("int32", raw & ~0xFFFF), tirx.IntImm("int32", raw & 0xFFFF)
    return tirx.call_intrin("float32", "tirx.reinterpret", T.BitwiseXor(*halves))


def _round_to_float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def bits(x: tirx.Expr) -> tirx.Expr:
    """The bits of a float32 expression as int32."""
    return T.reinterpret(_int32(x), x)


def from_bits(x: tirx.Expr) -> tirx.Expr:
    """The float32 expression that has the bits of an int32 one."""
    return T.reinterpret(dtype_of(x).replace("int32", "float32"), x)


def absolute(x: tirx.Expr) -> tirx.Expr:
    """|x|."""
    raw = bits(x)
    return from_bits(T.bitwise_and(raw, constant(raw, 0x7FFFFFFF)))


def clamp(x: tirx.Expr, low: float, high: float) -> tirx.Expr:
    """`x` between two numbers; NaN stays."""
    x = at_least(x, low)
    return at_most(x, high)


def at_least(x: tirx.Expr, low: float) -> tirx.Expr:
    """The maximum of `x` and a number; NaN stays."""
    x = once(x)
    return once(T.Select(x < constant(x, low), constant(x, low), x))


def at_most(x: tirx.Expr, high: float) -> tirx.Expr:
    """The minimum of `x` and a number; NaN stays."""
    x = once(x)
    return once(T.Select(x > constant(x, high), constant(x, high), x))


def polynomial(x: tirx.Expr, coefficients: tuple[float, ...]) -> tirx.Expr:
    """Horner's rule; coefficients of the lowest power first."""
    result = constant(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = result * x + constant(x, coefficient)
    return result


def exp(x: tirx.Expr) -> tirx.Expr:
    """e^x, denormal results included."""
    mantissa, scale = exp_parts(x, -104.0, 89.0)
    return once(mantissa * scale)


def exp_nonpositive(x: tirx.Expr) -> tirx.Expr:
    """e^x of a float32 expression that is not above zero, within 2 units in the last place; NaN stays.

    It takes two thirds of the instructions of `exp`. Results below 2^-125 are zero; in the sum of a softmax they vanish
    next to the 1 of the maximum.
    """
    x = once(x)
    shifted = once(x * constant(x, LOG2_E) + constant(x, ROUNDER))
    n = once(shifted - constant(x, ROUNDER))
    r = once(x - n * constant(x, LN2_HI) - n * constant(x, LN2_LO))
    mantissa = once(polynomial(r, EXP_P) * (r * r) + r + constant(x, 1.0))
    raw = once(bits(shifted))  # n in two's complement in the low bits
    scale = once(from_bits(T.shift_left(raw, constant(raw, 23)) + constant(raw, 0x3F800000)))
    return once(T.Select(x < constant(x, _MIN_EXPONENT_ARGUMENT), constant(x, 0.0), mantissa * scale))


def log(x: tirx.Expr) -> tirx.Expr:
    """The natural logarithm: -inf of zeros, NaN of negative numbers."""
    x = once(x)
    exponent, f, rest = log_parts(x)
    rest = once(rest + exponent * constant(x, LN2_LO))
    return of_positive(x, rest + f + exponent * constant(x, LN2_HI))


def log_parts(x: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr, tirx.Expr]:
    """n, f and r of ``log(x) = n log(2) + f + r``, for positive finite x; n and f are exact, and r is less than f/5."""
    tiny = x < constant(x, _MIN_NORMAL)
    raw = once(bits(T.Select(tiny, x * constant(x, 8388608.0), x)))
    # The exponent that leaves a mantissa between sqrt(1/2) and sqrt(2).
    offset = once(raw - constant(raw, _SQRT_HALF_BITS))
    exponent = T.cast(T.shift_right(offset, constant(raw, 23)), dtype_of(x)) - T.Select(
        tiny, constant(x, 23.0), constant(x, 0.0)
    )
    mantissa = T.bitwise_and(offset, constant(raw, 0x007FFFFF)) + constant(raw, _SQRT_HALF_BITS)
    f = once(from_bits(mantissa) - constant(x, 1.0))
    square = once(f * f)
    return once(exponent), f, once(square * f * polynomial(f, _LOG_P) - square * constant(x, 0.5))


def of_positive(x: tirx.Expr, logarithm: tirx.Expr) -> tirx.Expr:
    """`logarithm` of finite positive `x`, -inf of zeros, NaN of negative numbers and NaN, inf of inf."""
    own = once(bits(x))
    not_positive = from_bits(
        T.bitwise_or(own, T.Select(x < constant(x, 0.0), constant(own, 0x7FC00000), constant(own, -0x00800000)))
    )
    # Infinity and NaN are their own logarithms.
    finite = T.Select(x <= constant(x, _MAX), logarithm, x)
    return once(T.Select(x <= constant(x, 0.0), not_positive, finite))


def tanh(x: tirx.Expr) -> tirx.Expr:
    """The hyperbolic tangent."""
    x = once(x)
    magnitude, square = once(absolute(x)), once(x * x)
    small = x * (square * polynomial(square, _TANH_SMALL)) + x
    mantissa, scale = exp_parts(magnitude + magnitude, 0.0, 20.0)
    one = constant(x, 1.0)
    large = one - constant(x, 2.0) / (mantissa * scale + one)
    return once(with_sign(T.Select(magnitude < constant(x, 0.625), small, large), x))


def quick_tanh(x: tirx.Expr) -> tirx.Expr:
    """The hyperbolic tangent within 2^-22, in two thirds of the instructions of `tanh`."""
    return once(_odd_ratio(clamp(x, -_TANH_RATIONAL_LIMIT, _TANH_RATIONAL_LIMIT), _TANH_P, _TANH_Q))


def quick_sigmoid(x: tirx.Expr) -> tirx.Expr:
    """1 / (1 + e^-x) within 2^-22; far below zero the relative error is large, unlike that of `sigmoid`."""
    half = constant(x, 0.5)
    return once(quick_tanh(x * half) * half + half)


def erf(x: tirx.Expr) -> tirx.Expr:
    """The error function."""
    x = once(x)
    magnitude, square = at_most(absolute(x), _ERF_LIMIT), once(x * x)
    small = x * polynomial(square, _ERF_SMALL) + x
    mantissa, scale = exp_parts(constant(x, 0.0) - polynomial(magnitude, _ERF_LARGE), -20.0, 0.0)
    large = constant(x, 1.0) - mantissa * scale
    return once(with_sign(T.Select(magnitude < constant(x, 0.92), small, large), x))


def sigmoid(x: tirx.Expr) -> tirx.Expr:
    """1 / (1 + e^-x)."""
    return _times_sigmoid(x, None)


def silu(x: tirx.Expr) -> tirx.Expr:
    """x / (1 + e^-x)."""
    x = once(x)
    return _times_sigmoid(x, x)


def rsqrt(x: tirx.Expr) -> tirx.Expr:
    """1 / sqrt(x)."""
    return once(constant(x, 1.0) / T.sqrt(x))


def _int32(x: tirx.Expr) -> str:
    return dtype_of(x).replace("float32", "int32")


def with_sign(magnitude: tirx.Expr, x: tirx.Expr) -> tirx.Expr:
    """`magnitude`, which is not negative, with the sign of `x`."""
    own = bits(x)
    return from_bits(T.bitwise_or(bits(magnitude), T.bitwise_and(own, constant(own, -0x80000000))))


def _times_sigmoid(x: tirx.Expr, factor: tirx.Expr | None) -> tirx.Expr:
    """factor / (1 + e^-x), by e^-|x|, which cannot overflow; the default factor is 1."""
    x = once(x)
    # Below -112 the result is 0 in float32.
    mantissa, scale = exp_parts(constant(x, 0.0) - absolute(x), -112.0, 0.0)
    one = constant(x, 1.0)
    denominator = one + mantissa * scale
    negative = x < constant(x, 0.0)
    # The scale comes last: the mantissa times the factor is a normal number even if the result is denormal.
    numerator = T.Select(negative, mantissa, one)
    if factor is not None:
        numerator = numerator * factor
        scale = T.Select(x < constant(x, -112.0), constant(x, 0.0), scale)
    return once(numerator / denominator * T.Select(negative, scale, one))


def exp_parts(x: tirx.Expr, low: float, high: float) -> tuple[tirx.Expr, tirx.Expr]:
    """e^x as a product of two normal numbers; x is clamped to `low`, at least -125, and `high`."""
    x = clamp(x, low, high)
    exponent, n = rounded(x * constant(x, LOG2_E))
    r = once(x - n * constant(x, LN2_HI) - n * constant(x, LN2_LO))
    return scaled(polynomial(r, EXP_P) * (r * r) + r + constant(x, 1.0), exponent)


def rounded(x: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr]:
    """The integer next to a float32 of magnitude below 2^22, as int32 and as float32."""
    raw = once(bits(x + constant(x, ROUNDER)))
    exponent = once(raw - constant(raw, ROUNDER_BITS))
    return exponent, once(T.cast(exponent, dtype_of(x)))  # the sum minus ROUNDER would be simplified to x


def scaled(mantissa: tirx.Expr, exponent: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr]:
    """Two finite numbers whose product is ``mantissa * 2^exponent``, up to 2^250."""
    half = once(T.shift_right(exponent, constant(exponent, 1)))
    return once(mantissa * power_of_two(half)), once(power_of_two(exponent - half))


def power_of_two(exponent: tirx.Expr) -> tirx.Expr:
    """2^exponent of int32 between -126 and 127."""
    return from_bits(T.shift_left(exponent + constant(exponent, 127), constant(exponent, 23)))


def gelu(x: tirx.Expr) -> tirx.Expr:
    """x (1 + erf(x / sqrt(2))) / 2."""
    x = once(x)
    half = once(x * constant(x, 0.5))
    return once(half * _odd_rational(x * constant(x, 0.70710678118654752), _ERF_RATIONAL_LIMIT, _ERF_P, _ERF_Q) + half)


def gelu_tanh(x: tirx.Expr) -> tirx.Expr:
    """x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2."""
    x = once(x)
    half = once(x * constant(x, 0.5))
    inner = x * (constant(x, 0.79788456080286536) + x * x * constant(x, 0.79788456080286536 * 0.044715))
    return once(half * _odd_rational(inner, _TANH_RATIONAL_LIMIT, _TANH_P, _TANH_Q) + half)


def _odd_rational(x: tirx.Expr, limit: float, p: tuple[float, ...], q: tuple[float, ...]) -> tirx.Expr:
    """x P(x^2) / Q(x^2), and exactly 1 or -1 from the limit on, so that gelu far below zero is zero."""
    x = clamp(x, -limit, limit)
    ratio = _odd_ratio(x, p, q)
    one, edge = constant(x, 1.0), constant(x, limit)
    below = T.Select(x <= constant(x, -limit), constant(x, -1.0), ratio)
    return once(T.Select(x >= edge, one, below))


def _odd_ratio(x: tirx.Expr, p: tuple[float, ...], q: tuple[float, ...]) -> tirx.Expr:
    """x P(x^2) / Q(x^2)."""
    square = once(x * x)
    fourth = once(square * square)
    return x * _paired_polynomial(square, fourth, p) / _paired_polynomial(square, fourth, q)


def _paired_polynomial(x: tirx.Expr, square: tirx.Expr, coefficients: tuple[float, ...]) -> tirx.Expr:
    """A polynomial as one in x^2 with coefficients linear in x, which halves the chain of roundings."""
    pairs = [
        constant(x, low) if high is None else constant(x, high) * x + constant(x, low)
        for low, high in zip_longest(coefficients[::2], coefficients[1::2])
    ]
    result = pairs[-1]
    for pair in reversed(pairs[:-1]):
        result = result * square + pair
    return result
