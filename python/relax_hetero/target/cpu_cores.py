"""CPU cores and NUMA nodes of this process, and the load by other processes; independent of TVM."""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from ..system import allowed_cpus

NUMA_NODE = "numa:"  # prefix of the ``model`` of a CPU target for one NUMA node, before the node's number

_CGROUPS = Path("/sys/fs/cgroup")
_DEVICES = Path("/sys/devices")
_NODES = _DEVICES / "system/node"

UNLIKE_CORES = "unlike-cores"  # key of a CPU target whose cores differ in speed

TASKS_OF_UNLIKE_CORES = 4
"""Tasks of a parallel loop for each thread on cores of unlike speed: the last task is a quarter of an equal share."""


@cache
def num_cores() -> int:
    """Number of physical CPU cores that this process may use, limited by a container's CPU quota; at least 1.

    Hyper-threads of one core count once, because they share its arithmetic units.
    """
    cores = len(cpus_of_cores())
    quota = _cgroup_cpus()
    return max(1, cores if quota is None else min(cores, quota))


def configured_threads() -> int:
    """Number of threads in ``TVM_NUM_THREADS`` or ``OMP_NUM_THREADS``; 0 without either."""
    return _number_in(os.environ.get("TVM_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS"))


def num_threads() -> int:
    """Number of tasks of a parallel loop in code for this machine: one for each core, at most ``TVM_NUM_THREADS``.

    With more tasks than threads some threads have two, and the others wait for them.
    """
    return min(num_cores(), _number_in(os.environ.get("TVM_NUM_THREADS")) or num_cores())


def _number_in(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0


@cache
def cpus_of_cores() -> list[list[int]]:
    """The CPUs that this process may use, grouped by physical core."""
    cores: dict[str, list[int]] = {}
    for cpu in sorted(allowed_cpus()):
        cores.setdefault(_core_of(cpu), []).append(cpu)
    return list(cores.values())


@cache
def cpus_of_nodes() -> dict[int, list[list[int]]]:
    """The CPUs that this process may use, grouped by NUMA node and physical core; nodes without CPUs are left out.

    All CPUs belong to node 0 if the system does not report nodes.
    """
    node_of: dict[int, int] = {}
    for folder in _NODES.glob("node[0-9]*"):
        try:
            node_of.update(dict.fromkeys(listed_cpus((folder / "cpulist").read_text()), int(folder.name[4:])))
        except (OSError, ValueError):
            continue
    nodes: dict[int, list[list[int]]] = {}
    for core in cpus_of_cores():
        nodes.setdefault(node_of.get(core[0], 0), []).append(core)
    return dict(sorted(nodes.items()))


def tasks_per_thread() -> int:
    """Number of tasks of a parallel loop for each thread: several, if this process's cores differ in speed.

    Threads then take tasks as they get done, so faster cores do more of them (`driver.link.threads.workers`).
    """
    return TASKS_OF_UNLIKE_CORES if len({_kind_of(core[0]) for core in cpus_of_cores()}) > 1 else 1


def _kind_of(cpu: int) -> str:
    """A key that cores of one speed share: Intel's P and E cores, or the capacity that Linux gives a core of Arm."""
    for kind in ("cpu_core", "cpu_atom"):
        with suppress(OSError, ValueError):
            if cpu in listed_cpus((_DEVICES / kind / "cpus").read_text()):
                return kind
    with suppress(OSError):
        return (_DEVICES / f"system/cpu/cpu{cpu}/cpu_capacity").read_text().strip()
    return ""


def listed_cpus(text: str) -> list[int]:
    """Parse Linux' notation of a set of CPUs, such as ``0-3,8,10-11``; ValueError for other text."""
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return [cpu for ends in ranges for cpu in range(int(ends[0]), int(ends[-1]) + 1)]


def _core_of(cpu: int) -> str:
    """A key that the hyper-threads of one core share."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _cgroup_cpus() -> int | None:
    """The CPU quota of this process, the minimum over its cgroups and their parents, rounded up; None without one."""
    quotas = []
    for controllers, path in _control_groups():
        folder = _CGROUPS / controllers / path.lstrip("/")
        # A container may see its cgroup's path outside, while only the root is mounted inside.
        for group in (folder, *folder.parents):
            quotas.append(_quota(group))
            if group == _CGROUPS / controllers:
                break
    return min((max(1, math.ceil(quota)) for quota in quotas if quota is not None), default=None)


def _control_groups() -> list[tuple[str, str]]:
    """Pairs of controllers (the folder of cgroup v1, "" for v2) and the path of their group."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    groups = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    return [(names, path) for _, names, path in groups if not names or "cpu" in names.split(",")]


def _quota(group: Path) -> float | None:
    """The CPU quota of a control group, or None."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return None if quota == "max" or int(quota) <= 0 else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


# Load by other processes during a measurement.

_MIN_SECONDS = 0.05  # the system counts ticks of 0.01 s
_IDLE_FIELDS = (3, 4)  # columns of /proc/stat: idle, iowait
_GUESTS = 8  # columns from here on are also counted in earlier ones


class CpuWatch:
    """Measures the CPU load by other processes since its creation."""

    def __init__(self) -> None:
        self._begin = time.perf_counter(), _busy_seconds(), _own_seconds()

    def others(self) -> float:
        """Fraction of this process's CPUs that others have used, including time stolen by other virtual machines.

        0 if the time was too short to measure, or the system does not report it.
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
    """Busy seconds of the CPUs that this process may use, and their number."""
    with suppress(OSError, ValueError, AttributeError, IndexError):
        allowed = {f"cpu{number}" for number in allowed_cpus()}
        tick = os.sysconf("SC_CLK_TCK")
        ticks, count = 0, 0
        with open("/proc/stat", encoding="ascii") as file:
            for line in file:
                name, *columns = line.split()
                if name in allowed:
                    ticks += sum(int(text) for i, text in enumerate(columns[:_GUESTS]) if i not in _IDLE_FIELDS)
                    count += 1
        if count:
            return ticks / tick, count
    return None
