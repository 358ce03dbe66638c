"""A queue per device: a thread that runs what is ready, the oldest call first.

Work enters a queue when everything it reads is there, so a queue never waits for another one, and calls in flight
cannot block each other. Where several pieces are ready, those of the oldest call go first, in the order of its
schedule: that drains calls, and makes what runs when depend on nothing but when it became ready.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Sequence
from contextlib import suppress
from heapq import heappop, heappush
from typing import Protocol

from ...errors import HeteroError
from ..device.numa import prefer_node
from ..device.threads import Threads, keep_threads
from .fence import thread_state

_log = logging.getLogger(__name__)


class Work(Protocol):
    """A piece of work that a queue runs."""

    def run(self) -> None:
        """Do it, and tell of its errors; what this raises is logged."""

    def fail(self, error: HeteroError) -> None:
        """Called instead of `run` where no thread will do the work."""


class DeviceQueue:
    """A device's queue; its thread begins with the first work.

    Parameters
    ----------
    name : str
        Name of the thread, also in messages.
    cores : sequence of int
        The CPUs of a CPU device's thread and its helpers; empty for none of its own.
    threads : Threads, optional
        Threads that its kernels run on; None where it runs none.
    node : int, optional
        The NUMA node that its threads get memory from; None for the system's choice.

    Attributes
    ----------
    lock
        Held while work of this queue runs; work that uses several devices holds the locks of all.
    """

    def __init__(
        self, name: str, cores: Sequence[int] = (), threads: Threads | None = None, node: int | None = None
    ) -> None:
        self.name = name
        self.lock = threading.Lock()
        self._cores, self._threads, self._node = tuple(cores), threads, node
        self._is_open = True
        self._state = threading.RLock()  # a signal handler, or a finalizer, may push while this thread holds it
        self._ready: list[tuple[int, int, Work]] = []
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()  # one for each push, one for `close`
        self._thread: threading.Thread | None = None

    def push(self, order: tuple[int, int], work: Work) -> None:
        """Add ready work; `order` is the number of its call and of its step, and no two are equal.

        Work that no thread will run fails at once: the queue is closed, or the system gives it no thread.
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
        """Have the thread end after what runs now, what is left fail, and wait for that for `timeout` seconds."""
        with self._state:
            self._is_open = False
        self._tokens.put(None)
        if timeout > 0 and self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _begin(self) -> str:
        """Begin the thread if there is none; the reason why no thread will run further work, or nothing."""
        if not self._is_open:
            return f"{self.name} is closed: the process ends"
        if self._thread is None or self._thread.ident is None:  # an interrupted caller may not have started it
            # A daemon: an interpreter that ends does not wait for it (`queues` does, for a while).
            self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:
                return f"{self.name} has no thread ({error})"
        return ""

    def _work(self) -> None:
        self._settle_in()
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

    def _settle_in(self) -> None:
        if self._cores:
            with suppress(OSError, AttributeError):  # a platform without, or cores that were taken away
                os.sched_setaffinity(threading.get_native_id(), self._cores)
        if self._node is not None:
            prefer_node(self._node)
        if self._threads is not None:
            keep_threads(self._threads)
        thread_state.is_worker = True
