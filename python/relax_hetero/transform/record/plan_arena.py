"""Where the transient values of a command buffer lie in its arena: by lifetime, values that never meet share bytes.

Sizes that hold symbols are counted in units: of one symbolic factor, `n * s` in ``n * s * 1536`` bytes, values are
planned together as if it were 1, whatever it will be. Values of different factors never share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import mul
from typing import Any

from tvm import tirx
from tvm_ffi import structural_equal

ARENA_ALIGNMENT = 64
"""Bytes at whose multiples values begin: a cache line, and what TVM's own allocations have."""

_MANY = 8 * ARENA_ALIGNMENT
"""Bytes a unit from which on rounding them up to the alignment wastes little."""


@dataclass(frozen=True)
class Lifetime:
    """A value: its size in bytes (an int, or an expression), the command that makes it, the last that reads it."""

    nbytes: Any
    begin: int
    end: int


@dataclass(frozen=True)
class Arena:
    """Offsets of the values, in their order, and the bytes of the whole; ints, or expressions over symbols."""

    offsets: list[Any]
    nbytes: Any


def plan_arena(values: Sequence[Lifetime]) -> Arena:
    """Place values so that those that meet have bytes of their own, each at a multiple of `ARENA_ALIGNMENT`.

    Parameters
    ----------
    values : sequence of Lifetime
        In the order of the commands that make them. Those that are there at one time, be it one command, meet.
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
    """The bytes of the values of known size that are there at the worst time: no plan takes fewer."""
    return _lower_bound([(_rounded(value.nbytes), value) for value in values if isinstance(value.nbytes, int)])


@dataclass
class ArenaGroup:
    """Values whose size is a count of one unit: (number of the value, count), multiples of the alignment together."""

    unit: Any
    factors: list[Any]
    members: list[tuple[int, int]] = field(default_factory=list)


def groups_by_unit(values: Sequence[Lifetime]) -> list[ArenaGroup]:
    """Values apart by their symbolic factor; numbers come first."""
    groups: list[ArenaGroup] = []
    for i, value in enumerate(values):
        count, factors = _counted(value.nbytes)
        group = next((group for group in groups if _same_factors(group.factors, factors)), None)
        if group is None:
            groups.append(group := ArenaGroup(_product(factors), factors))
        group.members.append((i, count))
    # So most offsets stay numbers.
    return sorted(groups, key=lambda group: bool(group.factors))


def _counted(nbytes: Any) -> tuple[int, list[Any]]:
    """A size as a count and the factors of its unit."""
    count, factors = 1, []
    for factor in _factors(nbytes):
        if isinstance(factor, int):
            count *= factor
        else:
            factors.append(factor)
    if not factors or count >= _MANY:
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
    """Return whether two products are of the same factors, in any order."""
    rest = list(right)
    for factor in left:
        found = next((i for i, other in enumerate(rest) if factor is other or structural_equal(factor, other)), None)
        if found is None:
            return False
        del rest[found]
    return not rest


def _product(factors: Sequence[Any]) -> Any:
    return reduce(mul, factors) if factors else 1


def _rounded(nbytes: int) -> int:
    return -(-max(nbytes, 1) // ARENA_ALIGNMENT) * ARENA_ALIGNMENT


_Sized = Sequence[tuple[int, Lifetime]]


def _best_plan(values: _Sized) -> list[int]:
    """Offsets by the first order of placing that needs no more than the least, else by the one that needs fewest."""
    lower_bound, counts = _lower_bound(values), [count for count, _ in values]
    meetings = meetings_of(values)
    best: list[int] = []
    for order in _ORDERS:
        plan = _placed(counts, meetings, sorted(range(len(values)), key=lambda i: order(*values[i])))
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
"""Largest first; most bytes for longest first; longest first."""


def _placed(counts: Sequence[int], meetings: Sequence[Sequence[int]], order: Sequence[int]) -> list[int]:
    """Each value, in order, at the lowest address that is free for as long as it is there."""
    offsets = [-1] * len(counts)
    for i in order:
        taken = sorted((offsets[j], offsets[j] + counts[j]) for j in meetings[i] if offsets[j] >= 0)
        offset = 0
        for begin, end in taken:
            if begin - offset >= counts[i]:
                break
            offset = max(offset, end)
        offsets[i] = offset
    return offsets


def meetings_of(values: _Sized) -> list[list[int]]:
    """For each value, those that are there at one time with it."""
    meetings: list[list[int]] = [[] for _ in values]
    there: list[int] = []
    for i in sorted(range(len(values)), key=lambda i: values[i][1].begin):
        there = [j for j in there if values[j][1].end >= values[i][1].begin]
        for j in there:
            meetings[i].append(j)
            meetings[j].append(i)
        there.append(i)
    return meetings


def _lower_bound(values: _Sized) -> int:
    changes = sorted([(v.begin, 1, count) for count, v in values] + [(v.end, 2, -count) for count, v in values])
    now = worst = 0
    for _, _, change in changes:
        now += change
        worst = max(worst, now)
    return worst


def _total(offsets: Sequence[int], counts: Sequence[int]) -> int:
    return max((offset + count for offset, count in zip(offsets, counts, strict=True)), default=0)
