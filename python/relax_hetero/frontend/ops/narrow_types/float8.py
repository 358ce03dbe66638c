"""Floats of 8 bits to and from float32, by arithmetic on their bits.

TVM stores these types and computes wrong with them, so their bytes are taken apart here.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import relax, te, tirx

from ..node import Node, Position, dtype_of


@dataclass(frozen=True)
class Float8:
    """A format with a sign bit.

    Attributes
    ----------
    mantissa, bias: Bits of the mantissa, and the number by which exponents are shifted.
    largest: The code of the largest finite number.
    beyond: The code of numbers that are larger, where a cast does not saturate.
    nan: A code of NaN.
    """

    mantissa: int
    bias: int
    largest: int
    beyond: int
    nan: int


FLOAT8 = {
    "float8_e4m3fn": Float8(3, 7, 0x7E, 0x7F, 0x7F),
    "float8_e5m2": Float8(2, 15, 0x7B, 0x7C, 0x7E),
    "float8_e4m3fnuz": Float8(3, 8, 0x7F, 0x80, 0x80),
    "float8_e5m2fnuz": Float8(2, 16, 0x7F, 0x80, 0x80),
}
"""Formats by TVM's name of the type."""

_NAN = 0x7FC00000
_INFINITY = 0x7F800000


def _word(value: int) -> tirx.Expr:
    return tirx.const(value, "uint32")


def to_float32(node: Node, data: relax.Expr) -> relax.Expr:
    """The numbers of a tensor of floats of 8 bits; all of them are numbers of float32."""
    return node.kernel("float8_to_float32", lambda i, x: _decoded(x(*i), FLOAT8[dtype_of(data)]), data)


def _decoded(x: tirx.Expr, form: Float8) -> tirx.Expr:
    code = tirx.Cast("uint32", tirx.reinterpret("uint8", x))
    size = tirx.bitwise_and(code, _word(0x7F))
    normal = tirx.shift_left(size, _word(23 - form.mantissa)) + _word((127 - form.bias) << 23)
    tiny = tirx.Cast("float32", size) * tirx.const(2.0 ** (1 - form.bias - form.mantissa), "float32")
    bits = tirx.Select(size < _word(1 << form.mantissa), tirx.reinterpret("uint32", tiny), normal)
    sign = tirx.shift_left(tirx.bitwise_and(code, _word(0x80)), _word(24))
    if form.nan == 0x80:
        return tirx.reinterpret("float32", tirx.Select(tirx.EQ(code, _word(0x80)), _word(_NAN), bits + sign))
    special = _word(_NAN)
    if form.beyond != form.nan:
        special = tirx.Select(tirx.EQ(size, _word(form.beyond)), _word(_INFINITY), special)
    return tirx.reinterpret("float32", tirx.Select(size > _word(form.largest), special, bits) + sign)


def from_float32(node: Node, data: relax.Expr, dtype: str, saturates: bool) -> relax.Expr:
    """The nearest floats of 8 bits to a float32 tensor, halves to even.

    Larger numbers and infinities become the largest number if `saturates`, else infinity, or NaN where there is none.
    """

    def element(i: Position, x: te.Tensor) -> tirx.Expr:
        return tirx.reinterpret(dtype, tirx.Cast("uint8", _encoded(x(*i), FLOAT8[dtype], saturates)))

    return node.kernel("float32_to_float8", element, data)


def _encoded(x: tirx.Expr, form: Float8, saturates: bool) -> tirx.Expr:
    bits = tirx.reinterpret("uint32", x)
    size = tirx.bitwise_and(bits, _word(0x7FFFFFFF))
    shift = 23 - form.mantissa
    is_odd = tirx.bitwise_and(tirx.shift_right(size, _word(shift)), _word(1))
    rounded = tirx.shift_right(size + _word((1 << (shift - 1)) - 1) + is_odd, _word(shift))
    normal = rounded - _word((127 - form.bias) << form.mantissa)
    # Below the normal numbers steps are even: adding 2^23 leaves their number in the last bits, rounded.
    steps = tirx.reinterpret("float32", size) * tirx.const(2.0 ** (form.bias - 1 + form.mantissa), "float32")
    tiny = tirx.reinterpret("uint32", steps + tirx.const(2.0**23, "float32")) - _word(0x4B000000)
    code = tirx.Select(size < _word((128 - form.bias) << 23), tiny, normal)
    sign = tirx.shift_right(tirx.bitwise_and(bits, _word(0x80000000)), _word(24))
    is_above = code > _word(form.largest)
    is_nan = size > _word(_INFINITY)
    code = tirx.Select(is_above, _word(form.largest if saturates else form.beyond), code)
    if form.nan != 0x80:
        return tirx.Select(is_nan, _word(form.nan), code) + sign
    has_sign = tirx.all(code > _word(0), code < _word(0x80))  # there is no zero with a sign
    code = tirx.Select(has_sign, code + sign, code)
    return tirx.Select(is_nan, _word(form.nan), code)
