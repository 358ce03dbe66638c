"""Softmax and the normalizations."""

from __future__ import annotations

from tvm import relax, te, tirx

from .elementwise import HALF, cast, widened
from .node import Dim, Node, Position, const, dtype_of
from .reductions import arg_extreme, largest_along
from .table import convert_by_stock, converts


@converts("Softmax")
def softmax(node: Node) -> relax.Expr:
    """Along one axis (before opset 13: along all from the axis on). Half precision is summed in float32."""
    data = node.tensor(0)
    dtype = dtype_of(data)
    if dtype not in HALF or node.opset < 13:
        return convert_by_stock(node)
    axis = [node.axis(node.attribute("axis", -1), node.rank(data))]
    moved = node.emit(relax.op.subtract(data, largest_along(node, data, axis)))
    exponentials = node.emit(relax.op.exp(moved))
    total = node.emit(relax.op.sum(cast(node, exponentials, "float32"), axis, keepdims=True))
    return node.emit(relax.op.divide(exponentials, cast(node, total, dtype)))


@converts("Hardmax")
def hardmax(node: Node) -> relax.Expr:
    """One where the first largest element of an axis is, zeros elsewhere; flattened first before opset 13."""
    data = node.tensor(0)
    dims = node.shape(data)
    axis = node.axis(node.attribute("axis", -1 if node.opset >= 13 else 1), len(dims))
    value = data
    if node.opset < 13:
        parts: list[Dim] = [1, 1]
        for position, dim in enumerate(dims):
            parts[position >= axis] = parts[position >= axis] * dim
        value, axis = node.emit(relax.op.reshape(data, parts)), 1
    found = node.as_op("ArgMax", [value], opset=13, axis=axis, keepdims=1)
    largest = node.builder.normalize(arg_extreme(found))

    def element(i: Position, x: te.Tensor, index: te.Tensor) -> tirx.Expr:
        is_first = tirx.Cast("int64", i[axis]) == index(*i[:axis], 0, *i[axis + 1 :])
        return tirx.Select(is_first, tirx.const(1, str(x.dtype)), tirx.const(0, str(x.dtype)))

    result = node.kernel("hardmax", element, value, largest)
    return result if value is data else node.emit(relax.op.reshape(result, dims))


def _moments(node: Node, data: relax.Expr, axes: list[int]) -> tuple[relax.Expr, relax.Expr, relax.Expr]:
    """Mean, centred data and variance (of the population) over `axes`, which are kept."""
    mean = node.emit(relax.op.mean(data, axes, keepdims=True))
    centred = node.emit(relax.op.subtract(data, mean))
    variance = node.emit(relax.op.mean(relax.op.multiply(centred, centred), axes, keepdims=True))
    return mean, centred, variance


def _inverse_deviation(node: Node, variance: relax.Expr, epsilon: float) -> relax.Expr:
    stable = node.emit(relax.op.add(variance, const(epsilon, dtype_of(variance))))
    return node.emit(relax.op.divide(const(1, dtype_of(variance)), relax.op.sqrt(stable)))


@converts("LayerNormalization")
def layer_normalization(node: Node) -> relax.Expr:
    """From `axis` on; statistics in float32 (`stash_type`), which are outputs 1 and 2 where they are asked for."""
    data, scale = node.tensor(0), node.tensor(1)
    dtype, rank = dtype_of(data), node.rank(data)
    first = node.axis(node.attribute("axis", -1), rank)
    axes = list(range(first, rank))
    epsilon = node.attribute("epsilon", 1e-5)
    spans_axes = node.rank(scale) == len(axes) and (not node.has(2) or node.rank(node.tensor(2)) == len(axes))
    if node.num_outputs == 1 and dtype == "float32" and spans_axes and first > 0:
        shift = node.tensor(2) if node.has(2) else node.emit(relax.op.zeros_like(scale))
        return node.emit(relax.op.nn.layer_norm(data, scale, shift, axes, epsilon))
    mean, centred, variance = _moments(node, widened(node, data), axes)
    inverse = _inverse_deviation(node, variance, epsilon)
    result = node.emit(relax.op.multiply(cast(node, node.emit(relax.op.multiply(centred, inverse)), dtype), scale))
    if node.has(2):
        result = node.emit(relax.op.add(result, node.tensor(2)))
    return node.outputs([result, mean, inverse])


@converts("RMSNormalization")
def rms_normalization(node: Node) -> relax.Expr:
    """x / sqrt(mean(x * x) + epsilon) * scale, from `axis` on, the quotient in float32."""
    data = node.tensor(0)
    rank = node.rank(data)
    axes = list(range(node.axis(node.attribute("axis", -1), rank), rank))
    wide = widened(node, data)
    square = node.emit(relax.op.mean(relax.op.multiply(wide, wide), axes, keepdims=True))
    inverse = _inverse_deviation(node, square, node.attribute("epsilon", 1e-5))
    normal = cast(node, node.emit(relax.op.multiply(wide, inverse)), dtype_of(data))
    return node.emit(relax.op.multiply(normal, node.tensor(1)))


@converts("GroupNormalization")
def group_normalization(node: Node) -> relax.Expr:
    """Channels in groups, each normalized in float32; scale and bias per group before opset 21, then per channel."""
    data = node.tensor(0)
    dims = node.shape(data)
    groups, channels = node.attribute("num_groups"), dims[1]
    if not isinstance(channels, int) or channels % groups:
        raise node.refusal(f"{channels} channels do not divide into {groups} groups")
    grouped = node.emit(relax.op.reshape(widened(node, data), [dims[0], groups, channels // groups, *dims[2:]]))
    _, centred, variance = _moments(node, grouped, list(range(2, len(dims) + 1)))
    inverse = _inverse_deviation(node, variance, node.attribute("epsilon", 1e-5))
    normal = cast(node, node.emit(relax.op.multiply(centred, inverse)), dtype_of(data))
    if node.opset < 21:
        affine = [node.per_channel(node.tensor(i), len(dims) + 1) for i in (1, 2)]
        scaled = node.emit(relax.op.add(relax.op.multiply(normal, affine[0]), affine[1]))
        return node.emit(relax.op.reshape(scaled, dims))
    flat = node.emit(relax.op.reshape(normal, dims))
    affine = [node.per_channel(node.tensor(i), len(dims)) for i in (1, 2)]
    return node.emit(relax.op.add(relax.op.multiply(flat, affine[0]), affine[1]))


@converts("InstanceNormalization")
def instance_normalization(node: Node) -> relax.Expr:
    """Each channel of each sample by itself."""
    data = node.tensor(0)
    rank, dtype = node.rank(data), dtype_of(data)
    _, centred, variance = _moments(node, widened(node, data), list(range(2, rank)))
    inverse = _inverse_deviation(node, variance, node.attribute("epsilon", 1e-5))
    normal = cast(node, node.emit(relax.op.multiply(centred, inverse)), dtype)
    scaled = node.emit(relax.op.multiply(normal, node.per_channel(node.tensor(1), rank)))
    return node.emit(relax.op.add(scaled, node.per_channel(node.tensor(2), rank)))


@converts("BatchNormalization")
def batch_normalization(node: Node) -> relax.Expr:
    """By the statistics given; in training mode by the batch's, which are mixed into the running ones."""
    if node.attribute("spatial", 1) != 1:
        raise node.refusal("spatial=0 (statistics per element) cannot be imported")
    if not node.attribute("training_mode", 0):
        if node.num_outputs > 1:
            raise node.refusal(f"asks for {node.num_outputs} outputs without training_mode")
        return relax.TupleGetItem(node.builder.normalize(convert_by_stock(node)), 0)
    data = node.tensor(0)
    rank, dtype = node.rank(data), dtype_of(data)
    axes = [axis for axis in range(rank) if axis != 1]
    mean, centred, variance = _moments(node, widened(node, data), axes)
    inverse = _inverse_deviation(node, variance, node.attribute("epsilon", 1e-5))
    scale, shift = (node.per_channel(widened(node, node.tensor(i)), rank) for i in (1, 2))
    scaled = node.emit(relax.op.multiply(relax.op.multiply(centred, inverse), scale))
    outputs = [cast(node, node.emit(relax.op.add(scaled, shift)), dtype)]
    momentum = node.attribute("momentum", 0.9)
    for index, current in ((3, mean), (4, variance)):
        running = node.tensor(index)
        kept = node.emit(relax.op.multiply(widened(node, running), const(momentum, dtype_of(current))))
        added = node.emit(relax.op.multiply(relax.op.reshape(current, (-1,)), const(1 - momentum, dtype_of(current))))
        outputs.append(cast(node, node.emit(relax.op.add(kept, added)), dtype_of(running)))
    return node.outputs(outputs)


@converts("MeanVarianceNormalization")
def mean_variance_normalization(node: Node) -> relax.Expr:
    """(x - mean) / (deviation + 1e-9) over `axes`, by default all but the channels of an image."""
    data = node.tensor(0)
    axes = [node.axis(axis, node.rank(data)) for axis in node.attribute("axes", (0, 2, 3))]
    _, centred, variance = _moments(node, widened(node, data), axes)
    stable = relax.op.add(relax.op.sqrt(variance), const(1e-9, dtype_of(variance)))
    return cast(node, node.emit(relax.op.divide(centred, stable)), dtype_of(data))


@converts("LpNormalization")
def lp_normalization(node: Node) -> relax.Expr:
    """x over its 1-norm or 2-norm along an axis; where the norm is 0 the result is 0."""
    data = node.tensor(0)
    order = node.attribute("p", 2)
    if order not in (1, 2):
        raise node.refusal(f"p is {order}, expected 1 or 2")
    axis = [node.axis(node.attribute("axis", -1), node.rank(data))]
    wide = widened(node, data)
    powers = node.emit(relax.op.abs(wide) if order == 1 else relax.op.multiply(wide, wide))
    norm = node.emit(relax.op.sum(powers, axis, keepdims=True))
    if order == 2:
        norm = node.emit(relax.op.sqrt(norm))
    is_zero = node.emit(relax.op.equal(norm, const(0, dtype_of(norm))))
    divisor = node.emit(relax.op.where(is_zero, const(1, dtype_of(norm)), norm))
    quotient = relax.op.where(is_zero, const(0, dtype_of(norm)), relax.op.divide(wide, divisor))
    return cast(node, node.emit(quotient), dtype_of(data))


@converts("LRN")
def local_response_normalization(node: Node) -> relax.Expr:
    """x / (bias + alpha / size * sum of squares over `size` neighbouring channels) ** beta."""
    data = node.tensor(0)
    channels, rank = node.shape(data)[1], node.rank(data)
    size, dtype = node.attribute("size"), dtype_of(data)
    node.check_ops(2 * size)
    before = (size - 1) // 2
    # A sum of shifted slices and not a kernel: the axis of these can move where images lie channels-last.
    widths = [0, 0, before, size - 1 - before, *[0, 0] * (rank - 2)]
    padded = node.emit(relax.op.nn.pad(relax.op.multiply(data, data), widths))
    squares: relax.Expr | None = None
    for offset in range(size):
        part = node.emit(relax.op.strided_slice(padded, [1], [offset], [offset + channels]))
        squares = part if squares is None else node.emit(relax.op.add(squares, part))
    alpha = const(node.attribute("alpha", 1e-4) / size, dtype)
    bias = const(node.attribute("bias", 1.0), dtype)
    grown = node.emit(relax.op.add(relax.op.multiply(squares, alpha), bias))
    beta = node.attribute("beta", 0.75)
    if beta == 0.75:  # x ** 0.75 as two roots, far cheaper than a general power
        root = node.emit(relax.op.sqrt(grown))
        divisor = node.emit(relax.op.multiply(root, relax.op.sqrt(root)))
    else:
        divisor = node.emit(relax.op.power(grown, const(beta, dtype)))
    return node.emit(relax.op.divide(data, divisor))
