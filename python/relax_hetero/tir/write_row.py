"""Writing one row of a tensor in place, as each iteration of a loop does for a tensor that it collects."""

from __future__ import annotations

from math import prod
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from .core.builder import Function, loop, materialize, when
from .core.view import View


def write_row_kernel(rank: int, dtype: str) -> tirx.PrimFunc:
    """``rows[trip] = row`` of symbolic extents, where `rows` has a row of that number.

    `rank`: rank of a row. Returns the PrimFunc of rows, row and trip, a vector of one int64.
    """
    with Function("write_row") as function:
        dims: list[Any] = [function.symbol(f"extent{axis}") for axis in range(rank)]
        capacity = function.symbol("room")
        rows = View(function, "rows", [capacity, *dims], dtype)
        row = View(function, "row", dims, dtype)
        trip = View(function, "trip", [], "int64")
        with function.body():
            for view in (rows, row, trip):
                view.open()
            index = materialize(trip.data[0])
            size = prod(dims) if dims else tirx.IntImm("int64", 1)
            with when(tirx.all(index >= 0, index < capacity)), loop(size) as i:
                T.buffer_store(rows.data, row.data[i], [index * size + i])
    return function.result
