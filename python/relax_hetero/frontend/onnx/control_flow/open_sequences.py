"""Sequences that a loop appends to, while only a call knows its trips: what each trip appends becomes a row.

TorchScript writes lists so: a loop that inserts at the end of a sequence, and `ConcatFromSequence` behind it.
Where trips append tensors of different sizes, as `repeat_interleave` is exported, the loop carries them joined.
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
"""From the state and rows of a loop of tensors to those of the loop with sequences."""


def is_sequence(value: Any) -> bool:
    """Return whether a value is a sequence, of known length or not."""
    if isinstance(value, (LongSequence, JoinedSequence)):
        return True
    return isinstance(value, relax.Expr) and isinstance(value.ty, tvm.ir.TupleType)


def with_rows_for_sequences(importer: Importer, loop: Loop) -> tuple[Loop, Finish]:
    """The loop without the sequences of its state, rows in their place, and how to make its results of the other's.

    Raises
    ------
    FrontendError
        When a body is converted that does more with a sequence than append to it.
    """
    places = [index for index, value in enumerate(loop.state) if is_sequence(value)]
    joined = _joined_from_the_start(importer, loop, places)
    others = [index for index in range(len(loop.state)) if index in joined or index not in places]
    counts: dict[int, int] = {}

    def trip(index: Any, going_on: Any, values: list[Any]) -> Trip:
        given = dict(zip(others, values, strict=True))
        begun = {place: GrowingSequence() for place in places}
        found = loop.trip(index, going_on, [begun[i] if i in begun else given[i] for i in range(len(loop.state))])
        rows = []
        for place, begin in begun.items():
            items = _appended(importer, loop, place, begin, found.state[place])
            counts[place] = len(items)
            if place in joined:
                given[place] = importer.bb.emit(relax.op.concat([given[place], *items], joined[place].axis))
            elif items:
                rows.append(items[0] if len(items) == 1 else importer.bb.emit(relax.op.stack(items, 0)))
        state = [given[i] if i in joined else found.state[i] for i in others]
        return Trip(found.condition, state, [*found.rows, *rows])

    def finish(state: list[Any], rows: list[relax.Expr]) -> tuple[list[Any], list[relax.Expr]]:
        left, more = dict(zip(others, state, strict=True)), iter(rows[loop.rows :])
        results: list[Any] = []
        for index, initial in enumerate(loop.state):
            if index in joined:
                results.append(JoinedSequence(left[index], joined[index].axis))
            elif index in left:
                results.append(left[index])
            elif not counts[index]:
                results.append(initial)
            else:
                results.append(_joined(importer, initial, next(more), counts[index], loop.title))
        return results, rows[: loop.rows]

    names = [loop.names[i] for i in others]
    tensors = [joined[i].joined if i in joined else loop.state[i] for i in others]
    return replace(loop, state=tensors, names=names, trip=trip), finish


def _appended(importer: Importer, loop: Loop, place: int, begin: GrowingSequence, grown: Any) -> list[relax.Expr]:
    """The tensors that a trip appended to a sequence."""
    if not isinstance(grown, GrowingSequence) or grown.begin is not begin.begin:
        raise FrontendError(
            f"{loop.title}: its body does more with the sequence {loop.names[place]!r} than append to it; "
            "expected a number of trips that is known at import"
        )
    return [tensor_of(importer, item, loop.title) for item in grown.appended]


def _joined_from_the_start(importer: Importer, loop: Loop, places: list[int]) -> dict[int, JoinedSequence]:
    """The sequences to which trips append tensors of sizes of their own, along the axis by which they are joined later.

    They are found by a trip that is converted for its types only.
    """
    wanted = [place for place in places if place < len(loop.joins) and loop.joins[place] is not None]
    if not wanted:
        return {}
    begun = {place: GrowingSequence() for place in places}
    state = [
        begun[i] if i in begun else relax.Var(f"value{i}", tensor_of(importer, value, loop.title).ty)
        for i, value in enumerate(loop.state)
    ]
    index = relax.Var("trip", relax.TensorType((), "int64"))
    importer.bb.begin_scope([index, *(value for value in state if isinstance(value, relax.Var))])
    try:
        with importer.trial(), importer.block(loop.info) as body:
            found = loop.trip(index, number(True, "bool"), state)
            items = {i: _appended(importer, loop, i, begun[i], found.state[i]) for i in wanted}
    finally:
        importer.bb.end_scope()
    casts = [binding.ty for binding in body if isinstance(binding, relax.MatchCast)]
    read = relax.analysis.free_vars(relax.SeqExpr([relax.BindingBlock(body)], relax.Tuple(sum(items.values(), []))))
    own = sizes_in(casts) - sizes_in(var.ty for var in read)
    starts = {i: _empty_start(importer, loop.state[i], items[i], loop.joins[i], own) for i in wanted}
    return {place: start for place, start in starts.items() if start is not None}


def _empty_start(
    importer: Importer, initial: Any, items: list[relax.Expr], axis: Any, own: set[tvm.tirx.Var]
) -> JoinedSequence | None:
    """No tensors, to be joined along an axis; None unless it is the axis, and the only one, whose size a trip finds."""
    types = [item.ty for item in items]
    if not types or isinstance(initial, LongSequence) or initial.ty.fields or len({ty.ndim for ty in types}) != 1:
        return None
    if not all(isinstance(ty.shape, relax.ShapeExpr) and -ty.ndim <= axis < ty.ndim for ty in types):
        return None
    axis %= types[0].ndim
    found = [[bool(sizes_in([relax.ShapeType([dim])]) & own) for dim in ty.shape.values] for ty in types]
    if not any(any(each) for each in found) or any(any([*each[:axis], *each[axis + 1 :]]) for each in found):
        return None
    dims = [0 if i == axis else dim for i, dim in enumerate(types[0].shape.values)]
    return JoinedSequence(importer.bb.emit(relax.op.zeros(relax.ShapeExpr(dims), types[0].dtype.dtype)), axis)


def _joined(importer: Importer, initial: Any, rows: relax.Expr, count: int, title: str) -> LongSequence:
    """A sequence, and behind it the rows of trips that appended `count` tensors each."""
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


# `SequenceMap`: a graph is converted once for each element of a sequence, whose length is known at import.


def convert_sequence_map(
    importer: OnnxImporter, node: onnx.NodeProto, info: NodeInfo, operands: Sequence[Any]
) -> list[Any]:
    """The outputs of a `SequenceMap`: sequences. Inputs behind the first may be tensors, which every element gets.

    Raises
    ------
    FrontendError
        The first input is no sequence, or sequences differ in length.
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
    found: list[list[Any]] = [[] for _ in body.output]
    for index in range(count):
        given = {
            value.name: operand if elements is None else elements[index]
            for value, operand, elements in zip(body.input, operands, inputs, strict=True)
        }
        for values, value in zip(found, importer.graph_values(body, info.subgraphs["body"], given), strict=True):
            values.append(importer.as_tensor(value))
    return [relax.Tuple(values) for values in found]


def elements_of(importer: OnnxImporter, value: Any) -> list[Any] | None:
    """The tensors of a sequence; None for any other value."""
    if isinstance(value, relax.Tuple):
        return list(value.fields)
    if isinstance(value, relax.Expr) and isinstance(value.ty, tvm.ir.TupleType):
        return [importer.bb.emit(relax.TupleGetItem(value, index)) for index in range(len(value.ty.fields))]
    return None
