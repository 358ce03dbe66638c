"""A ring of stages in shared memory: producers fill stages ahead of the consumers that read them.

Each stage has two barriers: one that is full (what was asked for is there) and one that is empty (consumers are done).
A turn is the number of a filling, counted from 0; turn t lies in stage ``t % stages``.
"""

from __future__ import annotations

from tvm.script.ir_builder import tirx as T

from ...core.builder import Expr
from ..core import ptx
from ..core.launch import SharedMemory

BARRIER_BYTES = 8


class Ring:
    """Barriers of the stages of a ring.

    Parameters
    ----------
    shared : SharedMemory
        From which the ring takes its barriers, before it is opened.
    stages : int
    producers : int
        Arrivals that make a stage full.
    consumers : int
        Arrivals that make a stage empty; 0: no barrier says so, since other barriers do.
    """

    def __init__(self, shared: SharedMemory, stages: int, producers: int, consumers: int = 0) -> None:
        self.shared, self.stages, self.producers, self.consumers = shared, stages, producers, consumers
        self._full = shared.reserve(BARRIER_BYTES * stages, BARRIER_BYTES)
        self._empty = shared.reserve(BARRIER_BYTES * stages, BARRIER_BYTES) if consumers else 0

    def initialize(self) -> None:
        """Initialize the barriers, in one thread; `ptx.barrier_init_fence` follows."""
        for stage in range(self.stages):
            ptx.barrier_init(self.full(stage), self.producers)
            if self.consumers:
                ptx.barrier_init(self.empty(stage), self.consumers)

    def stage(self, turn: Expr) -> Expr:
        """The stage of a turn."""
        return turn % self.stages if isinstance(turn, int) else T.bind(T.truncmod(turn, self.stages))

    def parity(self, turn: Expr) -> Expr:
        """The parity of a turn's phase: 0 for the first filling of a stage."""
        if isinstance(turn, int):
            return turn // self.stages % 2
        return T.bitwise_and(T.truncdiv(turn, self.stages), 1)

    def full(self, stage: Expr) -> Expr:
        """Pointer to the barrier that says that a stage is filled."""
        return self.shared.at(self._full + stage * BARRIER_BYTES)

    def empty(self, stage: Expr) -> Expr:
        """Pointer to the barrier that says that a stage is free."""
        return self.shared.at(self._empty + stage * BARRIER_BYTES)

    def acquire(self, turn: Expr) -> Expr:
        """Wait until the stage of a turn is free; return it. The first turn of a stage does not wait."""
        stage = self.stage(turn)
        parity = self.parity(turn)
        ptx.barrier_wait(self.empty(stage), T.bitwise_xor(parity, 1) if not isinstance(parity, int) else parity ^ 1)
        return stage

    def wait(self, turn: Expr) -> Expr:
        """Wait until the stage of a turn is filled; return it."""
        stage = self.stage(turn)
        ptx.barrier_wait(self.full(stage), self.parity(turn))
        return stage

    def release(self, turn: Expr) -> None:
        """Say that the caller has read the stage of a turn."""
        ptx.barrier_arrive(self.empty(self.stage(turn)))
