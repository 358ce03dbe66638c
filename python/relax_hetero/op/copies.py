"""The operator of copies: ``relax.hetero.copy``, in TVMScript ``R.hetero.copy``.

Relax lacks an op for "the same numbers in separate memory": an op that moves nothing may share its operand's memory.
IsolateWrites inserts copies where other readers must not see the writes of an in-place kernel; LowerTransfers turns
transfers within a device into copies.
"""

from __future__ import annotations

from tvm import relax

from ..errors import EncodingError
from .definition import make_call, register_op

COPY = "relax.hetero.copy"


def copy(x: relax.Expr) -> relax.Call:
    """Copy a tensor to a new one, which shares its memory with no other.

    Parameters
    ----------
    x : relax.Expr
        A tensor.

    Returns
    -------
    relax.Call
        Copy of the operand's type.

    Raises
    ------
    EncodingError
        If the operand is not a Relax expression, or, once types are inferred, not a tensor.
    """
    return make_call(COPY, [x], None)


def infer_copy(call: relax.Call, _ctx: relax.BlockBuilder) -> relax.TensorType:
    """The type of `copy`; EncodingError for an operand that is not a tensor."""
    if not isinstance(call.args[0].ty, relax.TensorType):
        raise EncodingError(f"{COPY}: operand 0 is a {call.args[0].ty}, expected a tensor")
    return call.args[0].ty


register_op(COPY, copy, infer_copy)
