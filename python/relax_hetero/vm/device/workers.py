"""The worker threads that executables bring along as code: begun once in a process, for all machines.

`relax_hetero.driver.link.threads.worker_threads` says how they work, and why TVM's own are not used.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from tvm import runtime
from tvm_ffi import libinfo

from ...artifact import worker_threads as names
from ...target.cpu_cores import cpus_of_cores, num_cores

SPIN = 50_000
"""Nanoseconds that a caller spins before it sleeps: as long as it takes to wake a thread.

Workers spin 16 times as long. With 50 us, networks whose loops take a millisecond lost 1 to 4 %, because whoever ended
its half first slept and had to be woken for the next loop.
"""

SPIN_WITH_ACCELERATORS = 300_000
"""Nanoseconds that a caller spins in a process with a machine that has other devices than CPUs.

A GPU's part of a decode step takes about as long as workers spin by default: they would sleep in each step, and be
woken one after the other while the CPU's part runs on few threads.
"""

_lock = threading.Lock()
_functions: dict[str, Callable[..., int]] = {}


def use_workers(module: runtime.Module, has_accelerators: bool = False) -> bool:
    """Have the parallel loops of loaded code run on the workers, which spin longer where `has_accelerators`.

    False for code without them, and where ``TVM_BIND_THREADS=1`` asks for threads pinned to cores: TVM's are.
    """
    if os.environ.get("TVM_BIND_THREADS") == "1":
        return False
    with _lock:
        if not _functions and not _start(module):
            return False
    if has_accelerators:
        _functions[names.SPIN](SPIN_WITH_ACCELERATORS)
    address = _functions[names.LAUNCH]()
    number = 0
    while (setter := _routine(module, names.launch_setter(number))) is not None:
        setter(address)
        number += 1
    return number > 0


def configure(limit: int, used: int) -> None:
    """Have the calling thread's loops use `used` threads, itself included; up to `limit` of them stay ready."""
    if _functions:
        limit = max(1, min(limit, names.MAX_THREADS))
        _functions[names.CONFIGURE](limit, max(1, min(used, limit)))


def width() -> int:
    """How many threads the calling thread's loops use; 0 where that is not settled yet."""
    return _functions[names.WIDTH]() if _functions else 0


def after_fork() -> None:
    """In a process that was forked: the workers stayed behind, the calling thread makes new ones."""
    if _functions:
        _functions[names.FORGET]()


def core_numbers(cores: Sequence[Sequence[int]]) -> list[int]:
    """For every CPU the lowest CPU of its core.

    Parameters
    ----------
    cores : sequence of sequence of int
        The CPUs of each core, those that this process may use. CPUs between them that it may not are on their own.
    """
    numbers = list(range(min(max((cpu for core in cores for cpu in core), default=-1) + 1, names.MAX_CPUS)))
    for core in cores:
        for cpu in core:
            if cpu < len(numbers):
                numbers[cpu] = min(core)
    return numbers


def _start(module: runtime.Module) -> bool:
    found = {name: _routine(module, name) for name in (*_ROUTINES, names.LAUNCH)}
    if None in found.values():
        return False
    library = ctypes.CDLL(libinfo.find_libtvm_ffi())
    routines = ("TVMFFIErrorMoveFromRaised", "TVMFFIErrorSetRaised", "TVMFFIObjectDecRef")
    addresses = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in routines]
    cores = core_numbers(cpus_of_cores())
    table = (ctypes.c_int32 * len(cores))(*cores)
    width = min(num_cores(), names.MAX_THREADS)
    if found[names.START](*addresses, width, SPIN, ctypes.addressof(table), len(cores)) != 0:
        return False
    # Threads run this code until the process ends: it is never unloaded, not even when the interpreter ends.
    for kept in (found, table):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    _functions.update(found)
    return True


_ROUTINES = (names.START, names.CONFIGURE, names.SPIN, names.FORGET, names.WIDTH)


def _routine(module: runtime.Module, name: str) -> Any:
    try:
        return module.get_function(name, True)
    except AttributeError:
        return None
