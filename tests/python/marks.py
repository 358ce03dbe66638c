"""Marks of parameters that choose those that run by default."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but_for(values: Iterable[str], quick: Collection[str]) -> list[Any]:
    """Parameters of a test, all of them slow except a few that stand for the others."""
    values = list(values)
    assert set(quick) <= set(values), f"{set(quick) - set(values)} are not parameters"
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]


def in_turns(firsts: Iterable[Any], seconds: Iterable[Any]) -> list[Any]:
    """All pairs of `firsts` and `seconds`; all are slow but one second for each first, in rotation."""
    partners = list(seconds)
    return [
        pytest.param(first, second, marks=() if number % len(partners) == turn else pytest.mark.slow)
        for number, first in enumerate(firsts)
        for turn, second in enumerate(partners)
    ]
