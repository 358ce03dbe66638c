"""A queue per device: a thread that runs what is ready, the oldest call first.

Work enters a queue when everything it reads is there, so a queue never waits for another one, and calls in flight
cannot block each other. Where several pieces are ready, those of the oldest call go first, in the order of its
schedule: that drains calls, and makes what runs when depend on nothing but when it became ready.

A thread may be interrupted anywhere by an exception that others raise in it (``PyThreadState_SetAsyncExc``). The piece
that it runs then fails, and the queue goes on. For that, what a thread has begun stands where it finds it again, locks
are taken with ``with`` alone, which an exception cannot split, and whatever is done in a thread can be done again.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Sequence
from contextlib import suppress
from heapq import heapify, heappop, heappush
from typing import Protocol

from ...errors import HeteroError
from ..device.numa import prefer_node
from ..device.threads import Threads, keep_threads
from .fence import here


class Work(Protocol):
    """A piece of work that a queue runs."""

    def run(self) -> None:
        """Do it; whatever it raises ends the work, and not the queue."""

    def fail(self, error: BaseException) -> None:
        """Called when `run` raised, was interrupted, or will never be called; perhaps again, after it returned."""


class DeviceQueue:
    """A device's queue; its thread begins with the first work.

    Parameters
    ----------
    name: Of the thread, and in messages.
    cores: The CPUs of a CPU device's thread and its helpers; empty for none of its own.
    threads: That its kernels run on; None where it runs none.
    node: The NUMA node that its threads get memory from; None for the system's choice.

    Attributes
    ----------
    lock: Held while work of this queue runs; work that uses several devices holds the locks of all.
    """

    def __init__(
        self, name: str, cores: Sequence[int] = (), threads: Threads | None = None, node: int | None = None
    ) -> None:
        self.name = name
        self.lock = threading.Lock()
        self._line = _Line(name, tuple(cores), threads, node)

    def push(self, order: tuple[int, int], work: Work) -> None:
        """Add ready work; `order` is the number of its call and of its step, and no two are equal.

        Work that no thread will run fails at once: the queue is closed, or the system gives it no thread.
        """
        self._line.push((*order, work))

    def close(self, timeout: float = 0) -> None:
        """Have the thread end after what runs now, what is left fail, and wait for that for `timeout` seconds."""
        self._line.close()
        thread = self._line.thread
        if timeout > 0 and thread is not None and thread is not threading.current_thread():
            thread.join(timeout)


class _Line:
    """The state that a queue shares with its thread, which must not keep the queue and so the machine alive."""

    def __init__(self, name: str, cores: tuple[int, ...], threads: Threads | None, node: int | None) -> None:
        self.thread: threading.Thread | None = None
        self._name, self._cores, self._threads, self._node = name, cores, threads, node
        self._is_open = True
        self._lock = threading.RLock()  # a signal handler, or a finalizer, may push while this thread holds it
        self._ready: list[tuple[int, int, Work]] = []
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._has_begun = False
        self._runner = 0
        self._current: Work | None = None
        self._raised: BaseException | None = None

    def push(self, entry: tuple[int, int, Work]) -> None:
        with self._lock:
            heappush(self._ready, entry)
        if not self._has_begun:
            self._begin()
        self._wake.put(None)
        if not self._is_open:
            self._give_up(f"{self._name} is closed: the process ends")

    def close(self) -> None:
        self._is_open = False
        self._wake.put(None)

    def _begin(self) -> None:
        try:
            with self._lock:
                if not self._has_begun and self._is_open:
                    # A daemon: an interpreter that ends does not wait for it (`queues` does, for a while).
                    self.thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                    self.thread.start()
                    self._has_begun = True
        except RuntimeError as error:
            self._give_up(f"{self._name} has no thread ({error})")

    def _work(self) -> None:
        try:
            while self._is_open and self._is_mine():
                # An exception that strikes between the lines of the loop in there is caught in this one.
                with suppress(BaseException):
                    self._serve_on()
        except BaseException as error:
            self._raised = error
        finally:
            if self._is_open and self._is_mine():  # and one that strikes between these lines ends the thread
                self._runner, self._has_begun = 0, False
                self._begin()
        if self._is_mine():
            self._give_up(f"{self._name} is closed: the process ends")

    def _is_mine(self) -> bool:
        """Whether this thread serves the queue: one does, also where `_begin` was interrupted and came again."""
        me = threading.get_ident()
        with self._lock:
            self._runner = self._runner or me
            return self._runner == me

    def _serve_on(self) -> None:
        while self._is_open:
            try:
                self._serve()
            except BaseException as error:  # also what is raised in this thread from outside
                self._raised = error

    def _serve(self) -> None:
        if not here.is_worker:
            self._settle_in()
        if self._current is not None:
            self._fail_current()
        self._raised = None
        while self._is_open:
            with self._lock:
                self._take()
            if self._current is None:
                self._wake.get()
            else:
                self._current.run()
                self._current = None

    def _take(self) -> None:
        """Have the first of the ready work be the current one; under the lock."""
        if not self._ready:
            return
        first = self._ready[0]
        self._current = first[-1]
        popped = heappop(self._ready)
        if popped is not first:  # a finalizer of this thread has pushed between
            self._ready.remove(first)
            heapify(self._ready)
            heappush(self._ready, popped)

    def _settle_in(self) -> None:
        if self._cores:
            with suppress(OSError, AttributeError):  # a platform without, or cores that were taken away
                os.sched_setaffinity(threading.get_native_id(), self._cores)
        if self._node is not None:
            prefer_node(self._node)
        if self._threads is not None:
            keep_threads(self._threads)
        here.is_worker = True

    def _fail_current(self) -> None:
        assert self._current is not None
        self._current.fail(self._raised or HeteroError(f"{self._name} was interrupted"))
        self._current = None

    def _give_up(self, why: str) -> None:
        """Fail what is left."""
        while True:
            with self._lock:
                if not self._ready:
                    return
                work = self._ready[0][-1]
                heappop(self._ready)
            work.fail(HeteroError(f"{why}; this work will not be done"))
