"""Relax ops of scalar functions that Relax itself lacks: ``relax.hetero.mish``, in TVMScript ``R.hetero.mish``.

Each row of `encoding.functions` with an op ``hetero.*`` gets one. An op that is not fused into another kernel is
legalized by the formula of its row.
"""

from __future__ import annotations

from operator import attrgetter

from tvm import relax

from ..encoding.functions import FUNCTIONS
from ..errors import EncodingError
from .definition import make_call, register_op


def apply_function(name: str, *operands: relax.Expr) -> relax.Call:
    """Call the Relax op that computes a function of expressions.

    Parameters
    ----------
    name : str
        A name of `FUNCTIONS`.
    operands : relax.Expr or number or str
        Tensors, then the function's parameters.
    """
    function = FUNCTIONS[name]
    if function.num_params:
        return attrgetter(function.op)(relax.op)(*operands)
    return make_call(f"relax.{function.op}", operands, None)


def _infer(call: relax.Call, _ctx: relax.BlockBuilder) -> relax.TensorType:
    (operand,) = call.args
    if not isinstance(operand.ty, relax.TensorType) or "float" not in str(operand.ty.dtype or "float"):
        raise EncodingError(f"{call.op.name}: the operand is a {operand.ty}, expected a tensor of floats")
    return operand.ty


def _register(name: str) -> None:
    def call(x: relax.Expr) -> relax.Call:
        return apply_function(name, x)

    call.__name__ = name
    register_op(f"relax.{FUNCTIONS[name].op}", call, _infer)


for _name, _function in FUNCTIONS.items():
    if _function.op.startswith("hetero."):
        _register(_name)
