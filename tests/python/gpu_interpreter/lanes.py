"""Threads that run together, and the shared state of the blocks that run at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from .races import Clocks


class Blocks:
    """Blocks that run at a time: one cluster, or several blocks of a kernel without clusters.

    Attributes
    ----------
    first : int
        Number of the first block.
    count, threads, cluster : int
        Blocks here, threads of a block, blocks of a cluster.
    shared : Addressed
        The shared memory of the blocks.
    mbarriers : dict
        Barriers in shared memory, by block and byte offset.
    running : (count,) int64
        Number of each block's thread groups that have not ended.
    """

    def __init__(self, first: int, count: int, threads: int, cluster: int) -> None:
        self.first, self.count, self.threads, self.cluster = first, count, threads, cluster
        self.clocks = Clocks(first // cluster, -(-count // cluster), threads * cluster, threads)
        self.shared: Any = None
        self.strict = True
        self.memories: dict[int, Any] = {}
        self.barriers: dict[Any, Any] = {}
        self.mbarriers: dict[tuple[int, int], Any] = {}
        self.running = np.ones(count, np.int64)
        self.state: dict[str, Any] = {}


class Lanes:
    """Threads whose instructions are executed together, an axis of numpy's arrays.

    Attributes
    ----------
    count : int
        Threads.
    thread : (count,) int32
        The thread's number in its block.
    instance : (count,) int64
        The block, counted from the first that runs.
    uid : (count,) int64
        The thread's number for `Clocks`.
    slots : list
        Values of variables.
    """

    def __init__(self, blocks: Blocks, thread: np.ndarray, instance: np.ndarray, slots: list[Any]) -> None:
        self.blocks, self.clocks = blocks, blocks.clocks
        self.count = len(thread)
        self.everyone = np.arange(self.count)
        self.thread, self.instance = thread, instance
        rank = instance % blocks.cluster
        self.member = rank * blocks.threads + thread
        self.uid = ((blocks.first + instance) // blocks.cluster) * self.clocks.width + self.member
        self.slots = slots
        self.locals: dict[int, Any] = {}
        self.state: dict[str, Any] = {}

    def name(self, lane: int) -> str:
        """A thread in words."""
        return f"thread {int(self.thread[lane])} of block {self.blocks.first + int(self.instance[lane])}"

    def active(self, mask: Any) -> np.ndarray:
        """Numbers of the active lanes."""
        return self.everyone if mask is None else np.flatnonzero(mask)

    jumped: np.ndarray | None = None
    """Mask of lanes that returned, left the loop or its iteration."""

    _kinds: dict[str, np.ndarray] | None = None

    def leave(self, kind: str, mask: np.ndarray) -> None:
        """Record that active lanes return ("returned"), leave the loop ("broken") or this iteration ("continued")."""
        if self._kinds is None:
            self._kinds = {name: np.zeros(self.count, bool) for name in ("returned", "broken", "continued")}
        self._kinds[kind] = self._kinds[kind] | mask
        self._combine()

    def enter_loop(self) -> Any:
        """Begin a loop; returns the state that `leave_loop` needs."""
        saved = None if self._kinds is None else (self._kinds["broken"], self._kinds["continued"])
        if self._kinds is not None:
            self._kinds["broken"] = self._kinds["continued"] = np.zeros(self.count, bool)
            # Lanes that left an outer loop are not active in this one.
        return saved

    def next_round(self) -> None:
        """Reactivate lanes that left only the iteration."""
        if self._kinds is not None:
            self._kinds["continued"] = np.zeros(self.count, bool)
            self._combine()

    def leave_loop(self, saved: Any) -> None:
        """Reactivate lanes that left this loop."""
        if self._kinds is not None:
            none = np.zeros(self.count, bool)
            self._kinds["broken"], self._kinds["continued"] = saved if saved is not None else (none, none)
            self._combine()

    def _combine(self) -> None:
        assert self._kinds is not None
        every = self._kinds["returned"] | self._kinds["broken"] | self._kinds["continued"]
        self.jumped = every if every.any() else None

    def members(self, mask: Any) -> list[tuple[int, np.ndarray]]:
        """The active threads of each cluster, as numbers in it."""
        active = self.active(mask)
        cluster = self.instance[active] // self.blocks.cluster
        return [(int(one), self.member[active[cluster == one]]) for one in np.unique(cluster)]
