"""Casts of vectors between element types, with bfloat16 as its bits.

``tirx.relax_hetero.bfloat16_bits`` rounds float32 to the nearest bfloat16, as 16 bits. It is an op, so that it becomes
an instruction on CPUs that have one (`driver.link.llvm_kernels`); TVM's LowerIntrin lowers it to integer arithmetic
elsewhere.
"""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...target.element_types import HALF_TYPES
from ..core.builder import vector_type
from . import vector_math

BITS = "tirx.relax_hetero.bfloat16_bits"
_PURE = 1  # tirx's CallEffectKind
_NAN, _QUIET = 0x7F800000, 0x40


def bfloat16_bits(x: tirx.Expr) -> tirx.Expr:
    """A float32 expression rounded to bfloat16 (halves to even; NaN stays NaN), as uint16.

    Numbers below 2^-126 may become zero, as the instructions do.
    """
    return tvm.ir.Call(tvm.ir.Op.get(BITS), [vector_math.once(x)], ret_ty=_type_of("uint16", x))


def lower_to_integers(call: tvm.ir.Call) -> tirx.Expr:
    """The call as integer arithmetic, for any CPU."""
    x = call.args[0]
    raw = tirx.reinterpret(_type_of("uint32", x), x)

    def number(value: int) -> tirx.Expr:
        return tirx.const(value, str(raw.ty.dtype))

    upper = tirx.shift_right(raw, number(16))
    rounded = tirx.shift_right(raw + number(0x7FFF) + tirx.bitwise_and(upper, number(1)), number(16))
    is_nan = tirx.bitwise_and(raw, number(0x7FFFFFFF)) > number(_NAN)
    result = tirx.Select(is_nan, tirx.bitwise_or(upper, number(_QUIET)), rounded)
    return tirx.Cast(str(_type_of("uint16", x).dtype), result)


def _type_of(dtype: str, x: tirx.Expr) -> tvm.ir.PrimType:
    return tvm.ir.PrimType(vector_type(dtype, x.ty.dtype.lanes))


def truncated(x: tirx.Expr, dtype: str) -> tirx.Expr:
    """A floating-point expression truncated to an integer; other expressions are cast plainly.

    Defined for every number like the x86 instructions, and so numpy and ONNX Runtime on x86: NaN and numbers outside of
    int32 (int64 for uint32 and 64-bit types) become the minimum of that type, and narrower or unsigned types take its
    low bits. A plain cast of such numbers is undefined, and differs between vectors, scalars and devices.
    """
    if not str(x.ty.dtype).startswith("float") or not dtype.startswith(("int", "uint")) or dtype == "bool":
        return T.cast(x, vector_type(dtype, x.ty.dtype.lanes))
    if x.ty.dtype.bits < 32:
        x = T.cast(x, vector_type("float32", x.ty.dtype.lanes))
    if dtype == "uint64":
        half = vector_math.constant(x, 2.0**63)
        high = T.bitwise_xor(_signed(x - half, "int64"), _min_value(x, "int64"))
        return T.cast(T.Select(x >= half, high, _signed(x, "int64")), vector_type(dtype, x.ty.dtype.lanes))
    wide = "int64" if dtype in ("int64", "uint32") else "int32"
    integer = _signed(x, wide)
    return integer if dtype == wide else T.cast(integer, vector_type(dtype, x.ty.dtype.lanes))


def _signed(x: tirx.Expr, dtype: str) -> tirx.Expr:
    limit = 2.0**63 if dtype == "int64" else 2.0**31
    fits = tirx.all(x > vector_math.constant(x, -limit), x < vector_math.constant(x, limit))
    return T.Select(fits, T.cast(x, vector_type(dtype, x.ty.dtype.lanes)), _min_value(x, dtype))


def _min_value(x: tirx.Expr, dtype: str) -> tirx.Expr:
    value = tirx.min_value(dtype)
    return value if x.ty.dtype.lanes == 1 else T.broadcast(value, x.ty.dtype.lanes)


def computed_in(dtype: str) -> str:
    """The element type of arithmetic on `dtype`."""
    return "float32" if dtype in HALF_TYPES else dtype


def cast(value: tirx.Expr, dtype: str) -> tirx.Expr:
    """`value` converted to an element type, its lanes kept.

    bfloat16 is converted by its bits: TVM's own casts convert the bits as a number where the value is bound, and cancel
    each other in pairs, which loses the rounding.
    """
    lanes = value.ty.dtype.lanes
    element = str(value.ty.dtype).partition("x")[0]
    if element == dtype:
        return value
    if element == "bfloat16":
        wide = T.cast(T.reinterpret(vector_type("uint16", lanes), value), vector_type("uint32", lanes))
        single = T.reinterpret(vector_type("float32", lanes), T.shift_left(wide, vector_math.constant(wide, 16)))
        return cast(single, dtype)
    if dtype == "bfloat16":
        return T.reinterpret(vector_type("bfloat16", lanes), bfloat16_bits(cast(value, "float32")))
    return truncated(value, dtype)


def round_to_bfloat16(x: tirx.Expr) -> tirx.Expr:
    """A float32 expression rounded to the nearest bfloat16 (halves to even), as float32."""
    return vector_math.once(cast(cast(x, "bfloat16"), "float32"))


tvm.ir._ffi_api.RegisterOp(BITS, f"{BITS}: see relax_hetero.tir.math.casts")
tvm.ir.register_op_attr(BITS, "TCallEffectKind", _PURE)
tvm.ir.register_op_attr(BITS, "TScriptPrinterName", "bfloat16_bits")
tirx.op.register_intrin_lowering(BITS, "default", f=lower_to_integers)
