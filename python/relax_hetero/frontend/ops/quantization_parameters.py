"""Scales and zero points of quantized tensors; constants are cast and reshaped at import."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax

from .elementwise import cast
from .node import Dim, Node, as_constant, const, dtype_of
from .required_sizes import require_equal

INTEGER_RANGES = {"uint8": (0, 255), "int8": (-128, 127), "uint16": (0, 65535), "int16": (-32768, 32767)}
"""Least and greatest numbers of the types that tensors are quantized to."""


def along(node: Node, parameter: relax.Expr, shape: list[Dim], dtype: str) -> relax.Expr:
    """A scale or zero point of type `dtype`, made to broadcast with data of `shape`.

    It is one number, or one for every index of the node's `axis`, or one for every block of `block_size` of them.

    Raises
    ------
    FrontendError
        If it has another shape, or blocks lie along a symbolic dimension.
    """
    return _broadcast(node, as_type(node, parameter, dtype), shape)


def as_type(node: Node, parameter: relax.Expr, dtype: str) -> relax.Expr:
    """As `cast`; a constant is cast now."""
    array = as_constant(parameter)
    if array is None or dtype_of(parameter) not in ("float32", *INTEGER_RANGES) or dtype not in ("float32", "int32"):
        return cast(node, parameter, dtype)
    return const(array.astype(dtype))


def reshaped(node: Node, parameter: relax.Expr, shape: Sequence[int]) -> relax.Expr:
    """In another shape; a constant is reshaped now."""
    array = as_constant(parameter)
    if array is not None and dtype_of(parameter) in ("float32", "int32", *INTEGER_RANGES):
        return const(array.reshape(shape))
    return node.emit(relax.op.reshape(parameter, shape))


def check_zero_point(node: Node, scale: int, point: int) -> None:
    """Check the zero point that is input `point` against the scale that is input `scale`.

    Raises
    ------
    FrontendError
        If it is neither one number nor of the scale's shape.
    """
    if not node.has(point):
        return
    found, expected = (node.shape(node.tensor(index)) for index in (point, scale))
    if found not in ([], [1]) and [str(dim) for dim in found] != [str(dim) for dim in expected]:
        raise node.refusal(f"found a zero point of shape {found}, expected one number or {expected}, the scale's shape")


def is_zero(parameter: relax.Expr) -> bool:
    """Return whether it is known to be zero everywhere."""
    array = as_constant(parameter)
    return array is not None and not array.any()


def _broadcast(node: Node, parameter: relax.Expr, shape: list[Dim]) -> relax.Expr:
    rank = len(shape)
    own = node.static_shape(parameter)
    if own in ([], [1]):
        return reshaped(node, parameter, ()) if own else parameter
    axis = node.axis(node.attribute("axis", 1), rank)
    block = node.attribute("block_size", 0)
    if block:
        repeated = node.emit(relax.op.repeat(parameter, block, axis))
        size = shape[axis]
        if not isinstance(size, int):
            raise node.refusal("blocks along a symbolic dimension cannot be imported")
        for position, (count, dim) in enumerate(zip(own, shape, strict=True)):
            wanted = -(-size // block) if position == axis else dim
            require_equal(node, wanted, count, f"axis {position} of its input needs scales for")
        if own[axis] * block == size:
            return repeated
        return node.emit(relax.op.strided_slice(repeated, [axis], [0], [size]))
    if len(own) != 1:
        raise node.refusal(f"scale or zero point of shape {own} without block_size")
    require_equal(node, shape[axis], own[0], f"axis {axis}, which has a scale or zero point each, has")
    return reshaped(node, parameter, [own[0] if i == axis else 1 for i in range(rank)])
