"""Virtual devices: strict look-up, names, equality, and the rules of default and host devices.

A vdevice is TVM's ``relax.VDevice`` (target, ``vdevice_id``, ``memory_scope``) in ``mod.global_infos["vdevice"]``. Its
*physical* device is (device type of its target, ``vdevice_id``); several vdevices may share one. ``kind:i`` is the i-th
vdevice of that target kind in the list, and in a cluster (`target.hosts`) ``host/kind:i`` the i-th of that host.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import tvm
import tvm_ffi

from ..errors import VDeviceError
from .device_words import device_hint
from .hosts import host_of
from .make_vdevice import VDevice, parse_vdevices, physical
from .mesh import MESH_NAME, PRINTED_MESH, mesh_of_scope, mesh_positions, mesh_vdevice
from .native_target import device_kinds, native, with_hardware

__all__ = [
    "VDevice",
    "default_vdevice",
    "device_identifier",
    "device_name",
    "host_vdevice",
    "identifier",
    "is_cpu",
    "lookup",
    "native",
    "on_one_device",
    "parse_vdevices",
    "physical",
    "same_object",
    "same_vdevice",
    "vdevice_index",
    "vdevices_of",
    "with_vdevices",
]

VDeviceSpec: TypeAlias = "str | tvm.runtime.Device | tvm.relax.VDevice"  # forms in which users refer to a vdevice

_CPU = 1  # kDLCPU
# TVMScript prints "kind:i:scope", where i counts the kind over all hosts.
_NAME = re.compile(
    r"((?P<host>[^/:\s]+)/)?(?P<kind>[A-Za-z_][A-Za-z0-9_]*)(:(?P<index>0|[1-9][0-9]*)(:(?P<scope>[^\s:]+))?)?"
)


def same_object(a: tvm.relax.VDevice, b: tvm.relax.VDevice) -> bool:
    """Return whether both are one object (``VDevice.same_as`` of TVM 0.27 recurses infinitely)."""
    return bool(tvm_ffi.Object.same_as(a, b))


def same_vdevice(a: tvm.relax.VDevice | None, b: tvm.relax.VDevice | None) -> bool:
    """Return whether both are None, or equal in target, ``vdevice_id`` and ``memory_scope``."""
    return a is b if a is None or b is None else same_object(a, b) or bool(tvm_ffi.structural_equal(a, b))


def on_one_device(a: tvm.relax.VDevice, b: tvm.relax.VDevice) -> bool:
    """Return whether both have the same default physical device: host, type and number."""
    return host_of(a) == host_of(b) and physical(a) == physical(b)


def is_cpu(vdevice: tvm.relax.VDevice) -> bool:
    """Return whether a vdevice is a CPU."""
    return physical(vdevice)[0] == _CPU


def vdevices_of(mod: tvm.IRModule) -> list[tvm.relax.VDevice]:
    """The module's vdevices in order; empty if it declares none.

    Raises VDeviceError for an entry of the list that is not a vdevice with a target and an id >= 0.
    """
    vdevices = list((mod.global_infos or {}).get("vdevice", []))
    for index, entry in enumerate(vdevices):
        if not isinstance(entry, tvm.relax.VDevice):
            raise VDeviceError(f"entry {index} of the module's vdevice list is a {type(entry).__name__}, not a VDevice")
        if entry.target is None:
            raise VDeviceError(f"entry {index} of the module's vdevice list has no target")
        if entry.vdevice_id < 0:
            raise VDeviceError(f"entry {index} of the module's vdevice list has the id {entry.vdevice_id}, not >= 0")
    return vdevices


def with_vdevices(mod: tvm.IRModule, vdevices: Iterable[tvm.relax.VDevice]) -> tvm.IRModule:
    """A copy of the module with another list of vdevices, which shares the functions."""
    updated = mod.clone()
    updated.update_global_info("vdevice", list(vdevices))
    return updated


def vdevice_index(vdevice: tvm.relax.VDevice, vdevices: Sequence[tvm.relax.VDevice]) -> int:
    """The index of a vdevice in the list: of the object itself, else of the first equal one.

    Raises VDeviceError if no entry is equal.
    """
    for index, entry in enumerate(vdevices):
        if same_object(vdevice, entry):
            return index
    for candidate in (vdevice, with_hardware(vdevice)):  # `compile` replaces generic vdevices by the latter
        for index, entry in enumerate(vdevices):
            if same_vdevice(candidate, entry):
                return index
    raise VDeviceError(f"{_describe(vdevice)} is not among the vdevices; {_available(vdevices)}")


def device_name(vdevice: tvm.relax.VDevice, vdevices: Sequence[tvm.relax.VDevice]) -> str:
    """The name of a vdevice, ``kind:i`` or ``host/kind:i``, or of a mesh, ``kind:i+kind:j``."""
    if positions := mesh_positions(vdevice):
        return "+".join(_name_at(position, vdevices) for position in positions)
    return _name_at(vdevice_index(vdevice, vdevices), vdevices)


def device_identifier(vdevice: tvm.relax.VDevice, vdevices: Sequence[tvm.relax.VDevice]) -> str:
    """The name of a vdevice as part of an identifier: ``llvm_0``, ``b_cuda_0``."""
    return identifier(device_name(vdevice, vdevices))


def identifier(name: str) -> str:
    """The name of a device or a host as part of an identifier."""
    return re.sub(r"[^A-Za-z0-9_]", "_", name)


def default_vdevice(vdevices: Sequence[tvm.relax.VDevice]) -> tvm.relax.VDevice:
    """The default device for unplaced values: the first one. Raises VDeviceError for an empty list."""
    if not vdevices:
        raise VDeviceError("no vdevices are declared, so there is no default one")
    return vdevices[0]


def host_vdevice(
    vdevices: Sequence[tvm.relax.VDevice], of: tvm.relax.VDevice | None = None
) -> tvm.relax.VDevice | None:
    """The device that reads shapes, conditions and prints: the last CPU vdevice, or None.

    In a cluster it is the last CPU on the host of `of`, by default on the first vdevice's host.
    """
    if not vdevices:
        return None
    host = host_of(vdevices[0] if of is None else of)
    return next((entry for entry in reversed(vdevices) if is_cpu(entry) and host_of(entry) == host), None)


def lookup(spec: VDeviceSpec, vdevices: Sequence[tvm.relax.VDevice]) -> tvm.relax.VDevice:
    """Look up a vdevice, without a fallback.

    `spec`: ``"kind:i"`` is the i-th vdevice of that target kind, ``"kind"`` the first, ``"vdevice:j"`` the j-th of all;
    ``"b/kind:i"``, ``"b/kind"`` and ``"b/vdevice:j"`` count vdevices of host `b` only. TVMScript's printed form
    ``"kind:i:scope"`` also requires that scope. ``"kind[i:j]"`` is the mesh of ``kind:i`` to ``kind:j-1``, and
    ``"kind[0:4](2, 2)"`` one of two axes (`target.mesh`); meshes are in no list. A device matches the first entry of
    its device type whose ``vdevice_id`` is its index. A VDevice matches the same object, else the first equal entry.
    `vdevices`: list to search, usually ``vdevices_of(mod)``. Returns the entry of the list, or a mesh of entries.
    Raises VDeviceError if nothing matches; the message lists the available names.
    """
    if isinstance(spec, str):
        return _lookup_name(spec, vdevices)
    if isinstance(spec, tvm.relax.VDevice):
        if positions := mesh_positions(spec):
            if max(positions) >= len(vdevices):
                raise VDeviceError(f"a mesh has devices {list(positions)} of the list; {_available(vdevices)}")
            return spec
        return vdevices[vdevice_index(spec, vdevices)]
    if isinstance(spec, tvm_ffi.core.Device):
        key = (int(spec.dlpack_device_type()), int(spec.index))
        for entry in vdevices:
            if physical(entry) == key:
                return entry
        raise VDeviceError(f"no vdevice is on the physical device {spec!r}; {_available(vdevices)}")
    raise VDeviceError(
        f"a vdevice is named by a string, a tvm device or a VDevice, got {spec!r} ({type(spec).__name__}); "
        f"{_available(vdevices)}"
    )


def _lookup_name(name: str, vdevices: Sequence[tvm.relax.VDevice]) -> tvm.relax.VDevice:
    if mesh := MESH_NAME.fullmatch(name):
        numbers = range(int(mesh["begin"]), int(mesh["end"]))
        if not numbers:
            raise VDeviceError(f"{name!r} has no devices: expected a range whose end is above its begin, as in [0:2]")
        members = [_lookup_name(f"{mesh['kind']}:{number}", vdevices) for number in numbers]
        shape = [int(extent) for extent in mesh["shape"].split(",")] if mesh["shape"] else None
        return mesh_vdevice([vdevice_index(member, vdevices) for member in members], vdevices, shape)
    if (printed := PRINTED_MESH.fullmatch(name)) and (known_mesh := mesh_of_scope(printed["scope"])):
        if max(known_mesh) >= len(vdevices):
            raise VDeviceError(f"{name!r} has devices {list(known_mesh)} of the list; {_available(vdevices)}")
        return mesh_vdevice(known_mesh.positions, vdevices, known_mesh.shape)
    match = _NAME.fullmatch(name)
    if match is None:
        raise VDeviceError(
            f"{name!r} is not a vdevice name, which is 'kind', 'kind:i', 'vdevice:j' or a mesh 'kind[i:j]' or "
            f"'kind[i:j](m, n)' with numbers from 0, after 'host/' where there are several{_hint(name, vdevices)}; "
            f"{_available(vdevices)}"
        )
    kind, index, host = match["kind"], int(match["index"] or 0), match["host"]
    if host is not None and all(host_of(entry) != host for entry in vdevices):
        raise VDeviceError(f"no vdevice is on host {host!r} (asked for {name!r}); {_available(vdevices)}")
    candidates = [
        entry
        for entry in vdevices
        if (kind == "vdevice" or _kind(entry) == kind) and (host is None or host_of(entry) == host)
    ]
    if index < len(candidates):
        vdevice = candidates[index]
        if match["scope"] in (None, vdevice.memory_scope):
            return vdevice
        raise VDeviceError(f"vdevice {name!r} has memory_scope {vdevice.memory_scope!r}; {_available(vdevices)}")
    if not candidates and vdevices:
        hint = _hint(name, vdevices)
        remedy = "" if hint else f"; use one of these, or add {kind!r} to the list of devices"
        raise VDeviceError(f"no vdevice of kind {kind!r} (asked for {name!r}){hint}; {_available(vdevices)}{remedy}")
    if not candidates:
        raise VDeviceError(f"no vdevice {name!r}{device_hint(name, device_kinds())}; {_available(vdevices)}")
    of_kind = "" if kind == "vdevice" else f" of kind {kind!r}"
    there_are = f"there {'is' if len(candidates) == 1 else 'are'} {len(candidates)}"
    raise VDeviceError(f"no vdevice {name!r}: {there_are}{of_kind}; {_available(vdevices)}")


def _hint(name: str, vdevices: Sequence[tvm.relax.VDevice]) -> str:
    return device_hint(name, [_name_at(index, vdevices) for index in range(len(vdevices))])


def _available(vdevices: Sequence[tvm.relax.VDevice]) -> str:
    if not vdevices:
        return "the module declares no vdevices"
    return "available: " + ", ".join(_name_at(index, vdevices) for index in range(len(vdevices)))


def _name_at(index: int, vdevices: Sequence[tvm.relax.VDevice]) -> str:
    kind, host = _kind(vdevices[index]), host_of(vdevices[index])
    earlier = vdevices[:index]
    if host is None:
        return f"{kind}:{sum(_kind(entry) == kind for entry in earlier)}"
    return f"{host}/{kind}:{sum(_kind(entry) == kind and host_of(entry) == host for entry in earlier)}"


def _kind(vdevice: tvm.relax.VDevice) -> str:
    return str(vdevice.target.kind.name)


def _describe(vdevice: tvm.relax.VDevice) -> str:
    return f"VDevice({vdevice.target}, vdevice_id={vdevice.vdevice_id}, memory_scope={vdevice.memory_scope!r})"
