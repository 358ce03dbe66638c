"""The semaphores of channels, of which Ray leaves some behind.

Ray names two semaphores for each buffer of a channel, in the memory file system. It removes the names only where a
process that holds them ends in order, and closing a channel makes them anew. Every recovery of a replica would leave
some. A name is needed until all processes of a channel have opened it; then it can go.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

_PREFIXES = ("/dev/shm/sem.hdr", "/dev/shm/sem.obj")


def process_semaphores() -> set[str]:
    """The files of the channels' semaphores that this process has open."""
    with open("/proc/self/maps") as file:
        paths = {line.removesuffix("\n").removesuffix(" (deleted)").split(maxsplit=5)[-1] for line in file}
    return {path for path in paths if path.startswith(_PREFIXES)}


def remove(semaphores: Iterable[str]) -> None:
    """Remove names; who has opened them keeps them."""
    for name in semaphores:
        with suppress(OSError):
            os.unlink(name)
