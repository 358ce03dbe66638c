"""Copies from devices to the host: those that do not wait for later work, and of parts that become one matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from tvm import runtime

from ...target.backend import backend_of_device
from .cuda_copies import begin_copy, begin_copy_of_rows
from .cuda_library import cuda_library
from .cuda_streams import Stream
from .error_records import raise_reported
from .memory_pools import receive_buffer, send_buffer
from .tensors import empty, is_host, on_host, part_of


def begin_copy_to_host(tensor: runtime.Tensor) -> Callable[[], np.ndarray]:
    """Begin a copy of a tensor after the device's earlier work.

    Parameters
    ----------
    tensor : runtime.Tensor
        Contiguous tensor. One on a CPU is not copied, and one on a device without pinned memory only at the end.

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
    array, end = np.from_dlpack(target), begin_copy(tensor, target, Stream.current(library, device))

    def wait() -> np.ndarray:
        end.synchronize()
        raise_reported(device.index)
        return array

    return wait


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
