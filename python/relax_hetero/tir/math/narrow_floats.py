"""Conversion between float32 and codes of 8- and 4-bit floats, by arithmetic on bits.

TVM stores these types, but computes wrong results with them on CPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx


@dataclass(frozen=True)
class Float8:
    """A format with a sign bit."""

    # Bits of the mantissa, and the bias of exponents.
    mantissa: int
    bias: int
    largest: int  # code of the largest finite number; larger codes are NaN or infinity
    beyond: int  # code of larger numbers where a cast does not saturate
    nan: int  # code of NaN
    sign: int = 0x80  # sign bit


FLOAT8 = {
    "float8_e4m3fn": Float8(3, 7, 0x7E, 0x7F, 0x7F),
    "float8_e5m2": Float8(2, 15, 0x7B, 0x7C, 0x7E),
    "float8_e4m3fnuz": Float8(3, 8, 0x7F, 0x80, 0x80),
    "float8_e5m2fnuz": Float8(2, 16, 0x7F, 0x80, 0x80),
    "float4_e2m1fn": Float8(1, 1, 0x7, 0x7, 0x8, 0x8),  # without NaN
}
"""Formats with a sign by TVM's name of the type."""

POWERS = "float8_e8m0fnu"  # the format of exponents only: its numbers are powers of two
FLOATS = frozenset((*FLOAT8, POWERS))  # all formats of this module

_NAN = 0x7FC00000
_INFINITY = 0x7F800000


def _word(value: int) -> tirx.Expr:
    return tirx.const(value, "uint32")


def number_of(code: tirx.Expr, dtype: str) -> tirx.Expr:
    """The float32 value of a code of `dtype`, a uint32; it is exact."""
    return _decode_power(code) if dtype == POWERS else _decode(code, FLOAT8[dtype])


def code_of(number: tirx.Expr, dtype: str, saturates: bool, rounding: str = "up") -> tirx.Expr:
    """The code, as uint8, of the number of `dtype` nearest to a float32, halves to even.

    Larger numbers and infinities become the largest number if `saturates`, else infinity, or NaN in formats without
    infinity. (float4 always saturates.) Powers of two are rounded by `rounding`: "up", "down" or "nearest"; signs are
    lost, and infinities become NaN.
    """
    bits = tirx.reinterpret("uint32", number)
    code = _encode_power(bits, saturates, rounding) if dtype == POWERS else _encode(bits, FLOAT8[dtype], saturates)
    return tirx.Cast("uint8", code)


def _decode_power(code: tirx.Expr) -> tirx.Expr:
    bits = tirx.Select(tirx.EQ(code, _word(0)), _word(1 << 22), tirx.shift_left(code, _word(23)))
    return tirx.reinterpret("float32", tirx.Select(tirx.EQ(code, _word(0xFF)), _word(_NAN), bits))


def _decode(code: tirx.Expr, float8: Float8) -> tirx.Expr:
    size = tirx.bitwise_and(code, _word(float8.sign - 1))
    normal = tirx.shift_left(size, _word(23 - float8.mantissa)) + _word((127 - float8.bias) << 23)
    subnormal = tirx.Cast("float32", size) * tirx.const(2.0 ** (1 - float8.bias - float8.mantissa), "float32")
    bits = tirx.Select(size < _word(1 << float8.mantissa), tirx.reinterpret("uint32", subnormal), normal)
    sign = tirx.shift_left(tirx.bitwise_and(code, _word(float8.sign)), _word(32 - float8.sign.bit_length()))
    if float8.sign == 0x8:
        return tirx.reinterpret("float32", bits + sign)
    if float8.nan == float8.sign:
        return tirx.reinterpret("float32", tirx.Select(tirx.EQ(code, _word(0x80)), _word(_NAN), bits + sign))
    special = _word(_NAN)
    if float8.beyond != float8.nan:
        special = tirx.Select(tirx.EQ(size, _word(float8.beyond)), _word(_INFINITY), special)
    return tirx.reinterpret("float32", tirx.Select(size > _word(float8.largest), special, bits) + sign)


def _encode_power(bits: tirx.Expr, saturates: bool, rounding: str) -> tirx.Expr:
    exponent = tirx.bitwise_and(tirx.shift_right(bits, _word(23)), _word(0xFF))
    fraction = tirx.bitwise_and(bits, _word(0x7FFFFF))
    # ONNX's reference rounds halves up, but for subnormal numbers to zero.
    half = _word(1 << 22)
    is_up = {
        "up": fraction > _word(0),
        "nearest": tirx.any(fraction > half, tirx.all(tirx.EQ(fraction, half), exponent > _word(0))),
        "down": tirx.const(False, "bool"),
    }[rounding]
    is_up = tirx.all(is_up, exponent < _word(0xFE if saturates else 0xFF))
    return tirx.Select(is_up, exponent + _word(1), exponent)


def _encode(bits: tirx.Expr, float8: Float8, saturates: bool) -> tirx.Expr:
    size = tirx.bitwise_and(bits, _word(0x7FFFFFFF))
    shift = 23 - float8.mantissa
    is_odd = tirx.bitwise_and(tirx.shift_right(size, _word(shift)), _word(1))
    rounded = tirx.shift_right(size + _word((1 << (shift - 1)) - 1) + is_odd, _word(shift))
    normal = rounded - _word((127 - float8.bias) << float8.mantissa)
    # Subnormal numbers are equidistant: adding 2^23 leaves their index in the low bits, rounded.
    steps = tirx.reinterpret("float32", size) * tirx.const(2.0 ** (float8.bias - 1 + float8.mantissa), "float32")
    subnormal = tirx.reinterpret("uint32", steps + tirx.const(2.0**23, "float32")) - _word(0x4B000000)
    code = tirx.Select(size < _word((128 - float8.bias) << 23), subnormal, normal)
    sign = tirx.shift_right(tirx.bitwise_and(bits, _word(0x80000000)), _word(32 - float8.sign.bit_length()))
    is_above = code > _word(float8.largest)
    is_nan = size > _word(_INFINITY)
    code = tirx.Select(is_above, _word(float8.largest if saturates else float8.beyond), code)
    if float8.sign == 0x8:
        return tirx.Select(is_nan, _word(float8.nan), code + sign)
    if float8.nan != float8.sign:
        return tirx.Select(is_nan, _word(float8.nan), code) + sign
    has_sign = tirx.all(code > _word(0), code < _word(0x80))  # the format lacks a negative zero
    code = tirx.Select(has_sign, code + sign, code)
    return tirx.Select(is_nan, _word(float8.nan), code)
