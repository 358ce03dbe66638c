"""Functions that bytecode calls by name: this library's own, and TVM's ``relax.run.*``.

Bytecode names a device by its manifest index; the machine that runs on the calling thread maps it to a device.

TVM defines ``relax.run.*`` in its compiler package, so they are missing in a process with TVM's runtime only, and they
put every result on ``cpu(0)``. The functions here replace them under the same names. They put results on the operand's
device, or on the running machine's host if the operand has no device.

Rows that a loop collects, one per trip: packed functions of a tensor that grows.

If the body decides when to stop, the number of trips is known only at the end. Rows are therefore copied into a tensor
with spare capacity, which doubles when it is full. The initial capacity is the loop's limit, if that is small.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tvm_ffi
from tvm import runtime

from ...artifact.checks import refusal
from ...errors import HeteroError, MemoryLimitError
from ...target.backend import backend_of_device
from .host_memory import host_memory
from .memory_pools import PINNED_BYTES, receive_buffer, send_buffer
from .tensors import alias, copy_into, empty, from_numpy, is_host, nbytes_of, on_host


class _CurrentMachine(threading.local):
    """Devices and memory scopes of the machine on this thread; None outside of a call."""

    devices_and_scopes: tuple[Sequence[runtime.Device], Sequence[str]] | None = None


current_machine = _CurrentMachine()


@contextmanager
def running_on(devices: Sequence[runtime.Device], scopes: Sequence[str]) -> Iterator[None]:
    """Map manifest index ``i`` to ``devices[i]`` on this thread during the block; -1 is the last, the host.

    Blocks nest, so that a kernel written in Python may call another machine.
    """
    outer = current_machine.devices_and_scopes
    current_machine.devices_and_scopes = devices, scopes
    try:
        yield
    finally:
        current_machine.devices_and_scopes = outer


def running_host() -> runtime.Device:
    """The host device of the machine that runs on this thread; ``cpu(0)`` outside of a call."""
    current = current_machine.devices_and_scopes
    return runtime.device("cpu", 0) if current is None else current[0][-1]


@tvm_ffi.register_global_func("relax_hetero.refuse", override=True)
def refuse(check: int, value: int, first: int, end: int) -> None:
    """Raise for a value that a kernel's check refused; the machine replaces the error by the check's message."""
    raise ValueError(refusal(check, value, first, end))


@tvm_ffi.register_global_func("relax_hetero.enter", override=True)
@tvm_ffi.register_global_func("relax_hetero.argument", override=True)
@tvm_ffi.register_global_func("relax_hetero.leave", override=True)
def _needs_file(*_: Any) -> None:
    """Entries of functions run in files only, whose code replaces these functions (`vm/file/standalone.c`)."""
    raise HeteroError(
        "TVM's virtual machine called a function of an executable in memory: expected rh.vm.VirtualMachine, or a file "
        "of Executable.export_library"
    )


@tvm_ffi.register_global_func("relax_hetero.to_device", override=True)
def to_device(value: Any, index: int, must_copy: int = 0, buffer: Any = None) -> Any:
    """`value` on the device of manifest entry `index` (-1: the host): itself if it is there, else a copy.

    Works between any two devices, and on nested tuples. Between two CPUs the copy is an alias, as it is from a device
    in the host's memory, and to one from memory that it has lent (`pinned_storage`). `must_copy` forces a copy, because
    the module writes in place and the value may have other readers (LowerTransfers). The target is `buffer`, if the
    compiler allocated one from the machine's pool, else new memory; large tensors from a GPU go into pinned memory.
    """
    devices, scopes = _machine("to_device", index)
    if not isinstance(value, tvm_ffi.core.Tensor):
        return tuple(to_device(element, index, must_copy) for element in value)
    # A tensor does not record its memory scope, so a transfer to a special scope always copies.
    device, scope = devices[index], scopes[index]
    if not must_copy and scope == "global":
        if value.__dlpack_device__() == (device.dlpack_device_type(), device.index):
            return value
        if is_host(device) and is_host(value.device):
            return alias(value, device)
        if is_host(device) and _shares_memory(value.device):
            value.device.sync()
            return alias(value, device)
        if is_host(value.device) and _shares_memory(device) and _is_lent(value, device):
            return alias(value, device)
    pinned = receive_buffer(value, device, buffer) if scope == "global" else None
    target = buffer if pinned is None else pinned
    if target is None:
        target = empty(value.shape, value.dtype, device, None if scope == "global" else scope)
    copy_into(value, target, wait=False)
    return target


def _shares_memory(device: runtime.Device) -> bool:
    memory = backend_of_device(device).memory()
    return memory is not None and memory.host_reads(device.index)


def _is_lent(value: runtime.Tensor, device: runtime.Device) -> bool:
    memory = backend_of_device(device).memory()
    return memory is not None and memory.is_lent(device.index, value.data_ptr())


def _lent_storage(nbytes: int, device: runtime.Device, host: runtime.Device) -> runtime.Tensor:
    """Bytes of a device's memory, on a CPU, which writes values for the device there."""
    storage, memory = empty((nbytes,), "uint8", device), backend_of_device(device).memory()
    assert memory is not None, "the device shares its memory"
    memory.lend(device.index, storage.data_ptr(), nbytes)
    return alias(storage, host)


@tvm_ffi.register_global_func("relax_hetero.stream_to_device", override=True)
def stream_to_device(value: runtime.Tensor, index: int, age: int, buffer: runtime.Tensor) -> runtime.Tensor:
    """A constant of the host in `buffer`, on the device of manifest entry `index`; see `stream_constant` for `age`."""
    devices, _ = _machine("stream_to_device", index)
    if not backend_of_device(devices[index]).stream(value, buffer, age):
        copy_into(value, buffer)
    return buffer


@tvm_ffi.register_global_func("relax_hetero.pinned_storage", override=True)
def pinned_storage(size: Sequence[int], index: int) -> runtime.Tensor:
    """``size[0]`` bytes of pinned memory on the CPU of manifest entry `index` (-1: the host), for copies to a GPU.

    Memory of a device that shares it with the host, if the machine has one, which then needs no copy. Plain memory for
    small sizes, and if pinning fails or has reached its limit.
    """
    devices, _ = _machine("pinned_storage", index)
    device, nbytes = devices[index], int(size[0])
    sharing = next((other for other in devices if not is_host(other) and _shares_memory(other)), None)
    if sharing is not None and nbytes >= PINNED_BYTES:
        return _lent_storage(nbytes, sharing, device)
    gpu = next((other.index for other in devices if backend_of_device(other).pins_memory), None)
    pinned = None if gpu is None else send_buffer(nbytes, device, gpu)
    return empty((nbytes,), "uint8", device) if pinned is None else pinned


@tvm_ffi.register_global_func("relax_hetero.refuse_sizes", override=True)
def refuse_sizes(function: str, message: str, *sizes: Any) -> None:
    """Raise HeteroError for a call of `function` whose sizes violate a requirement.

    `sizes` alternates names and values; a name may include its origin: ``n is dimension 0 of argument 'x'``.
    """
    raise HeteroError(f"function {function!r}: {message}{_size_values(sizes)}")


@tvm_ffi.register_global_func("relax_hetero.size", override=True)
def size(shape: Any) -> Any:
    """The value of a named size (`transform.ir.named_sizes`)."""
    return shape


@tvm_ffi.register_global_func("relax_hetero.keep", override=True)
def keep(value: Any) -> None:
    """Read a value, so that the call that makes it is not removed (KeepUnreadCalls)."""


@tvm_ffi.register_global_func("relax_hetero.check_returned", override=True)
def check_returned(value: Any, what: str, fields: int, ndim: int = -1, dtype: str = "", *dims: int) -> None:
    """Require that `what` returned a tuple of `fields` fields, or for -1 a tensor; -1 and "" stand for any value."""
    if fields >= 0:
        expected = f"a tuple of {fields}"
        fits = isinstance(value, Sequence) and not isinstance(value, str) and len(value) == fields
    else:
        extents = ", ".join("?" if dim < 0 else str(dim) for dim in dims or [-1] * max(ndim, 0))
        expected = f"a tensor {dtype or 'any'}[{extents if ndim >= 0 else '...'}]"
        fits = (
            isinstance(value, tvm_ffi.core.Tensor)
            and dtype in ("", str(value.dtype))
            and ndim in (-1, len(value.shape))
            and all(dim in (-1, int(extent)) for dim, extent in zip(dims, value.shape, strict=False))
        )
    if fits:
        return
    text = "nothing" if value is None else repr(value)
    if isinstance(value, tvm_ffi.core.Tensor):
        text = f"a tensor {value.dtype}{list(value.shape)}"
    raise HeteroError(f"{what} returned {text[:200]}, expected {expected}, which the model reads")


@tvm_ffi.register_global_func("relax_hetero.refuse_bytes", override=True)
def refuse_bytes(function: str, tensor: str, nbytes: float, *sizes: Any) -> None:
    """MemoryLimitError if a tensor takes more than the memory of the host; `sizes` as in `refuse_sizes`."""
    available = host_memory()
    if nbytes > available:
        raise MemoryLimitError(
            f"function {function!r}: {tensor} takes {nbytes:,.0f} bytes, found {available:,} bytes of memory"
            + _size_values(sizes)
        )


def _size_values(sizes: Sequence[Any]) -> str:
    names = [str(name).partition(" is ")[0] for name in sizes[::2]]
    values = ", ".join(f"{name} = {value}" for name, value in zip(names, sizes[1::2], strict=True))
    origins = ", ".join(str(name) for name in sizes[::2] if " is " in str(name))
    return (f" ({values})" if values else "") + (f"; {origins}" if origins else "")


def _machine(function: str, index: int) -> tuple[Sequence[runtime.Device], Sequence[str]]:
    """The devices and memory scopes of the machine on this thread."""
    if current_machine.devices_and_scopes is None:
        raise HeteroError(
            f"relax_hetero.{function} was called outside of relax_hetero.vm.VirtualMachine, which alone knows "
            f"what device manifest entry {index} is"
        )
    return current_machine.devices_and_scopes


def _like(array: np.ndarray, operand: runtime.Tensor) -> runtime.Tensor:
    return from_numpy(array, operand.device)


@tvm_ffi.register_global_func("relax.run.shape_to_tensor", override=True)
def shape_to_tensor(shape: Sequence[int]) -> runtime.Tensor:
    """A shape as an ``int64`` vector on the host."""
    return from_numpy(np.array([int(dim) for dim in shape], "int64"), running_host())


@tvm_ffi.register_global_func("relax.run.nonzero", override=True)
def nonzero(x: runtime.Tensor) -> runtime.Tensor:
    """Positions of nonzero elements, a column each: ``int64[rank, count]`` (a scalar counts as a vector)."""
    return _like(np.stack(np.atleast_1d(x.numpy()).nonzero()), x)


@tvm_ffi.register_global_func("relax.run.unique", override=True)
def unique(
    x: runtime.Tensor,
    ordered: int,
    return_index: int,
    return_inverse: int,
    return_counts: int,
    axis: int | None = None,
) -> Any:
    """Distinct elements (or slices along `axis`), sorted or in order of first appearance.

    With any of the flags a tuple: additionally the index of each one's first appearance, each element's index among
    them, and counts, all ``int64`` vectors.
    """
    values, index, inverse, counts = np.unique(
        x.numpy(), return_index=True, return_inverse=True, return_counts=True, axis=axis
    )
    inverse = inverse.reshape(-1)  # numpy 2.0 gives it the shape of x
    if not ordered:
        order = np.argsort(index)
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        values, index, inverse, counts = values.take(order, axis or 0), index[order], rank[inverse], counts[order]
    extras = [(index, return_index), (inverse, return_inverse), (counts, return_counts)]
    results = [_like(values, x), *(_like(array.astype("int64"), x) for array, is_returned in extras if is_returned)]
    return tuple(results) if len(results) > 1 else results[0]


@tvm_ffi.register_global_func("relax.run.print", override=True)
def print_values(template: str, *values: Any) -> None:
    """Print values, through a Python format string if there is one."""
    texts = [_text(value) for value in values]
    print(template.format(*texts) if template else " ".join(texts))


@tvm_ffi.register_global_func("relax.run.assert_op", override=True)
def assert_true(condition: Any, template: str, *values: Any) -> None:
    """AssertionError with the formatted values unless `condition`, a scalar or a 0-d tensor, is true."""
    holds = condition.numpy() if isinstance(condition, tvm_ffi.core.Tensor) else condition
    if not holds:
        texts = [_text(value) for value in values]
        raise AssertionError((template.format(*texts) if template else ", ".join(texts)) or "Assertion Failed")


def _text(value: Any) -> str:
    if isinstance(value, tvm_ffi.core.Tensor):
        return str(value.numpy())
    if isinstance(value, tvm_ffi.Array):
        return f"({', '.join(map(_text, value))})"
    return str(value)


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
