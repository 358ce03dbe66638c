"""The operator of requirements on sizes: ``R.hetero.require`` in TVMScript, ``relax_hetero.op.require`` in Python.

A requirement is a condition over the symbolic sizes of a function, such as ``a == b``, that must hold when the function
is called, and the text of the error that is raised otherwise. It is a statement: its value is not used.

Dead code elimination removes ops without readers, and dataflow blocks may not contain ops with effects. A
``match_cast`` is kept, because it checks something, and is allowed everywhere. Therefore a requirement is written as
the ``match_cast`` of a call to ``relax.hetero.requirement``, which has an unknown shape::

    _: R.Shape([1]) = R.match_cast(R.hetero.requirement(a == b, message="Add node 'sum': ..."), R.Shape([1]))

``LowerToVM`` merges consecutive requirements into one function on the host.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.relax.script.builder import ir as relax_builder
from tvm.script.ir_builder import IRBuilder

from ..errors import EncodingError, PlacementError
from .definition import check_attrs, register_op, register_statement

REQUIREMENT = "relax.hetero.requirement"

MET = relax.ShapeType([1])  # the type that a requirement is cast to: an arbitrary shape of known rank


@tvm_ffi.dataclasses.py_class("relax_hetero.RequirementAttrs")
class RequirementAttrs(tvm.ir.Attrs):
    """Attributes of a requirement: the text of the error."""

    message: str


def requirement(condition: Any, message: str) -> relax.Call:
    """The value of a `require` statement, as TVM's printer writes it; `require` emits the statement.

    Parameters
    ----------
    condition : object
        Boolean expression over sizes.
    message : str
        Text of the error that a call raises where the condition does not hold.

    Raises
    ------
    EncodingError
        If the condition is not a boolean expression over sizes.
    """
    expr = as_condition(condition)
    if not tvm.ir.is_prim_expr(expr) or str(expr.ty) != "bool":
        raise EncodingError(f"{REQUIREMENT}: found condition {condition!r}, expected a boolean expression over sizes")
    return relax.Call(tvm.ir.Op.get(REQUIREMENT), [expr], RequirementAttrs(str(message)))


def as_condition(condition: Any) -> Any:
    """A condition as an expression, from a Python bool or TVM's lazy ``==`` of two sizes."""
    if isinstance(condition, bool):
        return tirx.IntImm("bool", int(condition))
    as_object = None if isinstance(condition, tvm.ir.Expr) else getattr(condition, "asobject", None)
    return condition if as_object is None else as_object()


def require(condition: Any, message: str) -> None:
    """Make calls of the function under construction fail unless a condition over its sizes holds.

    Parameters
    ----------
    condition : tirx.PrimExpr
        A boolean expression over symbolic sizes, int64: ``a == b``, ``T.any(a == 1, a == 3)``. Operands of ``and`` and
        ``or`` are evaluated from the left, with short circuit.
    message : str
        The text of the error, which names the op and its tensors. It is preceded by the function's name and followed by
        the condition's sizes with their values.

    Raises
    ------
    EncodingError
        If the condition is not a boolean expression over sizes.
    PlacementError
        If no function is under construction, in TVMScript or a ``BlockBuilder``.
    """
    value = requirement(condition, message)
    if IRBuilder.is_in_scope():
        IRBuilder.name("_", relax_builder.emit_match_cast(value, MET))
        return
    builder = relax.BlockBuilder.current()
    if builder is None:
        raise PlacementError(f"require: no function is under construction that could require {message!r}")
    builder.match_cast(value, MET)


def require_binding(condition: Any, message: str, is_dataflow: bool) -> relax.MatchCast:
    """A `require` statement as a binding, for passes."""
    value = requirement(condition, message)
    relax.expr._update_type(value, relax.ShapeType(ndim=-1))
    return relax.MatchCast((relax.DataflowVar if is_dataflow else relax.Var)("_", MET), value, MET)


def is_requirement(expr: relax.Expr) -> bool:
    """Return whether `expr` is the value of a `require` statement."""
    return isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op) and expr.op.name == REQUIREMENT


def infer_requirement(call: relax.Call, _ctx: relax.BlockBuilder) -> relax.ShapeType:
    """An unknown shape, so that no pass can prove the cast."""
    check_attrs(call, RequirementAttrs)
    return relax.ShapeType(ndim=-1)


register_op(REQUIREMENT, requirement, infer_requirement)
register_statement(require)
