"""Numbers and functions that TVM's generator for C has no words for become GCC's and Clang's built-ins.

The generator writes infinities and NaN as ``inff``, ``inf``, ``nanf``, which are no names of C, and knows no ``fabs``,
which magnitudes and tests for infinity consist of.

Before::

    y[i] = max(T.fabs(x[i]), T.float32("-inf"))

After::

    y[i] = max(T.call_pure_extern("float32", "__builtin_fabsf", x[i]), -T.call_pure_extern("float32", "__builtin_inff"))

No header need be included for them.
"""

from __future__ import annotations

import math

import tvm
from tvm import tirx
from tvm_ffi import structural_map


def with_c_literals(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """`func` without infinite or NaN immediates and ``fabs``; infinities keep their signs, NaN does not."""
    return structural_map(structural_map(func, (tirx.FloatImm, _number)), (tvm.ir.Call, _magnitude))


def _number(value: tirx.FloatImm) -> tvm.ir.Expr:
    if math.isfinite(value.value):
        return value
    dtype = str(value.ty.dtype)
    if math.isnan(value.value):
        # The built-in for NaN takes a string, which TVM's generator cannot write among numbers.
        return _built_in("sqrt", dtype, tirx.FloatImm("float32", -1.0))
    infinity = _built_in("inf", dtype)
    return -infinity if value.value < 0 else infinity


def _magnitude(call: tvm.ir.Call) -> tvm.ir.Expr:
    if not isinstance(call.op, tvm.ir.Op) or call.op.name != "tirx.fabs":
        return call
    return _built_in("fabs", str(call.ty.dtype), call.args[0])


def _built_in(name: str, dtype: str, *operands: tvm.ir.Expr) -> tvm.ir.Expr:
    """A call in double or single precision; the latter serves narrower types too."""
    wide = "float64" if dtype == "float64" else "float32"
    symbol = f"__builtin_{name}" + ("" if wide == "float64" else "f")
    found = tirx.call_pure_extern(wide, symbol, *(operand.astype(wide) for operand in operands))
    return found if dtype == wide else found.astype(dtype)
