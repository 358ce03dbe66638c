"""Trees of graph nodes for types and expressions, edges between them, and questions about types.

`run` walks nested scopes without Python's recursion.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import tvm
from tvm import relax

from ...errors import PlacementError
from ..ir.rewriting import handle
from .graph import ConstLeaf, FuncTree, Graph, Location, Origin, Tree, nodes_of, subtree
from .program import Program

TupleType = tvm.ir.TupleType


class Trees:
    """Variables of a recursion group with their trees. `graph`: graph that the methods add to."""

    def __init__(self, program: Program, graph: Graph) -> None:
        self.program = program
        self.graph = graph
        self.env: dict[int, Tree] = {}
        # Variable that contains each value node, and the path into its tuple.
        self.access: dict[int, tuple[relax.Var, tuple[int, ...]]] = {}

    def make(self, ty: tvm.ir.Type, var: relax.Var | None, function: str, path: tuple[int, ...] = ()) -> Tree:
        """New value nodes for a variable of a type, or for a function's result if `var` is None."""
        if isinstance(ty, relax.TensorType) or isinstance(ty, relax.AnyType):
            node = self.graph.add(Location(function, var, "", path))
            if var is not None:
                self.access[node] = (var, path)
            if isinstance(ty, relax.AnyType):
                self.graph.opaque.add(node)
            return node
        if isinstance(ty, TupleType):
            return tuple(self.make(sub, var, function, (*path, index)) for index, sub in enumerate(ty.fields))
        if isinstance(ty, relax.FuncType) and ty.params is not None:
            params = tuple(self.make(sub, None, function) for sub in ty.params)
            return FuncTree(params, self.make(ty.ret, None, function))
        return None

    def declare(
        self, ty: tvm.ir.Type, tree: Tree, origin: Origin, operands: Sequence[Tree] = (), fieldwise: bool = False
    ) -> None:
        """Fix nodes to the devices that their type names.

        The value is computed from `operands`; with `fieldwise` each field from the same field of the operands. TVM
        infers the type of a hint's result from its operand, and types of later results from that, so a device that
        comes from such an operand is not an annotation by the user.
        """
        if isinstance(ty, relax.TensorType):
            vdevice = ty.vdevice
            if vdevice is None or not isinstance(tree, int):
                return
            device = self.program.index_of(vdevice, f"'{origin.name}' in function '{origin.function}'")
            if self.graph.inferred and self._is_inferred(device, [node for sub in operands for node in nodes_of(sub)]):
                self.graph.inferred[tree] = device
            else:
                self.graph.fixed[tree] = (device, origin)
        elif isinstance(ty, TupleType) and isinstance(tree, tuple):
            for index, (sub_ty, sub_tree) in enumerate(zip(ty.fields, tree, strict=False)):
                sub_operands = [subtree(sub, index) for sub in operands] if fieldwise else operands
                self.declare(sub_ty, sub_tree, origin, sub_operands, fieldwise)
        elif isinstance(ty, relax.FuncType) and isinstance(tree, FuncTree):
            for sub_ty, sub_tree in zip(ty.params, tree.params, strict=False):
                self.declare(sub_ty, sub_tree, origin)
            self.declare(ty.ret, tree.ret, origin)

    def _is_inferred(self, device: int, operands: list[int]) -> bool:
        is_inferred = False
        for node in operands:
            is_inferred = is_inferred or self.graph.inferred.get(node) == device
            if self.graph.fixed.get(node, (-1,))[0] == device and self.graph.inferred.get(node) is None:
                return False
        return is_inferred

    def tie(self, source: Tree, target: Tree, location: Location) -> Tree:
        """Connect a value to another that it becomes: an alias, an argument, the result of a branch.

        For every tensor of `source` the node whose device it is needed on.
        """
        if source is None or target is None:
            return None
        if isinstance(target, int):
            if isinstance(source, int):
                return self._join(source, target, location)
            if isinstance(source, ConstLeaf):
                site = target if self.graph.is_site(target) else self.graph.add(location)
                if site != target:
                    self.graph.connect(site, target)
                source.use(site)
                return site
            for node in nodes_of(source):
                self._join(node, target, location, transferable=False)
            return None
        if isinstance(source, tuple) and isinstance(target, tuple):
            return tuple(self.tie(a, b, location) for a, b in zip(source, target, strict=False))
        if isinstance(source, FuncTree) and isinstance(target, FuncTree):
            for source_param, target_param in zip(source.params, target.params, strict=False):
                self._tie_untransferable(target_param, source_param, location)
            self._tie_untransferable(source.ret, target.ret, location)
        elif isinstance(source, int):
            for node in nodes_of(target):
                self._join(source, node, location, transferable=False)
        return None

    def _tie_untransferable(self, source: Tree, target: Tree, location: Location) -> None:
        if isinstance(source, int) and isinstance(target, int):
            self._join(source, target, location, transferable=False)
        elif isinstance(source, tuple) and isinstance(target, tuple):
            for a, b in zip(source, target, strict=False):
                self._tie_untransferable(a, b, location)
        elif isinstance(source, FuncTree) and isinstance(target, FuncTree):
            self.tie(source, target, location)

    def _join(self, source: int, target: int, location: Location, transferable: bool = True) -> int:
        graph = self.graph
        if graph.is_site(source) and not graph.is_site(target) or graph.is_site(target) and not graph.is_site(source):
            graph.connect(source, target)
            site = source if graph.is_site(source) else target
        else:
            site = graph.add(location)
            graph.connect(source, site)
            graph.connect(site, target)
        if not transferable or source in graph.opaque or target in graph.opaque:
            graph.untransferable.append((source, target, site))
        return site

    def variable(self, var: relax.Var) -> Tree:
        """The tree of a variable; None if it lacks tensors.

        Raises PlacementError if it holds tensors and is not in scope.
        """
        tree = self.env.get(handle(var))
        if tree is None and holds_tensors(var.ty) and handle(var) not in self.env:
            raise PlacementError(f"variable '{var.name}' is used where it is not defined")
        return tree

    def of(self, expr: relax.Expr, function_tree: Callable[[tvm.ir.GlobalVar], Tree]) -> Tree:
        """The tree of an argument; `function_tree` gives that of a Relax function named by a GlobalVar.

        Raises PlacementError if the argument is itself a call: the module is not in A-normal form.
        """
        kind = type(expr)
        if kind is relax.DataflowVar or kind is relax.Var:
            return self.variable(expr)
        if kind is relax.Tuple:
            return tuple(self.of(field, function_tree) for field in expr.fields)
        if kind is tvm.ir.GenericConst:
            return ConstLeaf(expr) if isinstance(expr.ty, relax.TensorType) else None
        if kind is relax.TupleGetItem:
            tree = self.of(expr.tuple_value, function_tree)
            return tree[int(expr.index)] if isinstance(tree, tuple) else None
        if kind is tvm.ir.GlobalVar:
            return function_tree(expr)
        if kind in (relax.Call, relax.If, relax.SeqExpr, relax.Function) and holds_tensors(expr.ty):
            raise PlacementError(
                f"found a nested {kind.__name__} where a variable is expected; run relax.transform.Normalize() first: "
                f"{str(expr)[:200]}"
            )
        return None


def holds_tensors(ty: tvm.ir.Type) -> bool:
    """Return whether a value of this type is, or contains, a tensor."""
    if isinstance(ty, TupleType):
        return any(holds_tensors(field) for field in ty.fields)
    return isinstance(ty, (relax.TensorType, relax.FuncType))


def names_device(ty: tvm.ir.Type) -> bool:
    """Return whether a tensor of this type names a vdevice."""
    if isinstance(ty, relax.TensorType):
        return ty.vdevice is not None
    if isinstance(ty, TupleType):
        return any(names_device(field) for field in ty.fields)
    if isinstance(ty, relax.FuncType):
        return any(names_device(param) for param in ty.params or ()) or names_device(ty.ret)
    return False


def fits(tree: Tree, ty: tvm.ir.Type) -> bool:
    """Return whether a tree has the structure of a type, so that it can be the tree of a variable of this type."""
    if isinstance(ty, TupleType):
        return (
            isinstance(tree, tuple)
            and len(tree) == len(ty.fields)
            and all(fits(sub, field) for sub, field in zip(tree, ty.fields, strict=True))
        )
    if isinstance(ty, relax.TensorType):
        return isinstance(tree, (int, ConstLeaf))
    if isinstance(ty, relax.FuncType):
        return isinstance(tree, FuncTree)
    return True


def run(walk: Generator[Any, Any, Any]) -> Any:
    """Run a generator that yields nested generators to run, and receives their return values.

    Parameters
    ----------
    walk : Generator
        Outermost generator.

    Returns
    -------
    result
        Result of `walk`. An exception ends all generators.
    """
    stack = [walk]
    result: Any = None
    while stack:
        try:
            nested = stack[-1].send(result)
        except StopIteration as stop:
            stack.pop()
            result = stop.value
        else:
            stack.append(nested)
            result = None
    return result
