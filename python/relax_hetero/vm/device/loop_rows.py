"""Rows that the trips of a loop collect: a tensor that grows in place, as bytecode calls for them.

The number of trips is known when a loop ends, if its body decides about it. Rows are therefore copied into a tensor
with room for more, which doubles when it is full; where the loop has a limit, the room is made for that many at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import tvm_ffi
from tvm import runtime

from ...errors import HeteroError
from .tensors import copy_into, empty, is_host, nbytes_of, on_host

_MAX_FIRST_BYTES = 64 << 20
"""Bytes up to which room is made for all the rows that a loop may collect, be they many fewer in the end."""
_FIRST_ROWS = 16


@tvm_ffi.register_global_func("relax_hetero.append_row", override=True)
def append_row(
    rows: runtime.Tensor, row: runtime.Tensor, trip: runtime.Tensor, trips: runtime.Tensor
) -> runtime.Tensor:
    """`rows` with `row` behind the first `trip` ones, written in place where there is room.

    The first trip makes the tensor that the others write into: what it is given is nobody's to overwrite.

    Parameters
    ----------
    rows : runtime.Tensor
        ``[capacity, *row.shape]``; anything in the first trip.
    trip, trips : runtime.Tensor
        Scalars: how many rows there are, and how many there may be at most.
    """
    count, shape = _number(trip), tuple(row.shape)
    if count == 0:
        rows = empty((_first_capacity(_number(trips), nbytes_of(row)), *shape), str(row.dtype), row.device)
    elif tuple(rows.shape)[1:] != shape:
        found, before = ([int(extent) for extent in one] for one in (shape, rows.shape[1:]))
        raise HeteroError(
            f"trip {count} of a loop collects a tensor of shape {found}, and the trips before it ones of shape "
            f"{before}: expected one shape"
        )
    elif count == rows.shape[0]:
        larger = empty((2 * count, *shape), str(row.dtype), row.device)
        copy_into(rows, _first(larger, count))
        rows = larger
    _write(row, rows, count)
    return rows


@tvm_ffi.register_global_func("relax_hetero.new_rows", override=True)
def new_rows(shape: Sequence[int], dtype: str, trips: runtime.Tensor, number: int) -> runtime.Tensor:
    """Room for a row of each trip, where `trips` is: ``[trips, *shape]``.

    Parameters
    ----------
    trips : runtime.Tensor
        A scalar, how many there may be; none where it is negative.
    number : int
        Tells apart what one loop collects.
    """
    return empty((max(0, _number(trips)), *(int(extent) for extent in shape)), dtype, trips.device)


@tvm_ffi.register_global_func("relax_hetero.write_row", override=True)
def write_row(rows: runtime.Tensor, row: runtime.Tensor, trip: runtime.Tensor) -> runtime.Tensor:
    """`rows`, in which row number `trip` is written over."""
    _write(row, rows, _number(trip))
    return rows


@tvm_ffi.register_global_func("relax_hetero.taken_rows", override=True)
def taken_rows(rows: runtime.Tensor, count: runtime.Tensor) -> runtime.Tensor:
    """The first `count` rows, in the same memory."""
    number = _number(count)
    return rows if rows.shape[0] == number else _first(rows, number)


def _number(scalar: runtime.Tensor) -> int:
    return int(ctypes.c_int64.from_address(on_host(scalar).data_ptr()).value)


def _first_capacity(max_rows: int, nbytes: int) -> int:
    """How many rows to make room for before the first one."""
    return (
        max(1, max_rows)
        if max(1, max_rows) * max(1, nbytes) <= _MAX_FIRST_BYTES
        else max(1, min(max_rows, _FIRST_ROWS))
    )


def _first(rows: runtime.Tensor, count: int) -> runtime.Tensor:
    return rows._create_view((count, *rows.shape[1:]), str(rows.dtype))


def _write(row: runtime.Tensor, rows: runtime.Tensor, index: int) -> None:
    nbytes = nbytes_of(row)
    if not nbytes:
        return
    if is_host(rows.device):
        # Kernels take no tensors with an offset, so that an address is where the elements are.
        ctypes.memmove(rows.data_ptr() + index * nbytes, row.data_ptr(), nbytes)
        return
    place = rows._create_view(tuple(row.shape), str(row.dtype), index * nbytes)
    copy_into(row, place)
