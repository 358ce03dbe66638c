"""Attention ops that ONNX Runtime's optimizer writes: projections, packed queries, keys and values, masks, caches."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from tvm import relax, te, tirx

from ..elementwise import cast
from ..node import Dim, Node, Position, const, dtype_of
from ..products import matmul
from ..required_sizes import as_expr, require_broadcast, require_shape, shown
from ..run_time.numbers import dims_of_vector
from ..slicing import slice_axes
from ..table import MICROSOFT, convert_node, converts


@dataclass(frozen=True)
class QueryKeyValue:
    """Operands of attention: [batch, heads, queries, size], and [batch, heads, keys, size] for keys and values."""

    query: relax.Expr
    key: relax.Expr
    value: relax.Expr


def _split_heads(node: Node, data: relax.Expr, num_heads: int) -> relax.Expr:
    """Convert [batch, positions, heads * size] to [batch, heads, positions, size]."""
    batch, positions, width = node.shape(data)
    if not isinstance(width, int) or width % num_heads:
        raise node.refusal(f"found a width of {width}, expected a known multiple of its {num_heads} heads")
    heads = node.emit(relax.op.reshape(data, [batch, positions, num_heads, width // num_heads]))
    return node.emit(relax.op.permute_dims(heads, [0, 2, 1, 3]))


def _attend(node: Node, qkv: QueryKeyValue, mask_input: int, bias_input: int) -> relax.Expr:
    """softmax(Q K' * scale + masks) V, [batch, queries, heads * size]; the node may lack inputs of these indices."""
    batch, num_heads, queries, size = node.shape(qkv.query)
    keys, value_size = node.shape(qkv.key)[2], node.shape(qkv.value)[3]
    dtype = dtype_of(qkv.query)
    if not isinstance(size, int) or not isinstance(value_size, int):
        raise node.refusal("found heads of unknown size; give it with shapes=")
    scale = node.attribute("scale", 0.0) or 1 / math.sqrt(max(size, 1))
    scores = matmul(node, qkv.query, node.emit(relax.op.permute_dims(qkv.key, [0, 1, 3, 2])))
    scores = node.emit(scores * const(scale, dtype))
    dims: list[Dim] = [batch, num_heads, queries, keys]
    if node.has(mask_input):
        scores = node.emit(scores + _input_mask(node, node.tensor(mask_input), dims, dtype))
    if node.attribute("unidirectional", 0):
        scores = node.emit(scores + _causal_mask(node, queries, keys, dtype))
    if node.has(bias_input):
        bias = require_broadcast(node, node.tensor(bias_input), dims, "its attention bias")
        scores = node.emit(scores + bias)
    probabilities = convert_node(node.as_op("Softmax", [scores], 13, axis=-1))
    result = matmul(node, node.builder.normalize(probabilities), qkv.value)
    heads_last = node.emit(relax.op.permute_dims(result, [0, 2, 1, 3]))
    return node.emit(relax.op.reshape(heads_last, [batch, queries, num_heads * value_size]))


def _input_mask(node: Node, mask: relax.Expr, dims: list[Dim], dtype: str) -> relax.Expr:
    """Additive mask for scores of shape `dims`: 0 for visible keys, `mask_filter_value` for others."""
    batch, _, queries, keys = dims
    shape = node.shape(mask)
    if len(shape) == 2:
        require_shape(node, mask, [batch, keys], "its mask")
        is_visible = node.emit(mask > const(0, dtype_of(mask)))
        is_visible = node.emit(relax.op.reshape(is_visible, [batch, 1, 1, keys]))
    elif len(shape) == 3:
        require_shape(node, mask, [batch, queries, keys], "its mask")
        is_visible = node.emit(mask > const(0, dtype_of(mask)))
        is_visible = node.emit(relax.op.reshape(is_visible, [batch, 1, queries, keys]))
    elif len(shape) == 1 and isinstance(shape[0], int) and isinstance(batch, int) and shape[0] in (batch, 2 * batch):
        is_visible = _is_in_sequence(node, mask, batch, keys, has_starts=shape[0] == 2 * batch)
    else:
        raise node.refusal(
            f"found a mask of shape {shown(shape)}, expected {shown([batch])}, {shown([batch, keys])} or "
            f"{shown([batch, queries, keys])}"
        )
    masked_score = const(node.attribute("mask_filter_value", -10000.0), dtype)
    return node.emit(relax.op.where(is_visible, const(0, dtype), masked_score))


def _is_in_sequence(node: Node, bounds: relax.Expr, batch: int, keys: Dim, has_starts: bool) -> relax.Expr:
    """True for keys within their sequence; `bounds` has the ends of all sequences, then perhaps their starts."""
    positions = node.emit(relax.op.arange(0, keys, 1, "int64"))
    bounds = cast(node, bounds, "int64")

    def bounds_from(first: int) -> relax.Expr:
        return node.emit(relax.op.reshape(slice_axes(node, bounds, {0: (first, batch, 1)}), [batch, 1, 1, 1]))

    is_visible = node.emit(positions < bounds_from(0))
    if has_starts:
        is_visible = node.emit(relax.op.logical_and(is_visible, positions >= bounds_from(batch)))
    return is_visible


def _causal_mask(node: Node, queries: Dim, keys: Dim, dtype: str) -> relax.Expr:
    """Additive causal mask, with the last query at the last key."""
    masked_score = float(np.finfo("float32" if dtype == "bfloat16" else dtype).min)
    if isinstance(queries, int) and isinstance(keys, int):
        node.check_constant_size(queries, keys)
        last_visible_keys = np.arange(queries)[:, None] + (keys - queries)
        return const(np.where(np.arange(keys) <= last_visible_keys, 0.0, masked_score), dtype)
    query_positions = node.emit(relax.op.arange(keys - queries, keys, 1, "int64"))
    key_positions = node.emit(relax.op.arange(0, keys, 1, "int64"))
    is_visible = node.emit(key_positions <= relax.op.expand_dims(query_positions, [1]))
    return node.emit(relax.op.where(is_visible, const(0, dtype), const(masked_score, dtype)))


def _refuse_in_place_cache(node: Node, *cache_inputs: int) -> None:
    """Refuse a rotation of queries, a cache that is written in place, and inputs of these indices."""
    for name in ("do_rotary", "past_present_share_buffer"):
        if node.attribute(name, 0):
            raise node.refusal(f"{name}=1 cannot be imported")
    if any(node.has(index) for index in cache_inputs):
        raise node.refusal("found a cache that is shared or reordered (past_sequence_length, cache_indirection)")


def _append_to_past(node: Node, past: relax.Expr, qkv: QueryKeyValue) -> QueryKeyValue:
    """Append keys and values to the past, [2, batch, heads, positions, size]."""
    past_key_value = [
        node.emit(relax.op.squeeze(slice_axes(node, past, {0: (index, 1, 1)}), [0])) for index in range(2)
    ]
    pairs = zip(past_key_value, (qkv.key, qkv.value), strict=True)
    return QueryKeyValue(qkv.query, *(node.emit(relax.op.concat([old, new], axis=2)) for old, new in pairs))


def _attend_packed(node: Node, projection: relax.Expr, mask_input: int, past_input: int, bias_input: int) -> relax.Expr:
    """Outputs of Attention, from projected queries, keys and values in one tensor [batch, positions, 3 * width]."""
    num_heads, width = node.attribute("num_heads"), node.shape(projection)[2]
    hidden_sizes = node.attribute("qkv_hidden_sizes")
    if not isinstance(width, int) or (hidden_sizes is None and width % 3):
        raise node.refusal(f"found weights of {width} columns, expected a known multiple of 3")
    sizes = [width // 3] * 3 if hidden_sizes is None else [int(size) for size in hidden_sizes]
    if len(sizes) != 3 or sum(sizes) != width or sizes[0] != sizes[1]:
        raise node.refusal(f"found qkv_hidden_sizes {sizes} for weights of {width} columns")
    starts = np.cumsum([0, *sizes])[:3]
    operands = [
        slice_axes(node, projection, {2: (int(start), size, 1)}) for start, size in zip(starts, sizes, strict=True)
    ]
    qkv = QueryKeyValue(*(_split_heads(node, operand, num_heads) for operand in operands))
    if node.has(past_input):
        batch, _, _, size = node.shape(qkv.key)
        past = node.tensor(past_input)
        expected = [2, batch, num_heads, node.shape(past)[3], size]
        qkv = _append_to_past(node, require_shape(node, past, expected, "its past"), qkv)
    result = _attend(node, qkv, mask_input, bias_input)
    if node.num_outputs == 1:
        return result
    return node.outputs([result, node.emit(relax.op.stack([qkv.key, qkv.value], axis=0))])


@converts("Attention", domain=MICROSOFT)
def attention(node: Node) -> relax.Expr:
    """Self-attention with concatenated projection weights."""
    # Inputs: input, weights, bias, mask_index, past, attention_bias, past_sequence_length.
    _refuse_in_place_cache(node, 6)
    projection = matmul(node, node.tensor(0), node.tensor(1))
    if node.has(2):
        bias = require_shape(node, node.tensor(2), [node.shape(projection)[2]], "its bias")
        projection = node.emit(projection + bias)
    return _attend_packed(node, projection, mask_input=3, past_input=4, bias_input=5)


@converts("QAttention", domain=MICROSOFT)
def quantized_attention(node: Node) -> relax.Expr:
    """Self-attention with a quantized projection."""
    # Inputs: input, weight, bias, input_scale, weight_scale, mask_index, input_zero_point, weight_zero_point, past.
    _refuse_in_place_cache(node)
    zero_points = [node.tensor(index) if node.has(index) else None for index in (6, 7)]
    inputs = [node.tensor(0), node.tensor(1), node.tensor(3), node.tensor(4), *zero_points, node.tensor(2)]
    product = node.as_op("MatMulIntegerToFloat", inputs)
    product.domain = MICROSOFT
    projection = node.builder.normalize(convert_node(product))
    return _attend_packed(node, projection, mask_input=5, past_input=8, bias_input=9)


@converts("MultiHeadAttention", domain=MICROSOFT)
def multi_head_attention(node: Node) -> relax.Expr:
    """Attention with separate or packed operands, projection biases and a cache."""
    # Inputs: query, key, value, bias, key_padding_mask, attention_bias, past_key, past_value, past_sequence_length,
    # cache_indirection.
    _refuse_in_place_cache(node, 9)
    if node.num_outputs > 3:
        raise node.refusal("asks for its attention probabilities (output 3), expected at most 3 outputs")
    qkv = _split_operands(node, node.attribute("num_heads"))
    if node.has(6) != node.has(7):
        raise node.refusal("found a past of keys or of values alone, expected both")
    if node.has(8):
        return _attend_preallocated(node, qkv)
    if node.has(6):
        pairs = ((node.tensor(6), qkv.key), (node.tensor(7), qkv.value))
        qkv = QueryKeyValue(qkv.query, *(node.emit(relax.op.concat([old, new], axis=2)) for old, new in pairs))
    return node.outputs([_attend(node, qkv, 4, 5), qkv.key, qkv.value])


def _attend_preallocated(node: Node, qkv: QueryKeyValue) -> relax.Expr:
    """Attention of MultiHeadAttention to a preallocated cache with `past_sequence_length` valid positions."""
    if not node.has(6):
        raise node.refusal("found a past_sequence_length without a past")
    batch, num_heads, num_new, _ = node.shape(qkv.key)
    past_length = cast(node, node.emit(relax.op.reshape(node.tensor(8), [1])), "int64")
    new_length = node.emit(relax.op.shape_to_tensor(relax.ShapeExpr([as_expr(num_new)])))
    # The sum gets a symbol of its own: TVM's analyzer does not simplify quotients of sums.
    (num_keys,) = dims_of_vector(node, node.emit(past_length + new_length), "positions")
    total, num_past = as_expr(num_keys), as_expr(num_keys) - as_expr(num_new)
    caches = []
    for index, new in ((6, qkv.key), (7, qkv.value)):
        capacity = node.shape(node.tensor(index))[2]
        old = require_shape(node, node.tensor(index), [batch, num_heads, capacity, node.shape(new)[3]], "its past")
        message = f"found {total} positions, expected at most the {capacity} of its cache"
        node.require(total <= as_expr(capacity), message)

        # Positions for a scatter, which can update a donated cache in place.
        def position_of(i: Position, _: te.Tensor, first: list[tirx.Expr]) -> tirx.Expr:
            return i[2] + first[0]

        positions = node.kernel("places", position_of, new, [num_past])
        caches.append(node.emit(relax.op.scatter_elements(old, positions, new, 2)))
    filled = [slice_axes(node, cache, {2: (0, num_keys, 1)}) for cache in caches]
    return node.outputs([_attend(node, QueryKeyValue(qkv.query, *filled), 4, 5), *caches])


@converts("DecoderMaskedMultiHeadAttention", domain=MICROSOFT)
def decoder_masked_attention(node: Node) -> relax.Expr:
    """MultiHeadAttention of one new position with a cache; its inputs are in another order."""
    # Inputs: query, key, value, mask_index, attention_bias, past_key, past_value, past_sequence_length, beam_width,
    # cache_indirection, bias.
    if node.attribute("output_qk", 0) or node.num_outputs > 3:
        raise node.refusal("asks for its scores (output_qk), expected at most 3 outputs")
    inputs = {index: node.inputs[index] for index in range(len(node.inputs)) if node.has(index)}
    is_preallocated = bool(node.attribute("past_present_share_buffer", 0))
    if not node.has(1):  # concatenated queries, keys and values
        query = node.tensor(0)
        width = node.shape(query)[2]
        if not isinstance(width, int) or width % 3:
            raise node.refusal(f"found packed operands of width {width}, expected a known multiple of 3")
        for index in range(3):
            inputs[index] = slice_axes(node, query, {2: (index * width // 3, width // 3, 1)})
    # Indices of the inputs in MultiHeadAttention's order.
    order = (0, 1, 2, 10, 3, 4, 5, 6, 7 if is_preallocated else -1, 9)
    attributes = {
        name: node.attributes[name] for name in ("num_heads", "scale", "mask_filter_value") if name in node.attributes
    }
    multi_head = node.as_op("MultiHeadAttention", [inputs.get(index) for index in order], **attributes)
    multi_head.domain, multi_head.num_outputs = MICROSOFT, node.num_outputs
    return multi_head_attention(multi_head)


def _split_operands(node: Node, num_heads: int) -> QueryKeyValue:
    """Queries, keys and values of MultiHeadAttention, which packs all three, keys and values, or none of them."""
    query = node.tensor(0)
    if node.rank(query) == 5 or (node.has(1) and node.rank(node.tensor(1)) == 5):
        if node.has(3):
            raise node.refusal("found packed operands and a bias, expected a bias only with separate operands")
        if node.rank(query) == 5:
            return QueryKeyValue(*(_unpack(node, query, index, 3) for index in range(3)))
        key_value = (_unpack(node, node.tensor(1), index, 2) for index in range(2))
        return QueryKeyValue(_split_heads(node, query, num_heads), *key_value)
    # Rank 3, or rank 4 with heads already split.
    operands = [query, node.tensor(1), node.tensor(2)]
    if node.has(3):
        start = 0
        for index, operand in enumerate(operands):
            width = node.shape(query)[2] if node.rank(operand) == 4 else node.shape(operand)[2]
            if not isinstance(width, int):
                raise node.refusal("found projections of unknown width; give it with shapes=")
            if node.rank(operand) == 3:
                bias = slice_axes(node, node.tensor(3), {0: (start, width, 1)})
                operands[index] = node.emit(operand + bias)
            start += width
    return QueryKeyValue(*(x if node.rank(x) == 4 else _split_heads(node, x, num_heads) for x in operands))


def _unpack(node: Node, packed: relax.Expr, index: int, count: int) -> relax.Expr:
    """Operand `index` of `count` in [batch, positions, heads, count, size], as [batch, heads, positions, size]."""
    if node.shape(packed)[3] != count:
        raise node.refusal(f"found packed operands of shape {shown(node.shape(packed))}, expected {count} on axis 3")
    operand = node.emit(relax.op.squeeze(slice_axes(node, packed, {3: (index, 1, 1)}), [3]))
    return node.emit(relax.op.permute_dims(operand, [0, 2, 1, 3]))
