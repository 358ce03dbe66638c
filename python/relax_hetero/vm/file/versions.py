"""Which version of an executable a machine runs: that with the most of its optional devices that are here."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

from ...artifact.metadata import Metadata, device_names
from ...errors import BindingError
from ..device.devices import check_device, chosen_devices, find_entry
from .executable import Executable

_log = logging.getLogger("relax_hetero")


def usable_version(
    executable: Executable, devices: object, memory_limit: object = None
) -> tuple[Executable, object, object]:
    """The version of an executable whose devices are here, and what was said of devices and limits, in its terms.

    Parameters
    ----------
    executable : Executable
        With its versions.
    devices, memory_limit : object
        As `VirtualMachine` takes them, by entries of the executable's manifest.

    Raises
    ------
    BindingError
        As `bind_devices`, for what does not depend on whether a device is here.
    """
    about = executable.metadata
    absent = _absent(about, devices)
    if not absent or not executable.versions:
        return executable, devices, memory_limit
    names = device_names(about.devices)
    for index, why in absent.items():
        _log.info("the model runs without %s: %s", names[index], why)
    first = min(about.optional.index(index) for index in absent)
    left_out = about.optional[first:]
    version = executable.versions[len(left_out) - 1]
    return version, _without(about, left_out, devices), _without(about, left_out, memory_limit)


def _absent(metadata: Metadata, devices: object) -> dict[int, str]:
    """The optional devices that are not here, or cannot run their code, and why."""
    if not metadata.optional:
        return {}
    chosen, names = chosen_devices(metadata, devices), device_names(metadata.devices)
    found = {}
    for index in metadata.optional:
        spec = metadata.devices[index]
        if chosen[index].dlpack_device_type() == spec.device_type:
            try:
                check_device(names[index], spec, chosen[index])
            except BindingError as error:
                found[index] = str(error)
    return found


def _without(metadata: Metadata, left_out: Collection[int], present: object) -> object:
    """A mapping from manifest entries, or a list with one for each, by the entries of a version; others as they are."""
    if isinstance(present, Mapping):
        by_index = {find_entry(key, metadata.devices): value for key, value in present.items()}
    elif isinstance(present, Sequence) and not isinstance(present, str):
        by_index = dict(enumerate(present))
    else:
        return present
    kept = [index for index in range(len(metadata.devices)) if index not in left_out]
    return {position: by_index[index] for position, index in enumerate(kept) if index in by_index}
