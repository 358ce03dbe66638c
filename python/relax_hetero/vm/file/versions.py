"""Choice of the version of an executable that uses the most of its optional devices that are present."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

from ...artifact.metadata import Metadata, device_names
from ...errors import BindingError
from ..device.devices import check_device, chosen_devices, find_entry
from .executable import Executable

_log = logging.getLogger("relax_hetero")


def version_for_devices(
    executable: Executable, devices: object, memory_limit: object = None
) -> tuple[Executable, object, object]:
    """Choose the version of an executable whose devices are present, and translate arguments to its manifest.

    `executable`: executable with its versions. `devices`, `memory_limit`: arguments of `VirtualMachine`, by entries of
    the executable's manifest. Raises BindingError for invalid `devices` (see `bind_devices`), absent ones excepted.
    """
    metadata = executable.metadata
    absent = _absent(metadata, devices)
    if not absent or not executable.versions:
        return executable, devices, memory_limit
    names = device_names(metadata.devices)
    for index, reason in absent.items():
        _log.info("the model runs without %s: %s", names[index], reason)
    first = min(metadata.optional.index(index) for index in absent)
    omitted = metadata.optional[first:]
    version = executable.versions[len(omitted) - 1]
    return version, _without(metadata, omitted, devices), _without(metadata, omitted, memory_limit)


def _absent(metadata: Metadata, devices: object) -> dict[int, str]:
    """The optional devices that are absent or cannot run their code, each with the reason."""
    if not metadata.optional:
        return {}
    chosen, names = chosen_devices(metadata, devices), device_names(metadata.devices)
    reasons = {}
    for index in metadata.optional:
        spec = metadata.devices[index]
        if chosen[index].dlpack_device_type() == spec.device_type:
            try:
                check_device(names[index], spec, chosen[index])
            except BindingError as error:
                reasons[index] = str(error)
    return reasons


def _without(metadata: Metadata, omitted: Collection[int], by_entry: object) -> object:
    """Translate a mapping from manifest entries, or a list by entry, to a version's entries; others unchanged."""
    if isinstance(by_entry, Mapping):
        by_index = {find_entry(key, metadata.devices): value for key, value in by_entry.items()}
    elif isinstance(by_entry, Sequence) and not isinstance(by_entry, str):
        by_index = dict(enumerate(by_entry))
    else:
        return by_entry
    remaining = [index for index in range(len(metadata.devices)) if index not in omitted]
    return {position: by_index[index] for position, index in enumerate(remaining) if index in by_index}
