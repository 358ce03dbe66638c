"""Operands of ops that broadcast, where a size is only known to be another one or less.

Exporters slice a table of positions by the sequence they are given, ``table[:sequence]``, which has ``min(sequence,
512)`` rows, and add it to something of ``sequence`` rows. That works for at most 512 only: what type inference cannot
know, the model says.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, tirx

from ..symbolic_sizes import SizeIsBounded, is_at_most
from .node import Dim, Node, as_dim

BROADCASTING = frozenset(
    "Add And BitwiseAnd BitwiseOr BitwiseXor Div Equal Greater GreaterOrEqual Less LessOrEqual Max Mean Min Mod Mul Or "
    "Pow Sub Sum Where Xor".split()
)
"""Op types all of whose inputs broadcast to each other."""


def check_bounds(node: Node) -> None:
    """Find a bound of a size in the inputs of a node that broadcasts them all.

    Raises
    ------
    SizeIsBounded
        If an input of ``n`` elements meets one of ``min(n, 512)``: more than 512 were as many as neither.
    """
    shapes = [shape for shape in map(_shape_of, node.inputs) if shape]
    for axis in range(1, max(map(len, shapes), default=0) + 1):
        dims = [shape[-axis] for shape in shapes if len(shape) >= axis]
        for size, bound in filter(None, map(_bound_in, dims)):
            if bound > 1 and any(size.same_as(dim) for dim in dims) and not is_at_most(size, bound):
                raise SizeIsBounded(size, bound)


def _shape_of(value: Any) -> list[Dim] | None:
    is_tensor = isinstance(value, (relax.Var, tvm.ir.GenericConst)) and isinstance(value.ty, relax.TensorType)
    if not is_tensor or not isinstance(value.ty.shape, relax.ShapeExpr):
        return None
    return [as_dim(dim) for dim in value.ty.shape.values]


def _bound_in(dim: Dim) -> tuple[tirx.Var, int] | None:
    """Variable and number where a size is the minimum of these."""
    parts = [as_dim(dim.a), as_dim(dim.b)] if isinstance(dim, tirx.Min) else []
    variables = [part for part in parts if isinstance(part, tirx.Var)]
    numbers = [part for part in parts if isinstance(part, int)]
    return (variables[0], numbers[0]) if variables and numbers else None
