"""Where a module refers to a vdevice: by name for messages, and through the targets of its PrimFuncs."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
import tvm_ffi
from tvm import relax
from tvm.target import Target

from ...target.vdevice import vdevice_index
from ..ir.rewriting import copy_module, relax_functions, tensor_types, walk_bindings


def first_use(mod: tvm.IRModule, node: tvm.runtime.Object) -> str:
    """The first function and variable, by name and in program order, below which this very object is found."""
    for gvar, func in relax_functions(mod):
        for param in func.params:
            if _holds(param.ty, node):
                return f"parameter {param.name!r} of function {gvar.name_hint!r}"
        users = [binding for binding in walk_bindings(func.body) if _holds(binding, node)]
        # An `If` or a local function holds what is inside it; the binding inside says more.
        inner = [user for user in users if not isinstance(user.value, (relax.If, relax.Function))]
        if users:
            return f"variable {(inner or users)[0].var.name!r} in function {gvar.name_hint!r}"
        if _holds(func, node):
            return f"the return of function {gvar.name_hint!r}"
    return "the module"


def _holds(root: tvm.runtime.Object, node: tvm.runtime.Object) -> bool:
    def stop_at(found: tvm.runtime.Object) -> tvm_ffi.structural.VisitInterrupt | None:
        return tvm_ffi.structural.VisitInterrupt() if tvm_ffi.Object.same_as(found, node) else None

    def look_into(call: relax.Call) -> tvm_ffi.structural.VisitInterrupt | None:
        # TVM's structural walk visits all of a call but its attributes.
        return None if call.attrs is None else tvm_ffi.structural_walk(call.attrs, (type(node), stop_at))

    return tvm_ffi.structural_walk(root, [(type(node), stop_at), (relax.Call, look_into)]) is not None


def follow_targets(
    updated: tvm.IRModule,
    mod: tvm.IRModule,
    old: Sequence[relax.VDevice],
    new: Sequence[relax.VDevice],
) -> tvm.IRModule:
    """PrimFuncs compiled for the target of an old vdevice get that of its successor.

    Where vdevices shared a target and now differ, those decide on which a function is called; if they still differ,
    its target stays.

    Parameters
    ----------
    updated : tvm.IRModule
        `mod` with its references to vdevices mapped already.
    mod : tvm.IRModule
        The module before.
    old, new : Sequence[VDevice]
        The vdevice lists before and after, successors at equal positions.
    """
    changed: dict[tvm.ir.GlobalVar, tvm.ir.BaseFunc] = {}
    callers: dict[str, set[int]] | None = None
    for gvar, func in updated.functions.items():
        target = func.attrs.get("target") if isinstance(func, tvm.tirx.PrimFunc) and func.attrs else None
        if not isinstance(target, Target):
            continue
        positions = {index for index, entry in enumerate(old) if _same_target(entry.target, target)}
        successors = _targets_at(positions, new)
        if len(successors) > 1:
            callers = _positions_called_on(mod, old) if callers is None else callers
            successors = _targets_at(positions & callers.get(gvar.name_hint, set()), new)
        if len(successors) == 1 and not _same_target(successors[0], target):
            successor = _without_host(successors[0])
            changed[gvar] = func.with_attr("target", successor.with_host(target.host) if target.host else successor)
    if not changed:
        return updated
    return copy_module(updated, {gvar: changed.get(gvar, func) for gvar, func in updated.functions.items()})


def _targets_at(positions: set[int], vdevices: Sequence[relax.VDevice]) -> list[Target]:
    """The distinct targets there, in order."""
    distinct: list[Target] = []
    for index in sorted(positions):
        if index < len(vdevices) and not any(_same_target(vdevices[index].target, known) for known in distinct):
            distinct.append(vdevices[index].target)
    return distinct


def _positions_called_on(mod: tvm.IRModule, vdevices: Sequence[relax.VDevice]) -> dict[str, set[int]]:
    """Per name of a PrimFunc, positions of the vdevices that results of calls to it are on."""
    called_on: dict[str, set[int]] = {}
    for _, func in relax_functions(mod):
        for binding in walk_bindings(func.body):
            call = binding.value
            if isinstance(call, relax.Call) and call.args and isinstance(call.args[0], tvm.ir.GlobalVar):
                on = {vdevice_index(ty.vdevice, vdevices) for ty in tensor_types(binding.var.ty) if ty.vdevice}
                called_on.setdefault(call.args[0].name_hint, set()).update(on)
    return called_on


def _same_target(a: Target, b: Target) -> bool:
    """Whether both generate the same device code, whatever their host."""
    return bool(tvm_ffi.structural_equal(_without_host(a), _without_host(b)))


def _without_host(target: Target) -> Target:
    if target.host is None:
        return target
    return Target({key: value for key, value in target.export().items() if key != "host"})
