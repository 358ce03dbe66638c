"""UpdateVDevice: replace or add a vdevice of the module, or its list, and update all references.

Before::

    I.module_global_infos({"vdevice": [I.vdevice("llvm")]})
    y: R.Tensor((4,), "float32", "llvm:0") = R.exp(x)

After ``UpdateVDevice(VDevice("vulkan"), index=0)``::

    I.module_global_infos({"vdevice": [I.vdevice("vulkan")]})
    y: R.Tensor((4,), "float32", "cuda:0") = R.exp(x)

With an `index` that vdevice is replaced, without one `new_vdevice` is appended, and a list replaces the module's list,
each old vdevice by the new one at its index. Types of parameters, bindings, constants and returns, types inside tuples,
functions and ``out_ty``, the targets of ``to_vdevice``, hints, and the ``target`` of PrimFuncs are updated; a mesh
becomes that of the new vdevices. Afterwards every reference to a single vdevice is the same object as in
``mod.global_infos["vdevice"]``. TVM's pass of this name changes its input, and does not update targets of transfers,
``out_ty`` and tuples.

Assumes nothing. A second run changes nothing, except that it appends a vdevice again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import tvm
import tvm_ffi
from tvm import relax
from tvm.relax import VDevice
from tvm.relax.expr import _update_type
from tvm.relax.op.op_attrs import HintOnDeviceAttrs
from tvm.target import Target

from ...errors import VDeviceError
from ...op.placement import decode_hint, encode_hint
from ...target.mesh import mesh_of, mesh_vdevice
from ...target.vdevice import device_name, vdevice_index, vdevices_of, with_vdevices
from ..ir.declare import declare_pass
from ..ir.remarks import with_remarks
from ..ir.rewriting import copy_module, relax_functions, tensor_types, walk_bindings

# Function from an old vdevice to the new one; None for a vdevice without a successor.
Successor: TypeAlias = Callable[[VDevice], "VDevice | None"]


def update_vdevices(
    mod: tvm.IRModule, new_vdevice: VDevice | Sequence[VDevice], index: int | None = None
) -> tvm.IRModule:
    """See the module's docstring.

    Parameters
    ----------
    mod : tvm.IRModule
        Module with vdevices.
    new_vdevice : VDevice, or sequence of VDevice
        Entry to append or to store at `index`, or the new list.
    index : int, optional
        Index of the vdevice to replace in the module's list.

    Raises
    ------
    VDeviceError
        At once, if an argument has the wrong type. When it runs, if `index` is out of range, or a used vdevice lacks a
        successor; the message names the function and variable that use it.
    """
    _check_arguments(new_vdevice, index)
    new = _new_list(vdevices_of(mod), new_vdevice, index)
    return succeed_vdevices(mod, new, new)


def succeed_vdevices(mod: tvm.IRModule, successors: Sequence[VDevice], new: Sequence[VDevice]) -> tvm.IRModule:
    """The module with other vdevices.

    `successors`: entry of `new` for each vdevice of the module, by index; several may have the same. `new`: list of the
    result. Raises VDeviceError if a used vdevice lacks a successor.
    """
    old = vdevices_of(mod)

    def successor(vdevice: VDevice) -> VDevice | None:
        if (mesh := mesh_of(vdevice)) is not None:
            members = [successor(old[position]) for position in mesh if position < len(old)]
            known = [member for member in members if member is not None]
            if len(known) < len(mesh):
                return None
            return mesh_vdevice([vdevice_index(member, new) for member in known], new, mesh.shape)
        old_index = _index(vdevice, old)
        if old_index is not None:
            return successors[old_index] if old_index < len(successors) else None
        # TVM compares vdevices by identity, so a vdevice that is not listed may be a copy of a new one.
        new_index = _index(vdevice, new)
        return None if new_index is None else new[new_index]

    mod = with_remarks(mod, placement=None)  # these remarks name the old devices
    updated = _map_references(mod, successor, old, new)
    return with_vdevices(update_targets(updated, mod, old, successors), new)


def _check_arguments(new_vdevice: VDevice | Sequence[VDevice], index: int | None = None) -> None:
    if isinstance(new_vdevice, VDevice):
        if index is not None and (isinstance(index, bool) or not isinstance(index, int)):
            raise VDeviceError(f"UpdateVDevice: index must be an int, got {index!r}")
        return
    if not isinstance(new_vdevice, (list, tuple)) or not all(isinstance(entry, VDevice) for entry in new_vdevice):
        raise VDeviceError(f"UpdateVDevice needs a VDevice or a list of them, got {new_vdevice!r}")
    if index is not None:
        raise VDeviceError(f"UpdateVDevice: a list resets all vdevices, so it takes no index (got {index})")


UpdateVDevice = declare_pass("UpdateVDevice", update_vdevices, _check_arguments)


def _new_list(old: list[VDevice], new_vdevice: VDevice | Sequence[VDevice], index: int | None) -> list[VDevice]:
    if not isinstance(new_vdevice, VDevice):
        return list(new_vdevice)
    if index is None:
        return [*old, new_vdevice]
    if not 0 <= index < len(old):
        raise VDeviceError(f"UpdateVDevice: index {index} is out of range, the module has {len(old)} vdevices")
    return [*old[:index], new_vdevice, *old[index + 1 :]]


def _index(vdevice: VDevice, vdevices: Sequence[VDevice]) -> int | None:
    try:
        return vdevice_index(vdevice, vdevices)
    except VDeviceError:
        return None


def _map_references(
    mod: tvm.IRModule, successor: Successor, old: Sequence[VDevice], new: Sequence[VDevice]
) -> tvm.IRModule:
    """The module with every reference to a vdevice mapped, but the old list of vdevices."""
    # By address; the entry keeps the old vdevice alive, so that its address is not reused.
    mapped: dict[int, tuple[VDevice, VDevice | None]] = {}
    hints_without_successor: list[tvm.ir.Attrs] = []

    def map_vdevice(vdevice: VDevice) -> VDevice:
        key = vdevice.__chandle__()
        if key not in mapped:
            mapped[key] = (vdevice, successor(vdevice))
        return mapped[key][1] or vdevice

    def map_attrs(attrs: tvm.ir.Attrs) -> tvm.ir.Attrs:
        if not isinstance(attrs, HintOnDeviceAttrs):
            return tvm_ffi.structural_map(attrs, (VDevice, map_vdevice))
        try:
            hinted = successor(decode_hint(attrs, old))
        except VDeviceError:
            return attrs  # it does not name an old vdevice, but may name a new one
        if hinted is None:
            hints_without_successor.append(attrs)
            return attrs
        return encode_hint(_ANY_TENSOR, hinted, new).attrs

    def map_call(call: relax.Call) -> relax.Call:
        # TVM's structural walk does not visit the attributes of a call.
        attrs = None if call.attrs is None else map_attrs(call.attrs)
        if attrs is None or tvm_ffi.Object.same_as(attrs, call.attrs):
            return call
        return relax.Call(call.op, call.args, attrs, call.ty_args, call.span, call.ty)

    # The walk does not change a function's own variable, whose type would be stale.
    gvars = {
        gvar.name_hint: _with_type(gvar, tvm_ffi.structural_map(gvar.ty, (VDevice, map_vdevice)))
        for gvar in mod.get_global_vars()
    }
    callbacks = [
        (VDevice, map_vdevice),
        (relax.Call, map_call),
        (tvm.ir.GlobalVar, lambda gvar: gvars.get(gvar.name_hint, gvar)),
    ]
    functions = {gvars[gvar.name_hint]: tvm_ffi.structural_map(func, callbacks) for gvar, func in mod.functions.items()}
    missing = [vdevice for vdevice, successor in mapped.values() if successor is None] + hints_without_successor
    if missing:
        raise VDeviceError(_missing_successor_text(mod, missing[0], old, new))
    return copy_module(mod, functions)


def _with_type(gvar: tvm.ir.GlobalVar, ty: tvm.ir.Type) -> tvm.ir.GlobalVar:
    """`gvar` if it has the type, else a new variable, since the old module keeps `gvar`."""
    if tvm_ffi.Object.same_as(ty, gvar.ty):
        return gvar
    typed = tvm.ir.GlobalVar(gvar.name_hint)
    _update_type(typed, ty)
    return typed


def _missing_successor_text(
    mod: tvm.IRModule, node: VDevice | HintOnDeviceAttrs, old: Sequence[VDevice], new: Sequence[VDevice]
) -> str:
    vdevice = node if isinstance(node, VDevice) else decode_hint(node, old)
    is_listed = mesh_of(vdevice) is not None or _index(vdevice, old) is not None
    name = device_name(vdevice, old) if is_listed else "a vdevice that the module does not list"
    names = ", ".join(device_name(entry, new) for entry in new) or "nothing"
    return (
        f"UpdateVDevice: {name} ({vdevice.target}, vdevice_id={vdevice.vdevice_id}) lacks a successor, "
        f"but {first_use(mod, node)} uses it; the new list is {names}"
    )


_ANY_TENSOR = relax.Var("x", relax.TensorType(ndim=-1))  # operand for the operator that makes hint attributes


def first_use(mod: tvm.IRModule, node: tvm.runtime.Object) -> str:
    """The first function and variable, by name and in program order, that contain this object."""
    for gvar, func in relax_functions(mod):
        for param in func.params:
            if _contains(param.ty, node):
                return f"parameter {param.name!r} of function {gvar.name_hint!r}"
        users = [binding for binding in walk_bindings(func.body) if _contains(binding, node)]
        # An `If` or a local function contains the users inside it; a binding inside is more specific.
        inner = [user for user in users if not isinstance(user.value, (relax.If, relax.Function))]
        if users:
            return f"variable {(inner or users)[0].var.name!r} in function {gvar.name_hint!r}"
        if _contains(func, node):
            return f"the return of function {gvar.name_hint!r}"
    return "the module"


def _contains(root: tvm.runtime.Object, node: tvm.runtime.Object) -> bool:
    def stop_at(visited: tvm.runtime.Object) -> tvm_ffi.structural.VisitInterrupt | None:
        return tvm_ffi.structural.VisitInterrupt() if tvm_ffi.Object.same_as(visited, node) else None

    def look_into(call: relax.Call) -> tvm_ffi.structural.VisitInterrupt | None:
        # TVM's structural walk does not visit the attributes of a call.
        return None if call.attrs is None else tvm_ffi.structural_walk(call.attrs, (type(node), stop_at))

    return tvm_ffi.structural_walk(root, [(type(node), stop_at), (relax.Call, look_into)]) is not None


def update_targets(
    updated: tvm.IRModule,  # module whose references to vdevices are mapped
    mod: tvm.IRModule,  # module before that
    # old, new: vdevice lists before and after, successors at equal indices.
    old: Sequence[relax.VDevice],
    new: Sequence[relax.VDevice],
) -> tvm.IRModule:
    """Change PrimFuncs from the target of an old vdevice to that of its successor.

    Where vdevices shared a target and now differ, only the vdevices count that the function is called on; if these
    differ, too, its target is not changed.
    """
    changed: dict[tvm.ir.GlobalVar, tvm.ir.BaseFunc] = {}
    callers: dict[str, set[int]] | None = None
    for gvar, func in updated.functions.items():
        target = func.attrs.get("target") if isinstance(func, tvm.tirx.PrimFunc) and func.attrs else None
        if not isinstance(target, Target):
            continue
        indices = {index for index, entry in enumerate(old) if _same_target(entry.target, target)}
        successors = _targets_at(indices, new)
        if len(successors) > 1:
            callers = _indices_called_on(mod, old) if callers is None else callers
            successors = _targets_at(indices & callers.get(gvar.name_hint, set()), new)
        if len(successors) == 1 and not _same_target(successors[0], target):
            successor = _without_host(successors[0])
            changed[gvar] = func.with_attr("target", successor.with_host(target.host) if target.host else successor)
    if not changed:
        return updated
    return copy_module(updated, {gvar: changed.get(gvar, func) for gvar, func in updated.functions.items()})


def _targets_at(indices: set[int], vdevices: Sequence[relax.VDevice]) -> list[Target]:
    """The distinct targets of some vdevices, in order."""
    distinct: list[Target] = []
    for index in sorted(indices):
        if index < len(vdevices) and not any(_same_target(vdevices[index].target, target) for target in distinct):
            distinct.append(vdevices[index].target)
    return distinct


def _indices_called_on(mod: tvm.IRModule, vdevices: Sequence[relax.VDevice]) -> dict[str, set[int]]:
    """Indices of the vdevices of the results of calls, by the name of the called PrimFunc."""
    called_on: dict[str, set[int]] = {}
    for _, func in relax_functions(mod):
        for binding in walk_bindings(func.body):
            call = binding.value
            if isinstance(call, relax.Call) and call.args and isinstance(call.args[0], tvm.ir.GlobalVar):
                result_indices = {
                    vdevice_index(ty.vdevice, vdevices) for ty in tensor_types(binding.var.ty) if ty.vdevice
                }
                called_on.setdefault(call.args[0].name_hint, set()).update(result_indices)
    return called_on


def _same_target(a: Target, b: Target) -> bool:
    """Return whether two targets generate the same device code, ignoring their hosts."""
    return bool(tvm_ffi.structural_equal(_without_host(a), _without_host(b)))


def _without_host(target: Target) -> Target:
    if target.host is None:
        return target
    return Target({key: value for key, value in target.export().items() if key != "host"})
