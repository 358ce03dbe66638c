"""Copies between devices and the host: those that run alongside other work, and of parts that become one matrix."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
from tvm import runtime

from ...errors import HeteroError
from ...target.backend import backend_of_device
from .cuda_copies import begin_copy, begin_copy_of_rows
from .cuda_library import cuda_library
from .cuda_streams import Event, Stream, copy_stream
from .error_records import raise_reported
from .memory_pools import receive_buffer, send_buffer
from .tensors import copy_into, empty, is_host, on_host, part_of


def begin_copy_to_host(tensor: runtime.Tensor) -> Callable[[], np.ndarray]:
    """Begin a copy of a tensor after the device's earlier work; later work does not wait for it.

    Parameters
    ----------
    tensor : runtime.Tensor
        Contiguous tensor, which later work must not write. One on a CPU is not copied, and one on a device without
        pinned memory only at the end.

    Returns
    -------
    callable
        Function to call once, which waits for the end of the copy and returns the array. It raises HeteroError for
        errors that kernels reported.
    """
    device = tensor.device
    target = None if is_host(device) else receive_buffer(tensor, runtime.device("cpu", 0), min_bytes=1)
    library = None if target is None else cuda_library()
    if target is None or library is None:
        return lambda: np.from_dlpack(on_host(tensor))
    stream = copy_stream(library, device.index, "to the host")
    stream.wait(Stream.current(library, device).record())
    array, end = np.from_dlpack(target), begin_copy(tensor, target, stream)

    def wait() -> np.ndarray:
        end.synchronize()
        raise_reported(device.index)
        return array

    weakref.finalize(wait, _finish, end, tensor, target).atexit = False
    return wait


def _finish(end: Event, *_tensors: runtime.Tensor) -> None:
    """Wait for the end of a copy, before the memory of its tensors is used again."""
    with suppress(HeteroError):  # `wait` raises it
        end.synchronize()


class EarlyCopies:
    """Copies from the host to a device, for work that is launched next, while earlier work still runs.

    Copies to a GPU begin after the work that was launched before the last `send`, so consecutive ones need different
    targets. Copies to other devices are those of `tensors.copy_into`.
    """

    def __init__(self, device: runtime.Device) -> None:
        self._device = device
        self._last_work: Event | None = None

    def send(self, copies: Sequence[tuple[runtime.Tensor, runtime.Tensor]]) -> None:
        """Copy pageable memory, each at most `SENT_BYTES`, from sources to targets; sources may be changed at once."""
        library = cuda_library() if backend_of_device(self._device).pins_memory else None
        if library is None:
            for source, target in copies:
                copy_into(source, target, wait=False)
            return
        main, stream = Stream.current(library, self._device), copy_stream(library, self._device.index, "from the host")
        work = main.record()
        stream.wait(self._last_work or work)
        self._last_work = work
        ends = [begin_copy(source, target, stream) for source, target in copies]
        if ends:
            main.wait(ends[-1])


def joined_buffer(parts: Sequence[runtime.Tensor]) -> runtime.Tensor:
    """Allocate a matrix on the host for `join_columns`: pinned memory, if GPUs have parts and it is not small.

    Parameters
    ----------
    parts : sequence of tvm.runtime.Tensor
        (rows, columns) each, of 4 bytes an element.
    """
    rows, columns = int(parts[0].shape[0]), sum(int(part.shape[1]) for part in parts)
    host, device, dtype = runtime.device("cpu", 0), parts[0].device, str(parts[0].dtype)
    pinned = None
    if backend_of_device(device).pins_memory:
        pinned = send_buffer(4 * rows * columns, host, device.index)
    return empty((rows, columns), dtype, host) if pinned is None else part_of(pinned, (rows, columns), dtype, 0)


def join_columns(parts: Sequence[runtime.Tensor], target: runtime.Tensor, rows: int) -> None:
    """Copy the first rows of matrices beside each other into one on the host, after their devices' earlier work.

    Waits for the end. It raises HeteroError for errors that kernels reported.

    Parameters
    ----------
    parts : sequence of tvm.runtime.Tensor
        (rows, columns) each, contiguous.
    target : tvm.runtime.Tensor
        Result of `joined_buffer`.
    rows : int
        Number of rows to copy.
    """
    library, begin, ends = cuda_library(), 0, []
    for part in parts:
        end = begin + int(part.shape[1])
        if library is None or not backend_of_device(part.device).pins_memory:
            np.from_dlpack(target)[:rows, begin:end] = np.from_dlpack(on_host(part))[:rows]
        else:
            stream = Stream.current(library, part.device)
            ends.append((part.device.index, begin_copy_of_rows(part, target, begin, rows, stream)))
        begin = end
    for gpu, end_of_copy in ends:
        end_of_copy.synchronize()
        raise_reported(gpu)
