"""Apply a tensor operator to every tensor of a nested tuple."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import tvm
from tvm import relax

from ..errors import PlacementError
from .under_construction import bind, can_bind

# What the operators here take: an expression, or a Python tuple or list of such.
Operand: TypeAlias = "relax.Expr | Sequence[Operand]"


def each_tensor(operand: Operand, op_name: str, apply: Callable[[relax.Expr], relax.Expr]) -> relax.Expr:
    """`apply` to a tensor, or to every tensor inside a tuple, field by field.

    Fields that are shapes or scalars stay as they are: they have no device.

    Parameters
    ----------
    operand : relax.Expr, or tuple or list of operands
        Python tuples become Relax tuples; a tuple-typed variable is taken apart.
    op_name : str
        For messages.
    apply : Callable
        From a tensor expression to the expression that replaces it.

    Returns
    -------
    expr : relax.Expr
        A ``relax.Tuple`` where the operand is a tuple.

    Raises
    ------
    PlacementError
        If the operand is no expression, or neither tensor nor tuple.
    """
    return _visit(operand, op_name, apply, in_tuple=False)


def _visit(operand: Operand, op_name: str, apply: Callable[[relax.Expr], relax.Expr], in_tuple: bool) -> relax.Expr:
    if isinstance(operand, (tuple, list, relax.Tuple)):
        fields = operand.fields if isinstance(operand, relax.Tuple) else operand
        return relax.Tuple([_visit(field, op_name, apply, in_tuple=True) for field in fields])
    if not isinstance(operand, relax.Expr):
        raise PlacementError(
            f"{op_name} needs a Relax expression or a tuple of them, got {operand!r} ({type(operand).__name__})"
        )
    if _is_missing(operand.ty) and can_bind():
        operand = bind(operand, op_name)  # the type, and whether it is a tuple, is known once it is bound
    if isinstance(operand.ty, relax.TensorType) or _is_missing(operand.ty):
        return apply(operand)
    if isinstance(operand.ty, tvm.ir.TupleType):
        whole = bind(operand, op_name)
        items = [relax.TupleGetItem(whole, index) for index in range(len(operand.ty.fields))]
        return relax.Tuple([_visit(item, op_name, apply, in_tuple=True) for item in items])
    if in_tuple and isinstance(operand.ty, (relax.ShapeType, tvm.ir.PrimType)):
        return operand
    raise PlacementError(f"{op_name} needs a tensor or a tuple of tensors, {operand} is a {operand.ty}")


def _is_missing(ty: tvm.ir.Type) -> bool:
    return type(ty) is tvm.ir.Type  # what TVM 0.27 gives expressions that were not normalized yet
