"""The amount of host memory that this process can use."""

from __future__ import annotations

import functools
from pathlib import Path

from ...system import address_space_limit, free_memory, installed_memory

_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Limit and use of the container's memory: version 2 and 1 of control groups."""


@functools.lru_cache(maxsize=1)
def _installed() -> int:
    """Bytes of memory of the computer, or of the container that the process runs in."""
    limits = [installed_memory() or 1 << 47]
    for name, _ in _CGROUP_FILES:
        try:
            limits.append(int(Path(name).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return min(limits)


def available_memory() -> int:
    """Bytes of free and reclaimable memory, within what the limit of the container leaves besides all of its pages."""
    free = free_memory()
    if free is None:
        return 0
    for limit, used in _CGROUP_FILES:
        try:
            free = min(free, int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):
            continue
    return max(free, 0)


def host_memory() -> int:
    """Bytes that this process can use: the minimum of the installed memory and its own address-space limit."""
    limit = address_space_limit()
    return _installed() if limit is None else min(_installed(), limit)
