"""Windows of a convolution's weight that is no constant, transformed in a call; `encoding.winograd` has the numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.winograd import WINDOW, window_matrix
from ...target.cpu_target import CpuTarget
from ..core.builder import Expr, let
from ..core.packed_storage import PackedStorage, whole
from ..core.view import split_position
from ..core.work_split import for_parts


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
