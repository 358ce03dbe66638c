"""Waiting: barriers of blocks, and branches and groups of threads that run concurrently.

A generator yields a `Wait` when its threads cannot go on. Whoever runs generators side by side resumes those whose wait
is over; when none is, the kernel hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .faults import KernelFault
from .warps import WARP

WAITING: dict[str, Callable[[Any, Any], Callable[[Any, Any], Iterator[Any]]]] = {}
"""Compilers of calls in which threads may wait, by the operator's name."""


@dataclass
class Wait:
    """Condition that threads wait for.

    Attributes
    ----------
    ready : callable
        Whether they may go on.
    text : callable
        The wait in words.
    """

    ready: Callable[[], bool]
    text: Callable[[], str]


def waits(*names: str) -> Callable[[Any], Any]:
    """Register a compiler of calls in which threads may wait."""

    def register(handler: Any) -> Any:
        for name in names:
            WAITING[name] = handler
        return handler

    return register


def concurrently(parts: list[Iterator[Any]]) -> Iterator[Wait]:
    """Run generators concurrently until all have ended; yields when none can go on."""
    pending: list[tuple[Iterator[Any], Wait | None]] = [(part, None) for part in parts]
    while pending:
        progress, left = False, []
        for part, wait in pending:
            if wait is not None and not wait.ready():
                left.append((part, wait))
                continue
            progress = True
            try:
                left.append((part, next(part)))
            except StopIteration:
                pass
        pending = left
        if pending and not progress:
            reasons: list[Wait] = [wait for _, wait in pending if wait is not None]
            yield Wait(
                lambda reasons=reasons: any(one.ready() for one in reasons),
                lambda reasons=reasons: "; ".join(one.text() for one in reasons),
            )


def to_the_end(parts: list[Iterator[Any]]) -> None:
    """Run generators concurrently to their end.

    Raises
    ------
    KernelFault
        All that have not ended wait for something that does not come.
    """
    for wait in concurrently(parts):
        raise KernelFault(f"the kernel hangs: {wait.text()}")


@dataclass
class Rendezvous:
    """A barrier of threads of a block or cluster: it opens when the expected number has arrived."""

    name: str
    opened: int = 0
    arrived: list[np.ndarray] = field(default_factory=list)
    known: np.ndarray | None = None
    given: np.ndarray | None = None

    def arrive(self, clocks: Any, cluster: int, members: np.ndarray, expected: int) -> int:
        """Let threads arrive; returns the number of the opening that releases them.

        Raises
        ------
        KernelFault
            More threads arrive than the barrier is for.
        """
        self.arrived.append(members)
        count = sum(len(part) for part in self.arrived)
        if count > expected:
            raise KernelFault(f"{self.name}: {count} threads arrive, it is for {expected}")
        ticket = self.opened
        released = clocks.release(cluster, members)
        self.known = released if self.known is None else np.maximum(self.known, released)
        if count == expected:
            self.arrived, self.opened, self.given, self.known = [], self.opened + 1, self.known, None
        return ticket


def complete_warps(lanes: Any, mask: Any, what: str) -> None:
    """Check that whole warps reach a barrier.

    Raises
    ------
    KernelFault
        Some threads of a warp do not reach it.
    """
    if mask is None:
        return
    warp = lanes.instance * (1 << 20) + lanes.thread // WARP
    inside = np.unique(warp[mask])
    missing = np.isin(warp, inside) & ~mask
    if missing.any():
        lane = int(np.flatnonzero(missing)[0])
        raise KernelFault(
            f"{what} is not reached by all threads: {lanes.name(lane)} passes it by, others of its warp wait"
        )


def block_barrier(
    lanes: Any, mask: Any, number: int = 0, count: int | None = None, wait: bool = True
) -> Iterator[Wait]:
    """A barrier of `count` threads (None: all) of each block that active lanes are of."""
    name = "__syncthreads" if number == 0 else f"named barrier {number}"
    complete_warps(lanes, mask, name)
    blocks = lanes.blocks
    expected = blocks.threads if count is None else count
    active = lanes.active(mask)
    tickets = []
    for instance in np.unique(lanes.instance[active]):
        members = lanes.member[active[lanes.instance[active] == instance]]
        key = (int(instance), number)
        barrier = blocks.barriers.setdefault(key, Rendezvous(f"{name} of block {blocks.first + int(instance)}"))
        cluster = int(instance) // blocks.cluster
        tickets.append((barrier, barrier.arrive(blocks.clocks, cluster, members, expected), cluster, members))
    if not wait:
        return

    def ready() -> bool:
        return all(barrier.opened > ticket for barrier, ticket, _, _ in tickets)

    def text() -> str:
        shut = [barrier for barrier, ticket, _, _ in tickets if barrier.opened <= ticket]
        reached = sum(len(part) for part in shut[0].arrived)
        there = np.concatenate(shut[0].arrived) % blocks.threads
        missing = sorted(set(range(blocks.threads)) - set(there.tolist()))
        return f"{shut[0].name} is not reached by all threads: {reached} of {expected} wait, not thread {missing[:1]}"

    while not ready():
        yield Wait(ready, text)
    for barrier, _, cluster, members in tickets:
        blocks.clocks.acquire(cluster, members, barrier.given)


@waits("tirx.tvm_storage_sync", "tirx.cuda.cta_sync")
def _sync(expressions: Any, call: Any) -> Callable[[Any, Any], Iterator[Any]]:
    scope = str(call.args[0].value) if call.args else "shared"
    if scope == "warp":
        from .calls import HANDLERS

        run = HANDLERS["tirx.cuda.warp_sync"](expressions, call)

        def warp(lanes: Any, mask: Any) -> Iterator[Any]:
            run(lanes, mask)
            return
            yield

        return warp
    return lambda lanes, mask: block_barrier(lanes, mask)
