"""Replacement of numbers and functions that TVM's C generator cannot write by GCC's and Clang's built-ins.

The generator writes infinities and NaN as ``inff``, ``inf``, ``nanf``, which are not C identifiers, and lacks ``fabs``,
which absolute values and tests for infinity use.

Before::

    y[i] = max(T.fabs(x[i]), T.float32("-inf"))

After::

    y[i] = max(T.call_pure_extern("float32", "__builtin_fabsf", x[i]), -T.call_pure_extern("float32", "__builtin_inff"))

Built-ins need no header.
"""

from __future__ import annotations

import math

import tvm
from tvm import tirx
from tvm_ffi import structural_map


def with_c_literals(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Replace infinite and NaN immediates and ``fabs`` in a function; infinities keep their signs, NaN does not."""
    return structural_map(structural_map(func, (tirx.FloatImm, _number)), (tvm.ir.Call, _magnitude))


def _number(value: tirx.FloatImm) -> tvm.ir.Expr:
    if math.isfinite(value.value):
        return value
    dtype = str(value.ty.dtype)
    if math.isnan(value.value):
        # The built-in for NaN takes a string, which TVM's generator cannot write in an expression.
        return _built_in("sqrt", dtype, tirx.FloatImm("float32", -1.0))
    infinity = _built_in("inf", dtype)
    return -infinity if value.value < 0 else infinity


def _magnitude(call: tvm.ir.Call) -> tvm.ir.Expr:
    if not isinstance(call.op, tvm.ir.Op) or call.op.name != "tirx.fabs":
        return call
    return _built_in("fabs", str(call.ty.dtype), call.args[0])


def _built_in(name: str, dtype: str, *operands: tvm.ir.Expr) -> tvm.ir.Expr:
    """A call in double or single precision; the latter also serves narrower types."""
    wide = "float64" if dtype == "float64" else "float32"
    symbol = f"__builtin_{name}" + ("" if wide == "float64" else "f")
    result = tirx.call_pure_extern(wide, symbol, *(operand.astype(wide) for operand in operands))
    return result if dtype == wide else result.astype(dtype)
