"""Inlining of functions with values over a mesh, so that shardings spread through calls."""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from tvm import relax

from ...errors import PlacementError
from ...target.mesh import mesh_positions
from ..ir.rewriting import copy_module, relax_functions, walk_bindings


def with_inlined_calls(mod: tvm.IRModule) -> tvm.IRModule:
    """A module in which no function calls one with values over a mesh: these are inlined, so that shardings spread.

    Raises
    ------
    PlacementError
        If such a function calls itself.
    """
    functions = dict(relax_functions(mod))
    called = {gv: _callees(func, functions) for gv, func in functions.items()}
    while wider := {  # callees of callees
        gv: callees | more
        for gv, callees in called.items()
        if not (more := {each for callee in callees for each in called[callee]}) <= callees
    }:
        called |= wider
    meshes = {gv for gv, func in functions.items() if has_mesh(func)}
    inlined = {gv for gv, callees in called.items() if gv in meshes or callees & meshes}
    for gv in inlined:
        if gv in called[gv]:
            raise PlacementError(
                f"function {gv.name_hint!r} has values over a mesh, or calls a function that has, and calls itself; "
                "expected no recursion besides meshes"
            )
    callers = [gv for gv, callees in called.items() if callees & inlined]
    if not callers:
        return mod
    by_name = {gv.name_hint: functions[gv] for gv in inlined}
    changed = {gv: functions[gv].inline_functions(by_name) for gv in callers}
    unused = {
        gv for gv in inlined & frozenset().union(*called.values()) if "global_symbol" not in (functions[gv].attrs or {})
    }
    return copy_module(mod, {gv: changed.get(gv, func) for gv, func in mod.functions.items() if gv not in unused})


def _callees(func: relax.Function, functions: Mapping[tvm.ir.GlobalVar, relax.Function]) -> frozenset[tvm.ir.GlobalVar]:
    """The Relax functions that a function calls."""
    calls = [binding.value for binding in walk_bindings(func.body) if isinstance(binding.value, relax.Call)]
    return frozenset(call.op for call in calls if isinstance(call.op, tvm.ir.GlobalVar) and call.op in functions)


def has_mesh(func: relax.Function) -> bool:
    """Return whether a function has values over a mesh."""
    types = [param.ty for param in func.params] + [binding.var.ty for binding in walk_bindings(func.body)]
    return any(mesh_positions(vdevice_in(ty)) for ty in types)


def vdevice_in(ty: tvm.ir.Type) -> relax.VDevice | None:
    """The device of the first tensor in a type that has one."""
    if isinstance(ty, relax.TensorType):
        return ty.vdevice
    fields = ty.fields if isinstance(ty, tvm.ir.TupleType) else ()
    return next((found for field in fields if (found := vdevice_in(field)) is not None), None)
