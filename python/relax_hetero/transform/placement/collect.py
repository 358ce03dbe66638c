"""Read the functions of one recursion group into a graph, and keep what the rewriting needs of every binding."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import tvm
from tvm import relax

from ...errors import HeteroError, PlacementError
from ..ir.rewriting import handle
from .callee_summary import RecursionGroup
from .graph import ANY, FuncTree, Graph, Origin, Spot, Tree, nodes_of, place_text
from .program import Program, Record, Scope, Unit
from .read_calls import CallReader
from .trampoline import run
from .trees import fits, names_device


def collect(program: Program, units: Sequence[Unit], groups: Sequence[RecursionGroup]) -> Graph:
    """The graph of one recursion group.

    Parameters
    ----------
    program : Program
    units : sequence of Unit
        The functions of the group; their trees and scopes are filled in.
    groups : sequence of RecursionGroup
        All groups they call, solved.

    Returns
    -------
    graph : Graph

    Raises
    ------
    PlacementError
        For a module that is not in normal form, a device that is not in the list, a call whose callee cannot be known.
    """
    collector = _Collector(program, {unit.name: unit for unit in units}, groups)
    for unit in units:
        collector.signature(unit)
    for unit in units:
        run(collector.function(unit))
    return collector.graph


class _Collector(CallReader):
    def signature(self, unit: Unit) -> None:
        """Nodes of parameters and result, before any body refers to them."""
        unit.access = self.access
        params = [self._parameter(param, unit.name) for param in unit.func.params]
        unit.tree.params = tuple(params)
        unit.tree.ret = self.trees.make(unit.func.ret_ty, None, unit.name)
        self.graph.interface.update(nodes_of(unit.tree))

    def _parameter(self, param: relax.Var, function: str) -> Tree:
        tree = self.trees.make(param.ty, param, function)
        self.trees.declare(param.ty, tree, Origin("parameter", param.name, function))
        self.trees.env[handle(param)] = tree
        return tree

    def function(self, unit: Unit) -> Generator[Any, Any, None]:
        """Walk one function of the module."""
        self.unit, self.name = unit, unit.name
        unit.scope = yield self._scope(unit.func.body, None, 0)
        self._result(unit.scope, unit.func.ret_ty, unit.tree.ret, unit.name)

    def _result(self, scope: Scope, ret_ty: tvm.ir.Type, ret: Tree, name: str) -> None:
        scope.body_want = self.trees.tie(scope.body_tree, ret, Spot(self.name, None, "return"))
        self.trees.declare(ret_ty, ret, Origin("return", name, self.name), [scope.body_tree], fieldwise=True)

    def _scope(self, seq: relax.Expr, parent: Scope | None, index: int) -> Generator[Any, Any, Scope]:
        if not isinstance(seq, relax.SeqExpr):
            seq = relax.SeqExpr([], seq)
        scope = Scope(seq, parent, index, 0 if parent is None else parent.depth + 1)
        records = scope.records
        for block in seq.blocks:
            start = len(records)
            for binding in block.bindings:
                value = binding.value
                record = Record(binding, binding.var, value, len(records))
                self.callees = record.callees
                self.spot = Spot(self.name, record.var)
                try:
                    nested = self._binding(record)
                except HeteroError as error:
                    raise _located(error, record, self.name) from error
                if nested is not None:
                    scopes = []
                    for branch in nested:
                        scopes.append((yield self._scope(branch, scope, record.index)))
                        scopes[-1].is_function = record.func is not None
                    record.scopes = scopes
                    self._after(record)
                self.trees.env[handle(record.var)] = record.home
                records.append(record)
            scope.blocks.append((block, start, len(records)))
        self.callees = scope.callees
        self.spot = Spot(self.name, None)
        scope.body = seq.body
        try:
            scope.body_tree = self._of(scope.body)
        except HeteroError as error:
            raise type(error)(f"{place_text('return', '', self.name)}: {error}") from error
        return scope

    def _binding(self, record: Record) -> Sequence[relax.Expr] | None:
        """Read a binding; the scopes inside it, if any, are read by the caller."""
        value, var = record.value, record.var
        kind = type(value)
        if kind is relax.Call:
            self._call(record, value)
        elif kind is relax.If:
            record.kind, record.op = "if", "If"
            self._host_read(record, [value.cond])
            return (value.true_branch, value.false_branch)
        elif kind is relax.Function:
            record.kind, record.op = "function", "function"
            params = tuple(self._parameter(param, self.name) for param in value.params)
            record.home = record.func = FuncTree(params, self.trees.make(value.ret_ty, None, self.name))
            self.trees.env[handle(var)] = record.home
            return (value.body,)
        elif kind is relax.SeqExpr:
            raise PlacementError("found a nested SeqExpr; run relax.transform.Normalize() first")
        else:
            record.kind, record.op = _BINDING_KINDS.get(kind, ("other", "value"))
            if isinstance(record.binding, relax.MatchCast):
                record.kind, record.op = "alias", "match_cast"
            self._alias(record, self._of(value))
        return None

    def _after(self, record: Record) -> None:
        """What remains of an `If` or a local function once the scopes inside are read."""
        if record.kind == "function":
            assert record.func is not None
            self._result(record.scopes[0], record.value.ret_ty, record.func.ret, record.var.name)
            return
        spot = self._spot(record)
        record.home = self.trees.make(record.var.ty, record.var, self.name)
        operands = [branch.body_tree for branch in record.scopes]
        for branch in record.scopes:
            branch.body_want = self.trees.tie(branch.body_tree, record.home, spot)
        origin = Origin("variable", record.var.name, self.name)
        self.trees.declare(record.var.ty, record.home, origin, operands, fieldwise=True)

    def _alias(self, record: Record, tree: Tree) -> None:
        """A variable that is another value, a tuple of values, a field, a constant or a checked view of one."""
        var, binding = record.var, record.binding
        is_cast = isinstance(binding, relax.MatchCast)
        ty = binding.ty if is_cast else var.ty
        record.args, record.trees = [record.value], [tree]
        if is_cast and isinstance(tree, int) and tree in self.graph.opaque and isinstance(ty, relax.TensorType):
            self._reveal(record, tree, ty)
            return
        declared = names_device(ty)
        if fits(tree, ty) and not declared:
            record.home = tree
            record.produced = tree
            record.wants = ANY
            if isinstance(tree, int) and tree not in self.access:
                self.access[tree] = (var, ())
            return
        spot = self._spot(record)
        home = self.trees.make(ty, var, self.name)
        record.home = record.produced = home
        origin = Origin("match_cast" if is_cast else "variable", var.name, self.name)
        operands = () if is_cast else (tree,)
        record.wants = [self.trees.tie(tree, home, spot)]
        self.trees.declare(ty, home, origin, operands, fieldwise=True)
        constant = self.constant_of(tree)
        if constant is not None and isinstance(home, int):
            self.graph.constants[home] = constant

    def _reveal(self, record: Record, node: int, ty: relax.TensorType) -> None:
        """An ``R.Object`` turns out to be a tensor, where the object is, and that is with the call that made it."""
        var = record.var
        if node in self.makers:
            self.graph.connect(self.makers.pop(node), node)
        home = self.trees.make(ty, var, self.name)
        assert isinstance(home, int)
        site = self.graph.add(self._spot(record))
        self.graph.connect(node, site)
        self.graph.connect(site, home)
        record.home, record.produced = home, node
        self.trees.declare(ty, home, Origin("match_cast", var.name, self.name))


_BINDING_KINDS: dict[type, tuple[str, str]] = {
    relax.Var: ("alias", "alias"),
    relax.DataflowVar: ("alias", "alias"),
    relax.Tuple: ("tuple", "tuple"),
    relax.TupleGetItem: ("getitem", "tuple field"),
    tvm.ir.GenericConst: ("const", "constant"),
}


def _located(error: HeteroError, record: Record, function: str) -> HeteroError:
    """The error with function, variable and op in front, unless it says so already."""
    text = str(error)
    if f"function '{function}'" in text:
        return error
    return type(error)(f"{place_text(record.op or 'value', record.var.name, function)}: {text}")
