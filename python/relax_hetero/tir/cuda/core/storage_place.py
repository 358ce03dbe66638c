"""Positions in a tensor of places in its storage: threads that write storage in order find operands by them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.packed_layout import CHUNK_BYTES, PackedLayout
from ....target.element_types import bytes_of
from ...core.builder import Expr, ceil_div, int64, materialize, plain_extent
from ...core.packed_storage import PackedStorage, is_multiple
from ...core.work_split import unravel
from .launch import at_least_one

THREADS = 256
"""Threads of a block of a kernel that only moves memory."""


def innermost(layout: PackedLayout, shape: Sequence[Expr]) -> int:
    """The dimension along which neighbours in storage are neighbours in the tensor."""
    for d in reversed(layout.inner_dims):
        if layout.tile(d) > 1:
            return d
    moving = [d for d in layout.outer_perm if not (isinstance(shape[d], int) and shape[d] == 1)]
    return moving[-1] if moving else layout.outer_perm[-1]


def run_length(layout: PackedLayout, shape: Sequence[Expr], dtype: str) -> int:
    """Elements along the innermost dimension of which neighbours stay neighbours; 1 where only the run knows."""
    d = innermost(layout, shape)
    extent = layout.tile(d) if layout.tile(d) > 1 else shape[d]
    if layout.swizzle:
        return CHUNK_BYTES // bytes_of(dtype)
    return extent if isinstance(extent, int) else 1


def place_of(storage: PackedStorage, vector: Expr, lanes: int) -> list[Expr]:
    """The position in the tensor of the first element of a vector, whose lanes are neighbours in tensor and storage.

    Parameters
    ----------
    vector : PrimExpr
        Its number in storage, int64.
    lanes : int
        A divisor of `run_length`.
    """
    layout = storage.layout
    extents = [plain_extent(extent) for extent in storage.physical]
    axis = len(extents) - 1
    while axis and lanes > 1 and extents[axis] == 1:
        axis -= 1
    extents[axis] = extents[axis] // lanes
    positions = unravel(vector, extents, place=materialize, rest=materialize)
    positions[axis] = positions[axis] * lanes
    rank = len(layout.outer_perm)
    inner = positions[rank:]
    if layout.swizzle:
        inner[1] = materialize(layout.swizzled_column(inner[0], inner[1], storage.nominal))
    within = dict(zip(layout.inner_dims, inner, strict=True))
    outer = dict(zip(layout.outer_perm, positions[:rank], strict=True))
    return [outer[d] * layout.tile(d) + within.get(d, 0) for d in range(rank)]


def is_inside(layout: PackedLayout, extents: Sequence[Expr], place: Sequence[Expr]) -> Expr | None:
    """Return whether a position in storage of `layout` is no padding; None where there is none."""
    condition: Expr | None = None
    for d, extent in enumerate(extents):
        if not is_multiple(extent, layout.tile(d)):
            holds = place[d] < extent
            condition = holds if condition is None else tirx.And(condition, holds)
    return condition


def blocks_for(units: Expr) -> Expr:
    """Blocks of a launch that has a thread for each of some units."""
    return int64(at_least_one(ceil_div(units, THREADS)))


def nothing() -> None:
    """A launch that does nothing: of a kernel whose tensors have no elements."""
    with T.thread_binding(1, thread="blockIdx.x"), T.thread_binding(1, thread="threadIdx.x"):
        T.evaluate(0)


def common_lanes(widest: int, runs: Sequence[int]) -> int:
    """The most lanes of vectors that all of some runs are cut into."""
    return math.gcd(1 << (widest.bit_length() - 1), *runs)
