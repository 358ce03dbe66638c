"""Large copies between a GPU and host memory that is not pinned, faster than the driver's own.

The driver copies such memory through pinned buffers of its own, on one thread, which is a fifth of what the link could
do. Here several threads copy parts of a tensor to or from pinned buffers, while the GPU copies other parts::

    host memory --memmove, each thread--> two buffers a thread --DMA, on one stream--> device memory

The first parts of a tensor that goes to the GPU are small, so that the link starts early; of one that comes, the last.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from itertools import cycle
from typing import TypeAlias

from ...target.cpu_cores import num_cores
from .cuda_library import CudaLibrary
from .cuda_memory import PinnedBlock
from .cuda_streams import Event, Stream

STAGED_BYTES = 32 << 20
"""Smaller copies are left to the driver, which is as fast until then."""

PART_BYTES = 2 << 20
"""Smaller parts make threads wait for each other: only one runs Python at a time, between its copies. Larger ones do
not stay in a core's cache."""

FIRST_PART_BYTES = 256 << 10
"""Bytes of the parts that are copied while the link, or the host, has nothing to do yet."""

THREADS = 8
"""At most; beyond this many the link, or the host's memory, is what limits."""

_FEWEST_THREADS = 4
"""With fewer the driver is as fast."""

_BYTES_OF_A_THREAD = 2 << 20
"""For less than this another thread takes longer to begin than it saves."""

_BUFFERS = 2
"""Of each thread: one is copied by the host, one by the GPU."""

Part: TypeAlias = tuple[int, int]
"""Offset and bytes."""


class _Buffer(PinnedBlock):
    """Pinned memory, and when the GPU has last copied from or to it."""

    def __init__(self, library: CudaLibrary, gpu: int, nbytes: int) -> None:
        super().__init__(library, gpu, nbytes)
        self.event = Event(library, gpu)


class Staging:
    """Pinned buffers of one GPU.

    Copies may be made from several threads at once; they share the buffers.

    Parameters
    ----------
    threads: How many copy, the caller's among them.
    part: Bytes of a buffer.
    """

    def __init__(self, library: CudaLibrary, gpu: int, threads: int, part: int = PART_BYTES) -> None:
        self._library, self._gpu, self._threads, self._part = library, gpu, threads, part
        self._free: deque[list[_Buffer]] = deque()
        self._available = threading.Semaphore(0)
        for _ in range(threads):
            self._free.append([_Buffer(library, gpu, part) for _ in range(_BUFFERS)])
            self._available.release()

    def send(self, source: int, target: int, nbytes: int, stream: Stream) -> None:
        """Copy from host memory to the GPU.

        Returns when the source has been read. The rest is work of `stream`, which must be one of this GPU.
        """
        parts = iter(parts_of(nbytes, self._part))

        def copy(buffers: list[_Buffer]) -> None:
            for buffer, (offset, size) in zip(cycle(buffers), parts, strict=False):
                buffer.event.synchronize()
                ctypes.memmove(buffer.address, source + offset, size)
                self._library.quick("cuMemcpyHtoDAsync_v2", target + offset, buffer.address, size, stream.handle)
                buffer.event.record(stream)

        self._share(copy, nbytes)

    def receive(self, source: int, target: int, nbytes: int, stream: Stream) -> None:
        """Copy from the GPU to host memory, after what `stream`, which must be one of this GPU, has been given.

        Returns when the copy has ended.
        """
        parts = iter([(nbytes - offset - size, size) for offset, size in parts_of(nbytes, self._part)][::-1])

        def copy(buffers: list[_Buffer]) -> None:
            arriving: deque[tuple[_Buffer, Part]] = deque()
            for buffer, (offset, size) in zip(cycle(buffers), parts, strict=False):
                if len(arriving) == len(buffers):
                    land(*arriving.popleft())
                buffer.event.synchronize()  # the GPU may still read from it what another copy sends
                self._library.quick("cuMemcpyDtoHAsync_v2", buffer.address, source + offset, size, stream.handle)
                buffer.event.record(stream)
                arriving.append((buffer, (offset, size)))
            while arriving:
                land(*arriving.popleft())

        def land(buffer: _Buffer, part: Part) -> None:
            offset, size = part
            buffer.event.synchronize()
            ctypes.memmove(target + offset, buffer.address, size)

        self._share(copy, nbytes)

    def _share(self, copy: Callable[[list[_Buffer]], None], nbytes: int) -> None:
        """Run `copy` in this thread, and in as many others as there is work and buffers for."""

        def run() -> None:
            self._library.use(self._gpu)
            buffers = self._free.popleft()
            try:
                copy(buffers)
            finally:
                self._free.append(buffers)
                self._available.release()

        self._available.acquire()
        helpers = min(self._threads, -(-nbytes // min(_BYTES_OF_A_THREAD, self._part))) - 1
        helped = [_helpers().submit(run) for _ in range(helpers) if self._available.acquire(blocking=False)]
        try:
            run()
        finally:  # those that did not begin leave the work to others, which may take long
            helping = [other for other in helped if not self._withdraw(other)]
            wait(helping)
        for other in helping:
            other.result()

    def _withdraw(self, helper: Future[None]) -> bool:
        if not helper.cancel():
            return False
        self._available.release()
        return True


def parts_of(nbytes: int, part: int) -> Iterator[Part]:
    """Parts of at most `part` bytes that cover `nbytes`, the first ones smaller."""
    offset, size = 0, min(FIRST_PART_BYTES, part)
    while offset < nbytes:
        yield offset, min(size, nbytes - offset)
        offset += size
        if offset >= THREADS * size:
            size = min(2 * size, part)


@cache
def _helpers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, _threads() - 1), "relax_hetero staging")


def staging(library: CudaLibrary, gpu: int) -> Staging | None:
    """The buffers of a GPU; None where there are too few cores for them to be of use."""
    with _making:  # the GPU may read from buffers after a copy has returned: there must not be some that nobody keeps
        return _staging(library, gpu)


_making = threading.Lock()


@cache
def _staging(library: CudaLibrary, gpu: int) -> Staging | None:
    return Staging(library, gpu, _threads()) if _threads() >= _FEWEST_THREADS else None


def _threads() -> int:
    return min(THREADS, num_cores() // 2)
