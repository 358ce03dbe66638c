"""A ring of stages in shared memory: producers fill stages ahead of the consumers that read them.

Each stage has two mbarriers: "full" (copies are complete) and "empty" (consumers are done). The tile of an `index`,
counted from 0, is in stage ``index % stages``.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...core.builder import Expr
from ..core import ptx
from ..core.launch import SharedMemory, local

BARRIER_BYTES = 8


class Ring:
    """Barriers of a ring's stages.

    Parameters
    ----------
    shared : SharedMemory
        Not yet opened: the ring reserves its barriers.
    producers : int
        Arrivals that complete a full barrier.
    consumers : int
        Arrivals that complete an empty barrier; 0: there are none, as other barriers order reads and writes.
    """

    def __init__(self, shared: SharedMemory, stages: int, producers: int, consumers: int = 0) -> None:
        self.shared, self.stages, self.producers, self.consumers = shared, stages, producers, consumers
        self._full = shared.reserve(BARRIER_BYTES * stages, BARRIER_BYTES)
        self._empty = shared.reserve(BARRIER_BYTES * stages, BARRIER_BYTES) if consumers else 0

    def initialize(self) -> None:
        """Initialize the barriers, by one thread; `ptx.barrier_init_fence` must follow."""
        for stage in range(self.stages):
            ptx.barrier_init(self.full(stage), self.producers)
            if self.consumers:
                ptx.barrier_init(self.empty(stage), self.consumers)

    def stage(self, index: Expr) -> Expr:
        """Stage of a tile."""
        return index % self.stages if isinstance(index, int) else T.bind(T.truncmod(index, self.stages))

    def parity(self, index: Expr) -> Expr:
        """Parity of a tile's phase: 0 for the first tile of a stage."""
        if isinstance(index, int):
            return index // self.stages % 2
        return T.bitwise_and(T.truncdiv(index, self.stages), 1)

    def full(self, stage: Expr) -> Expr:
        """Pointer to the full barrier of a stage."""
        return self.shared.at(self._full + stage * BARRIER_BYTES)

    def empty(self, stage: Expr) -> Expr:
        """Pointer to the empty barrier of a stage."""
        return self.shared.at(self._empty + stage * BARRIER_BYTES)

    def acquire(self, index: Expr) -> Expr:
        """Wait until the stage of a tile is empty, and return it. The first tile of a stage does not wait."""
        stage = self.stage(index)
        ptx.barrier_wait(self.empty(stage), T.bitwise_xor(self.parity(index), 1))
        return stage

    def wait(self, index: Expr) -> Expr:
        """Wait until the stage of a tile is full, and return it."""
        stage = self.stage(index)
        ptx.barrier_wait(self.full(stage), self.parity(index))
        return stage

    def release(self, index: Expr) -> None:
        """Arrive at the empty barrier of a tile's stage."""
        ptx.barrier_arrive(self.empty(self.stage(index)))


class RingPosition:
    """A thread's stage and phase parity in registers, which advance without a division.

    Parameters
    ----------
    stages : int
        Stages of the ring.
    first : int
        First stage.
    """

    def __init__(self, stages: int, first: int = 0) -> None:
        self._stages, self._registers = stages, local(2, "int32")
        for i, value in enumerate((first, 0)):
            T.buffer_store(self._registers, value, [i])

    @property
    def stage(self) -> Expr:
        """Current stage, which changes when the position advances."""
        return self._registers[0]

    @property
    def parity(self) -> Expr:
        """Parity of the phase of the current stage, which changes when the position advances."""
        return self._registers[1]

    def advance(self) -> None:
        """Go to the next stage."""
        next_stage = T.bind(self.stage + 1)
        wraps = tirx.EQ(next_stage, self._stages)
        T.buffer_store(self._registers, T.Select(wraps, 0, next_stage), [0])
        T.buffer_store(self._registers, T.bitwise_xor(self.parity, T.Select(wraps, 1, 0)), [1])
