"""Happens-before order of accesses: vector clocks of threads, and the last accesses of memory.

A thread's clock counts its releases (barriers, arrivals). ``known[d, t, u]`` is the latest clock of thread u that
thread t has synchronized with, both of cluster d of those that run. An access by t at its clock c happens before what
thread u does if ``known[d, u, t] >= c``. Threads of different clusters are never ordered within a launch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .faults import KernelFault


class Clocks:
    """Vector clocks of the threads of some clusters, and of asynchronous copies.

    Attributes
    ----------
    width : int
        Threads of a cluster and one more "thread", that of asynchronous copies.
    known : (clusters, width, width) int32
        The latest clock of a thread (last axis) that a thread (middle axis) has synchronized with.
    fenced : (clusters, width, width) int32
        The same for writes that ``fence.proxy.async`` made visible to asynchronous copies and tensor cores.
    """

    def __init__(self, first: int, clusters: int, threads: int, block: int) -> None:
        self.first, self.clusters, self.block = first, clusters, block
        self.width = threads + 1
        self.known = np.zeros((clusters, self.width, self.width), np.int32)
        each = np.arange(self.width)
        self.known[:, each, each] = 1
        self.fenced = np.zeros_like(self.known)

    def release(self, cluster: int, threads: np.ndarray) -> np.ndarray:
        """Return what these threads know, (2, width); their later work is ordered after it."""
        released = np.stack([table[cluster, threads].max(axis=0) for table in (self.known, self.fenced)])
        self.tick(cluster, threads)
        return released

    def acquire(self, cluster: int, threads: np.ndarray, released: np.ndarray) -> None:
        """Merge what others released into these threads' clocks."""
        for table, one in zip((self.known, self.fenced), released, strict=True):
            table[cluster, threads] = np.maximum(table[cluster, threads], one)

    def fence(self, cluster: int, threads: np.ndarray) -> None:
        """Make what these threads know visible to asynchronous copies and tensor cores."""
        self.fenced[cluster, threads] = np.maximum(self.fenced[cluster, threads], self.known[cluster, threads])
        self.tick(cluster, threads)

    def join(self, cluster: int, threads: np.ndarray) -> None:
        """Synchronize these threads as a barrier does."""
        for table in (self.known, self.fenced):
            table[cluster, threads] = table[cluster, threads].max(axis=0)
        self.tick(cluster, threads)

    def tick(self, cluster: int, threads: np.ndarray) -> None:
        """Order later work of these threads after what they released."""
        self.known[cluster, threads, threads] += 1

    def name(self, uid: int) -> str:
        """A thread in words."""
        cluster, thread = divmod(int(uid), self.width)
        if thread == self.width - 1:
            return f"an asynchronous copy of cluster {cluster}"
        blocks = (self.width - 1) // self.block
        return f"thread {thread % self.block} of block {cluster * blocks + thread // self.block}"


class Accesses:
    """The last write and two of the last reads of each cell of a memory.

    Of reads that no barrier separates, the first and the last are kept: a write that comes without a barrier is found
    if it is unordered with one of them.
    """

    def __init__(self, name: str, cells: int) -> None:
        self.name = name
        self._writer = np.full(cells, -1, np.int32)
        self._write_clock = np.zeros(cells, np.int32)
        self._readers = [np.full(cells, -1, np.int32), np.full(cells, -1, np.int32)]
        self._read_clocks = [np.zeros(cells, np.int32), np.zeros(cells, np.int32)]
        self._atomic = np.zeros(cells, bool)

    def read(
        self, clocks: Clocks, uids: np.ndarray, cells: np.ndarray, asynchronous: bool = False, begins: bool = False
    ) -> None:
        """Threads read cells (flat, of equal length).

        Raises
        ------
        KernelFault
            A cell was written by another thread without a barrier between, or (asynchronous) without a proxy fence.
        """
        self._ordered(
            clocks, uids, cells, self._writer[cells], self._write_clock[cells], "reads", "wrote", asynchronous
        )
        if begins:
            return
        cluster, thread = uids // clocks.width - clocks.first, uids % clocks.width
        now = clocks.known[cluster, thread, thread]
        last, first = self._readers
        old = last[cells]
        fresh = (old < 0) | self._happened(clocks, uids, old, self._read_clocks[0][cells])
        # An access that is not after the kept ones joins them: the first one stays beside the last.
        start = cells[fresh][::-1]
        first[start], self._read_clocks[1][start] = uids[fresh][::-1], now[fresh][::-1]
        last[cells], self._read_clocks[0][cells] = uids, now

    def write(
        self,
        clocks: Clocks,
        uids: np.ndarray,
        cells: np.ndarray,
        atomic: bool = False,
        asynchronous: bool = False,
        when: np.ndarray | None = None,
        begins: bool = False,
    ) -> None:
        """Threads write cells (flat, of equal length).

        Parameters
        ----------
        asynchronous : bool
            Whether copies write that see only what ``fence.proxy.async`` is between.
        when : np.ndarray, optional
            The threads' clocks as of the write, where it was issued earlier.
        begins : bool
            Whether the write is only issued: others must have finished, but nothing is written yet.

        Raises
        ------
        KernelFault
            Another thread reads or writes a cell without a barrier between.
        """
        writer = self._writer[cells]
        if atomic:
            plain = ~self._atomic[cells]
            self._ordered(
                clocks, uids[plain], cells[plain], writer[plain], self._write_clock[cells[plain]], "adds to", "wrote"
            )
        else:
            self._ordered(clocks, uids, cells, writer, self._write_clock[cells], "writes", "wrote", asynchronous)
        for reader, clock in zip(self._readers, self._read_clocks, strict=True):
            self._ordered(clocks, uids, cells, reader[cells], clock[cells], "writes", "read")
        if begins:
            return
        cluster, thread = uids // clocks.width - clocks.first, uids % clocks.width
        self._writer[cells] = uids
        self._write_clock[cells] = clocks.known[cluster, thread, thread] if when is None else when
        self._atomic[cells] = atomic
        twice = self._writer[cells] != uids
        if not atomic and twice.any():
            first = int(np.flatnonzero(twice)[0])
            raise KernelFault(
                f"race: {clocks.name(uids[first])} and {clocks.name(self._writer[cells[first]])} write "
                f"{self._cell(cells[first])} in the same statement"
            )

    def versions(self, cells: np.ndarray) -> np.ndarray:
        """Numbers of the writes that the cells hold."""
        return np.stack([self._writer[cells], self._write_clock[cells]])

    def _happened(self, clocks: Clocks, uids: np.ndarray, others: np.ndarray, when: np.ndarray) -> np.ndarray:
        cluster = uids // clocks.width - clocks.first
        same = others // clocks.width == uids // clocks.width
        return same & ((others == uids) | (clocks.known[cluster, uids % clocks.width, others % clocks.width] >= when))

    def _ordered(
        self,
        clocks: Clocks,
        uids: np.ndarray,
        cells: np.ndarray,
        others: np.ndarray,
        when: np.ndarray,
        does: str,
        did: str,
        asynchronous: bool = False,
    ) -> None:
        suspect = (others >= 0) if asynchronous else (others >= 0) & (others != uids)
        if not suspect.any():
            return
        chosen = np.flatnonzero(suspect)
        uids, others, when = uids[chosen], others[chosen], when[chosen]
        good = self._happened(clocks, uids, others, when)
        if not good.all():
            i = int(np.flatnonzero(~good)[0])
            raise KernelFault(
                f"race: {clocks.name(uids[i])} {does} {self._cell(cells[chosen[i]])}, which "
                f"{clocks.name(others[i])} {did}, and no barrier is between the two"
            )
        if asynchronous:
            cluster = uids // clocks.width - clocks.first
            by_threads = others % clocks.width != clocks.width - 1
            ordered = clocks.fenced[cluster, uids % clocks.width, others % clocks.width] >= when
            bad = by_threads & ~ordered
            if bad.any():
                i = int(np.flatnonzero(bad)[0])
                raise KernelFault(
                    f"missing fence.proxy.async: {self._cell(cells[chosen[i]])}, written by {clocks.name(others[i])} "
                    f"with an ordinary store, is used by an asynchronous copy or a tensor core ({does})"
                )

    def _cell(self, cell: Any) -> str:
        return f"{self.name}, cell {int(cell)}"
