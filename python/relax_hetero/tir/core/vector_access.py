"""Vectors of a kernel's parameter: runs cut into vectors, partial ones masked, far apart ones gathered."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from .builder import Expr, int64, lane_of, vector_type, zeros
from .storage import Storage

EMPTY = tirx.const(False, "bool")
"""The mask of no lanes."""


def split_run(length: int, lanes: int) -> list[tuple[int, int]]:
    """Starts and widths (powers of two) of the vectors that cover a run."""
    found, start = [], 0
    while start < length:
        width = min(lanes, 1 << ((length - start).bit_length() - 1))
        found.append((start, width))
        start += width
    return found


def tail_mask(extent: Expr, tile: int, column: Expr, start: int, width: int) -> Expr | None:
    """Which lanes of a vector in the last, partial tile exist; `EMPTY` and None where it is known that none, all do.

    Known cases are told apart here: TVM drops a store of a masked load whose mask it can prove empty.
    """
    if not isinstance(extent, int):
        return T.ramp(column + start, 1, width) < T.broadcast(extent, width) if width > 1 else column + start < extent
    valid = extent % tile - start
    if valid <= 0:
        return EMPTY
    if valid >= width:
        return None
    return T.ramp(int64(0), 1, width) < T.broadcast(int64(valid), width)


def masked_vector(storage: Storage, index: Expr, width: int, mask: Expr | None) -> Expr:
    """Elements of a storage, zeros where the mask does not hold."""
    raw = str(storage.data.dtype)
    if mask is None:
        return storage.data[index]
    if mask is EMPTY:
        return zeros(raw, width)
    if width == 1:
        return T.if_then_else(mask, storage.data[index], tirx.const(0, raw))
    # LLVM is told that the lanes left out are poison; the selection becomes part of the load. Bound, because TVM takes
    # the inner mask for true where the outer one is.
    vector = T.bind(T.masked_load(vector_type(raw, width), storage.data, index, mask))
    return T.Select(mask, vector, zeros(raw, width))


def loaded(storage: Storage, where: Expr, mask: Expr | None, width: int) -> tirx.Expr:
    """Elements of a storage as its own type, zeros where the mask does not hold."""
    value = masked_vector(storage, where, width, mask)
    if storage.dtype == "bfloat16":
        value = T.reinterpret(vector_type("bfloat16", value.ty.dtype.lanes), value)
    return value


def gathered(storage: Storage, offset: Expr, step: Expr, mask: Expr | None, width: int) -> tirx.Expr:
    """As `loaded`, of elements that are `step` apart."""
    if width == 1:
        return loaded(storage, offset, mask, 1)
    lanes = []
    for lane in range(width):
        inside = mask if mask is None or mask is EMPTY else lane_of(mask, lane)
        lanes.append(loaded(storage, offset + lane * step, inside, 1))
    return T.Shuffle(lanes, list(range(width)))
