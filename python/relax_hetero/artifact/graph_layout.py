"""Layout of the memory that a machine shares with the code of a command buffer that runs as a CUDA graph.

All memory consists of int64 words. The *state* is pinned host memory that the device can read; the *table* is device
memory that the graph's kernels read; the *plan* is host memory with the arguments of the recording function.
"""

from __future__ import annotations

from dataclasses import dataclass

RING_ROWS, REPORT_INTERVAL = 16, 4
"""Number of rows of the ring of bindings, and number of submissions between two reports of the device's progress; a
report takes a microsecond. A row is free once the device has begun a later submission; without a free row a submission
waits."""

CACHED_GRAPHS = 8
"""Number of graphs in the cache that submission code searches for the call's parameters; other graphs need the
machine's slow path."""

# Words of the state. The device writes only CONSUMED, which has a cache line of its own.
LAUNCH, GET_STREAM, GRAPH, DEVICE, SUBMITTED, CONSUMED = 0, 1, 2, 3, 4, 8
OWNER = 5
"""Word of a state, and of a mailbox, with the address of the function that serves it in programs without Python
(`vm/file/standalone_cuda.c`); 0 in those of `rh.vm.VirtualMachine`."""
_STAGED = 16

TICKET, ENTRIES = 0, 1  # words of the table

RING, TABLE, CONSUMED_ADDRESS, BINDINGS = 0, 1, 2, 3  # words of the plan

FILLED_AT_ONCE = 32  # number of table entries that one kernel takes as arguments and writes


@dataclass(frozen=True)
class Layout:
    """Positions and numbers of words of a command buffer, by its numbers of slots and parameters.

    A graph contains its parameters as constants, so each set of parameter values has a graph of its own.
    """

    slots: int
    parameters: int = 0

    @property
    def slow_bindings(self) -> int:
        """Position in the state of the bindings of a submission on the slow path."""
        return _STAGED

    @property
    def slow_parameters(self) -> int:
        """Position in the state of the parameters of a submission on the slow path."""
        return _STAGED + self.slots

    @property
    def graph_cache(self) -> int:
        """Position in the state of the `CACHED_GRAPHS` entries, each a graph and its parameter values."""
        return self.slow_parameters + self.parameters

    @property
    def cache_entry_words(self) -> int:
        """Number of words of an entry of the cache; 0 without parameters, when the only graph is at `GRAPH`."""
        return 1 + self.parameters if self.parameters else 0

    @property
    def ring(self) -> int:
        """Position in the state of the `RING_ROWS` rows of bindings."""
        return self.graph_cache + CACHED_GRAPHS * self.cache_entry_words

    @property
    def state_words(self) -> int:
        """Number of words of the state."""
        return self.ring + RING_ROWS * self.slots

    @property
    def table_words(self) -> int:
        """Number of words of the table."""
        return ENTRIES + -(-self.slots // FILLED_AT_ONCE) * FILLED_AT_ONCE

    @property
    def constants(self) -> int:
        """Position in the plan of the addresses of constants, which the arena's address follows."""
        return BINDINGS + self.slots
