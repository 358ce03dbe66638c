"""RealizeVDevice: give every value and op its device, and make values that cross devices explicit transfers.

Before::

    def main(x: R.Tensor((4,), "float32", "llvm:0"), y: R.Tensor((4,), "float32")):
        h = R.hint_on_device(R.exp(x), tvm.cuda(0))
        z = R.add(h, y)

After::

    def main(x: R.Tensor((4,), "float32", "llvm:0"), y: R.Tensor((4,), "float32", "cuda:0")):
        e: R.Tensor((4,), "float32", "llvm:0") = R.exp(x)
        h: R.Tensor((4,), "float32", "cuda:0") = R.to_vdevice(e, "cuda:0")
        z: R.Tensor((4,), "float32", "cuda:0") = R.add(h, y)

Devices propagate from annotations, hints and transfers to free values, by the rules of docs/explanation/placement.md.
Afterwards every parameter, binding, constant, ``out_ty`` and result names its vdevice, the same object as in
``mod.global_infos["vdevice"]``, and hints are removed. TVM's pass of this name applies the first annotation that it
visits, overwrites others without an error, and stops at function calls.

Assumes A-normal form. A module without vdevices and a lowered module are not changed; a second run changes nothing.
The last section is the pass RealizeTargets.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax
from tvm.relax.utils import copy_with_new_vars

from ...target.native_target import check_cpu_names, with_hardware
from ...target.vdevice import same_vdevice, vdevices_of
from ..ir.declare import declare_pass
from ..ir.kernels import tensor_bytes
from ..ir.module_attrs import is_lowered
from ..ir.remarks import collect_placement, publish, remarks_of, with_remarks
from ..ir.reports import PlacementEntry, PlacementReport
from .clones import Clone, RecursionGroup, clone_for, make_clones
from .collect import collect
from .graph import HOST, Graph
from .operands import PlacementNote, on_devices
from .program import CallRef, Program, Unit, recursion_groups
from .rewrite import rewrite
from .solve import Path, shortest_paths, solve
from .update_vdevice import succeed_vdevices
from .verify import verify_placement

# The report: placement of each value with its reason as text.


def report_entries(
    function: str, notes: Sequence[PlacementNote], clone: Clone, names: list[str]
) -> list[PlacementEntry]:
    """Entries of the report for the notes about one function."""
    reasons = _Reasons(clone, names)
    return [
        PlacementEntry(
            function, note.name, note.op, names[note.device], note.device, reasons(note), _bytes(note.ty), note.kind
        )
        for note in notes
    ]


class _Reasons:
    """Texts that explain devices by the shortest path from a fixed or, failing that, a hinted node."""

    def __init__(self, clone: Clone, names: list[str]) -> None:
        self.clone = clone
        self.names = names
        self.graph: Graph = clone.group.graph
        self.fixed, _ = shortest_paths(self.graph, self.graph.fixed)
        hints = {node: origins[0] for node, origins in self.graph.hints.items() if node not in self.fixed}
        self.hinted: dict[int, Path] = shortest_paths(self.graph, hints)[0] if hints else {}

    def __call__(self, note: PlacementNote) -> str:
        device = self.names[note.device]
        if note.reason:
            return note.reason
        if note.node == HOST:
            return "read or made by the host"
        path = self.fixed.get(note.node)
        if path is not None:
            if path.device == note.device:
                return self._path_text(note.node, path, self.fixed)
            return "goes with its first use" if note.kind == "param" else "goes with its operands and users"
        if note.node in self.clone.group.solution.open_component_of and self.clone.caller:
            return f"called by '{self.clone.caller}' on {device}"
        path = self.hinted.get(note.node)
        if path is not None and path.device == note.device:
            return self._path_text(note.node, path, self.hinted)
        return "default device"

    def _path_text(self, node: int, path: Path, paths: dict[int, Path]) -> str:
        """Reason that names the node at the start of the path, and the op next to `node`."""
        start = self.graph.locations[path.start]
        if path.start == node or (self.graph.is_site(node) and path.start in self.graph.targets[node]):
            return f"fixed by {path.origin}"
        site = node if self.graph.is_site(node) else path.predecessor
        op = f" through {self.graph.locations[site].op}" if site >= 0 and self.graph.locations[site].op else ""
        source = f"'{start.variable}'" if not start.op else f"the {start.op}"
        return f"follows {source}{op}, which is on {self.names[path.device]} by {path.origin}"


def _bytes(ty: tvm.ir.Type) -> int | None:
    """Size of a value in bytes: 0 if it lacks tensors, None if a shape is symbolic."""
    if isinstance(ty, tvm.ir.TupleType):
        total = 0
        for field_ty in ty.fields:
            size = _bytes(field_ty)
            if size is None:
                return None
            total += size
        return total
    if not isinstance(ty, relax.TensorType):
        return 0
    shape, dtype = ty.shape, ty.dtype
    if dtype is None or not isinstance(shape, relax.ShapeExpr):
        return None
    extents = shape.values[:]
    is_known = all(isinstance(extent, tvm.tirx.IntImm) for extent in extents)
    return tensor_bytes(map(int, extents), dtype.dtype) if is_known else None


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
        The same module if nothing changes.
    """
    report = PlacementReport()
    if is_lowered(mod):  # storage and shape heaps of a lowered module lack a device
        return mod, report
    program = Program(mod)
    if not program.vdevices:
        return mod, report
    groups: list[RecursionGroup] = []
    for index, units in enumerate(recursion_groups(program)):
        graph = collect(program, units, groups)
        groups.append(RecursionGroup(index, units, graph, solve(graph, program.names, program.host, insert_copies)))
    placed = _write_module(program, make_clones(program, groups, insert_copies), report)
    publish(report)
    return placed, report


def _realized(mod: tvm.IRModule, insert_copies: bool = False) -> tvm.IRModule:
    """`realize_vdevice` without its report.

    Parameters
    ----------
    insert_copies : bool
        Insert a transfer between connected values that are fixed to different devices, instead of raising an error.

    Raises
    ------
    PlacementError
        When it runs: two fixed devices, or two hints, apply to connected values; a callee is unknown.
    VDeviceError
        When it runs: a hint names a device that the module lacks.
    """
    return realize_vdevice(mod, insert_copies)[0]


RealizeVDevice = declare_pass("RealizeVDevice", _realized)


def _write_module(program: Program, clones: list[list[Clone]], report: PlacementReport) -> tvm.IRModule:
    mod = program.mod
    gvars: dict[str, tvm.ir.GlobalVar] = {}
    pending: list[tuple[Unit, Clone]] = []
    for unit in program.units.values():
        for clone in clones[unit.group]:
            gvars[clone.names[unit.name]] = _global_var(program, unit, clone)
            pending.append((unit, clone))
    changed = False
    functions: dict[tvm.ir.GlobalVar, tvm.ir.BaseFunc] = {}
    placed: dict[str, list[tuple[tvm.ir.GlobalVar, relax.Function]]] = {}
    for unit, clone in pending:
        func, notes = _write_function(program, clones, gvars, unit, clone)
        gvar = gvars[clone.names[unit.name]]
        changed = changed or func is not unit.func or gvar is not unit.gvar
        if gvar is not unit.gvar:
            relax.expr._update_type(gvar, func.ty)
        placed.setdefault(unit.name, []).append((gvar, func))
        report.entries += report_entries(clone.names[unit.name], notes, clone, program.names)
    if not changed:
        return mod
    for gvar, base_func in mod.functions.items():
        first, *other_clones = placed.get(str(gvar.name_hint), [(gvar, base_func)])
        functions.update([first, *((clone_gvar, copy_with_new_vars(func)) for clone_gvar, func in other_clones)])
    return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def _global_var(program: Program, unit: Unit, clone: Clone) -> tvm.ir.GlobalVar:
    """The clone's variable: the source module's if name and type are unchanged, so that callers can stay unchanged."""
    name = clone.names[unit.name]
    old = unit.gvar.ty
    # BindParams removes bound parameters from the function, but not from the variable's type.
    same_arity = isinstance(old, relax.FuncType) and old.params is not None and len(old.params) == len(unit.func.params)
    same_type = same_arity and old is on_devices(
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
        callee_clone = clone_for(clones[ref.callee.group], clone, ref.sites)
        return gvars[callee_clone.names[ref.callee.name]]

    func, notes = rewrite(program, unit, clone, callee)
    if not clone.first:
        func = func.without_attr("global_symbol")
    return func, notes


# RealizeTargets: complete targets that consist of a kind alone, with the CPU or GPU of this machine.
#
# Before::
#
#     I.module_global_infos({"vdevice": [I.vdevice("llvm"), I.vdevice("c", 1)]})
#
# After, on a machine with such a CPU::
#
#     I.module_global_infos({"vdevice": [I.vdevice({"kind": "llvm", "mcpu": "znver5", "num-cores": 16}),
#                                        I.vdevice("c", 1)]})
#
# Thus ``I.vdevice("llvm")`` and ``vdevices=["llvm"]`` mean the same; TVM's own default is the oldest CPU of this
# architecture, which ``{"kind": "llvm", "mcpu": "generic"}`` names. All references to the vdevices are updated.
#
# Assumes nothing. A lowered module and one with complete targets are not changed; a second run changes nothing. A
# vdevice is not changed if it would become equal to another one of the list.


def realize_targets(mod: tvm.IRModule) -> tvm.IRModule:
    """Complete the targets of vdevices; see the comment above.

    Raises
    ------
    VDeviceError
        When it runs: LLVM does not know a CPU or an architecture.
    """
    old = vdevices_of(mod)
    new: list[relax.VDevice] = []
    for vdevice in old:
        check_cpu_names(vdevice.target)
        complete = with_hardware(vdevice)
        new.append(vdevice if any(same_vdevice(complete, entry) for entry in (*old, *new)) else complete)
    if is_lowered(mod) or all(same_vdevice(*pair) for pair in zip(old, new, strict=True)):
        return mod
    placement = remarks_of(mod).placement  # the names of the devices do not change
    return with_remarks(succeed_vdevices(mod, new, new), placement=placement)


RealizeTargets = declare_pass("RealizeTargets", realize_targets)
