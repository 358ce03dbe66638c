"""The lock of a machine, which its calls hold one after the other.

A process that ends holds all of them: daemon threads, which Python leaves where they are, then wait for a lock. One
that came back from compiled code later would find no interpreter, and take the process down with an abort.

A process that forks holds all of them meanwhile, too: TVM's allocators have locks of their own, which in the new
process nobody would release for a thread that was in a call.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any, NoReturn

from ...errors import HeteroError

FORK_SECONDS = 0.2
"""A fork waits so long for calls of other threads to end."""

_all: weakref.WeakSet[MachineLock] = weakref.WeakSet()
_listed = threading.Lock()
_fork_locks: list[MachineLock] = []


class MachineLock:
    """The lock of a machine, for all of its parts: ``with lock.held``.

    Attributes
    ----------
    held : object
        Reentrant; raises HeteroError once `refuse` was called.
    """

    __slots__ = ("__weakref__", "held")

    def __init__(self) -> None:
        self.held: Any = threading.RLock()
        with _listed:
            _all.add(self)

    def is_free(self) -> bool:
        """Return whether this thread could hold the lock now, and another one does not."""
        if isinstance(self.held, _RefusingLock) or not self.held.acquire(blocking=False):
            return False
        self.held.release()
        return True

    def acquire(self, until: float) -> bool:
        """Hold the lock, as soon as no other thread does; whether that was before `until` (`time.monotonic`)."""
        if isinstance(self.held, _RefusingLock):
            return False
        return bool(self.held.acquire(timeout=max(0.0, until - time.monotonic())))

    def refuse(self, why: str) -> None:
        """Have whoever needs the lock from now on get a HeteroError that says `why`."""
        self.held = _RefusingLock(why)


class _RefusingLock:
    """In place of a machine's lock: whoever needs it gets an error."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __enter__(self) -> NoReturn:
        raise HeteroError(self._why)

    def __exit__(self, *_raised: object) -> None:
        """Never called: nothing enters."""


class _LastLock:
    """In place of a machine's lock when the process ends: threads that do not hold it by then wait for ever.

    Without it a thread that calls a machine in a loop takes the lock back before the ending thread has woken up.
    """

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._ending = threading.get_ident()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if threading.get_ident() != self._ending and not self._lock._is_owned():
            if not blocking:
                return False
            threading.Event().wait()
        return bool(self._lock.acquire(blocking, timeout))

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_raised: object) -> None:
        self._lock.release()


def hold_all(until: float) -> None:
    """Have other threads' calls of all machines wait for ever, once those that run have ended.

    Parameters
    ----------
    until : float
        When to give up waiting for a call, as `time.monotonic` tells it.
    """
    with _listed:
        locks = list(_all)
    for lock in locks:
        if not isinstance(lock.held, _RefusingLock):
            lock.held = _LastLock(lock.held)
    for lock in locks:
        lock.acquire(until)


def hold_to_fork() -> None:
    """Hold all locks that are free soon, until `release_after_fork`, here and in the new process."""
    until = time.monotonic() + FORK_SECONDS
    _listed.acquire()
    _fork_locks.extend(lock for lock in list(_all) if lock.acquire(until))


def release_after_fork() -> None:
    """Release what `hold_to_fork` held."""
    while _fork_locks:
        _fork_locks.pop().held.release()
    if _listed.locked():  # not where Ctrl-C came before
        _listed.release()
