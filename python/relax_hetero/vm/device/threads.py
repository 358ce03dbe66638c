"""The threads that kernels run on: as many as the code was compiled for, shared by callers that run at once.

TVM gives every calling thread a pool of its own, as wide as half the CPUs it sees, and pins it and the caller to the
first cores. Two callers then compete for the same cores with twice the threads. Here each call first settles how many
threads are its own: all cores where it is alone, a share of them where other threads are in calls of theirs.
``TVM_NUM_THREADS`` and ``TVM_BIND_THREADS``, where they are set, still say how many there are and whether to pin them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import tvm_ffi

from ...artifact.metadata import CPU, DeviceSpec
from ...errors import HeteroError
from ...target.cpu_cores import num_cores

# A caller that shared takes all cores again after so many calls alone: changing costs microseconds.
PATIENCE = 32

# TVM's mode of choosing cores for pinned threads (ThreadGroup::kBig): its default, the fastest ones.
_FASTEST_CORES = 1

_configure = tvm_ffi.get_global_func("runtime.config_threadpool")


class Pool:
    """A thread's pool.

    Attributes
    ----------
    width: How many threads it has, the caller included; 0 before its first call.
    used: How many of them kernels are cut for; -1 where they stayed behind in a process that this one was forked from.
    alone: Calls since another thread was in one.
    """

    __slots__ = ("alone", "used", "width")

    def __init__(self) -> None:
        self.width = self.used = self.alone = 0


class _Mine(threading.local):
    def __init__(self) -> None:
        self.pool = Pool()


_mine = _Mine()
_calling: set[Pool] = set()


def has_lost_threads() -> bool:
    """Whether this thread's helpers stayed behind in the process that this one was forked from: kernels would wait."""
    return _mine.pool.used < 0


def after_fork() -> None:
    """In a process that was forked: no other thread is in a call, and this one's helpers are gone (see `forks`)."""
    _calling.clear()
    if _mine.pool.used > 1:
        _mine.pool = Pool()
        _mine.pool.used = -1


def threads_for(devices: Sequence[DeviceSpec]) -> int:
    """How many threads code for these devices is to run on, the caller included."""
    given = _given_threads()
    if given:
        return given
    compiled = [device.num_cores for device in devices if device.device_type == CPU]
    return min(num_cores(), max([cores for cores in compiled if cores], default=num_cores()))


def threads_of_queues(cores: Sequence[int]) -> list[int]:
    """How many threads each of several CPU devices has while they work at once: a share of the cores.

    Parameters
    ----------
    cores: How many cores each one's code was compiled for; 0 where nobody said.
    """
    share = max(1, (_given_threads() or num_cores()) // max(1, len(cores)))
    return [min(share, own or share) for own in cores]


def _given_threads() -> int:
    given = os.environ.get("TVM_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS") or ""
    return int(given) if given.isdigit() else 0


def leave_threads_unpinned() -> None:
    """Have TVM pin no threads unless the environment says so; it reads that when it starts or changes a pool."""
    os.environ.setdefault("TVM_BIND_THREADS", "0")


def keep_threads(width: int) -> None:
    """Give this thread a pool of `width` threads that no other caller shares: it runs a queue."""
    _configure(_FASTEST_CORES, width, ["0"] * width)


def enter_call(width: int) -> Pool | None:
    """Settle this thread's pool for a call that may use `width` threads; `leave_call` follows unless it is None."""
    pool = _mine.pool
    if pool in _calling:  # a kernel written in Python calls a machine
        return None
    _calling.add(pool)
    callers = len(_calling)
    if callers > 1 or pool.used != width or pool.width != width:
        _settle(pool, width, callers)
    return pool


def leave_call(pool: Pool | None) -> None:
    """The call has ended."""
    if pool is not None:
        _calling.discard(pool)


def _settle(pool: Pool, width: int, callers: int) -> None:
    if pool.used < 0:
        _calling.discard(pool)
        raise HeteroError(
            "this thread's helpers stayed behind in the process that this one was forked from; expected a call in "
            "another thread, or one that is submitted"
        )
    share = max(1, width // callers)
    pool.alone = pool.alone + 1 if callers == 1 else 0
    if width != pool.width or share < pool.used or (share > pool.used and pool.alone > PATIENCE):
        # TVM takes the length of the list for the width; the numbers in it are not used in this mode.
        _configure(_FASTEST_CORES, share, ["0"] * width)
        pool.width, pool.used = width, share
