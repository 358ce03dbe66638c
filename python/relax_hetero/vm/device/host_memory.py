"""How much memory this process can have on the host."""

from __future__ import annotations

import functools
import os
from pathlib import Path

_CONTAINER = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@functools.lru_cache(maxsize=1)
def _installed() -> int:
    """The memory of the machine, or of the container that the process runs in, in bytes."""
    try:
        found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    except (ValueError, OSError):  # a system that does not tell
        found = [1 << 47]
    for name in _CONTAINER:
        try:
            found.append(int(Path(name).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return min(found)


def host_memory() -> int:
    """The bytes that a process can have: of the machine, its container, and by its own limit of addresses."""
    try:
        import resource  # noqa: PLC0415 (only where there is one)

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    except (ImportError, OSError):
        return _installed()
    return _installed() if limit < 0 else min(_installed(), limit)
