"""Machines after a fork: in the new process, no thread but the one that forked goes on.

A machine whose queues were at work, or that another thread was in, stays behind: there it refuses everything, and its
fences that were not done fail. Others can still be used. Where the helper threads of the thread that forked stayed
behind too, plain calls go through queues, whose threads begin in the new process and have helpers of their own.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

from . import threads
from .machine_lock import hold_to_fork, release_after_fork


class Forked(Protocol):
    """An object that is told of forks."""

    def after_fork(self) -> None:
        """Called in the new process, by its only thread."""


_machines: weakref.WeakSet[Forked] = weakref.WeakSet()


def watch_forks(machine: Forked) -> None:
    """Have `machine.after_fork` called in processes that are forked from this one, as long as it lives."""
    _machines.add(machine)


def _after_fork() -> None:
    release_after_fork()
    threads.after_fork()  # first: machines ask whether helpers were lost
    for machine in list(_machines):
        machine.after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=hold_to_fork, after_in_parent=release_after_fork, after_in_child=_after_fork)
