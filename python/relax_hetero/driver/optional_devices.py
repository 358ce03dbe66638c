"""Versions of a module that do without optional devices: their work is the fallback device's.

Of the optional devices, given in order of their importance, each version lacks one more than the one before, the last
named first. The work of a missing device goes to the module's host, its last CPU device, or to this CPU where the
module has none. A version is compiled by itself, so that its layouts and kernels are those of the devices it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tvm

from ..errors import BuildError, VDeviceError
from ..target.native_target import native
from ..target.vdevice import (
    VDevice,
    VDeviceSpec,
    device_name,
    host_vdevice,
    is_cpu,
    lookup,
    vdevice_index,
    vdevices_of,
)
from ..transform.ir.module_attrs import is_lowered
from ..transform.placement.update_vdevice import succeed_vdevices


def optional_indices(mod: tvm.IRModule, optional: VDeviceSpec | Iterable[VDeviceSpec] | None) -> tuple[int, ...]:
    """Positions of the optional devices in the module's list.

    Raises
    ------
    VDeviceError
        One that the module has not, one given twice, or a CPU.
    BuildError
        The module is lowered, and names devices in code.
    """
    if optional is None:
        return ()
    given = list(optional) if isinstance(optional, Iterable) and not isinstance(optional, str) else [optional]
    vdevices = vdevices_of(mod)
    found: list[int] = []
    for spec in given:
        try:
            vdevice = lookup(spec, vdevices)  # type: ignore[arg-type]
        except VDeviceError as error:
            raise VDeviceError(f"rh.compile: optional: {error}") from error
        name, index = device_name(vdevice, vdevices), vdevice_index(vdevice, vdevices)
        if is_cpu(vdevice):
            raise VDeviceError(f"rh.compile: optional: {name} is a CPU, which every machine has; expected a GPU")
        if index in found:
            raise VDeviceError(f"rh.compile: optional: {name} is given twice")
        found.append(index)
    if found and is_lowered(mod):
        raise BuildError("rh.compile: optional devices need a module before LowerToVM, found one that is lowered")
    return tuple(found)


def without_devices(mod: tvm.IRModule, left_out: Sequence[int]) -> tvm.IRModule:
    """The module with the work of some devices on the fallback device.

    Parameters
    ----------
    left_out : sequence of int
        Positions in the module's list.
    """
    vdevices = vdevices_of(mod)
    kept = [vdevice for index, vdevice in enumerate(vdevices) if index not in left_out]
    fallback = host_vdevice(kept)
    if fallback is None:
        fallback = VDevice(native("llvm"))
        kept.append(fallback)
    successors = [fallback if index in left_out else vdevice for index, vdevice in enumerate(vdevices)]
    return succeed_vdevices(mod, successors, kept)
