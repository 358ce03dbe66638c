"""Floats of 8 and 4 bits by arithmetic on their bits: their numbers in float32, and the codes of such numbers.

TVM stores these types and computes wrong with them on CPUs, so their bytes are taken apart here.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx


@dataclass(frozen=True)
class Float8:
    """A format with a sign bit.

    Attributes
    ----------
    mantissa, bias : int
        Bits of the mantissa, and the number by which exponents are shifted.
    largest : int
        The code of the largest finite number.
    beyond : int
        The code of numbers that are larger, where a cast does not saturate.
    nan : int
        The code that NaN becomes; larger codes than `largest` are NaN or infinity.
    sign : int
        The sign bit.
    """

    mantissa: int
    bias: int
    largest: int
    beyond: int
    nan: int
    sign: int = 0x80


FLOAT8 = {
    "float8_e4m3fn": Float8(3, 7, 0x7E, 0x7F, 0x7F),
    "float8_e5m2": Float8(2, 15, 0x7B, 0x7C, 0x7E),
    "float8_e4m3fnuz": Float8(3, 8, 0x7F, 0x80, 0x80),
    "float8_e5m2fnuz": Float8(2, 16, 0x7F, 0x80, 0x80),
    "float4_e2m1fn": Float8(1, 1, 0x7, 0x7, 0x8, 0x8),  # has no NaN
}
"""Formats with a sign by TVM's name of the type."""

POWERS = "float8_e8m0fnu"
"""The format that has exponents only: its numbers are powers of two."""

FLOATS = frozenset((*FLOAT8, POWERS))
"""All formats that this module reads and writes."""

_NAN = 0x7FC00000
_INFINITY = 0x7F800000


def _word(value: int) -> tirx.Expr:
    return tirx.const(value, "uint32")


def number_of(code: tirx.Expr, dtype: str) -> tirx.Expr:
    """The float32 of a code of `dtype`, given as uint32; all numbers of these types are numbers of float32."""
    return _power(code) if dtype == POWERS else _decoded(code, FLOAT8[dtype])


def code_of(number: tirx.Expr, dtype: str, saturates: bool, rounding: str = "up") -> tirx.Expr:
    """The code, as uint8, of the number of `dtype` that is nearest to a float32, halves to even.

    Larger numbers and infinities become the largest number if `saturates`, else infinity, or NaN where there is none.
    (float4 always saturates.) Powers of two are rounded by `rounding`: "up", "down" or "nearest"; signs are lost, and
    infinities become NaN.
    """
    bits = tirx.reinterpret("uint32", number)
    code = _exponent(bits, saturates, rounding) if dtype == POWERS else _encoded(bits, FLOAT8[dtype], saturates)
    return tirx.Cast("uint8", code)


def _power(code: tirx.Expr) -> tirx.Expr:
    bits = tirx.Select(tirx.EQ(code, _word(0)), _word(1 << 22), tirx.shift_left(code, _word(23)))
    return tirx.reinterpret("float32", tirx.Select(tirx.EQ(code, _word(0xFF)), _word(_NAN), bits))


def _decoded(code: tirx.Expr, form: Float8) -> tirx.Expr:
    size = tirx.bitwise_and(code, _word(form.sign - 1))
    normal = tirx.shift_left(size, _word(23 - form.mantissa)) + _word((127 - form.bias) << 23)
    tiny = tirx.Cast("float32", size) * tirx.const(2.0 ** (1 - form.bias - form.mantissa), "float32")
    bits = tirx.Select(size < _word(1 << form.mantissa), tirx.reinterpret("uint32", tiny), normal)
    sign = tirx.shift_left(tirx.bitwise_and(code, _word(form.sign)), _word(32 - form.sign.bit_length()))
    if form.sign == 0x8:
        return tirx.reinterpret("float32", bits + sign)
    if form.nan == form.sign:
        return tirx.reinterpret("float32", tirx.Select(tirx.EQ(code, _word(0x80)), _word(_NAN), bits + sign))
    special = _word(_NAN)
    if form.beyond != form.nan:
        special = tirx.Select(tirx.EQ(size, _word(form.beyond)), _word(_INFINITY), special)
    return tirx.reinterpret("float32", tirx.Select(size > _word(form.largest), special, bits) + sign)


def _exponent(bits: tirx.Expr, saturates: bool, rounding: str) -> tirx.Expr:
    exponent = tirx.bitwise_and(tirx.shift_right(bits, _word(23)), _word(0xFF))
    fraction = tirx.bitwise_and(bits, _word(0x7FFFFF))
    # As in ONNX's reference: halves go up, but among the numbers below the least normal one to zero.
    half = _word(1 << 22)
    is_up = {
        "up": fraction > _word(0),
        "nearest": tirx.any(fraction > half, tirx.all(tirx.EQ(fraction, half), exponent > _word(0))),
        "down": tirx.const(False, "bool"),
    }[rounding]
    is_up = tirx.all(is_up, exponent < _word(0xFE if saturates else 0xFF))
    return tirx.Select(is_up, exponent + _word(1), exponent)


def _encoded(bits: tirx.Expr, form: Float8, saturates: bool) -> tirx.Expr:
    size = tirx.bitwise_and(bits, _word(0x7FFFFFFF))
    shift = 23 - form.mantissa
    is_odd = tirx.bitwise_and(tirx.shift_right(size, _word(shift)), _word(1))
    rounded = tirx.shift_right(size + _word((1 << (shift - 1)) - 1) + is_odd, _word(shift))
    normal = rounded - _word((127 - form.bias) << form.mantissa)
    # Below the normal numbers steps are even: adding 2^23 leaves their number in the last bits, rounded.
    steps = tirx.reinterpret("float32", size) * tirx.const(2.0 ** (form.bias - 1 + form.mantissa), "float32")
    tiny = tirx.reinterpret("uint32", steps + tirx.const(2.0**23, "float32")) - _word(0x4B000000)
    code = tirx.Select(size < _word((128 - form.bias) << 23), tiny, normal)
    sign = tirx.shift_right(tirx.bitwise_and(bits, _word(0x80000000)), _word(32 - form.sign.bit_length()))
    is_above = code > _word(form.largest)
    is_nan = size > _word(_INFINITY)
    code = tirx.Select(is_above, _word(form.largest if saturates else form.beyond), code)
    if form.sign == 0x8:
        return tirx.Select(is_nan, _word(form.nan), code + sign)
    if form.nan != form.sign:
        return tirx.Select(is_nan, _word(form.nan), code) + sign
    has_sign = tirx.all(code > _word(0), code < _word(0x80))  # there is no zero with a sign
    code = tirx.Select(has_sign, code + sign, code)
    return tirx.Select(is_nan, _word(form.nan), code)
