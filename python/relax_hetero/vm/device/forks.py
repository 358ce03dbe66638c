"""Machines after a fork: the child process has only the thread that forked.

In the child, a machine that had queues or was in a call of another thread refuses all calls, and its pending fences
fail. Other machines work. If TVM's thread pool of the forking thread was lost, plain calls go through queues, whose
threads start in the child and have pools of their own.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

from . import threads
from .machine_lock import hold_to_fork, release_after_fork


class Forked(Protocol):
    """An object that is notified of forks."""

    def after_fork(self) -> None:
        """Called in the child, by its only thread."""


_machines: weakref.WeakSet[Forked] = weakref.WeakSet()


def watch_forks(machine: Forked) -> None:
    """Call `machine.after_fork` in forked children, as long as the machine lives."""
    _machines.add(machine)


def _after_fork() -> None:
    release_after_fork()
    threads.after_fork()  # first, because machines ask whether threads were lost
    for machine in list(_machines):
        machine.after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=hold_to_fork, after_in_parent=release_after_fork, after_in_child=_after_fork)
