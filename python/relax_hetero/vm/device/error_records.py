"""Error records: host memory in which GPU kernels report a value that they refuse.

A GPU kernel cannot raise, and waiting for each check would stall the GPU. Instead the kernel writes to a record in
pinned memory, one for each GPU. The host reads it whenever it has waited for the GPU anyway: after a copy to the host,
and after a fence's work. Only the first of several errors is kept.

The first machine that needs a GPU's record allocates it for the life of the process, because CUDA graphs contain its
address. The kernels are made by `tir.checks.reporting_kernel`.
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
    """The record of a GPU. `address`: address of the record's words. `owner`: owner of the memory, kept alive."""

    def __init__(self, address: int, owner: object = None) -> None:
        self.words = (ctypes.c_int32 * WORDS).from_address(address)  # words of the record
        self._owner, self._lock = owner, threading.Lock()
        ctypes.memset(address, 0, ctypes.sizeof(self.words))

    def take(self) -> tuple[int, int, int, int] | None:
        """Take a report and free the record: key of the check, value, first and one past the last valid value."""
        if not self.words[READY]:
            return None
        with self._lock:
            if not self.words[READY]:
                return None
            key, value, first, end = map(self._number, (KEY, FOUND, FIRST, END))
            self.words[READY] = 0
            self.words[CLAIMED] = 0  # last: from now on a GPU thread may fill the record again
            return key, value, first, end

    def _number(self, index: int) -> int:
        return self.words[index + 1] << 32 | self.words[index] & 0xFFFFFFFF


def error_record(gpu: int) -> ErrorRecord | None:
    """The record of a GPU; None if CUDA does not work."""
    with _records_lock:
        if gpu not in _records:
            library = cuda_library()
            if library is None:
                return None
            block = PinnedBlock(library, gpu, ctypes.sizeof(ctypes.c_int32) * WORDS)
            _records[gpu] = ErrorRecord(block.address, block)
        return _records[gpu]


def register_checks(checks: Iterable[CheckSpec]) -> None:
    """Use the messages of these checks for reports of GPUs, for the life of the process."""
    _checks.update({check.key: check for check in checks})


def raise_reported(gpu: int) -> None:
    """Raise HeteroError if kernels of a GPU have reported an error since the last call; does not wait."""
    record = _records.get(gpu)
    report = None if record is None else record.take()
    if report is None:
        return
    key, value, first, end = report
    check = _checks.get(key)
    if check is None:
        raise HeteroError(f"a check on cuda:{gpu} refused the value {value}, expected {first} to {end - 1}")
    raise HeteroError(f"{check.message(value, first, end)} (found on cuda:{gpu})")


_records_lock = threading.Lock()
_records: dict[int, ErrorRecord] = {}
_checks: dict[int, CheckSpec] = {}
