"""Choice of tilings for symbolic extents: minimal regret over representative extents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

EXTENTS = (64, 256, 1024, 4096)  # representative values of a symbolic extent

Choice = TypeVar("Choice")


def cases_of(sizes: Sequence[object], is_known: bool) -> list[list[int]]:
    """Substitute each of `EXTENTS` for the symbolic sizes; one case if all sizes are known."""
    extents = EXTENTS[:1] if is_known else EXTENTS
    return [[size if isinstance(size, int) else extent for size in sizes] for extent in extents]


def minimax_regret(
    choices: Sequence[Choice], cases: Sequence[Sequence[int]], cost: Callable[[Choice, Sequence[int]], float]
) -> Choice:
    """Choice with the lowest mean ratio of its cost to the lowest cost of each case."""
    costs = [[cost(choice, case) for case in cases] for choice in choices]
    best = [min(column) for column in zip(*costs, strict=True)]
    losses = [sum(value / lowest for value, lowest in zip(row, best, strict=True)) for row in costs]
    return choices[losses.index(min(losses))]
