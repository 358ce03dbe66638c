"""Relax ops on rows as terms over what they read: norms and softmax as reductions and elementwise work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import relax

from ...encoding.expression import Term
from ...op.traits import traits_of
from ...target.element_types import HALF_TYPES
from ..ir.rewriting import op_name

Reduce = Callable[[str, Term], Term]
"""Adds a reduction of a kind over a term, and gives the term that stands for it."""

_WHOLE_ROWS = ("softmax", "row_norm")
_ROWS = (*_WHOLE_ROWS, "reduction", "moment")


@dataclass(frozen=True)
class RowOp:
    """A call that reduces rows, for itself or on the way.

    Attributes
    ----------
    call : relax.Call
    axes : int
        How many trailing axes make a row.
    """

    call: relax.Call
    axes: int

    @property
    def vectors(self) -> list[relax.Expr]:
        """Operands beside the first: of the row's shape."""
        return list(self.call.args[1:])

    @property
    def is_wide(self) -> bool:
        """True if the result has all of the row."""
        return is_wide(self.call)


def is_wide(call: relax.Expr) -> bool:
    """Return whether a call computes all of a row from all of a row, as softmax and norms do."""
    return traits_of(op_name(call)).kind in _WHOLE_ROWS


def rounded(term: Term, value: relax.Expr) -> Term:
    """Term that users of a value read, where its op computes `term` of values that are rounded.

    Rows are computed in single precision, but every op on half precision rounds its result; softmax and norms only
    that, not what they compute on the way. A later op may be sensitive to that: a difference of what is nearly equal.
    """
    dtype = str(value.ty.dtype)
    return term if dtype not in HALF_TYPES or traits_of(op_name(value)).is_exact else Term("cast", (term,), (dtype,))


def row_op(call: relax.Expr) -> RowOp | None:
    """`call` as an op on rows; None for others, for axes that are not the last ones, and element types without."""
    kind = traits_of(op_name(call)).kind
    if kind not in _ROWS:
        return None
    ty = call.args[0].ty
    if not isinstance(ty, relax.TensorType) or ty.shape is None or ty.ndim < 1:
        return None
    dtype = str(ty.dtype)
    if dtype not in ("float16", "bfloat16", "float32", "float64") or (dtype == "float64" and kind == "softmax"):
        return None
    axes = _axes(call, kind, int(ty.ndim))
    return RowOp(call, axes) if axes else None


def _axes(call: relax.Call, kind: str, rank: int) -> int:
    """How many axes from the last on are reduced, 0 where it is not just those."""
    given = call.attrs.axes if kind == "row_norm" else [call.attrs.axis] if kind == "softmax" else call.attrs.axis
    axes = range(rank) if given is None else sorted(int(axis) % rank for axis in given)
    return len(axes) if list(axes) == list(range(rank - len(axes), rank)) else 0


def row_term(op: RowOp, x: Term, vectors: list[Term], reduce: Reduce) -> Term:
    """Term of an op over the rows `x`; the variance is that of the centred row, in a pass of its own."""
    call, name = op.call, op.call.op.name.rpartition(".")[2]
    if traits_of(call.op.name).kind == "reduction":
        return reduce(name, x)
    if name == "softmax":
        exponential = _call("exp", _call("subtract", x, reduce("max", x)))
        return _call("multiply", exponential, _call("divide", _number(1.0), reduce("sum", exponential)))
    if name == "log_softmax":
        moved = _call("subtract", x, reduce("max", x))
        return _call("subtract", moved, _call("log", reduce("sum", _call("exp", moved))))
    if name == "rms_norm":
        square = reduce("mean", _call("multiply", x, x))
        return _call("multiply", _call("multiply", x, _inverse_root(square, call.attrs.epsilon)), vectors[0])
    centred = _call("subtract", x, reduce("mean", x))
    variance = reduce("mean", _call("multiply", centred, centred))
    if name in ("variance", "std"):
        return variance if name == "variance" else _call("sqrt", variance)
    result = _call("multiply", centred, _inverse_root(variance, call.attrs.epsilon))
    if call.attrs.scale:
        result = _call("multiply", result, vectors[0])
    return _call("add", result, vectors[1]) if call.attrs.center else result


def _inverse_root(x: Term, epsilon: float) -> Term:
    return _call("rsqrt", _call("add", x, _number(float(epsilon))))


def _call(op: str, *args: Term) -> Term:
    return Term(op, args)


def _number(value: float) -> Term:
    return Term("number", (), (value,))
