"""Softmax and normalizations."""

from __future__ import annotations

from dataclasses import replace

from tvm import relax, te, tirx

from .elementwise import HALF, cast, widened
from .node import Dim, Node, Position, const, dtype_of
from .reductions import index_of_extreme, largest_along
from .required_sizes import require_fits, require_shape, with_sizes_of
from .slicing import slice_axes
from .table import convert_by_stock, converts


@converts("Softmax")
def softmax(node: Node) -> relax.Expr:
    """Softmax along one axis (before opset 13: along all axes from it on); half precision is summed in float32."""
    data = node.tensor(0)
    dtype = dtype_of(data)
    if dtype not in HALF or node.opset < 13:
        return convert_by_stock(node)
    axis = [node.axis(node.attribute("axis", -1), node.rank(data))]
    shifted = node.emit(data - largest_along(node, data, axis))
    exponentials = node.emit(relax.op.exp(shifted))
    total = node.emit(relax.op.sum(cast(node, exponentials, "float32"), axis, keepdims=True))
    return node.emit(exponentials / cast(node, total, dtype))


@converts("Hardmax")
def hardmax(node: Node) -> relax.Expr:
    """One at the first largest element of an axis, zeros elsewhere; before opset 13 axes are flattened first."""
    data = node.tensor(0)
    dims = node.shape(data)
    axis = node.axis(node.attribute("axis", -1 if node.opset >= 13 else 1), len(dims))
    value = data
    if node.opset < 13:
        parts: list[Dim] = [1, 1]
        for position, dim in enumerate(dims):
            parts[position >= axis] = parts[position >= axis] * dim
        value, axis = node.emit(relax.op.reshape(data, parts)), 1
    largest = node.builder.normalize(index_of_extreme(node, value, axis, keepdims=True, last=False, largest=True))

    def element(i: Position, x: te.Tensor, index: te.Tensor) -> tirx.Expr:
        is_first = tirx.Cast("int64", i[axis]) == index(*i[:axis], 0, *i[axis + 1 :])
        return tirx.Select(is_first, tirx.const(1, str(x.dtype)), tirx.const(0, str(x.dtype)))

    result = node.kernel("hardmax", element, value, largest)
    return result if value is data else node.emit(relax.op.reshape(result, dims))


def _moments(node: Node, data: relax.Expr, axes: list[int]) -> tuple[relax.Expr, relax.Expr, relax.Expr]:
    """Mean, centred data and population variance over `axes`, which are kept."""
    mean = node.emit(relax.op.mean(data, axes, keepdims=True))
    centred = node.emit(data - mean)
    variance = node.emit(relax.op.mean(centred * centred, axes, keepdims=True))
    return mean, centred, variance


def _inverse_deviation(node: Node, variance: relax.Expr, epsilon: float) -> relax.Expr:
    stable = node.emit(variance + const(epsilon, dtype_of(variance)))
    return node.emit(const(1, dtype_of(variance)) / relax.op.sqrt(stable))


@converts("LayerNormalization")
def layer_normalization(node: Node) -> relax.Expr:
    """Layer norm from `axis` on, with statistics in float32 (`stash_type`), which are outputs 1 and 2."""
    data, scale = node.tensor(0), node.tensor(1)
    dtype, rank = dtype_of(data), node.rank(data)
    first = node.axis(node.attribute("axis", -1), rank)
    axes = list(range(first, rank))
    scale = _affine(node, scale, data, first, "its scale")
    bias = _affine(node, node.tensor(2), data, first, "its bias") if node.has(2) else None
    epsilon = node.attribute("epsilon", 1e-5)
    data = with_sizes_of(node, data, scale, first) if node.rank(scale) == len(axes) else data
    spans_axes = node.rank(scale) == len(axes) and (bias is None or node.rank(bias) == len(axes))
    if node.num_outputs == 1 and dtype == "float32" and spans_axes and first > 0:
        shift = bias if bias is not None else node.emit(relax.op.zeros_like(scale))
        return node.emit(relax.op.nn.layer_norm(data, scale, shift, axes, epsilon))
    mean, centred, variance = _moments(node, widened(node, data), axes)
    inverse = _inverse_deviation(node, variance, epsilon)
    result = node.emit(cast(node, node.emit(centred * inverse), dtype) * scale)
    if bias is not None:
        result = node.emit(result + bias)
    return node.outputs([result, mean, inverse])


def _affine(node: Node, value: relax.Expr, data: relax.Expr, first: int, subject: str) -> relax.Expr:
    """Require that a scale or bias fits the axes from `first` on; it may broadcast along static axes of size 1."""
    dims = node.shape(data)
    value_dims = node.shape(value)
    if len(value_dims) != len(dims) - first or any(isinstance(dim, int) and dim == 1 for dim in value_dims):
        require_fits(node, value, dims, subject)
        return value
    return require_shape(node, value, dims[first:], subject)


@converts("RMSNormalization")
def rms_normalization(node: Node) -> relax.Expr:
    """x / sqrt(mean(x * x) + epsilon) * scale from `axis` on, with the quotient in float32."""
    data = node.tensor(0)
    rank = node.rank(data)
    axes = list(range(node.axis(node.attribute("axis", -1), rank), rank))
    scale = _affine(node, node.tensor(1), data, axes[0], "its scale")
    data = with_sizes_of(node, data, scale, axes[0]) if node.rank(scale) == len(axes) else data
    wide = widened(node, data)
    square = node.emit(relax.op.mean(wide * wide, axes, keepdims=True))
    inverse = _inverse_deviation(node, square, node.attribute("epsilon", 1e-5))
    normal = cast(node, node.emit(wide * inverse), dtype_of(data))
    return node.emit(normal * scale)


@converts("GroupNormalization")
def group_normalization(node: Node) -> relax.Expr:
    """Group norm in float32; scale and bias are per group before opset 21, then per channel."""
    data = node.tensor(0)
    dims = node.shape(data)
    groups, channels = node.attribute("num_groups"), dims[1]
    if not isinstance(channels, int) or channels % groups:
        raise node.refusal(f"{channels} channels do not divide into {groups} groups")
    grouped = node.emit(relax.op.reshape(widened(node, data), [dims[0], groups, channels // groups, *dims[2:]]))
    _, centred, variance = _moments(node, grouped, list(range(2, len(dims) + 1)))
    inverse = _inverse_deviation(node, variance, node.attribute("epsilon", 1e-5))
    normal = cast(node, node.emit(centred * inverse), dtype_of(data))
    length = groups if node.opset < 21 else channels
    vectors = [require_shape(node, node.tensor(i), [length], f"input {i}") for i in (1, 2)]
    if node.opset < 21:
        affine = [node.per_channel(vector, len(dims) + 1) for vector in vectors]
        return node.emit(relax.op.reshape(node.emit(normal * affine[0] + affine[1]), dims))
    flat = node.emit(relax.op.reshape(normal, dims))
    affine = [node.per_channel(vector, len(dims)) for vector in vectors]
    return node.emit(flat * affine[0] + affine[1])


@converts("InstanceNormalization")
def instance_normalization(node: Node) -> relax.Expr:
    """Normalize each channel of each sample."""
    data = node.tensor(0)
    rank, dtype = node.rank(data), dtype_of(data)
    vectors = [require_shape(node, node.tensor(i), [node.shape(data)[1]], f"input {i}") for i in (1, 2)]
    data = with_sizes_of(node, data, vectors[0], 1)
    _, centred, variance = _moments(node, widened(node, data), list(range(2, rank)))
    inverse = _inverse_deviation(node, variance, node.attribute("epsilon", 1e-5))
    normal = cast(node, node.emit(centred * inverse), dtype)
    scaled = node.emit(normal * node.per_channel(vectors[0], rank))
    return node.emit(scaled + node.per_channel(vectors[1], rank))


@converts("BatchNormalization")
def batch_normalization(node: Node) -> relax.Expr:
    """Batch norm by running statistics; in training mode by the batch's, which update the running ones."""
    if not node.attribute("is_test", 1):
        raise node.refusal("is_test=0 asks for training, expected 1")
    if not node.attribute("spatial", 1):
        return _normalize_by_element(node)
    channels = node.shape(node.tensor(0))[1]
    vectors = [require_shape(node, node.tensor(i), [channels], f"input {i}") for i in range(1, 5)]
    node = replace(node, inputs=[with_sizes_of(node, node.tensor(0), vectors[0], 1), *vectors])
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
    outputs = [cast(node, node.emit(node.emit(centred * inverse * scale) + shift), dtype)]
    momentum = node.attribute("momentum", 0.9)
    for index, current in ((3, mean), (4, variance)):
        running = node.tensor(index)
        weighted_running = node.emit(widened(node, running) * const(momentum, dtype_of(current)))
        flat = relax.op.reshape(current, (-1,))
        weighted_current = node.emit(flat * const(1 - momentum, dtype_of(current)))
        outputs.append(cast(node, node.emit(weighted_running + weighted_current), dtype_of(running)))
    return node.outputs(outputs)


def _normalize_by_element(node: Node) -> relax.Expr:
    """Batch norm with statistics for each element of an image, before opset 9."""
    if node.num_outputs > 1:
        raise node.refusal(f"asks for {node.num_outputs} outputs with spatial=0, which only training has")
    data = node.tensor(0)
    parts = [require_shape(node, node.tensor(i), node.shape(data)[1:], f"input {i}") for i in range(1, 5)]
    scale, shift, mean, variance = (widened(node, part) for part in parts)
    factor = node.emit(_inverse_deviation(node, variance, node.attribute("epsilon", 1e-5)) * scale)
    return cast(node, node.emit(node.emit(widened(node, data) - mean) * factor + shift), dtype_of(data))


@converts("MeanVarianceNormalization")
def mean_variance_normalization(node: Node) -> relax.Expr:
    """(x - mean) / (deviation + 1e-9) over `axes`, by default all but the channels of an image.

    Before opset 9, attributes include the channels in the axes and disable the division.
    """
    data = node.tensor(0)
    default = (1, 2, 3) if node.attribute("across_channels", 0) else (2, 3)
    axes = node.attribute("axes", (0, 2, 3)) if node.opset >= 9 else default
    axes = [node.axis(axis, node.rank(data)) for axis in axes]
    _, centred, variance = _moments(node, widened(node, data), axes)
    if not node.attribute("normalize_variance", 1):
        return cast(node, centred, dtype_of(data))
    stable = relax.op.sqrt(variance) + const(1e-9, dtype_of(variance))
    return cast(node, node.emit(centred / stable), dtype_of(data))


@converts("LpNormalization")
def lp_normalization(node: Node) -> relax.Expr:
    """x divided by its 1-norm or 2-norm along an axis; 0 if the norm is 0."""
    data = node.tensor(0)
    order = node.attribute("p", 2)
    if order not in (1, 2):
        raise node.refusal(f"p is {order}, expected 1 or 2")
    axis = [node.axis(node.attribute("axis", -1), node.rank(data))]
    wide = widened(node, data)
    powers = node.emit(relax.op.abs(wide) if order == 1 else wide * wide)
    norm = node.emit(relax.op.sum(powers, axis, keepdims=True))
    if order == 2:
        norm = node.emit(relax.op.sqrt(norm))
    is_zero = node.emit(relax.op.equal(norm, const(0, dtype_of(norm))))
    divisor = node.emit(relax.op.where(is_zero, const(1, dtype_of(norm)), norm))
    quotient = relax.op.where(is_zero, const(0, dtype_of(norm)), wide / divisor)
    return cast(node, node.emit(quotient), dtype_of(data))


@converts("LRN")
def local_response_normalization(node: Node) -> relax.Expr:
    """x / (bias + alpha / size * sum of squares over `size` neighbouring channels) ** beta."""
    data = node.tensor(0)
    channels, rank = node.shape(data)[1], node.rank(data)
    size, dtype = node.attribute("size"), dtype_of(data)
    node.check_ops(2 * size)
    before = (size - 1) // 2
    # A sum of shifted slices rather than a kernel, so that layout passes can move the channel axis.
    widths = [0, 0, before, size - 1 - before, *[0, 0] * (rank - 2)]
    padded = node.emit(relax.op.nn.pad(data * data, widths))
    squares: relax.Expr | None = None
    for offset in range(size):
        part = slice_axes(node, padded, {1: (offset, channels, 1)})
        squares = part if squares is None else node.emit(squares + part)
    alpha = const(node.attribute("alpha", 1e-4) / size, dtype)
    scaled_squares = node.emit(squares * alpha + const(node.attribute("bias", 1.0), dtype))
    beta = node.attribute("beta", 0.75)
    if beta == 0.75:  # x ** 0.75 as two roots, much cheaper than a power
        root = node.emit(relax.op.sqrt(scaled_squares))
        divisor = node.emit(root * relax.op.sqrt(root))
    else:
        divisor = node.emit(scaled_squares ** const(beta, dtype))
    return node.emit(data / divisor)
