"""Where the transient values of a command buffer lie in its arena: by lifetime, values that never meet share bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm_ffi import structural_equal

ARENA_ALIGNMENT = 64
"""Bytes at whose multiples values begin: a cache line, and what TVM's own allocations have."""


@dataclass(frozen=True)
class Lifetime:
    """A value: its size in bytes (an int, or an expression), the command that makes it, the last that reads it."""

    nbytes: Any
    begin: int
    end: int

    def meets(self, other: Lifetime) -> bool:
        """Whether both are there at one time."""
        return self.begin <= other.end and other.begin <= self.end


@dataclass(frozen=True)
class Arena:
    """Offsets of the values, in their order, and the bytes of the whole; ints, or expressions over symbols."""

    offsets: list[Any]
    nbytes: Any


def plan_arena(values: Sequence[Lifetime]) -> Arena:
    """Place values whose size is known largest first, each at the lowest free address; then the symbolic ones.

    A value of symbolic size takes the place of one that is gone only if its size is the same expression.
    """
    offsets: list[Any] = [0] * len(values)
    placed: list[tuple[int, int, Lifetime]] = []
    size = 0
    known = [i for i, value in enumerate(values) if isinstance(value.nbytes, int)]
    for i in sorted(known, key=lambda i: (-values[i].nbytes, values[i].begin)):
        value, nbytes = values[i], _rounded(values[i].nbytes)
        taken = sorted((begin, end) for begin, end, other in placed if other.meets(value))
        offset = _lowest_gap(taken, nbytes)
        offsets[i] = offset
        placed.append((offset, offset + nbytes, value))
        size = max(size, offset + nbytes)
    return _place_symbolic(values, offsets, size)


def _lowest_gap(taken: Sequence[tuple[int, int]], nbytes: int) -> int:
    offset = 0
    for begin, end in taken:
        if begin - offset >= nbytes:
            break
        offset = max(offset, end)
    return offset


def _place_symbolic(values: Sequence[Lifetime], offsets: list[Any], size: Any) -> Arena:
    rooms: list[tuple[Any, Any, list[Lifetime]]] = []
    for i, value in enumerate(values):
        if isinstance(value.nbytes, int):
            continue
        for nbytes, offset, users in rooms:
            if structural_equal(nbytes, value.nbytes) and not any(user.meets(value) for user in users):
                offsets[i] = offset
                users.append(value)
                break
        else:
            offsets[i] = size
            rooms.append((value.nbytes, size, [value]))
            size = size + _rounded(value.nbytes)
    return Arena(offsets, size)


def _rounded(nbytes: Any) -> Any:
    if isinstance(nbytes, int):
        return -(-nbytes // ARENA_ALIGNMENT) * ARENA_ALIGNMENT
    unit = tirx.IntImm("int64", ARENA_ALIGNMENT)
    return tirx.floordiv(nbytes + (ARENA_ALIGNMENT - 1), unit) * unit
