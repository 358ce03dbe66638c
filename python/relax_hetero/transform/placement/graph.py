"""The placement problem as a graph: values and the places where they must agree.

A *value* node stands for one tensor: a parameter, the result of an op, one field of a tuple. A *site* node stands
for a place whose tensors share a device: an op, an annotated binding, the result of an ``If``, an argument passed to
a function. Edges run from operands to sites and from sites to results. `to_vdevice`, hints and host reads have no
edges: they cross devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import tvm
from tvm import relax

# Wanted instead of a node: the host vdevice, or whatever device the value is on.
HOST = -1
ANY = -2


@dataclass(slots=True, eq=False)
class FuncTree:
    """A function value: trees of its parameters and of its result."""

    params: tuple[Tree, ...]
    ret: Tree


@dataclass(slots=True, eq=False)
class ConstLeaf:
    """A constant, which lives wherever it is used; a binding that names it goes with the first use.

    Attributes
    ----------
    expr : relax.Expr
        The constant.
    first_use : int
        Node (or HOST) that the first use wants, ANY while there is none.
    pinned : int
        Device (index) where the first use is a hint or `to_vdevice`, else -1.
    """

    expr: relax.Expr
    first_use: int = ANY
    pinned: int = -1

    def use(self, want: int, device: int = -1) -> None:
        """Note a use, in program order."""
        if self.first_use == ANY and self.pinned < 0:
            self.first_use, self.pinned = want, device


# Where the tensors of a variable are in the graph; it has the structure of the variable's type. None holds no tensor.
Tree: TypeAlias = "None | int | ConstLeaf | FuncTree | tuple[Tree, ...]"


class Origin(NamedTuple):
    """Where a fixed device comes from.

    Attributes
    ----------
    kind : str
        "parameter", "variable", "match_cast", "return", "hint", "to_vdevice", "out_ty" or "callee".
    name : str
        The variable; for "return" and "callee" the function.
    function : str
        The function it stands in.
    because : callable, optional
        For "callee": says what fixes it there.
    """

    kind: str
    name: str
    function: str
    because: Callable[[], str] | None = None

    def __str__(self) -> str:
        return _SENTENCES[self.kind].format(
            name=self.name, function=self.function, because="" if self.because is None else self.because()
        )


_SENTENCES = {
    "parameter": "the annotation of parameter '{name}' of '{function}'",
    "variable": "the annotation of '{name}' in '{function}'",
    "match_cast": "the match_cast of '{name}' in '{function}'",
    "return": "the return annotation of '{name}'",
    "hint": "the hint_on_device of '{name}' in '{function}'",
    "to_vdevice": "the to_vdevice of '{name}' in '{function}'",
    "out_ty": "the out_ty of '{name}' in '{function}'",
    "callee": "function '{name}', where it comes from {because}",
}


class Location(NamedTuple):
    """Description of a node, for messages.

    Attributes
    ----------
    function : str
        Name of the Relax function.
    var : tvm.ir.Var, optional
        The variable; None for the result of a function.
    op : str
        Op of a site, e.g. "relax.add", "call of 'f'", "return". Empty for a value.
    path : tuple of int
        Position inside the variable's tuple.
    """

    function: str
    var: tvm.ir.Var | None
    op: str = ""
    path: tuple[int, ...] = ()

    @property
    def variable(self) -> str:
        """The variable as a reader writes it, e.g. ``t[0]``."""
        name = "result" if self.var is None else str(self.var.name)
        return name + "".join(f"[{index}]" for index in self.path)

    @property
    def where(self) -> str:
        """The place in words: op, variable, function."""
        return location_text(self.op, "" if self.var is None else str(self.var.name), self.function)


@dataclass(slots=True)
class Graph:
    """Nodes are numbered in program order. All tables are indexed by node.

    Attributes
    ----------
    sources, targets : list of list of int
        Operands and results of a site; of a value the sites that make it and those that use it, in program order.
    locations : list of Location
    fixed : dict
        Node to its fixed device (index) and the origin of that.
    hints : dict
        Node to the devices hinted for it (round two), in program order.
    opaque : set
        Values of type ``R.Object``, which may or may not be tensors.
    interface : set
        Nodes through which callers see a function: they stay open where nothing in the function places them.
    made_on_host : set
        Values that the host makes, and copies to their device.
    constants : dict
        Value nodes of annotated variables that are bound to a constant.
    inferred : dict
        Node to a device that its type names only because TVM's inference took it over from the operand of a hint.
    rigid : list
        Pairs that cannot be joined by a transfer: (node, node, site that joins them).
    """

    sources: list[list[int]] = field(default_factory=list)
    targets: list[list[int]] = field(default_factory=list)
    locations: list[Location] = field(default_factory=list)
    fixed: dict[int, tuple[int, Origin]] = field(default_factory=dict)
    hints: dict[int, list[tuple[int, Origin]]] = field(default_factory=dict)
    opaque: set[int] = field(default_factory=set)
    interface: set[int] = field(default_factory=set)
    made_on_host: set[int] = field(default_factory=set)
    constants: dict[int, relax.Expr] = field(default_factory=dict)
    inferred: dict[int, int] = field(default_factory=dict)
    rigid: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, location: Location) -> int:
        """A new node without edges."""
        self.locations.append(location)
        self.sources.append([])
        self.targets.append([])
        return len(self.locations) - 1

    def connect(self, source: int, target: int) -> None:
        """An edge from operand to site, or from site to result."""
        self.targets[source].append(target)
        self.sources[target].append(source)

    def is_site(self, node: int) -> bool:
        """Return whether the node is a site, not a value."""
        return bool(self.locations[node].op)

    def neighbours(self, node: int) -> Iterator[int]:
        """All nodes that share its device."""
        yield from self.sources[node]
        yield from self.targets[node]


def nodes_of(tree: Tree) -> Iterator[int]:
    """The nodes of a tree in order, those of function values included, constants not."""
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
    """The tensors of a tree in order, constants included, without those inside function values."""
    if isinstance(tree, (int, ConstLeaf)):
        yield tree
    elif isinstance(tree, tuple):
        for sub in tree:
            yield from tensors_of(sub)


def location_text(op: str, variable: str, function: str) -> str:
    """Where something is, as messages say it; no variable is the result of the function."""
    if not variable:
        return f"{op} of function '{function}'"
    return f"{op} binding '{variable}' in function '{function}'"
