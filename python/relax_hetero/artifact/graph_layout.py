"""The layout of memory that a machine shares with the code of a command buffer that runs as a CUDA graph.

All are int64 words. The *state* is pinned host memory that the device reads too; the *table*, device memory that the
graph's kernels read; the *plan*, host memory that says to the recording function what to record.
"""

from __future__ import annotations

from dataclasses import dataclass

ROWS, TOLD_EVERY = 16, 4
"""A submission's row is free again when the device has begun with a later one, of which it tells the host about every
fourth: that write takes a microsecond. Where no row is free, a submission waits."""

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
    """The positions of the words of a command buffer with a number of slots, and of parameters (symbolic extents)."""

    slots: int
    parameters: int = 0

    @property
    def recorded(self) -> int:
        """In the state, the parameters' values that the graph was recorded with."""
        return _STAGED

    @property
    def staged(self) -> int:
        """In the state, a submission that the code leaves to the machine: bindings, parameters, the arena's bytes."""
        return self.recorded + self.parameters

    @property
    def ring(self) -> int:
        """In the state, the first of `ROWS` rows of bindings."""
        return self.staged + self.slots + self.parameters + 1

    @property
    def state(self) -> int:
        """Words of the state."""
        return self.ring + ROWS * self.slots

    @property
    def table(self) -> int:
        """Words of the table."""
        return ENTRIES + -(-self.slots // FILLED_AT_ONCE) * FILLED_AT_ONCE

    @property
    def values(self) -> int:
        """In the plan, the first parameter's value."""
        return BINDINGS + self.slots

    @property
    def directs(self) -> int:
        """In the plan, the address of the first constant; the arena's address follows the last constant's."""
        return self.values + self.parameters
