"""Sequences of tensors: Relax tuples for a static length, stacked or concatenated tensors for a dynamic one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tvm
from tvm import relax

from ...transform.ir.rewriting import op_name
from ..symbolic_sizes import common_shape
from .node import Dim, Node, array_of, const, dtype_of
from .required_sizes import as_expr
from .slicing import slice_axes, split
from .table import convert_node, converts

_UNKNOWN_COUNT = "the number of its parts is only known when the model runs"


@dataclass(frozen=True)
class LongSequence:
    """A sequence of dynamic length, with tensors of one shape stacked along a first axis."""

    stacked: relax.Expr


@dataclass(frozen=True)
class JoinedSequence:
    """A sequence of dynamic length, with tensors concatenated along the axis in which they differ."""

    joined: relax.Expr
    axis: int


@dataclass(frozen=True)
class GrowingSequence:
    """A sequence in a trip of a loop, with the tensors that the trip appended."""

    appended: tuple[relax.Expr, ...] = ()
    begin: object = field(default_factory=object)  # identity of the sequence


def _items(node: Node) -> list[relax.Expr]:
    """The tensors of a sequence. Raises FrontendError if the input is not a sequence of static length."""
    value = node.inputs[0] if node.has(0) else None
    if isinstance(value, (LongSequence, GrowingSequence, JoinedSequence)):
        raise node.refusal("of a sequence of dynamic length cannot be imported")
    if isinstance(value, relax.Tuple):
        return list(value.fields)
    if isinstance(value, relax.Expr):
        value = node.builder.normalize(value)
        if isinstance(value.ty, tvm.ir.TupleType):
            return [node.emit(relax.TupleGetItem(value, i)) for i in range(len(value.ty.fields))]
    raise node.refusal("input 0 is not a sequence whose length is known at import")


def _position(node: Node, index: int, default: int, low: int, high: int) -> int:
    """A constant position in [low, high]."""
    if not node.has(index):
        return default
    constant = node.constant(index)
    if constant is None:
        raise node.unknown("its position is")
    position = int(constant.reshape(()))
    if not low <= position <= high:
        raise node.refusal(f"position {position} is out of range {low} to {high}")
    return position


def _computed_position(node: Node, index: int, low: int, high: int) -> relax.Expr:
    """A dynamic position as a non-negative scalar; a call fails unless it is in [low, high].

    `low`: minus the number of tensors.
    """
    if low > high:
        raise node.refusal("takes a tensor of an empty sequence")
    position = node.emit(relax.op.astype(node.emit(relax.op.reshape(node.tensor(index), ())), "int64"))
    # An index into a table of all valid positions; invalid ones are out of range.
    count = high - low + 1
    shifted = node.emit(position - const(low, "int64"))
    is_before = node.emit(shifted < const(0, "int64"))
    table_index = node.emit(relax.op.where(is_before, const(count, "int64"), shifted))
    table = np.array([entry if entry >= 0 else entry - low for entry in range(low, high + 1)], "int64")
    return convert_node(node.as_op("Gather", [const(table), table_index], axis=0))


def _select(node: Node, condition: relax.Expr, first: relax.Expr, second: relax.Expr) -> relax.Expr:
    """Select one of two tensors of one rank by a dynamic condition."""
    if dtype_of(first) != dtype_of(second) or node.rank(first) != node.rank(second):
        raise node.refusal("has a position that is computed when the model runs, and tensors of different types")
    sizes = common_shape(first.ty, second.ty, "element")
    branches = (relax.SeqExpr([], value) for value in (first, second))
    result = node.emit(relax.If(condition, *branches))
    if isinstance(result.ty.shape, relax.ShapeExpr):
        return result
    return node.builder.match_cast(result, relax.TensorType(sizes, dtype_of(first)))


def _compare(node: Node, operation: Callable[..., relax.Expr], position: relax.Expr, number: int) -> relax.Expr:
    return node.emit(operation(position, const(number, "int64")))


def _is_computed(node: Node, index: int) -> bool:
    return node.has(index) and node.constant(index) is None


@converts("SequenceConstruct")
def sequence_construct(node: Node) -> relax.Expr:
    """Sequence of the inputs."""
    return relax.Tuple([node.tensor(i) for i in range(len(node.inputs))])


@converts("SequenceEmpty")
def sequence_empty(node: Node) -> relax.Expr:
    """Empty sequence."""
    return relax.Tuple([])


@converts("SequenceInsert")
def sequence_insert(node: Node) -> Any:
    """Insert a tensor before the element at a position, by default at the end."""
    sequence = node.inputs[0] if node.has(0) else None
    if isinstance(sequence, GrowingSequence) and not node.has(2):
        return GrowingSequence((*sequence.appended, node.tensor(1)), sequence.begin)
    if isinstance(sequence, LongSequence) and not node.has(2):
        row = node.emit(relax.op.expand_dims(node.tensor(1), 0))
        return LongSequence(node.emit(relax.op.concat([sequence.stacked, row], 0)))
    items = _items(node)
    if _is_computed(node, 2):
        position_tensor = _computed_position(node, 2, -len(items), len(items))
        new = node.tensor(1)
        is_after = [_compare(node, relax.op.greater, position_tensor, i) for i in range(len(items))]
        # The tensors from the position on move by one.
        is_end = [_compare(node, relax.op.equal, position_tensor, i + 1) for i in range(len(items))]
        shifted = [new, *(_select(node, is_here, new, item) for is_here, item in zip(is_end, items, strict=True))]
        items_before = [_select(node, is_after[i], items[i], shifted[i]) for i in range(len(items))]
        return relax.Tuple([*items_before, shifted[-1]])
    position = _position(node, 2, len(items), -len(items), len(items))
    items.insert(position, node.tensor(1))
    return relax.Tuple(items)


@converts("SequenceErase")
def sequence_erase(node: Node) -> relax.Expr:
    """Remove the element at a position, by default the last one."""
    items = _items(node)
    if _is_computed(node, 1):
        position_tensor = _computed_position(node, 1, -len(items), len(items) - 1)
        pairs = enumerate(zip(items, items[1:], strict=False))
        return relax.Tuple(
            [_select(node, _compare(node, relax.op.greater, position_tensor, i), a, b) for i, (a, b) in pairs]
        )
    del items[_position(node, 1, -1, -len(items), len(items) - 1)]
    return relax.Tuple(items)


@converts("SequenceAt")
def sequence_at(node: Node) -> relax.Expr:
    """The element at a position."""
    if node.has(0) and isinstance(node.inputs[0], LongSequence):
        return convert_node(node.as_op("Gather", [node.inputs[0].stacked, node.inputs[1]], axis=0))
    items = _items(node)
    if _is_computed(node, 1):
        position_tensor = _computed_position(node, 1, -len(items), len(items) - 1)
        result = items[-1]
        for i in reversed(range(len(items) - 1)):
            result = _select(node, _compare(node, relax.op.equal, position_tensor, i), items[i], result)
        return result
    return items[_position(node, 1, 0, -len(items), len(items) - 1)]


@converts("SequenceLength")
def sequence_length(node: Node) -> relax.Expr:
    """Number of tensors."""
    if node.has(0) and isinstance(node.inputs[0], LongSequence):
        (size, *_) = node.shape(node.inputs[0].stacked)
        return const(size, "int64") if isinstance(size, int) else size
    return const(len(_items(node)), "int64")


@converts("ConcatFromSequence")
def concat_from_sequence(node: Node) -> relax.Expr:
    """Concatenate tensors along an axis, or stack them along a new one."""
    if node.has(0) and isinstance(node.inputs[0], LongSequence):
        return _concat_stacked(node, node.inputs[0].stacked)
    if node.has(0) and isinstance(node.inputs[0], JoinedSequence):
        joined, axis = node.inputs[0].joined, node.inputs[0].axis
        if node.attribute("new_axis", 0) or node.axis(node.attribute("axis"), node.rank(joined)) != axis:
            raise node.refusal(f"joins tensors whose sizes differ along axis {axis} in another way than along it")
        return joined
    items = _items(node)
    if not items:
        raise node.refusal("joins an empty sequence")
    axis = node.attribute("axis")
    if node.attribute("new_axis", 0):
        return node.emit(relax.op.stack(items, axis=axis))
    return node.emit(relax.op.concat(items, axis=axis))


def _concat_stacked(node: Node, stacked: relax.Expr) -> relax.Expr:
    """Move the tensors stacked along a first axis to another axis, as a concatenation or a new axis."""
    rank, is_new = node.rank(stacked), bool(node.attribute("new_axis", 0))
    axis = node.axis(node.attribute("axis"), rank if is_new else rank - 1)
    order = [*range(1, axis + 1), 0, *range(axis + 1, rank)]
    moved = node.emit(relax.op.permute_dims(stacked, order)) if axis else stacked
    if is_new:
        return moved
    dims: list[Any] = node.shape(moved)
    joined = [*dims[:axis], dims[axis] * dims[axis + 1], *dims[axis + 2 :]]
    return node.emit(relax.op.reshape(moved, relax.ShapeExpr(joined)))


@converts("SplitToSequence")
def split_to_sequence(node: Node) -> Any:
    """Split an axis by one size, with a possibly smaller last part, by a vector of sizes, or into single elements."""
    data = node.tensor(0)
    rank = node.rank(data)
    axis = node.axis(node.attribute("axis", 0), rank)
    size = node.shape(data)[axis]
    if not isinstance(size, int) and (not node.has(1) or _has_single_parts(node, size)):
        order = [axis, *(i for i in range(rank) if i != axis)]
        stacked = node.emit(relax.op.permute_dims(data, order)) if axis else data
        is_kept = node.has(1) or node.attribute("keepdims", 1)
        return LongSequence(node.emit(relax.op.expand_dims(stacked, axis + 1)) if is_kept else stacked)
    if node.has(1) and node.rank(node.tensor(1)):
        return _split_as_given(node)
    sizes = _equal_parts(node, size, _part_size(node) if node.has(1) else 1)
    parts, start = [], 0
    for part in sizes:
        piece = slice_axes(node, data, {axis: (start, part, 1)})
        drops = not node.has(1) and not node.attribute("keepdims", 1)
        parts.append(node.emit(relax.op.squeeze(piece, [axis])) if drops else piece)
        start += part
    return relax.Tuple(parts)


def _split_as_given(node: Node) -> relax.Expr:
    """Split by a vector of sizes, of static length."""
    (count,) = node.shape(node.tensor(1))
    if not isinstance(count, int):
        raise node.refusal(_UNKNOWN_COUNT)
    if count == 0:
        raise node.refusal("splits an axis into no parts")
    parts = split(replace(node, op_type="Split", opset=18, num_outputs=count))
    return parts if count > 1 else relax.Tuple([parts])


def _part_size(node: Node) -> int:
    """The size of all parts except the last one."""
    constant = node.constant(1)
    if constant is None:
        raise node.refusal(_UNKNOWN_COUNT)
    part = int(constant.reshape(()))
    if part <= 0:
        raise node.refusal(f"splits an axis into parts of {part}")
    return part


def _equal_parts(node: Node, size: Dim, part: int) -> list[int]:
    if not isinstance(size, int):
        raise node.refusal(_UNKNOWN_COUNT)
    node.check_ops(size // part)
    return [min(part, size - start) for start in range(0, size, part)]


def _has_single_parts(node: Node, size: Any) -> bool:
    """Return whether the parts of an axis of symbolic size have one element: the scalar 1, or a vector of ones."""
    constant = node.constant(1)
    if constant is not None:
        return constant.ndim == 0 and int(constant) == 1
    parts = node.inputs[1]
    binding = node.builder.lookup_binding(parts) if isinstance(parts, relax.Var) else None
    if binding is None or op_name(binding) != "relax.broadcast_to":
        return False
    if not isinstance(binding.args[0], tvm.ir.GenericConst):
        return False
    if node.rank(parts) != 1 or array_of(binding.args[0].value).reshape(-1).tolist() != [1]:
        return False
    (count,) = node.shape(parts)
    node.require(as_expr(count) == size, f"splits an axis of {size} into {count} parts of one element")
    return True


@converts("OptionalHasElement")
def optional_has_element(node: Node) -> relax.Expr:
    """Return whether there is a value, which is static because no op returns an optional at run time."""
    kinds = (relax.Expr, LongSequence, GrowingSequence, JoinedSequence)
    return const(node.has(0) and isinstance(node.inputs[0], kinds))
