"""Error records: memory of the host in which kernels of a GPU report a value that they refuse.

A kernel of a GPU cannot end a call, and a host that waited for each check would keep the GPU waiting too. So the kernel
writes to pinned memory, a record for each GPU, which the host looks at where it has just waited for the GPU anyway:
when a tensor has come to the host, and when a fence's work has ended. Of several errors the first one is kept.

A record is made once for a GPU, by the first machine that needs it, and stays where it is for the life of the process,
as CUDA graphs keep its address. The kernels are `tir.checks.reporting_kernel`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable

from ...artifact.checks import CLAIMED, END, FIRST, FOUND, KEY, READY, WORDS, CheckSpec
from ...errors import HeteroError
from .cuda_library import cuda_library
from .cuda_memory import PinnedBlock


class ErrorRecord:
    """The record of a GPU.

    Parameters
    ----------
    address : int
        Address of the record's words, which stay as long as the record.
    owner : object
        Keeps the memory.

    Attributes
    ----------
    words
        The memory.
    """

    def __init__(self, address: int, owner: object = None) -> None:
        self.words = (ctypes.c_int32 * WORDS).from_address(address)
        self._owner, self._lock = owner, threading.Lock()
        ctypes.memset(address, 0, ctypes.sizeof(self.words))

    def take(self) -> tuple[int, int, int, int] | None:
        """Report, once: the key of the check, the value, the least and one past the last; None if nothing.

        The record is free for another report then.
        """
        if not self.words[READY]:
            return None
        with self._lock:
            if not self.words[READY]:
                return None
            key, found, first, end = map(self._number, (KEY, FOUND, FIRST, END))
            self.words[READY] = 0
            self.words[CLAIMED] = 0  # last: from here on a thread of the GPU may fill it
            return key, found, first, end

    def _number(self, at: int) -> int:
        return self.words[at + 1] << 32 | self.words[at] & 0xFFFFFFFF


def error_record(gpu: int) -> ErrorRecord | None:
    """The record of a GPU; None where CUDA does not work."""
    with _making:
        if gpu not in _records:
            library = cuda_library()
            if library is None:
                return None
            block = PinnedBlock(library, gpu, ctypes.sizeof(ctypes.c_int32) * WORDS)
            _records[gpu] = ErrorRecord(block.address, block)
        return _records[gpu]


def know_checks(checks: Iterable[CheckSpec]) -> None:
    """Have reports of these checks be told in their words, for the life of the process."""
    _checks.update({check.key: check for check in checks})


def raise_reported(gpu: int) -> None:
    """HeteroError for what kernels of a GPU have reported since the last call; it waits for nothing."""
    record = _records.get(gpu)
    reported = None if record is None else record.take()
    if reported is None:
        return
    key, found, first, end = reported
    check = _checks.get(key)
    if check is None:
        raise HeteroError(f"a check on cuda:{gpu} refused the value {found}, expected {first} to {end - 1}")
    raise HeteroError(f"{check.message(found, first, end)} (found on cuda:{gpu})")


_making = threading.Lock()
_records: dict[int, ErrorRecord] = {}
_checks: dict[int, CheckSpec] = {}
