"""Copies between row-major and packed storage whose vectors run along the last logical dimension."""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.packed_layout import CHUNK_BYTES
from ...target.cpu_target import CpuTarget
from ...target.element_types import bytes_of
from ..core.builder import Expr, ceil_div, int64, lane_indices, loop, masked_store, minimum, zeros
from ..core.packed_storage import (
    EMPTY,
    PackedStorage,
    by_wholeness,
    extents_of,
    masked_vector,
    split_run,
    tail_mask,
    whole,
)
from ..core.work_split import for_parts, nest_loops

ROWS = 16
"""Rows that are copied tile by tile: reads go along rows, writes fill a few kilobytes of each tile column."""


def copy_runs(source: PackedStorage, destination: PackedStorage, cpu: CpuTarget) -> bool:
    """Copy where one side is row-major and the innermost tile of the other lies along the last dimension.

    ``(k, n) -> [n/32, k, 32]``, ``(m, n) -> [m/8, n/32, 8, 32]``, and back. Returns False, with nothing written, for
    other layouts.
    """
    packed, packing = (destination, True) if source.layout.is_identity else (source, False)
    plain = source if packing else destination
    last = len(packed.shape) - 1
    inner = _real_inner(packed)
    lanes = cpu.lanes(plain.nominal)
    if packed.layout.swizzle:
        # Chunks stay whole.
        lanes = min(lanes, CHUNK_BYTES // bytes_of(plain.nominal))
    if not plain.layout.is_identity or not inner or inner[-1] != last or lanes == 1:
        return False
    extents = extents_of([source, destination])
    tile = packed.layout.tile(last)
    vectors = split_run(tile, lanes)

    def run(outer: dict[int, Expr], within: dict[int, Expr], full: bool) -> None:
        at = {d: outer[d] * packed.layout.tile(d) + within.get(d, 0) for d in outer}
        column = outer[last] * tile
        for start, width in vectors:
            there = lane_indices(packed.offset(outer, {**within, last: start}), width)
            here = lane_indices(plain.offset({**at, last: column + start}, {}), width)
            mask = None if full else tail_mask(extents[last], tile, column, start, width)
            _move(plain, here, packed, there, width, mask, packing)

    def clear(outer: dict[int, Expr], within: dict[int, Expr]) -> None:
        for start, width in vectors:
            there = lane_indices(packed.offset(outer, {**within, last: start}), width)
            T.buffer_store(packed.data, zeros(str(packed.data.dtype), width), [there])

    def rows(outer: dict[int, Expr], full: bool) -> None:
        tiled = inner[:-1]

        def row(positions: list[Expr]) -> None:
            within = dict(zip(tiled, positions, strict=True))
            ragged = [d for d in tiled if not whole(extents[d], packed.layout.tile(d))]
            if not ragged:
                run(outer, within, full)
                return
            inside: Expr = tirx.const(True, "bool")
            for d in ragged:
                inside = tirx.And(inside, outer[d] * packed.layout.tile(d) + within[d] < extents[d])
            with T.If(inside):
                with T.Then():
                    run(outer, within, full)
                if packing:
                    with T.Else():
                        clear(outer, within)

        nest_loops([packed.layout.tile(d) for d in tiled], row)

    _tiles(packed, extents, cpu, rows)
    return True


def interleave_rows(source: PackedStorage, destination: PackedStorage, cpu: CpuTarget) -> bool:
    """Pack where groups of 2 or 4 rows are interleaved: ``(k, n) -> [n/32, k/4, 32, 4]``.

    Returns False, with nothing written, for other layouts.
    """
    rank, inner = len(source.shape), _real_inner(destination)
    layout = destination.layout
    if not source.layout.is_identity or len(inner) != 2 or inner[0] != rank - 1 or layout.swizzle:
        return False
    columns, rows = inner
    group, tile = layout.tile(rows), layout.tile(columns)
    width = math.gcd(tile, max(1, cpu.lanes(source.nominal) // group))
    if group not in (2, 4) or width == 1:
        return False
    extents = extents_of([source, destination])
    raw = str(source.data.dtype)
    order = [row * width + lane for lane in range(width) for row in range(group)]

    def chunk(outer: dict[int, Expr], full: bool, full_rows: bool) -> None:
        for start in range(0, tile, width):
            first = outer[columns] * tile
            column = first + start
            mask = None if full else tail_mask(extents[columns], tile, first, start, width)
            loaded = []
            for i in range(group):
                row = outer[rows] * group + i
                safe = row if full_rows else T.min(row, extents[rows] - 1)
                base = source.offset({**outer, rows: safe, columns: column}, {})
                value = masked_vector(source, lane_indices(base, width), width, mask)
                if not full_rows:
                    value = T.Select(T.broadcast(row < extents[rows], width), value, zeros(raw, width))
                loaded.append(T.bind(value))
            there = lane_indices(destination.offset(outer, {columns: start}), width * group)
            T.buffer_store(destination.data, T.Shuffle(loaded, order), [there])

    def body(outer: dict[int, Expr], full: bool) -> None:
        by_wholeness(extents[rows], group, outer[rows], lambda full_rows: chunk(outer, full, full_rows))

    _tiles(destination, extents, cpu, body)
    return True


def _tiles(
    packed: PackedStorage, extents: list[Expr], cpu: CpuTarget, body: Callable[[dict[int, Expr], bool], None]
) -> None:
    """Visit every tile by its outer position; `body` also hears whether the tile is whole along the last dimension."""
    order, last = packed.layout.outer_perm, len(packed.shape) - 1
    tile = packed.layout.tile(last)

    if order[-1] == last:

        def one(positions: list[Expr]) -> None:
            outer = dict(zip(order, positions, strict=True))
            by_wholeness(extents[last], tile, outer[last], lambda full: body(outer, full))

        for_parts([packed.tiles[d] for d in order], packed.bytes(), cpu, one)
        return
    # Tile columns are far apart in storage: a few rows of each at a time.
    rows = order[-1]
    others = [d for d in order if d not in (rows, last)]
    count = packed.tiles[rows]

    def several(positions: list[Expr]) -> None:
        outer = dict(zip(others, positions[:-2], strict=True))
        first = positions[-2] * ROWS
        outer[last] = positions[-1]

        def inside(full: bool) -> None:
            with loop(minimum(ROWS, int64(count) - first) if not whole(count, ROWS) else ROWS) as row:
                body({**outer, rows: first + row}, full)

        by_wholeness(extents[last], tile, outer[last], inside)

    counts = [packed.tiles[d] for d in others] + [ceil_div(count, ROWS), packed.tiles[last]]
    for_parts(counts, packed.bytes(), cpu, several)


def _real_inner(storage: PackedStorage) -> list[int]:
    return [d for d in storage.layout.inner_dims if storage.layout.tile(d) > 1]


def _move(
    plain: PackedStorage, here: Expr, packed: PackedStorage, there: Expr, width: int, mask: Expr | None, packing: bool
) -> None:
    if packing:
        T.buffer_store(packed.data, masked_vector(plain, here, width, mask), [there])
    elif mask is None:
        T.buffer_store(plain.data, packed.data[there], [here])
    elif mask is EMPTY:
        return
    elif width == 1:
        with T.If(mask), T.Then():
            T.buffer_store(plain.data, packed.data[there], [here])
    else:
        masked_store(plain.data, here, packed.data[there], mask)
