"""An executable's constants on the devices of a machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm_ffi
from tvm import runtime

from ...artifact.metadata import ConstantSpec
from ...target.backend import backend_of_device
from .tensors import (
    MemoryRanges,
    address_range,
    alias,
    copy_into,
    copy_to,
    from_array,
    has_offset,
    is_host,
    same_device,
)


class PlacedConstants:
    """Constants on their devices, as lowered functions take them.

    Host constants are aliases of the executable's (memory-mapped if it was loaded from a file); constants of other
    devices are copies.
    """

    def __init__(
        self,
        tensors: Sequence[runtime.Tensor],
        specs: Sequence[ConstantSpec],
        devices: Sequence[runtime.Device],
        address_of: Callable[[str], int],
    ) -> None:
        placed = [_place(t, spec, devices[spec.device]) for t, spec in zip(tensors, specs, strict=True)]
        for index, spec in enumerate(specs):
            if spec.addresses is not None:
                table = [address_of(e) if isinstance(e, str) else placed[e].data_ptr() for e in spec.addresses]
                placed[index] = _table(table, devices[spec.device])
        # Constants in order; address tables have the addresses of this process.
        self.values: Any = tvm_ffi.convert(placed)
        self.ranges = MemoryRanges(map(address_range, placed))  # memory of the constants


def _table(addresses: Sequence[int], device: runtime.Device) -> runtime.Tensor:
    """Addresses as a tensor, with one zero entry if there are none."""
    table = runtime.empty((max(len(addresses), 1),), "int64", device)
    copy_into(from_array(np.array(addresses or [0], "int64")), table)
    return table


def _place(tensor: runtime.Tensor, spec: ConstantSpec, device: runtime.Device) -> runtime.Tensor:
    """A constant on `device`; a placeholder for a GPU's error record becomes an alias of that record."""
    record = backend_of_device(device).error_record(device.index) if spec.is_record else None
    if record is None:
        return place_constant(tensor, device)
    return alias(from_array(np.ctypeslib.as_array(record.words)), device)


def place_constant(tensor: runtime.Tensor, device: runtime.Device) -> runtime.Tensor:
    """A constant on `device`: itself, an alias, or a copy if the device cannot access its memory."""
    if same_device(tensor.device, device):
        return alias(tensor, device) if has_offset(tensor) else tensor
    if is_host(tensor.device) and is_host(device):
        return alias(tensor, device)
    return copy_to(tensor, device)
