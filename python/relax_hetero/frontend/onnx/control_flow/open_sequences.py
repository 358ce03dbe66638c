"""Sequences in loops with a dynamic number of trips: tensors that a trip appends become rows of a tensor.

TorchScript exports lists this way: a loop that inserts at the end of a sequence, followed by `ConcatFromSequence`. If
trips append tensors of different sizes, as in an exported `repeat_interleave`, the loop carries their concatenation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import onnx
import tvm
from tvm import relax

from ....errors import FrontendError
from ...import_limits import budget
from ...ops.sequences import GrowingSequence, JoinedSequence, LongSequence
from ..node_names import NodeInfo
from .loop import Loop, Trip
from .subgraphs import Importer, OnnxImporter, inner_graph, number, sizes_in, tensor_of

Finish = Callable[[list[Any], list[relax.Expr]], tuple[list[Any], list[relax.Expr]]]
"""Function from state and rows of a loop of tensors to those of the loop with sequences."""


def is_sequence(value: Any) -> bool:
    """Return whether a value is a sequence, of static or dynamic length."""
    if isinstance(value, (LongSequence, JoinedSequence)):
        return True
    return isinstance(value, relax.Expr) and isinstance(value.ty, tvm.ir.TupleType)


def with_rows_for_sequences(importer: Importer, loop: Loop) -> tuple[Loop, Finish]:
    """Replace the sequences in a loop's state by rows; return the new loop and the conversion of its results.

    Conversion of the body raises FrontendError if it does more with a sequence than append to it.
    """
    sequences = [index for index, value in enumerate(loop.state) if is_sequence(value)]
    joined = _sequences_to_join(importer, loop, sequences)
    tensor_indices = [index for index in range(len(loop.state)) if index in joined or index not in sequences]
    counts: dict[int, int] = {}

    def trip(index: Any, going_on: Any, values: list[Any]) -> Trip:
        values_by_index = dict(zip(tensor_indices, values, strict=True))
        initial_sequences = {place: GrowingSequence() for place in sequences}
        trip_results = loop.trip(
            index,
            going_on,
            [initial_sequences[i] if i in initial_sequences else values_by_index[i] for i in range(len(loop.state))],
        )
        rows = []
        for place, sequence in initial_sequences.items():
            items = _appended(importer, loop, place, sequence, trip_results.state[place])
            counts[place] = len(items)
            if place in joined:
                values_by_index[place] = importer.bb.emit(
                    relax.op.concat([values_by_index[place], *items], joined[place].axis)
                )
            elif items:
                rows.append(items[0] if len(items) == 1 else importer.bb.emit(relax.op.stack(items, 0)))
        state = [values_by_index[i] if i in joined else trip_results.state[i] for i in tensor_indices]
        return Trip(trip_results.condition, state, [*trip_results.rows, *rows])

    def finish(state: list[Any], rows: list[relax.Expr]) -> tuple[list[Any], list[relax.Expr]]:
        values_left, sequence_rows = dict(zip(tensor_indices, state, strict=True)), iter(rows[loop.rows :])
        results: list[Any] = []
        for index, initial in enumerate(loop.state):
            if index in joined:
                results.append(JoinedSequence(values_left[index], joined[index].axis))
            elif index in values_left:
                results.append(values_left[index])
            elif not counts[index]:
                results.append(initial)
            else:
                results.append(_append_rows(importer, initial, next(sequence_rows), counts[index], loop.title))
        return results, rows[: loop.rows]

    names = [loop.names[i] for i in tensor_indices]
    tensors = [joined[i].joined if i in joined else loop.state[i] for i in tensor_indices]
    return replace(loop, state=tensors, names=names, trip=trip), finish


def _appended(importer: Importer, loop: Loop, index: int, sequence: GrowingSequence, grown: Any) -> list[relax.Expr]:
    """The tensors that a trip appended to a sequence."""
    if not isinstance(grown, GrowingSequence) or grown.begin is not sequence.begin:
        raise FrontendError(
            f"{loop.title}: its body does more with the sequence {loop.names[index]!r} than append to it; "
            "expected a number of trips that is known at import"
        )
    return [tensor_of(importer, item, loop.title) for item in grown.appended]


def _sequences_to_join(importer: Importer, loop: Loop, sequences: list[int]) -> dict[int, JoinedSequence]:
    """The sequences that the loop carries concatenated, because trips append tensors of different sizes.

    A trial conversion of a trip tells the types.
    """
    candidates = [place for place in sequences if place < len(loop.joins) and loop.joins[place] is not None]
    if not candidates:
        return {}
    initial = {place: GrowingSequence() for place in sequences}
    state = [
        initial[i] if i in initial else relax.Var(f"value{i}", tensor_of(importer, value, loop.title).ty)
        for i, value in enumerate(loop.state)
    ]
    index = relax.Var("trip", relax.TensorType((), "int64"))
    importer.bb.begin_scope([index, *(value for value in state if isinstance(value, relax.Var))])
    try:
        with importer.trial(), importer.block(loop.info) as body:
            results = loop.trip(index, number(True, "bool"), state)
            items = {i: _appended(importer, loop, i, initial[i], results.state[i]) for i in candidates}
    finally:
        importer.bb.end_scope()
    casts = [binding.ty for binding in body if isinstance(binding, relax.MatchCast)]
    read = relax.analysis.free_vars(relax.SeqExpr([relax.BindingBlock(body)], relax.Tuple(sum(items.values(), []))))
    inner = sizes_in(casts) - sizes_in(var.ty for var in read)
    joined = {i: _empty_joined(importer, loop.state[i], items[i], loop.joins[i], inner) for i in candidates}
    return {place: start for place, start in joined.items() if start is not None}


def _empty_joined(
    importer: Importer, initial: Any, items: list[relax.Expr], axis: Any, inner_sizes: set[tvm.tirx.Var]
) -> JoinedSequence | None:
    """Empty concatenation along an axis; None unless exactly that axis has a size that is defined in a trip."""
    types = [item.ty for item in items]
    if not types or isinstance(initial, LongSequence) or initial.ty.fields or len({ty.ndim for ty in types}) != 1:
        return None
    if not all(isinstance(ty.shape, relax.ShapeExpr) and -ty.ndim <= axis < ty.ndim for ty in types):
        return None
    axis %= types[0].ndim
    is_dynamic = [[bool(sizes_in([relax.ShapeType([dim])]) & inner_sizes) for dim in ty.shape.values] for ty in types]
    if not any(any(axes) for axes in is_dynamic) or any(any([*axes[:axis], *axes[axis + 1 :]]) for axes in is_dynamic):
        return None
    dims = [0 if i == axis else dim for i, dim in enumerate(types[0].shape.values)]
    return JoinedSequence(importer.bb.emit(relax.op.zeros(relax.ShapeExpr(dims), types[0].dtype.dtype)), axis)


def _append_rows(importer: Importer, initial: Any, rows: relax.Expr, count: int, title: str) -> LongSequence:
    """Append the rows of trips, each of `count` tensors, to a sequence."""
    bb = importer.bb
    if count > 1:
        dims = rows.ty.shape.values
        rows = bb.emit(relax.op.reshape(rows, relax.ShapeExpr([dims[0] * dims[1], *dims[2:]])))
    if isinstance(initial, LongSequence):
        return LongSequence(bb.emit(relax.op.concat([initial.stacked, rows], 0)))
    fields = [importer.as_tensor(bb.normalize(relax.TupleGetItem(initial, i))) for i in range(len(initial.ty.fields))]
    if not fields:
        return LongSequence(rows)
    if any(field.ty.ndim + 1 != rows.ty.ndim or field.ty.dtype != rows.ty.dtype for field in fields):
        raise FrontendError(f"{title} appends tensors of another type to a sequence than those it holds")
    return LongSequence(bb.emit(relax.op.concat([bb.emit(relax.op.stack(fields, 0)), rows], 0)))


def convert_sequence_map(
    importer: OnnxImporter, node: onnx.NodeProto, info: NodeInfo, operands: Sequence[Any]
) -> list[Any]:
    """Convert the graph of a `SequenceMap` for each element of a sequence of static length.

    Inputs after the first one may be tensors, which are passed with every element. Raises FrontendError if the first
    input is not a sequence, or sequences differ in length.
    """
    title, body = f"node {info}", inner_graph(node, "body", info)
    inputs = [elements_of(importer, value) for value in operands]
    if not inputs or inputs[0] is None:
        raise FrontendError(f"{title}: its first input is not a sequence whose length is known at import")
    count = len(inputs[0])
    for index, elements in enumerate(inputs):
        if elements is not None and len(elements) != count:
            raise FrontendError(f"{title}: input {index} has {len(elements)} elements, and its first one {count}")
    if len(body.input) != len(operands) or len(body.output) < len(node.output):
        raise FrontendError(
            f"{title} has {len(operands)} inputs and {len(node.output)} outputs, and its body {len(body.input)} and "
            f"{len(body.output)}"
        )
    budget().check_nodes(count * len(body.node), title)
    outputs: list[list[Any]] = [[] for _ in body.output]
    for index in range(count):
        arguments = {
            value.name: operand if elements is None else elements[index]
            for value, operand, elements in zip(body.input, operands, inputs, strict=True)
        }
        for values, value in zip(outputs, importer.graph_values(body, info.subgraphs["body"], arguments), strict=True):
            values.append(importer.as_tensor(value))
    return [relax.Tuple(values) for values in outputs]


def elements_of(importer: OnnxImporter, value: Any) -> list[Any] | None:
    """The tensors of a sequence of static length, or None for any other value."""
    if isinstance(value, relax.Tuple):
        return list(value.fields)
    if isinstance(value, relax.Expr) and isinstance(value.ty, tvm.ir.TupleType):
        return [importer.bb.emit(relax.TupleGetItem(value, index)) for index in range(len(value.ty.fields))]
    return None
