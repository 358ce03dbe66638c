"""Worker threads, whose code is part of executables; started once per process, for all machines.

`relax_hetero.driver.link.threads.worker_threads` describes them, and why they replace TVM's.
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
from ...target.cpu_cores import cpus_of_cores, num_cores, tasks_per_thread

SPIN_NANOSECONDS = 50_000
"""Time that a caller spins before it sleeps, about the time to wake a thread.

Workers spin 16 times as long: if they spin for 50 us only, networks whose loops take a millisecond lose 1 to 4 %,
because the thread that finishes first sleeps and must be woken for the next loop.
"""

SPIN_NANOSECONDS_WITH_ACCELERATORS = 300_000
"""Time that a caller spins in a process with a machine that has other devices than CPUs.

The GPU part of a decode step takes about as long as workers spin by default: they would sleep in each step, and be
woken one after the other while the CPU part runs on few threads.
"""

DEFAULT_SPIN = -1  # nanoseconds that stand for those of the process

_lock = threading.Lock()
_functions: dict[str, Callable[..., int]] = {}


def use_workers(module: runtime.Module, has_accelerators: bool = False) -> bool:
    """Attach the parallel loops of loaded code to the workers, which spin longer with `has_accelerators`.

    False for code without workers, and if ``TVM_BIND_THREADS=1`` requires pinned threads, which only TVM's pool has.
    """
    if os.environ.get("TVM_BIND_THREADS") == "1":
        return False
    with _lock:
        if not _functions and not _start(module):
            return False
    if has_accelerators:
        _functions[names.SPIN](SPIN_NANOSECONDS_WITH_ACCELERATORS)
    address = _functions[names.LAUNCH]()
    number = 0
    while (setter := _routine(module, names.launch_setter(number))) is not None:
        setter(address)
        number += 1
    return number > 0


def configure(limit: int, used: int, spin_ns: int = DEFAULT_SPIN) -> None:
    """Set the threads of the calling thread's loops to `used`, including itself, out of a pool of `limit`.

    `spin_ns` is the time in nanoseconds that this thread spins; its workers spin 16 times as long.
    """
    if _functions:
        limit = max(1, min(limit, names.MAX_THREADS))
        _functions[names.CONFIGURE](limit, max(1, min(used, limit)), spin_ns)


def width() -> int:
    """The number of threads that the calling thread's loops use; 0 before `configure`."""
    return _functions[names.WIDTH]() if _functions else 0


def after_fork() -> None:
    """Forget the lost workers in a forked child; new ones are started when needed."""
    if _functions:
        _functions[names.FORGET]()


def core_numbers(cores: Sequence[Sequence[int]]) -> list[int]:
    """The lowest CPU of the same core, for every CPU.

    `cores`: usable CPUs of each core. Other CPUs count as cores of their own.
    """
    numbers = list(range(min(max((cpu for core in cores for cpu in core), default=-1) + 1, names.MAX_CPUS)))
    for core in cores:
        for cpu in core:
            if cpu < len(numbers):
                numbers[cpu] = min(core)
    return numbers


def _start(module: runtime.Module) -> bool:
    functions = {name: _routine(module, name) for name in (*_ROUTINES, names.LAUNCH)}
    if None in functions.values():
        return False
    library = ctypes.CDLL(libinfo.find_libtvm_ffi())
    symbols = ("TVMFFIErrorMoveFromRaised", "TVMFFIErrorSetRaised", "TVMFFIObjectDecRef")
    addresses = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in symbols]
    cores = core_numbers(cpus_of_cores())
    table = (ctypes.c_int32 * len(cores))(*cores)
    width = min(num_cores(), names.MAX_THREADS)
    settings = (width, SPIN_NANOSECONDS, ctypes.addressof(table), len(cores), tasks_per_thread())
    if functions[names.START](*addresses, *settings) != 0:
        return False
    # Threads run this code until the process ends, so it must never be unloaded.
    for permanent in (functions, table):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(permanent))
    _functions.update(functions)
    return True


_ROUTINES = (names.START, names.CONFIGURE, names.SPIN, names.FORGET, names.WIDTH)


def _routine(module: runtime.Module, name: str) -> Any:
    try:
        return module.get_function(name, True)
    except AttributeError:
        return None
