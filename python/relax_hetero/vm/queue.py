"""A queue per device: a thread that runs what is ready, the oldest call first.

Work enters a queue when everything it reads is there, so a queue never waits for another one, and calls in flight
cannot block each other. Where several pieces are ready, those of the oldest call go first, in the order of its
schedule: that drains calls, and makes what runs when depend on nothing but when it became ready.
"""

from __future__ import annotations

import heapq
import os
import queue
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from .fence import here
from .threads import keep_threads


class Work(Protocol):
    """What queues run."""

    def run(self) -> None:
        """Do it; whatever it raises ends the work, and not the queue."""

    def fail(self, error: BaseException) -> None:
        """What to do when `run` raised, or could not begin."""


class Timeline:
    """A number that only grows: how much of a queue's work has ended, which others can wait for."""

    def __init__(self) -> None:
        self._reached = 0
        self._changed = threading.Condition()

    @property
    def reached(self) -> int:
        """How many pieces of work have ended."""
        return self._reached

    def signal(self) -> None:
        """One more has ended."""
        with self._changed:
            self._reached += 1
            self._changed.notify_all()

    def wait(self, point: int, timeout: float | None = None) -> bool:
        """Wait until `point` is reached; False after `timeout` seconds without."""
        with self._changed:
            return self._changed.wait_for(lambda: self._reached >= point, timeout)


class DeviceQueue:
    """A device's queue; its thread begins with the first work.

    Parameters
    ----------
    name : str
        Of the thread, and in messages.
    cores : sequence of int
        The cores of a CPU device's thread and its helpers; empty for no cores of its own.
    threads : int
        How many threads kernels are cut for; 0 where that is not for this queue to say.

    Attributes
    ----------
    timeline : Timeline
        How much of its work has ended.
    lock : threading.Lock
        Held while work of this queue runs; work that uses several devices holds the locks of all.
    """

    def __init__(self, name: str, cores: Sequence[int] = (), threads: int = 0) -> None:
        self.name = name
        self.timeline = Timeline()
        self.lock = threading.Lock()
        self._state = _State(tuple(cores), threads, self.timeline)
        self._start = threading.Lock()
        self._thread: threading.Thread | None = None

    def push(self, order: tuple[int, int], work: Work) -> None:
        """Add ready work; `order` is the number of its call and of its step, and no two are equal."""
        if self._thread is None:
            self._begin()
        heapq.heappush(self._state.ready, (*order, work))
        self._state.wake.put(None)

    def close(self, timeout: float | None = None) -> None:
        """End the thread after what runs now; what is left is never run. Returns after `timeout` seconds at most."""
        self._state.is_open = False
        self._state.wake.put(None)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def _begin(self) -> None:
        with self._start:
            if self._thread is None:
                # A daemon: an interpreter that ends does not wait for it (machines close their queues then).
                thread = threading.Thread(target=_work, args=(self._state,), name=self.name, daemon=True)
                thread.start()
                self._thread = thread


class _State:
    """What the thread of a queue sees of it: not the queue, which is dropped with its machine."""

    def __init__(self, cores: tuple[int, ...], threads: int, timeline: Timeline) -> None:
        # Adding to a heap and taking from it compare numbers only, so the interpreter's lock makes each one step.
        self.ready: list[tuple[int, int, Work]] = []
        self.wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.is_open = True
        self.cores = cores
        self.threads = threads
        self.timeline = timeline


def _work(state: _State) -> None:
    here.is_worker = True
    if state.cores:
        with suppress(OSError, AttributeError):  # a platform without, or cores that were taken away
            os.sched_setaffinity(threading.get_native_id(), state.cores)
    if state.threads:
        keep_threads(state.threads)
    work: Work | None = None
    while state.is_open:
        try:
            while state.ready and state.is_open:
                work = heapq.heappop(state.ready)[-1]
                work.run()
                work = None
                state.timeline.signal()
            state.wake.get()
        except BaseException as error:  # also what is raised in this thread from outside
            if work is not None:
                work.fail(error)
                work = None
                state.timeline.signal()
