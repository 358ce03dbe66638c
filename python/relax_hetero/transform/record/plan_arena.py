"""Offsets of a command buffer's transient values in its arena: values with disjoint lifetimes share bytes.

Symbolic sizes are counted in units: values with the same symbolic factor, such as `n * s` in ``n * s * 1536`` bytes,
are planned together as if it were 1. Values of different factors never share bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import mul
from typing import Any

from tvm import tirx
from tvm_ffi import structural_equal

ARENA_ALIGNMENT = 64  # alignment of values in bytes: a cache line, as for TVM's own allocations

_MIN_ROUNDED_BYTES = 8 * ARENA_ALIGNMENT
"""Bytes per unit from which on the count is rounded up to the alignment, as that wastes little."""


@dataclass(frozen=True)
class Lifetime:
    """A value: its bytes (an int, or an expression), the command that defines it, and the last one that reads it."""

    nbytes: Any
    begin: int
    end: int


@dataclass(frozen=True)
class Arena:
    """Offsets of the values, in order, and the arena's bytes; ints, or expressions over symbols."""

    offsets: list[Any]
    nbytes: Any


def plan_arena(values: Sequence[Lifetime]) -> Arena:
    """Place values, aligned to `ARENA_ALIGNMENT`, so that values with overlapping lifetimes share no bytes.

    `values`: values in the order of the commands that define them. Those that are live during the same command overlap.
    """
    offsets: list[Any] = [0] * len(values)
    base: Any = 0
    for group in groups_by_unit(values):
        plan = _best_plan([(count, values[i]) for i, count in group.members])
        for (i, _), offset in zip(group.members, plan, strict=True):
            offsets[i] = base + group.unit * offset if offset else base
        base = base + group.unit * _total(plan, [count for _, count in group.members])
    return Arena(offsets, base)


def min_bytes(values: Sequence[Lifetime]) -> int:
    """Maximum of the bytes that are live at the same time, for values of known size: a lower bound of all plans."""
    return _lower_bound([(_rounded(value.nbytes), value) for value in values if isinstance(value.nbytes, int)])


@dataclass
class ArenaGroup:
    """Values whose size is a multiple of one unit: pairs of a value's index and its count of units."""

    unit: Any
    factors: list[Any]
    members: list[tuple[int, int]] = field(default_factory=list)


def groups_by_unit(values: Sequence[Lifetime]) -> list[ArenaGroup]:
    """Values grouped by their symbolic factor; numbers come first."""
    groups: list[ArenaGroup] = []
    for i, value in enumerate(values):
        count, factors = _counted(value.nbytes)
        group = next((group for group in groups if _same_factors(group.factors, factors)), None)
        if group is None:
            groups.append(group := ArenaGroup(_product(factors), factors))
        group.members.append((i, count))
    # Numbers first: then most offsets are ints.
    return sorted(groups, key=lambda group: bool(group.factors))


def _counted(nbytes: Any) -> tuple[int, list[Any]]:
    """A size as a count and the factors of its unit."""
    count, factors = 1, []
    for factor in _factors(nbytes):
        if isinstance(factor, int):
            count *= factor
        else:
            factors.append(factor)
    if not factors or count >= _MIN_ROUNDED_BYTES:
        return _rounded(count), factors
    unit = tirx.const(ARENA_ALIGNMENT, "int64")
    return 1, [tirx.floordiv(_product(factors) * count + (ARENA_ALIGNMENT - 1), unit) * unit]


def _factors(nbytes: Any) -> Iterator[Any]:
    if isinstance(nbytes, tirx.Mul):
        yield from _factors(nbytes.a)
        yield from _factors(nbytes.b)
    else:
        yield int(nbytes.value) if isinstance(nbytes, tirx.IntImm) else nbytes


def _same_factors(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Return whether two products have the same factors, in any order."""
    remaining = list(right)
    for factor in left:
        match = next(
            (i for i, candidate in enumerate(remaining) if factor is candidate or structural_equal(factor, candidate)),
            None,
        )
        if match is None:
            return False
        del remaining[match]
    return not remaining


def _product(factors: Sequence[Any]) -> Any:
    return reduce(mul, factors) if factors else 1


def _rounded(nbytes: int) -> int:
    return -(-max(nbytes, 1) // ARENA_ALIGNMENT) * ARENA_ALIGNMENT


_Sized = Sequence[tuple[int, Lifetime]]


def _best_plan(values: _Sized) -> list[int]:
    """Offsets by the first order of placement that reaches the lower bound, else by the best order."""
    lower_bound, counts = _lower_bound(values), [count for count, _ in values]
    overlaps = overlaps_of(values)
    best: list[int] = []
    for order in _ORDERS:
        plan = _placed(counts, overlaps, sorted(range(len(values)), key=lambda i: order(*values[i])))
        if not best or _total(plan, counts) < _total(best, counts):
            best = plan
        if _total(best, counts) == lower_bound:
            break
    return best


_ORDERS: tuple[Callable[[int, Lifetime], tuple[int, ...]], ...] = (
    lambda count, value: (-count, value.begin),
    lambda count, value: (-count * (value.end - value.begin + 1), value.begin),
    lambda count, value: (value.begin - value.end, -count),
)
"""Sort keys of greedy placement: largest; largest product of bytes and lifetime; longest lifetime first."""


def _placed(counts: Sequence[int], overlaps: Sequence[Sequence[int]], order: Sequence[int]) -> list[int]:
    """Place each value, in order, at the lowest address that is free during its lifetime."""
    offsets = [-1] * len(counts)
    for i in order:
        ranges = sorted((offsets[j], offsets[j] + counts[j]) for j in overlaps[i] if offsets[j] >= 0)
        offset = 0
        for begin, end in ranges:
            if begin - offset >= counts[i]:
                break
            offset = max(offset, end)
        offsets[i] = offset
    return offsets


def overlaps_of(values: _Sized) -> list[list[int]]:
    """For each value the indices of those with an overlapping lifetime."""
    overlaps: list[list[int]] = [[] for _ in values]
    live: list[int] = []
    for i in sorted(range(len(values)), key=lambda i: values[i][1].begin):
        live = [j for j in live if values[j][1].end >= values[i][1].begin]
        for j in live:
            overlaps[i].append(j)
            overlaps[j].append(i)
        live.append(i)
    return overlaps


def _lower_bound(values: _Sized) -> int:
    changes = sorted([(v.begin, 1, count) for count, v in values] + [(v.end, 2, -count) for count, v in values])
    live = peak = 0
    for _, _, change in changes:
        live += change
        peak = max(peak, live)
    return peak


def _total(offsets: Sequence[int], counts: Sequence[int]) -> int:
    return max((offset + count for offset, count in zip(offsets, counts, strict=True)), default=0)
