"""Construction of a recursion group's placement graph: `_Collector` reads scopes and bindings, `CallReader` calls."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import tvm
from tvm import relax

from ...errors import HeteroError, PlacementError
from ...op.placement import hinted_vdevice
from ..ir.op_names import HINT, TRANSFER
from ..ir.rewriting import global_vars_in, handle
from . import ops
from .clones import RecursionGroup, add_reference
from .graph import ANY, HOST, ConstLeaf, FuncTree, Graph, Location, Origin, Tree, location_text, nodes_of, tensors_of
from .program import CallRef, Program, Record, Scope, Unit
from .trees import Trees, fits, names_device, run

VARIABLE_TYPES = (relax.Var, relax.DataflowVar)


class CallReader:
    """State of the construction for a recursion group, and the sites that calls add to its graph."""

    def __init__(self, program: Program, units: dict[str, Unit], groups: Sequence[RecursionGroup]) -> None:
        self.program = program
        self.units = units
        self.groups = groups
        self.graph = Graph()
        self.trees = Trees(program, self.graph)
        self.access = self.trees.access
        # unit, name: function of the module that is being read.
        self.unit: Unit
        self.name = ""
        self.callees: list[CallRef] = []  # references to Relax functions in the binding that is being read
        self.location = Location("", None)  # location of the binding that is being read
        # Site that produces each ``R.Object``, for an edge between both once a match_cast turns the object into a
        # tensor.
        self.producers: dict[int, int] = {}
        # Handles of function parameters whose types do not name devices: they take tensors on any device.
        self.callbacks: set[int] = set()

    def _tree(self, expr: relax.Expr) -> Tree:
        if type(expr) in VARIABLE_TYPES:
            return self.trees.variable(expr)
        return self.trees.of(expr, self._reference)

    def _reference(self, gvar: tvm.ir.GlobalVar) -> Tree:
        """Record a reference to a function, and return the function's tree; None for a PrimFunc."""
        name = str(gvar.name_hint)
        unit = self.units.get(name)
        if unit is not None:
            self.callees.append(CallRef(unit, {}))
            return unit.tree
        callee = self.program.units.get(name)
        if callee is None:
            return None
        location = Location(self.name, self.location.var, f"call of '{name}'")
        tree, ref = add_reference(self.graph, callee, self.groups[callee.group], location)
        self.callees.append(ref)
        self.unit.calls.append(ref)
        return tree

    def _location(self, record: Record) -> Location:
        return Location(self.name, record.var, record.op)

    def _add_host_read(self, record: Record, args: list[relax.Expr]) -> None:
        """Add operands that the host reads: each is needed there, on whatever device it is."""
        record.args = args
        record.trees = [self._tree(arg) for arg in args]
        record.operand_devices, record.host_read = HOST, True
        for tree in record.trees:
            for leaf in tensors_of(tree):
                if isinstance(leaf, ConstLeaf):
                    leaf.use(HOST)

    def _add_call(self, record: Record, call: relax.Call) -> None:
        op = call.op
        args = list(call.args)
        if type(op) is tvm.ir.Op:
            name = str(op.name)
            record.op = name
            if name == HINT or name == TRANSFER:
                self._add_crossing(record, call, args)
                return
            if name in ops.CALLS_OF_FIRST_ARGUMENT:
                self._add_op(record, call, args, ops.callee_name(call) or "")
                return
            if name == ops.MAKE_CLOSURE:
                self._add_closure(record, args)
                return
            if name in ops.INVOKE_CLOSURE:
                self._add_invocation(record, call, self._tree(args[0]), args, is_closure=True)
                return
            self._add_op(record, call, args, name)
            return
        record.op = ops.callee_name(call) or ""
        if record.op:
            self._add_op(record, call, args, record.op)
        elif isinstance(op, tvm.ir.GlobalVar):
            name = str(op.name_hint)
            tree = self._reference(op)
            record.op = f"call of '{name}'"
            if tree is None:
                record.op = name
                self._add_op(record, call, args, name)
            else:
                self._add_invocation(record, call, tree, args)
        elif type(op) in VARIABLE_TYPES and not isinstance(op.ty, relax.PackedFuncType):
            record.op = f"call of '{op.name}'"
            func = self._tree(op)
            if func is None and handle(op) in self.callbacks:
                func = self._callback_tree(record, op.ty)
            self._add_invocation(record, call, func, args)
        else:
            record.op = "call"
            self._add_op(record, call, args, "")

    def _callback_tree(self, record: Record, ty: relax.FuncType) -> Tree:
        """The tree of a callback for one call; without annotations, its result is on its first tensor's device."""
        func = self.trees.make(ty, None, self.name)
        if isinstance(func, FuncTree) and not names_device(record.var.ty):
            for first in list(nodes_of(func.params))[:1]:
                for node in nodes_of(func.ret):
                    self.trees.tie(first, node, self._location(record))
        return func

    def _add_op(self, record: Record, call: relax.Call, args: list[relax.Expr], name: str) -> None:
        """Add an op whose tensors share a device, or that the host reads, produces or copies."""
        record.kind = "op"
        graph, var = self.graph, record.var
        if name in ops.HOST_READS:
            self._add_host_read(record, args)
        else:
            record.args = args
            record.trees = [self._tree(arg) for arg in args]
        operands: list[int] = []
        constants: list[ConstLeaf] = []
        for tree in record.trees:
            if type(tree) is int:
                operands.append(tree)
            elif tree is not None:
                for leaf in tensors_of(tree):
                    if isinstance(leaf, ConstLeaf):
                        constants.append(leaf)
                    else:
                        operands.append(leaf)
        shares_device = not (record.host_read or name in ops.CROSSING)
        site = ANY
        if shares_device and (operands or constants or names_tensor(var.ty)):
            site = graph.add(self._location(record))
            opaque = graph.opaque
            for node in operands:
                if node not in opaque:
                    graph.connect(node, site)
            for leaf in constants:
                leaf.use(site)
            record.operand_devices = site
        record.site = site
        record.written = () if record.host_read else ops.written_operands(call, len(args))
        result = record.result_device = self.trees.make(var.ty, var, self.name)
        record.produced = result
        self.trees.declare(var.ty, result, Origin("variable", var.name, self.name), operands)
        if len(call.ty_args) and names_device_in(call.ty_args):
            self._declare_ty_args(record, call)
        is_on_host = name in ops.MADE_ON_HOST and self.program.host >= 0
        for node in nodes_of(result):
            if is_on_host:
                graph.host_values.add(node)
            elif site != ANY:
                if node in graph.opaque:
                    self.producers[node] = site
                else:
                    graph.connect(site, node)
        if is_on_host:
            record.produced = HOST

    def _declare_ty_args(self, record: Record, call: relax.Call) -> None:
        """Fix results to the devices of ``out_ty``; if an annotation names another device, ``out_ty`` fixes the op."""
        types = list(call.ty_args)
        ty = types[0] if len(types) == 1 else tvm.ir.TupleType(types)
        origin = Origin("out_ty", record.var.name, self.name)
        self._declare_out(ty, record.result_device, record.site, origin)

    def _declare_out(self, ty: tvm.ir.Type, tree: Tree, site: int, origin: Origin) -> None:
        if isinstance(ty, relax.TensorType) and ty.vdevice is not None and isinstance(tree, int):
            device = self.program.index_of(ty.vdevice, f"'{origin.name}' in function '{origin.function}'")
            annotated = self.graph.fixed.get(tree)
            if annotated is None:
                self.graph.fixed[tree] = (device, origin)
            elif annotated[0] != device and site != ANY:
                self.graph.fixed.setdefault(site, (device, origin))
        elif isinstance(ty, tvm.ir.TupleType) and isinstance(tree, tuple):
            for sub_ty, sub in zip(ty.fields, tree, strict=False):
                self._declare_out(sub_ty, sub, site, origin)

    def _add_crossing(self, record: Record, call: relax.Call, args: list[relax.Expr]) -> None:
        """Add a hint or a transfer: its result is fixed, without an edge from the operand."""
        var, is_hint = record.var, record.op == HINT
        vdevices = self.program.vdevices
        vdevice = hinted_vdevice(call, vdevices) if is_hint else call.attrs.dst_vdevice
        device = self.program.index_of(vdevice, record.op)
        record.kind, record.device = ("hint" if is_hint else "to_vdevice"), device
        record.args, record.trees = args, [self._tree(args[0])]
        result = record.result_device = record.produced = self.trees.make(var.ty, var, self.name)
        origin = Origin(record.kind, var.name, self.name)
        constant = self.constant_of(record.trees[0])
        if constant is not None and isinstance(result, int):
            self.graph.constants[result] = constant
        for leaf in tensors_of(record.trees[0]):
            if isinstance(leaf, ConstLeaf):
                leaf.use(ANY, device)
            elif is_hint:
                self.graph.hints.setdefault(leaf, []).append((device, origin))
        for node in nodes_of(result):
            self.graph.fixed[node] = (device, origin)
        self._check_crossing(var.ty, args[0].ty, result, record)

    def constant_of(self, tree: Tree) -> relax.Expr | None:
        """The value of a tensor that is a constant; None for any other tensor."""
        if isinstance(tree, ConstLeaf):
            return tree.expr
        return self.graph.constants.get(tree) if isinstance(tree, int) else None

    def _check_crossing(self, ty: tvm.ir.Type, source: tvm.ir.Type, tree: Tree, record: Record) -> None:
        """Check the annotation of the result against the destination, unless inference copied it from the operand."""
        if isinstance(ty, tvm.ir.TupleType) and isinstance(tree, tuple):
            sources = source.fields if isinstance(source, tvm.ir.TupleType) else [source] * len(tree)
            for sub, sub_source, sub_tree in zip(ty.fields, sources, tree, strict=False):
                self._check_crossing(sub, sub_source, sub_tree, record)
        elif isinstance(ty, relax.TensorType) and ty.vdevice is not None and isinstance(tree, int):
            declared = self.program.index_of(ty.vdevice, record.op)
            if declared == record.device:
                return
            names = self.program.names
            source_is_placed = isinstance(source, relax.TensorType) and source.vdevice is not None
            if not source_is_placed or self.program.index_of(source.vdevice, record.op) != declared:
                raise PlacementError(
                    f"{location_text(record.op, record.var.name, self.name)} is to {names[record.device]}, but its "
                    f"annotation says {names[declared]}"
                )
            self.graph.inferred[tree] = declared

    def _add_closure(self, record: Record, args: list[relax.Expr]) -> None:
        """Add a closure: the function with its last parameters bound."""
        record.kind, record.args = "op", args
        func, bound = self._tree(args[0]), self._tree(args[1])
        record.trees = [func, bound]
        if not isinstance(func, FuncTree) or not isinstance(bound, tuple):
            self._refuse_unknown_callee(record)
            record.result_device = record.produced = self.trees.make(record.var.ty, record.var, self.name)
            return
        free = len(func.params) - len(bound)
        record.operand_devices = [None, self.trees.tie(bound, func.params[free:], self._location(record))]
        record.result_device = record.produced = FuncTree(func.params[:free], func.ret)

    def _add_invocation(
        self, record: Record, call: relax.Call, func: Tree, args: list[relax.Expr], is_closure: bool = False
    ) -> None:
        """Add a call of a Relax function, a local function, or the closure ``args[0]`` with the tuple ``args[1]``."""
        if not isinstance(func, FuncTree):
            self._refuse_unknown_callee(record)
            self._add_op(record, call, args, "")
            return
        record.kind, record.args = "call", args
        record.written = ops.written_operands(call, len(args))
        location = self._location(record)
        if is_closure:
            record.trees = [None, self._tree(args[1])]
            record.operand_devices = [None, self.trees.tie(record.trees[1], func.params, location)]
        else:
            record.trees = [self._tree(arg) for arg in args]
            record.operand_devices = [
                self.trees.tie(tree, param, location) for tree, param in zip(record.trees, func.params, strict=False)
            ]
        var = record.var
        record.result_device = (
            self.trees.make(var.ty, var, self.name) if not isinstance(func.ret, FuncTree) else func.ret
        )
        record.produced = func.ret
        if record.result_device is not func.ret:
            self.trees.tie(func.ret, record.result_device, location)
            origin = Origin("variable", var.name, self.name)
            self.trees.declare(var.ty, record.result_device, origin, (func.ret,), fieldwise=True)

    def _refuse_unknown_callee(self, record: Record) -> None:
        """Raise an error in a module of several devices; with one device, all parameters are on it."""
        if len(self.program.vdevices) > 1:
            raise PlacementError(
                f"{location_text(record.op, record.var.name, self.name)}: the called function is unknown, and so are "
                "the devices of its parameters; call it by name, or as a local function"
            )


def names_tensor(ty: tvm.ir.Type) -> bool:
    """Return whether a value of this type may be a tensor or contain one."""
    if isinstance(ty, tvm.ir.TupleType):
        return any(names_tensor(field) for field in ty.fields)
    return isinstance(ty, (relax.TensorType, relax.AnyType))


def names_device_in(types: Sequence[tvm.ir.Type]) -> bool:
    """Return whether any of the types names a vdevice."""
    return any(names_device(ty) for ty in types)


def collect(program: Program, units: Sequence[Unit], groups: Sequence[RecursionGroup]) -> Graph:
    """The graph of one recursion group.

    Parameters
    ----------
    program : Program
    units : sequence of Unit
        Functions of the group; their attributes `tree`, `scope` and `access` are set.
    groups : sequence of RecursionGroup
        Groups of all callees, with their solutions.

    Returns
    -------
    graph : Graph

    Raises
    ------
    PlacementError
        For a module that is not in normal form, a device that is not in the list, or a call of an unknown function.
    """
    collector = _Collector(program, {unit.name: unit for unit in units}, groups)
    for unit in units:
        collector.signature(unit)
    for unit in units:
        run(collector.function(unit))
    return collector.graph


class _Collector(CallReader):
    def signature(self, unit: Unit) -> None:
        """Add the nodes of a function's parameters and result, before any body refers to them."""
        unit.access = self.access
        callbacks = [p for p in unit.func.params if isinstance(p.ty, relax.FuncType) and not names_device(p.ty)]
        if callbacks and "global_symbol" in unit.func.attrs and not self._is_called(unit.name):
            self.callbacks.update(map(handle, callbacks))
        params = [self._add_parameter(param, unit.name) for param in unit.func.params]
        unit.tree.params = tuple(params)
        unit.tree.ret = self.trees.make(unit.func.ret_ty, None, unit.name)
        self.graph.signature_nodes.update(nodes_of(unit.tree))

    def _is_called(self, name: str) -> bool:
        """Return whether a function of the module refers to the function of this name."""
        bodies = (unit.func.body for unit in self.program.units.values())
        return any(name == gvar.name_hint for body in bodies for gvar in global_vars_in(body))

    def _add_parameter(self, param: relax.Var, function: str) -> Tree:
        tree = None if handle(param) in self.callbacks else self.trees.make(param.ty, param, function)
        self.trees.declare(param.ty, tree, Origin("parameter", param.name, function))
        self.trees.env[handle(param)] = tree
        return tree

    def function(self, unit: Unit) -> Generator[Any, Any, None]:
        """Read one function of the module."""
        self.unit, self.name = unit, unit.name
        unit.scope = yield self._read_scope(unit.func.body, None, 0)
        self._declare_result(unit.scope, unit.func.ret_ty, unit.tree.ret, unit.name)

    def _declare_result(self, scope: Scope, ret_ty: tvm.ir.Type, ret: Tree, name: str) -> None:
        scope.body_device = self.trees.tie(scope.body_tree, ret, Location(self.name, None, "return"))
        self.trees.declare(ret_ty, ret, Origin("return", name, self.name), [scope.body_tree], fieldwise=True)

    def _read_scope(self, seq: relax.Expr, parent: Scope | None, parent_index: int) -> Generator[Any, Any, Scope]:
        if not isinstance(seq, relax.SeqExpr):
            seq = relax.SeqExpr([], seq)
        scope = Scope(seq, parent, parent_index, 0 if parent is None else parent.depth + 1)
        records = scope.records
        for block in seq.blocks:
            start = len(records)
            for binding in block.bindings:
                record = Record(binding, binding.var, binding.value, len(records))
                self.callees = record.callees
                self.location = Location(self.name, record.var)
                try:
                    nested = self._read_binding(record)
                except HeteroError as error:
                    raise _with_location(error, record, self.name) from error
                if nested is not None:
                    scopes = []
                    for branch in nested:
                        scopes.append((yield self._read_scope(branch, scope, record.index)))
                        scopes[-1].is_function = record.func is not None
                    record.scopes = scopes
                    self._finish_scopes(record)
                self.trees.env[handle(record.var)] = record.result_device
                records.append(record)
            scope.blocks.append((block, start, len(records)))
        self.callees = scope.callees
        self.location = Location(self.name, None)
        scope.body = seq.body
        try:
            scope.body_tree = self._tree(scope.body)
        except HeteroError as error:
            raise type(error)(f"{location_text('return', '', self.name)}: {error}") from error
        return scope

    def _read_binding(self, record: Record) -> Sequence[relax.Expr] | None:
        """Read a binding, and return the bodies of its branches or of its local function, for the caller to read."""
        value, var = record.value, record.var
        kind = type(value)
        if kind is relax.Call:
            self._add_call(record, value)
        elif kind is relax.If:
            record.kind, record.op = "if", "If"
            self._add_host_read(record, [value.cond])
            return (value.true_branch, value.false_branch)
        elif kind is relax.Function:
            record.kind, record.op = "function", "function"
            params = tuple(self._add_parameter(param, self.name) for param in value.params)
            record.result_device = record.func = FuncTree(params, self.trees.make(value.ret_ty, None, self.name))
            self.trees.env[handle(var)] = record.result_device
            return (value.body,)
        elif kind is relax.SeqExpr:
            raise PlacementError("found a nested SeqExpr; run relax.transform.Normalize() first")
        else:
            record.kind, record.op = _BINDING_KINDS.get(kind, ("other", "value"))
            if isinstance(record.binding, relax.MatchCast):
                record.kind, record.op = "alias", "match_cast"
            self._add_alias(record, self._tree(value))
        return None

    def _finish_scopes(self, record: Record) -> None:
        """Finish an `If` or a local function after its scopes are read."""
        if record.kind == "function":
            assert record.func is not None
            self._declare_result(record.scopes[0], record.value.ret_ty, record.func.ret, record.var.name)
            return
        location = self._location(record)
        record.result_device = self.trees.make(record.var.ty, record.var, self.name)
        operands = [branch.body_tree for branch in record.scopes]
        for branch in record.scopes:
            branch.body_device = self.trees.tie(branch.body_tree, record.result_device, location)
        origin = Origin("variable", record.var.name, self.name)
        self.trees.declare(record.var.ty, record.result_device, origin, operands, fieldwise=True)

    def _add_alias(self, record: Record, tree: Tree) -> None:
        """Add a binding without a call: of a variable, tuple, field or constant, or a match_cast."""
        var, binding = record.var, record.binding
        is_cast = isinstance(binding, relax.MatchCast)
        ty = binding.ty if is_cast else var.ty
        record.args, record.trees = [record.value], [tree]
        if is_cast and isinstance(tree, int) and tree in self.graph.opaque and isinstance(ty, relax.TensorType):
            self._add_object_cast(record, tree, ty)
            return
        declared = names_device(ty)
        if fits(tree, ty) and not declared:
            record.result_device = tree
            record.produced = tree
            record.operand_devices = ANY
            if isinstance(tree, int) and tree not in self.access:
                self.access[tree] = (var, ())
            return
        location = self._location(record)
        result = self.trees.make(ty, var, self.name)
        record.result_device = record.produced = result
        origin = Origin("match_cast" if is_cast else "variable", var.name, self.name)
        operands = () if is_cast else (tree,)
        record.operand_devices = [self.trees.tie(tree, result, location)]
        self.trees.declare(ty, result, origin, operands, fieldwise=True)
        constant = self.constant_of(tree)
        if constant is not None and isinstance(result, int):
            self.graph.constants[result] = constant

    def _add_object_cast(self, record: Record, node: int, ty: relax.TensorType) -> None:
        """Add a match_cast of an ``R.Object`` to a tensor, on the device of the call that produced the object."""
        var = record.var
        if node in self.producers:
            self.graph.connect(self.producers.pop(node), node)
        result = self.trees.make(ty, var, self.name)
        assert isinstance(result, int)
        site = self.graph.add(self._location(record))
        self.graph.connect(node, site)
        self.graph.connect(site, result)
        record.result_device, record.produced = result, node
        self.trees.declare(ty, result, Origin("match_cast", var.name, self.name))


_BINDING_KINDS: dict[type, tuple[str, str]] = {
    relax.Var: ("alias", "alias"),
    relax.DataflowVar: ("alias", "alias"),
    relax.Tuple: ("tuple", "tuple"),
    relax.TupleGetItem: ("getitem", "tuple field"),
    tvm.ir.GenericConst: ("const", "constant"),
}


def _with_location(error: HeteroError, record: Record, function: str) -> HeteroError:
    """The error with its location in front, unless its text names the function."""
    text = str(error)
    if f"function '{function}'" in text:
        return error
    return type(error)(f"{location_text(record.op or 'value', record.var.name, function)}: {text}")
