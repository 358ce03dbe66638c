"""The lock of a machine, which serializes its calls.

At process exit all locks are taken, so that daemon threads block on them. A daemon thread that returned from compiled
code later would find no interpreter, and abort the process.

During a fork all locks are taken, too: TVM's allocators have locks of their own, which would stay locked in the child
if a thread was in a call.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any, NoReturn

from ...errors import HeteroError

FORK_SECONDS = 0.2  # maximum wait of a fork for calls of other threads

_all_locks: weakref.WeakSet[MachineLock] = weakref.WeakSet()
_all_locks_guard = threading.Lock()
_fork_locks: list[MachineLock] = []


class MachineLock:
    """The lock of a machine, used as ``with lock.held``."""

    __slots__ = ("__weakref__", "held")

    def __init__(self) -> None:
        self.held: Any = threading.RLock()  # reentrant lock; raises HeteroError once `refuse` was called
        with _all_locks_guard:
            _all_locks.add(self)

    def is_free(self) -> bool:
        """Return whether this thread can take the lock without waiting."""
        if isinstance(self.held, _RefusingLock) or not self.held.acquire(blocking=False):
            return False
        self.held.release()
        return True

    def acquire(self, until: float) -> bool:
        """Take the lock, waiting at most until `until` (`time.monotonic`); returns whether it was taken."""
        if isinstance(self.held, _RefusingLock):
            return False
        return bool(self.held.acquire(timeout=max(0.0, until - time.monotonic())))

    def refuse(self, why: str) -> None:
        """Make all later uses of the lock raise a HeteroError with the text `why`."""
        self.held = _RefusingLock(why)


class _RefusingLock:
    """Replacement of a machine's lock that raises an error."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __enter__(self) -> NoReturn:
        raise HeteroError(self._why)

    def __exit__(self, *_raised: object) -> None:
        """Never called, because `__enter__` raises."""


class _LastLock:
    """Replacement of a machine's lock at process exit: threads that do not hold it by then wait forever.

    Otherwise a thread that calls a machine in a loop takes the lock again before the exiting thread has woken up.
    """

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._exiting_thread = threading.get_ident()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if threading.get_ident() != self._exiting_thread and not self._lock._is_owned():
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
    """Take all locks, so that other threads' later calls wait forever.

    `until`: time of `time.monotonic` at which to stop waiting for running calls.
    """
    with _all_locks_guard:
        locks = list(_all_locks)
    for lock in locks:
        if not isinstance(lock.held, _RefusingLock):
            lock.held = _LastLock(lock.held)
    for lock in locks:
        lock.acquire(until)


def hold_to_fork() -> None:
    """Take all locks that become free in time, until `release_after_fork` in parent and child."""
    until = time.monotonic() + FORK_SECONDS
    _all_locks_guard.acquire()
    _fork_locks.extend(lock for lock in list(_all_locks) if lock.acquire(until))


def release_after_fork() -> None:
    """Release the locks that `hold_to_fork` took."""
    while _fork_locks:
        _fork_locks.pop().held.release()
    if _all_locks_guard.locked():  # unless Ctrl-C interrupted `hold_to_fork`
        _all_locks_guard.release()
