"""Which tensors share a storage: by lifetime, each whole, since TVM's kernels take no tensor that begins inside one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..record.plan_arena import Lifetime, groups_by_unit, meetings_of


@dataclass(frozen=True)
class Storages:
    """For each value the number of its storage, and each storage's bytes: ints, or expressions over symbols."""

    of: list[int]
    nbytes: list[Any]


def plan_storages(values: Sequence[Lifetime]) -> Storages:
    """Give values storages so that those that meet have different ones.

    Parameters
    ----------
    values : sequence of Lifetime
        Those that are there at one time, be it one command, meet.
    """
    of = [0] * len(values)
    nbytes: list[Any] = []
    for group in groups_by_unit(values):
        counts = [count for _, count in group.members]
        meetings = meetings_of([(count, values[i]) for i, count in group.members])
        lifetimes = [values[i] for i, _ in group.members]
        orders = (sorted(range(len(counts)), key=lambda i: order(counts[i], lifetimes[i])) for order in _ORDERS)
        shared, sizes = min((_assigned(counts, meetings, order) for order in orders), key=lambda plan: sum(plan[1]))
        for (i, _), storage in zip(group.members, shared, strict=True):
            of[i] = len(nbytes) + storage
        nbytes += [group.unit * size for size in sizes]
    return Storages(of, nbytes)


_ORDERS: tuple[Callable[[int, Lifetime], tuple[int, ...]], ...] = (
    lambda count, value: (-count, value.begin),
    lambda count, value: (value.begin, -count),
)
"""Largest first; earliest first."""


def _assigned(
    counts: Sequence[int], meetings: Sequence[Sequence[int]], order: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Each value, in order, in the storage that is free and wastes least: none grows if one is large enough."""
    storage = [-1] * len(counts)
    sizes: list[int] = []
    for i in order:
        taken = {storage[j] for j in meetings[i]}
        free = [number for number in range(len(sizes)) if number not in taken]
        if free:
            best = min(free, key=lambda number: (max(counts[i] - sizes[number], 0), sizes[number]))
            sizes[best] = max(sizes[best], counts[i])
        else:
            best = len(sizes)
            sizes.append(counts[i])
        storage[i] = best
    return storage, sizes
