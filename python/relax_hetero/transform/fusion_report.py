"""What was not fused, and why: passes say it while they decide, `explain` prints it.

What was fused needs no report: every kernel says which ops it computes (`kernel_ops`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Declined:
    """Work that stayed out of a kernel.

    Attributes
    ----------
    function, variable : str
        Where it is in the model.
    op : str
        The op that stayed out, or whose kernel did not take another in.
    reason : str
        What was found and what would have been needed.
    """

    function: str
    variable: str
    op: str
    reason: str

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


_reports: ContextVar[list[Declined] | None] = ContextVar("relax_hetero_declined", default=None)


@contextmanager
def collect_declined() -> Iterator[list[Declined]]:
    """The context in which `decline` is heard; gives the list that it fills."""
    found: list[Declined] = []
    token = _reports.set(found)
    try:
        yield found
    finally:
        _reports.reset(token)


def decline(function: str, variable: str, op: str, reason: str) -> None:
    """Say why something was not fused; costs nothing where nobody listens."""
    found = _reports.get()
    if found is None:
        return
    entry = Declined(function, variable, op, reason)
    if entry not in found:
        found.append(entry)
