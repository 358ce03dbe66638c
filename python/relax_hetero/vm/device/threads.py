"""The threads that kernels run on: as many as the code was compiled for, shared by callers that run at once.

Every calling thread has workers of its own (`workers`). Two callers would compete for the same cores with twice the
threads, so each call first settles how many threads are its own: all cores where it is alone, a share of them where
other threads are in calls of theirs. ``TVM_NUM_THREADS``, where it is set, still says how many there are.

Code that brings no workers along (`Threads.are_stock`) runs on TVM's pool of the calling thread, which is settled
likewise. TVM would pin it and the caller to the first cores, unless ``TVM_BIND_THREADS`` says otherwise.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import runtime

from ...artifact.metadata import CPU, DeviceSpec
from ...errors import HeteroError
from ...target.cpu_cores import num_cores
from . import workers

# A caller that shared takes all cores again after so many calls alone: changing costs microseconds.
PATIENCE = 32

# TVM's mode of choosing cores for pinned threads (ThreadGroup::kBig): its default, the fastest ones.
_FASTEST_CORES = 1

_configure_stock = tvm_ffi.get_global_func("runtime.config_threadpool")


@dataclass(frozen=True)
class Threads:
    """The threads that a machine's kernels run on.

    Attributes
    ----------
    width : int
        How many, the caller included.
    are_stock : bool
        Whether they are TVM's: the code brings no workers along, or they are to be pinned.
    """

    width: int
    are_stock: bool


class Pool:
    """A thread's helpers: workers, or TVM's pool.

    Attributes
    ----------
    width : int
        How many threads there are, the caller included; 0 before its first call.
    used : int
        How many of them kernels are cut for; -1 where they stayed behind in a process that this one was forked from.
    alone : int
        Calls since another thread was in one.
    """

    __slots__ = ("alone", "are_stock", "used", "width")

    def __init__(self, are_stock: bool) -> None:
        self.are_stock = are_stock
        self.width = self.used = self.alone = 0


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.pool, self.stock = Pool(False), Pool(True)


_thread = _ThreadState()
_calling: set[Pool] = set()


def has_lost_threads(threads: Threads) -> bool:
    """Return whether this thread's pool stayed behind in the process that this one was forked from: kernels would wait.

    Workers can be begun anew, TVM's pool of a thread cannot.
    """
    return threads.are_stock and _thread.stock.used < 0


def after_fork() -> None:
    """In a process that was forked: no other thread is in a call, and this one's helpers are gone (see `forks`)."""
    _calling.clear()
    _thread.pool = Pool(False)
    workers.after_fork()
    if _thread.stock.used > 1:
        _thread.stock = Pool(True)
        _thread.stock.used = -1


def threads_of(devices: Sequence[DeviceSpec], module: runtime.Module) -> Threads:
    """The threads that loaded code for these devices is to run on; its parallel loops are directed to them."""
    os.environ.setdefault("TVM_BIND_THREADS", "0")  # TVM reads it when it starts or changes a pool
    has_accelerators = any(device.device_type != CPU for device in devices)
    return Threads(threads_for(devices), not workers.use_workers(module, has_accelerators))


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
    cores : sequence of int
        How many cores each one's code was compiled for; 0 where nobody said.
    """
    share = max(1, (_given_threads() or num_cores()) // max(1, len(cores)))
    return [min(share, own or share) for own in cores]


def _given_threads() -> int:
    given = os.environ.get("TVM_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS") or ""
    return int(given) if given.isdigit() else 0


def keep_threads(threads: Threads) -> None:
    """Give this thread helpers that no other caller shares: it runs a queue."""
    for are_stock in {False, threads.are_stock}:
        _configure(threads.width, threads.width, are_stock)


def _configure(limit: int, used: int, are_stock: bool) -> None:
    if are_stock:
        # TVM takes the length of the list for the width; the numbers in it are not used in this mode.
        _configure_stock(_FASTEST_CORES, used, ["0"] * limit)
    else:
        workers.configure(limit, used)


def enter_call(threads: Threads) -> Pool | None:
    """Settle this thread's helpers for a call on `threads`; `leave_call` follows unless it is None."""
    pool = _thread.stock if threads.are_stock else _thread.pool
    width = threads.width
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
        _configure(width, share, pool.are_stock)
        pool.width, pool.used = width, share
