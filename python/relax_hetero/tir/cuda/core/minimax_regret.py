"""How work is cut where its extents are known only when it runs: the way that loses little, whatever they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

EXTENTS = (64, 256, 1024, 4096)
"""Extents that stand for a symbolic one."""

Choice = TypeVar("Choice")


def cases_of(sizes: Sequence[object], is_known: bool) -> list[list[int]]:
    """The sizes with each of `EXTENTS` in the place of those that are no integers; one case where all is known."""
    extents = EXTENTS[:1] if is_known else EXTENTS
    return [[size if isinstance(size, int) else extent for size in sizes] for extent in extents]


def minimax_regret(
    choices: Sequence[Choice], cases: Sequence[Sequence[int]], cost: Callable[[Choice, Sequence[int]], float]
) -> Choice:
    """The choice that costs least, in the mean over the cases, compared with the best choice for each of them."""
    costs = [[cost(choice, case) for case in cases] for choice in choices]
    best = [min(column) for column in zip(*costs, strict=True)]
    losses = [sum(found / least for found, least in zip(row, best, strict=True)) for row in costs]
    return choices[losses.index(min(losses))]
