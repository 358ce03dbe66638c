"""The placement problem as a graph of values and sites.

A *value* node is one tensor: a parameter, the result of an op, one field of a tuple. A *site* node is a point of the
program whose tensors share a device: an op, an annotated binding, the result of an ``If``, an argument of a call. Edges
run from operands to sites and from sites to results. `to_vdevice`, hints and host reads lack edges: they cross devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import tvm
from tvm import relax

# Special nodes: HOST is on the host's vdevice, ANY on whatever device the value is on.
HOST = -1
ANY = -2


@dataclass(slots=True, eq=False)
class FuncTree:
    """A function value: trees of its parameters and of its result."""

    params: tuple[Tree, ...]
    ret: Tree


@dataclass(slots=True, eq=False)
class ConstLeaf:
    """A constant, which is copied to every device that uses it; its variable is on the device of the first use."""

    expr: relax.Expr  # constant
    first_use: int = ANY  # node (or HOST) of the first use; ANY without a use
    pinned: int = -1  # device (index) of the first use if that is a hint or `to_vdevice`, else -1

    def use(self, node: int, device: int = -1) -> None:
        """Record a use; uses are recorded in program order."""
        if self.first_use == ANY and self.pinned < 0:
            self.first_use, self.pinned = node, device


# Nodes of a value's tensors, nested like the tuples of its type. None: a value without tensors.
Tree: TypeAlias = "None | int | ConstLeaf | FuncTree | tuple[Tree, ...]"


class Origin(NamedTuple):
    """Origin of a fixed device."""

    kind: str  # "parameter", "variable", "match_cast", "return", "hint", "to_vdevice", "out_ty" or "callee"
    name: str  # variable; for "return" and "callee" the function
    function: str  # function that contains it
    # For "callee": function that computes the text of the origin inside the callee, which only messages need.
    origin_in_callee: Callable[[], str] | None = None

    def __str__(self) -> str:
        inner = "" if self.origin_in_callee is None else self.origin_in_callee()
        return _ORIGIN_TEXTS[self.kind].format(name=self.name, function=self.function, origin_in_callee=inner)


_ORIGIN_TEXTS = {
    "parameter": "the annotation of parameter '{name}' of '{function}'",
    "variable": "the annotation of '{name}' in '{function}'",
    "match_cast": "the match_cast of '{name}' in '{function}'",
    "return": "the return annotation of '{name}'",
    "hint": "the hint_on_device of '{name}' in '{function}'",
    "to_vdevice": "the to_vdevice of '{name}' in '{function}'",
    "out_ty": "the out_ty of '{name}' in '{function}'",
    "callee": "function '{name}', from {origin_in_callee}",
}


class Location(NamedTuple):
    """Description of a node, for messages."""

    function: str  # name of the Relax function
    var: tvm.ir.Var | None  # variable; None for the result of a function
    op: str = ""  # Op of a site, e.g. "relax.add", "call of 'f'", "return"; empty for a value.
    path: tuple[int, ...] = ()  # path inside the variable's tuple

    @property
    def variable(self) -> str:
        """The variable with its path, e.g. ``t[0]``."""
        name = "result" if self.var is None else str(self.var.name)
        return name + "".join(f"[{index}]" for index in self.path)

    @property
    def where(self) -> str:
        """The location as text: op, variable, function."""
        return location_text(self.op, "" if self.var is None else str(self.var.name), self.function)


@dataclass(slots=True)
class Graph:
    """Graph of a recursion group. Nodes are numbered in program order; all tables are indexed by node."""

    # Neighbours against and along the edges: of a site its operands and results, of a value its producers and users.
    sources: list[list[int]] = field(default_factory=list)
    targets: list[list[int]] = field(default_factory=list)
    locations: list[Location] = field(default_factory=list)  # location of each node
    fixed: dict[int, tuple[int, Origin]] = field(default_factory=dict)  # fixed device (index) of a node, and its origin
    # Devices that are hinted for a node, in program order; the first one counts if nothing fixes the node.
    hints: dict[int, list[tuple[int, Origin]]] = field(default_factory=dict)
    opaque: set[int] = field(default_factory=set)  # values of type ``R.Object``, which may be tensors or not
    # Nodes of parameters and results: callers place them if the function does not.
    signature_nodes: set[int] = field(default_factory=set)
    host_values: set[int] = field(default_factory=set)  # values that the host produces and copies to their device
    # Constant of each value node of an annotated variable that is bound to a constant.
    constants: dict[int, relax.Expr] = field(default_factory=dict)
    # Device in the type of a node that TVM's inference copied from the operand of a hint.
    inferred: dict[int, int] = field(default_factory=dict)
    # Pairs of nodes between which no transfer is possible: (source, target, site between them).
    untransferable: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, location: Location) -> int:
        """Add a node without edges."""
        self.locations.append(location)
        self.sources.append([])
        self.targets.append([])
        return len(self.locations) - 1

    def connect(self, source: int, target: int) -> None:
        """Add an edge from operand to site, or from site to result."""
        self.targets[source].append(target)
        self.sources[target].append(source)

    def is_site(self, node: int) -> bool:
        """Return whether the node is a site, not a value."""
        return bool(self.locations[node].op)

    def neighbours(self, node: int) -> Iterator[int]:
        """All adjacent nodes, which share the node's device unless a transfer is inserted between them."""
        yield from self.sources[node]
        yield from self.targets[node]


def nodes_of(tree: Tree) -> Iterator[int]:
    """The nodes of a tree in order, including those of function values, without constants."""
    if isinstance(tree, int):
        yield tree
    elif isinstance(tree, tuple):
        for sub in tree:
            yield from nodes_of(sub)
    elif isinstance(tree, FuncTree):
        for sub in tree.params:
            yield from nodes_of(sub)
        yield from nodes_of(tree.ret)


def tensors_of(tree: Tree) -> Iterator[int | ConstLeaf]:
    """The tensors of a tree in order, including constants, without those of function values."""
    if isinstance(tree, (int, ConstLeaf)):
        yield tree
    elif isinstance(tree, tuple):
        for sub in tree:
            yield from tensors_of(sub)


def subtree(tree: Tree, index: int) -> Tree:
    """A field of a tuple's tree; of any other tree, which applies to all fields, the tree itself."""
    return tree[index] if isinstance(tree, tuple) and index < len(tree) else tree


def location_text(op: str, variable: str, function: str) -> str:
    """A location for messages; without a variable, the result of the function."""
    if not variable:
        return f"{op} of function '{function}'"
    return f"{op} binding '{variable}' in function '{function}'"
