"""The order of nodes: ONNX wants values made before they are read; ONNX Runtime takes any order that has no cycle."""

from __future__ import annotations

from collections.abc import Sequence, Set
from heapq import heapify, heappop, heappush
from typing import Any

import onnx

from ...errors import FrontendError
from .node_names import subgraphs_of


def in_order(proto: onnx.ModelProto, source: str) -> onnx.ModelProto:
    """A model with every node after those that it reads from, in subgraphs and functions too.

    Parameters
    ----------
    proto : onnx.ModelProto
        A model, not written to, that `check_model.check_form` has passed.

    Returns
    -------
    onnx.ModelProto
        The model itself where its order is right, else a copy; nodes that do not wait for others keep their order.

    Raises
    ------
    FrontendError
        If nothing makes what a node reads, or nodes wait for each other; names them.
    """
    if not _Lists(proto, source).unsorted:
        return proto
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for nodes, order in _Lists(copy, source).unsorted:
        rank = {index: place for place, index in enumerate(order)}
        indices = iter(range(len(order)))
        nodes.sort(key=lambda _, rank=rank, indices=indices: rank[next(indices)])
    return copy


class _Lists:
    """The lists of nodes of a model.

    Attributes
    ----------
    unsorted : list of (object, list of int)
        Each list that is out of order, and the indices of its nodes in order; inner lists first.
    """

    def __init__(self, proto: onnx.ModelProto, source: str) -> None:
        self.unsorted: list[tuple[Any, list[int]]] = []
        self._source = source
        self._graph(proto.graph, ())
        for function in proto.functions:
            self._nodes(function.node, set(function.input), ())

    def _graph(self, graph: onnx.GraphProto, around: Sequence[Set[str]]) -> set[str]:
        """Look at a graph inside of scopes, and return the names that it reads from them."""
        own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
        own |= {sparse.values.name for sparse in graph.sparse_initializer}
        return self._nodes(graph.node, own, around, {value.name for value in graph.output})

    def _nodes(
        self, nodes: Any, own: set[str], around: Sequence[Set[str]], outputs: Set[str] = frozenset()
    ) -> set[str]:
        makers: dict[str, int] = {}
        for index, node in enumerate(nodes):
            for name in filter(None, node.output):
                makers.setdefault(name, index)
        given, scopes = (own, *around), (own, makers.keys(), *around)
        every_read = set(outputs)
        waits: list[set[int]] = []
        for index, node in enumerate(nodes):
            read = set(filter(None, node.input))
            for position, name in enumerate(node.input):
                if name and not any(name in scope for scope in scopes):
                    raise FrontendError(
                        f"{self._source}: input {position} of node {_title(node, index)}, {name!r}, has no producer: "
                        "no input, initializer or node makes it"
                    )
            for _, graph in subgraphs_of(node):
                read |= self._graph(graph, scopes)
            # A later node's value of a name that is known around is another one.
            waits.append(
                {
                    makers[name]
                    for name in read & makers.keys()
                    if makers[name] < index or not any(name in scope for scope in given)
                }
            )
            every_read |= read
        if any(max(before, default=-1) >= index for index, before in enumerate(waits)):
            self.unsorted.append((nodes, self._sorted(nodes, waits)))
        return every_read - own - makers.keys()

    def _sorted(self, nodes: Any, waits: Sequence[Set[int]]) -> list[int]:
        missing = [len(before) for before in waits]
        readers: list[list[int]] = [[] for _ in waits]
        for index, before in enumerate(waits):
            for maker in before:
                readers[maker].append(index)
        ready = [index for index, count in enumerate(missing) if count == 0]
        heapify(ready)
        order = []
        while ready:
            order.append(heappop(ready))
            for reader in readers[order[-1]]:
                missing[reader] -= 1
                if missing[reader] == 0:
                    heappush(ready, reader)
        if len(order) < len(waits):
            cycle = ", ".join(_title(nodes[index], index) for index in _cycle(waits, set(order)))
            raise FrontendError(
                f"{self._source}: a cycle of nodes, of which each reads what the next one makes, and the last what the "
                f"first one makes: {cycle}"
            )
        return order


def _cycle(waits: Sequence[Set[int]], sorted_ones: Set[int]) -> list[int]:
    """Nodes each of which waits for the next, the last for the first."""
    path = [next(index for index in range(len(waits)) if index not in sorted_ones)]
    places = {path[0]: 0}
    while True:
        following = min(waits[path[-1]] - sorted_ones)
        if following in places:
            return path[places[following] :]
        places[following] = len(path)
        path.append(following)


def _title(node: onnx.NodeProto, index: int) -> str:
    return f"{node.name or f'{node.op_type}_{index}'!r} ({node.op_type})"
