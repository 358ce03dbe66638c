"""Scales and zero points of quantized tensors; operations on constants are folded."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax

from .elementwise import cast
from .node import Dim, Node, as_constant, const, dtype_of
from .required_sizes import require_equal

INTEGER_RANGES = {"uint8": (0, 255), "int8": (-128, 127), "uint16": (0, 65535), "int16": (-32768, 32767)}
"""Minimum and maximum of the integer types of quantized tensors."""


def along(node: Node, parameter: relax.Expr, shape: list[Dim], dtype: str) -> relax.Expr:
    """Cast a scale or zero point, and make it broadcast with data of `shape`.

    It has one number per tensor, per index of the node's `axis`, or per block of `block_size` of these. Raises
    FrontendError if it has another shape, or blocks are along a symbolic dimension.
    """
    return _broadcast(node, as_type(node, parameter, dtype), shape)


def as_type(node: Node, parameter: relax.Expr, dtype: str) -> relax.Expr:
    """Cast; constants are folded."""
    array = as_constant(parameter)
    if array is None or dtype_of(parameter) not in ("float32", *INTEGER_RANGES) or dtype not in ("float32", "int32"):
        return cast(node, parameter, dtype)
    return const(array.astype(dtype))


def reshaped(node: Node, parameter: relax.Expr, shape: Sequence[int]) -> relax.Expr:
    """Reshape; constants are folded."""
    array = as_constant(parameter)
    if array is not None and dtype_of(parameter) in ("float32", "int32", *INTEGER_RANGES):
        return const(array.reshape(shape))
    return node.emit(relax.op.reshape(parameter, shape))


def check_zero_point(node: Node, scale: int, point: int) -> None:
    """Check the zero point, input `point`, against the scale, input `scale`.

    Raises FrontendError if it is neither one number nor has the scale's shape.
    """
    if not node.has(point):
        return
    point_shape, scale_shape = (node.shape(node.tensor(index)) for index in (point, scale))
    if point_shape not in ([], [1]) and [str(dim) for dim in point_shape] != [str(dim) for dim in scale_shape]:
        raise node.refusal(
            f"found a zero point of shape {point_shape}, expected one number or {scale_shape}, the scale's shape"
        )


def is_zero(parameter: relax.Expr) -> bool:
    """Return whether it is constant and all zero."""
    array = as_constant(parameter)
    return array is not None and not array.any()


def _broadcast(node: Node, parameter: relax.Expr, shape: list[Dim]) -> relax.Expr:
    rank = len(shape)
    parameter_dims = node.static_shape(parameter)
    if parameter_dims in ([], [1]):
        return reshaped(node, parameter, ()) if parameter_dims else parameter
    axis = node.axis(node.attribute("axis", 1), rank)
    block = node.attribute("block_size", 0)
    if block:
        repeated = node.emit(relax.op.repeat(parameter, block, axis))
        size = shape[axis]
        if not isinstance(size, int):
            raise node.refusal("blocks along a symbolic dimension cannot be imported")
        for position, (count, dim) in enumerate(zip(parameter_dims, shape, strict=True)):
            num_blocks = -(-size // block) if position == axis else dim
            require_equal(node, num_blocks, count, f"axis {position} of its input needs scales for")
        if parameter_dims[axis] * block == size:
            return repeated
        return node.emit(relax.op.strided_slice(repeated, [axis], [0], [size]))
    if len(parameter_dims) != 1:
        raise node.refusal(f"scale or zero point of shape {parameter_dims} without block_size")
    require_equal(node, shape[axis], parameter_dims[0], f"axis {axis}, which has a scale or zero point each, has")
    return reshaped(node, parameter, [parameter_dims[0] if i == axis else 1 for i in range(rank)])
