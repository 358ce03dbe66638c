"""Minimum cut of a small network, exactly: Dinic's algorithm on integer capacities."""

from __future__ import annotations

from collections import deque

INFINITE = 1 << 62


class Network:
    """Nodes 0 … n-1 and directed arcs between them, to be cut between a source and a sink.

    Parameters
    ----------
    num_nodes : int
    """

    def __init__(self, num_nodes: int) -> None:
        self._first: list[list[int]] = [[] for _ in range(num_nodes)]
        self._head: list[int] = []
        self._capacity: list[int] = []

    def add_arc(self, tail: int, head: int, capacity: int, back: int = 0) -> None:
        """An arc, and one in the other direction with capacity `back`."""
        if capacity <= 0 and back <= 0:
            return
        for node, other, size in ((tail, head, capacity), (head, tail, back)):
            self._first[node].append(len(self._head))
            self._head.append(other)
            self._capacity.append(size)

    def source_side(self, source: int, sink: int) -> list[bool]:
        """Which nodes are with the source in the minimum cut that has the fewest there. Uses the network up."""
        while True:
            level = self._levels(source, sink)
            if level[sink] < 0:
                return [depth >= 0 for depth in level]
            self._saturate(source, sink, level)

    def _levels(self, source: int, sink: int) -> list[int]:
        head, capacity = self._head, self._capacity
        level = [-1] * len(self._first)
        level[source] = 0
        queue = deque([source])
        while queue:
            node = queue.popleft()
            if level[sink] >= 0 and level[node] >= level[sink]:
                break
            for arc in self._first[node]:
                if capacity[arc] > 0 and level[head[arc]] < 0:
                    level[head[arc]] = level[node] + 1
                    queue.append(head[arc])
        return level

    def _saturate(self, source: int, sink: int, level: list[int]) -> None:
        """Push flow along shortest paths until each has a full arc."""
        head, capacity, first = self._head, self._capacity, self._first
        position = [0] * len(first)
        path: list[int] = []
        node = source
        while True:
            if node == sink:
                amount = min(capacity[arc] for arc in path)
                full = len(path)
                for index in range(len(path) - 1, -1, -1):
                    arc = path[index]
                    capacity[arc] -= amount
                    capacity[arc ^ 1] += amount
                    if capacity[arc] == 0:
                        full = index
                node = head[path[full] ^ 1]
                del path[full:]
                continue
            arcs = first[node]
            while position[node] < len(arcs):
                arc = arcs[position[node]]
                if capacity[arc] > 0 and level[head[arc]] == level[node] + 1:
                    path.append(arc)
                    node = head[arc]
                    break
                position[node] += 1
            else:
                if not path:
                    return
                node = head[path.pop() ^ 1]
                position[node] += 1
