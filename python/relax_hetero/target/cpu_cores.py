"""The CPU cores of this process; needs nothing of TVM."""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

NUMA_NODE = "numa:"
"""How the ``model`` of a CPU target begins that is the CPUs of one NUMA node; the node's number follows."""

_CGROUPS = Path("/sys/fs/cgroup")
_NODES = Path("/sys/devices/system/node")


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


@cache
def cpus_of_nodes() -> dict[int, list[list[int]]]:
    """CPUs of each NUMA node that this process may use, those of one physical core together.

    Nodes without any are left out. Where the system tells of no nodes, all CPUs are node 0's.
    """
    node_of: dict[int, int] = {}
    for folder in _NODES.glob("node[0-9]*"):
        try:
            node_of.update(dict.fromkeys(listed_cpus((folder / "cpulist").read_text()), int(folder.name[4:])))
        except (OSError, ValueError):
            continue
    found: dict[int, list[list[int]]] = {}
    for core in cpus_of_cores():
        found.setdefault(node_of.get(core[0], 0), []).append(core)
    return dict(sorted(found.items()))


def listed_cpus(text: str) -> list[int]:
    """The numbers in Linux' way to write a set of CPUs: ``0-3,8,10-11``; ValueError for any other text."""
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return [cpu for ends in ranges for cpu in range(int(ends[0]), int(ends[-1]) + 1)]


def _core_of(cpu: int) -> str:
    """A name shared by the hyper-threads of one core."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _cgroup_cpus() -> int | None:
    """CPUs granted by the quotas of the process' control groups and all around them, rounded up; None without any."""
    quotas = []
    for controllers, path in _control_groups():
        folder = _CGROUPS / controllers / path.lstrip("/")
        # A container may see the path that its group has outside, of which only the root is mounted inside.
        for group in (folder, *folder.parents):
            quotas.append(_quota(group))
            if group == _CGROUPS / controllers:
                break
    return min((max(1, math.ceil(quota)) for quota in quotas if quota is not None), default=None)


def _control_groups() -> list[tuple[str, str]]:
    """Controllers, as the folder of version 1 is called ("" for version 2), and the group that has them."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    groups = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    return [(names, path) for _, names, path in groups if not names or "cpu" in names.split(",")]


def _quota(group: Path) -> float | None:
    """CPUs that a control group may use, None if it has no quota."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return None if quota == "max" or int(quota) <= 0 else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


# Share of this machine's CPUs that other work takes while something is measured.

_MIN_SECONDS = 0.05  # the system counts ticks of 0.01
_IDLE_FIELDS = (3, 4)  # columns of /proc/stat: idle, and waiting for input or output
_GUESTS = 8  # columns from here on are counted in earlier ones


class CpuWatch:
    """Watches the CPUs from its creation on."""

    def __init__(self) -> None:
        self._begin = time.perf_counter(), _busy_seconds(), _own_seconds()

    def others(self) -> float:
        """Share of this process's CPUs that others have used since, including time stolen by other virtual machines.

        0 where the time was too short to tell, or the system does not say.
        """
        started, busy, own = self._begin
        seconds, now = time.perf_counter() - started, _busy_seconds()
        if seconds < _MIN_SECONDS or busy is None or now is None:
            return 0.0
        share = (now[0] - busy[0] - (_own_seconds() - own)) / (seconds * now[1])
        return min(1.0, max(0.0, share))


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _busy_seconds() -> tuple[float, int] | None:
    """Seconds that the CPUs which this process may use have worked, and how many they are."""
    with suppress(OSError, ValueError, AttributeError, IndexError):
        allowed = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        tick = os.sysconf("SC_CLK_TCK")
        ticks, count = 0, 0
        with open("/proc/stat", encoding="ascii") as file:
            for line in file:
                name, *columns = line.split()
                if name in allowed:
                    ticks += sum(int(text) for at, text in enumerate(columns[:_GUESTS]) if at not in _IDLE_FIELDS)
                    count += 1
        if count:
            return ticks / tick, count
    return None
