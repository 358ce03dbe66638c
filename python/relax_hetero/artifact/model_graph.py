"""The graph of a placed model's ops for reports, as plain data.

Texts are stored once, in a table, so that a graph of thousands of ops stays small.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

INPUT, CONSTANT, OP, TRANSFER, OUTPUT = "input", "constant", "op", "transfer", "output"
KINDS = (INPUT, CONSTANT, OP, TRANSFER, OUTPUT)


@dataclass(frozen=True)
class GraphValue:
    """A tensor type, with indices into the table of texts."""

    IS_ROW = True
    shape: tuple[int | str, ...] | None  # extents, symbolic ones as text; None if the shape is unknown
    dtype: int  # text of the element type; empty if unknown
    bytes: int  # size; -1 if it depends on a symbolic extent


@dataclass(frozen=True)
class GraphNode:
    """An input, a constant, an op, a transfer or an output, with indices into tables."""

    IS_ROW = True
    kind: int  # index in `KINDS`
    name: int  # text: the variable that holds the result
    op: int  # text: ``"relax.add"``; empty if there is none
    source: int  # text: the node's name in the model's file; empty if unknown
    device: int  # text: ``"llvm:0"``; empty if unknown
    values: tuple[int, ...]  # results in the table of values: several for a tuple
    # Flattened pairs of a node of the same function and an index of its results; -1 for all results.
    reads: tuple[int, ...]

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Pairs of a node that is read, and an index of its results."""
        return zip(self.reads[::2], self.reads[1::2], strict=True)


@dataclass(frozen=True)
class FunctionGraph:
    """One function; each node reads only nodes before it."""

    IS_ROW = True
    name: str
    nodes: tuple[GraphNode, ...]


@dataclass(frozen=True)
class ModelGraph:
    """The graph of a model."""

    texts: tuple[str, ...]  # names, ops, devices and element types, each once
    values: tuple[GraphValue, ...]  # distinct tensor types
    functions: tuple[FunctionGraph, ...]  # functions in order of names


def check_graph(graph: ModelGraph) -> None:
    """Refuse a graph with references to absent texts, values or nodes.

    Raises ValueError for the first invalid reference.
    """
    texts, values = len(graph.texts), len(graph.values)
    for value in graph.values:
        expect(value.dtype, range(texts), "an element type of the graph")
        if value.bytes < -1:
            raise ValueError(f"a value of the graph has {value.bytes} bytes, expected -1 or more")
    for function in graph.functions:
        where = f"of the graph of {function.name!r}"
        for index, node in enumerate(function.nodes):
            expect(node.kind, range(len(KINDS)), f"the kind of node {index} {where}")
            for text in (node.name, node.op, node.source, node.device):
                expect(text, range(texts), f"a text of node {index} {where}")
            for value_number in node.values:
                expect(value_number, range(values), f"a value of node {index} {where}")
            if len(node.reads) % 2:
                raise ValueError(f"node {index} {where} reads {len(node.reads)} numbers, expected pairs")
            for read, position in node.pairs():
                expect(read, range(index), f"a node that node {index} {where} reads")
                positions = range(-1, len(function.nodes[read].values))
                expect(position, positions, f"a position that node {index} {where} reads")


def expect(found: int, allowed: range, what: str) -> None:
    """Raise ValueError, which begins with `what`, for a number that is not allowed."""
    if found not in allowed:
        raise ValueError(f"{what} is {found}, expected {allowed.start} to {allowed.stop - 1}")
