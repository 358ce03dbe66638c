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

    Host constants are aliases of the executable's (of the mapped file, where it was loaded from one); constants
    of other devices are copies.

    Attributes
    ----------
    values : object
        Tables of addresses are filled with those of this process.
    ranges : MemoryRanges
        The memory they occupy.
    """

    def __init__(
        self,
        tensors: Sequence[runtime.Tensor],
        specs: Sequence[ConstantSpec],
        devices: Sequence[runtime.Device],
        address_of: Callable[[str], int],
    ) -> None:
        placed = [_placed(t, spec, devices[spec.device]) for t, spec in zip(tensors, specs, strict=True)]
        for index, spec in enumerate(specs):
            if spec.addresses is not None:
                places = [address_of(e) if isinstance(e, str) else placed[e].data_ptr() for e in spec.addresses]
                placed[index] = _table(places, devices[spec.device])
        self.values: Any = tvm_ffi.convert(placed)
        self.ranges = MemoryRanges(map(address_range, placed))


def _table(addresses: Sequence[int], device: runtime.Device) -> runtime.Tensor:
    """Addresses as a tensor; one entry stands where there are none."""
    table = runtime.empty((max(len(addresses), 1),), "int64", device)
    copy_into(from_array(np.array(addresses or [0], "int64")), table)
    return table


def _placed(tensor: runtime.Tensor, spec: ConstantSpec, device: runtime.Device) -> runtime.Tensor:
    """A constant on `device`; for one that stands for the error record of a GPU, that record as its kernels see it."""
    record = backend_of_device(device).error_record(device.index) if spec.is_record else None
    if record is None:
        return place_constant(tensor, device)
    return alias(from_array(np.ctypeslib.as_array(record.words)), device)


def place_constant(tensor: runtime.Tensor, device: runtime.Device) -> runtime.Tensor:
    """A constant on `device`: itself, an alias, or a copy where the device cannot reach its memory."""
    if same_device(tensor.device, device):
        return alias(tensor, device) if has_offset(tensor) else tensor
    if is_host(tensor.device) and is_host(device):
        return alias(tensor, device)
    return copy_to(tensor, device)
