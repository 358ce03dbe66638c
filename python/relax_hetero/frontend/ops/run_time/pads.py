"""Dynamic pads as a vector over all axes: before each axis, then after each axis."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax, te, tirx

from ..node import Node, Position, const
from ..required_sizes import as_expr, require_shape
from .numbers import dims_of_vector, sizes_of
from .run_time_axes import axes_input, from_front


def pads_of_named_axes(node: Node, rank: int) -> relax.Expr:
    """Scatter the pads of a `Pad` node with dynamic axes to all axes."""
    axes, count = axes_input(node, 3, rank)
    pad_vector = require_shape(node, node.tensor(1), [2 * count], "its pads")

    def element(i: Position, pads: te.Tensor, named: te.Tensor) -> tirx.Expr:
        axis, is_after = tirx.indexmod(i[0], as_expr(rank)), i[0] >= rank
        amounts = (
            tirx.Select(
                from_front(named, k, rank) == axis,
                tirx.Select(is_after, pads(count + k), pads(k)).astype("int64"),
                as_expr(0),
            )
            for k in range(count)
        )
        return sum(amounts, as_expr(0))

    return node.kernel("pads", element, pad_vector, axes, shape=[2 * rank])


def pads_to(node: Node, data: relax.Expr, sizes: relax.Expr, axes: Sequence[int], is_centered: bool) -> relax.Expr:
    """The pads that give axes other sizes: after each, or evenly on both sides with an odd element after."""
    rank = node.rank(data)
    for size in dims_of_vector(node, sizes, "target"):
        node.require(as_expr(size) >= 0, f"has a size of {size}")

    def element(i: Position, target_sizes: te.Tensor, own_sizes: te.Tensor) -> tirx.Expr:
        axis = tirx.indexmod(i[0], as_expr(rank))
        differences = ((d, target_sizes(k).astype("int64") - own_sizes(d)) for k, d in enumerate(axes))
        change = sum((tirx.Select(axis == d, amount, as_expr(0)) for d, amount in differences), as_expr(0))
        before = tirx.truncdiv(change, as_expr(2)) if is_centered else as_expr(0)
        return tirx.Select(i[0] < rank, before, change - before)

    if not axes:
        return const([0] * (2 * rank), "int64")
    return node.kernel("pads", element, sizes, sizes_of(node, data), shape=[2 * rank])
