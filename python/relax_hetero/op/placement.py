"""Operators of placement: hints (``relax.hint_on_device``) and explicit transfers (``relax.to_vdevice``).

Both look vdevices up in the module that is being built right now, by TVMScript, else by a ``BlockBuilder``. Both take a
tensor, or a tuple of which every tensor is treated alike.

The stock attributes of a hint hold a device type, an index and a memory scope, not a vdevice. A hint means the first
vdevice whose device type, ``vdevice_id`` and scope are those; where no scope fits and the hint says "global", which is
also what "not given" looks like, the first of that device. Where several vdevices share a physical device and a scope,
the attributes cannot tell them apart: `encode_hint` then writes the position in the module's list into the scope, as
"vdevice:2". That form prints, parses and serializes like any scope.
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
from ..target.vdevice import VDeviceSpec, device_name, lookup, physical, same_object, vdevice_index, vdevices_of

# What the operators here take: an expression, or a Python tuple or list of such.
Operand: TypeAlias = "relax.Expr | Sequence[Operand]"

_POSITION = re.compile(r"vdevice:(0|[1-9][0-9]*)")


def hint_on_device(x: Operand, device: VDeviceSpec, memory_scope: str | None = None) -> relax.Expr:
    """Say where a value should be computed; `RealizeVDevice` takes the hint and removes it.

    Parameters
    ----------
    x : relax.Expr, or tuple of them
        A tensor, or a tuple (a Python one, a Relax one, or a tuple-typed variable) of which every tensor gets a hint.
    device : str, tvm.runtime.Device or VDevice
        Looked up at once in the module under construction (see `relax_hetero.target.vdevice.lookup`).
    memory_scope : str, optional
        Restricts a tvm device to vdevices of this scope; must agree with a vdevice that is named otherwise.

    Returns
    -------
    result : relax.Expr
        A stock ``relax.hint_on_device`` call, or a tuple of them.

    Raises
    ------
    VDeviceError
        If the module has no such vdevice, or there is no module to look it up in.
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
    """Copy to a vdevice. Pure, allowed in dataflow blocks, never fused.

    Parameters
    ----------
    x : relax.Expr, or tuple of them
        A tensor, or a tuple (a Python one, a Relax one, or a tuple-typed variable) of which every tensor is copied.
    vdevice : str, tvm.runtime.Device or VDevice
        The destination, looked up at once in the module under construction (see `relax_hetero.target.vdevice.lookup`).
        A VDevice is taken as it is where no module is under construction.

    Returns
    -------
    result : relax.Expr
        A stock ``relax.to_vdevice`` call, or a tuple of them.

    Raises
    ------
    VDeviceError
        If the module has no such vdevice, or there is no module to look a name up in.
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
        Device that the value is to be on.
    vdevices : sequence of tvm.relax.VDevice
        Devices of the module, in order.
    """
    wanted = lookup(vdevice, vdevices)
    device_type, number = physical(wanted)
    scope = str(wanted.memory_scope)
    if not same_object(_decode(device_type, number, scope, vdevices), wanted):
        scope = f"vdevice:{vdevice_index(wanted, vdevices)}"
    return relax.op.hint_on_device(x, tvm.runtime.device(device_type, number), scope)


def hinted_vdevice(hint: relax.Call, vdevices: Sequence[tvm.relax.VDevice]) -> tvm.relax.VDevice:
    """The vdevice of the list that a ``relax.hint_on_device`` call means; VDeviceError if it has none.

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
        Any expression.
    """
    return isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op) and expr.op.name == "relax.hint_on_device"


def _decode(device_type: int, number: int, scope: str, vdevices: Sequence[tvm.relax.VDevice]) -> tvm.relax.VDevice:
    position = _POSITION.fullmatch(scope)
    if position is not None:
        found = lookup(f"vdevice:{position[1]}", vdevices)
        if physical(found) != (device_type, number):
            raise VDeviceError(
                f"hint_on_device: {scope!r} is {device_name(found, vdevices)} on device {physical(found)}, "
                f"but the hint is for device {(device_type, number)} (device type, index)"
            )
        return found
    device = tvm.runtime.device(device_type, number)
    first = lookup(device, vdevices)
    candidates = [entry for entry in vdevices if physical(entry) == (device_type, number)]
    fitting = next((entry for entry in candidates if entry.memory_scope == scope), None)
    if fitting is not None:
        return fitting
    if scope == "global":
        return first
    scopes = ", ".join(f"{device_name(entry, vdevices)} ({entry.memory_scope})" for entry in candidates)
    raise VDeviceError(f"hint_on_device: no vdevice on {device} has memory_scope {scope!r}; available: {scopes}")


def each_tensor(operand: Operand, op_name: str, apply: Callable[[relax.Expr], relax.Expr]) -> relax.Expr:
    """`apply` to a tensor, or to every tensor inside a tuple, field by field.

    Fields that are shapes or scalars stay as they are: they have no device. Python tuples become Relax tuples; a
    variable of tuple type is taken apart. PlacementError, which begins with `op_name`, for anything else.
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
        operand = bind(operand, op_name)  # the type, and whether it is a tuple, is known once it is bound
    if isinstance(operand.ty, relax.TensorType) or _is_missing(operand.ty):
        return apply(operand)
    if isinstance(operand.ty, tvm.ir.TupleType):
        whole = bind(operand, op_name)
        items = [relax.TupleGetItem(whole, index) for index in range(len(operand.ty.fields))]
        return relax.Tuple([_visit(item, op_name, apply, in_tuple=True) for item in items])
    if in_tuple and isinstance(operand.ty, (relax.ShapeType, tvm.ir.PrimType)):
        return operand
    raise PlacementError(f"{op_name} needs a tensor or a tuple of tensors, {operand} is a {operand.ty}")


def _is_missing(ty: tvm.ir.Type) -> bool:
    return type(ty) is tvm.ir.Type  # what TVM 0.27 gives expressions that were not normalized yet


def vdevices_under_construction() -> list[tvm.relax.VDevice] | None:
    """Vdevices of the module under construction, None where no module is.

    TVMScript wins over a ``BlockBuilder``: parsing a module inside a builder's scope is about the parsed module.
    """
    if IRBuilder.is_in_scope():
        frames = [frame for frame in IRBuilder.current().frames if isinstance(frame, IRModuleFrame)]
        if not frames:
            return None
        found = list((frames[-1].global_infos or {}).get("vdevice", []))
        return [entry for entry in found if isinstance(entry, tvm.relax.VDevice)]
    builder = relax.BlockBuilder.current()
    return None if builder is None else vdevices_of(builder.get())


def declared_vdevices(spec: VDeviceSpec) -> list[tvm.relax.VDevice]:
    """Vdevices of the module under construction, in which `spec` is to be found; VDeviceError if there is no module."""
    vdevices = vdevices_under_construction()
    if vdevices is None:
        raise VDeviceError(
            f"vdevice {spec!r} is looked up in the module under construction, and there is none: use it inside an "
            "@I.ir_module class or the function scope of relax.BlockBuilder(mod)"
        )
    return vdevices


def resolve(spec: VDeviceSpec) -> tvm.relax.VDevice:
    """Look `spec` up among the vdevices of the module under construction; VDeviceError if it is not there."""
    return lookup(spec, declared_vdevices(spec))


def bind(expr: relax.Expr, op_name: str) -> relax.Expr:
    """A variable bound to `expr` in the function under construction; PlacementError if there is no function."""
    if isinstance(expr, relax.Var):
        return expr
    if IRBuilder.is_in_scope():
        return relax_builder.emit(expr)
    builder = relax.BlockBuilder.current()
    if builder is None:
        raise PlacementError(f"{op_name} needs a variable here, got the unbound expression {expr}; emit it first")
    return builder.emit(expr)


def can_bind() -> bool:
    """Return whether `bind` has a function to emit into."""
    return IRBuilder.is_in_scope() or relax.BlockBuilder.current() is not None
