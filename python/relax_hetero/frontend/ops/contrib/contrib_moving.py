"""Ops that move elements, and ops that are the same as a standard op."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from tvm import relax, te, tirx

from ..moving import pad
from ..node import STANDARD, Node, Position, const, dtype_of
from ..required_sizes import as_expr, require_equal
from ..table import MICROSOFT, convert_node, converts


@converts("Pad", domain=MICROSOFT)
def pad_by_input(node: Node) -> relax.Expr:
    """Standard Pad, where the pads may have a leading axis of size 1."""
    pads = node.tensor(1)
    if node.rank(pads) == 2:
        constant = node.constant(1)
        flat = node.emit(relax.op.reshape(pads, (-1,))) if constant is None else const(constant.reshape(-1))
        node = replace(node, inputs=[node.inputs[0], flat, *node.inputs[2:]])
    return pad(replace(node, domain=STANDARD, opset=13))


@converts("ExpandDims", domain=MICROSOFT)
def expand_dims(node: Node) -> relax.Expr:
    """Insert an axis of size 1."""
    (axis,) = node.known_dims(1, "its axis is")
    data = node.tensor(0)
    return node.emit(relax.op.expand_dims(data, [node.axis(int(axis), node.rank(data) + 1)]))


@converts("SampleOp", domain=MICROSOFT)
def sample(node: Node) -> relax.Expr:
    """Identity."""
    return node.tensor(0)


@converts("TorchEmbedding", domain=MICROSOFT)
def embedding(node: Node) -> relax.Expr:
    """Rows of a table; other inputs are for training."""
    return convert_node(node.as_op("Gather", [node.tensor(0), node.tensor(1)], axis=0))


@converts("UnfoldTensor", domain=MICROSOFT)
def unfold(node: Node) -> relax.Expr:
    """Sliding windows of `size` elements along an axis, as a new last axis."""
    data = node.tensor(0)
    dims = node.shape(data)
    axis = node.axis(node.attribute("dim", -1), len(dims))
    size, step = int(node.attribute("size")), int(node.attribute("step", 1))
    if size < 1 or step < 1:
        raise node.refusal(f"found size {size} and step {step}, expected 1 or more")
    node.require(as_expr(dims[axis]) >= size, f"axis {axis} of {dims[axis]} elements is shorter than its size {size}")
    count = (dims[axis] - size) // step + 1

    def element(i: Position, x: te.Tensor) -> tirx.Expr:
        return x(*i[:axis], i[axis] * step + i[-1], *i[axis + 1 : -1])

    return node.kernel("windows", element, data, shape=[*dims[:axis], count, *dims[axis + 1 :], size])


@converts("Unique", domain=MICROSOFT)
def unique(node: Node) -> relax.Expr:
    """Distinct elements in the order of first occurrence, inverse indices, and counts."""
    standard = replace(node.as_op("Unique", [node.tensor(0)], 11, sorted=0), num_outputs=4)
    values, _, inverse, counts = standard.builder.normalize(convert_node(standard)).fields
    return node.outputs([values, inverse, counts])


@converts("NGramRepeatBlock", domain=MICROSOFT)
def block_repeated_ngrams(node: Node) -> relax.Expr:
    """Set scores to -inf for tokens that would complete a repeated n-gram."""
    ids, scores = node.tensor(0), node.tensor(1)
    if node.rank(ids) != 2 or node.rank(scores) != 2:
        raise node.refusal(f"found inputs of rank {node.rank(ids)} and {node.rank(scores)}, expected 2")
    size, (batch, length) = int(node.attribute("ngram_size")), node.shape(ids)
    if size < 1:
        raise node.refusal(f"found ngram_size {size}, expected 1 or more")
    require_equal(node, node.shape(scores)[0], batch, "axis 0 of its scores has")
    starts = length - size + 1
    if isinstance(starts, int) and starts < 1:
        return scores
    starts = starts if isinstance(starts, int) else tirx.max(starts, 0)
    dtype = dtype_of(scores)

    def matches_suffix(i: Position, ids: te.Tensor) -> tirx.Expr:
        row, start = i
        pairs = [ids(row, start + offset).equal(ids(row, length - size + 1 + offset)) for offset in range(size - 1)]
        return tirx.Cast("int32", tirx.all(*pairs)) if pairs else tirx.const(1, "int32")

    is_match = node.kernel("begins_alike", matches_suffix, ids, shape=[batch, starts])

    def is_end(i: Position, ids: te.Tensor, is_match: te.Tensor) -> tirx.Expr:
        start = te.reduce_axis((0, is_match.shape[1]), "start")
        is_token = ids(i[0], start + (size - 1)).equal(i[1].astype(dtype_of(node.tensor(0))))
        return te.max(tirx.Select(is_token, is_match(i[0], start), tirx.const(0, "int32")), axis=start)

    ends = node.kernel("repeated_ends", is_end, ids, is_match, shape=node.shape(scores))
    return node.emit(relax.op.where(node.emit(ends > const(0, "int32")), const(-np.inf, dtype), scores))


# Op type -> standard opset with ONNX Runtime's definition.
_OPSETS = {"DequantizeLinear": 21, "GatherND": 13, "GridSample": 16, "QuantizeLinear": 21, "Range": 11, "Trilu": 14}


@converts(*_OPSETS, domain=MICROSOFT)
def same_as_standard(node: Node) -> relax.Expr:
    """Convert as the standard op of the same name."""
    attributes = {name: value for name, value in node.attributes.items() if name != "tvm_custom"}
    opset = max(node.opset, _OPSETS[node.op_type])
    return convert_node(node.as_op(node.op_type, node.inputs, opset, **attributes))
