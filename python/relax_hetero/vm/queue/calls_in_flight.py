"""The calls that a machine has under way, and room for them."""

from __future__ import annotations

import itertools
import threading

from ...errors import HeteroError
from .fence import Fence, check_may_wait, here


class CallsInFlight:
    """How many calls a machine has under way, and room for them.

    Parameters
    ----------
    limit : int
        How many there may be; further ones wait in the thread that submits them.

    Attributes
    ----------
    fences : set of Fence
        Of the calls under way, and of some that have just ended.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._changed = threading.Condition(self._lock)
        self.fences: set[Fence] = set()
        self._numbers = itertools.count(1)

    @property
    def is_idle(self) -> bool:
        """Whether no call is under way."""
        return not self.fences or all(fence.done() for fence in tuple(self.fences))

    def enter(self) -> Fence:
        """The fence of another call, when there is room for it; a thread that runs queues does not wait for any."""
        fence = Fence(self.leave)
        with self._lock:
            if len(self.fences) >= self._limit and not here.is_worker:
                try:
                    self._room.wait_for(lambda: len(self.fences) < self._limit)
                except BaseException:  # the room was perhaps announced to this thread alone
                    self._room.notify()
                    raise
            self.fences.add(fence)
        return fence

    def leave(self, fence: Fence) -> None:
        """A call has ended, whatever way; again, if this was interrupted."""
        with self._lock:
            self.fences.discard(fence)
            self._room.notify()
            self._changed.notify_all()

    def next_number(self) -> int:
        """The number of another call."""
        return next(self._numbers)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the calls that are under way have ended; False after `timeout` seconds."""
        with self._lock:
            earlier = set(self.fences)
            if earlier and timeout != 0:
                check_may_wait("calls")
            return self._changed.wait_for(lambda: earlier.isdisjoint(self.fences), timeout)

    def lose(self, error: HeteroError) -> None:
        """In a process that was forked: the calls under way stayed behind."""
        for fence in self.fences:
            fence.lose(error)
