"""Sequences of tensors whose length is known at import: they become Relax tuples, and mostly vanish."""

from __future__ import annotations

from dataclasses import replace

import tvm
from tvm import relax

from .node import Node, const
from .slicing import cut, split
from .table import converts


def _items(node: Node, index: int = 0) -> list[relax.Expr]:
    """The tensors of a sequence.

    Raises
    ------
    FrontendError: if the input is not a sequence of known length.
    """
    value = node.inputs[index] if node.has(index) else None
    if isinstance(value, relax.Tuple):
        return list(value.fields)
    if isinstance(value, relax.Expr):
        value = node.builder.normalize(value)
        if isinstance(value.ty, tvm.ir.TupleType):
            return [node.emit(relax.TupleGetItem(value, i)) for i in range(len(value.ty.fields))]
    raise node.refusal(f"input {index} is not a sequence whose length is known at import")


def _position(node: Node, index: int, default: int, low: int, high: int) -> int:
    """A position in [low, high], which must be known now."""
    if not node.has(index):
        return default
    known = node.constant(index)
    if known is None:
        raise node.unknown("its position is")
    position = int(known.reshape(()))
    if not low <= position <= high:
        raise node.refusal(f"position {position} is out of range {low} to {high}")
    return position


@converts("SequenceConstruct")
def sequence_construct(node: Node) -> relax.Expr:
    """The inputs, in order."""
    return relax.Tuple([node.tensor(i) for i in range(len(node.inputs))])


@converts("SequenceEmpty")
def sequence_empty(node: Node) -> relax.Expr:
    """No tensors."""
    return relax.Tuple([])


@converts("SequenceInsert")
def sequence_insert(node: Node) -> relax.Expr:
    """A tensor put before the element at a position, by default at the end."""
    items = _items(node)
    position = _position(node, 2, len(items), -len(items), len(items))
    items.insert(position, node.tensor(1))
    return relax.Tuple(items)


@converts("SequenceErase")
def sequence_erase(node: Node) -> relax.Expr:
    """The element at a position, by default the last, taken out."""
    items = _items(node)
    del items[_position(node, 1, -1, -len(items), len(items) - 1)]
    return relax.Tuple(items)


@converts("SequenceAt")
def sequence_at(node: Node) -> relax.Expr:
    """The element at a position."""
    items = _items(node)
    return items[_position(node, 1, 0, -len(items), len(items) - 1)]


@converts("SequenceLength")
def sequence_length(node: Node) -> relax.Expr:
    """How many tensors there are."""
    return const(len(_items(node)), "int64")


@converts("ConcatFromSequence")
def concat_from_sequence(node: Node) -> relax.Expr:
    """The tensors side by side along an axis, or along a new one."""
    items = _items(node)
    if not items:
        raise node.refusal("joins an empty sequence")
    axis = node.attribute("axis")
    if node.attribute("new_axis", 0):
        return node.emit(relax.op.stack(items, axis=axis))
    return node.emit(relax.op.concat(items, axis=axis))


@converts("SplitToSequence")
def split_to_sequence(node: Node) -> relax.Expr:
    """Parts of an axis: of one size, the last one then possibly smaller, or of given sizes; else single elements."""
    data = node.tensor(0)
    rank = node.rank(data)
    axis = node.axis(node.attribute("axis", 0), rank)
    size = node.shape(data)[axis]
    if not isinstance(size, int):
        raise node.refusal("splits a symbolic dimension; give its size with shapes=")
    if not node.has(1):
        node.check_ops(size)
    sizes = [1] * (0 if node.has(1) else size)
    if node.has(1):
        known = node.constant(1)
        if known is None:
            given = node.tensor(1)
            if node.rank(given) == 0 or not isinstance(node.shape(given)[0], int):
                raise node.refusal("the number of its parts is only known when the model runs")
            (count,) = node.static_shape(given)
            if count == 0:
                raise node.refusal("splits an axis into no parts")
            parts = split(replace(node, op_type="Split", opset=18, num_outputs=count))
            return parts if count > 1 else relax.Tuple([parts])
        sizes = [int(part) for part in known.reshape(-1)]
        if known.ndim == 0:
            part = sizes[0]
            if part <= 0:
                raise node.refusal(f"splits an axis into parts of {part}")
            node.check_ops(size // part)
            sizes = [min(part, size - start) for start in range(0, size, part)]
        if min(sizes, default=0) < 0 or sum(sizes) != size:
            raise node.refusal(f"splits an axis of {size} into parts of {sizes}")
    parts, start = [], 0
    for part in sizes:
        taken = cut(node, data, {axis: (start, part, 1)})
        drops = not node.has(1) and not node.attribute("keepdims", 1)
        parts.append(node.emit(relax.op.squeeze(taken, [axis])) if drops else taken)
        start += part
    return relax.Tuple(parts)


@converts("OptionalHasElement")
def optional_has_element(node: Node) -> relax.Expr:
    """Whether there is a value: known at import, as an empty optional is never made when the model runs."""
    return const(node.has(0) and isinstance(node.inputs[0], relax.Expr))
