"""The code of one point, or of a vector of neighbouring points."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...tir.builder import Expr
from .flat import FlatBox
from .stages import Load, replaced, sources, with_loads

Held = Mapping[tirx.Buffer, tirx.Buffer]
"""By what it holds values of: a slot of memory with an element for each lane, which becomes a register."""


def slot(dtype: str, lanes: int) -> tirx.Buffer:
    """Memory for a vector, which LLVM makes a register."""
    return T.alloc_buffer((lanes,), dtype, scope="global")


@contextmanager
def over_lanes(lanes: int) -> Iterator[Expr]:
    """A loop over the lanes of a vector; none for one lane."""
    if lanes == 1:
        yield tirx.IntImm("int64", 0)
        return
    with T.vectorized(tirx.IntImm("int64", lanes)) as lane:
        yield lane


def reading(expr: Expr, held: Held, lane: Expr, inline: Mapping[tirx.Buffer, Expr]) -> Expr:
    """`expr` with what the nest itself made taken from slots, or computed where it is read."""
    if not held and not inline:
        return expr

    def change(load: Load) -> Expr:
        if load.source in inline:
            return inline[load.source]
        return tirx.BufferLoad(held[load.source], [lane]) if load.source in held else load

    return with_loads(expr, change)


def write_point(box: FlatBox, var: tirx.Var | None, start: Expr, lanes: int, sums: Held) -> None:
    """Compute the steps of `lanes` neighbouring points and store them.

    Parameters
    ----------
    box : FlatBox
    var : Var, optional
        The variable along which the points lie; none for a single point.
    start : PrimExpr
        Where the first is.
    lanes : int
    sums : mapping of Buffer to Buffer
        Slots of the reduced values.
    """
    nest = box.nest
    held: dict[tirx.Buffer, tirx.Buffer] = dict(sums)
    inline: dict[tirx.Buffer, Expr] = {}
    slots: dict[int, tirx.Buffer] = {}
    for n, (buffer, _) in enumerate(nest.steps):
        uses = sum(source.same_as(buffer) for _, later in nest.steps[n + 1 :] for source in sources(later))
        if uses > 1 and buffer.dtype != "bool":
            slots[n] = slot(buffer.dtype, lanes)
    last = {buffer: n for n, (buffer, _) in enumerate(nest.steps)}
    with over_lanes(lanes) as lane:
        at: Callable[[Expr], Expr] = lambda e: replaced(e, {var: start + lane}) if var is not None else e  # noqa: E731
        for buffer, register in sums.items():
            if buffer in box.places and buffer not in last:
                T.buffer_store(buffer, tirx.BufferLoad(register, [lane]), [at(box.places[buffer])])
        for n, (buffer, value) in enumerate(nest.steps):
            value = reading(at(value), held, lane, inline)
            held.pop(buffer, None)
            inline.pop(buffer, None)
            if n in slots:
                T.buffer_store(slots[n], value, [lane])
                value = tirx.BufferLoad(slots[n], [lane])
                held[buffer] = slots[n]
            else:
                inline[buffer] = value
            if buffer in box.places and last[buffer] == n:
                T.buffer_store(buffer, value, [at(box.places[buffer])])
