"""Mailboxes: pinned memory through which a GPU and the CPU exchange values while both run.

A mailbox has a flag, and the bytes of some values after it. The sender writes the values, then sets the flag. The
receiver waits for the flag, reads the values, then clears the flag. A sender on the CPU waits until the GPU has read
the value of the call before; one on the GPU finds it read, because the CPU has ended a call when the next one begins.

A module has a placeholder constant for each end of a mailbox, which says its number and its size. A machine replaces
both ends by the same memory (`vm.device.mailboxes`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

DATA = 64  # position of the values in a mailbox, in bytes; the flag, an int32, is at 0
ALIGNMENT = 256  # alignment of a mailbox in bytes
VALUE_ALIGNMENT = 64  # alignment of each value in a mailbox, in bytes

_MARK = hashlib.blake2b(b"relax_hetero: a mailbox of a GPU and a CPU", digest_size=DATA - 16).digest()


@dataclass(frozen=True)
class MailboxSpec:
    """A mailbox."""

    number: int  # number, the same for both ends, and different from those of the module's other mailboxes
    nbytes: int  # bytes of the values

    def placeholder(self) -> np.ndarray:
        """Contents of the constants of both ends, ``uint8[DATA]``."""
        return np.frombuffer(_MARK + np.array([self.number, self.nbytes], "<i8").tobytes(), "uint8")

    @staticmethod
    def of(data: bytes) -> MailboxSpec | None:
        """The mailbox of a placeholder with these contents; None for other constants."""
        if len(data) != DATA or not data.startswith(_MARK):
            return None
        number, nbytes = np.frombuffer(data[len(_MARK) :], "<i8").tolist()
        return MailboxSpec(number, nbytes)


def offsets_of(specs: Iterable[MailboxSpec | None]) -> tuple[dict[int, int], int]:
    """The position of each mailbox in the memory of all, by number, and the bytes of that memory.

    `specs`: mailboxes, of which each may occur repeatedly, and others.
    """
    offsets: dict[int, int] = {}
    size = 0
    for spec in specs:
        if spec is not None and spec.number not in offsets:
            offsets[spec.number] = size
            size += -(-(DATA + spec.nbytes) // ALIGNMENT) * ALIGNMENT
    return offsets, size
