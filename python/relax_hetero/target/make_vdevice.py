"""The checked constructor of vdevices, and the parser of ``vdevices=`` and ``--vdevice`` lists."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, TypeAlias

import tvm
import tvm_ffi
from tvm.target import Target, list_tags

from ..errors import VDeviceError
from .backend import backend_of
from .device_words import device_hint
from .hosts import check_host, host_of, hosts_of, on_host, split_host
from .mesh import MESH_NAME
from .native_target import check_cpu_names, default_target, device_kinds, native

VDeviceEntry: TypeAlias = "str | dict[str, Any] | Target | tvm.relax.VDevice"  # one entry of a `vdevices=` list

_SCOPE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*([.\-][A-Za-z0-9_]+)*")
_NUMBERED = re.compile(r"(?P<target>[^\s:{}]+)(:(?P<id>0|[1-9][0-9]*))?")


def VDevice(
    target: str | dict[str, Any] | Target | tvm.runtime.Device,
    vdevice_id: int = 0,
    memory_scope: str = "global",
    host: str | None = None,
) -> tvm.relax.VDevice:
    """Make a vdevice from checked arguments.

    Parameters
    ----------
    target : str, dict, Target or Device
        Target in any form that TVM accepts. A kind alone (``llvm``, ``cuda``) stands for the hardware of this computer;
        ``{"kind": "llvm", "mcpu": "generic"}`` is the oldest CPU of its architecture.
    vdevice_id : int
        Number of the device at run time, such as 1 for ``cuda(1)``.
    memory_scope : str
        TVM storage scope, such as "global".
    host : str, optional
        Host of the device in a cluster (`relax_hetero.cluster`). A kind alone then stands for the hardware of that
        host.

    Returns
    -------
    vdevice : tvm.relax.VDevice
        Entry for the list of vdevices of a module.

    Raises
    ------
    VDeviceError
        An invalid target, or one whose kind is not a device; an id that is not an int >= 0; or a malformed scope or
        host.
    """
    tvm_target = _target(target)
    check_cpu_names(tvm_target)
    if host is not None:
        is_kind = isinstance(target, str) and target in device_kinds()
        tvm_target = on_host(tvm_target, check_host(host), native=is_kind)
    kind = tvm_target.kind.name
    if kind not in device_kinds():
        raise VDeviceError(f"a vdevice needs a target kind of a device ({', '.join(device_kinds())}), got {kind}")
    if isinstance(vdevice_id, bool) or not isinstance(vdevice_id, int) or not 0 <= vdevice_id < 2**31:
        raise VDeviceError(f"vdevice_id of {kind!r} must be an int >= 0, got {vdevice_id!r}")
    if not isinstance(memory_scope, str) or not _SCOPE.fullmatch(memory_scope):
        raise VDeviceError(f"memory_scope of {kind!r} must be a storage scope such as 'global', got {memory_scope!r}")
    return tvm.relax.VDevice(tvm_target, vdevice_id, memory_scope)


def physical(vdevice: tvm.relax.VDevice) -> tuple[int, int]:
    """The default physical device of a vdevice: (DLPack device type, ``vdevice_id``)."""
    return int(vdevice.target.get_target_device_type()), int(vdevice.vdevice_id)


def parse_vdevices(specs: VDeviceEntry | Iterable[VDeviceEntry]) -> list[tvm.relax.VDevice]:
    """Parse a `vdevices=` list, or a single entry.

    `specs`: a string is a target kind (``llvm`` and ``cuda`` stand for the hardware of this computer), a kind with a
    physical id at run time ("cuda:1" is ``vdevice_id`` 1), a TVM target tag ("nvidia/nvidia-h100"), or a target in
    JSON. In a cluster it begins with its host ("b/cuda:1"), and a kind stands for the hardware of that host. Dicts and
    targets are used unchanged, except that a CUDA dict without "arch" gets this computer's. Returns the vdevices in the
    same order. Entries without an id get the lowest id that is free on their host for their device *type*, so that
    "llvm" and "c" (both CPU) get 0 and 1. Entries with equal ids share one physical device. Raises VDeviceError for an
    empty list, an invalid entry, or a list of which only some entries name hosts.
    """
    if isinstance(specs, (str, dict, Target, tvm.relax.VDevice)):
        specs = [specs]
    elif not isinstance(specs, Iterable):
        raise VDeviceError(f"vdevices must be a list of strings, dicts, targets or VDevices, got {specs!r}")
    used_ids: dict[tuple[str | None, int], set[int]] = {}
    vdevices = []
    for position, spec in enumerate(specs):
        try:
            vdevices.append(_parse_entry(spec, used_ids))
        except VDeviceError as error:
            raise VDeviceError(f"vdevices[{position}]: {error}") from error
        device_type, number = physical(vdevices[-1])
        used_ids.setdefault((host_of(vdevices[-1]), device_type), set()).add(number)
    if not vdevices:
        raise VDeviceError("vdevices is empty; name at least one device, e.g. 'llvm'")
    hosts_of(vdevices)
    return vdevices


def _parse_entry(spec: VDeviceEntry, used_ids: dict[tuple[str | None, int], set[int]]) -> tvm.relax.VDevice:
    if isinstance(spec, tvm.relax.VDevice):
        VDevice(spec.target, int(spec.vdevice_id), str(spec.memory_scope))  # for its checks
        return spec
    host: str | None = None
    kind: str | None = None
    number: int | None = None
    if isinstance(spec, str) and not spec.startswith("{") and not _is_tag(spec):
        host, spec = split_host(spec)
    if isinstance(spec, str) and not spec.startswith("{"):
        kind, number = _split_number(spec)
    if kind is not None and kind in device_kinds():
        target = native(kind, number or 0) if host is None else Target(kind)
    else:
        target = _target(_with_arch(_from_json(spec) if kind is None else kind), str(spec))
    if number is None:
        used = used_ids.get((host or host_of(target), int(target.get_target_device_type())), set())
        number = next(candidate for candidate in range(len(used) + 1) if candidate not in used)
        if kind is not None and kind in device_kinds() and host is None:
            target = native(kind, number)  # the computer's second GPU may be another model
    if host is not None:
        target = on_host(target, host, native=kind in device_kinds())
    return VDevice(target, number)


def _is_tag(spec: str) -> bool:
    """Return whether a name with a "/" is a TVM target tag ("nvidia/nvidia-h100") rather than a host's."""
    return "/" in spec and spec.partition(":")[0] in list_tags()


def _split_number(spec: str) -> tuple[str, int | None]:
    """Split "cuda:1" into kind (or target tag) and physical id or None."""
    match = _NUMBERED.fullmatch(spec)
    if match is None:
        raise VDeviceError(
            f"{spec!r} is not 'kind' or 'kind:id' (with an id from 0), a target tag, or a target in JSON{_hint(spec)}"
        )
    return match["target"], None if match["id"] is None else int(match["id"])


def _hint(spec: str) -> str:
    """End of an error message about an unknown target: a suggestion, and all kinds."""
    if mesh := MESH_NAME.fullmatch(spec):
        kind = mesh["kind"]
        return f": a mesh is named in rules and annotations; expected its devices here, as in [{kind!r}, {kind!r}]"
    return (
        f"{device_hint(spec, device_kinds(), [str(tag) for tag in list_tags()])}; kinds are {', '.join(device_kinds())}"
    )


def _from_json(spec: str | dict[str, Any] | Target) -> dict[str, Any] | Target:
    if not isinstance(spec, str):
        return spec
    try:
        config = json.loads(spec)
    except json.JSONDecodeError as error:
        raise VDeviceError(f"{spec!r} is not a target in JSON: {error}") from error
    if not isinstance(config, dict):
        raise VDeviceError(f"{spec!r} is not a target in JSON: it must be an object")
    return config


def _with_arch(target: str | dict[str, Any] | Target) -> str | dict[str, Any] | Target:
    if not isinstance(target, dict) or not isinstance(target.get("kind"), str):
        return target
    return backend_of(target["kind"]).completed_config(target)


def _target(target: str | dict[str, Any] | Target | tvm.runtime.Device, spelled: str | None = None) -> Target:
    """Make a target; the VDeviceError quotes `spelled`, the full text that contains `target`."""
    if isinstance(target, Target):
        return target
    try:
        if isinstance(target, tvm_ffi.core.Device):
            return Target.from_device(target)
        if isinstance(target, (str, dict)):
            return default_target(target) if target in device_kinds() else Target(target)
    except (ValueError, TypeError, RuntimeError) as error:
        kind = target.get("kind") if isinstance(target, dict) else target
        if isinstance(kind, str) and kind not in Target.list_kinds():
            if kind is not target:
                raise VDeviceError(f"{target!r}: {kind!r} is not a kind of target{_hint(kind)}") from error
            if spelled is None and kind.partition(":")[0] in device_kinds():
                what = f"{target!r} is not a target; give the kind alone, and the number as vdevice_id="
                raise VDeviceError(what) from error
            raise VDeviceError(f"{(spelled or target)!r} is not a target{_hint(spelled or kind)}") from error
        reason = str(error).partition(" Target creation from ")[0].splitlines()[0].rpartition(") is false: ")[2]
        raise VDeviceError(f"{target!r} is not a target: {reason}") from error
    raise VDeviceError(f"a target is a string, a dict, a Target or a Device, got {target!r} ({type(target).__name__})")
