"""Copies from a device to the host that do not wait for work that the device gets later."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from tvm import runtime

from .cuda_copies import begin_copy
from .cuda_library import cuda_library
from .cuda_streams import Stream
from .error_records import raise_reported
from .memory_pools import receive_buffer
from .tensors import is_host, on_host


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
