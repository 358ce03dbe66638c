"""Large copies between a GPU and host memory that is not pinned, faster than the driver's own.

The driver copies such memory through pinned buffers of its own, on one thread, which is a fifth of what the link could
do. Here several threads copy parts of a tensor to or from pinned buffers, while the GPU copies other parts::

    host memory --memcpy, each thread--> two buffers a thread --DMA, a stream a thread--> device memory

On one stream the GPU rests for microseconds between two copies. The loop over the parts is code that executables bring
along (`driver/link/threads/workers.c`): no thread waits for Python's lock in it. Until a machine has loaded some,
copies are the driver's. The first parts of a tensor that goes to the GPU are small, so that the link starts early; of
one that comes, the last.
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

STAGED_BYTES = 8 << 20
"""Smaller copies are left to the driver, which is as fast until then."""

PART_BYTES = 4 << 20
"""Smaller parts keep the driver busy with starting copies; of larger ones fewer are under way at once."""

FIRST_PART_BYTES = 256 << 10
"""Bytes of the parts that are copied while the link, or the host, has nothing to do yet."""

THREADS = 8
"""At most; beyond this many the link, or the host's memory, is what limits."""

_MIN_THREADS = 4
"""With fewer the driver is as fast."""

_CALLERS = 2
"""Threads that may copy at once."""

_DESK_WORDS = 16
"""Words of 8 bytes at which a caller and its helpers meet."""

_BUFFERS = 2
"""Number of buffers of each thread: one is copied by the host, one by the GPU."""

Part: TypeAlias = tuple[int, int]
"""Offset and bytes."""


class Loop(NamedTuple):
    """The code's functions.

    Attributes
    ----------
    copy : callable
        Copies, by the addresses of a desk, of a `Job`, and of the caller's `_Buffer` entries; ends the helpers where
        there is no job.
    help : callable
        Helps with the copies of a desk, by the addresses of that and of a helper's entries, until it is told to end.
    """

    copy: Callable[[int, int, int], int]
    help: Callable[[int, int], int]


_FUNCTIONS = ("cuCtxSetCurrent", "cuEventSynchronize", "cuEventRecord", "cuStreamWaitEvent")


class Job(ctypes.Structure):
    """A copy, as the loop knows it: threads take parts by `next` until there are none, or `status` is a failure's."""

    _fields_ = [
        ("next", ctypes.c_int64),
        ("parts", ctypes.c_int64),
        ("offsets", ctypes.c_void_p),
        ("host", ctypes.c_void_p),
        ("device", ctypes.c_int64),
        ("to_host", ctypes.c_int64),
        ("buffers", ctypes.c_int64),
        ("stream", ctypes.c_void_p),
        ("begin", ctypes.c_void_p),  # an event of the stream
        ("context", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in _FUNCTIONS),
        ("copy", ctypes.c_void_p),
        ("status", ctypes.c_int64),
        ("function", ctypes.c_int64),  # that has failed: of `_FUNCTIONS`, or the copy
    ]


class _Buffer(ctypes.Structure):
    """Pinned memory, the event after the GPU's last copy from or to it, and the part that arrives in it.

    Before the buffers of a thread stands an entry with its stream and an event of that.
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
    """Pinned buffers of one GPU, and threads that wait to help.

    Copies may be made from several threads at once: of two, one has no helpers; a third waits.

    Parameters
    ----------
    threads : int
        How many copy, the caller's among them.
    part : int
        Bytes of a buffer.
    """

    def __init__(self, library: CudaLibrary, gpu: int, threads: int, loop: Loop, part: int = PART_BYTES) -> None:
        self._library, self._gpu, self._loop, self._part = library, gpu, loop, part
        self._desks = deque([(ctypes.c_int64 * _DESK_WORDS)() for _ in range(_CALLERS)])
        self._lanes = [_Lane(library, gpu, part) for _ in range(_CALLERS)]
        self._available = threading.Semaphore(_CALLERS)
        self._free = deque(zip(self._desks, self._lanes, strict=True))
        self._helpers = [_Lane(library, gpu, part) for _ in range(threads - 1)]
        for lane in self._helpers:
            # Daemons: in the loop they hold no lock of Python's, whenever the process ends.
            helper = partial(_help, loop, self._desks[0], lane)
            threading.Thread(target=helper, name="relax_hetero staging", daemon=True).start()
        weakref.finalize(self, _close, loop, self._desks[0]).atexit = False

    def send(self, source: int, target: int, nbytes: int, stream: Stream) -> None:
        """Copy from host memory to the GPU.

        Returns when the source has been read. The rest is work of `stream`, which must be one of this GPU.
        """
        self._copy(source, target, nbytes, stream, "cuMemcpyHtoDAsync_v2", False)

    def receive(self, source: int, target: int, nbytes: int, stream: Stream) -> None:
        """Copy from the GPU to host memory, after what `stream`, which must be one of this GPU, has been given.

        Returns when the copy has ended.
        """
        self._copy(target, source, nbytes, stream, "cuMemcpyDtoHAsync_v2", True)

    def _copy(self, host: int, device: int, nbytes: int, stream: Stream, function: str, to_host: bool) -> None:
        offsets = _offsets(nbytes, self._part)
        functions = [self._library.address(name) for name in (*_FUNCTIONS, function)]
        begin, context = stream.record(), self._library.context(self._gpu)
        job = Job(
            0, len(offsets) - 1, ctypes.addressof(offsets), host, device, to_host, _BUFFERS, stream.handle,
            begin.handle, context, *functions,
        )  # fmt: skip
        with self._available:
            desk, lane = self._free.popleft()
            try:
                self._loop.copy(ctypes.addressof(desk), ctypes.addressof(job), lane.address)
            finally:
                # The desk at which helpers wait comes first.
                (self._free.appendleft if desk is self._desks[0] else self._free.append)((desk, lane))
        if job.status:
            raise self._library.error((*_FUNCTIONS, function)[job.function], job.status)


def _help(loop: Loop, desk: ctypes.Array[ctypes.c_int64], lane: _Lane) -> None:
    """Help until the desk is closed; both live as long."""
    loop.help(ctypes.addressof(desk), lane.address)


def _close(loop: Loop, desk: ctypes.Array[ctypes.c_int64]) -> None:
    loop.copy(ctypes.addressof(desk), 0, 0)


def parts_of(nbytes: int, part: int) -> Iterator[Part]:
    """Parts of at most `part` bytes that cover `nbytes`, the first ones smaller."""
    offset, size = 0, min(FIRST_PART_BYTES, part)
    while offset < nbytes:
        yield offset, min(size, nbytes - offset)
        offset += size
        if offset >= THREADS * size:
            size = min(2 * size, part)


@lru_cache(64)
def _offsets(nbytes: int, part: int) -> ctypes.Array[ctypes.c_int64]:
    """Where parts begin, and the end of the last."""
    begins = [offset for offset, _ in parts_of(nbytes, part)]
    return (ctypes.c_int64 * (len(begins) + 1))(*begins, nbytes)


def use_loop(module: runtime.Module) -> None:
    """Have large copies use the loop that loaded code brings along; once in a process."""
    with _making:
        if not _loops:
            loop = loop_of(module)
            if loop is not None:
                _loops.append(loop)


def loop_of(module: runtime.Module) -> Loop | None:
    """The loop in loaded code, None where it has none; a call lets other Python threads run."""
    try:
        copy, wait = (module.get_function(name, True)() for name in (names.STAGE, names.HELP))
    except AttributeError:
        return None
    # Threads are in it until the process ends: the code is never unloaded, not even when the interpreter ends.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
    address = ctypes.c_void_p
    return Loop(
        ctypes.CFUNCTYPE(ctypes.c_int, address, address, address)(copy),
        ctypes.CFUNCTYPE(ctypes.c_int, address, address)(wait),
    )


def staging(library: CudaLibrary, gpu: int) -> Staging | None:
    """The buffers of a GPU; None where no loop is known yet, or too few cores are there for it to be of use."""
    with _making:  # the GPU may read from buffers after a copy has returned: there must not be some that nobody keeps
        return _staging(library, gpu) if _loops and _threads() >= _MIN_THREADS else None


_making = threading.Lock()
_loops: list[Loop] = []


@cache
def _staging(library: CudaLibrary, gpu: int) -> Staging:
    return Staging(library, gpu, _threads(), _loops[0])


def _threads() -> int:
    return min(THREADS, num_cores() // 2)
