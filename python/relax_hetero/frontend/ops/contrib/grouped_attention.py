"""Attention of decoders with a cache: ``com.microsoft.GroupQueryAttention``, as onnxruntime-genai exports it.

Several query heads share a key/value head. Queries and keys are normalized and rotated, keys and values are written
into the cache at each sequence's positions, and queries attend to the cache up to their position.

A growing cache is longer in the output than in the input. A shared cache is preallocated for all positions, and new
ones are written into it, in place if it is donated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax, te, tirx

from ...joined_sizes import simplified
from ...symbolic_sizes import sizes_of
from ..elementwise import cast, widened
from ..node import Dim, Node, Position, as_dim, const, dtype_of
from ..products import matmul
from ..required_sizes import MAX_ELEMENTS, as_expr, require_broadcast, require_shape
from ..run_time.numbers import dims_of_vector
from ..slicing import slice_axes
from ..table import MICROSOFT, convert_node, converts

_QUERY, _KEY, _VALUE, _PAST_KEY, _PAST_VALUE, _LENGTHS, _TOTAL, _COS, _SIN, _POSITIONS, _BIAS, _SINK = range(12)
_K_SCALE, _V_SCALE, _Q_NORM, _K_NORM, _ROWS = range(12, 17)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a node."""

    # Number of sequences, and of new positions of each.
    batch: Dim
    rows: Dim
    # Numbers of query heads and key/value heads, and elements of a head.
    heads: int
    kv_heads: int
    size: int
    past: Dim  # positions of the input cache
    total: Dim  # positions of the longest sequence after the node
    cache: Dim  # positions of the output cache


@converts("GroupQueryAttention", domain=MICROSOFT)
def group_query_attention(node: Node) -> relax.Expr:
    """Grouped-query attention with a cache, rotations, norms, windows, softcaps and sinks."""
    _refuse_forms(node)
    parts, sizes = _projections(node)
    lengths = cast(node, node.emit(relax.op.reshape(node.tensor(_LENGTHS), [sizes.batch])), "int64")
    max_length = sizes.cache if isinstance(sizes.cache, int) else MAX_ELEMENTS
    lengths = node.kernel("lengths", lambda i, length: length(*i), lengths, ranges=(0, -1, 0, max_length))
    positions = _Positions(node, sizes, lengths, _first_positions(node, sizes, lengths))
    query, key, value = parts
    tables = positions.rotations()
    query = _rotate(node, _normalize(node, query, sizes, _Q_NORM), sizes.heads, tables)
    key = _rotate(node, _normalize(node, key, sizes, _K_NORM), sizes.kv_heads, tables)
    caches = [
        positions.updated_cache(index, _by_head(node, new, sizes.kv_heads, sizes))
        for index, new in ((_PAST_KEY, key), (_PAST_VALUE, value))
    ]
    visible = [_repeat_heads(node, positions.visible(cache), sizes) for cache in caches]
    result = _attend(node, _by_head(node, query, sizes.heads, sizes), visible, positions)
    return node.outputs([result, *caches])


def _refuse_forms(node: Node) -> None:
    """Refuse quantized and windowed caches, and the output of scores."""
    for name in ("k_quant_type", "v_quant_type"):
        if node.attribute(name, "NONE") not in ("NONE", ""):
            raise node.refusal(f"found a quantized cache ({name}={node.attribute(name)!r}), expected one of floats")
    if node.has(_K_SCALE) or node.has(_V_SCALE):
        raise node.refusal("found scales of a quantized cache (k_scale, v_scale), expected a cache of floats")
    if node.attribute("sliding_window_cache", 0):
        raise node.refusal("found a cache as long as its window (sliding_window_cache), expected one of all positions")
    if node.attribute("qk_output", 0) or node.num_outputs > 3:
        raise node.refusal("asks for its scores (qk_output), expected at most 3 outputs")
    if node.has(_PAST_KEY) != node.has(_PAST_VALUE) or node.has(_KEY) != node.has(_VALUE):
        raise node.refusal("found keys without values, or values without keys, expected both or neither")
    if node.has(_Q_NORM) != node.has(_K_NORM):
        raise node.refusal("found a norm of queries or keys alone (q_norm_weight, k_norm_weight), expected both")


def _projections(node: Node) -> tuple[list[relax.Expr], Sizes]:
    """Queries, keys and values, [batch, rows, heads * size] each, and the node's sizes."""
    query = node.tensor(_QUERY)
    heads, kv_heads = int(node.attribute("num_heads", 0)), int(node.attribute("kv_num_heads", 0))
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise node.refusal(f"found num_heads {heads} and kv_num_heads {kv_heads}, expected a multiple of the latter")
    if node.rank(query) != 3:
        raise node.refusal(f"found a query of rank {node.rank(query)}, expected 3")
    batch, rows, width = node.shape(query)
    columns = heads if node.has(_KEY) else heads + 2 * kv_heads
    if not isinstance(width, int) or not width or width % columns:
        raise node.refusal(f"found a query of width {width}, expected a known multiple of {columns} heads")
    size = width // columns
    if node.has(_KEY):
        dims: list[Dim] = [batch, rows, kv_heads * size]
        parts = [query, *(require_shape(node, node.tensor(i), dims, "its key or value") for i in (_KEY, _VALUE))]
    else:
        starts = [0, heads * size, (heads + kv_heads) * size, width]
        parts = [
            slice_axes(node, query, {2: (start, end - start, 1)})
            for start, end in zip(starts, starts[1:], strict=False)
        ]
    past: Dim = node.shape(node.tensor(_PAST_KEY))[2] if node.has(_PAST_KEY) else 0
    total, cache = _positions(node, rows, past)
    return parts, Sizes(batch, rows, heads, kv_heads, size, past, total, cache)


def _positions(node: Node, rows: Dim, past: Dim) -> tuple[Dim, Dim]:
    """Positions of the longest sequence, and of the output cache, the maximum of these and the input cache's."""
    constant = sizes_of(node.inputs[_TOTAL])
    if constant is not None:
        total = as_dim(constant.reshape(-1)[0])
    else:
        (total,) = dims_of_vector(node, node.emit(relax.op.reshape(node.tensor(_TOTAL), [1])), "total")
    if not node.has(_PAST_KEY):
        node.require(tirx.EQ(as_expr(total), as_expr(rows)), f"found {rows} positions without a past, expected {total}")
        return rows, rows
    if isinstance(total, int) and isinstance(past, int):
        return total, max(total, past)
    if isinstance(past, int):
        node.require(
            as_expr(total) <= past,
            f"found {total} positions, expected at most the {past} of its cache; a cache that grows needs a symbolic "
            "size",
        )
        return total, past
    if tvm.sym.Analyzer().can_prove_equal(as_expr(total), past + rows):
        return total, total
    return total, simplified(tirx.max(as_expr(total), past))


def _first_positions(node: Node, sizes: Sizes, lengths: relax.Expr) -> relax.Expr:
    """Compute `_Positions.first`."""
    if node.has(_ROWS):
        num_rows = node.emit(relax.op.reshape(cast(node, node.tensor(_ROWS), "int64"), [sizes.batch]))
        return node.emit(lengths + const(1, "int64") - num_rows)

    def element(i: Position, last: te.Tensor, new: list[tirx.Expr]) -> tirx.Expr:
        return tirx.max(last(*i) + 1 - new[0], tirx.const(0, "int64"))

    return node.kernel("first_places", element, lengths, [as_expr(sizes.rows)])


@dataclass(frozen=True)
class _Positions:
    """Positions of new rows in the cache."""

    node: Node
    sizes: Sizes
    lengths: relax.Expr  # number of positions of each sequence after the node, minus 1, (batch,) of int64
    first: relax.Expr  # number of positions of each sequence before, (batch,) of int64; 0 for a padded first prompt

    def rotations(self) -> list[relax.Expr]:
        """Cosines and sines of every new row's position, (batch, rows, pairs) each; empty without rotation."""
        node, sizes = self.node, self.sizes
        if not node.attribute("do_rotary", 0):
            return []
        tables = [node.tensor(index) for index in (_COS, _SIN)]
        if node.has(_POSITIONS):
            positions = require_shape(node, node.tensor(_POSITIONS), [sizes.batch, sizes.rows], "its positions")
            rows = [convert_node(node.as_op("Gather", [table, positions], axis=0)) for table in tables]
            return [node.builder.normalize(table_rows) for table_rows in rows]
        limit = node.shape(tables[0])[0]
        is_fitting = as_expr(sizes.total) <= as_expr(limit)
        node.require(is_fitting, f"found {sizes.total} positions, expected at most {limit}")

        def element(i: Position, first: te.Tensor) -> tirx.Expr:
            return first(i[0]) + i[1]

        positions = node.kernel("positions", element, self.first, shape=[sizes.batch, sizes.rows])
        return [node.emit(relax.op.take(table, positions, axis=0, mode="clip")) for table in tables]

    def updated_cache(self, index: int, new: relax.Expr) -> relax.Expr:
        """Write new rows [batch, heads, rows, size] into a cache at each sequence's positions."""
        node, sizes = self.node, self.sizes
        if not node.has(index):
            return new
        dims = [sizes.batch, sizes.kv_heads, sizes.past, sizes.size]
        past = require_shape(node, node.tensor(index), dims, "its past")
        if dtype_of(past) != dtype_of(new):
            raise node.refusal(f"found a cache of {dtype_of(past)}, expected {dtype_of(new)}, as its query has")
        if isinstance(sizes.cache, int) and sizes.cache == sizes.past:
            # A scatter can update a donated cache in place.
            def position_of(i: Position, first: te.Tensor) -> tirx.Expr:
                return first(i[0]) + i[2]

            positions = node.kernel("places", position_of, self.first, shape=node.shape(new))
            return node.emit(relax.op.scatter_elements(past, positions, new, 2))

        zero = tirx.const(0, dtype_of(past))

        def element(i: Position, old: te.Tensor, fresh: te.Tensor, first: te.Tensor) -> tirx.Expr:
            row = i[2] - first(i[0])
            old_value = old(i[0], i[1], _clamp(i[2], old.shape[2]), i[3])
            new_value = tirx.if_then_else(
                row < fresh.shape[2], fresh(i[0], i[1], _clamp(row, fresh.shape[2]), i[3]), zero
            )
            return tirx.if_then_else(tirx.all(row < 0, i[2] < old.shape[2]), old_value, new_value)

        dims = [sizes.batch, sizes.kv_heads, sizes.cache, sizes.size]
        return node.kernel("with_new_rows", element, past, new, self.first, shape=dims)

    def visible(self, cache: relax.Expr) -> relax.Expr:
        """The positions of a cache that any query attends to, zero after the end of shorter sequences."""
        sizes = self.sizes
        if not self.node.has(_PAST_KEY) or sizes.cache is sizes.total:
            return cache

        def element(i: Position, old: te.Tensor, last: te.Tensor) -> tirx.Expr:
            return tirx.if_then_else(i[2] <= last(i[0]), old(*i), tirx.const(0, dtype_of(cache)))

        dims = [sizes.batch, sizes.kv_heads, sizes.total, sizes.size]
        return self.node.kernel("seen_rows", element, cache, self.lengths, shape=dims)

    def mask(self) -> relax.Expr:
        """Mask of keys that a query attends to, (batch, 1, rows, total)."""
        node, sizes = self.node, self.sizes
        window, is_causal = int(node.attribute("local_window_size", -1)), bool(node.attribute("causal", 1))

        def element(i: Position, first: te.Tensor, last: te.Tensor) -> tirx.Expr:
            query_position, key = first(i[0]) + i[2], i[3]
            conditions = [key <= last(i[0])] + ([key <= query_position] if is_causal else [])
            if window > 0:
                conditions.append(key > query_position - window)
            return tirx.all(*conditions)

        dims = [sizes.batch, 1, sizes.rows, sizes.total]
        return node.kernel("seen", element, self.first, self.lengths, shape=dims)


def _clamp(index: tirx.Expr, extent: tirx.Expr) -> tirx.Expr:
    """Clamp an index to an axis, for reads whose value is unused out of range."""
    return tirx.max(tirx.min(index, extent - 1), 0)


def _normalize(node: Node, data: relax.Expr, sizes: Sizes, index: int) -> relax.Expr:
    """RMS norm of every head, if the node has one."""
    if not node.has(index):
        return data
    epsilon_name = "q_norm_epsilon" if index == _Q_NORM else "k_norm_epsilon"
    epsilon = node.attribute(epsilon_name, node.attribute("qk_norm_epsilon", 1e-6))
    batch, rows, width = node.shape(data)
    scale = require_shape(node, node.tensor(index), [sizes.size], "its norm")
    heads = node.emit(relax.op.reshape(data, [batch, rows, width // sizes.size, sizes.size]))
    normal = convert_node(node.as_op("RMSNormalization", [heads, scale], 23, epsilon=epsilon, axis=-1))
    return node.emit(relax.op.reshape(normal, [batch, rows, width]))


def _rotate(node: Node, data: relax.Expr, heads: int, tables: list[relax.Expr]) -> relax.Expr:
    """Rotary embedding, if the node has tables."""
    if not tables:
        return data
    columns, width = node.shape(tables[0])[-1], node.shape(data)[-1]
    if not isinstance(columns, int) or not isinstance(width, int) or not 0 < 2 * columns <= width // heads:
        raise node.refusal(f"found cosines of {columns} columns for {heads} heads in {width}, expected at most half")
    attributes = {"interleaved": node.attribute("rotary_interleaved", 0), "num_heads": heads}
    if 2 * columns != width // heads:
        attributes["rotary_embedding_dim"] = 2 * columns
    rotation = node.as_op("RotaryEmbedding", [data, *tables], 23, **attributes)
    return node.builder.normalize(convert_node(rotation))


def _by_head(node: Node, data: relax.Expr, heads: int, sizes: Sizes) -> relax.Expr:
    """Convert [batch, rows, heads * size] to [batch, heads, rows, size]."""
    parts = node.emit(relax.op.reshape(data, [sizes.batch, sizes.rows, heads, sizes.size]))
    return node.emit(relax.op.permute_dims(parts, [0, 2, 1, 3]))


def _repeat_heads(node: Node, data: relax.Expr, sizes: Sizes) -> relax.Expr:
    """Repeat key or value heads for each query head; a fused attention kernel reads the shared ones."""
    group = sizes.heads // sizes.kv_heads
    return data if group == 1 else node.emit(relax.op.repeat(data, group, axis=1))


def _attend(node: Node, query: relax.Expr, cache: list[relax.Expr], positions: _Positions) -> relax.Expr:
    """softmax(scores) V, [batch, rows, heads * size]."""
    sizes, dtype = positions.sizes, dtype_of(query)
    scale = node.attribute("scale", 0.0) or 1 / math.sqrt(sizes.size)
    scores = matmul(node, query, node.emit(relax.op.permute_dims(cache[0], [0, 1, 3, 2])))
    scores = node.emit(scores * const(scale, dtype))
    cap = node.attribute("softcap", 0.0)
    if cap > 0:
        inner = node.emit(relax.op.tanh(scores * const(1 / cap, dtype)))
        scores = node.emit(inner * const(cap, dtype))
    if node.has(_BIAS):
        dims: list[Dim] = [sizes.batch, sizes.heads, sizes.rows, sizes.total]
        scores = node.emit(scores + require_broadcast(node, node.tensor(_BIAS), dims, "its bias"))
    lowest = float(np.finfo("float32" if dtype == "bfloat16" else dtype).min)
    scores = node.emit(relax.op.where(positions.mask(), scores, const(lowest, dtype)))
    result = matmul(node, _weights(node, scores, sizes.heads), cache[1])
    ordered = node.emit(relax.op.permute_dims(result, [0, 2, 1, 3]))
    return node.emit(relax.op.reshape(ordered, [sizes.batch, sizes.rows, sizes.heads * sizes.size]))


def _weights(node: Node, scores: relax.Expr, heads: int) -> relax.Expr:
    """Softmax along the last axis; a sink adds a score without a key to each head."""
    if not node.has(_SINK) and node.attribute("smooth_softmax", 0) != 1:
        return node.builder.normalize(convert_node(node.as_op("Softmax", [scores], 13, axis=-1)))
    wide = widened(node, scores)
    sink: relax.Expr = const(np.zeros((1, 1, 1, 1)), dtype_of(wide))
    if node.has(_SINK):
        sink_vector = require_shape(node, widened(node, node.tensor(_SINK)), [heads], "its sink")
        sink = node.emit(relax.op.reshape(sink_vector, [1, heads, 1, 1]))
    highest = node.emit(relax.op.maximum(relax.op.max(wide, [-1], keepdims=True), sink))
    powers = node.emit(relax.op.exp(wide - highest))
    sums = node.emit(relax.op.sum(powers, [-1], keepdims=True))
    return cast(node, node.emit(powers / node.emit(sums + relax.op.exp(sink - highest))), dtype_of(scores))
