"""Kernels that pack a tensor, unpack it, or change one layout into another. Padding is written as zeros.

Parameters of every kernel: source, destination. Symbolic extents are bound from the buffer that shows them; between two
layouts that both pad a symbolic dimension, whole tiles are copied, padding included.

Bytes are moved as integers, so all types of one width share code and NaN payloads stay. Methods are tried in this
order: Winograd transforms of windows (`transform_windows`), transposes in registers (`transpose_tiles`), runs along the
last dimension (`copy_runs`), interleaved rows (`interleave_rows`), single elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce

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
    extents_of,
    is_multiple,
    masked_vector,
    split_run,
    split_tail,
    tail_mask,
)
from ..core.view import split_position
from ..core.work_split import for_parts, nest_loops
from ..math.vector_math import once
from .tile_transpose import transpose_tiles

# Winograd transforms of a convolution's weight that is not a constant; `encoding.winograd` has the matrices.


def transform_windows(source: PackedStorage, destination: PackedStorage, cpu: CpuTarget) -> bool:
    """Write transformed windows, computed in float64 as at compile time; return False for other destinations."""
    layout = destination.layout
    if not layout.winograd:
        return False
    matrix = window_matrix(layout.winograd)
    columns, outer_window, inner_window, *outer_dims = layout.outer_perm
    tile = layout.tile(columns)
    extent = source.extents[columns]

    def window(positions: list[Expr]) -> None:
        column, *coordinates = positions

        def load(row: int, window_column: int) -> Expr:
            position = {columns: column, outer_window: row, inner_window: window_column}
            position |= zip(outer_dims, coordinates, strict=True)
            at = [position[dim] for dim in range(len(position))]
            value = source.data[source.offset(*split_position(source.layout, at))]
            if not is_multiple(extent, tile):
                value = T.if_then_else(column < extent, value, tirx.const(0, source.nominal))
            return let(tirx.Cast("float64", value))

        half_transformed = [
            _transform_line(matrix, [load(row, window_column) for row in range(WINDOW)])
            for window_column in range(WINDOW)
        ]
        for i in range(len(matrix)):
            for j, value in enumerate(_transform_line(matrix, [line[i] for line in half_transformed])):
                outer = dict(zip(layout.outer_perm, (column // tile, i, j, *coordinates), strict=True))
                offset = destination.offset(outer, {columns: column % tile})
                T.buffer_store(destination.data, tirx.Cast(destination.nominal, value), [offset])

    extents = [destination.tiles[columns] * tile, *(destination.tiles[dim] for dim in outer_dims)]
    for_parts(extents, destination.bytes(), cpu, window)
    return True


def _transform_line(matrix: np.ndarray, line: Sequence[Expr]) -> list[Expr]:
    """A row or column of a window times the transposed matrix."""
    values = []
    for row in matrix:
        terms = [
            tirx.const(float(factor), "float64") * value for factor, value in zip(row, line, strict=True) if factor
        ]
        values.append(let(sum(terms[1:], terms[0])))
    return values


# Copies between row-major and packed storage by vectors along the last logical dimension.

BLOCK_ROWS = 16
"""Rows of a block that is copied tile by tile: reads go along rows, writes fill a few kilobytes of each tile column."""


def copy_runs(source: PackedStorage, destination: PackedStorage, cpu: CpuTarget) -> bool:
    """Copy where one side is row-major and the innermost tile of the other lies along the last dimension.

    ``(k, n) -> [n/32, k, 32]``, ``(m, n) -> [m/8, n/32, 8, 32]``, and back. Returns False, with nothing written, for
    other layouts.
    """
    packed, packing = (destination, True) if source.layout.is_identity else (source, False)
    plain = source if packing else destination
    last = len(packed.shape) - 1
    inner = _tiled_dims(packed)
    lanes = cpu.lanes(plain.nominal)
    if packed.layout.swizzle:
        # Swizzling permutes chunks, so that a vector must not cross one.
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
            packed_index = lane_indices(packed.offset(outer, {**within, last: start}), width)
            plain_index = lane_indices(plain.offset({**at, last: column + start}, {}), width)
            mask = None if full else tail_mask(extents[last], tile, column, start, width)
            _move(plain, plain_index, packed, packed_index, width, mask, packing)

    def clear(outer: dict[int, Expr], within: dict[int, Expr]) -> None:
        for start, width in vectors:
            packed_index = lane_indices(packed.offset(outer, {**within, last: start}), width)
            T.buffer_store(packed.data, zeros(str(packed.data.dtype), width), [packed_index])

    def rows(outer: dict[int, Expr], full: bool) -> None:
        tiled = inner[:-1]

        def row(positions: list[Expr]) -> None:
            within = dict(zip(tiled, positions, strict=True))
            partial = [d for d in tiled if not is_multiple(extents[d], packed.layout.tile(d))]
            if not partial:
                run(outer, within, full)
                return
            conditions = (outer[d] * packed.layout.tile(d) + within[d] < extents[d] for d in partial)
            with T.If(reduce(tirx.And, conditions, tirx.const(True, "bool"))):
                with T.Then():
                    run(outer, within, full)
                if packing:
                    with T.Else():
                        clear(outer, within)

        nest_loops([packed.layout.tile(d) for d in tiled], row)

    _for_tiles(packed, extents, cpu, rows)
    return True


def interleave_rows(source: PackedStorage, destination: PackedStorage, cpu: CpuTarget) -> bool:
    """Pack where groups of 2 or 4 rows are interleaved: ``(k, n) -> [n/32, k/4, 32, 4]``.

    Returns False, with nothing written, for other layouts.
    """
    rank, inner = len(source.shape), _tiled_dims(destination)
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
                safe_row = row if full_rows else T.min(row, extents[rows] - 1)
                base = source.offset({**outer, rows: safe_row, columns: column}, {})
                value = masked_vector(source, lane_indices(base, width), width, mask)
                if not full_rows:
                    value = T.Select(T.broadcast(row < extents[rows], width), value, zeros(raw, width))
                loaded.append(T.bind(value))
            index = lane_indices(destination.offset(outer, {columns: start}), width * group)
            T.buffer_store(destination.data, T.Shuffle(loaded, order), [index])

    def body(outer: dict[int, Expr], full: bool) -> None:
        split_tail(extents[rows], group, outer[rows], lambda full_rows: chunk(outer, full, full_rows))

    _for_tiles(destination, extents, cpu, body)
    return True


def _for_tiles(
    packed: PackedStorage, extents: list[Expr], cpu: CpuTarget, body: Callable[[dict[int, Expr], bool], None]
) -> None:
    """Visit every tile; `body` takes its outer position, and whether it is whole along the last dimension."""
    order, last = packed.layout.outer_perm, len(packed.shape) - 1
    tile = packed.layout.tile(last)

    if order[-1] == last:

        def tile_body(positions: list[Expr]) -> None:
            outer = dict(zip(order, positions, strict=True))
            split_tail(extents[last], tile, outer[last], lambda full: body(outer, full))

        for_parts([packed.tiles[d] for d in order], packed.bytes(), cpu, tile_body)
        return
    # Tile columns are far apart in storage: a few rows of each at a time.
    rows = order[-1]
    outer_dims = [d for d in order if d not in (rows, last)]
    count = packed.tiles[rows]

    def block_body(positions: list[Expr]) -> None:
        outer = dict(zip(outer_dims, positions[:-2], strict=True))
        first = positions[-2] * BLOCK_ROWS
        outer[last] = positions[-1]

        def rows_body(full: bool) -> None:
            with loop(
                minimum(BLOCK_ROWS, int64(count) - first) if not is_multiple(count, BLOCK_ROWS) else BLOCK_ROWS
            ) as row:
                body({**outer, rows: first + row}, full)

        split_tail(extents[last], tile, outer[last], rows_body)

    counts = [packed.tiles[d] for d in outer_dims] + [ceil_div(count, BLOCK_ROWS), packed.tiles[last]]
    for_parts(counts, packed.bytes(), cpu, block_body)


def _tiled_dims(storage: PackedStorage) -> list[int]:
    return [d for d in storage.layout.inner_dims if storage.layout.tile(d) > 1]


def _move(
    plain: PackedStorage,
    plain_index: Expr,
    packed: PackedStorage,
    packed_index: Expr,
    width: int,
    mask: Expr | None,
    packing: bool,
) -> None:
    if packing:
        T.buffer_store(packed.data, masked_vector(plain, plain_index, width, mask), [packed_index])
    elif mask is None:
        T.buffer_store(plain.data, packed.data[packed_index], [plain_index])
    elif mask is EMPTY:
        return
    elif width == 1:
        with T.If(mask), T.Then():
            T.buffer_store(plain.data, packed.data[packed_index], [plain_index])
    else:
        masked_store(plain.data, plain_index, packed.data[packed_index], mask)


def pack_kernel(shape: Sequence[Dim], dtype: str, layout: PackedLayout, cpu: CpuTarget) -> tirx.PrimFunc:
    """Kernel from row-major to `layout`.

    `shape`: logical extents; a symbolic one is a name. `layout`: layout of the destination. Raises EncodingError if the
    source holds transformed windows, which only constants do. Every function here raises it.
    """
    return _kernel("pack", shape, dtype, PackedLayout.identity(len(shape)), layout, cpu)


def unpack_kernel(shape: Sequence[Dim], dtype: str, layout: PackedLayout, cpu: CpuTarget) -> tirx.PrimFunc:
    """Kernel from `layout` to row-major; for the parameters see `pack_kernel`."""
    return _kernel("unpack", shape, dtype, layout, PackedLayout.identity(len(shape)), cpu)


def relayout_kernel(
    shape: Sequence[Dim], dtype: str, source: PackedLayout, destination: PackedLayout, cpu: CpuTarget
) -> tirx.PrimFunc:
    """Kernel from one layout to another; for the parameters see `pack_kernel`."""
    return _kernel("relayout", shape, dtype, source, destination, cpu)


def _kernel(
    name: str, shape: Sequence[Dim], dtype: str, source: PackedLayout, destination: PackedLayout, cpu: CpuTarget
) -> tirx.PrimFunc:
    if source.winograd:
        raise EncodingError(f"found source layout {source}, expected one whose windows are not transformed")
    with Function(name) as function:
        bound: set[str] = set()
        storages = [
            PackedStorage(function, storage, shape, dtype, layout, bound)
            for storage, layout in (("source", source), ("destination", destination))
        ]
        with function.body():
            for storage in storages:
                storage.open(raw=not destination.winograd)
            methods = (transform_windows, transpose_tiles, copy_runs, interleave_rows)
            if not any(method(storages[0], storages[1], cpu) for method in methods):
                _copy_elements(storages[0], storages[1], cpu)
            if destination.compensation:
                _compensate(storages[1], cpu)
    return function.result


def _copy_elements(source: PackedStorage, destination: PackedStorage, cpu: CpuTarget) -> None:
    """Copy between any two layouts, one element of the destination at a time."""
    layout, rank = destination.layout, len(destination.shape)
    extents = extents_of([source, destination])

    def tiles(positions: list[Expr]) -> None:
        outer = dict(zip(layout.outer_perm, positions, strict=True))
        nest_loops(layout.inner_tiles, lambda within: element(outer, dict(zip(layout.inner_dims, within, strict=True))))

    def element(outer: dict[int, Expr], inner: dict[int, Expr]) -> None:
        position = [outer[d] * layout.tile(d) + inner.get(d, 0) for d in range(rank)]
        value = source.data[source.offset(*split_position(source.layout, position))]
        conditions = [position[d] < extents[d] for d in range(rank) if not is_multiple(extents[d], layout.tile(d))]
        if conditions:
            value = T.if_then_else(reduce(tirx.And, conditions), value, tirx.const(0, str(source.data.dtype)))
        T.buffer_store(destination.data, value, [destination.offset(outer, inner)])

    for_parts([destination.tiles[d] for d in layout.outer_perm], destination.bytes(), cpu, tiles)


def _compensate(destination: PackedStorage, cpu: CpuTarget) -> None:
    """Fill the blocks of ``-128 * column sum`` from the packed elements."""
    layout = destination.layout
    *columns, last = layout.inner_dims
    words = destination.elements("int32")
    dims = [d for d in layout.outer_perm if d != last]
    width = math.prod(map(layout.tile, columns))
    lanes = math.gcd(width, cpu.lanes("int32"))

    def block(positions: list[Expr]) -> None:
        outer = dict(zip(dims, positions, strict=True))
        # PackedStorage.offset skips the block that is written here.
        first = tirx.floordiv(destination.offset(outer, {}), 4)
        stride = tirx.floordiv(destination.outer_stride(last), 4)
        with loop(width // lanes) as vector:
            column = vector * lanes
            total = Registers(1, "int32", lanes)
            total[0] = zeros("int32", lanes)
            with loop(destination.tiles[last]) as index:
                word = once(words[lane_indices(first + index * stride + column, lanes)])
                byte_sum = T.shift_right(word, constant(24, "int32", lanes))
                for shift in (8, 16, 24):
                    high = T.shift_left(word, constant(shift, "int32", lanes))
                    byte_sum = byte_sum + T.shift_right(high, constant(24, "int32", lanes))
                total[0] = total[0] + byte_sum
            words_index = lane_indices(first - stride + column, lanes)
            T.buffer_store(words, total[0] * constant(-128, "int32", lanes), [words_index])

    for_parts([destination.tiles[d] for d in dims], destination.bytes(), cpu, block)
