"""Barriers in shared memory that count arrivals and the bytes of copies ("mbarrier"), and named barriers of warps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .faults import KernelFault
from .memory import shared_place
from .ptx import Instruction, instruction, pointer
from .waiting import Wait, block_barrier, waits


@dataclass
class Mbarrier:
    """One barrier.

    Attributes
    ----------
    name : str
    count : int
        Arrivals that a phase takes.
    left : int
        Arrivals that this phase still takes.
    bytes : int
        Bytes that this phase still takes.
    phase : int
        Phases that have ended.
    copies : list
        Functions that deliver copies to this barrier, with the arrivals and the bytes that they bring: called as late
        as possible, when somebody needs the end of the phase and nothing else is missing.
    """

    name: str
    owner: tuple[int, int]
    count: int
    left: int
    width: int
    init: tuple[int, int] = (0, 0)
    visible: bool = False
    bytes: int = 0
    phase: int = 0
    copies: list[tuple[Callable[[], None], int, int]] = field(default_factory=list)
    known: np.ndarray | None = None
    given: np.ndarray | None = None

    def add(self, released: np.ndarray) -> None:
        """Add what a waiter for the end of this phase learns."""
        self.known = released if self.known is None else np.maximum(self.known, released)

    def arrive(self, released: np.ndarray, count: int = 1, size: int = 0) -> None:
        """Count arrivals, and bytes that are expected from now on.

        Raises
        ------
        KernelFault
            More arrive than the phase takes.
        """
        if self.left == sum(arrivals for _, arrivals, _ in self.copies):
            self.advance()
        if count > self.left:
            raise KernelFault(f"{self.name}: {count} threads arrive where {self.left} of {self.count} are missing")
        self.bytes += size
        self.left -= count
        self.add(released)
        if self.left == 0 and self.bytes == 0 and not self.copies:
            self._end()

    def advance(self) -> None:
        """Deliver copies if that ends the phase."""
        if self.left != sum(arrivals for _, arrivals, _ in self.copies):
            return
        if self.bytes != sum(size for _, _, size in self.copies):
            return
        waiting, self.copies = self.copies, []
        for deliver, arrivals, size in waiting:
            deliver()
            self.left -= arrivals
            self.bytes -= size
        self._end()

    def _end(self) -> None:
        self.phase, self.left = self.phase + 1, self.count
        self.given, self.known = self.known, None

    def text(self) -> str:
        """The state in words."""
        copied = sum(size for _, _, size in self.copies)
        return (
            f"{self.name}, phase {self.phase}: {self.left} of {self.count} arrivals are missing; {self.bytes} bytes "
            f"are expected, {copied} are copied"
        )


def barrier_at(lanes: Any, instance: int, offset: int, lane: int) -> Mbarrier:
    """The barrier at an offset of shared memory.

    Raises
    ------
    KernelFault
        The barrier is missing, or its initialization is not visible to this thread.
    """
    barrier = lanes.blocks.mbarriers.get((instance, offset))
    if barrier is None:
        raise KernelFault(f"no barrier was initialized at byte {offset} of shared memory, in {lanes.name(lane)}")
    maker, when = barrier.init
    cluster, member = int(lanes.instance[lane]) // lanes.blocks.cluster, int(lanes.member[lane])
    if maker != member and lanes.clocks.known[cluster, member, maker] < when:
        raise KernelFault(f"{barrier.name} is used by {lanes.name(lane)}, which does not see its initialization yet")
    return barrier


def _by_barrier(lanes: Any, mask: Any, address: Any) -> Iterator[tuple[Mbarrier, np.ndarray]]:
    """Each barrier that active lanes name, with those lanes."""
    instance, offset = shared_place(lanes, address)
    active = lanes.active(mask)
    for key in sorted({(int(instance[lane]), int(offset[lane])) for lane in active}):
        chosen = active[(instance[active] == key[0]) & (offset[active] == key[1])]
        yield barrier_at(lanes, *key, int(chosen[0])), chosen


def _released(lanes: Any, chosen: np.ndarray) -> np.ndarray:
    cluster = int(lanes.instance[chosen[0]]) // lanes.blocks.cluster
    return lanes.clocks.release(cluster, lanes.member[chosen])


@instruction(r"mbarrier\.init(\.shared(::cta)?)?\.b64")
def _init(expressions: Any, one: Instruction) -> Any:
    expressions.names.roles = True
    expressions.names.accessed(8)
    address, count = pointer(expressions, one.operands[0]), expressions.compiled(one.operands[1])

    def evaluate(lanes: Any, mask: Any) -> None:
        instance, offset = shared_place(lanes, address(lanes, mask))
        counts = np.broadcast_to(count(lanes, mask), (lanes.count,))
        for lane in lanes.active(mask):
            key = (int(instance[lane]), int(offset[lane]))
            if key in lanes.blocks.mbarriers:
                raise KernelFault(f"the barrier at byte {key[1]} of shared memory is initialized twice")
            if key[1] % 8:
                raise KernelFault(f"a barrier at byte {key[1]} of shared memory, no multiple of 8")
            memory = lanes.blocks.shared
            cells = memory.cells_of(key[0], key[1], 8)
            memory.accesses.write(lanes.clocks, np.full(len(cells), lanes.uid[lane]), cells)
            cluster, member = int(lanes.instance[lane]) // lanes.blocks.cluster, int(lanes.member[lane])
            lanes.blocks.mbarriers[key] = Mbarrier(
                f"the barrier at byte {key[1]} of shared memory of block {lanes.blocks.first + key[0]}",
                key,
                int(counts[lane]),
                int(counts[lane]),
                lanes.clocks.width,
                (member, int(lanes.clocks.known[cluster, member, member])),
            )

    return evaluate


@instruction(r"mbarrier\.inval.*")
def _inval(expressions: Any, one: Instruction) -> Any:
    address = pointer(expressions, one.operands[0])

    def evaluate(lanes: Any, mask: Any) -> None:
        for barrier, _ in _by_barrier(lanes, mask, address(lanes, mask)):
            del lanes.blocks.mbarriers[barrier.owner]

    return evaluate


@instruction(r"fence\.mbarrier_init\..*")
def _init_fence(expressions: Any, one: Instruction) -> Any:
    def evaluate(lanes: Any, mask: Any) -> None:
        makers = set(lanes.member[lanes.active(mask)].tolist())
        for barrier in lanes.blocks.mbarriers.values():
            barrier.visible = barrier.visible or barrier.init[0] in makers

    return evaluate


@instruction(r"mbarrier\.arrive(\.release)?(\.cta|\.cluster)?(\.shared(::cta|::cluster)?)?\.b64")
def _arrive(expressions: Any, one: Instruction) -> Any:
    expressions.names.roles = True
    operands = list(one.operands)
    address = pointer(expressions, operands[0])
    count = expressions.compiled(operands[1]) if len(operands) > 1 else None

    def evaluate(lanes: Any, mask: Any) -> None:
        each = 1 if count is None else int(np.max(count(lanes, mask)))
        for barrier, chosen in _by_barrier(lanes, mask, address(lanes, mask)):
            barrier.arrive(_released(lanes, chosen), each * len(chosen))

    return evaluate


@instruction(r"mbarrier\.arrive\.expect_tx(\..*)?\.b64")
def _expect(expressions: Any, one: Instruction) -> Any:
    expressions.names.roles = True
    address, size = pointer(expressions, one.operands[0]), expressions.compiled(one.operands[1])

    def evaluate(lanes: Any, mask: Any) -> None:
        sizes = np.broadcast_to(size(lanes, mask), (lanes.count,))
        for barrier, chosen in _by_barrier(lanes, mask, address(lanes, mask)):
            barrier.arrive(_released(lanes, chosen), len(chosen), int(sizes[chosen].sum()))

    return evaluate


@instruction(r"mbarrier\.expect_tx(\..*)?\.b64")
def _expect_only(expressions: Any, one: Instruction) -> Any:
    address, size = pointer(expressions, one.operands[0]), expressions.compiled(one.operands[1])

    def evaluate(lanes: Any, mask: Any) -> None:
        sizes = np.broadcast_to(size(lanes, mask), (lanes.count,))
        for barrier, chosen in _by_barrier(lanes, mask, address(lanes, mask)):
            barrier.bytes += int(sizes[chosen].sum())

    return evaluate


@waits("tirx.cuda.mbarrier_wait", "tirx.cuda.mbarrier_wait_acquire_cluster")
def _wait(expressions: Any, call: Any) -> Any:
    expressions.names.roles = True
    address, parity = pointer(expressions, call.args[0]), expressions.compiled(call.args[1])

    def run(lanes: Any, mask: Any) -> Iterator[Wait]:
        parities = np.broadcast_to(parity(lanes, mask), (lanes.count,)).astype(np.int64)
        if (parities[lanes.active(mask)] >> 1).any():
            raise KernelFault("the parity of a wait is neither 0 nor 1")
        for barrier, chosen in list(_by_barrier(lanes, mask, address(lanes, mask))):
            for phase in np.unique(parities[chosen]):
                threads = chosen[parities[chosen] == phase]
                yield from _until(lanes, barrier, int(phase), threads)

    return run


def _until(lanes: Any, barrier: Mbarrier, parity: int, threads: np.ndarray) -> Iterator[Wait]:
    def ready() -> bool:
        if barrier.phase & 1 == parity:
            barrier.advance()
        return barrier.phase & 1 != parity

    while not ready():
        yield Wait(ready, lambda: f"{lanes.name(int(threads[0]))} waits for parity {parity} of {barrier.text()}")
    if barrier.given is not None:
        cluster = int(lanes.instance[threads[0]]) // lanes.blocks.cluster
        lanes.clocks.acquire(cluster, lanes.member[threads], barrier.given)


@waits("tirx.cuda.warpgroup_sync")
def _warpgroup_sync(expressions: Any, call: Any) -> Any:
    expressions.names.roles = True
    number = expressions.compiled(call.args[0])
    return lambda lanes, mask: _named(lanes, mask, number(lanes, mask), 128, True)


@instruction(r"(barrier(\.cta)?|bar)\.(sync|arrive)(\.aligned)?", waits=True)
def _named_barrier(expressions: Any, one: Instruction) -> Any:
    expressions.names.roles = True
    number = expressions.compiled(one.operands[0])
    count = expressions.compiled(one.operands[1]) if len(one.operands) > 1 else None
    stays = "sync" in one.parts

    def run(lanes: Any, mask: Any) -> Iterator[Wait]:
        expected = lanes.blocks.threads if count is None else int(np.max(count(lanes, mask)))
        yield from _named(lanes, mask, number(lanes, mask), expected, stays)

    return run


def _named(lanes: Any, mask: Any, number: Any, expected: int, stays: bool) -> Iterator[Wait]:
    numbers = np.broadcast_to(number, (lanes.count,))
    for one in np.unique(numbers[lanes.active(mask)]):
        if not 0 <= one < 16:
            raise KernelFault(f"named barrier {int(one)}: there are 0 to 15")
        part = numbers == one if mask is None else (numbers == one) & mask
        yield from block_barrier(lanes, None if part.all() else part, int(one), expected, stays)
