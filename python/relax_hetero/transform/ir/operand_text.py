"""Operands and types of calls as text for messages: constants by their shape, long lists cut."""

from __future__ import annotations

import tvm
from tvm import relax

from .requirements import text_of

_MAX_LISTED = 6
"""Operands, fields of a tuple, or extents in a message; more are cut."""


def operand_text(arg: relax.Expr) -> str:
    """An operand: its name where it has one, and its type."""
    if isinstance(arg, relax.Var):
        return f"{arg.name}: {type_text(arg.ty)}"
    if isinstance(arg, tvm.ir.GenericConst):
        return f"a constant: {type_text(arg.ty)}"
    if isinstance(arg, relax.Tuple):
        return f"({_listed([operand_text(field) for field in arg.fields])})"
    if isinstance(arg, relax.ShapeExpr):
        return f"({_listed(list(map(text_of, arg.values)))})"
    if isinstance(arg, tvm.ir.GlobalVar):
        return repr(str(arg.name_hint))
    text = str(arg)
    return text if len(text) <= 80 and "\n" not in text else type(arg).__name__


def type_text(ty: tvm.ir.Type) -> str:
    """A type, without its device: ``"float32[2, n]"``."""
    if isinstance(ty, relax.TensorType):
        dtype = str(ty.dtype).removeprefix("T.") if ty.dtype is not None else "any type"
        if isinstance(ty.shape, relax.ShapeExpr):
            return f"{dtype}[{_listed(list(map(text_of, ty.shape.values)))}]"
        return f"{dtype} of {ty.ndim if ty.ndim >= 0 else 'any number of'} dimensions"
    if isinstance(ty, tvm.ir.TupleType):
        return f"({_listed([type_text(field) for field in ty.fields])})"
    if type(ty) is tvm.ir.Type:
        return "of no type"
    return str(ty).removeprefix("R.")


def _listed(texts: list[str]) -> str:
    more = f", … ({len(texts)})" if len(texts) > _MAX_LISTED else ""
    return ", ".join(texts[:_MAX_LISTED]) + more
