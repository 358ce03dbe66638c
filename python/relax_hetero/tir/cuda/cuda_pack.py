"""Layout transforms: packing, unpacking and relayout of a tensor. Padding is written as zeros.

Kernels have the parameters source and destination. As on CPUs (`tir.pack.pack`), symbolic extents are bound from the
buffer whose shape has them, and elements are moved as integers.

If source and destination are contiguous along the same dimension, each thread copies a vector of up to 16 bytes; if
not, square tiles go through shared memory, so that loads and stores are both coalesced. Short runs, such as the
channels of an image, are gathered by the threads that store them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.packed_layout import PackedLayout
from ...encoding.problem import Dim
from ...errors import EncodingError
from ...target.element_types import bytes_of
from ...target.gpu_target import VECTOR_BYTES, WARP, GpuTarget
from ..core.builder import Expr, Function, ceil_div, int64, materialize, plain_extent
from ..core.packed_storage import PackedStorage, extents_of
from ..core.view import split_position
from ..core.work_split import unravel
from .core.launch import at_least_one
from .core.storage_position import (
    THREADS,
    blocks_for,
    common_lanes,
    empty_launch,
    innermost,
    is_inside,
    position_of,
    run_length,
)
from .core.vectors import VectorRegisters

TILE_EXTENT = 64  # rows and columns of a tile in shared memory; half of it for elements of 8 bytes
MAX_GATHERED_RUN = 8
"""Maximum run length of the destination that is gathered: tiles of so short runs would be mostly empty."""


def relayout_kernel(
    shape: Sequence[Dim], dtype: str, source: PackedLayout, destination: PackedLayout, gpu: GpuTarget
) -> tirx.PrimFunc:
    """Kernel that converts one layout (or row-major) to another, in one launch.

    `shape`: logical extents; a symbolic one is a name. Raises EncodingError if the destination has compensation or
    transformed windows, which only CPUs compute.
    """
    if destination.compensation or destination.winograd:
        raise EncodingError(
            f"found destination layout {destination}, expected none with compensation or transformed windows on a GPU"
        )
    function = Function("relayout", registers="local")
    with function:
        bound: set[str] = set()
        sides = [
            PackedStorage(function, side, shape, dtype, layout, bound)
            for side, layout in (("source", source), ("destination", destination))
        ]
        with function.body():
            if any(isinstance(extent, int) and extent == 0 for extent in shape):
                empty_launch()
            elif _innermost(sides[0]) == _innermost(sides[1]):
                _copy_vectors(sides[0], sides[1])
            elif _has_short_runs(sides[1]):
                _gather_runs(sides[0], sides[1])
            else:
                _transpose_tiles(sides[0], sides[1])
    return function.result


def _innermost(side: PackedStorage) -> int:
    return innermost(side.layout, side.shape)


def _copy_vectors(source: PackedStorage, destination: PackedStorage) -> None:
    dtype = source.nominal
    runs = [run_length(side.layout, side.shape, dtype) for side in (source, destination)]
    extent = source.shape[_innermost(source)]
    # No vector may cross into padding, as that of the source is undefined.
    runs.append(extent if isinstance(extent, int) else 1)
    lanes = common_lanes(VECTOR_BYTES // bytes_of(dtype), runs)
    total = prod(map(plain_extent, destination.physical)) // lanes
    extents = extents_of([source, destination])
    with (
        T.thread_binding(blocks_for(total), thread="blockIdx.x") as block,
        T.thread_binding(THREADS, thread="threadIdx.x") as thread,
    ):
        for side in (source, destination):
            side.open(raw=True)
        number = materialize(block * THREADS + tirx.Cast("int64", thread))
        with T.If(number < total), T.Then():
            position = [materialize(at) for at in position_of(destination, number, lanes)]
            inside = is_inside(destination.layout, extents, position)
            first = source.offset(*split_position(source.layout, position))
            vector = VectorRegisters(source, first, lanes, 1)
            vector.load(0, tirx.const(0, "int64"), inside)
            vector.store_to(destination, number)


def _has_short_runs(destination: PackedStorage) -> bool:
    """Return whether runs of the destination are short, such as the channels of an image."""
    run = run_length(destination.layout, destination.shape, destination.nominal)
    count = prod(map(plain_extent, destination.physical))
    return not destination.layout.swizzle and 1 < run <= MAX_GATHERED_RUN and isinstance(count, int) and count < 1 << 31


def _gather_runs(source: PackedStorage, destination: PackedStorage) -> None:
    """Write vectors of the destination, gathered element by element; loads of neighbouring threads are coalesced."""
    across, extents = _innermost(destination), extents_of([source, destination])
    run = run_length(destination.layout, destination.shape, destination.nominal)
    lanes = common_lanes(VECTOR_BYTES // bytes_of(source.nominal), [run])
    total, zero = prod(map(plain_extent, destination.physical)) // lanes, tirx.const(0, "int64")
    with (
        T.thread_binding(blocks_for(total), thread="blockIdx.x") as block,
        T.thread_binding(THREADS, thread="threadIdx.x") as thread,
    ):
        for side in (source, destination):
            side.open(raw=True)
        # 32-bit divisions are several times faster than 64-bit ones.
        number = T.bind(tirx.Cast("int32", block) * THREADS + tirx.Cast("int32", thread))
        with T.If(number < total), T.Then():
            first = [T.bind(tirx.Cast("int64", at)) for at in position_of(destination, number, lanes)]
            vector = VectorRegisters(destination, zero, lanes, 1)
            for lane in range(lanes):
                position = [at + lane if d == across else at for d, at in enumerate(first)]
                element = VectorRegisters(source, source.offset(*split_position(source.layout, position)), 1, 1)
                element.load(0, zero, is_inside(destination.layout, extents, position))
                vector.set(lane, element.get(0))
            vector.store(0, tirx.Cast("int64", number), None)


def _transpose_tiles(source: PackedStorage, destination: PackedStorage) -> None:
    """Transpose square tiles in shared memory, read along one innermost dimension and written along the other."""
    along, across = _innermost(source), _innermost(destination)
    layout, rank, size = destination.layout, len(destination.shape), bytes_of(source.nominal)
    edge = TILE_EXTENT if size <= 4 else TILE_EXTENT // 2
    ends = [destination.tiles[d] * layout.tile(d) for d in range(rank)]
    extents = extents_of([source, destination])
    counts = [ceil_div(ends[d], edge) if d in (along, across) else ends[d] for d in range(rank)]
    total = prod(counts)
    load_lanes = _lanes(source, [extents[along]])
    store_lanes = _lanes(destination, [ends[across]])
    with (
        T.thread_binding(int64(at_least_one(total)), thread="blockIdx.x") as block,
        T.thread_binding(THREADS, thread="threadIdx.x") as thread,
    ):
        for side in (source, destination):
            side.open(raw=True)
        raw = str(source.data.dtype)
        # Padded by a word, to avoid bank conflicts of columns.
        tile_buffer = T.alloc_buffer((edge, edge + max(1, 4 // size)), raw, scope="shared")
        corner = unravel(materialize(T.min(block, int64(total) - 1)), counts, place=materialize, rest=materialize)

        def position_at(across_by: Expr, along_by: Expr) -> list[Expr]:
            position = list(corner)
            position[across] = materialize(corner[across] * edge + tirx.Cast("int64", across_by))
            position[along] = materialize(corner[along] * edge + tirx.Cast("int64", along_by))
            return position

        def each_vector(lanes: int, visit: Callable[[Expr, Expr], None]) -> None:
            """Visit the row and first column of each of the thread's vectors in a tile."""
            per_row = edge // lanes
            assert edge * per_row % THREADS == 0, "every thread has as many vectors"
            for first in range(0, edge * per_row, THREADS):
                visit(*_row_and_column(materialize(first + thread), per_row, lanes))

        def load(row: Expr, column: Expr) -> None:
            at = position_at(row, column)
            vector = VectorRegisters(source, source.offset(*split_position(source.layout, at)), load_lanes, 1)
            inside = tirx.all(*[at[d] < extents[d] for d in range(rank)], *_has_blocks(total, block))
            vector.load(0, tirx.const(0, "int64"), inside)
            loaded.append((vector, row, column))

        def store(row: Expr, column: Expr) -> None:
            at = position_at(column, row)
            exists = tirx.all(at[across] < ends[across], at[along] < ends[along], *_has_blocks(total, block))
            vector = VectorRegisters(destination, destination.offset(*split_position(layout, at)), store_lanes, 1)
            for lane in range(store_lanes):
                vector.set(lane, tile_buffer[column + lane, row])
            vector.store(0, tirx.const(0, "int64"), exists)

        loaded: list[tuple[VectorRegisters, Expr, Expr]] = []
        each_vector(load_lanes, load)
        for vector, row, column in loaded:  # after the last load, so that all are in flight together
            for lane in range(load_lanes):
                T.buffer_store(tile_buffer, vector.get(lane), [row, column + lane])
        T.evaluate(T.tvm_storage_sync("shared"))
        each_vector(store_lanes, store)


def _row_and_column(number: Expr, per_row: int, lanes: int) -> tuple[Expr, Expr]:
    """Row and first column of a thread's vector in a tile with `per_row` vectors per row.

    A warp has eight neighbouring vectors in each of four rows, which avoids bank conflicts for loads and stores.
    """
    row_vectors = 8
    if lanes == 1 or per_row % row_vectors:
        return number // per_row, number % per_row * lanes
    groups = per_row // row_vectors
    row = number // row_vectors % (WARP // row_vectors) + number // (WARP * groups) * (WARP // row_vectors)
    return row, (number % row_vectors + number // WARP % groups * row_vectors) * lanes


def _lanes(side: PackedStorage, extents: Sequence[Expr]) -> int:
    """Lanes of vectors along a storage's innermost dimension that divide all extents."""
    runs = [run_length(side.layout, side.shape, side.nominal), *(e if isinstance(e, int) else 1 for e in extents)]
    return common_lanes(VECTOR_BYTES // bytes_of(side.nominal), runs)


def _has_blocks(total: Expr, block: Expr) -> list[Expr]:
    """Predicate of a block that has work, needed if there may be none."""
    return [] if isinstance(total, int) else [block < total]
