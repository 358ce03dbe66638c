"""The problem that a call of `R.hetero.block_matmul` states: part of MaterializeEncodings."""

from __future__ import annotations

from typing import Any

from tvm import relax

from ...encoding.expression import Expression
from ...encoding.problem import BlockProductProblem, Epilogue
from ..ir.blocks import same_shape
from ..ir.extents import Symbols
from .stored_tensors import Stored, shape_of


def block_product_problem(call: relax.Call, result: relax.TensorType) -> BlockProductProblem:
    """What a call of `R.hetero.block_matmul` asks of a kernel."""
    symbols = Symbols()
    names = (*(f"b{axis}" for axis in range(len(shape_of(result)) - 2)), "m", "n")
    stored = [Stored.plain(arg.ty) for arg in call.args]
    first = 3 + bool(call.attrs.zeros)
    whole, epilogue = shape_of(result), None
    lhs = stored[0].operand(symbols, (*names[:-1], "k"))
    weights = tuple(one.operand(symbols, ("panel", "row", "column")) for one in stored[1:first])
    expression = Expression.parse(call.attrs.expression)
    if expression != Expression.operand(0):
        maps = [names if same_shape(shape_of(one.ty), whole) else _of_columns(one, whole[-1]) for one in stored[first:]]
        operands = (one.operand(symbols, index_map) for one, index_map in zip(stored[first:], maps, strict=True))
        epilogue = Epilogue(expression, tuple(operands))
    out = Stored.plain(result).operand(symbols, names)
    return BlockProductProblem(lhs, weights, out, int(call.attrs.block), epilogue)


def _of_columns(operand: Stored, columns: Any) -> tuple[str, ...]:
    """The map of one number, or of one for each column."""
    extents = shape_of(operand.ty)
    return ("n",) if same_shape(extents, [columns]) else ("1",) * len(extents)
