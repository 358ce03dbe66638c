"""Copies between devices and the host: those that run alongside other work, and of parts that become one matrix.

Decode steps make the same copies again and again, so each kind is an object that keeps its streams, events and memory.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import numpy as np
import tvm_ffi
from tvm import runtime

from ...errors import HeteroError
from ...target.backend import backend_of_device
from .cuda_copies import SENT_BYTES
from .cuda_library import DEVICE_MEMORY, HOST_MEMORY, CudaLibrary, RowCopy, cuda_library
from .cuda_streams import Event, Stream, copy_stream
from .error_records import raise_reported
from .memory_pools import receive_buffer, send_buffer
from .tensors import copy_into, empty, nbytes_of, on_host, part_of


def _library_of(device: runtime.Device) -> CudaLibrary | None:
    """The driver of a GPU; None for other devices, and if CUDA does not work."""
    return cuda_library() if backend_of_device(device).pins_memory else None


class CopiesToHost:
    """Copies of a device's small results to the host, each after the device's work so far, and alongside later work.

    `like`: tensor of the device, shape and element type of all that are copied.
    """

    def __init__(self, like: runtime.Tensor) -> None:
        self._device, self._nbytes = like.device, nbytes_of(like)
        self._library = _library_of(like.device)
        self._free: list[_PinnedBuffer] = []
        if self._library is not None:
            self._stream = copy_stream(self._library, self._device.index, "to the host")

    def begin(self, tensor: runtime.Tensor) -> Callable[[], np.ndarray]:
        """Begin a copy.

        `tensor`: contiguous tensor, which later work must not write. One on a CPU is not copied, and one on a device
        without pinned memory only at the end. Returns the function that waits for the end of the copy and returns an
        array. It raises HeteroError for errors that kernels reported.
        """
        buffer = self._free.pop() if self._free else self._new_buffer(tensor)
        if buffer is None or self._library is None:
            return lambda: np.from_dlpack(on_host(tensor))
        library, stream = self._library, self._stream.handle
        library.use(self._device.index)
        library.quick("cuEventRecord", buffer.begin.handle, int(tvm_ffi.get_raw_stream(self._device)))
        library.quick("cuStreamWaitEvent", stream, buffer.begin.handle, 0)
        library.call("cuMemcpyDtoHAsync_v2", buffer.address, tensor.data_ptr(), self._nbytes, stream)
        library.quick("cuEventRecord", buffer.end.handle, stream)
        return _CopyToHost(buffer, tensor, self._free)

    def _new_buffer(self, tensor: runtime.Tensor) -> _PinnedBuffer | None:
        """Memory and events of a copy; None without pinned memory."""
        library = self._library
        memory = None if library is None else receive_buffer(tensor, runtime.device("cpu", 0), min_bytes=1)
        return None if library is None or memory is None else _PinnedBuffer(library, self._device.index, memory)


class _PinnedBuffer:
    """Pinned memory of a copy to the host, and events: before the copy, and at its end."""

    def __init__(self, library: CudaLibrary, gpu: int, memory: runtime.Tensor) -> None:
        self.memory, self.address, self.array = memory, memory.data_ptr(), np.from_dlpack(memory)
        self.begin, self.end = Event(library, gpu), Event(library, gpu)


class _CopyToHost:
    """A copy that has begun."""

    def __init__(
        self,
        buffer: _PinnedBuffer,  # its target
        source: runtime.Tensor,  # tensor whose memory it reads
        free: list[_PinnedBuffer],  # list that the target joins, when nothing refers to the copy
    ) -> None:
        self._buffer, self._source, self._free = buffer, source, free

    def __call__(self) -> np.ndarray:
        self._buffer.end.synchronize()
        raise_reported(self._buffer.end.gpu)
        return self._buffer.array.copy()

    def __del__(self) -> None:
        with suppress(HeteroError):  # `__call__` raises it
            self._buffer.end.synchronize()  # before the memory of both tensors is used again
        self._free.append(self._buffer)


class EarlyCopies:
    """Copies from the host to a device, for work that is launched next, while earlier work still runs.

    Copies to a GPU begin after the work that was launched before the last `send`, so consecutive ones need different
    targets; those of the first one after the work before this object was made. Copies to other devices are those of
    `tensors.copy_into`.
    """

    def __init__(self, device: runtime.Device) -> None:
        self._device, self._library = device, _library_of(device)
        if self._library is not None:
            self._stream = copy_stream(self._library, device.index, "from the host")
            self._end = Event(self._library, device.index)
            self._earlier_work = Stream.current(self._library, device).record()

    def prepare(self, source: runtime.Tensor, target: runtime.Tensor) -> list[Callable[[], None]]:
        """Functions for `send`, which copy pageable memory to the device; the caller keeps both tensors.

        `source`, `target`: contiguous tensors of equal size.
        """
        if self._library is None:
            return [partial(copy_into, source, target, wait=False)]
        begin, to, nbytes = source.data_ptr(), target.data_ptr(), nbytes_of(source)
        copy = partial(self._library.call, "cuMemcpyHtoDAsync_v2")
        return [
            partial(copy, to + first, begin + first, min(SENT_BYTES, nbytes - first), self._stream.handle)
            for first in range(0, nbytes, SENT_BYTES)
        ]

    def send(self, copies: Sequence[Callable[[], None]]) -> None:
        """Make copies that `prepare` returned; sources may be changed at once."""
        library = self._library
        if library is not None:
            library.use(self._device.index)
            main, stream = int(tvm_ffi.get_raw_stream(self._device)), self._stream.handle
            library.quick("cuStreamWaitEvent", stream, self._earlier_work.handle, 0)
            library.quick("cuEventRecord", self._earlier_work.handle, main)
        for copy in copies:
            copy()
        if library is not None:
            library.quick("cuEventRecord", self._end.handle, stream)
            library.quick("cuStreamWaitEvent", main, self._end.handle, 0)


class JoinedColumns:
    """Matrix on the host of parts beside each other: pinned memory, if GPUs have parts and it is not small.

    `parts`: (rows, columns) each, contiguous, of 4 bytes an element: those of `copy`, or ones like them.
    """

    def __init__(self, parts: Sequence[runtime.Tensor]) -> None:
        rows, widths = int(parts[0].shape[0]), [int(part.shape[1]) for part in parts]
        host, first, dtype = runtime.device("cpu", 0), parts[0].device, str(parts[0].dtype)
        shape = rows, sum(widths)
        pinned = send_buffer(4 * rows * shape[1], host, first.index) if backend_of_device(first).pins_memory else None
        self._tensor = empty(shape, dtype, host) if pinned is None else part_of(pinned, shape, dtype, 0)
        self.array = np.from_dlpack(self._tensor)  # (rows, columns of all parts)
        self._parts = [
            _Part(part.device, self.array[:, begin : begin + width])
            for part, begin, width in zip(parts, itertools.accumulate(widths, initial=0), widths, strict=False)
        ]

    def copy(self, parts: Sequence[runtime.Tensor], rows: int) -> None:
        """Copy the first rows of all parts, after their devices' earlier work, and wait for the end.

        It raises HeteroError for errors that kernels reported. `rows`: number of rows to copy.
        """
        for tensor, part in zip(parts, self._parts, strict=True):
            part.begin(tensor, rows)
        for part in self._parts:
            if part.end is not None:
                part.end.synchronize()
                raise_reported(part.end.gpu)


class _Part:
    """Columns of a device in joined ones. `target`: the columns, of 4 bytes an element."""

    def __init__(self, device: runtime.Device, target: np.ndarray) -> None:
        self._device, self._target = device, target
        library = _library_of(device)
        # End of a copy from a GPU; copies from other devices have ended when `begin` returns.
        self.end = None if library is None else Event(library, device.index)
        nbytes = 4 * target.shape[1]
        self._copy = RowCopy(
            srcMemoryType=DEVICE_MEMORY, srcPitch=nbytes, WidthInBytes=nbytes,
            dstMemoryType=HOST_MEMORY, dstPitch=target.strides[0], dstHost=target.ctypes.data,
        )  # fmt: skip

    def begin(self, tensor: runtime.Tensor, rows: int) -> None:
        """Copy the first rows of a tensor of the device, after its earlier work."""
        if self.end is None:
            self._target[:rows] = np.from_dlpack(on_host(tensor))[:rows]
            return
        library, stream = self.end.library, Stream.current(self.end.library, self._device)
        self._copy.srcDevice, self._copy.Height = tensor.data_ptr(), rows
        library.use(self.end.gpu)
        library.call("cuMemcpy2DAsync_v2", ctypes.byref(self._copy), stream.handle)
        self.end.record(stream)
