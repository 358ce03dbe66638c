"""An executable's constants on the devices of a machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm_ffi
from tvm import runtime

from .metadata import ConstantSpec
from .results import MemoryRanges
from .tensors import address_range, alias, copy_to, has_offset, is_host, same_device


class PlacedConstants:
    """Constants on their devices, as lowered functions take them.

    Host constants are aliases of the executable's (of the mapped file, where it was loaded from one); constants
    of other devices are copies.

    Attributes
    ----------
    values : tvm_ffi.Array of Tensor
    ranges : MemoryRanges
        The memory they occupy.
    """

    def __init__(
        self, tensors: Sequence[runtime.Tensor], specs: Sequence[ConstantSpec], devices: Sequence[runtime.Device]
    ) -> None:
        placed = [place_constant(t, devices[spec.device]) for t, spec in zip(tensors, specs, strict=True)]
        self.values: Any = tvm_ffi.convert(placed)
        self.ranges = MemoryRanges(map(address_range, placed))


def place_constant(tensor: runtime.Tensor, device: runtime.Device) -> runtime.Tensor:
    """A constant on `device`: itself, an alias, or a copy where the device cannot reach its memory."""
    if same_device(tensor.device, device):
        return alias(tensor, device) if has_offset(tensor) else tensor
    if is_host(tensor.device) and is_host(device):
        return alias(tensor, device)
    return copy_to(tensor, device)
