"""Operators of placement: hints (``relax.hint_on_device``) and explicit transfers (``relax.to_vdevice``).

Both look vdevices up in the module under construction, by TVMScript or else by a ``BlockBuilder``. Both take a tensor,
or a tuple, and then apply to each of its tensors.

The stock attributes of a hint hold a device type, an index and a memory scope, not a vdevice. A hint means the first
vdevice with this device type, ``vdevice_id`` and scope. If no scope fits and the hint says "global", which is also the
default, it means the first vdevice of that device. Where several vdevices share a physical device and a scope, the
attributes are ambiguous: `encode_hint` then writes the index in the module's list into the scope, as "vdevice:2". That
form prints, parses and serializes like any scope. The scope of a hint for a mesh is the mesh's (`target.mesh`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

import tvm
import tvm_ffi
from tvm import relax
from tvm.relax.op.op_attrs import HintOnDeviceAttrs
from tvm.relax.script.builder import ir as relax_builder
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder.ir import IRModuleFrame

from ..errors import PlacementError, VDeviceError
from ..target.mesh import mesh_of_scope
from ..target.vdevice import VDeviceSpec, device_name, lookup, physical, same_object, vdevice_index, vdevices_of

# Operand of these operators: an expression, or a Python tuple or list of operands.
Operand: TypeAlias = "relax.Expr | Sequence[Operand]"

_POSITION = re.compile(r"vdevice:(0|[1-9][0-9]*)")


def hint_on_device(x: Operand, device: VDeviceSpec, memory_scope: str | None = None) -> relax.Expr:
    """Say where a value should be computed; `RealizeVDevice` takes the hint and removes it.

    Parameters
    ----------
    x : relax.Expr, or tuple of them
        A tensor, or a tuple (of Python, of Relax, or a tuple-typed variable), each tensor of which gets a hint.
    device : str, tvm.runtime.Device or VDevice
        Looked up at once in the module under construction (see `relax_hetero.target.vdevice.lookup`).
    memory_scope : str, optional
        Restricts a tvm device to vdevices of this scope; must equal the scope of a vdevice given in another form.

    Returns
    -------
    result : relax.Expr
        A stock ``relax.hint_on_device`` call, or a tuple of them.

    Raises
    ------
    VDeviceError
        If the module lacks the vdevice, or no module is under construction.
    PlacementError
        If `x` is neither a tensor nor a tuple.
    """
    vdevices = declared_vdevices(device)
    if memory_scope is not None and isinstance(device, tvm_ffi.core.Device):
        vdevice = _decode(int(device.dlpack_device_type()), int(device.index), memory_scope, vdevices)
    else:
        vdevice = lookup(device, vdevices)
        if memory_scope not in (None, vdevice.memory_scope):
            raise VDeviceError(
                f"hint_on_device: {device!r} has memory_scope {vdevice.memory_scope!r}, not {memory_scope!r}"
            )
    return each_tensor(x, "hint_on_device", lambda tensor: encode_hint(tensor, vdevice, vdevices))


def to_vdevice(x: Operand, vdevice: VDeviceSpec) -> relax.Expr:
    """Copy to a vdevice; the call is pure, allowed in dataflow blocks and never fused.

    Parameters
    ----------
    x : relax.Expr, or tuple of them
        A tensor, or a tuple (of Python, of Relax, or a tuple-typed variable), each tensor of which is copied.
    vdevice : str, tvm.runtime.Device or VDevice
        The destination, looked up at once in the module under construction (see `relax_hetero.target.vdevice.lookup`).
        A VDevice is used unchanged where no module is under construction.

    Returns
    -------
    result : relax.Expr
        A stock ``relax.to_vdevice`` call, or a tuple of them.

    Raises
    ------
    VDeviceError
        If the module lacks the vdevice, or no module is under construction to look a name up in.
    PlacementError
        If `x` is neither a tensor nor a tuple.
    """
    if isinstance(vdevice, tvm.relax.VDevice) and vdevices_under_construction() is None:
        destination = vdevice
    else:
        destination = resolve(vdevice)
    return each_tensor(x, "to_vdevice", lambda tensor: relax.op.to_vdevice(tensor, destination))


def encode_hint(x: relax.Expr, vdevice: VDeviceSpec, vdevices: Sequence[tvm.relax.VDevice]) -> relax.Call:
    """The ``relax.hint_on_device`` call that means `vdevice` in a module with these vdevices.

    Parameters
    ----------
    x : relax.Expr
        Value to place.
    vdevice : VDeviceSpec
        Intended device of the value.
    vdevices : sequence of tvm.relax.VDevice
        Devices of the module, in order.
    """
    destination = lookup(vdevice, vdevices)
    device_type, vdevice_id = physical(destination)
    scope = str(destination.memory_scope)
    if not same_object(_decode(device_type, vdevice_id, scope, vdevices), destination):
        scope = f"vdevice:{vdevice_index(destination, vdevices)}"
    return relax.op.hint_on_device(x, tvm.runtime.device(device_type, vdevice_id), scope)


def hinted_vdevice(hint: relax.Call, vdevices: Sequence[tvm.relax.VDevice]) -> tvm.relax.VDevice:
    """The vdevice of the list that a ``relax.hint_on_device`` call means; VDeviceError without one.

    Parameters
    ----------
    hint : relax.Call
        Call to ``relax.hint_on_device``.
    vdevices : sequence of tvm.relax.VDevice
        Devices of the module, in order.
    """
    return decode_hint(hint.attrs, vdevices)


def decode_hint(attrs: HintOnDeviceAttrs, vdevices: Sequence[tvm.relax.VDevice]) -> tvm.relax.VDevice:
    """`hinted_vdevice` from the attributes alone."""
    return _decode(int(attrs.device_type), int(attrs.index), str(attrs.memory_scope), vdevices)


def is_hint(expr: relax.Expr) -> bool:
    """Return whether `expr` is a call to ``relax.hint_on_device``.

    Parameters
    ----------
    expr : relax.Expr
        Expression of any kind.
    """
    return isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op) and expr.op.name == "relax.hint_on_device"


def _decode(device_type: int, vdevice_id: int, scope: str, vdevices: Sequence[tvm.relax.VDevice]) -> tvm.relax.VDevice:
    position = _POSITION.fullmatch(scope)
    if position is not None:
        vdevice = lookup(f"vdevice:{position[1]}", vdevices)
        if physical(vdevice) != (device_type, vdevice_id):
            raise VDeviceError(
                f"hint_on_device: {scope!r} is {device_name(vdevice, vdevices)} on device {physical(vdevice)}, "
                f"but the hint is for device {(device_type, vdevice_id)} (device type, index)"
            )
        return vdevice
    if mesh_of_scope(scope) is not None:
        return lookup(f"vdevice:-1:{scope}", vdevices)
    device = tvm.runtime.device(device_type, vdevice_id)
    first = lookup(device, vdevices)
    candidates = [entry for entry in vdevices if physical(entry) == (device_type, vdevice_id)]
    match = next((entry for entry in candidates if entry.memory_scope == scope), None)
    if match is not None:
        return match
    if scope == "global":
        return first
    scopes = ", ".join(f"{device_name(entry, vdevices)} ({entry.memory_scope})" for entry in candidates)
    raise VDeviceError(f"hint_on_device: no vdevice on {device} has memory_scope {scope!r}; available: {scopes}")


def each_tensor(operand: Operand, op_name: str, apply: Callable[[relax.Expr], relax.Expr]) -> relax.Expr:
    """Apply a function to a tensor, or to every tensor inside a tuple, field by field.

    Shapes and scalars inside a tuple lack a device and are not changed. Python tuples become Relax tuples; a variable
    of tuple type is split into its fields. Any other operand raises a PlacementError that begins with `op_name`.
    """
    return _visit(operand, op_name, apply, in_tuple=False)


def _visit(operand: Operand, op_name: str, apply: Callable[[relax.Expr], relax.Expr], in_tuple: bool) -> relax.Expr:
    if isinstance(operand, (tuple, list, relax.Tuple)):
        fields = operand.fields if isinstance(operand, relax.Tuple) else operand
        return relax.Tuple([_visit(field, op_name, apply, in_tuple=True) for field in fields])
    if not isinstance(operand, relax.Expr):
        raise PlacementError(
            f"{op_name} needs a Relax expression or a tuple of them, got {operand!r} ({type(operand).__name__})"
        )
    if _is_missing(operand.ty) and can_bind():
        operand = bind(operand, op_name)  # infers the type
    if isinstance(operand.ty, relax.TensorType) or _is_missing(operand.ty):
        return apply(operand)
    if isinstance(operand.ty, tvm.ir.TupleType):
        variable = bind(operand, op_name)
        items = [relax.TupleGetItem(variable, index) for index in range(len(operand.ty.fields))]
        return relax.Tuple([_visit(item, op_name, apply, in_tuple=True) for item in items])
    if in_tuple and isinstance(operand.ty, (relax.ShapeType, tvm.ir.PrimType)):
        return operand
    raise PlacementError(f"{op_name} needs a tensor or a tuple of tensors, {operand} is a {operand.ty}")


def _is_missing(ty: tvm.ir.Type) -> bool:
    return type(ty) is tvm.ir.Type  # TVM 0.27's type of expressions that are not normalized yet


def vdevices_under_construction() -> list[tvm.relax.VDevice] | None:
    """Vdevices of the module under construction; None without such a module.

    TVMScript takes precedence over a ``BlockBuilder``: inside a builder's scope, the parsed module counts.
    """
    if IRBuilder.is_in_scope():
        frames = [frame for frame in IRBuilder.current().frames if isinstance(frame, IRModuleFrame)]
        if not frames:
            return None
        infos = (frames[-1].global_infos or {}).get("vdevice", [])
        return [entry for entry in infos if isinstance(entry, tvm.relax.VDevice)]
    builder = relax.BlockBuilder.current()
    return None if builder is None else vdevices_of(builder.get())


def declared_vdevices(spec: VDeviceSpec) -> list[tvm.relax.VDevice]:
    """Vdevices of the module under construction, to look `spec` up in; VDeviceError without a module."""
    vdevices = vdevices_under_construction()
    if vdevices is None:
        raise VDeviceError(
            f"vdevice {spec!r} is looked up in the module under construction, and there is none: use it inside an "
            "@I.ir_module class or the function scope of relax.BlockBuilder(mod)"
        )
    return vdevices


def resolve(spec: VDeviceSpec) -> tvm.relax.VDevice:
    """Look `spec` up among the vdevices of the module under construction; VDeviceError if it is missing."""
    return lookup(spec, declared_vdevices(spec))


def bind(expr: relax.Expr, op_name: str) -> relax.Expr:
    """A variable bound to `expr` in the function under construction; PlacementError without a function."""
    if isinstance(expr, relax.Var):
        return expr
    if IRBuilder.is_in_scope():
        return relax_builder.emit(expr)
    builder = relax.BlockBuilder.current()
    if builder is None:
        raise PlacementError(f"{op_name} needs a variable here, got the unbound expression {expr}; emit it first")
    return builder.emit(expr)


def can_bind() -> bool:
    """Return whether a function is under construction, into which `bind` can emit."""
    return IRBuilder.is_in_scope() or relax.BlockBuilder.current() is not None
