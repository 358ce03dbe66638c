"""Findings of ``relax-hetero doctor``: a line each, with what to do. Nothing here needs a package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

State: TypeAlias = Literal["ok", "absent", "warning", "error"]
"""Absent: not there, and not needed unless somebody wants what it is for. Error: what is needed is broken."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes
    ----------
    section : str
        ``packages``, ``extras``, ``devices``, ``tools`` or ``self-test``.
    name : str
        Subject of the check.
    about : str
        Result of the check.
    fix : str
        Remedy; empty where nothing has to be done.
    """

    section: str
    name: str
    state: State
    about: str
    fix: str = ""


def broken(findings: list[Finding]) -> list[Finding]:
    """Those that keep the library from working."""
    return [finding for finding in findings if finding.state == "error"]
