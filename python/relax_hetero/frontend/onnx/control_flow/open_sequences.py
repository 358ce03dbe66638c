"""Sequences that a loop appends to, while only a call knows its trips: what each trip appends becomes a row.

TorchScript writes lists so: a loop that inserts at the end of a sequence, and `ConcatFromSequence` behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import tvm
from tvm import relax

from ....errors import FrontendError
from ...ops.sequences import GrowingSequence, LongSequence
from .loop import Loop, Trip
from .subgraphs import Importer, tensor_of

Finish = Callable[[list[Any], list[relax.Expr]], tuple[list[Any], list[relax.Expr]]]
"""From the state and rows of a loop of tensors to those of the loop with sequences."""


def is_sequence(value: Any) -> bool:
    """Whether a value is a sequence, of known length or not."""
    if isinstance(value, LongSequence):
        return True
    return isinstance(value, relax.Expr) and isinstance(value.ty, tvm.ir.TupleType)


def with_rows_for_sequences(importer: Importer, loop: Loop) -> tuple[Loop, Finish]:
    """The loop without the sequences of its state, rows in their place, and how to make its results of the other's.

    Raises
    ------
    FrontendError: When a body is converted that does more with a sequence than append to it.
    """
    places = [index for index, value in enumerate(loop.state) if is_sequence(value)]
    counts: dict[int, int] = {}

    def trip(index: Any, going_on: Any, values: list[Any]) -> Trip:
        rest = iter(values)
        begun = {place: GrowingSequence() for place in places}
        found = loop.trip(index, going_on, [begun[i] if i in begun else next(rest) for i in range(len(loop.state))])
        rows = []
        for place, begin in begun.items():
            grown = found.state[place]
            if not isinstance(grown, GrowingSequence) or grown.begin is not begin.begin:
                raise FrontendError(
                    f"{loop.title}: its body does more with the sequence {loop.names[place]!r} than append to it; "
                    "expected a number of trips that is known at import"
                )
            items = [tensor_of(importer, item, loop.title) for item in grown.appended]
            counts[place] = len(items)
            if items:
                rows.append(items[0] if len(items) == 1 else importer.bb.emit(relax.op.stack(items, 0)))
        tensors = [value for i, value in enumerate(found.state) if i not in begun]
        return Trip(found.condition, tensors, [*found.rows, *rows])

    def finish(state: list[Any], rows: list[relax.Expr]) -> tuple[list[Any], list[relax.Expr]]:
        rest, more = iter(state), iter(rows[loop.rows :])
        results = []
        for index, initial in enumerate(loop.state):
            if index not in places:
                results.append(next(rest))
            elif not counts[index]:
                results.append(initial)
            else:
                results.append(_joined(importer, initial, next(more), counts[index], loop.title))
        return results, rows[: loop.rows]

    own = [loop.names[i] for i in range(len(loop.state)) if i not in places]
    tensors = [value for i, value in enumerate(loop.state) if i not in places]
    return replace(loop, state=tensors, names=own, trip=trip), finish


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
