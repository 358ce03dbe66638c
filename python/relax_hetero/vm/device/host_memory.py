"""The amount of host memory that this process can use."""

from __future__ import annotations

import functools
import os
from pathlib import Path

_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Limit and use of the container's memory: version 2 and 1 of control groups."""


@functools.lru_cache(maxsize=1)
def _installed() -> int:
    """Bytes of memory of the computer, or of the container that the process runs in."""
    try:
        limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    except (ValueError, OSError):  # not available on this system
        limits = [1 << 47]
    for name, _ in _CGROUP_FILES:
        try:
            limits.append(int(Path(name).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return min(limits)


def available_memory() -> int:
    """Bytes of free and reclaimable memory, within what the limit of the container leaves besides all of its pages."""
    try:
        fields = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        free = next(int(field[1]) << 10 for field in fields if field[0] == "MemAvailable:")
    except (OSError, StopIteration):
        return 0
    for limit, used in _CGROUP_FILES:
        try:
            free = min(free, int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):
            continue
    return max(free, 0)


def host_memory() -> int:
    """Bytes that this process can use: the minimum of the installed memory and its own address-space limit."""
    try:
        import resource  # noqa: PLC0415 (Unix only)

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    except (ImportError, OSError):
        return _installed()
    return _installed() if limit < 0 else min(_installed(), limit)
