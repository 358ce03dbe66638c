"""The amount of host memory that this process can use."""

from __future__ import annotations

import functools
import os
from pathlib import Path

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@functools.lru_cache(maxsize=1)
def _installed() -> int:
    """Bytes of memory of the computer, or of the container that the process runs in."""
    try:
        limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    except (ValueError, OSError):  # not available on this system
        limits = [1 << 47]
    for name in _CGROUP_LIMITS:
        try:
            limits.append(int(Path(name).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return min(limits)


def host_memory() -> int:
    """Bytes that this process can use: the minimum of the installed memory and its own address-space limit."""
    try:
        import resource  # noqa: PLC0415 (Unix only)

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    except (ImportError, OSError):
        return _installed()
    return _installed() if limit < 0 else min(_installed(), limit)
