"""Attention ops of ONNX Runtime's optimizer, with projections, packed operands and several forms of masks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from tvm import relax, te, tirx

from ..elementwise import cast
from ..node import Dim, Node, Position, const, dtype_of
from ..products import matmul
from ..required_sizes import as_expr, require_broadcast, require_shape, shown
from ..run_time.numbers import numbers_of
from ..slicing import cut
from ..table import MICROSOFT, convert_node, converts


@dataclass(frozen=True)
class Heads:
    """Queries [batch, heads, positions, size], keys and values [batch, heads, total positions, size]."""

    query: relax.Expr
    key: relax.Expr
    value: relax.Expr


def _split_heads(node: Node, data: relax.Expr, heads: int) -> relax.Expr:
    """Convert [batch, positions, heads * size] to [batch, heads, positions, size]."""
    batch, positions, width = node.shape(data)
    if not isinstance(width, int) or width % heads:
        raise node.refusal(f"found a width of {width}, expected a known multiple of its {heads} heads")
    parts = node.emit(relax.op.reshape(data, [batch, positions, heads, width // heads]))
    return node.emit(relax.op.permute_dims(parts, [0, 2, 1, 3]))


def _attend(node: Node, heads: Heads, mask: int, bias: int) -> relax.Expr:
    """softmax(Q K' * scale + masks) V, [batch, positions, heads * size]; inputs `mask` and `bias` are optional."""
    batch, count, length, size = node.shape(heads.query)
    total, value_size = node.shape(heads.key)[2], node.shape(heads.value)[3]
    dtype = dtype_of(heads.query)
    if not isinstance(size, int) or not isinstance(value_size, int):
        raise node.refusal("found heads of unknown size; give it with shapes=")
    scale = node.attribute("scale", 0.0) or 1 / math.sqrt(max(size, 1))
    scores = matmul(node, heads.query, node.emit(relax.op.permute_dims(heads.key, [0, 1, 3, 2])))
    scores = node.emit(relax.op.multiply(scores, const(scale, dtype)))
    dims: list[Dim] = [batch, count, length, total]
    if node.has(mask):
        scores = node.emit(relax.op.add(scores, _mask(node, mask, dims, dtype)))
    if node.attribute("unidirectional", 0):
        scores = node.emit(relax.op.add(scores, _causal(node, length, total, dtype)))
    if node.has(bias):
        bias_tensor = require_broadcast(node, node.tensor(bias), dims, "its attention bias")
        scores = node.emit(relax.op.add(scores, bias_tensor))
    weights = convert_node(node.as_op("Softmax", [scores], 13, axis=-1))
    result = matmul(node, node.builder.normalize(weights), heads.value)
    ordered = node.emit(relax.op.permute_dims(result, [0, 2, 1, 3]))
    return node.emit(relax.op.reshape(ordered, [batch, length, count * value_size]))


def _mask(node: Node, index: int, dims: list[Dim], dtype: str) -> relax.Expr:
    """Additive mask for scores of shape `dims`: 0 for visible keys, `mask_filter_value` for others."""
    batch, _, length, total = dims
    mask = node.tensor(index)
    shape = node.shape(mask)
    if len(shape) == 2:
        require_shape(node, mask, [batch, total], "its mask")
        is_visible = node.emit(relax.op.greater(mask, const(0, dtype_of(mask))))
        is_visible = node.emit(relax.op.reshape(is_visible, [batch, 1, 1, total]))
    elif len(shape) == 3:
        require_shape(node, mask, [batch, length, total], "its mask")
        is_visible = node.emit(relax.op.greater(mask, const(0, dtype_of(mask))))
        is_visible = node.emit(relax.op.reshape(is_visible, [batch, 1, length, total]))
    elif len(shape) == 1 and isinstance(shape[0], int) and isinstance(batch, int) and shape[0] in (batch, 2 * batch):
        is_visible = _within_lengths(node, mask, batch, total, has_starts=shape[0] == 2 * batch)
    else:
        raise node.refusal(
            f"found a mask of shape {shown(shape)}, expected {shown([batch])}, {shown([batch, total])} or "
            f"{shown([batch, length, total])}"
        )
    hidden = const(node.attribute("mask_filter_value", -10000.0), dtype)
    return node.emit(relax.op.where(is_visible, const(0, dtype), hidden))


def _within_lengths(node: Node, ends: relax.Expr, batch: int, total: Dim, has_starts: bool) -> relax.Expr:
    """Mask of positions before the end of their sequence, and from its start on if starts follow the ends."""
    positions = node.emit(relax.op.arange(0, total, 1, "int64"))
    ends = cast(node, ends, "int64")

    def column(first: int) -> relax.Expr:
        return node.emit(relax.op.reshape(cut(node, ends, {0: (first, batch, 1)}), [batch, 1, 1, 1]))

    is_visible = node.emit(relax.op.less(positions, column(0)))
    if has_starts:
        is_visible = node.emit(relax.op.logical_and(is_visible, relax.op.greater_equal(positions, column(batch))))
    return is_visible


def _causal(node: Node, length: Dim, total: Dim, dtype: str) -> relax.Expr:
    """Additive causal mask, with the last query at the last key."""
    lowest = float(np.finfo("float32" if dtype == "bfloat16" else dtype).min)
    if isinstance(length, int) and isinstance(total, int):
        node.check_table(length, total)
        last_keys = np.arange(length)[:, None] + (total - length)
        return const(np.where(np.arange(total) <= last_keys, 0.0, lowest), dtype)
    queries = node.emit(relax.op.arange(total - length, total, 1, "int64"))
    keys = node.emit(relax.op.arange(0, total, 1, "int64"))
    is_visible = node.emit(relax.op.less_equal(keys, relax.op.expand_dims(queries, [1])))
    return node.emit(relax.op.where(is_visible, const(0, dtype), const(lowest, dtype)))


def _refuse_decoding(node: Node, *inputs: int) -> None:
    for name in ("do_rotary", "past_present_share_buffer"):
        if node.attribute(name, 0):
            raise node.refusal(f"{name}=1 cannot be imported")
    if any(node.has(index) for index in inputs):
        raise node.refusal("found a cache that is shared or reordered (past_sequence_length, cache_indirection)")


def _append_past(node: Node, past: relax.Expr, heads: Heads) -> Heads:
    """Append keys and values to the past, [2, batch, heads, positions, size]."""
    past_parts = [node.emit(relax.op.squeeze(cut(node, past, {0: (index, 1, 1)}), [0])) for index in range(2)]
    pairs = zip(past_parts, (heads.key, heads.value), strict=True)
    return Heads(heads.query, *(node.emit(relax.op.concat([old, new], axis=2)) for old, new in pairs))


def _attend_packed(node: Node, product: relax.Expr, mask: int, past: int, bias: int) -> relax.Expr:
    """Outputs of Attention from concatenated queries, keys and values, [batch, positions, 3 * width]."""
    count, width = node.attribute("num_heads"), node.shape(product)[2]
    hidden_sizes = node.attribute("qkv_hidden_sizes")
    if not isinstance(width, int) or (hidden_sizes is None and width % 3):
        raise node.refusal(f"found weights of {width} columns, expected a known multiple of 3")
    sizes = [width // 3] * 3 if hidden_sizes is None else [int(size) for size in hidden_sizes]
    if len(sizes) != 3 or sum(sizes) != width or sizes[0] != sizes[1]:
        raise node.refusal(f"found qkv_hidden_sizes {sizes} for weights of {width} columns")
    starts = np.cumsum([0, *sizes])[:3]
    parts = [cut(node, product, {2: (int(start), size, 1)}) for start, size in zip(starts, sizes, strict=True)]
    heads = Heads(*(_split_heads(node, part, count) for part in parts))
    if node.has(past):
        batch, _, _, size = node.shape(heads.key)
        expected = [2, batch, count, node.shape(node.tensor(past))[3], size]
        heads = _append_past(node, require_shape(node, node.tensor(past), expected, "its past"), heads)
    result = _attend(node, heads, mask, bias)
    if node.num_outputs == 1:
        return result
    return node.outputs([result, node.emit(relax.op.stack([heads.key, heads.value], axis=0))])


@converts("Attention", domain=MICROSOFT)
def attention(node: Node) -> relax.Expr:
    """Self-attention with concatenated projection weights."""
    _refuse_decoding(node, 6)
    product = matmul(node, node.tensor(0), node.tensor(1))
    if node.has(2):
        bias = require_shape(node, node.tensor(2), [node.shape(product)[2]], "its bias")
        product = node.emit(relax.op.add(product, bias))
    return _attend_packed(node, product, mask=3, past=4, bias=5)


@converts("QAttention", domain=MICROSOFT)
def quantized_attention(node: Node) -> relax.Expr:
    """Self-attention with a quantized projection."""
    _refuse_decoding(node)
    points = [node.tensor(index) if node.has(index) else None for index in (6, 7)]
    inputs = [node.tensor(0), node.tensor(1), node.tensor(3), node.tensor(4), *points, node.tensor(2)]
    projection = node.as_op("MatMulIntegerToFloat", inputs)
    projection.domain = MICROSOFT
    return _attend_packed(node, node.builder.normalize(convert_node(projection)), mask=5, past=8, bias=9)


@converts("MultiHeadAttention", domain=MICROSOFT)
def multi_head_attention(node: Node) -> relax.Expr:
    """Attention with separate or packed operands, projection biases and a cache."""
    _refuse_decoding(node, 9)
    if node.num_outputs > 3:
        raise node.refusal("asks for its weights (output 3), expected at most 3 outputs")
    heads = _split_operands(node, node.attribute("num_heads"))
    if node.has(6) != node.has(7):
        raise node.refusal("found a past of keys or of values alone, expected both")
    if node.has(8):
        return _attend_shared_cache(node, heads)
    if node.has(6):
        pairs = ((node.tensor(6), heads.key), (node.tensor(7), heads.value))
        heads = Heads(heads.query, *(node.emit(relax.op.concat([old, new], axis=2)) for old, new in pairs))
    return node.outputs([_attend(node, heads, 4, 5), heads.key, heads.value])


def _attend_shared_cache(node: Node, heads: Heads) -> relax.Expr:
    """Attention to a preallocated cache with `past_sequence_length` valid positions."""
    if not node.has(6):
        raise node.refusal("found a past_sequence_length without a past")
    batch, count, length, size = node.shape(heads.key)
    past_length = cast(node, node.emit(relax.op.reshape(node.tensor(8), [1])), "int64")
    lengths = node.emit(relax.op.shape_to_tensor(relax.ShapeExpr([as_expr(length)])))
    # One symbol, because sums do not simplify in divisions.
    (total_size,) = numbers_of(node, node.emit(relax.op.add(past_length, lengths)), "positions")
    total, past_size = as_expr(total_size), as_expr(total_size) - as_expr(length)
    caches = []
    for index, new in ((6, heads.key), (7, heads.value)):
        capacity = node.shape(node.tensor(index))[2]
        width = node.shape(new)[3]
        old = require_shape(node, node.tensor(index), [batch, count, capacity, width], "its past")
        is_fitting = total <= as_expr(capacity)
        node.require(is_fitting, f"found {total} positions, expected at most the {capacity} of its cache")

        # A scatter can update a donated cache in place.
        def position_of(i: Position, _: te.Tensor, first: list[tirx.Expr]) -> tirx.Expr:
            return i[2] + first[0]

        positions = node.kernel("places", position_of, new, [past_size])
        caches.append(node.emit(relax.op.scatter_elements(old, positions, new, 2)))
    visible = [cut(node, cache, {2: (0, total_size, 1)}) for cache in caches]
    return node.outputs([_attend(node, Heads(heads.query, *visible), 4, 5), *caches])


@converts("DecoderMaskedMultiHeadAttention", domain=MICROSOFT)
def decoder_masked_attention(node: Node) -> relax.Expr:
    """MultiHeadAttention of one new position with a cache; the inputs have another order."""
    if node.attribute("output_qk", 0) or node.num_outputs > 3:
        raise node.refusal("asks for its scores (output_qk), expected at most 3 outputs")
    inputs = {index: node.inputs[index] for index in range(len(node.inputs)) if node.has(index)}
    is_shared = bool(node.attribute("past_present_share_buffer", 0))
    if not node.has(1):  # concatenated queries, keys and values
        query = node.tensor(0)
        width = node.shape(query)[2]
        if not isinstance(width, int) or width % 3:
            raise node.refusal(f"found packed operands of width {width}, expected a known multiple of 3")
        for place in range(3):
            inputs[place] = cut(node, query, {2: (place * width // 3, width // 3, 1)})
    order = (0, 1, 2, 10, 3, 4, 5, 6, 7 if is_shared else -1, 9)
    attributes = {
        name: node.attributes[name] for name in ("num_heads", "scale", "mask_filter_value") if name in node.attributes
    }
    multi_head = node.as_op("MultiHeadAttention", [inputs.get(index) for index in order], **attributes)
    multi_head.domain, multi_head.num_outputs = MICROSOFT, node.num_outputs
    return multi_head_attention(multi_head)


def _split_operands(node: Node, count: int) -> Heads:
    query = node.tensor(0)
    if node.rank(query) == 5 or (node.has(1) and node.rank(node.tensor(1)) == 5):
        if node.has(3):
            raise node.refusal("found packed operands and a bias, expected one of them")
        if node.rank(query) == 5:
            return Heads(*(_unpack(node, query, index, 3) for index in range(3)))
        pair = (_unpack(node, node.tensor(1), index, 2) for index in range(2))
        return Heads(_split_heads(node, query, count), *pair)
    parts = [query, node.tensor(1), node.tensor(2)]
    if node.has(3):
        start = 0
        for index, part in enumerate(parts):
            width = node.shape(query)[2] if node.rank(part) == 4 else node.shape(part)[2]
            if not isinstance(width, int):
                raise node.refusal("found projections of unknown width; give it with shapes=")
            if node.rank(part) == 3:
                vector = cut(node, node.tensor(3), {0: (start, width, 1)})
                parts[index] = node.emit(relax.op.add(part, vector))
            start += width
    return Heads(*(part if node.rank(part) == 4 else _split_heads(node, part, count) for part in parts))


def _unpack(node: Node, packed: relax.Expr, index: int, parts: int) -> relax.Expr:
    """Convert part `index` of [batch, positions, heads, parts, size] to [batch, heads, positions, size]."""
    if node.shape(packed)[3] != parts:
        raise node.refusal(f"found packed operands of shape {shown(node.shape(packed))}, expected {parts} on axis 3")
    part = node.emit(relax.op.squeeze(cut(node, packed, {3: (index, 1, 1)}), [3]))
    return node.emit(relax.op.permute_dims(part, [0, 2, 1, 3]))
