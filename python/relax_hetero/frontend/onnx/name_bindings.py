"""Relax functions of an imported graph, with node names, and devices if any, on their bindings."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping

import tvm
from tvm import relax

from ...op.require import is_requirement
from ...tir.core.walks import replaced
from ...transform.ir.named_sizes import named_sizes
from ...transform.ir.requirements import symbols_in
from ...transform.ir.rewriting import with_fresh_sizes
from .control_flow.subgraphs import ImportedLoop
from .importer import ImportedGraph
from .node_names import NodeInfo, variable_name

DeviceOf = Callable[[NodeInfo], "tvm.relax.VDevice"]  # the vdevice of a node


def build_function(
    imported: ImportedGraph,
    # NodeInfo -> VDevice. If given, the types of a node's bindings carry its device, which RealizeVDevice treats as
    # fixed; parameters stay free.
    device_of: DeviceOf | None = None,
) -> relax.Function:
    """The Relax function of an imported graph.

    The first output of a node has the node's name, its other bindings have that name and a number. All bindings
    except `If` and match_cast are in dataflow blocks.
    """
    return _FunctionBuilder(imported, device_of).function()


def build_loops(imported: ImportedGraph, device_of: DeviceOf | None = None) -> dict[tvm.ir.GlobalVar, relax.Function]:
    """The private functions of an imported graph's loops; see `build_function`."""
    return {loop.gv: _FunctionBuilder(imported, device_of).loop(loop) for loop in imported.loops}


def origins_of(imported: ImportedGraph) -> dict[str, str]:
    """Variable name in the functions of `build_function` and `build_loops` -> name of its node."""
    names = _binding_names(imported)
    return {name: imported.owners[var].name for var, name in names.items() if var in imported.owners}


class _FunctionBuilder:
    """Copies bindings with new variables, whose types are the inferred ones on the node's device.

    (TVM's mutators would infer again, and stock inference refuses operands on several devices.)
    """

    def __init__(self, imported: ImportedGraph, device_of: DeviceOf | None) -> None:
        self._imported = imported
        self._device_of = device_of
        self._names = _binding_names(imported)
        self._vars: dict[relax.Var, relax.Var] = {}

    def function(self) -> relax.Function:
        """The function of the graph."""
        imported = self._imported
        outputs = imported.outputs
        # A single output that is a sequence would look like several outputs.
        is_single = len(outputs) == 1 and not isinstance(outputs[0].ty, tvm.ir.TupleType)
        result = outputs[0] if is_single else relax.Tuple(outputs)
        body = self._sequence(_hoist_known_sizes(imported), result)
        return relax.Function(imported.params, body, replaced(body.body.ty, named_sizes(imported.bindings)[1]), True)

    def loop(self, loop: ImportedLoop) -> relax.Function:
        """The function of a loop; its parameters lack devices."""
        self._vars = {var: relax.Var(var.name, var.ty) for var in loop.captured}
        sizes = [relax.Var("sizes", relax.ShapeType(loop.sizes))] if loop.sizes else []
        params = [*loop.params, *self._vars.values(), *sizes]
        body = self._sequence(loop.bindings, loop.result)
        return with_fresh_sizes(relax.Function(params, body, loop.gv.ty.ret, True))

    def _sequence(self, bindings: Iterable[relax.Binding], result: relax.Expr) -> relax.SeqExpr:
        """Group bindings into dataflow blocks, split at bindings that cannot be in one."""
        groups: list[list[relax.Binding]] = []
        for binding in bindings:
            if not groups or _is_outside_dataflow(binding) or _is_outside_dataflow(groups[-1][-1]):
                groups.append([])
            groups[-1].append(binding)
        # Per group, the variables that are read after it.
        read_later = [set(relax.analysis.free_vars(result))]
        for group in reversed(groups[1:]):
            read_later.append(read_later[-1].union(*(relax.analysis.free_vars(binding.value) for binding in group)))
        blocks = [self._block(group, later) for group, later in zip(groups, reversed(read_later), strict=False)]
        sequence = relax.SeqExpr(blocks, self._expr(result))
        relax.expr._update_type(sequence, sequence.body.ty)
        return sequence

    def _block(self, group: list[relax.Binding], read_later: set[relax.Var]) -> relax.BindingBlock:
        if _is_outside_dataflow(group[0]):
            return relax.BindingBlock([self._binding(binding, relax.Var) for binding in group])
        return relax.DataflowBlock(
            [self._binding(binding, relax.Var if binding.var in read_later else relax.DataflowVar) for binding in group]
        )

    def _binding(self, binding: relax.Binding, kind: type[relax.Var]) -> relax.Binding:
        value = self._expr(binding.value)
        ty = binding.ty if isinstance(binding, relax.MatchCast) else binding.var.ty
        # With its result's type, the operand of a match_cast would make it redundant and it would be dropped.
        value_ty = binding.value.ty if isinstance(binding, relax.MatchCast) else ty
        if self._device_of is not None:
            device = self._device_of(self._imported.owners[binding.var])
            ty, value_ty = on_device(ty, device), on_device(value_ty, device)
        if value is not binding.value and isinstance(value, (relax.Call, relax.If)):
            relax.expr._update_type(value, value_ty)
        var = kind(self._names[binding.var], ty)
        self._vars[binding.var] = var
        return relax.MatchCast(var, value, ty) if isinstance(binding, relax.MatchCast) else relax.VarBinding(var, value)

    def _expr(self, expr: relax.Expr) -> relax.Expr:
        if isinstance(expr, relax.Var):
            return self._vars.get(expr, expr)
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([self._expr(field) for field in expr.fields])
        if isinstance(expr, relax.TupleGetItem):
            return relax.TupleGetItem(self._expr(expr.tuple_value), expr.index)
        if isinstance(expr, relax.Call) and not tvm.ir.is_prim_expr(expr):
            args = [self._expr(arg) for arg in expr.args]
            return relax.Call(expr.op, args, expr.attrs, expr.ty_args, expr.span)
        if isinstance(expr, relax.If):
            return relax.If(self._expr(expr.cond), self._branch(expr.true_branch), self._branch(expr.false_branch))
        return expr

    def _branch(self, branch: relax.Expr) -> relax.SeqExpr:
        if not isinstance(branch, relax.SeqExpr):
            return self._sequence([], branch)
        return self._sequence([binding for block in branch.blocks for binding in block.bindings], branch.body)


def on_device(ty: tvm.ir.Type, vdevice: tvm.relax.VDevice) -> tvm.ir.Type:
    """Copy of a type with every tensor in it on a device."""
    if isinstance(ty, relax.TensorType):
        if ty.shape is not None:
            return relax.TensorType(ty.shape, ty.dtype, vdevice)
        return relax.TensorType(None, ty.dtype, vdevice, ty.ndim)
    if isinstance(ty, tvm.ir.TupleType):
        return tvm.ir.TupleType([on_device(field, vdevice) for field in ty.fields])
    return ty


def _hoist_known_sizes(imported: ImportedGraph) -> list[relax.Binding]:
    """Move bindings that name sizes computable from the parameters' to the front, where they split no block."""
    known = {symbol for param in imported.params for symbol in symbols_in(param.ty)}
    names, _ = named_sizes(imported.bindings)
    hoisted: set[relax.Var] = set()
    first, rest = [], []
    for binding in imported.bindings:
        is_cast = isinstance(binding, relax.MatchCast)
        if binding.var in names and (
            binding.value in hoisted if is_cast else known.issuperset(symbols_in(binding.value))
        ):
            hoisted.add(binding.var)
            known.update(binding.ty.values if is_cast else ())
            first.append(binding)
        else:
            rest.append(binding)
    return first + rest


def _is_outside_dataflow(binding: relax.Binding) -> bool:
    """Return whether a binding is kept out of dataflow blocks.

    An `If` cannot be in one. A match_cast defines sizes, and FuseOps would move kernels that need them before it; a
    requirement defines none.
    """
    if is_requirement(binding.value):
        return False
    return isinstance(binding, relax.MatchCast) or isinstance(binding.value, relax.If)


def _binding_names(imported: ImportedGraph) -> dict[relax.Var, str]:
    """Names of the bound variables, unique and different from the parameters'."""
    bound: dict[NodeInfo, list[relax.Var]] = {}
    for var, info in imported.owners.items():
        bound.setdefault(info, []).append(var)
    parameters = {param.name for param in imported.params}
    used_names = parameters | {variable_name(info.name) for info in bound}
    names: dict[relax.Var, str] = {}
    for info, variables in bound.items():
        result_vars = [var for var in imported.results.get(info, ()) if imported.owners.get(var) is info]
        main = result_vars[0] if result_vars else variables[-1]
        rest = [var for var in variables if var is not main and not var.same_as(main)]
        candidates = _candidates(variable_name(info.name), parameters, used_names)
        names.update(zip([main, *rest], candidates, strict=False))
    return names


def _candidates(name: str, parameters: set[str], used_names: set[str]) -> Iterator[str]:
    """Candidate names: the name itself unless it is a parameter's, then unused numbered ones."""
    if name not in parameters:
        yield name
    for number in itertools.count(1):
        numbered = f"{name}_{number}"
        if numbered not in used_names:
            used_names.add(numbered)
            yield numbered


def annotated_function(
    func: relax.Function,
    graph: ImportedGraph,
    devices: Mapping[NodeInfo, tvm.relax.VDevice],
    default: tvm.relax.VDevice | None,
) -> relax.Function:
    """Copy a function with devices in the types of its bindings; names and blocks are kept.

    `graph`: the function's bindings and their nodes; `devices`: devices of nodes, in place of those in
    types; `default`: device of all other bindings whose types lack one, if any.
    """
    return _DeviceAnnotator(graph, devices, default).annotated(func)


class _DeviceAnnotator(_FunctionBuilder):
    """Copies an existing function with other devices."""

    def __init__(
        self, graph: ImportedGraph, devices: Mapping[NodeInfo, tvm.relax.VDevice], default: tvm.relax.VDevice | None
    ) -> None:
        super().__init__(graph, None)
        self._devices = devices
        self._default = default

    def annotated(self, func: relax.Function) -> relax.Function:
        body = self._branch(func.body)
        return relax.Function(func.params, body, body.body.ty, func.is_pure, func.attrs, func.span)

    def _branch(self, branch: relax.Expr) -> relax.SeqExpr:
        if not isinstance(branch, relax.SeqExpr):
            return self._sequence([], branch)
        blocks = [
            type(block)([self._binding(binding, type(binding.var)) for binding in block.bindings])
            for block in branch.blocks
        ]
        sequence = relax.SeqExpr(blocks, self._expr(branch.body))
        relax.expr._update_type(sequence, sequence.body.ty)
        return sequence

    def _binding(self, binding: relax.Binding, kind: type[relax.Var]) -> relax.Binding:
        ty = binding.ty if isinstance(binding, relax.MatchCast) else binding.var.ty
        device = self._devices.get(self._imported.owners[binding.var])
        if device is None and not _has_device(ty):
            device = self._default
        value = self._expr(binding.value)
        value_ty = binding.value.ty if isinstance(binding, relax.MatchCast) else ty
        if device is not None:
            ty, value_ty = on_device(ty, device), on_device(value_ty, device)
        if value is not binding.value and isinstance(value, (relax.Call, relax.If)):
            relax.expr._update_type(value, value_ty)
        var = kind(str(binding.var.name), ty)
        self._vars[binding.var] = var
        return relax.MatchCast(var, value, ty) if isinstance(binding, relax.MatchCast) else relax.VarBinding(var, value)


def _has_device(ty: tvm.ir.Type) -> bool:
    if isinstance(ty, tvm.ir.TupleType):
        return any(map(_has_device, ty.fields))
    return isinstance(ty, relax.TensorType) and ty.vdevice is not None
