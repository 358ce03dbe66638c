"""Extents, offsets and numbers of commands, which are text in plain data, as expressions."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

from tvm import tirx

from ...artifact.signature import Dim
from ..core.builder import Expr

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: tirx.floordiv,
    ast.Mod: tirx.floormod,
}
_CALLS = {"min": tirx.min, "max": tirx.max}


def dim_value(dim: Dim, parameters: Mapping[str, tirx.Var]) -> Expr:
    """A number, or text in the grammar of `artifact.dims`, as an int64 expression.

    Parameters
    ----------
    parameters : mapping of str to Var
        Variables by the names in the text.
    """
    if isinstance(dim, int):
        return tirx.IntImm("int64", dim)
    return _value(ast.parse(dim, mode="eval").body, parameters)


def _value(node: ast.expr, parameters: Mapping[str, tirx.Var]) -> Expr:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return tirx.IntImm("int64", node.value)
    if isinstance(node, ast.Name):
        return parameters[node.id]
    if isinstance(node, ast.BinOp):
        return _BINARY[type(node.op)](_value(node.left, parameters), _value(node.right, parameters))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return tirx.IntImm("int64", 0) - _value(node.operand, parameters)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return reduce(_CALLS[node.func.id], [_value(part, parameters) for part in node.args])
    raise ValueError(f"not a dimension: {ast.dump(node)}")
