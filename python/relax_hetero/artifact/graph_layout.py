"""The layout of memory that a machine shares with the code of a command buffer that runs as a CUDA graph.

All are int64 words. The *state* is pinned host memory that the device reads too; the *table*, device memory that the
graph's kernels read; the *plan*, host memory that says to the recording function what to record.
"""

from __future__ import annotations

from dataclasses import dataclass

ROWS, REPORT_INTERVAL = 16, 4
"""A submission's row is free again when the device has begun with a later one, of which it tells the host about every
fourth: that write takes a microsecond. Where no row is free, a submission waits."""

WAYS = 8
"""Graphs among which the code of a submission finds the one that was recorded for the parameters of this call; where a
command buffer has more, the machine finds it."""

# Of the state. Some are written by the host alone, one by the device alone: that has a cache line of its own.
LAUNCH, GET_STREAM, GRAPH, DEVICE, SUBMITTED, CONSUMED = 0, 1, 2, 3, 4, 8
_STAGED = 16

# Of the table.
TICKET, ENTRIES = 0, 1

# Of the plan.
RING, TABLE, CONSUMED_AT, BINDINGS = 0, 1, 2, 3

FILLED_AT_ONCE = 32
"""The number of table entries that one kernel takes as arguments and writes."""


@dataclass(frozen=True)
class Layout:
    """The positions of the words of a command buffer with a number of slots, and of parameters.

    A graph keeps the numbers it was recorded with, so a command buffer with parameters has a graph for each of their
    values.
    """

    slots: int
    parameters: int = 0

    @property
    def staged(self) -> int:
        """In the state, the bindings of a submission that the code leaves to the machine."""
        return _STAGED

    @property
    def values(self) -> int:
        """In the state, the parameters of a submission that the code leaves to the machine."""
        return _STAGED + self.slots

    @property
    def ways(self) -> int:
        """In the state, the first of `WAYS` graphs, each followed by the values of its parameters."""
        return self.values + self.parameters

    @property
    def way(self) -> int:
        """Words of one of them; 0 where there are no parameters, and the one graph stands at `GRAPH`."""
        return 1 + self.parameters if self.parameters else 0

    @property
    def ring(self) -> int:
        """In the state, the first of `ROWS` rows of bindings."""
        return self.ways + WAYS * self.way

    @property
    def state(self) -> int:
        """Words of the state."""
        return self.ring + ROWS * self.slots

    @property
    def table(self) -> int:
        """Words of the table."""
        return ENTRIES + -(-self.slots // FILLED_AT_ONCE) * FILLED_AT_ONCE

    @property
    def directs(self) -> int:
        """In the plan, the address of the first constant; the arena's address follows the last constant's."""
        return BINDINGS + self.slots
