"""CUDA streams and events. Both are thread-safe, and destroyed when nothing refers to them; running work completes."""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable
from functools import cache

import tvm_ffi
from tvm import runtime

from .cuda_driver import CudaError
from .cuda_library import NOT_READY, CudaLibrary, cuda_device

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_BLOCKING_SYNC, _DISABLE_TIMING = 1, 2  # CU_EVENT_*

_UNCHECKED_SECONDS = 0.002  # time that a thread waits before its first check
_POLL_SHARE, _MAX_POLL_SECONDS = 0.02, 0.01
"""Polling interval, as a share of the time that a thread has waited, and its maximum."""

wait_checks: dict[int, Callable[[float], None]] = {}
"""For each GPU that may never end its work, a function of the seconds that a thread has waited, which raises errors.

With 0 seconds it raises the error of an earlier check only.
"""


class Event:
    """A CUDA event; before it is recorded, it counts as reached."""

    def __init__(
        self,
        library: CudaLibrary,
        gpu: int,  # GPU whose streams record it; streams of any GPU may wait for it
        sleeps: bool = False,  # whether threads that wait for it block (which adds some microseconds) rather than spin
        timed: bool = False,  # whether it records a time
    ) -> None:
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
        """Wait until it has been reached; CudaError if the GPU has failed, or an error of `wait_checks`."""
        if not _has_waited(self.gpu, self.done) and not self.done():
            self.library.call("cuEventSynchronize", self.handle)

    def milliseconds_since(self, earlier: Event) -> float:
        """Time between two timed events of one GPU that have been reached."""
        result = ctypes.c_float()
        self.library.call("cuEventElapsedTime", ctypes.byref(result), earlier.handle, self.handle)
        return result.value


class Stream:
    """A CUDA stream.

    `handle`: existing stream, which must outlive this object; None for a new one that does not synchronize with the
    default stream.
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

    def has_ended(self) -> bool:
        """`done` of a stream that is not a default one; this thread's current GPU stays the same.

        It may wait for a launch of another thread, and releases Python's global lock, which that may need.
        """
        return _has_ended(self.library, "cuStreamQuery", self.handle, quick=False)

    def synchronize(self) -> None:
        """Wait until all its work has ended; errors are those of `Event.synchronize`."""
        if not _has_waited(self.gpu, self.done):
            self.library.use(self.gpu)
            self.library.call("cuStreamSynchronize", self.handle)


def check_wait(gpu: int, seconds: float) -> None:
    """Raise the error of a GPU's check, if it has one, for a thread that has waited for so many seconds."""
    check = wait_checks.get(gpu)
    if check is not None:
        check(seconds)


def _has_waited(gpu: int, is_done: Callable[[], bool]) -> bool:
    """Wait for a GPU that has a check; False without one."""
    if gpu not in wait_checks:
        return False
    begin = time.monotonic()
    try:
        while not is_done():
            seconds = time.monotonic() - begin
            if seconds > _UNCHECKED_SECONDS:
                check_wait(gpu, seconds)
            time.sleep(min(_POLL_SHARE * seconds, _MAX_POLL_SECONDS))
    except CudaError:  # of a lost GPU, for which others may wait
        check_wait(gpu, _UNCHECKED_SECONDS)
        raise
    check_wait(gpu, 0)  # the check of another thread may have ended the work
    return True


def _has_ended(library: CudaLibrary, query: str, handle: int, quick: bool = True) -> bool:
    status = library.status(query, handle, quick=quick)
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
