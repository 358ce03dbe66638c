"""Large copies between a GPU and pageable host memory, faster than the driver's own.

The driver stages such copies through pinned buffers on one thread, at a fifth of the link's rate. Here several threads
copy chunks of a tensor to or from pinned buffers, while the GPU copies other chunks::

    host memory --memcpy, all threads--> two buffers per thread --DMA, one stream per thread--> device memory

One stream per thread avoids gaps of microseconds between the GPU's copies. The loop over chunks is compiled code in
executables (`driver/link/threads/workers.c`), which does not need Python's global lock. Before any executable is
loaded, the driver copies. The first chunks of a copy to the GPU, and the last of a copy from it, are small, so that the
link starts early and the host ends early.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache, lru_cache, partial
from typing import NamedTuple, TypeAlias

from tvm import runtime

from ...artifact import worker_threads as names
from ...target.cpu_cores import num_cores
from .cuda_library import CudaLibrary
from .cuda_memory import PinnedBlock
from .cuda_streams import Event, Stream

STAGED_BYTES = 8 << 20  # minimum bytes of a staged copy; for smaller ones the driver is as fast
CHUNK_BYTES = 4 << 20  # maximum bytes of a chunk: smaller ones cost more launches, larger ones reduce the overlap
FIRST_CHUNK_BYTES = 256 << 10  # bytes of the first chunks, which are copied while the link, or the host, is idle
THREADS = 8  # maximum number of threads; beyond it the link or the host's memory is the bottleneck
_MIN_THREADS = 4  # minimum number of threads; with fewer the driver is as fast
_MAX_CALLERS = 2  # maximum number of concurrent copies
_MAILBOX_WORDS = 16  # number of 8-byte words through which a caller gives jobs to its helpers
_BUFFERS = 2  # number of buffers of each thread: one is copied by the host, one by the GPU
Chunk: TypeAlias = tuple[int, int]  # offset and bytes


class Loop(NamedTuple):
    """Compiled functions of the copy loop."""

    # Copies; takes the addresses of a mailbox, a `Job` and the caller's `_Buffer` entries. Without a job it ends the
    # helpers.
    copy: Callable[[int, int, int], int]
    # Helps with the copies of a mailbox until it is closed; takes its address and that of the helper's entries.
    help: Callable[[int, int], int]


_FUNCTIONS = ("cuCtxSetCurrent", "cuEventSynchronize", "cuEventRecord", "cuStreamWaitEvent")


class Job(ctypes.Structure):
    """A copy: threads take chunks by incrementing `next`, until none are left or `status` reports a failure."""

    _fields_ = [
        ("next", ctypes.c_int64),
        ("parts", ctypes.c_int64),
        ("offsets", ctypes.c_void_p),
        ("host", ctypes.c_void_p),
        ("device", ctypes.c_int64),
        ("to_host", ctypes.c_int64),
        ("buffers", ctypes.c_int64),
        ("stream", ctypes.c_void_p),
        ("begin", ctypes.c_void_p),  # an event
        ("context", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in _FUNCTIONS),
        ("copy", ctypes.c_void_p),
        ("status", ctypes.c_int64),
        ("function", ctypes.c_int64),  # that has failed: index into `_FUNCTIONS`, or the copy
    ]


class _Buffer(ctypes.Structure):
    """Pinned memory, the event after the GPU's last copy from or to it, and the chunk that it receives.

    The first entry of a thread, before its buffers, has its stream and an event of that.
    """

    _fields_ = [
        ("address", ctypes.c_void_p),
        ("event", ctypes.c_void_p),
        ("offset", ctypes.c_int64),
        ("nbytes", ctypes.c_int64),
    ]


class _Lane:
    """The stream and the buffers of a thread."""

    def __init__(self, library: CudaLibrary, gpu: int, nbytes: int) -> None:
        self._blocks = [PinnedBlock(library, gpu, nbytes) for _ in range(_BUFFERS)]
        self._events = [Event(library, gpu) for _ in range(1 + _BUFFERS)]
        self._stream = Stream(library, gpu)
        addresses = [self._stream.handle, *(block.address for block in self._blocks)]
        entries = [_Buffer(address, event.handle) for address, event in zip(addresses, self._events, strict=True)]
        self._entries = (_Buffer * len(entries))(*entries)
        self.address = ctypes.addressof(self._entries)


class Staging:
    """Pinned buffers of one GPU, and helper threads.

    Two threads may copy at once, one of them without helpers; a third one waits. `threads`: number of copying threads,
    including the caller's. `chunk`: bytes of a buffer.
    """

    def __init__(self, library: CudaLibrary, gpu: int, threads: int, loop: Loop, chunk: int = CHUNK_BYTES) -> None:
        self._library, self._gpu, self._loop, self._chunk = library, gpu, loop, chunk
        self._mailboxes = deque([(ctypes.c_int64 * _MAILBOX_WORDS)() for _ in range(_MAX_CALLERS)])
        self._lanes = [_Lane(library, gpu, chunk) for _ in range(_MAX_CALLERS)]
        self._available = threading.Semaphore(_MAX_CALLERS)
        self._free = deque(zip(self._mailboxes, self._lanes, strict=True))
        self._helpers = [_Lane(library, gpu, chunk) for _ in range(threads - 1)]
        for lane in self._helpers:
            # Daemons are safe at process exit: in the loop they hold none of Python's locks.
            helper = partial(_help, loop, self._mailboxes[0], lane)
            threading.Thread(target=helper, name="relax_hetero staging", daemon=True).start()
        weakref.finalize(self, _close, loop, self._mailboxes[0]).atexit = False

    def send(self, source: int, target: int, nbytes: int, stream: Stream, begin: Event | None = None) -> None:
        """Copy from host memory to the GPU.

        Returns when the source has been read. The copy ends in order with `stream`, a stream of this GPU, and begins
        after `begin`, by default after all work of the stream so far.
        """
        self._copy(source, target, nbytes, stream, "cuMemcpyHtoDAsync_v2", False, begin)

    def receive(self, source: int, target: int, nbytes: int, stream: Stream) -> None:
        """Copy from the GPU to host memory in order with `stream`, a stream of this GPU; waits for the end."""
        self._copy(target, source, nbytes, stream, "cuMemcpyDtoHAsync_v2", True)

    def _copy(
        self,
        host: int,
        device: int,
        nbytes: int,
        stream: Stream,
        function: str,
        to_host: bool,
        begin: Event | None = None,
    ) -> None:
        offsets = _offsets(nbytes, self._chunk)
        functions = [self._library.address(name) for name in (*_FUNCTIONS, function)]
        begin, context = begin or stream.record(), self._library.context(self._gpu)
        job = Job(
            0, len(offsets) - 1, ctypes.addressof(offsets), host, device, to_host, _BUFFERS, stream.handle,
            begin.handle, context, *functions,
        )  # fmt: skip
        with self._available:
            mailbox, lane = self._free.popleft()
            try:
                self._loop.copy(ctypes.addressof(mailbox), ctypes.addressof(job), lane.address)
            finally:
                # The first mailbox is the one with helpers.
                is_helped = mailbox is self._mailboxes[0]
                (self._free.appendleft if is_helped else self._free.append)((mailbox, lane))
        if job.status:
            raise self._library.error((*_FUNCTIONS, function)[job.function], job.status)


def _help(loop: Loop, mailbox: ctypes.Array[ctypes.c_int64], lane: _Lane) -> None:
    """Help until the mailbox is closed; keeps mailbox and lane alive."""
    loop.help(ctypes.addressof(mailbox), lane.address)


def _close(loop: Loop, mailbox: ctypes.Array[ctypes.c_int64]) -> None:
    loop.copy(ctypes.addressof(mailbox), 0, 0)


def chunks_of(nbytes: int, chunk: int) -> Iterator[Chunk]:
    """Chunks of at most `chunk` bytes that cover `nbytes`, the first ones smaller."""
    offset, size = 0, min(FIRST_CHUNK_BYTES, chunk)
    while offset < nbytes:
        yield offset, min(size, nbytes - offset)
        offset += size
        if offset >= THREADS * size:
            size = min(2 * size, chunk)


@lru_cache(64)
def _offsets(nbytes: int, chunk: int) -> ctypes.Array[ctypes.c_int64]:
    """The offsets of chunks, and the end of the last."""
    begins = [offset for offset, _ in chunks_of(nbytes, chunk)]
    return (ctypes.c_int64 * (len(begins) + 1))(*begins, nbytes)


def use_compiled_copy_loop(module: runtime.Module) -> None:
    """Use the copy loop of a loaded executable for large copies; the first call in a process decides."""
    with _staging_lock:
        if not _loops:
            loop = loop_of(module)
            if loop is not None:
                _loops.append(loop)


def loop_of(module: runtime.Module) -> Loop | None:
    """The copy loop of loaded code, or None; its functions release Python's global lock."""
    try:
        copy, wait = (module.get_function(name, True)() for name in (names.STAGE, names.HELP))
    except AttributeError:
        return None
    # Threads run it until the process ends, so the code must never be unloaded.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
    address = ctypes.c_void_p
    return Loop(
        ctypes.CFUNCTYPE(ctypes.c_int, address, address, address)(copy),
        ctypes.CFUNCTYPE(ctypes.c_int, address, address)(wait),
    )


def staging(library: CudaLibrary, gpu: int) -> Staging | None:
    """The buffers of a GPU; None without a copy loop or with too few cores to gain."""
    with _staging_lock:  # only one per GPU: it must stay alive, because the GPU may read buffers after a copy returns
        return _staging(library, gpu) if _loops and _threads() >= _MIN_THREADS else None


_staging_lock = threading.Lock()
_loops: list[Loop] = []


@cache
def _staging(library: CudaLibrary, gpu: int) -> Staging:
    return Staging(library, gpu, _threads(), _loops[0])


def _threads() -> int:
    return min(THREADS, num_cores() // 2)
