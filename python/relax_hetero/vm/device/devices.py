"""Mapping of manifest entries to devices of this process."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tvm import runtime

from ...artifact.messages import unknown_name
from ...artifact.metadata import DeviceSpec, Metadata, device_names
from ...errors import BindingError
from ...target.backend import backend_of_device, backends
from ...target.device_words import device_hint
from .cpu_features import check_cpu
from .numa import check_node, check_one_node


def _make_vdevices_hashable() -> None:
    """Give VDevices a hash, so that they can be keys: TVM compares them by structure and defines none."""
    relax = sys.modules.get("tvm.relax")  # absent without TVM's compiler, and then VDevices do not exist
    if relax is not None and relax.VDevice.__hash__ is None:
        relax.VDevice.__hash__ = lambda vdevice: hash((str(vdevice.target), vdevice.vdevice_id))


_make_vdevices_hashable()


def bind_devices(metadata: Metadata, devices: object = None) -> list[runtime.Device]:
    """The physical device of every manifest entry, in order.

    `metadata`: metadata of the executable. `devices`: None: each entry's own device type and ``vdevice_id``. A
    sequence: one device per entry. A mapping replaces some: keys are ``"llvm:1"`` (the i-th of that kind), ``"llvm"``
    (the first), ``"vdevice:1"``, an index, a `DeviceSpec`, a VDevice or a ``tvm.Device``; values are ``tvm.Device`` or
    text (``"cpu:1"``). Raises BindingError for a wrong count, an unknown key, a device of another type than the entry
    was compiled for, or an absent device.
    """
    specs = metadata.devices
    chosen = chosen_devices(metadata, devices)
    names = device_names(specs)
    bound = [check_device(name, spec, device) for name, spec, device in zip(names, specs, chosen, strict=True)]
    check_one_node(names, specs, bound)
    for backend in {id(backend): backend for backend in map(backend_of_device, bound)}.values():
        backend.connect([device for device in bound if device.dlpack_device_type() == backend.device_type])
    return bound


def chosen_devices(metadata: Metadata, devices: object = None) -> list[runtime.Device]:
    """The device of every manifest entry, unchecked and possibly absent."""
    specs = metadata.devices
    chosen: list[Any] = [runtime.device(spec.type_name, spec.vdevice_id) for spec in specs]
    if isinstance(devices, Mapping):
        _remap(chosen, devices, specs)
    elif isinstance(devices, Sequence) and not isinstance(devices, str):
        if len(devices) != len(specs):
            raise BindingError(
                f"{len(devices)} devices given, expected {len(specs)}: {', '.join(device_names(specs)) or 'none'}"
            )
        chosen = list(devices)
    elif devices is not None:
        raise BindingError(
            f"devices is {devices!r} ({type(devices).__name__}), expected None, a list with one device per entry of "
            f"the manifest ({', '.join(device_names(specs))}), or a mapping from entries to devices"
        )
    return [to_device(device) for device in chosen]


def host_device(metadata: Metadata, devices: Sequence[runtime.Device]) -> runtime.Device:
    """The CPU that reads shapes and scalars: the manifest's host entry, else ``cpu(0)``."""
    return devices[metadata.host_index] if metadata.host_index >= 0 else runtime.device("cpu", 0)


def to_device(device: object) -> runtime.Device:
    """A ``tvm.Device`` from itself or from text such as ``"cuda:1"``; BindingError for anything else."""
    if isinstance(device, runtime.Device):
        return device
    if isinstance(device, str):
        try:
            return runtime.device(device)
        except ValueError as error:
            hint = device_hint(device, tuple(dict.fromkeys(backend.type_name for backend in backends())))
            raise BindingError(
                f"{device!r} is not a device ({error}){hint}; expected text like 'cpu:1' or 'cuda:0'"
            ) from None
    raise BindingError(
        f"{device!r} ({type(device).__name__}) is not a device; expected a tvm.Device or text like 'cpu:1'"
    )


def _remap(chosen: list[Any], devices: Mapping[object, object], specs: tuple[DeviceSpec, ...]) -> None:
    keys: dict[int, object] = {}
    for key, device in devices.items():
        index = find_entry(key, specs)
        if index in keys:
            raise BindingError(f"{device_names(specs)[index]} is given twice: as {keys[index]!r} and as {key!r}")
        keys[index] = key
        chosen[index] = device


def find_entry(key: object, specs: tuple[DeviceSpec, ...]) -> int:
    """The manifest index of `key` (see `bind_devices`); BindingError if there is none."""
    names = device_names(specs)
    index: int | None = None
    if isinstance(key, bool):
        pass
    elif isinstance(key, int):
        index = key if 0 <= key < len(specs) else None
    elif isinstance(key, str):
        index = _find_name(key, names)
    elif isinstance(key, DeviceSpec):
        index = _find_spec(key, specs)
    elif isinstance(key, runtime.Device):
        identity = (key.dlpack_device_type(), key.index)
        index = next((i for i, spec in enumerate(specs) if (spec.device_type, spec.vdevice_id) == identity), None)
    elif hasattr(key, "target") and hasattr(key, "vdevice_id"):
        scope = str(getattr(key, "memory_scope", "global"))
        from ...target.native_target import with_hardware  # VDevices imply the compiler

        index = _find_spec(DeviceSpec(str(key.target), int(key.vdevice_id), scope), specs)
        if index is None:
            target = str(with_hardware(key).target)
            index = _find_spec(DeviceSpec(target, int(key.vdevice_id), scope), specs)
    if index is None:
        choices = [*names, *(f"vdevice:{i}" for i in range(len(names)))]
        hint = device_hint(key, names) if isinstance(key, str) else ""
        raise unknown_name("device", key, choices, "the manifest", hint)
    return index


def _find_name(key: str, names: list[str]) -> int | None:
    kind, _, number = key.partition(":")
    if number and not (number.isascii() and number.isdigit()):
        return None
    position = int(number or 0)
    if kind == "vdevice":
        return position if number and position < len(names) else None
    return names.index(f"{kind}:{position}") if f"{kind}:{position}" in names else None


def _find_spec(key: DeviceSpec, specs: tuple[DeviceSpec, ...]) -> int | None:
    def identity(spec: DeviceSpec) -> tuple[str, int, str]:
        return json.dumps(json.loads(spec.target), sort_keys=True), spec.vdevice_id, spec.memory_scope

    return next((i for i, spec in enumerate(specs) if identity(spec) == identity(key)), None)


def check_device(name: str, spec: DeviceSpec, device: runtime.Device) -> runtime.Device:
    """Require that a device exists and can run a manifest entry's code; BindingError otherwise."""
    if device.dlpack_device_type() != spec.device_type:
        raise BindingError(f"{name} was compiled for a {spec.type_name} device (kind {spec.kind!r}), found {device}")
    check_cpu(name, spec)
    check_node(name, spec)
    backend = backend_of_device(device)
    backend.load()
    if device.index < 0 or not device.exist:
        reason = backend.why_absent()
        raise BindingError(f"{name} is to run on {device}, which this machine does not have{reason and f': {reason}'}")
    backend.check_device(name, spec, device)
    return device
