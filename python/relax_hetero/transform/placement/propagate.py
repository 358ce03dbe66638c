"""Devices of a part of the graph in which several fixed devices meet, and copies may be inserted.

Forward, in program order: an op takes its result's fixed device, else that of its first placed operand, and makes its
results there. Then backward: a free value goes with its first placed use, and so does the op that makes it. Both, in
turn, until nothing changes. What is placed is never moved, so the work is linear in the edges but for the queues.
"""

from __future__ import annotations

import heapq

from .graph import Graph


def propagate(graph: Graph, part: list[int], seeds: dict[int, int]) -> dict[int, int]:
    """The device of every node of a connected part.

    Parameters
    ----------
    graph : Graph
    part : list of int
        All nodes of the part.
    seeds : dict
        Node to its fixed device; at least one.

    Returns
    -------
    devices : dict
        Node to device, for all of `part`.
    """
    return _Flow(graph, seeds).run()


class _Flow:
    def __init__(self, graph: Graph, seeds: dict[int, int]) -> None:
        self.graph = graph
        self.devices: dict[int, int] = {}
        # Sites to visit forward, earliest first; values to visit backward, latest first (negated).
        self.forward: list[int] = []
        self.backward: list[int] = []
        for node, device in sorted(seeds.items()):
            self._place(node, device)

    def run(self) -> dict[int, int]:
        """Forward and backward until nothing is left."""
        while self.forward or self.backward:
            while self.forward:
                self._visit_site(heapq.heappop(self.forward))
            while self.backward:
                self._visit_value(-heapq.heappop(self.backward))
        return self.devices

    def _place(self, node: int, device: int) -> None:
        self.devices[node] = device
        if self.graph.is_site(node):
            for value in self.graph.targets[node]:
                if value not in self.devices:
                    self._place(value, device)
            for value in self.graph.sources[node]:
                if value not in self.devices:
                    heapq.heappush(self.backward, -value)
        else:
            for site in (*self.graph.targets[node], *self.graph.sources[node]):
                if site not in self.devices:
                    heapq.heappush(self.forward, site)

    def _visit_site(self, site: int) -> None:
        if site in self.devices:
            return
        for value in (*self.graph.targets[site], *self.graph.sources[site]):
            if value in self.devices:
                self._place(site, self.devices[value])
                return

    def _visit_value(self, value: int) -> None:
        if value in self.devices:
            return
        for site in self.graph.targets[value]:
            if site in self.devices:
                self._place(value, self.devices[site])
                break
        for site in self.graph.sources[value]:
            if site not in self.devices:
                self._visit_site(site)
