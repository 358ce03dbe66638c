"""Logical positions of storage elements, for threads that write storage in order and locate operands by position."""

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

THREADS = 256  # threads of a block of a memory-bound kernel


def innermost(layout: PackedLayout, shape: Sequence[Expr]) -> int:
    """Dimension along which storage is contiguous."""
    for d in reversed(layout.inner_dims):
        if layout.tile(d) > 1:
            return d
    moving = [d for d in layout.outer_perm if not (isinstance(shape[d], int) and shape[d] == 1)]
    return moving[-1] if moving else layout.outer_perm[-1]


def run_length(layout: PackedLayout, shape: Sequence[Expr], dtype: str) -> int:
    """Length of contiguous runs along the innermost dimension; 1 if it is symbolic."""
    d = innermost(layout, shape)
    extent = layout.tile(d) if layout.tile(d) > 1 else shape[d]
    if layout.swizzle:
        return CHUNK_BYTES // bytes_of(dtype)
    return extent if isinstance(extent, int) else 1


def position_of(storage: PackedStorage, vector: Expr, lanes: int) -> list[Expr]:
    """Logical position of the first element of a vector that is contiguous in tensor and storage.

    `vector`: number of the vector in storage, int64. `lanes`: a divisor of `run_length`.
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


def is_inside(layout: PackedLayout, extents: Sequence[Expr], position: Sequence[Expr]) -> Expr | None:
    """Predicate of positions that are not padding; None if there is no padding."""
    condition: Expr | None = None
    for d, extent in enumerate(extents):
        if not is_multiple(extent, layout.tile(d)):
            in_extent = position[d] < extent
            condition = in_extent if condition is None else tirx.And(condition, in_extent)
    return condition


def blocks_for(units: Expr) -> Expr:
    """Grid size for a thread per unit, at least 1."""
    return int64(at_least_one(ceil_div(units, THREADS)))


def empty_launch() -> None:
    """Write a launch that does nothing, for tensors without elements."""
    with T.thread_binding(1, thread="blockIdx.x"), T.thread_binding(1, thread="threadIdx.x"):
        T.evaluate(0)


def common_lanes(max_lanes: int, runs: Sequence[int]) -> int:
    """Maximum lanes of a vector that divides all run lengths."""
    return math.gcd(1 << (max_lanes.bit_length() - 1), *runs)
