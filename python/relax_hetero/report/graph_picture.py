"""A graph as a picture: SVG that a notebook shows as it is, without a script, in its own colours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..display.html import Markup, colour, escaped
from ..display.text import bytes_text

# Layers of a graph: which node lies in which row of a picture, and where in the row.
#
# The usual three steps: a row is one more than the last row of what a node reads; edges over several rows get a place
# in each; rows are sorted by the places of their neighbours, down and up, a few times.

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


_BOX, _GAP, _HEIGHT, _ROW, _PASS = 148, 16, 36, 66, 18
MAX_NODES = 250
"""Larger functions are not drawn: nobody could read the picture."""


def function_picture(data: Mapping[str, Any], function: str) -> Markup | None:
    """One function of a report's data, from its inputs down to its results.

    Constants are not drawn; a node says how many it reads.

    Returns
    -------
    Markup or None
        None where the function has more than `MAX_NODES` nodes.
    """
    nodes = {n["id"]: n for n in data["nodes"] if n["function"] == function and n["kind"] != "constant"}
    if not nodes or len(nodes) > MAX_NODES:
        return None
    constants = {n["id"] for n in data["nodes"] if n["kind"] == "constant"}
    reads = Counter(edge["to"] for edge in data["edges"] if edge["from"] in constants)
    edges = {(e["from"], e["to"]): e for e in data["edges"] if e["from"] in nodes and e["to"] in nodes}
    # Inputs, and what is made of constants alone, lie where they are read; the picture is wide only where the graph is.
    layers = layers_of(_in_order(nodes, edges), edges, close=nodes)
    where, width = _positions(layers)
    names = [device["name"] for device in data["devices"]]
    kernels = {node: group["kernel"] for group in data["groups"] for node in group["nodes"]}
    drawn = [_edge(edges[pair], [where[node] for node in path]) for pair, path in layers.paths.items()]
    for number, node in nodes.items():
        drawn.append(_box(node, where[number], names, kernels.get(number, ""), reads[number]))
    height = len(layers.rows) * _ROW
    label = escaped(f"Graph of {function}: {len(nodes)} nodes")
    return Markup(
        f'<svg viewBox="0 0 {width} {height}" width="{width}" style="max-width:none" role="img" aria-label="{label}" '
        f'font-size="11">{"".join(drawn)}</svg>'
    )


def _in_order(nodes: Mapping[int, Any], edges: Mapping[tuple[int, int], Any]) -> list[int]:
    """The nodes, what makes a value before what reads it."""
    waits = Counter(b for _, b in edges)
    readers: dict[int, list[int]] = {}
    for a, b in edges:
        readers.setdefault(a, []).append(b)
    order = [node for node in nodes if not waits[node]]
    for node in order:  # grows meanwhile
        for reader in readers.get(node, ()):
            waits[reader] -= 1
            if not waits[reader]:
                order.append(reader)
    return order


def _positions(layers: Layers) -> tuple[dict[int, tuple[float, float]], int]:
    """The middle of each node, and the width of the picture."""
    widths = [sum(_BOX if node >= 0 else _PASS for node in row) + _GAP * (len(row) + 1) for row in layers.rows]
    width = max(widths)
    where = {}
    for number, row in enumerate(layers.rows):
        x = (width - widths[number]) / 2 + _GAP
        for node in row:
            size = _BOX if node >= 0 else _PASS
            where[node] = (x + size / 2, number * _ROW + _ROW / 2)
            x += size + _GAP
    return where, width


def _edge(edge: Mapping[str, Any], points: Sequence[tuple[float, float]]) -> str:
    (x, y), *rest = points
    y += _HEIGHT / 2
    path = [f"M{x:.0f} {y:.0f}"]
    for number, (to_x, middle) in enumerate(rest):
        is_last = number == len(rest) - 1
        to_y = middle - _HEIGHT / 2
        half = (y + to_y) / 2
        path.append(f"C{x:.0f} {half:.0f} {to_x:.0f} {half:.0f} {to_x:.0f} {to_y:.0f}")
        x, y = to_x, to_y
        if not is_last:  # straight through the row
            y += _HEIGHT
            path.append(f"V{y:.0f}")
    line = 'stroke-width="2.5" stroke-dasharray="5 3"' if edge["transfer"] else 'stroke-width="1.2"'
    title = f"{edge['value']}, {bytes_text(edge['bytes'])}"
    return (
        f'<path d="{"".join(path)}" fill="none" stroke="currentColor" stroke-opacity=".5" {line}>'
        f"<title>{escaped(title)}</title></path>"
    )


def _box(node: Mapping[str, Any], where: tuple[float, float], names: Sequence[str], kernel: str, constants: int) -> str:
    x, y = where[0] - _BOX / 2, where[1] - _HEIGHT / 2
    number = names.index(node["device"]) if node["device"] in names else -1
    values = ", ".join(value_text(value) for value in node["values"])
    first = short_op(node)
    weights = f"reads {constants} constant{'s' * (constants != 1)}" if constants else ""
    onnx = f"ONNX {', '.join(node['onnx'])}" if node["onnx"] else ""
    kernel = f"kernel {kernel}" if kernel else ""
    lines = [f"{node['name']}: {node['op'] or node['kind']}", f"on {node['device']}", values, kernel, weights, onnx]
    title = escaped("\n".join(line for line in [*lines, node["reason"] or ""] if line))
    fill = f'fill="{colour(number)}" fill-opacity="{".25" if node["kind"] in ("op", "transfer") else ".06"}"'
    dashes = ' stroke-dasharray="5 3"' if node["kind"] == "transfer" else ""
    radius = 17 if node["kind"] in ("input", "output") else 4
    return (
        f'<g><title>{title}</title><rect x="{x:.0f}" y="{y:.0f}" width="{_BOX}" height="{_HEIGHT}" rx="{radius}" '
        f'{fill} stroke="{colour(number)}" stroke-width="1.3"{dashes}/>'
        f'<text x="{where[0]:.0f}" y="{y + 15:.0f}" text-anchor="middle" fill="currentColor" font-weight="600">'
        f"{escaped(_fitting(first, 22))}</text>"
        f'<text x="{where[0]:.0f}" y="{y + 29:.0f}" text-anchor="middle" fill="currentColor" fill-opacity=".75">'
        f"{escaped(_fitting(values or node['name'], 25))}</text></g>"
    )


def short_op(node: Mapping[str, Any]) -> str:
    """Op of a node, in a word or two."""
    if node["kind"] in ("input", "output", "constant"):
        return str(node["name"])
    if node["kind"] == "transfer":
        return f"to {node['device']}"
    return str(node["op"]).removeprefix("relax.")


def value_text(value: Mapping[str, Any]) -> str:
    """A value's type: ``float32[n, 64]``."""
    return f"{value['dtype']}[{', '.join(map(str, value['shape']))}]"


def _fitting(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
