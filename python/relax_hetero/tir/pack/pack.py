"""Kernels that lay a tensor out, undo it, or change one layout into another. Padding is written as zeros.

Parameters of every kernel: source, destination. Symbolic extents are bound from the buffer that shows them; between two
layouts that both pad a symbolic dimension, whole tiles are copied, padding included.

Bytes are moved as integers, so every type of a width shares its code and NaN payloads stay. The ways that are tried, in
order: windows that are transformed (`window_transform`, of floats), transposes in registers (`tile_transpose`), runs
along the last dimension (`tile_copy`), element by element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.packed_layout import CHUNK_BYTES, PackedLayout
from ...encoding.problem import Dim
from ...encoding.winograd import WINDOW, window_matrix
from ...errors import EncodingError
from ...target.cpu_target import CpuTarget
from ...target.element_types import bytes_of
from ..core.builder import (
    Expr,
    Function,
    Registers,
    ceil_div,
    constant,
    int64,
    lane_indices,
    let,
    loop,
    masked_store,
    minimum,
    zeros,
)
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
from ..core.view import split_position
from ..core.work_split import for_parts, nest_loops
from ..math.vector_math import once
from .tile_transpose import transpose_tiles

# Windows of a convolution's weight that is no constant, transformed in a call; `encoding.winograd` has the numbers.


def transform_windows(source: PackedStorage, destination: PackedStorage, cpu: CpuTarget) -> bool:
    """Write the kernel where the destination holds transformed windows; whether it does.

    Computed in float64, as at compile time.
    """
    layout = destination.layout
    if not layout.winograd:
        return False
    matrix = window_matrix(layout.winograd)
    columns, outer_window, inner_window, *others = layout.outer_perm
    tile = layout.tile(columns)
    extent = source.extents[columns]

    def window(positions: list[Expr]) -> None:
        column, *places = positions

        def load(row: int, place: int) -> Expr:
            position = {columns: column, outer_window: row, inner_window: place}
            position |= zip(others, places, strict=True)
            at = [position[dim] for dim in range(len(position))]
            value = source.data[source.offset(*split_position(source.layout, at))]
            if not whole(extent, tile):
                value = T.if_then_else(column < extent, value, tirx.const(0, source.nominal))
            return let(tirx.Cast("float64", value))

        half = [_along(matrix, [load(row, place) for row in range(WINDOW)]) for place in range(WINDOW)]
        for i in range(len(matrix)):
            for j, value in enumerate(_along(matrix, [line[i] for line in half])):
                outer = dict(zip(layout.outer_perm, (column // tile, i, j, *places), strict=True))
                to = destination.offset(outer, {columns: column % tile})
                T.buffer_store(destination.data, tirx.Cast(destination.nominal, value), [to])

    extents = [destination.tiles[columns] * tile, *(destination.tiles[dim] for dim in others)]
    for_parts(extents, destination.bytes(), cpu, window)
    return True


def _along(matrix: np.ndarray, line: Sequence[Expr]) -> list[Expr]:
    """A line of a window, transformed."""
    values = []
    for row in matrix:
        terms = [
            tirx.const(float(factor), "float64") * value for factor, value in zip(row, line, strict=True) if factor
        ]
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        values.append(let(total))
    return values


# Copies between row-major and packed storage whose vectors run along the last logical dimension.

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


def pack_kernel(shape: Sequence[Dim], dtype: str, layout: PackedLayout, cpu: CpuTarget) -> tirx.PrimFunc:
    """Row-major to `layout`.

    Parameters
    ----------
    shape : sequence of int or str
        Logical extents; a symbolic one is a name.
    layout : PackedLayout
        Layout of the destination.

    Raises
    ------
    EncodingError
        As every function here: if the source holds transformed windows, which only constants do.
    """
    return _kernel("pack", shape, dtype, PackedLayout.identity(len(shape)), layout, cpu)


def unpack_kernel(shape: Sequence[Dim], dtype: str, layout: PackedLayout, cpu: CpuTarget) -> tirx.PrimFunc:
    """`layout` to row-major; parameters as of `pack_kernel`."""
    return _kernel("unpack", shape, dtype, layout, PackedLayout.identity(len(shape)), cpu)


def relayout_kernel(
    shape: Sequence[Dim], dtype: str, source: PackedLayout, destination: PackedLayout, cpu: CpuTarget
) -> tirx.PrimFunc:
    """One layout to another; parameters as of `pack_kernel`."""
    return _kernel("relayout", shape, dtype, source, destination, cpu)


def _kernel(
    name: str, shape: Sequence[Dim], dtype: str, source: PackedLayout, destination: PackedLayout, cpu: CpuTarget
) -> tirx.PrimFunc:
    if source.winograd:
        raise EncodingError(f"found source layout {source}, expected one whose windows are not transformed")
    function = Function(name)
    with function:
        bound: set[str] = set()
        sides = [
            PackedStorage(function, side, shape, dtype, layout, bound)
            for side, layout in (("source", source), ("destination", destination))
        ]
        with function.body():
            for side in sides:
                side.open(raw=not destination.winograd)
            ways = (transform_windows, transpose_tiles, copy_runs, interleave_rows)
            if not any(way(sides[0], sides[1], cpu) for way in ways):
                _copy_elements(sides[0], sides[1], cpu)
            if destination.compensation:
                _compensate(sides[1], cpu)
    return function.result


def _copy_elements(source: PackedStorage, destination: PackedStorage, cpu: CpuTarget) -> None:
    """Any layout to any other, element by element of the destination."""
    layout, rank = destination.layout, len(destination.shape)
    extents = extents_of([source, destination])

    def tiles(positions: list[Expr]) -> None:
        outer = dict(zip(layout.outer_perm, positions, strict=True))
        nest_loops(layout.inner_tiles, lambda within: element(outer, dict(zip(layout.inner_dims, within, strict=True))))

    def element(outer: dict[int, Expr], inner: dict[int, Expr]) -> None:
        at = [outer[d] * layout.tile(d) + inner.get(d, 0) for d in range(rank)]
        value = source.data[source.offset(*split_position(source.layout, at))]
        inside = [at[d] < extents[d] for d in range(rank) if not whole(extents[d], layout.tile(d))]
        if inside:
            condition = inside[0]
            for further in inside[1:]:
                condition = tirx.And(condition, further)
            value = T.if_then_else(condition, value, tirx.const(0, str(source.data.dtype)))
        T.buffer_store(destination.data, value, [destination.offset(outer, inner)])

    for_parts([destination.tiles[d] for d in layout.outer_perm], destination.bytes(), cpu, tiles)


def _compensate(destination: PackedStorage, cpu: CpuTarget) -> None:
    """Fill the blocks of ``-128 * column sum`` from what was packed."""
    layout = destination.layout
    *columns, last = layout.inner_dims
    words = destination.elements("int32")
    dims = [d for d in layout.outer_perm if d != last]
    width = math.prod(map(layout.tile, columns))
    lanes = math.gcd(width, cpu.lanes("int32"))

    def block(positions: list[Expr]) -> None:
        at = dict(zip(dims, positions, strict=True))
        # PackedStorage.offset skips the block that is written here.
        first = tirx.floordiv(destination.offset(at, {}), 4)
        stride = tirx.floordiv(destination.outer_stride(last), 4)
        with loop(width // lanes) as vector:
            column = vector * lanes
            total = Registers(1, "int32", lanes)
            total[0] = zeros("int32", lanes)
            with loop(destination.tiles[last]) as index:
                word = once(words[lane_indices(first + index * stride + column, lanes)])
                added = T.shift_right(word, constant(24, "int32", lanes))
                for left in (8, 16, 24):
                    high = T.shift_left(word, constant(left, "int32", lanes))
                    added = added + T.shift_right(high, constant(24, "int32", lanes))
                total[0] = total[0] + added
            here = lane_indices(first - stride + column, lanes)
            T.buffer_store(words, total[0] * constant(-128, "int32", lanes), [here])

    for_parts([destination.tiles[d] for d in dims], destination.bytes(), cpu, block)
