"""Kernels of GPUs that lay a tensor out, undo it, or change one layout into another. Padding is written as zeros.

Parameters of every kernel: source, destination. As on CPUs (`tir.pack.pack`), symbolic extents are bound from the
buffer that shows them, and bytes are moved as integers.

Where both sides have neighbours along the same dimension, each thread moves a vector of up to 16 bytes; where they do
not, squares of the tensor go through shared memory, so that reads and writes both follow their side's order. Short
runs, such as the channels of an image, are gathered by the threads that store them.
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

SQUARE = 64
"""Rows and columns of what goes through shared memory at once; half of it for elements of 8 bytes."""
SHORT = 8
"""Elements along the destination's innermost dimension that are too few for squares: most of each would be empty."""


def relayout_kernel(
    shape: Sequence[Dim], dtype: str, source: PackedLayout, destination: PackedLayout, gpu: GpuTarget
) -> tirx.PrimFunc:
    """One layout to another, row-major included, as one launch.

    Parameters
    ----------
    shape : sequence of int or str
        Logical extents; a symbolic one is a name.
    source, destination : PackedLayout

    Raises
    ------
    EncodingError
        If the destination has compensation or transformed windows, which CPUs compute for themselves.
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
                _copy_squares(sides[0], sides[1])
    return function.result


def _innermost(side: PackedStorage) -> int:
    return innermost(side.layout, side.shape)


def _copy_vectors(source: PackedStorage, destination: PackedStorage) -> None:
    dtype = source.nominal
    runs = [run_length(side.layout, side.shape, dtype) for side in (source, destination)]
    shown = source.shape[_innermost(source)]
    # No vector begins inside of the tensor and ends in padding, of which a source may have anything.
    runs.append(shown if isinstance(shown, int) else 1)
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
            place = [materialize(at) for at in position_of(destination, number, lanes)]
            inside = is_inside(destination.layout, extents, place)
            first = source.offset(*split_position(source.layout, place))
            vector = VectorRegisters(source, first, lanes, 1)
            vector.load(0, tirx.const(0, "int64"), inside)
            vector.store_to(destination, number)


def _has_short_runs(destination: PackedStorage) -> bool:
    """True if the destination's innermost dimension is a small part of a square, as the channels of an image are."""
    run = run_length(destination.layout, destination.shape, destination.nominal)
    count = prod(map(plain_extent, destination.physical))
    return not destination.layout.swizzle and 1 < run <= SHORT and isinstance(count, int) and count < 1 << 31


def _gather_runs(source: PackedStorage, destination: PackedStorage) -> None:
    """Vectors of the destination, each element of which a thread finds for itself: neighbours read neighbours."""
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
        # Divided in 32 bits, of which a division takes a fraction of the time.
        number = T.bind(tirx.Cast("int32", block) * THREADS + tirx.Cast("int32", thread))
        with T.If(number < total), T.Then():
            first = [T.bind(tirx.Cast("int64", at)) for at in position_of(destination, number, lanes)]
            vector = VectorRegisters(destination, zero, lanes, 1)
            for lane in range(lanes):
                place = [at + lane if d == across else at for d, at in enumerate(first)]
                element = VectorRegisters(source, source.offset(*split_position(source.layout, place)), 1, 1)
                element.load(0, zero, is_inside(destination.layout, extents, place))
                vector.set(lane, element.get(0))
            vector.store(0, tirx.Cast("int64", number), None)


def _copy_squares(source: PackedStorage, destination: PackedStorage) -> None:
    """Squares along the innermost dimensions of both sides, read along one and written along the other."""
    along, across = _innermost(source), _innermost(destination)
    layout, rank, size = destination.layout, len(destination.shape), bytes_of(source.nominal)
    edge = SQUARE if size <= 4 else SQUARE // 2
    stored = [destination.tiles[d] * layout.tile(d) for d in range(rank)]
    extents = extents_of([source, destination])
    counts = [ceil_div(stored[d], edge) if d in (along, across) else stored[d] for d in range(rank)]
    total = prod(counts)
    read = _lanes(source, [extents[along]])
    written = _lanes(destination, [stored[across]])
    with (
        T.thread_binding(int64(at_least_one(total)), thread="blockIdx.x") as block,
        T.thread_binding(THREADS, thread="threadIdx.x") as thread,
    ):
        for side in (source, destination):
            side.open(raw=True)
        raw = str(source.data.dtype)
        # A word more: a column of the square then lies in different banks.
        square = T.alloc_buffer((edge, edge + max(1, 4 // size)), raw, scope="shared")
        corner = unravel(materialize(T.min(block, int64(total) - 1)), counts, place=materialize, rest=materialize)

        def place(across_by: Expr, along_by: Expr) -> list[Expr]:
            found = list(corner)
            found[across] = materialize(corner[across] * edge + tirx.Cast("int64", across_by))
            found[along] = materialize(corner[along] * edge + tirx.Cast("int64", along_by))
            return found

        def each(lanes: int, visit: Callable[[Expr, Expr], None]) -> None:
            """A thread's vectors: the row of each in a square that is read by rows, and where in the row it begins."""
            per_row = edge // lanes
            assert edge * per_row % THREADS == 0, "every thread has as many vectors"
            for first in range(0, edge * per_row, THREADS):
                visit(*_row_and_column(materialize(first + thread), per_row, lanes))

        def load(row: Expr, column: Expr) -> None:
            at = place(row, column)
            vector = VectorRegisters(source, source.offset(*split_position(source.layout, at)), read, 1)
            inside = tirx.all(*[at[d] < extents[d] for d in range(rank)], *_has_blocks(total, block))
            vector.load(0, tirx.const(0, "int64"), inside)
            loaded.append((vector, row, column))

        def store(row: Expr, column: Expr) -> None:
            at = place(column, row)
            exists = tirx.all(at[across] < stored[across], at[along] < stored[along], *_has_blocks(total, block))
            vector = VectorRegisters(destination, destination.offset(*split_position(layout, at)), written, 1)
            for lane in range(written):
                vector.set(lane, square[column + lane, row])
            vector.store(0, tirx.const(0, "int64"), exists)

        loaded: list[tuple[VectorRegisters, Expr, Expr]] = []
        each(read, load)
        for vector, row, column in loaded:  # behind the last load: all are under way at once
            for lane in range(read):
                T.buffer_store(square, vector.get(lane), [row, column + lane])
        T.evaluate(T.tvm_storage_sync("shared"))
        each(written, store)


def _row_and_column(number: Expr, per_row: int, lanes: int) -> tuple[Expr, Expr]:
    """Row and first column of a thread's vector in a square of so many vectors a row.

    Of vectors, a warp has eight neighbours in four rows: their words lie in different banks along both sides.
    """
    wide = 8
    if lanes == 1 or per_row % wide:
        return number // per_row, number % per_row * lanes
    groups = per_row // wide
    row = number // wide % (WARP // wide) + number // (WARP * groups) * (WARP // wide)
    return row, (number % wide + number // WARP % groups * wide) * lanes


def _lanes(side: PackedStorage, extents: Sequence[Expr]) -> int:
    """Elements of a vector along a side's innermost dimension; none begins before an extent and ends behind it."""
    runs = [run_length(side.layout, side.shape, side.nominal), *(e if isinstance(e, int) else 1 for e in extents)]
    return common_lanes(VECTOR_BYTES // bytes_of(side.nominal), runs)


def _has_blocks(total: Expr, block: Expr) -> list[Expr]:
    """Return whether a block has work, where there may be none at all."""
    return [] if isinstance(total, int) else [block < total]
