"""Rows that a loop collects, one per trip: packed functions of a tensor that grows.

If the body decides when to stop, the number of trips is known only at the end. Rows are therefore copied into a tensor
with spare capacity, which doubles when it is full. The initial capacity is the loop's limit, if that is small.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import tvm_ffi
from tvm import runtime

from ...errors import HeteroError
from .tensors import copy_into, empty, is_host, nbytes_of, on_host

_MAX_FIRST_BYTES = 64 << 20  # maximum bytes of an initial capacity for the loop's limit of rows
_FIRST_ROWS = 16  # initial capacity in rows beyond that


@tvm_ffi.register_global_func("relax_hetero.append_row", override=True)
def append_row(
    rows: runtime.Tensor, row: runtime.Tensor, trip: runtime.Tensor, trips: runtime.Tensor
) -> runtime.Tensor:
    """`rows` with `row` as row number `trip`, written in place if the capacity suffices.

    The first trip ignores `rows`, which others may use, and makes the tensor that later trips write into. `rows`:
    ``[capacity, *row.shape]``; unused in the first trip. `trip`, `trips`: scalars: number of present rows, and maximum
    number of rows.
    """
    count, shape = _number(trip), tuple(row.shape)
    if count == 0:
        rows = empty((_first_capacity(_number(trips), nbytes_of(row)), *shape), str(row.dtype), row.device)
    elif tuple(rows.shape)[1:] != shape:
        new, old = ([int(extent) for extent in extents] for extents in (shape, rows.shape[1:]))
        raise HeteroError(
            f"trip {count} of a loop collects a tensor of shape {new}, and the trips before it ones of shape "
            f"{old}: expected one shape"
        )
    elif count == rows.shape[0]:
        larger = empty((2 * count, *shape), str(row.dtype), row.device)
        copy_into(rows, _first(larger, count))
        rows = larger
    _write(row, rows, count)
    return rows


@tvm_ffi.register_global_func("relax_hetero.new_rows", override=True)
def new_rows(shape: Sequence[int], dtype: str, trips: runtime.Tensor, number: int) -> runtime.Tensor:
    """An uninitialised tensor ``[trips, *shape]`` on the device of `trips`.

    `trips`: scalar: number of rows; negative numbers count as 0. `number`: unused; distinguishes several tensors of one
    loop, so that equal calls are not merged.
    """
    return empty((max(0, _number(trips)), *(int(extent) for extent in shape)), dtype, trips.device)


@tvm_ffi.register_global_func("relax_hetero.write_row", override=True)
def write_row(rows: runtime.Tensor, row: runtime.Tensor, trip: runtime.Tensor) -> runtime.Tensor:
    """`rows`, with row number `trip` overwritten."""
    _write(row, rows, _number(trip))
    return rows


@tvm_ffi.register_global_func("relax_hetero.taken_rows", override=True)
def taken_rows(rows: runtime.Tensor, count: runtime.Tensor) -> runtime.Tensor:
    """The first `count` rows, in the same memory."""
    number = _number(count)
    return rows if rows.shape[0] == number else _first(rows, number)


def _number(scalar: runtime.Tensor) -> int:
    host = on_host(scalar)  # a copy, whose memory must outlive the read
    return int(ctypes.c_int64.from_address(host.data_ptr()).value)


def _first_capacity(max_rows: int, nbytes: int) -> int:
    """The initial capacity in rows."""
    rows = max(1, max_rows)
    return rows if rows * max(1, nbytes) <= _MAX_FIRST_BYTES else min(rows, _FIRST_ROWS)


def _first(rows: runtime.Tensor, count: int) -> runtime.Tensor:
    return rows._create_view((count, *rows.shape[1:]), str(rows.dtype))


def _write(row: runtime.Tensor, rows: runtime.Tensor, index: int) -> None:
    nbytes = nbytes_of(row)
    if not nbytes:
        return
    if is_host(rows.device):
        # These tensors have no byte offset, so `data_ptr` is the address of the first element.
        ctypes.memmove(rows.data_ptr() + index * nbytes, row.data_ptr(), nbytes)
        return
    copy_into(row, rows._create_view(tuple(row.shape), str(row.dtype), index * nbytes))
