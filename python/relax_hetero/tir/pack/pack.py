"""Kernels that lay a tensor out, undo it, or change one layout into another. Padding is written as zeros.

Parameters of every kernel: source, destination. Symbolic extents are bound from the buffer that shows them; between two
layouts that both pad a symbolic dimension, whole tiles are copied, padding included.

Bytes are moved as integers, so every type of a width shares its code and NaN payloads stay. The ways that are tried, in
order: windows that are transformed (`window_transform`, of floats), transposes in registers (`tile_transpose`), runs
along the last dimension (`tile_copy`), element by element.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.packed_layout import PackedLayout
from ...encoding.problem import Dim
from ...errors import EncodingError
from ...target.cpu_target import CpuTarget
from ..core.builder import Expr, Function, Registers, constant, lane_indices, loop, zeros
from ..core.packed_storage import PackedStorage, extents_of, whole
from ..core.view import split_position
from ..core.work_split import for_parts, nest_loops
from ..math.vector_math import once
from .tile_copy import copy_runs, interleave_rows
from .tile_transpose import transpose_tiles
from .window_transform import transform_windows


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
