"""A queue per device: a thread that runs ready work, the oldest call first.

Work enters a queue when all its inputs are ready, so a queue never waits for another one, and calls in flight cannot
block each other. Ready work is ordered by call, oldest first, and then by schedule: that finishes old calls first, and
the order depends only on when work became ready.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Protocol

from tvm import runtime

from ...errors import HeteroError
from ...system import pin_thread
from ...target.backend import CPU
from ..device.numa import prefer_node
from ..device.threads import Threads, reserve_threads
from .fence import thread_state

_log = logging.getLogger(__name__)


class Work(Protocol):
    """Work that a queue runs."""

    def run(self) -> None:
        """Do the work, and report its errors; exceptions that leave this method are only logged."""

    def fail(self, error: HeteroError) -> None:
        """Report an error; called instead of `run` if no thread will do the work."""


class DeviceQueue:
    """A device's queue; its thread begins with the first work."""

    def __init__(
        self,
        name: str,  # name of the thread, also in messages
        cores: Sequence[int] = (),  # CPUs that a CPU device's thread and its workers are bound to; empty for no binding
        threads: Threads | None = None,  # threads that its kernels run on; None if it runs no kernels
        node: int | None = None,  # NUMA node that its threads allocate memory on; None for the system's choice
    ) -> None:
        self.name = name
        # Held while work of this queue runs; work that uses several devices holds the locks of all.
        self.lock = threading.Lock()
        self._cores, self._threads, self._node = tuple(cores), threads, node
        self._is_open = True
        self._state = threading.RLock()  # a signal handler, or a finalizer, may push while this thread holds it
        self._ready: list[tuple[int, int, Work]] = []
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()  # one for each push, one for `close`
        self._thread: threading.Thread | None = None

    def push(self, order: tuple[int, int], work: Work) -> None:
        """Add ready work; `order` is the number of its call and the index of its step, a unique pair.

        Work fails at once if no thread will run it: the queue is closed, or its thread cannot start.
        """
        with self._state:
            reason = self._begin()
            if not reason:
                heappush(self._ready, (*order, work))
        if reason:
            work.fail(HeteroError(f"{reason}; this work will not be done"))
        else:
            self._tokens.put(None)

    def close(self, timeout: float = 0) -> None:
        """End the thread after its current work, fail the remaining work, and wait up to `timeout` seconds for that."""
        with self._state:
            self._is_open = False
        self._tokens.put(None)
        if timeout > 0 and self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _begin(self) -> str:
        """Start the thread if necessary; returns why no thread will run further work, or an empty text."""
        if not self._is_open:
            return f"{self.name} is closed: the process ends"
        if self._thread is None or self._thread.ident is None:  # an interrupted caller may not have started it
            # A daemon: interpreter exit does not wait for it (`queues` does, for a limited time).
            self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:
                return f"{self.name} has no thread ({error})"
        return ""

    def _work(self) -> None:
        self._set_up_thread()
        while True:
            self._tokens.get()
            with self._state:
                if not self._is_open:
                    break
                work = heappop(self._ready)[-1]
            try:
                work.run()
            except BaseException:
                _log.exception("exception in %s", self.name)
            del work  # it keeps its call alive
        for _, _, work in self._ready:
            work.fail(HeteroError(f"{self.name} is closed: the process ends; this work will not be done"))

    def _set_up_thread(self) -> None:
        if self._cores:
            pin_thread(threading.get_native_id(), self._cores)  # otherwise the system places it
        if self._node is not None:
            prefer_node(self._node)
        if self._threads is not None:
            reserve_threads(self._threads)
        thread_state.is_worker = True


class CopyThreads:
    """A queue for each direction of copies between the host and devices whose copies wait for their end.

    Parameters
    ----------
    device_type : int
        DLPack device type.
    """

    def __init__(self, device_type: int) -> None:
        self.queues: list[DeviceQueue] = []  # queues that `between` has made
        self._device_type = device_type
        self._queues: dict[tuple[str, str], DeviceQueue] = {}

    def between(self, source: runtime.Device, target: runtime.Device) -> DeviceQueue | None:
        """The queue for copies between two devices; None unless one is the host. Not thread-safe."""
        types = {source.dlpack_device_type(), target.dlpack_device_type()}
        if types != {CPU, self._device_type}:
            return None
        pair = str(source), str(target)
        if pair not in self._queues:
            self._queues[pair] = DeviceQueue(f"copies from {source} to {target}")
            self.queues.append(self._queues[pair])
        return self._queues[pair]
