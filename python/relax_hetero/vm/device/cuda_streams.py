"""CUDA streams and events. Both are thread-safe, and destroyed when nothing refers to them; running work completes."""

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
    """A CUDA event; before it is recorded, it counts as reached.

    Parameters
    ----------
    gpu : int
        GPU whose streams record it; streams of any GPU may wait for it.
    sleeps : bool
        Whether threads that wait for it block (which adds some microseconds) rather than spin.
    timed : bool
        Whether it records a time.
    """

    def __init__(self, library: CudaLibrary, gpu: int, sleeps: bool = False, timed: bool = False) -> None:
        self.library, self.gpu = library, gpu
        library.use(gpu)
        flags = (_BLOCKING_SYNC if sleeps else 0) | (0 if timed else _DISABLE_TIMING)
        self.handle = library.create("cuEventCreate", flags)
        _destroy_with(self, library, "cuEventDestroy_v2")

    def record(self, stream: Stream) -> None:
        """Record the event after all work of `stream` so far."""
        self.library.use(self.gpu)
        self.library.quick("cuEventRecord", self.handle, stream.handle)

    def done(self) -> bool:
        """Return whether it has been reached; CudaError if the GPU has failed."""
        return _has_ended(self.library, "cuEventQuery", self.handle)

    def synchronize(self) -> None:
        """Wait until it has been reached; CudaError if the GPU has failed."""
        if not self.done():
            self.library.call("cuEventSynchronize", self.handle)

    def milliseconds_since(self, earlier: Event) -> float:
        """Time between two timed events of one GPU that have been reached."""
        result = ctypes.c_float()
        self.library.call("cuEventElapsedTime", ctypes.byref(result), earlier.handle, self.handle)
        return result.value


class Stream:
    """A CUDA stream.

    Parameters
    ----------
    handle : int, optional
        Existing stream, which must outlive this object; None for a new one that does not synchronize with the default
        stream.
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
        """The calling thread's current stream on the same GPU."""
        return Stream.current(self.library, cuda_device(self.gpu))

    @staticmethod
    def current(library: CudaLibrary, device: runtime.Device) -> Stream:
        """The stream on which TVM launches this thread's kernels on a CUDA device."""
        return Stream(library, device.index, int(tvm_ffi.get_raw_stream(device)))

    def record(self, sleeps: bool = False, timed: bool = False) -> Event:
        """Record a new event after all work so far; the flags are those of `Event`."""
        event = Event(self.library, self.gpu, sleeps, timed)
        event.record(self)
        return event

    def wait(self, event: Event) -> None:
        """Order later work of the stream after `event`; the calling thread does not wait."""
        self.library.use(self.gpu)
        self.library.quick("cuStreamWaitEvent", self.handle, event.handle, 0)

    def done(self) -> bool:
        """Return whether all its work has ended; CudaError if the GPU has failed."""
        self.library.use(self.gpu)
        return _has_ended(self.library, "cuStreamQuery", self.handle)

    def synchronize(self) -> None:
        """Wait until all its work has ended; CudaError if the GPU has failed."""
        self.library.use(self.gpu)
        self.library.call("cuStreamSynchronize", self.handle)


def _has_ended(library: CudaLibrary, query: str, handle: int) -> bool:
    status = library.status(query, handle)
    if status not in (0, NOT_READY):
        raise library.error(query, status)
    return status == 0


def _destroy_with(owner: Event | Stream, library: CudaLibrary, function: str) -> None:
    # Not at process exit: the driver may have shut down, and frees everything itself.
    weakref.finalize(owner, library.status, function, owner.handle).atexit = False


@cache
def shared_stream(library: CudaLibrary, gpu: int, purpose: str) -> Stream:
    """A stream of a GPU that all machines share for one purpose; it synchronizes with the default stream."""
    library.use(gpu)
    return Stream(library, gpu, library.create("cuStreamCreate", 0))


@cache
def copy_stream(library: CudaLibrary, gpu: int, purpose: str) -> Stream:
    """A stream of a GPU that all machines share for copies of one purpose; no other stream waits for it by itself."""
    return Stream(library, gpu)
