"""RealizeVDevice: every value and every op gets its device; what crosses devices becomes a transfer.

Before::

    def main(x: R.Tensor((4,), "float32", "llvm:0"), y: R.Tensor((4,), "float32")):
        h = R.hint_on_device(R.exp(x), tvm.cuda(0))
        z = R.add(h, y)

After::

    def main(x: R.Tensor((4,), "float32", "llvm:0"), y: R.Tensor((4,), "float32", "cuda:0")):
        e: R.Tensor((4,), "float32", "llvm:0") = R.exp(x)
        h: R.Tensor((4,), "float32", "cuda:0") = R.to_vdevice(e, "cuda:0")
        z: R.Tensor((4,), "float32", "cuda:0") = R.add(h, y)

Devices spread from annotations, hints and transfers to all that is free, by the rules of docs/explanation/placement.md.
Afterwards every parameter, binding, constant, ``out_ty`` and result names its vdevice, the very object in
``mod.global_infos["vdevice"]``, and hints are gone. TVM's pass of this name lets the first annotation it visits win,
overwrites others without an error, and stops at function calls.

Assumes A-normal form. A module without vdevices and a lowered module are returned as they are; a second run changes
nothing.
"""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax.utils import copy_with_new_vars

from ..ir.declare import declare_pass
from ..ir.module_attrs import is_lowered
from ..ir.remarks import collect_placement, publish
from ..ir.reports import PlacementEntry, PlacementReport
from .clones import Clone, RecursionGroup, clone_for, make_clones
from .collect import collect
from .operands import PlacementNote
from .program import CallRef, Program, Unit, recursion_groups
from .report import entries_of
from .rewrite import rewrite
from .solve import solve
from .types import on_devices
from .verify import verify_placement

__all__ = [
    "PlacementEntry",
    "PlacementReport",
    "RealizeVDevice",
    "collect_placement",
    "realize_vdevice",
    "verify_placement",
]


def realize_vdevice(mod: tvm.IRModule, insert_copies: bool = False) -> tuple[tvm.IRModule, PlacementReport]:
    """Run `RealizeVDevice` as a function, with its report.

    Returns
    -------
    placed, report
        The very module if nothing changes.
    """
    report = PlacementReport()
    if is_lowered(mod):  # storage and shape heaps there have no device of their own
        return mod, report
    program = Program(mod)
    if not program.vdevices:
        return mod, report
    groups: list[RecursionGroup] = []
    for index, units in enumerate(recursion_groups(program)):
        graph = collect(program, units, groups)
        groups.append(RecursionGroup(index, units, graph, solve(graph, program.names, program.host, insert_copies)))
    clones = make_clones(program, groups, insert_copies)
    placed = _write_module(program, clones, report)
    publish(report)
    return placed, report


def _realized(mod: tvm.IRModule, insert_copies: bool = False) -> tvm.IRModule:
    """`realize_vdevice` without its report.

    Parameters
    ----------
    mod : tvm.IRModule
    insert_copies : bool
        Whether to insert a transfer where two fixed devices meet; else that is an error.

    Raises
    ------
    PlacementError
        When it runs: two fixed devices, or two hints, meet; a callee is not known.
    VDeviceError
        When it runs: a hint names a device the module does not have.
    """
    return realize_vdevice(mod, insert_copies)[0]


RealizeVDevice = declare_pass("RealizeVDevice", _realized)


def _write_module(program: Program, clones: list[list[Clone]], report: PlacementReport) -> tvm.IRModule:
    mod = program.mod
    gvars: dict[str, tvm.ir.GlobalVar] = {}
    todo: list[tuple[Unit, Clone]] = []
    for unit in program.units.values():
        for clone in clones[unit.group]:
            gvars[clone.names[unit.name]] = _global_var(program, unit, clone)
            todo.append((unit, clone))
    changed = False
    functions: dict[tvm.ir.GlobalVar, tvm.ir.BaseFunc] = {}
    written: dict[str, list[tuple[tvm.ir.GlobalVar, relax.Function]]] = {}
    for unit, clone in todo:
        func, notes = _write_function(program, clones, gvars, unit, clone)
        gvar = gvars[clone.names[unit.name]]
        changed = changed or func is not unit.func or gvar is not unit.gvar
        if gvar is not unit.gvar:
            relax.expr._update_type(gvar, func.ty)
        written.setdefault(unit.name, []).append((gvar, func))
        report.entries += entries_of(clone.names[unit.name], notes, clone, program.names)
    if not changed:
        return mod
    for gvar, base_func in mod.functions.items():
        first, *others = written.get(str(gvar.name_hint), [(gvar, base_func)])
        functions.update([first, *((clone, copy_with_new_vars(func)) for clone, func in others)])
    return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def _global_var(program: Program, unit: Unit, clone: Clone) -> tvm.ir.GlobalVar:
    """The old one where name and type stay, so that untouched callers stay untouched."""
    name = clone.names[unit.name]
    old = unit.gvar.ty
    # BindParams leaves the variable with the parameters it bound.
    is_current = isinstance(old, relax.FuncType) and old.params is not None and len(old.params) == len(unit.func.params)
    same_type = is_current and old is on_devices(
        old, unit.tree, lambda leaf: program.vdevices[clone.devices[leaf] if isinstance(leaf, int) else 0]
    )
    return unit.gvar if clone.first and same_type else tvm.ir.GlobalVar(name)


def _write_function(
    program: Program,
    clones: list[list[Clone]],
    gvars: dict[str, tvm.ir.GlobalVar],
    unit: Unit,
    clone: Clone,
) -> tuple[relax.Function, list[PlacementNote]]:
    def callee(ref: CallRef) -> tvm.ir.GlobalVar:
        if ref.callee.group == unit.group:
            return gvars[clone.names[ref.callee.name]]
        called = clone_for(clones[ref.callee.group], clone, ref.classes)
        return gvars[called.names[ref.callee.name]]

    func, notes = rewrite(program, unit, clone, callee)
    if not clone.first:
        func = func.without_attr("global_symbol")
    return func, notes
