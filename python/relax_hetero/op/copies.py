"""The operator of copies: ``relax.hetero.copy``, in TVMScript ``R.hetero.copy``.

Relax has no op for "the same numbers in memory of their own": each that moves nothing may share its operand's memory.
IsolateWrites makes copies where a kernel in place must not be seen by others; LowerTransfers makes transfers to the
device where the value is of them.
"""

from __future__ import annotations

from tvm import relax

from ..errors import EncodingError
from .definition import make_call, register_op

COPY = "relax.hetero.copy"


def copy(x: relax.Expr) -> relax.Call:
    """The numbers of a tensor in a new tensor, which shares memory with nothing.

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
        If the operand is no Relax expression, or, once types are inferred, no tensor.
    """
    return make_call(COPY, [x], None)


def infer_copy(call: relax.Call, _ctx: relax.BlockBuilder) -> relax.TensorType:
    """The type of `copy`; EncodingError for an operand that is no tensor."""
    if not isinstance(call.args[0].ty, relax.TensorType):
        raise EncodingError(f"{COPY}: operand 0 is a {call.args[0].ty}, expected a tensor")
    return call.args[0].ty


register_op(COPY, copy, infer_copy)
