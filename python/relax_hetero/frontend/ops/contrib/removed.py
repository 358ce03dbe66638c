"""Ops that the standard domain had on trial before opset 10; ONNX Runtime has kept them, and old models have them."""

from __future__ import annotations

import numpy as np
from tvm import relax

from ..node import Node, const, dtype_of
from ..required_sizes import as_expr, require_equal
from ..slicing import cut
from ..table import convert_node, converts


def _line(node: Node, data: relax.Expr, factor: float, offset: float) -> relax.Expr:
    dtype = dtype_of(data)
    scaled = node.emit(relax.op.multiply(data, const(factor, dtype)))
    return node.emit(relax.op.add(scaled, const(offset, dtype)))


@converts("Affine")
def affine(node: Node) -> relax.Expr:
    """alpha * x + beta."""
    return _line(node, node.tensor(0), node.attribute("alpha", 1.0), node.attribute("beta", 0.0))


@converts("Scale")
def scale(node: Node) -> relax.Expr:
    """scale * x."""
    data = node.tensor(0)
    return node.emit(relax.op.multiply(data, const(node.attribute("scale", 1.0), dtype_of(data))))


@converts("ImageScaler")
def image_scaler(node: Node) -> relax.Expr:
    """scale * x + bias, which has a number for each channel."""
    data = node.tensor(0)
    if node.rank(data) != 4:
        raise node.refusal(f"found an input of rank {node.rank(data)}, expected 4")
    bias = np.array(node.attribute("bias", ()), "float64")
    require_equal(node, node.shape(data)[1], bias.size, "axis 1 of its input, the channels, has")
    scaled = node.emit(relax.op.multiply(data, const(node.attribute("scale", 1.0), dtype_of(data))))
    return node.emit(relax.op.add(scaled, const(bias.reshape(1, -1, 1, 1), dtype_of(data))))


@converts("ScaledTanh")
def scaled_tanh(node: Node) -> relax.Expr:
    """alpha * tanh(beta * x)."""
    data = node.tensor(0)
    dtype = dtype_of(data)
    inner = node.emit(relax.op.multiply(data, const(node.attribute("beta"), dtype)))
    return node.emit(relax.op.multiply(relax.op.tanh(inner), const(node.attribute("alpha"), dtype)))


@converts("ParametricSoftplus")
def parametric_softplus(node: Node) -> relax.Expr:
    """alpha * log(1 + exp(beta * x))."""
    data = node.tensor(0)
    dtype = dtype_of(data)
    inner = node.emit(relax.op.multiply(data, const(node.attribute("beta"), dtype)))
    soft = node.builder.normalize(convert_node(node.as_op("Softplus", [inner])))
    return node.emit(relax.op.multiply(soft, const(node.attribute("alpha"), dtype)))


@converts("Crop")
def crop(node: Node) -> relax.Expr:
    """An image without its `border` (left, top, right, bottom), or `scale` (height, width) of it from there on."""
    data = node.tensor(0)
    border, size = list(node.attribute("border", ())), list(node.attribute("scale", ()))
    if node.rank(data) != 4 or len(border) != 4 or len(size) not in (0, 2) or min(border) < 0:
        raise node.refusal(
            f"found an input of rank {node.rank(data)}, a border of {border} and a scale of {size}; expected an image "
            "of rank 4, 4 numbers, and 2 or none"
        )
    dims = node.shape(data)
    taken = {}
    for place, axis in enumerate((2, 3)):
        start, end = border[1 - place], border[3 - place]
        count = size[place] if size else dims[axis] - start - end
        node.require(
            as_expr(dims[axis]) >= as_expr(start + count), f"an image of {dims[axis]} is smaller than its crop"
        )
        node.require(as_expr(count) > 0, f"its border leaves nothing of {dims[axis]}")
        taken[axis] = (start, count, 1)
    return cut(node, data, taken)


@converts("DynamicSlice")
def dynamic_slice(node: Node) -> relax.Expr:
    """As Slice, which took its numbers as inputs from opset 10 on."""
    return convert_node(node.as_op("Slice", node.inputs, 10))
