"""Placement hints: ``relax.hint_on_device``, and what its attributes mean.

The stock attributes hold a device type, an index and a memory scope, not a vdevice. A hint means the first vdevice
whose device type, ``vdevice_id`` and scope are those; where no scope fits and the hint says "global", which is also
what "not given" looks like, the first of that device. Where several vdevices share a physical device and a scope, the
attributes cannot tell them apart: `encode_hint` then writes the position in the module's list into the scope, as
"vdevice:2". That form prints, parses and serializes like any scope.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import tvm
import tvm_ffi
from tvm import relax
from tvm.relax.op.op_attrs import HintOnDeviceAttrs

from ..errors import VDeviceError
from ..target.vdevice import VDeviceSpec, device_name, lookup, physical, same_object, vdevice_index
from .each_tensor import Operand, each_tensor
from .under_construction import declared_vdevices

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


def encode_hint(x: relax.Expr, vdevice: VDeviceSpec, vdevices: Sequence[tvm.relax.VDevice]) -> relax.Call:
    """The ``relax.hint_on_device`` call that means `vdevice` in a module with these vdevices."""
    wanted = lookup(vdevice, vdevices)
    device_type, number = physical(wanted)
    scope = str(wanted.memory_scope)
    if not same_object(_decode(device_type, number, scope, vdevices), wanted):
        scope = f"vdevice:{vdevice_index(wanted, vdevices)}"
    return relax.op.hint_on_device(x, tvm.runtime.device(device_type, number), scope)


def hinted_vdevice(hint: relax.Call, vdevices: Sequence[tvm.relax.VDevice]) -> tvm.relax.VDevice:
    """The vdevice, one of the list's own objects, that a ``relax.hint_on_device`` call means.

    Raises
    ------
    VDeviceError
        If the list has no such vdevice.
    """
    return decode_hint(hint.attrs, vdevices)


def decode_hint(attrs: HintOnDeviceAttrs, vdevices: Sequence[tvm.relax.VDevice]) -> tvm.relax.VDevice:
    """`hinted_vdevice` from the attributes alone."""
    return _decode(int(attrs.device_type), int(attrs.index), str(attrs.memory_scope), vdevices)


def is_hint(expr: relax.Expr) -> bool:
    """Whether `expr` is a call to ``relax.hint_on_device``."""
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
