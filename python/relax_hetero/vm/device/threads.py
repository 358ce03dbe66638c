"""The number of threads that kernels use, shared between concurrent callers.

Every calling thread has a pool of workers of its own (`workers`). Concurrent callers would oversubscribe the cores, so
each call first sets its number of threads: all cores if it is alone, otherwise a share. ``TVM_NUM_THREADS`` sets the
total.

Code without workers (`Threads.use_tvm_pool`) runs on TVM's pool of the calling thread, configured likewise. TVM
would pin that pool and the caller to the first cores, unless ``TVM_BIND_THREADS`` forbids it.
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
from ...target.cpu_cores import configured_threads, num_cores
from . import workers

CALLS_BEFORE_WIDENING = 32
"""Number of calls without concurrent callers until a pool takes all cores again, which costs microseconds."""

_FASTEST_CORES = 1
"""TVM's default choice of cores for pinned threads (ThreadGroup::kBig)."""

_configure_stock = tvm_ffi.get_global_func("runtime.config_threadpool")


@dataclass(frozen=True)
class Threads:
    """The threads that a machine's kernels run on.

    Attributes
    ----------
    width : int
        Number of threads, including the caller.
    use_tvm_pool : bool
        Whether TVM's pool is used, because the code has no workers or threads must be pinned.
    """

    width: int
    use_tvm_pool: bool


class Pool:
    """The pool of a calling thread: workers, or TVM's pool.

    Attributes
    ----------
    width : int
        Number of threads, including the caller; 0 before its first call.
    used : int
        Number of threads that kernels use; -1 if the pool was lost in a fork.
    alone : int
        Number of calls since the last concurrent call of another thread.
    """

    __slots__ = ("alone", "use_tvm_pool", "used", "width")

    def __init__(self, use_tvm_pool: bool) -> None:
        self.use_tvm_pool = use_tvm_pool
        self.width = self.used = self.alone = 0


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.pool, self.stock = Pool(False), Pool(True)


_thread = _ThreadState()
_calling: set[Pool] = set()


def has_lost_threads(threads: Threads) -> bool:
    """Return whether this thread's pool was lost in a fork, so that kernels would wait forever.

    Workers can be restarted, TVM's pool of a thread cannot.
    """
    return threads.use_tvm_pool and _thread.stock.used < 0


def after_fork() -> None:
    """Reset the state in a forked child, where other threads and this thread's pool are gone (see `forks`)."""
    _calling.clear()
    _thread.pool = Pool(False)
    workers.after_fork()
    if _thread.stock.used > 1:
        _thread.stock = Pool(True)
        _thread.stock.used = -1


def attach_threads(devices: Sequence[DeviceSpec], module: runtime.Module) -> Threads:
    """Attach the parallel loops of loaded code to workers, or TVM's pool; returns the threads to use."""
    os.environ.setdefault("TVM_BIND_THREADS", "0")  # TVM reads it when it starts or changes a pool
    has_accelerators = any(device.device_type != CPU for device in devices)
    return Threads(threads_for(devices), not workers.use_workers(module, has_accelerators))


def threads_for(devices: Sequence[DeviceSpec]) -> int:
    """The number of threads for code of these devices, including the caller."""
    configured = configured_threads()
    if configured:
        return configured
    compiled = [device.num_cores for device in devices if device.device_type == CPU]
    return min(num_cores(), max([cores for cores in compiled if cores], default=num_cores()))


def threads_of_queues(cores: Sequence[int]) -> list[int]:
    """The number of threads of each of several CPU devices that work concurrently: a share of the cores.

    Parameters
    ----------
    cores : sequence of int
        Number of cores that each device's code was compiled for; 0 if unspecified.
    """
    share = max(1, (configured_threads() or num_cores()) // max(1, len(cores)))
    return [min(share, count or share) for count in cores]


def reserve_threads(threads: Threads) -> None:
    """Give this thread, which runs a queue, a pool of fixed width."""
    for use_tvm_pool in {False, threads.use_tvm_pool}:
        _configure(threads.width, threads.width, use_tvm_pool)


def _configure(limit: int, used: int, use_tvm_pool: bool) -> None:
    if use_tvm_pool:
        # TVM uses the length of the list as the width, and ignores its contents in this mode.
        _configure_stock(_FASTEST_CORES, used, ["0"] * limit)
    else:
        workers.configure(limit, used)


def enter_call(threads: Threads) -> Pool | None:
    """Configure this thread's pool for a call; the result is for `leave_call`, None for a nested call."""
    pool = _thread.stock if threads.use_tvm_pool else _thread.pool
    width = threads.width
    if pool in _calling:  # a kernel written in Python calls a machine
        return None
    _calling.add(pool)
    callers = len(_calling)
    if callers > 1 or pool.used != width or pool.width != width:
        _set_width(pool, width, callers)
    return pool


def leave_call(pool: Pool | None) -> None:
    """Mark a call's end."""
    if pool is not None:
        _calling.discard(pool)


def _set_width(pool: Pool, width: int, callers: int) -> None:
    if pool.used < 0:
        _calling.discard(pool)
        raise HeteroError(
            "this thread's worker threads do not exist in this forked process; expected a call in another thread, or "
            "one that is submitted"
        )
    share = max(1, width // callers)
    pool.alone = pool.alone + 1 if callers == 1 else 0
    if width != pool.width or share < pool.used or (share > pool.used and pool.alone > CALLS_BEFORE_WIDENING):
        _configure(width, share, pool.use_tvm_pool)
        pool.width, pool.used = width, share
