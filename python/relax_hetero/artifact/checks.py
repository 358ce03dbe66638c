"""Checks of values that kernels make when they run: what each is for, and its message."""

from __future__ import annotations

import re
from dataclasses import dataclass

REFUSED = "relax_hetero refuses a value:"
_REFUSED = re.compile(rf"{REFUSED} check (\d+), found (-?\d+), expected (-?\d+) to (-?\d+)")


@dataclass(frozen=True)
class CheckSpec:
    """A check.

    Attributes
    ----------
    subject : str
        What is checked: ``"index"``, ``"length"``, ``"divisor"``, or ``"size"`` for divisors of sizes.
    where : str
        The op and the variable, as messages name them.
    """

    subject: str
    where: str

    def message(self, found: int, least: int, end: int) -> str:
        """What to tell about a value that was refused."""
        if self.subject == "size":
            return f"{self.where} is divided by a size that is 0"
        if self.subject == "divisor":
            return f"{self.where}: an integer is divided by 0"
        expected = f"{least} to {end - 1}" if least < end else "none, as the axis is empty"
        return f"{self.where}: {self.subject} {found} is out of range, expected {expected}"


def refusal(check: int, found: int, least: int, end: int) -> str:
    """The text that a kernel's error carries, for `refused_by` to read."""
    return f"{REFUSED} check {check}, found {found}, expected {least} to {end}"


def refused_by(text: str, checks: tuple[CheckSpec, ...]) -> str | None:
    """The message for an error of a check; None for other errors."""
    match = _REFUSED.search(text)
    if match is None:
        return None
    number, found, least, end = map(int, match.groups())
    return checks[number].message(found, least, end) if number < len(checks) else None
