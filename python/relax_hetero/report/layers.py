"""Layers of a graph: which node lies in which row of a picture, and where in the row.

The usual three steps: a row is one more than the last row of what a node reads; edges over several rows get a place in
each; rows are sorted by the places of their neighbours, down and up, a few times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_SWEEPS = 4


@dataclass(frozen=True)
class Layers:
    """Where the nodes of a graph lie.

    Attributes
    ----------
    rows : list of list of int
        Each row's nodes, from left to right; numbers below 0 are places that an edge passes.
    paths : dict of (int, int) to list of int
        For each edge the nodes and places that it touches, from its beginning to its end.
    """

    rows: list[list[int]]
    paths: dict[tuple[int, int], list[int]]


def layers_of(nodes: Sequence[int], edges: Iterable[tuple[int, int]], close: Iterable[int] = ()) -> Layers:
    """The rows of a graph without cycles.

    Parameters
    ----------
    nodes : sequence of int
        In an order in which edges lead from earlier to later ones; others are ignored.
    close : iterable of int
        Nodes without a maker that lie just above their first reader, as weights do.
    """
    position = {node: number for number, node in enumerate(nodes)}
    kept = sorted({(a, b) for a, b in edges if a in position and b in position and position[a] < position[b]})
    makers: dict[int, list[int]] = {node: [] for node in nodes}
    readers: dict[int, list[int]] = {node: [] for node in nodes}
    for a, b in kept:
        makers[b].append(a)
        readers[a].append(b)
    row: dict[int, int] = {}
    for node in nodes:
        row[node] = 1 + max((row[maker] for maker in makers[node]), default=-1)
    for node in close:
        if readers[node] and not makers[node]:
            row[node] = max(0, min(row[reader] for reader in readers[node]) - 1)
    rows: list[list[int]] = [[] for _ in range(1 + max(row.values(), default=-1))]
    for node in nodes:
        rows[row[node]].append(node)
    paths: dict[tuple[int, int], list[int]] = {}
    above: dict[int, list[int]] = {}
    below: dict[int, list[int]] = {}
    place = -1
    for a, b in kept:
        path = [a]
        for number in range(row[a] + 1, row[b]):
            rows[number].append(place)
            path.append(place)
            place -= 1
        path.append(b)
        paths[a, b] = path
        for upper, lower in zip(path, path[1:], strict=False):
            below.setdefault(upper, []).append(lower)
            above.setdefault(lower, []).append(upper)
    for sweep in range(_SWEEPS):
        downwards = sweep % 2 == 0
        for number in range(len(rows)) if downwards else reversed(range(len(rows))):
            _sort(rows[number], above if downwards else below, _places(rows))
    return Layers(rows, paths)


def _places(rows: Sequence[Sequence[int]]) -> dict[int, float]:
    """Where each node is in its row, from the row's middle."""
    return {node: number - (len(row) - 1) / 2 for row in rows for number, node in enumerate(row)}


def _sort(row: list[int], neighbours: Mapping[int, Sequence[int]], places: Mapping[int, float]) -> None:
    def wish(node: int) -> float:
        found = [places[other] for other in neighbours.get(node, ())]
        return sum(found) / len(found) if found else places[node]

    row.sort(key=wish)
