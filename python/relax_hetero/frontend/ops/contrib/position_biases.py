"""Rotary embedding, and attention biases by distance."""

from __future__ import annotations

import numpy as np
from tvm import relax, te, tirx

from ..elementwise import cast
from ..node import Dim, Node, Position, const, dtype_of
from ..products import matmul
from ..required_sizes import broadcast, require_shape, shown
from ..slicing import slice_axes
from ..table import MICROSOFT, convert_node, converts


@converts("RotaryEmbedding", domain=MICROSOFT)
def rotary_embedding(node: Node) -> relax.Expr:
    """Standard RotaryEmbedding, where the first position may be given instead of all."""
    if node.attribute("is_packed_batching", 0) or node.attribute("scale", 1.0) != 1.0:
        raise node.refusal("packed batches and scales cannot be imported")
    data, positions, cos = node.tensor(0), node.tensor(1), node.tensor(2)
    dims, width = node.shape(data), int(node.attribute("rotary_embedding_dim", 0))
    if len(dims) not in (3, 4):
        raise node.refusal(f"found an input of rank {len(dims)}, expected 3 or 4")
    batch, length = dims[0], dims[1] if len(dims) == 3 else dims[2]
    heads = int(node.attribute("num_heads", 0))
    if len(dims) == 3 and not heads:
        size = node.shape(cos)[1]
        if width or not isinstance(size, int) or not isinstance(dims[2], int) or not size or dims[2] % (2 * size):
            raise node.refusal(f"its num_heads is missing for an input of shape {shown(dims)}")
        heads = dims[2] // (2 * size)
    if node.shape(positions) == [1] or node.rank(positions) == 0:
        first = node.emit(relax.op.reshape(positions, (1, 1)))
        offsets = node.emit(relax.op.expand_dims(relax.op.arange(0, length, 1, dtype_of(positions)), [0]))
        positions = broadcast(node, node.emit(first + offsets), [batch, length])
    positions = require_shape(node, positions, [batch, length], "its positions")
    attributes = {"interleaved": node.attribute("interleaved", 0), "rotary_embedding_dim": width}
    if heads:
        attributes["num_heads"] = heads
    return convert_node(node.as_op("RotaryEmbedding", [data, cos, node.tensor(3), positions], 23, **attributes))


def _buckets(count: int, max_distance: int, is_bidirectional: bool) -> np.ndarray:
    """Bucket of each distance up to `max_distance`: one per short distance, then logarithmic."""
    count = count // 2 if is_bidirectional else count
    distances = np.arange(max_distance + 1)
    exact = count // 2
    with np.errstate(divide="ignore"):
        fraction = np.log(distances.astype("float32") / np.float32(exact)) / np.float32(np.log(max_distance / exact))
    far = exact + np.where(distances < exact, 0, fraction * (count - exact)).astype("int32")
    return np.where(distances < exact, distances, np.minimum(far, count - 1)).astype("int32")


@converts("RelativePositionBias", domain=MICROSOFT)
def relative_position_bias(node: Node) -> relax.Expr:
    """Bias by the bucket of the distance, as in T5, [1, heads, queries, keys]."""
    table = node.tensor(0)
    buckets, heads = node.static_shape(table)
    (queries,), (keys,) = node.known_dims(1, "its query_length is"), node.known_dims(2, "its key_length is")
    max_distance, is_bidirectional = int(node.attribute("max_distance")), bool(node.attribute("is_bidirectional", 0))
    min_buckets = 4 if is_bidirectional else 2
    if buckets < min_buckets or max_distance <= buckets // min_buckets:
        raise node.refusal(
            f"found {buckets} buckets for distances up to {max_distance}, expected fewer, and {min_buckets} at least"
        )
    node.check_constant_size(max_distance + 1)
    by_head = node.emit(relax.op.reshape(table, [heads, buckets]))  # the op reads the table as [heads, buckets]

    def element(i: Position, weights: te.Tensor, bucket: te.Tensor) -> tirx.Expr:
        ahead = tirx.Cast("int32", i[3] - i[2])
        distance = tirx.Select(ahead < 0, -ahead, ahead if is_bidirectional else tirx.const(0, "int32"))
        bucket_index = bucket(tirx.min(distance, max_distance))
        if is_bidirectional:
            half = tirx.const(buckets // 2, "int32")
            bucket_index = bucket_index + tirx.Select(ahead > 0, half, tirx.const(0, "int32"))
        return weights(i[1], bucket_index)

    bucket_table = const(_buckets(buckets, max_distance, is_bidirectional))
    return node.kernel("position_bias", element, by_head, bucket_table, shape=[1, heads, queries, keys])


@converts("GatedRelativePositionBias", domain=MICROSOFT)
def gated_relative_position_bias(node: Node) -> relax.Expr:
    """Position bias times a gate computed from each query, as in WavLM."""
    if node.has(6):
        raise node.refusal("found packed sequences (token_offset), expected padded ones")
    query, heads = node.tensor(0), int(node.attribute("num_heads"))
    batch, length, width = node.shape(query)
    columns = node.shape(node.tensor(3))[1]
    if not isinstance(width, int) or width % heads or not isinstance(columns, int) or columns % 2:
        raise node.refusal(f"found queries of width {width} for {heads} heads and a gate of {columns} columns")
    bias = require_shape(node, node.tensor(1), [width], "its query bias")
    biased = node.emit(query + bias)
    split: list[Dim] = [batch, length, heads, width // heads]
    parts = node.emit(relax.op.permute_dims(relax.op.reshape(biased, split), [0, 2, 1, 3]))
    gates = node.emit(matmul(node, parts, node.tensor(3)) + node.tensor(4))
    halves = node.emit(relax.op.reshape(gates, [batch, heads, length, 2, columns // 2]))
    sums = node.emit(relax.op.sigmoid(relax.op.sum(halves, [-1])))
    dtype = dtype_of(query)
    u, r = (slice_axes(node, sums, {3: (index, 1, 1)}) for index in range(2))
    inner = node.emit(r * node.tensor(5) - const(1, dtype))
    gate = node.emit(u * inner + const(2, dtype))
    shape: list[Dim] = [1, heads, length, length]
    positions = require_shape(node, cast(node, node.tensor(2), dtype), shape, "its positions")
    return node.emit(gate * positions)
