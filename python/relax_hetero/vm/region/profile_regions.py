"""Command buffers under a profiler, which calls their kernels one by one to measure each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tvm import runtime

from ...artifact.commands import READ, Dispatch, RegionSpec
from ...artifact.kernel_addresses import kernel_address
from ...artifact.metadata import CPU, Metadata
from ..device.tensors import address_range
from ..file.executable import Executable
from .walk_commands import Kernel, Memory, bound


class RegionCalls:
    """The kernels of a machine's command buffers on CPUs.

    `constants`: constants of the executable on the machine's devices.
    """

    def __init__(self, executable: Executable, constants: Sequence[runtime.Tensor]) -> None:
        metadata, code = executable.metadata, executable.runnable_module()
        self._constants = constants
        self._kernels = {
            name: Kernel(spec, kernel_address(code, spec.symbol), code)
            for name, spec in metadata.kernels.items()
            if spec.symbol
        }
        self._regions = {region.name: region for region in metadata.regions if self._can_be_walked(metadata, region)}

    def _can_be_walked(self, metadata: Metadata, region: RegionSpec) -> bool:
        return metadata.devices[region.device].device_type == CPU and all(
            isinstance(command, Dispatch)
            and command.kernel in self._kernels
            and self._kernels[command.kernel].spec.workgroups == 0
            for command in region.commands
        )

    def kernel_calls(self, symbol: str, args: Sequence[Any]) -> Iterator[tuple[Dispatch, Callable[[], int]]] | None:
        """The kernel calls of a region's call in order, each with its command.

        A call returns 0 unless the kernel failed (`walk_commands.raise_kernel_error`). None for symbols that are not
        regions, and for regions that only run as a whole.
        """
        region = self._regions.get(symbol)
        if region is None:
            return None
        inputs = sum(slot.access == READ for slot in region.slots)
        numbers = _numbers(region)
        tensors = list(args[1:])  # the first is the table of addresses
        arguments = tensors[inputs : inputs + len(numbers)]
        del tensors[inputs : inputs + len(numbers)]
        if len(tensors) != len(region.slots) + (region.arena != 0):
            return None
        addresses = [address_range(tensor)[0] for tensor in tensors]
        directs = [address_range(self._constants[index])[0] for index in region.directs]
        memory = Memory(addresses[: len(region.slots)], directs, addresses[-1])
        return self._calls(region, memory, {**_extents(region, tensors), **dict(zip(numbers, arguments, strict=True))})

    def _calls(
        self, region: RegionSpec, memory: Memory, values: Mapping[str, Any]
    ) -> Iterator[tuple[Dispatch, Callable[[], int]]]:
        for command in region.commands:
            assert isinstance(command, Dispatch), "other regions are not walked"
            yield command, bound(command, self._kernels[command.kernel], memory, values)


def _numbers(region: RegionSpec) -> list[str]:
    """The parameters that a call passes as numbers, because they are not the extent of any tensor."""
    tensor_extents = {extent for slot in region.slots for extent in slot.shape or ()}
    return [name for name in region.parameters if name not in tensor_extents]


def _extents(region: RegionSpec, tensors: Sequence[runtime.Tensor]) -> dict[str, int]:
    extents: dict[str, int] = {}
    for slot, tensor in zip(region.slots, tensors, strict=False):  # the arena is not a slot
        for extent, value in zip(slot.shape or (), tensor.shape, strict=True):
            if isinstance(extent, str) and extent in region.parameters:
                extents[extent] = int(value)
    return extents
