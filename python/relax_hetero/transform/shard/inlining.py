"""Inlining of functions with values over a mesh, so that shardings spread through calls."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tvm
from tvm import relax, tirx
from tvm_ffi import structural_walk

from ...errors import PlacementError
from ...op.placement import is_hint
from ...op.sharding import SHARD
from ...target.mesh import mesh_of_scope, mesh_positions
from ...tir.core.walks import replaced
from ..ir.rewriting import copy_module, op_name, relax_functions, typed, vdevice_in, walk_bindings, with_body


def with_inlined_calls(mod: tvm.IRModule) -> tvm.IRModule:
    """A module in which functions with values over a mesh are inlined, so that shardings spread.

    Functions that call themselves, as loops do, stay. Raises PlacementError if such a function is called in a local
    function.
    """
    functions = dict(relax_functions(mod))
    called = _called(functions)
    inlined = {gv for gv in _over_meshes(functions, called) if gv not in called[gv]}
    callers = [gv for gv, callees in called.items() if callees & inlined]
    if not callers:
        return mod
    bodies = {gv: functions[gv] for gv in inlined}
    changed: dict[tvm.ir.GlobalVar, relax.Function] = {}
    for gv in sorted(callers, key=lambda gv: len(called[gv])):  # callees first: they call fewer functions
        changed[gv] = _inlined(functions[gv], bodies)
        if left := sorted(each.name_hint for each in callees_of(changed[gv], inlined)):
            raise PlacementError(
                f"function {gv.name_hint!r} calls {left[0]!r}, which has values over a mesh, in a local function; "
                "expected none besides meshes"
            )
        if gv in bodies:
            bodies[gv] = changed[gv]
    unused = {
        gv for gv in inlined & frozenset().union(*called.values()) if "global_symbol" not in (functions[gv].attrs or {})
    }
    return copy_module(mod, {gv: changed.get(gv, func) for gv, func in mod.functions.items() if gv not in unused})


def recursive_functions(mod: tvm.IRModule) -> frozenset[tvm.ir.GlobalVar]:
    """Functions with values over a mesh that call themselves, as loops do."""
    functions = dict(relax_functions(mod))
    called = _called(functions)
    return frozenset(gv for gv in _over_meshes(functions, called) if gv in called[gv])


def _called(
    functions: Mapping[tvm.ir.GlobalVar, relax.Function],
) -> dict[tvm.ir.GlobalVar, frozenset[tvm.ir.GlobalVar]]:
    """Functions that each function calls, and those that these call."""
    called = {gv: callees_of(func, functions) for gv, func in functions.items()}
    while wider := {
        gv: callees | more
        for gv, callees in called.items()
        if not (more := frozenset().union(*(called[callee] for callee in callees))) <= callees
    }:
        called |= wider
    return called


def _over_meshes(
    functions: Mapping[tvm.ir.GlobalVar, relax.Function],
    called: Mapping[tvm.ir.GlobalVar, frozenset[tvm.ir.GlobalVar]],
) -> set[tvm.ir.GlobalVar]:
    """Functions that have values over a mesh, or call a function that has."""
    meshes = {gv for gv, func in functions.items() if has_mesh(func)}
    return {gv for gv, callees in called.items() if gv in meshes or callees & meshes}


def _inlined(func: relax.Function, bodies: Mapping[tvm.ir.GlobalVar, relax.Function]) -> relax.Function:
    """A function with the bindings of those that it calls. They keep their devices, which TVM's inlining loses."""
    return with_body(func, _with_bindings(func.body, bodies))


def _with_bindings(body: relax.SeqExpr, bodies: Mapping[tvm.ir.GlobalVar, relax.Function]) -> relax.SeqExpr:
    blocks = []
    for block in body.blocks:
        bindings: list[relax.Binding] = []
        for binding in block.bindings:
            value = binding.value
            if isinstance(value, relax.If):
                ends = [_with_bindings(branch, bodies) for branch in (value.true_branch, value.false_branch)]
                value = typed(relax.If(value.cond, *ends, value.span), value.ty)
                binding = relax.VarBinding(binding.var, value, binding.span)
            callee = bodies.get(value.op) if isinstance(value, relax.Call) else None
            if callee is None:
                bindings.append(binding)
                continue
            copies, result = _copied(callee, value.args, isinstance(block, relax.DataflowBlock))
            bindings += [*copies, relax.VarBinding(binding.var, result)]
        blocks.append(type(block)(bindings))
    return typed(relax.SeqExpr(blocks, body.body), body.ty)


def _copied(
    callee: relax.Function, args: Sequence[relax.Expr], is_dataflow: bool
) -> tuple[list[relax.Binding], relax.Expr]:
    """The bindings of a function with new variables, given arguments, and its result."""
    names: dict[tvm.ir.Var, tvm.Object] = {}

    def copy(node: Any) -> Any:
        return replaced(node, names)

    for param, arg in zip(callee.params, args, strict=True):
        names[param] = arg
        _add_sizes(param.ty, arg.ty, names)
    bindings: list[relax.Binding] = []
    for binding in (each for block in callee.body.blocks for each in block.bindings):
        if isinstance(binding, relax.MatchCast):
            structural_walk(binding.ty, (tirx.Var, lambda size: names.setdefault(size, tirx.Var(size.name, size.ty))))
        value = copy(binding.value)
        var = (relax.DataflowVar if is_dataflow else relax.Var)(binding.var.name, copy(binding.var.ty))
        names[binding.var] = var
        is_cast = isinstance(binding, relax.MatchCast)
        bindings.append(relax.MatchCast(var, value, copy(binding.ty)) if is_cast else relax.VarBinding(var, value))
    return bindings, copy(callee.body.body)


def _add_sizes(ty: tvm.ir.Type, given: tvm.ir.Type, names: dict[tvm.ir.Var, tvm.Object]) -> None:
    """Map symbolic sizes in the type of a parameter to those of the type that is given."""
    if isinstance(ty, tvm.ir.TupleType):
        for field, each in zip(ty.fields, given.fields, strict=True):
            _add_sizes(field, each, names)
        return
    for size, extent in zip(_sizes(ty), _sizes(given), strict=False):
        if isinstance(size, tirx.Var):
            names.setdefault(size, extent)


def _sizes(ty: tvm.ir.Type) -> Sequence[Any]:
    """Sizes in the type of a tensor or shape; none if they are not known."""
    shape = ty.shape if isinstance(ty, relax.TensorType) else ty
    return getattr(shape, "values", None) or ()


def callees_of(func: relax.Function, functions: Collection[tvm.ir.GlobalVar]) -> frozenset[tvm.ir.GlobalVar]:
    """Those of some functions that a function calls."""
    calls = [binding.value for binding in walk_bindings(func.body) if isinstance(binding.value, relax.Call)]
    return frozenset(call.op for call in calls if isinstance(call.op, tvm.ir.GlobalVar) and call.op in functions)


def has_mesh(func: relax.Function) -> bool:
    """Return whether a function has values over a mesh, or asks for some."""
    bindings = list(walk_bindings(func.body))
    types = [param.ty for param in func.params] + [binding.var.ty for binding in bindings]
    return any(mesh_positions(vdevice_in(ty)) for ty in types) or any(_asks_for_mesh(each.value) for each in bindings)


def _asks_for_mesh(value: relax.Expr) -> bool:
    """Return whether a value is a call of shard, or a hint that names a mesh."""
    return op_name(value) == SHARD or (is_hint(value) and mesh_of_scope(str(value.attrs.memory_scope)) is not None)
