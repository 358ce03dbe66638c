"""Definition of an operator ``relax.hetero.*``: its call, checks of the call, and its registration.

The registration gives TVM the type inference of a call, and says that the operator is pure. TVMScript finds the
function that makes a call as ``R.hetero.*``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import relax
from tvm.relax import script as relax_script
from tvm.relax.script import parser as relax_parser

from ..errors import EncodingError

Infer = Callable[[relax.Call, relax.BlockBuilder], "relax.TensorType | relax.ShapeType | tvm.ir.TupleType"]
"""Function from a call to its type; it raises EncodingError for the first mistake in the call."""


class Namespace:
    """``R.hetero``: the functions of all operators by name."""


def register_op(name: str, function: Callable[..., relax.Call], infer: Infer) -> None:
    """Register an operator with TVM, and its function with TVMScript; once, when `relax_hetero.op` is imported."""
    tvm.ir._ffi_api.RegisterOp(name, f"{name}: see {function.__module__}")
    tvm.ir.register_op_attr(name, "FInferType", infer)
    tvm.ir.register_op_attr(name, "FPurity", True)
    register_statement(function)


def register_statement(function: Callable[..., Any]) -> None:
    """Register a function with TVMScript as ``R.hetero.*``."""
    setattr(Namespace, function.__name__, staticmethod(function))
    for module in (relax_script, relax_parser):
        module.hetero = Namespace  # type: ignore[attr-defined]


def make_call(name: str, operands: Sequence[relax.Expr], attrs: tvm.ir.Attrs | None) -> relax.Call:
    """A call of an operator; EncodingError if an operand is not a Relax expression."""
    for index, operand in enumerate(operands):
        if not isinstance(operand, relax.Expr):
            raise EncodingError(f"{name}: operand {index} is a {type(operand).__name__}, expected a Relax expression")
    return relax.Call(tvm.ir.Op.get(name), list(operands), attrs)


def check_attrs(call: relax.Call, attrs: type) -> None:
    """Refuse a call whose attributes are of another class."""
    if not isinstance(call.attrs, attrs):
        raise EncodingError(f"{call.op.name}: attributes are a {type(call.attrs).__name__}, expected {attrs.__name__}")


def extents_of(call: relax.Call, index: int) -> list[Any]:
    """The extents of an operand, PrimExprs; EncodingError if it is not a tensor of known extents."""
    ty = call.args[index].ty
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
        raise EncodingError(f"{call.op.name}: operand {index} is a {ty}, expected a tensor of known extents")
    return list(ty.shape.values)


def number(extent: Any) -> Any:
    """An extent as an int if it is a constant."""
    return int(extent) if isinstance(extent, tvm.tirx.IntImm) else extent


def is_one(extent: Any) -> bool:
    """Return whether an extent is known to be 1."""
    return isinstance(extent, (int, tvm.tirx.IntImm)) and int(extent) == 1


def differ(extent: Any, other: Any) -> bool:
    """Return whether two extents certainly differ."""
    return bool(tvm.sym.Analyzer().can_prove(extent != other))
