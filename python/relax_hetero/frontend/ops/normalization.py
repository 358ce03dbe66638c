"""Softmax and the normalizations."""

from __future__ import annotations

from tvm import relax, te, tirx

from .elementwise import cast
from .node import Dim, Node, const, dtype_of
from .reductions import arg_extreme, largest_along
from .table import convert_by_stock, converts

_HALF = ("float16", "bfloat16")


def _wide(node: Node, value: relax.Expr) -> relax.Expr:
    """`value` in float32 where it is of half precision."""
    return cast(node, value, "float32") if dtype_of(value) in _HALF else value


@converts("Softmax")
def softmax(node: Node) -> relax.Expr:
    """Along one axis (before opset 13: along all from the axis on). Half precision is summed in float32."""
    data = node.tensor(0)
    dtype = dtype_of(data)
    if dtype not in _HALF or node.opset < 13:
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
    found = Node("ArgMax", node.name, 13, node.builder, [value], {"axis": axis, "keepdims": 1}, 1)
    largest = node.builder.normalize(arg_extreme(found))

    def compute(x: te.Tensor, index: te.Tensor) -> te.Tensor:
        def element(*i: tirx.Expr) -> tirx.Expr:
            is_first = tirx.Cast("int64", i[axis]) == index(*i[:axis], 0, *i[axis + 1 :])
            return tirx.Select(is_first, tirx.const(1, str(x.dtype)), tirx.const(0, str(x.dtype)))

        return te.compute(x.shape, element, name="hardmax")

    result = node.builder.emit_te(compute, value, largest, primfunc_name_hint="hardmax")
    return result if value is data else node.emit(relax.op.reshape(result, dims))


def _moments(node: Node, data: relax.Expr, axes: list[int]) -> tuple[relax.Expr, relax.Expr, relax.Expr]:
    """Mean, centred data and variance (of the population) over `axes`, which are kept."""
    mean = node.emit(relax.op.mean(data, axes, keepdims=True))
    centred = node.emit(relax.op.subtract(data, mean))
    variance = node.emit(relax.op.mean(node.emit(relax.op.multiply(centred, centred)), axes, keepdims=True))
    return mean, centred, variance


def _inverse_deviation(node: Node, variance: relax.Expr, epsilon: float) -> relax.Expr:
    stable = node.emit(relax.op.add(variance, const(epsilon, dtype_of(variance))))
    return node.emit(relax.op.divide(const(1, dtype_of(variance)), node.emit(relax.op.sqrt(stable))))


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
    mean, centred, variance = _moments(node, _wide(node, data), axes)
    inverse = _inverse_deviation(node, variance, epsilon)
    result = node.emit(relax.op.multiply(cast(node, node.emit(relax.op.multiply(centred, inverse)), dtype), scale))
    if node.has(2):
        result = node.emit(relax.op.add(result, node.tensor(2)))
    return relax.Tuple([result, mean, inverse][: node.num_outputs]) if node.num_outputs > 1 else result


@converts("RMSNormalization")
def rms_normalization(node: Node) -> relax.Expr:
    """x / sqrt(mean(x * x) + epsilon) * scale, from `axis` on, the quotient in float32."""
    data = node.tensor(0)
    rank = node.rank(data)
    axes = list(range(node.axis(node.attribute("axis", -1), rank), rank))
    wide = _wide(node, data)
    square = node.emit(relax.op.mean(node.emit(relax.op.multiply(wide, wide)), axes, keepdims=True))
    inverse = _inverse_deviation(node, square, node.attribute("epsilon", 1e-5))
    normal = cast(node, node.emit(relax.op.multiply(wide, inverse)), dtype_of(data))
    return node.emit(relax.op.multiply(normal, node.tensor(1)))


def _per_channel(node: Node, vector: relax.Expr, rank: int) -> relax.Expr:
    return node.emit(relax.op.reshape(vector, [1, -1] + [1] * (rank - 2)))


@converts("GroupNormalization")
def group_normalization(node: Node) -> relax.Expr:
    """Channels in groups, each normalized in float32; scale and bias per group before opset 21, then per channel."""
    data = node.tensor(0)
    dims = node.shape(data)
    groups, channels = node.attribute("num_groups"), dims[1]
    if not isinstance(channels, int) or channels % groups:
        raise node.refusal(f"{channels} channels do not divide into {groups} groups")
    grouped = node.emit(relax.op.reshape(_wide(node, data), [dims[0], groups, channels // groups, *dims[2:]]))
    _, centred, variance = _moments(node, grouped, list(range(2, len(dims) + 1)))
    inverse = _inverse_deviation(node, variance, node.attribute("epsilon", 1e-5))
    normal = cast(node, node.emit(relax.op.multiply(centred, inverse)), dtype_of(data))
    if node.opset < 21:
        affine = [_per_channel(node, node.tensor(i), len(dims) + 1) for i in (1, 2)]
        scaled = node.emit(relax.op.add(node.emit(relax.op.multiply(normal, affine[0])), affine[1]))
        return node.emit(relax.op.reshape(scaled, dims))
    flat = node.emit(relax.op.reshape(normal, dims))
    affine = [_per_channel(node, node.tensor(i), len(dims)) for i in (1, 2)]
    return node.emit(relax.op.add(node.emit(relax.op.multiply(flat, affine[0])), affine[1]))


@converts("InstanceNormalization")
def instance_normalization(node: Node) -> relax.Expr:
    """Each channel of each sample by itself."""
    data = node.tensor(0)
    rank, dtype = node.rank(data), dtype_of(data)
    _, centred, variance = _moments(node, _wide(node, data), list(range(2, rank)))
    inverse = _inverse_deviation(node, variance, node.attribute("epsilon", 1e-5))
    normal = cast(node, node.emit(relax.op.multiply(centred, inverse)), dtype)
    scaled = node.emit(relax.op.multiply(normal, _per_channel(node, node.tensor(1), rank)))
    return node.emit(relax.op.add(scaled, _per_channel(node, node.tensor(2), rank)))


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
    mean, centred, variance = _moments(node, _wide(node, data), axes)
    inverse = _inverse_deviation(node, variance, node.attribute("epsilon", 1e-5))
    scale, shift = (_per_channel(node, _wide(node, node.tensor(i)), rank) for i in (1, 2))
    scaled = node.emit(relax.op.multiply(node.emit(relax.op.multiply(centred, inverse)), scale))
    outputs = [cast(node, node.emit(relax.op.add(scaled, shift)), dtype)]
    momentum = node.attribute("momentum", 0.9)
    for index, current in ((3, mean), (4, variance)):
        running = node.tensor(index)
        kept = node.emit(relax.op.multiply(_wide(node, running), const(momentum, dtype_of(current))))
        flat = node.emit(relax.op.reshape(current, (-1,)))
        added = node.emit(relax.op.multiply(flat, const(1 - momentum, dtype_of(current))))
        outputs.append(cast(node, node.emit(relax.op.add(kept, added)), dtype_of(running)))
    return relax.Tuple(outputs[: node.num_outputs]) if node.num_outputs > 1 else outputs[0]


@converts("MeanVarianceNormalization")
def mean_variance_normalization(node: Node) -> relax.Expr:
    """(x - mean) / (deviation + 1e-9) over `axes`, by default all but the channels of an image."""
    data = node.tensor(0)
    axes = [node.axis(axis, node.rank(data)) for axis in node.attribute("axes", (0, 2, 3))]
    _, centred, variance = _moments(node, _wide(node, data), axes)
    deviation = node.emit(relax.op.sqrt(variance))
    stable = node.emit(relax.op.add(deviation, const(1e-9, dtype_of(deviation))))
    return cast(node, node.emit(relax.op.divide(centred, stable)), dtype_of(data))


@converts("LpNormalization")
def lp_normalization(node: Node) -> relax.Expr:
    """x over its 1-norm or 2-norm along an axis; where the norm is 0 the result is 0."""
    data = node.tensor(0)
    order = node.attribute("p", 2)
    if order not in (1, 2):
        raise node.refusal(f"p is {order}, expected 1 or 2")
    axis = [node.axis(node.attribute("axis", -1), node.rank(data))]
    wide = _wide(node, data)
    powers = node.emit(relax.op.abs(wide) if order == 1 else relax.op.multiply(wide, wide))
    norm = node.emit(relax.op.sum(powers, axis, keepdims=True))
    if order == 2:
        norm = node.emit(relax.op.sqrt(norm))
    is_zero = node.emit(relax.op.equal(norm, const(0, dtype_of(norm))))
    divisor = node.emit(relax.op.where(is_zero, const(1, dtype_of(norm)), norm))
    quotient = node.emit(relax.op.divide(wide, divisor))
    nothing = const(0, dtype_of(norm))
    return cast(node, node.emit(relax.op.where(is_zero, nothing, quotient)), dtype_of(data))


@converts("LRN")
def local_response_normalization(node: Node) -> relax.Expr:
    """x / (bias + alpha / size * sum of squares over `size` neighbouring channels) ** beta."""
    data = node.tensor(0)
    channels, rank = node.shape(data)[1], node.rank(data)
    size, dtype = node.attribute("size"), dtype_of(data)
    before = (size - 1) // 2
    # A sum of shifted slices and not a kernel: the axis of these can move where images lie channels-last.
    widths = [0, 0, before, size - 1 - before, *[0, 0] * (rank - 2)]
    padded = node.emit(relax.op.nn.pad(node.emit(relax.op.multiply(data, data)), widths))
    squares: relax.Expr | None = None
    for offset in range(size):
        part = node.emit(relax.op.strided_slice(padded, [1], [offset], [offset + channels]))
        squares = part if squares is None else node.emit(relax.op.add(squares, part))
    alpha = const(node.attribute("alpha", 1e-4) / size, dtype)
    bias = const(node.attribute("bias", 1.0), dtype)
    grown = node.emit(relax.op.add(node.emit(relax.op.multiply(squares, alpha)), bias))
    beta = node.attribute("beta", 0.75)
    if beta == 0.75:  # x ** 0.75 as two roots, far cheaper than a general power
        root = node.emit(relax.op.sqrt(grown))
        divisor = node.emit(relax.op.multiply(root, node.emit(relax.op.sqrt(root))))
    else:
        divisor = node.emit(relax.op.power(grown, const(beta, dtype)))
    return node.emit(relax.op.divide(data, divisor))
