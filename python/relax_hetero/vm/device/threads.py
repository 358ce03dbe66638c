"""The threads that kernels use: their number, shared between concurrent callers, their cores, and how they wait.

Every calling thread has a pool of workers of its own (`workers`). Concurrent callers would oversubscribe the cores, so
each call first sets its number of threads: all cores if it is alone, otherwise a share. ``TVM_NUM_THREADS`` sets the
total. A machine with a number of threads of its own uses these, whatever others do. Calls of a machine with cores of
its own run in the threads of its queues, which are bound to them (`queue.queues`).

Code without workers (`Threads.use_tvm_pool`) runs on TVM's pool of the calling thread, configured likewise. TVM
would pin that pool and the caller to the first cores, unless ``TVM_BIND_THREADS`` forbids it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import tvm_ffi
from tvm import runtime

from ...artifact.metadata import CPU, DeviceSpec
from ...artifact.worker_threads import MAX_THREADS
from ...errors import BindingError, HeteroError
from ...target.cpu_cores import configured_threads, cpus_of_cores, num_cores
from . import workers

_log = logging.getLogger("relax_hetero")

CALLS_BEFORE_WIDENING = 32
"""Number of calls without concurrent callers until a pool takes all cores again, which costs microseconds."""

_FASTEST_CORES = 1  # TVM's default choice of cores for pinned threads (ThreadGroup::kBig)

_configure_stock = tvm_ffi.get_global_func("runtime.config_threadpool")


@dataclass(frozen=True)
class Threads:
    """The threads that a machine's kernels run on."""

    width: int  # number of threads, including the caller
    use_tvm_pool: bool  # whether TVM's pool is used, because the code has no workers or threads must be pinned
    is_fixed: bool = False  # whether the number was chosen for the machine: it is not shared with concurrent callers
    spin_ns: int = workers.DEFAULT_SPIN  # time in nanoseconds that workers spin (`workers.configure`)
    cpus: tuple[int, ...] = ()  # CPUs that the machine's threads are bound to; empty for no binding


SHARED_THREADS = Threads(1, False)  # workers whose number depends on the device and on concurrent callers


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
    spin_ns : int
        Time in nanoseconds that its threads spin.
    """

    __slots__ = ("alone", "spin_ns", "use_tvm_pool", "used", "width")

    def __init__(self, use_tvm_pool: bool) -> None:
        self.use_tvm_pool = use_tvm_pool
        self.width = self.used = self.alone = 0
        self.spin_ns = workers.DEFAULT_SPIN


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
    """Reset the state in a forked child, where other threads and this thread's pool are gone."""
    _calling.clear()
    _thread.pool = Pool(False)
    workers.after_fork()
    if _thread.stock.used > 1:
        _thread.stock = Pool(True)
        _thread.stock.used = -1


def choose_threads(devices: Sequence[DeviceSpec], threads: object, cores: object, spin: object) -> Threads:
    """The threads of a machine, with workers; see `VirtualMachine` for the parameters.

    Raises BindingError if a parameter is wrong, or the code was compiled for fewer threads.
    """
    if type(spin) is not bool:
        raise BindingError(f"VirtualMachine: spin is {spin!r}, expected True or False")
    cpus = () if cores is None else _checked_cpus(cores, devices)
    width = threads_for(devices)
    if cpus:
        width = min(width, sum(not set(cpus).isdisjoint(core) for core in cpus_of_cores()))
    if threads is not None:
        width = _checked_width(threads, cpus, devices)
    return Threads(width, False, threads is not None or bool(cpus), workers.DEFAULT_SPIN if spin else 0, cpus)


def _checked_cpus(cores: object, devices: Sequence[DeviceSpec]) -> tuple[int, ...]:
    usable = {cpu for core in cpus_of_cores() for cpu in core}
    cpus: tuple[Any, ...] = ()
    if isinstance(cores, (Sequence, Set)) and not isinstance(cores, str):
        cpus = tuple(cores)
    is_known = all(type(cpu) is int and cpu in usable for cpu in cpus)
    if not cpus or not is_known or len(set(cpus)) < len(cpus):
        raise BindingError(
            f"VirtualMachine: cores is {cores!r}, expected different CPUs of those that this process may use: "
            f"{sorted(usable)}"
        )
    if not hasattr(os, "sched_setaffinity"):
        raise BindingError("VirtualMachine: cores are given, but this operating system does not bind threads to CPUs")
    if os.environ.get("TVM_BIND_THREADS") == "1":
        raise BindingError("VirtualMachine: cores are given, but TVM_BIND_THREADS=1 binds threads to the first ones")
    if any(device.numa_node is not None for device in devices):
        raise BindingError("VirtualMachine: cores are given, but the executable's devices are bound to NUMA nodes")
    return cpus


def _checked_width(threads: object, cpus: Sequence[int], devices: Sequence[DeviceSpec]) -> int:
    compiled = max((device.num_cores for device in devices if device.device_type == CPU), default=0)
    limit, reason = (compiled, "its code was compiled for that many: rh.compile for a target with more num-cores")
    if not limit:
        limit, reason = MAX_THREADS, "which is the maximum"
    if cpus and len(cpus) < limit:
        limit, reason = len(cpus), "one on each of its cores"
    if type(threads) is not int or not 1 <= threads <= limit:
        raise BindingError(f"VirtualMachine: threads is {threads!r}, expected 1 to {limit}; {reason}")
    return threads


def attach_threads(threads: Threads, devices: Sequence[DeviceSpec], module: runtime.Module) -> Threads:
    """Attach the parallel loops of loaded code to workers, or TVM's pool; returns the threads to use."""
    os.environ.setdefault("TVM_BIND_THREADS", "0")  # TVM reads it when it starts or changes a pool
    has_accelerators = any(device.device_type != CPU for device in devices)
    if workers.use_workers(module, has_accelerators):
        return threads
    if threads.spin_ns != workers.DEFAULT_SPIN and threads.width > 1:
        _log.warning("spin=False has no effect on this machine: parallel loops of its code run on TVM's thread pool")
    return replace(threads, use_tvm_pool=True)


def threads_for(devices: Sequence[DeviceSpec]) -> int:
    """The number of threads for code of these devices, including the caller."""
    configured = configured_threads()
    if configured:
        return configured
    compiled = [device.num_cores for device in devices if device.device_type == CPU]
    return min(num_cores(), max([cores for cores in compiled if cores], default=num_cores()))


def threads_of_queues(cores: Sequence[int], threads: Threads = SHARED_THREADS) -> list[int]:
    """The number of threads of each of several CPU devices that work concurrently: a share of the cores.

    `cores`: number of cores that each device's code was compiled for; 0 if unspecified. `threads`: threads of the
    machine.
    """
    total = threads.width if threads.is_fixed else configured_threads() or num_cores()
    share = max(1, total // max(1, len(cores)))
    return [min(share, count or share) for count in cores]


def reserve_threads(threads: Threads) -> None:
    """Give this thread, which runs a queue, a pool of fixed width."""
    for use_tvm_pool in {False, threads.use_tvm_pool}:
        _configure(threads.width, threads.width, use_tvm_pool, threads.spin_ns)


def _configure(limit: int, used: int, use_tvm_pool: bool, spin_ns: int) -> None:
    if use_tvm_pool:
        # TVM uses the length of the list as the width, and ignores its contents in this mode.
        _configure_stock(_FASTEST_CORES, used, ["0"] * limit)
    else:
        workers.configure(limit, used, spin_ns)


def enter_call(threads: Threads) -> Pool | None:
    """Configure this thread's pool for a call; the result is for `leave_call`, None for a nested call."""
    pool = _thread.stock if threads.use_tvm_pool else _thread.pool
    if pool in _calling:  # a kernel written in Python calls a machine
        return None
    _calling.add(pool)
    callers = len(_calling)
    width = threads.width
    if callers > 1 or pool.used != width or pool.width != width or pool.spin_ns != threads.spin_ns:
        _set_width(pool, threads, 1 if threads.is_fixed else callers)
    return pool


def leave_call(pool: Pool | None) -> None:
    """Mark a call's end."""
    if pool is not None:
        _calling.discard(pool)


def _set_width(pool: Pool, threads: Threads, callers: int) -> None:
    if pool.used < 0:
        _calling.discard(pool)
        raise HeteroError(
            "this thread's worker threads do not exist in this forked process; expected a call in another thread, or "
            "one that is submitted"
        )
    width, spin_ns = threads.width, threads.spin_ns
    share = max(1, width // callers)
    pool.alone = pool.alone + 1 if callers == 1 else 0
    may_widen = threads.is_fixed or pool.alone > CALLS_BEFORE_WIDENING
    is_other = width != pool.width or spin_ns != pool.spin_ns
    if is_other or share < pool.used or (share > pool.used and may_widen):
        _configure(width, share, pool.use_tvm_pool, spin_ns)
        pool.width, pool.used, pool.spin_ns = width, share, spin_ns
