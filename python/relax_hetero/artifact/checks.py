"""Run-time checks of values in kernels, and their messages."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

REFUSED = "relax_hetero refuses a value:"  # RH_REFUSED of relax_hetero.h
_REFUSED = re.compile(rf"{REFUSED} check (\d+), found (-?\d+), expected (-?\d+) to (-?\d+)")


WORDS = 16  # number of int32 words of a GPU's error record

CLAIMED, READY, KEY, FOUND, FIRST, END = 0, 1, 2, 4, 6, 8
"""Words of the record: whether a thread has claimed it, whether it is filled, and then, in two words each (low word
first), the key of the check, the value, and the expected range."""

RECORD = hashlib.blake2b(b"relax_hetero: the error record of a GPU", digest_size=4 * WORDS).digest()
"""Contents of the placeholder constant in a module, which each machine replaces by the record."""


@dataclass(frozen=True)
class CheckSpec:
    """A run-time check."""

    subject: str  # subject of the check: ``"index"``, ``"value"``, ``"divisor"``, or ``"size"`` for divisors of sizes
    where: str  # the op and the variable, in messages

    @property
    def key(self) -> int:
        """A hash of the check, equal in all executables."""
        digest = hashlib.blake2b(f"{self.subject}\0{self.where}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 2

    def message(self, found: int, first: int, end: int) -> str:
        """The error message for a refused value."""
        if self.subject == "size":
            return f"{self.where} is divided by a size that is 0"
        if self.subject == "divisor":
            return f"{self.where}: an integer is divided by 0"
        expected = f"{first} to {end - 1}" if first < end else "none, as the axis is empty"
        return f"{self.where}: {self.subject} {found} is out of range, expected {expected}"


def refusal(check: int, found: int, first: int, end: int) -> str:
    """The text of a kernel's error, which `refused_by` parses."""
    return f"{REFUSED} check {check}, found {found}, expected {first} to {end}"


def refused_by(text: str, checks: tuple[CheckSpec, ...]) -> str | None:
    """The message for a check's error text; None for other errors."""
    match = _REFUSED.search(text)
    if match is None:
        return None
    number, found, first, end = map(int, match.groups())
    return checks[number].message(found, first, end) if number < len(checks) else None
