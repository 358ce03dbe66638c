"""Checks of values that kernels make when they run: what each is for, and its message."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

REFUSED = "relax_hetero refuses a value:"
_REFUSED = re.compile(rf"{REFUSED} check (\d+), found (-?\d+), expected (-?\d+) to (-?\d+)")


WORDS = 16
"""Number of int32 words in the record that a GPU's kernels report a value in."""

CLAIMED, READY, KEY, FOUND, FIRST, END = 0, 1, 2, 4, 6, 8
"""Where in it stands whether a thread has claimed it, whether that has filled it, and then, in two words each, the low
one first, the key of the check, the value, and the range that was expected."""

RECORD = hashlib.blake2b(b"relax_hetero: the error record of a GPU", digest_size=4 * WORDS).digest()
"""The bytes of the constant that stands for the record in a module: each machine passes the record instead of it."""


@dataclass(frozen=True)
class CheckSpec:
    """A check.

    Attributes
    ----------
    subject : str
        Subject of the check: ``"index"``, ``"value"``, ``"divisor"``, or ``"size"`` for divisors of sizes.
    where : str
        The op and the variable, as messages name them.
    """

    subject: str
    where: str

    @property
    def key(self) -> int:
        """A number for this text, the same one in all executables."""
        digest = hashlib.blake2b(f"{self.subject}\0{self.where}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 2

    def message(self, found: int, first: int, end: int) -> str:
        """Text of the error for a value that was refused."""
        if self.subject == "size":
            return f"{self.where} is divided by a size that is 0"
        if self.subject == "divisor":
            return f"{self.where}: an integer is divided by 0"
        expected = f"{first} to {end - 1}" if first < end else "none, as the axis is empty"
        return f"{self.where}: {self.subject} {found} is out of range, expected {expected}"


def refusal(check: int, found: int, first: int, end: int) -> str:
    """The text that a kernel's error carries, for `refused_by` to read."""
    return f"{REFUSED} check {check}, found {found}, expected {first} to {end}"


def refused_by(text: str, checks: tuple[CheckSpec, ...]) -> str | None:
    """The message for an error of a check; None for other errors."""
    match = _REFUSED.search(text)
    if match is None:
        return None
    number, found, first, end = map(int, match.groups())
    return checks[number].message(found, first, end) if number < len(checks) else None
