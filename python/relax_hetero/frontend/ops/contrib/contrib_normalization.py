"""Normalizations that ONNX Runtime's optimizer fuses with skips, biases, embeddings or activations."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax

from ..elementwise import cast, widened
from ..node import STANDARD, Node, const, dtype_of
from ..required_sizes import require_broadcast, require_shape
from ..table import MICROSOFT, convert_node, converts


def _sum_with_skip(node: Node, bias: int) -> relax.Expr:
    """Input + skip + bias; the skip broadcasts, the bias is along the last axis."""
    data = node.tensor(0)
    dims = node.shape(data)
    total = node.emit(data + require_broadcast(node, node.tensor(1), dims, "its skip"))
    if node.has(bias):
        vector = require_shape(node, node.tensor(bias), [dims[-1]], "its bias")
        total = node.emit(total + vector)
    return total


def _statistics(node: Node, data: relax.Expr, is_centred: bool) -> tuple[relax.Expr, relax.Expr]:
    """Mean (0 if the data is not centred) and inverse deviation along the last axis in float32."""
    wide = widened(node, data)
    dtype = dtype_of(wide)
    mean = node.emit(relax.op.mean(wide, [-1], keepdims=True))
    if not is_centred:
        mean = node.emit(relax.op.zeros_like(mean))
    centred = node.emit(wide - mean)
    variance = node.emit(relax.op.mean(centred * centred, [-1], keepdims=True))
    stable = node.emit(variance + const(node.attribute("epsilon", 1e-12), dtype))
    return mean, node.emit(const(1, dtype) / relax.op.sqrt(stable))


def _with_sum(node: Node, result: relax.Expr, total: relax.Expr, is_centred: bool) -> relax.Expr:
    """The requested outputs of result, mean, inverse deviation and sum."""
    if node.num_outputs == 1:
        return result
    return node.outputs([result, *_statistics(node, total, is_centred), total])


@converts("SkipLayerNormalization", domain=MICROSOFT)
def skip_layer_normalization(node: Node) -> relax.Expr:
    """LayerNormalization of input + skip + bias along the last axis, and the sum."""
    total = _sum_with_skip(node, 4)
    inputs = [total, node.tensor(2), node.tensor(3) if node.has(3) else None]
    return _with_sum(node, _layer_norm(node, inputs), total, is_centred=True)


def _layer_norm(node: Node, inputs: Sequence[relax.Expr | None]) -> relax.Expr:
    return convert_node(node.as_op("LayerNormalization", inputs, 17, epsilon=node.attribute("epsilon", 1e-12), axis=-1))


@converts("SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def skip_rms_normalization(node: Node) -> relax.Expr:
    """RMSNormalization of input + skip + bias along the last axis, and the sum."""
    total = _sum_with_skip(node, 3)
    epsilon = node.attribute("epsilon", 1e-12)
    normal = node.as_op("RMSNormalization", [total, node.tensor(2)], 23, epsilon=epsilon, axis=-1)
    return _with_sum(node, convert_node(normal), total, is_centred=False)


@converts("SimplifiedLayerNormalization", domain=MICROSOFT)
@converts("SimplifiedLayerNormalization", domain=STANDARD)
def rms_normalization(node: Node) -> relax.Expr:
    """RMSNormalization before ONNX had it; exporters write it in the standard or ONNX Runtime's domain."""
    attributes = {name: node.attributes[name] for name in ("axis", "epsilon") if name in node.attributes}
    normal = convert_node(node.as_op("RMSNormalization", [node.tensor(0), node.tensor(1)], 23, **attributes))
    if node.num_outputs == 1:
        return normal
    data = widened(node, node.tensor(0))
    axes = list(range(node.axis(node.attribute("axis", -1), node.rank(data)), node.rank(data)))
    mean = node.emit(relax.op.mean(data * data, axes, keepdims=True))
    stable = mean + const(node.attribute("epsilon", 1e-5), dtype_of(data))
    return node.outputs([node.builder.normalize(normal), node.emit(const(1, dtype_of(data)) / relax.op.sqrt(stable))])


@converts("EmbedLayerNormalization", domain=MICROSOFT)
def embed_layer_normalization(node: Node) -> relax.Expr:
    """LayerNormalization of the sum of word, position and segment embeddings; words per sentence; the sum."""
    ids = node.tensor(0)
    dims = node.shape(ids)
    if len(dims) != 2:
        raise node.refusal(f"found ids of rank {len(dims)}, expected 2")
    total = _rows(node, node.tensor(2), ids)
    if node.has(8):
        positions = _rows(node, node.tensor(3), node.tensor(8))
    else:
        numbers = node.emit(relax.op.arange(0, dims[1], 1, "int64"))
        rows = convert_node(node.as_op("Gather", [node.tensor(3), numbers], axis=0))
        positions = node.emit(relax.op.expand_dims(rows, [0]))
    total = node.emit(total + require_broadcast(node, positions, node.shape(total), "its positions"))
    if node.has(1):
        segment = require_shape(node, node.tensor(1), dims, "its segments")
        total = node.emit(total + _rows(node, node.tensor(4), segment))
    result = _layer_norm(node, [total, node.tensor(5), node.tensor(6)])
    if node.num_outputs == 1:
        return result
    if node.has(7):
        mask = require_shape(node, node.tensor(7), dims, "its mask")
        words = node.emit(relax.op.sum(cast(node, mask, "int32"), [1]))
    else:
        words = node.filled([dims[0]], 0, "int32")
    return node.outputs([result, words, total])


def _rows(node: Node, table: relax.Expr, indices: relax.Expr) -> relax.Expr:
    """Gather rows of a table by non-negative indices."""
    count = node.shape(table)[0]
    if isinstance(count, int):
        wide = cast(node, indices, "int64")
        indices = node.kernel("row_numbers", lambda i, x: x(*i), wide, ranges=(0, -1, 0, count))
    return convert_node(node.as_op("Gather", [table, indices], axis=0))


def _group_norm(node: Node, data: relax.Expr) -> relax.Expr:
    """GroupNormalization with scale and bias per channel, optionally followed by SiLU."""
    rank = node.rank(data)
    if rank != 4:
        raise node.refusal(f"found an input of rank {rank}, expected 4")
    groups, is_last = node.attribute("groups"), node.attribute("channels_last", 1)
    dtype = dtype_of(data)
    first = node.emit(relax.op.permute_dims(data, [0, 3, 1, 2])) if is_last else data
    vectors = [node.tensor(1), node.tensor(2)]
    normal = node.as_op(
        "GroupNormalization", [widened(node, first), *(widened(node, vector) for vector in vectors)], 21,
        num_groups=groups, epsilon=node.attribute("epsilon", 1e-5),
    )  # fmt: skip
    value = convert_node(normal)
    activation = node.attribute("activation", 0)
    if activation not in (0, 1):
        raise node.refusal(f"found activation {activation}, expected 0 (none) or 1 (SiLU)")
    if activation:
        value = node.emit(relax.op.nn.silu(value))
    value = cast(node, value, dtype)
    return node.emit(relax.op.permute_dims(value, [0, 2, 3, 1])) if is_last else value


@converts("GroupNorm", domain=MICROSOFT)
def group_norm(node: Node) -> relax.Expr:
    """GroupNormalization of images, by default with channels last."""
    return _group_norm(node, node.tensor(0))


@converts("SkipGroupNorm", domain=MICROSOFT)
def skip_group_norm(node: Node) -> relax.Expr:
    """GroupNormalization of input + skip + bias, and the sum."""
    data, skip = node.tensor(0), node.tensor(3)
    dims = node.shape(data)
    axis = len(dims) - 1 if node.attribute("channels_last", 1) else 1
    if node.rank(skip) == 2:
        skip = node.emit(relax.op.expand_dims(skip, [i for i in range(1, len(dims)) if i != axis]))
    total = node.emit(data + require_broadcast(node, skip, dims, "its skip"))
    if node.has(4):
        bias = require_shape(node, node.tensor(4), [dims[axis]], "its bias")
        expanded = node.emit(relax.op.reshape(bias, [-1 if i == axis else 1 for i in range(len(dims))]))
        total = node.emit(total + expanded)
    return node.outputs([_group_norm(node, total), total])


def _rms(node: Node, data: relax.Expr) -> relax.Expr:
    """x / sqrt(mean(x * x) + epsilon) along the last axis, for float32."""
    square = node.emit(relax.op.mean(data * data, [-1], keepdims=True))
    stable = node.emit(square + const(node.attribute("epsilon", 1e-5), "float32"))
    return node.emit(data / relax.op.sqrt(stable))


@converts("GatedRMSNorm", domain=MICROSOFT)
def gated_rms_norm(node: Node) -> relax.Expr:
    """RMS norm of groups of the scale's size, times the activation of a gate, in float32."""
    data, scale = node.tensor(0), cast(node, node.tensor(1), "float32")
    dims, (width,) = node.shape(data), node.static_shape(scale)
    gate = cast(node, require_shape(node, node.tensor(2), dims, "its gate"), "float32")
    name = node.attribute("activation", "silu")
    if name not in ("silu", "swish", "sigmoid"):
        raise node.refusal(f"activation {name!r} is unknown; expected silu, swish or sigmoid")
    if not isinstance(dims[-1], int) or not width or dims[-1] % width:
        raise node.refusal(f"found {dims[-1]} channels, expected a known multiple of its scale's {width}")
    groups = node.emit(relax.op.reshape(cast(node, data, "float32"), [*dims[:-1], dims[-1] // width, width]))
    normal = node.emit(relax.op.reshape(_rms(node, groups) * scale, dims))
    active = relax.op.sigmoid(gate) if name == "sigmoid" else relax.op.nn.silu(gate)
    return cast(node, node.emit(normal * node.emit(active)), dtype_of(data))


@converts("BranchwiseRMSNorm", domain=MICROSOFT)
def branchwise_rms_norm(node: Node) -> relax.Expr:
    """RMS norm of each branch, an axis or concatenated channels, in float32."""
    data = node.tensor(0)
    dims, count = node.shape(data), int(node.attribute("num_branches", 0))
    if count:
        if not isinstance(dims[-1], int) or dims[-1] % count:
            raise node.refusal(f"found {dims[-1]} channels, expected a known multiple of its {count} branches")
        branch_dims = [*dims[:-1], count, dims[-1] // count]
    else:
        branch_dims = list(dims)
    wide = node.emit(relax.op.reshape(cast(node, data, "float32"), branch_dims))
    normal = _rms(node, wide)
    if node.has(1):
        scale = cast(node, node.tensor(1), "float32")
        scale_shape = branch_dims[-2:] if len(branch_dims) > 1 else branch_dims
        if node.rank(scale) == 1 and node.shape(scale) != branch_dims[-1:]:
            scale = node.emit(relax.op.reshape(scale, scale_shape))
        normal = node.emit(normal * require_broadcast(node, scale, branch_dims, "its scale"))
    return cast(node, node.emit(relax.op.reshape(normal, dims)), dtype_of(data))
