"""Loops whose trips are known at import and few: their bodies one after the other."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from .loop import Loop
from .subgraphs import Importer, known_number, number, tensor_of


class NotUnrolledError(Exception):
    """The body computes its condition when the model runs."""


def unroll(importer: Importer, loop: Loop, count: int) -> tuple[list[Any], list[relax.Expr]]:
    """The last state and the rows of a loop of at most `count` trips.

    Raises
    ------
    NotUnrolledError
        Whether there is another trip is computed when the model runs.
    """
    if loop.condition is not None and known_number(loop.condition) is None:
        raise NotUnrolledError
    state = list(loop.state)
    rows: list[list[relax.Expr]] = [[] for _ in range(loop.rows)]
    with importer.trial() as keep, importer.block(loop.info) as bindings:
        for index in range(count):
            trip = loop.trip(number(index, "int64"), number(True, "bool"), state)
            state = trip.state
            for row, one in zip(rows, trip.rows, strict=True):
                row.append(tensor_of(importer, one, loop.title))
            goes_on = 1 if trip.condition is None else known_number(trip.condition)
            if goes_on is None and index < count - 1:
                raise NotUnrolledError
            if not goes_on:
                break
        made = [
            _stacked(importer, own) if own else _no_rows(importer, loop, position) for position, own in enumerate(rows)
        ]
        keep()
    importer.adopt(bindings, loop.info)
    return state, made


def _stacked(importer: Importer, rows: list[relax.Expr]) -> relax.Expr:
    return importer.bb.emit(relax.op.stack(rows, 0))


def _no_rows(importer: Importer, loop: Loop, position: int) -> relax.Expr:
    """The rows of no trip: none, of the shape that a trip would have given."""
    with importer.trial(), importer.block(loop.info):
        trip = loop.trip(number(0, "int64"), number(True, "bool"), list(loop.state))
        ty = tensor_of(importer, trip.rows[position], loop.title).ty
    shape = ty.shape.values if isinstance(ty.shape, relax.ShapeExpr) else [0] * max(ty.ndim, 0)
    sizes = [0, *(int(dim) if isinstance(dim, tvm.tirx.IntImm) else 0 for dim in shape)]
    return relax.op.zeros(relax.ShapeExpr(sizes), ty.dtype.dtype)
