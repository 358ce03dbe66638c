"""Floats that a program computes from sizes, and from numbers that it reads: scalars of float64."""

from __future__ import annotations

from functools import reduce
from typing import Any

from tvm import relax

from ..ops.node import const
from .node import TorchNode

_OPERATIONS: dict[str, Any] = {
    "Add": relax.op.add,
    "Mul": relax.op.multiply,
    "Pow": relax.op.power,
    "FloatPow": relax.op.power,
    "PowByNatural": relax.op.power,
    "IntTrueDiv": relax.op.divide,
    "FloatTrueDiv": relax.op.divide,
    "Max": relax.op.maximum,
    "Min": relax.op.minimum,
    "ToFloat": lambda a: a,
    "Identity": lambda a: a,
    "Abs": relax.op.abs,
    "OpaqueUnaryFn_sqrt": relax.op.sqrt,
    "OpaqueUnaryFn_exp": relax.op.exp,
    "OpaqueUnaryFn_log": relax.op.log,
    "OpaqueUnaryFn_cos": relax.op.cos,
    "OpaqueUnaryFn_sin": relax.op.sin,
    "OpaqueUnaryFn_tanh": relax.op.tanh,
}


def float_scalar(node: TorchNode, value: Any) -> relax.Expr:
    """Sympy's arithmetic as ops.

    Raises
    ------
    FrontendError
        If there is no op for a part of it.
    """
    kind = type(value).__name__
    if value.is_Symbol and str(value) in node.sizes.read:
        return node.cast(node.sizes.read[str(value)][1], "float64")
    if value.is_Integer or value.is_Symbol:
        return node.cast(node.number(node.sizes.expr(value)), "float64")
    if value.is_number:
        return const(float(value), "float64")
    if kind not in _OPERATIONS:
        raise node.refusal(f"the number {value} is computed by {kind}, which cannot be imported")
    operands = [float_scalar(node, part) for part in value.args]
    if len(operands) == 1:
        return node.emit(_OPERATIONS[kind](*operands))
    return reduce(lambda a, b: node.emit(_OPERATIONS[kind](a, b)), operands)
