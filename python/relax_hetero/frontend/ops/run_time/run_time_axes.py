"""Dynamic axes: inputs of the graph, or computed by the model.

A kernel over the vector of axes computes the sizes that depend on them, which become symbolic sizes
(`dims_at_run_time`). The tensor is then reshaped so that the following op has static axes: a reduction reduces the last
ones, a cumulative sum the middle one of three.

Invalid axes are refused when they are read.
"""

from __future__ import annotations

import math
from typing import Any

from tvm import relax, te, tirx

from ..node import Dim, Node, Position
from ..required_sizes import any_of, as_expr, equal
from .numbers import dims_at_run_time, dims_of_vector, require_axes, sizes_of


def from_front(axes: te.Tensor, index: int, rank: int) -> tirx.Expr:
    """Non-negative axis `index` of a vector of axes."""
    axis = axes(index).astype("int64")
    return tirx.Select(axis < 0, axis + rank, axis)


def _is_named(axes: te.Tensor, count: int, rank: int, axis: Any) -> tirx.Expr:
    """Condition that an axis is in a vector of axes."""
    return tirx.any(tirx.const(False, "bool"), *(from_front(axes, k, rank) == axis for k in range(count)))


def _named_before(axes: te.Tensor, count: int, rank: int, axis: Any) -> tirx.Expr:
    """Number of named axes before an axis."""
    in_front = (tirx.Select(from_front(axes, k, rank) < axis, as_expr(1), as_expr(0)) for k in range(count))
    return sum(in_front, as_expr(0))


def axes_input(node: Node, index: int, rank: int) -> tuple[relax.Expr, int]:
    """An input of distinct dynamic axes of a tensor of this rank, and their number.

    Raises FrontendError if their number is dynamic.
    """
    axes, count = _vector_of_axes(node, index)
    if count > rank:
        raise node.refusal(f"names {count} axes of a tensor of rank {rank}")
    require_axes(node, axes, rank)
    return axes, count


def new_axes_input(node: Node, index: int, own_rank: int) -> tuple[relax.Expr, int]:
    """Like `axes_input`, for a tensor of `own_rank` axes to which the named axes are added."""
    axes, count = _vector_of_axes(node, index)
    require_axes(node, axes, own_rank + count)
    return axes, count


def _vector_of_axes(node: Node, index: int) -> tuple[relax.Expr, int]:
    """An input of axes, a vector or a scalar, as a vector, and their number."""
    axes = node.tensor(index)
    dims = node.shape(axes)
    count = dims[0] if len(dims) == 1 else 1
    if not isinstance(count, int):
        raise node.refusal("the number of its axes is only known when the model runs")
    return axes if len(dims) == 1 else node.emit(relax.op.reshape(axes, (1,))), count


def with_named_axes_last(node: Node, data: relax.Expr, axes: relax.Expr, count: int) -> relax.Expr:
    """View a tensor of rank r with rank 2r: first the named axes have size 1, then all others.

    A reduction of the last r axes reduces the named axes, and keeps them with size 1.
    """
    rank = node.rank(data)

    def size(i: Position, named: te.Tensor, own_size: te.Tensor) -> tirx.Expr:
        axis = tirx.indexmod(i[0], as_expr(rank))
        is_named = _is_named(named, count, rank, axis)
        remaining = tirx.Select(is_named, as_expr(1), own_size(axis))
        return tirx.Select(i[0] < rank, remaining, tirx.Select(is_named, own_size(axis), as_expr(1)))

    sizes = node.kernel("axis_sizes", size, axes, sizes_of(node, data), shape=[2 * rank])
    dims = dims_at_run_time(node, sizes, "axis_size")

    def element(i: Position, x: te.Tensor) -> tirx.Expr:
        return x(*(i[axis] + i[rank + axis] for axis in range(rank)))

    return node.kernel("named_axes_last", element, data, shape=dims)


def without_named_axes(node: Node, data: relax.Expr, axes: relax.Expr, count: int) -> relax.Expr:
    """Remove the named axes, which must have size 1."""
    dims = node.shape(data)
    rank = len(dims)
    for named in dims_of_vector(node, axes, "axis"):
        for axis, size in enumerate(dims):
            is_other = tirx.all(tirx.NE(as_expr(named), as_expr(axis)), tirx.NE(as_expr(named), as_expr(axis - rank)))
            node.require(any_of([equal(size, 1), is_other]), f"drops axis {axis} of size {size}, expected 1")
    if count == rank:
        return node.emit(relax.op.reshape(data, ()))
    along = te.reduce_axis((0, rank), name="axis")

    def size_of(i: Position, named: te.Tensor, own: te.Tensor) -> tirx.Expr:
        position = along - _named_before(named, count, rank, along)
        is_here = tirx.all(tirx.Not(_is_named(named, count, rank, along)), position == i[0])
        return te.sum(tirx.Select(is_here, own(along), as_expr(0)), axis=along)

    sizes = node.kernel("sizes_left", size_of, axes, sizes_of(node, data), shape=[rank - count])
    return node.emit(relax.op.reshape(data, dims_at_run_time(node, sizes, "size_left")))


def with_new_axes(node: Node, data: relax.Expr, axes: relax.Expr, count: int) -> relax.Expr:
    """Insert axes of size 1 at the named positions of the result."""
    own_rank = node.rank(data)
    rank = own_rank + count
    if own_rank == 0:
        return node.emit(relax.op.reshape(data, [1] * count))

    def size_of(i: Position, named: te.Tensor, own: te.Tensor) -> tirx.Expr:
        position = i[0] - _named_before(named, count, rank, i[0])
        clamped = tirx.max(tirx.min(position, as_expr(own_rank - 1)), as_expr(0))
        return tirx.Select(_is_named(named, count, rank, i[0]), as_expr(1), own(clamped))

    sizes = node.kernel("sizes_beside", size_of, axes, sizes_of(node, data), shape=[rank])
    return node.emit(relax.op.reshape(data, dims_at_run_time(node, sizes, "size_beside")))


def with_named_axis_second(node: Node, data: relax.Expr, axis: relax.Expr) -> relax.Expr:
    """Reshape to three axes: those before the named one, the named one, and those after it."""
    rank = node.rank(data)

    def size_of(i: Position, named: te.Tensor, own: te.Tensor) -> tirx.Expr:
        position = from_front(named, 0, rank)
        parts = []
        for d in range(rank):
            part = tirx.Select(position > d, as_expr(0), tirx.Select(position == d, as_expr(1), as_expr(2)))
            parts.append(tirx.Select(part == i[0], own(d), as_expr(1)))
        return math.prod(parts, start=as_expr(1))

    sizes: list[Dim] = list(
        dims_at_run_time(node, node.kernel("sizes_around", size_of, axis, sizes_of(node, data), shape=[3]), "around")
    )
    return node.emit(relax.op.reshape(data, sizes))
