"""Conversion of small integer tensors to symbolic sizes.

This is the only way in which a dynamic value becomes a size: the model computes a vector, the host reads it, and a
``match_cast`` binds its numbers to symbols. Requirements on the symbols are checked directly after it.
"""

from __future__ import annotations

import tvm
from tvm import relax, tirx

from ..node import Dim, Node, as_constant, as_dim, dtype_of
from ..required_sizes import as_expr


def dims_at_run_time(node: Node, vector: relax.Expr, prefix: str) -> list[tirx.Expr]:
    """Symbolic sizes for the values of a vector of integers of static length.

    Constants among them, as in ``Concat(computed, [64])``, stay constants. Values that may be negative can be used in
    requirements only, because passes assume that sizes of tensors are not negative.
    """
    constants = written_numbers(node, vector)
    if dtype_of(vector) != "int64":
        vector = node.emit(relax.op.astype(vector, "int64"))
    shape_value = node.emit(relax.op.tensor_to_shape(vector))
    dims = [tirx.Var(f"{prefix}_{i}", "int64") for i in range(len(constants))]
    node.builder.match_cast(shape_value, relax.ShapeType(dims))
    return [dim if number is None else as_expr(number) for dim, number in zip(dims, constants, strict=True)]


def written_numbers(node: Node, vector: relax.Expr) -> list[Dim | None]:
    """The numbers of a vector of static length that are constants or symbolic sizes at import, None for others.

    It looks through concatenations and casts.
    """
    (length,) = node.static_shape(vector)
    constant = as_constant(vector)
    if constant is not None:
        return [int(number) for number in constant]
    value = node.builder.lookup_binding(vector) if isinstance(vector, relax.Var) else vector
    name = str(value.op.name) if isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op) else ""
    if name == "relax.concat" and isinstance(value.args[0], relax.Tuple):
        return [number for part in value.args[0].fields for number in written_numbers(node, part)]
    if name == "relax.astype" and dtype_of(vector) == "int64":
        return written_numbers(node, value.args[0])
    if name == "relax.shape_to_tensor" and isinstance(value.args[0], relax.ShapeExpr):
        return [as_dim(dim) for dim in value.args[0].values]
    return [None] * length


def dims_of_vector(node: Node, values: relax.Expr, prefix: str) -> list[Dim]:
    """The numbers of a vector of static length, symbolic if it is not constant."""
    constant = as_constant(values)
    if constant is not None:
        return [int(number) for number in constant]
    return [as_dim(dim) for dim in dims_at_run_time(node, values, prefix)]


def require_axes(node: Node, axes: relax.Expr, rank: int) -> None:
    """Require that axes are valid for a rank, and distinct."""
    values = dims_of_vector(node, axes, "axis")
    for axis in values:
        if isinstance(axis, int):
            node.axis(axis, rank)
        else:
            node.require(tirx.all(axis >= -rank, axis < rank), f"an axis is out of range for rank {rank}")
    from_front = [tirx.Select(as_expr(axis) < 0, as_expr(axis) + rank, as_expr(axis)) for axis in values]
    for position, axis in enumerate(from_front):
        for other in from_front[:position]:
            node.require(tirx.NE(axis, other), "names an axis twice")


def sizes_of(node: Node, value: relax.Expr) -> relax.Expr:
    """The shape of a tensor as an int64 vector."""
    return node.emit(relax.op.shape_to_tensor(relax.op.shape_of(value)))
