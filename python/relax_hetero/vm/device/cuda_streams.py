"""Streams and events of CUDA: work in order on a GPU, and points in it that others wait for.

All can be used from any thread. They are destroyed when nothing refers to them; work that has not ended does end.
"""

from __future__ import annotations

import ctypes
import weakref
from functools import cache

import tvm_ffi
from tvm import runtime

from .cuda_library import NOT_READY, CudaLibrary, cuda_device

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_BLOCKING_SYNC, _DISABLE_TIMING = 1, 2  # CU_EVENT_*


class Event:
    """A point in a stream's work; before it is recorded, one that has been reached.

    Parameters
    ----------
    gpu : int
        Whose streams record it; any may wait for it.
    sleeps : bool
        Whether threads that wait for it sleep (and wake some microseconds later) rather than spin.
    timed : bool
        Whether it has a time.
    """

    def __init__(self, library: CudaLibrary, gpu: int, sleeps: bool = False, timed: bool = False) -> None:
        self.library, self.gpu = library, gpu
        library.use(gpu)
        flags = (_BLOCKING_SYNC if sleeps else 0) | (0 if timed else _DISABLE_TIMING)
        self.handle = library.create("cuEventCreate", flags)
        _destroy_with(self, library, "cuEventDestroy_v2")

    def record(self, stream: Stream) -> None:
        """Mean the end of what `stream` has been given so far."""
        self.library.use(self.gpu)
        self.library.quick("cuEventRecord", self.handle, stream.handle)

    def done(self) -> bool:
        """Return whether it has been reached; CudaError where the GPU has failed."""
        return _has_ended(self.library, "cuEventQuery", self.handle)

    def synchronize(self) -> None:
        """Return when it has been reached; CudaError where the GPU has failed."""
        if not self.done():
            self.library.call("cuEventSynchronize", self.handle)

    def milliseconds_since(self, earlier: Event) -> float:
        """Time between two events of one GPU that are timed and done."""
        result = ctypes.c_float()
        self.library.call("cuEventElapsedTime", ctypes.byref(result), earlier.handle, self.handle)
        return result.value


class Stream:
    """Work of a GPU that runs in order.

    Parameters
    ----------
    handle : int, optional
        A stream of others, which outlives this object; None makes a new one, which waits for no other stream of its own
        accord.
    """

    def __init__(self, library: CudaLibrary, gpu: int, handle: int | None = None) -> None:
        self.library, self.gpu = library, gpu
        if handle is None:
            library.use(gpu)
            self.handle = library.create("cuStreamCreate", _NON_BLOCKING)
            _destroy_with(self, library, "cuStreamDestroy_v2")
        else:
            self.handle = handle

    def chosen(self) -> Stream:
        """The stream that this thread has chosen on the same GPU."""
        return Stream.current(self.library, cuda_device(self.gpu))

    @staticmethod
    def current(library: CudaLibrary, device: runtime.Device) -> Stream:
        """The stream that TVM launches kernels on, from this thread, on a CUDA device."""
        return Stream(library, device.index, int(tvm_ffi.get_raw_stream(device)))

    def record(self, sleeps: bool = False, timed: bool = False) -> Event:
        """An event at the end of what the stream has been given so far; the flags are those of `Event`."""
        event = Event(self.library, self.gpu, sleeps, timed)
        event.record(self)
        return event

    def wait(self, event: Event) -> None:
        """Have later work of the stream run after `event`; the thread does not wait."""
        self.library.use(self.gpu)
        self.library.quick("cuStreamWaitEvent", self.handle, event.handle, 0)

    def done(self) -> bool:
        """Return whether all its work has ended; CudaError where the GPU has failed."""
        self.library.use(self.gpu)
        return _has_ended(self.library, "cuStreamQuery", self.handle)

    def synchronize(self) -> None:
        """Return when all its work has ended; CudaError where the GPU has failed."""
        self.library.use(self.gpu)
        self.library.call("cuStreamSynchronize", self.handle)


def _has_ended(library: CudaLibrary, query: str, handle: int) -> bool:
    status = library.status(query, handle)
    if status not in (0, NOT_READY):
        raise library.error(query, status)
    return status == 0


def _destroy_with(owner: Event | Stream, library: CudaLibrary, function: str) -> None:
    # When the process ends the driver may have ended before, and frees everything.
    weakref.finalize(owner, library.status, function, owner.handle).atexit = False


@cache
def shared_stream(library: CudaLibrary, gpu: int, purpose: str) -> Stream:
    """A stream of a GPU that all machines use for the same purpose.

    It is ordered with CUDA's default stream, and never destroyed.
    """
    library.use(gpu)
    return Stream(library, gpu, library.create("cuStreamCreate", 0))
