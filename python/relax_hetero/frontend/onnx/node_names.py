"""Unique names for the nodes of an ONNX model."""

from __future__ import annotations

import keyword
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import onnx

from ...errors import FrontendError
from .functions import FunctionTable, function_of, function_table

# Limit of all names together; a name in a function's body is prefixed by the names of all enclosing calls.
_MAX_LETTERS = 1 << 27


@dataclass(frozen=True, eq=False)
class NodeInfo:
    """Names of a node."""

    # Unique in the model: the node's own name, or ``OpType_index`` with its position in its graph. A nameless node in a
    # branch of an `If` is ``<If>/then_branch/OpType_index``; a node in the body of a function of the model is
    # ``<call>/<name in the function>``. Duplicates get ``_1``, ``_2`` ….
    name: str
    # Other names that patterns match: its own name (which may not be unique), its op type, and those of enclosing
    # calls.
    aliases: tuple[str, ...]
    op_type: str
    domain: str
    overload: str
    # Attribute name (``"body"`` for a call of a function) -> the nodes of that subgraph, in order.
    subgraphs: dict[str, list[NodeInfo]] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name!r} ({f'{self.domain}.' if self.domain else ''}{self.op_type})"


def name_nodes(proto: onnx.ModelProto) -> list[NodeInfo]:
    """Name the nodes of a model's graph and, nested in them, of subgraphs and called functions.

    The model has passed `check_model.check_size`, so that recursive functions are excluded.
    """
    namer = _Namer(function_table(proto), set(_own_names(proto.graph)))
    return namer.graph(proto.graph.node, "", ())


def walk_nodes(nodes: list[NodeInfo]) -> Iterator[NodeInfo]:
    """Iterate over nodes and their subgraphs' nodes, in pre-order."""
    for node in nodes:
        yield node
        for inner in node.subgraphs.values():
            yield from walk_nodes(inner)


def inner_names(nodes: Iterable[onnx.NodeProto], prefix: str) -> list[NodeInfo]:
    """Name the nodes of the body by which ONNX defines an op; users never see these names."""
    infos = []
    for index, node in enumerate(nodes):
        name = f"{prefix}{node.op_type}_{index}"
        inner = {key: inner_names(graph.node, f"{name}/{key}/") for key, graph in subgraphs_of(node)}
        infos.append(NodeInfo(name, (), node.op_type, node.domain, node.overload, inner))
    return infos


def variable_name(name: str) -> str:
    """The name itself, or prefixed by "_" if TVMScript cannot parse it ("1", "if", "main")."""
    is_readable = name[:1].isidentifier() or not (name[:1].isalnum() or name == "")
    return name if is_readable and not keyword.iskeyword(name) and name != "main" else f"_{name}"


def subgraphs_of(node: onnx.NodeProto) -> list[tuple[str, onnx.GraphProto]]:
    """The graphs among a node's attributes, by attribute name."""
    return [(attribute.name, attribute.g) for attribute in node.attribute if attribute.HasField("g")]


def _own_names(graph: onnx.GraphProto) -> Iterator[str]:
    for node in graph.node:
        if node.name:
            yield node.name
        for _, inner in subgraphs_of(node):
            yield from _own_names(inner)


class _Namer:
    """Assigns unique names; an explicit name of a node is never assigned to a nameless one."""

    def __init__(self, functions: FunctionTable, reserved: set[str]) -> None:
        self._functions = functions
        self._reserved = reserved
        self._used: set[str] = set()
        self._suffixes: dict[str, int] = {}
        self._characters = 0

    def graph(self, nodes: Iterable[onnx.NodeProto], prefix: str, aliases: tuple[str, ...]) -> list[NodeInfo]:
        return [self._node(node, index, prefix, aliases) for index, node in enumerate(nodes)]

    def _node(self, node: onnx.NodeProto, index: int, prefix: str, aliases: tuple[str, ...]) -> NodeInfo:
        in_call = bool(aliases)
        own_name = node.name if node.name and not in_call else ""
        name = self._unique(own_name or f"{prefix}{node.name or f'{node.op_type}_{index}'}", is_own=bool(own_name))
        own_aliases = tuple(filter(None, (node.name, node.op_type)))
        function = function_of(node, self._functions)
        if function is not None:
            inner = {"body": self.graph(function.node, f"{name}/", (*aliases, name, *own_aliases))}
        else:
            inner = {key: self.graph(graph.node, f"{name}/{key}/", aliases) for key, graph in subgraphs_of(node)}
        return NodeInfo(name, (*own_aliases, *aliases), node.op_type, node.domain, node.overload, inner)

    def _unique(self, base: str, *, is_own: bool) -> str:
        name, suffix = base, self._suffixes.get(base, 0)
        while name in self._used or (name in self._reserved and not (is_own and name == base)):
            suffix += 1
            name = f"{base}_{suffix}"
        self._suffixes[base] = suffix
        self._used.add(name)
        self._characters += len(name)
        if self._characters > _MAX_LETTERS:
            raise FrontendError(f"the names of nodes take more than {_MAX_LETTERS:,} letters, up to {name[:100]!r}")
        return name
