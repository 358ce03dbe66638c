"""Machines after a fork: in the new process, no thread but the one that forked goes on.

A machine whose queues were at work, or that another thread was in, stays behind: there it refuses everything, and its
fences that were not done fail. Others can still be used. Where the helper threads of the thread that forked stayed
behind too, plain calls go through queues, whose threads begin in the new process and have helpers of their own.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any, NoReturn, Protocol

from ...errors import HeteroError
from . import threads


class Forked(Protocol):
    """An object that is told of forks."""

    def after_fork(self) -> None:
        """Called in the new process, by its only thread."""


class MachineLock:
    """The lock of a machine, for all of its parts: ``with lock.held``.

    Attributes
    ----------
    held: Reentrant; raises HeteroError once `refuse` was called.
    """

    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held: Any = threading.RLock()

    def is_free(self) -> bool:
        """Whether this thread could hold the lock now, and another one does not."""
        if isinstance(self.held, _RefusingLock) or not self.held.acquire(blocking=False):
            return False
        self.held.release()
        return True

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


_told: weakref.WeakSet[Forked] = weakref.WeakSet()


def tell_of_forks(machine: Forked) -> None:
    """Have `machine.after_fork` called in processes that are forked from this one, as long as it lives."""
    _told.add(machine)


def _tell() -> None:
    threads.after_fork()  # first: machines ask whether helpers were lost
    for machine in list(_told):
        machine.after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_tell)
