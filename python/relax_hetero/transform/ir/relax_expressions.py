"""Relax's elementwise ops as `Expression` terms, and back.

`encoding.functions` lists the ops. Kernels compute expressions, and a cancelled encoding becomes the original ops
again, with numbers in place of scalar constants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx

from ...encoding.expression import Expression, Term
from ...encoding.functions import FUNCTIONS
from ...errors import EncodingError
from ...op.functions import apply_function
from .blocks import broadcast, is_one, shape_of
from .rewriting import op_name

Emit = Callable[[relax.Expr, relax.TensorType], relax.Expr]  # binds a value of a type to a variable, and returns that

_TERM_OF_OP = {f"relax.{function.op}": name for name, function in FUNCTIONS.items() if function.op}

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_INTEGERS = ("int8", "uint8", "int16", "uint16", "int32")
_MAX_POWER = 3  # x**2 and x**3 become products, which are exact; exporters write tanh-gelu with them


def to_expression(call: relax.Expr) -> tuple[Expression, list[relax.Expr]] | None:
    """An elementwise Relax op as an expression over the tensors it takes.

    `call`: a call whose type is known. ``R.add(a, R.const(1.0))`` gives ``add(x0, 1.0)`` and ``[a]``; an operand that
    occurs twice is one operand. None for other ops, and for element types that expressions do not support.
    """
    name = op_name(call)
    if name is None or not isinstance(call.ty, relax.TensorType):
        return None
    op = "power" if name == "relax.power" else _TERM_OF_OP.get(name)
    tensors = [arg for arg in call.args if isinstance(arg.ty, relax.TensorType)]
    if op is None or not all(is_supported(op, str(ty.dtype)) for ty in (call.ty, *(t.ty for t in tensors))):
        return None
    operands: list[relax.Expr] = []
    terms = tuple(_argument(arg, operands) for arg in tensors)
    if op == "power":
        term = _power(*terms)
    elif op == "cast":
        term = Term(op, terms, (str(call.attrs.dtype),))
    elif op == "leaky_relu":
        term = Term(op, terms, (float(call.attrs.alpha),))
    elif op == "clip":
        bounds = [_bound(arg, str(call.ty.dtype)) for arg in call.args[1:]]
        term = None if None in bounds else Term(op, terms, tuple(bounds))
    else:
        term = Term(op, terms)
    return None if term is None or not operands else (Expression(term), operands)


def from_expression(
    expression: Expression,
    operands: Sequence[relax.Expr],  # plain tensors ``x0``, ``x1``, ...; they broadcast
    emit: Emit,  # called with every op and its type
    vdevice: relax.VDevice | None = None,  # device of all values; default: that of ``x0``
) -> relax.Expr:
    """Emit the Relax ops that compute an expression, one by one in order.

    Returns the result of `emit` for the last op, or an operand if the expression is one.
    """
    vdevice = operands[0].ty.vdevice if vdevice is None and operands else vdevice

    def apply(op: str, args: list[Any], params: tuple[Any, ...]) -> Any:
        if op == "number":
            return params[0]
        dtype = next((str(arg.ty.dtype) for arg in args if not isinstance(arg, (int, float))), "float32")
        tensors = [_number(arg, dtype, vdevice) if isinstance(arg, (int, float)) else arg for arg in args]
        result = str(params[0]) if op == "cast" else dtype
        return emit(apply_function(op, *tensors, *params), _broadcast_type(op, tensors, result, vdevice))

    return expression.fold(list(operands), apply)


def scalar_of(expr: relax.Expr) -> int | float | None:
    """The number of a constant of one element; None for other expressions and numbers that are not finite."""
    if not isinstance(expr, tvm.ir.GenericConst) or not all(is_one(extent) for extent in shape_of(expr) or []):
        return None
    array = expr.value.numpy()
    value = array.reshape(-1)[0] if array.size == 1 else None
    if value is None or str(expr.ty.dtype) not in _FLOATS + _INTEGERS:
        return None
    if str(expr.ty.dtype) in _INTEGERS:
        return int(value)
    return float(value) if math.isfinite(float(value)) else None


def is_supported(op: str, dtype: str) -> bool:
    """Return whether expressions support an op on an element type."""
    function = FUNCTIONS.get(op)
    if dtype == "float64":
        return function is None or not function.is_approximated
    return dtype in _FLOATS or (dtype in _INTEGERS and function is not None and function.takes_integers)


def _argument(arg: relax.Expr, operands: list[relax.Expr]) -> Term:
    number = scalar_of(arg)
    if number is not None:
        return Term("number", (), (number,))
    for index, operand in enumerate(operands):
        if operand.same_as(arg):
            return Term("operand", (), (index,))
    operands.append(arg)
    return Term("operand", (), (len(operands) - 1,))


def _power(base: Term, exponent: Term) -> Term | None:
    if exponent.op != "number" or exponent.params[0] not in range(2, _MAX_POWER + 1):
        return None
    term = base
    for _ in range(int(exponent.params[0]) - 1):
        term = Term("multiply", (term, base))
    return term


def _bound(arg: relax.Expr, dtype: str) -> int | float | None:
    value = arg.value if isinstance(arg, (tirx.IntImm, tirx.FloatImm)) else None
    if value is None or math.isnan(value):
        return None
    if dtype not in _INTEGERS:
        return float(value)
    limits = np.iinfo(dtype)
    return int(min(max(value, limits.min), limits.max))


def _number(value: int | float, dtype: str, vdevice: relax.VDevice | None) -> tvm.ir.GenericConst:
    constant = relax.const(np.asarray(value).item(), dtype)
    return constant if vdevice is None else tvm.ir.GenericConst(constant.value, relax.TensorType([], dtype, vdevice))


def _broadcast_type(op: str, args: list[relax.Expr], dtype: str, vdevice: relax.VDevice | None) -> relax.TensorType:
    shapes = [shape_of(arg) for arg in args]
    ndim = max(int(arg.ty.ndim) for arg in args)
    if any(shape is None for shape in shapes):
        return relax.TensorType(None, dtype, vdevice, ndim)
    result = broadcast(*(shape or [] for shape in shapes))
    if result is None:
        raise EncodingError(f"{op}: operands of shapes {shapes} do not broadcast")
    return relax.TensorType(result, dtype, vdevice)
