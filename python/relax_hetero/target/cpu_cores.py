"""The CPU cores of this process; needs nothing of TVM."""

from __future__ import annotations

import math
import os
from functools import cache
from pathlib import Path


@cache
def num_cores() -> int:
    """Physical CPU cores this process may use, at least 1.

    Hyper-threads of one core count once (they share its arithmetic units), and so does the CPU quota of a
    container where Linux tells it.
    """
    cores = len(cpus_of_cores())
    quota = _cgroup_cpus()
    return max(1, cores if quota is None else min(cores, quota))


@cache
def cpus_of_cores() -> list[list[int]]:
    """The numbers of the CPUs this process may use, those of one physical core together."""
    try:
        allowed = os.sched_getaffinity(0)
    except AttributeError:  # not on this operating system
        allowed = set(range(os.cpu_count() or 1))
    found: dict[str, list[int]] = {}
    for cpu in sorted(allowed):
        found.setdefault(_core_of(cpu), []).append(cpu)
    return list(found.values())


def _core_of(cpu: int) -> str:
    """A name shared by the hyper-threads of one core."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _cgroup_cpus() -> int | None:
    """CPUs granted by the container's quota (cgroup v2), rounded up; None if there is no quota."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else max(1, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        return None
