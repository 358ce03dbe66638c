"""Limits on the nesting depth of a module.

Chains may have any length: walks over bindings are loops. An `If` in a branch, a tuple in a tuple and a sum in an
extent are visited by recursion, in C++ too, where a stack overflow ends the process. Modules that nest too deep are
therefore refused before any pass runs.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, tirx

from ...errors import BuildError
from .rewriting import handle, relax_functions, walk_scopes

MAX_NESTED = 64
"""Depth of nested branches, functions, tuples and calls as operands. ONNX files are shallower: protobuf refuses a
hundred nested messages, and a branch takes three."""
MAX_NESTED_EXTENT = 1000  # depth of nested sums and products in one extent


def check_nesting(mod: tvm.IRModule) -> None:
    """Refuse a module that nests too deep.

    Raises BuildError if the nesting is too deep. Names the function and the variable.
    """
    depths: dict[int, int] = {}
    for gv, func in relax_functions(mod):
        _check_branches(gv.name_hint, func)
        for bindings in walk_scopes(func):
            for var in (binding.var for binding in bindings):
                _check_type(gv.name_hint, var, depths)
        for param in func.params:
            _check_type(gv.name_hint, param, depths)


def _check_branches(function: str, func: relax.Function) -> None:
    pending: list[tuple[Any, int, str]] = [(func, 0, "")]
    while pending:
        expr, depth, name = pending.pop()
        if depth > MAX_NESTED:
            raise BuildError(
                f"function {function!r}: {name!r} nests branches, functions, tuples or calls deeper than {MAX_NESTED} "
                "levels: expected a shallower module, such as one that binds inner values to variables, or calls "
                "functions for inner branches"
            )
        if isinstance(expr, relax.Function):
            pending.append((expr.body, depth, name))
        elif isinstance(expr, relax.SeqExpr):
            for block in expr.blocks:
                pending += [(binding.value, depth, binding.var.name) for binding in block.bindings]
            if not isinstance(expr.body, relax.Var):
                pending.append((expr.body, depth + 1, name))
        elif isinstance(expr, relax.If):
            pending += [(branch, depth + 1, name) for branch in (expr.true_branch, expr.false_branch)]
        elif isinstance(expr, relax.Tuple):
            pending += [(field, depth + 1, name) for field in expr.fields if not isinstance(field, relax.Var)]
        elif isinstance(expr, relax.Call):
            pending += [(arg, depth + 1, name) for arg in expr.args if isinstance(arg, (relax.Call, relax.Tuple))]
        elif isinstance(expr, relax.TupleGetItem) and not isinstance(expr.tuple_value, relax.Var):
            pending.append((expr.tuple_value, depth + 1, name))


def _check_type(function: str, var: relax.Var, depths: dict[int, int]) -> None:
    pending = [(var.ty, 0)]
    while pending:
        ty, depth = pending.pop()
        if depth > MAX_NESTED:
            raise BuildError(
                f"function {function!r}: variable {var.name!r} is of tuples in each other, deeper than {MAX_NESTED} "
                "levels: expected a shallower one"
            )
        if isinstance(ty, tvm.ir.TupleType):
            pending += [(field, depth + 1) for field in ty.fields]
        elif isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr):
            for extent in ty.shape.values:
                if not isinstance(extent, (tirx.IntImm, tirx.Var)) and _depth(extent, depths) > MAX_NESTED_EXTENT:
                    raise BuildError(
                        f"function {function!r}: an extent of variable {var.name!r} has more than "
                        f"{MAX_NESTED_EXTENT} sums or products in each other: expected a shorter expression, such as "
                        "n + 1000 for n + 1 + 1 + ..., or a new symbol (match_cast)"
                    )


def _depth(expr: Any, depths: dict[int, int]) -> int:
    """Depth of an expression's operations; `depths` caches those of subexpressions, which extents share."""
    pending = [expr]
    while pending:
        current = pending[-1]
        operands = [operand for name in ("a", "b") if isinstance(operand := getattr(current, name, None), tirx.Expr)]
        pending_parts = [operand for operand in operands if handle(operand) not in depths]
        if pending_parts:
            pending += pending_parts
        else:
            depths[handle(current)] = 1 + max((depths[handle(operand)] for operand in operands), default=0)
            pending.pop()
    return depths[handle(expr)]
