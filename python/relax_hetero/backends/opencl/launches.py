"""Launches of single kernels, and of the kernels of a command buffer, in the queue of an OpenCL device."""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ...artifact.device_code import DeviceCode, KernelLaunch, LaunchSequence
from ...errors import HeteroError
from .devices import Device, OpenClMemory
from .driver import CommandBuffer, check, driver

_log = logging.getLogger("relax_hetero")

_MAX_RECORDINGS = 4
"""Maximum recordings of a command buffer: results alternate between as many addresses where the caller keeps them."""


class _Kernel:
    """A kernel object of a device, with the arguments of its last launch."""

    def __init__(self, device: Device, code: DeviceCode, kernel: KernelLaunch) -> None:
        self._device = device
        self._kernel = device.cl.Kernel(device.program(code.text), kernel.name)
        self.handle = self._kernel.int_ptr
        # Numbers are passed by the address of their bytes.
        self.numbers = [np.zeros(1, param) if param else None for param in kernel.params]
        self._last: list[Any] = [_UNSET] * len(kernel.params)
        self._releases = device.releases

    def set(self, values: Sequence[Any]) -> None:
        """Set the arguments that differ from the last ones."""
        last = self._last
        if self._releases != self._device.releases:  # an equal address may be of other memory
            self._releases = self._device.releases
            last[:] = [_UNSET] * len(last)
        for position, (number, value) in enumerate(zip(self.numbers, values, strict=True)):
            if value == last[position] and value != 0:  # 0.0 equals -0.0
                continue
            last[position] = _UNSET
            if number is None:
                status = driver().clSetKernelArgSVMPointer(self.handle, position, value or self._device.nothing)
            else:
                number[0] = value
                status = driver().clSetKernelArg(self.handle, position, number.itemsize, number.ctypes.data)
            self._check(status, "clSetKernelArg")
            last[position] = value

    def enqueue(self, grid: Any, group: Any) -> None:
        """Put a launch into the queue; the arguments belong to the queue afterwards."""
        status = driver().clEnqueueNDRangeKernel(
            self._device.queue.int_ptr, self.handle, 3, None, grid, group, 0, None, None
        )
        self._check(status, "clEnqueueNDRangeKernel")

    def _check(self, status: int, call: str) -> None:
        if status:
            check(status, self._device.name, f"{call} of the kernel {self._kernel.function_name}")


_UNSET = object()


class _Sizes:
    """Sizes of a kernel's launches."""

    def __init__(self, kernel: KernelLaunch) -> None:
        self._axes = [(axis.startswith("thread"), "xyz".index(axis[-1])) for axis in kernel.axes]
        self.of = lru_cache(256)(self._of)

    def _of(self, extents: tuple[int, ...]) -> tuple[Any, Any] | None:
        """Sizes of the grid and of a group in work-items; None for an empty grid."""
        groups, items = [1, 1, 1], [1, 1, 1]
        for (is_item, axis), extent in zip(self._axes, extents, strict=True):
            (items if is_item else groups)[axis] = extent
        vector = ctypes.c_size_t * 3
        grid = vector(*(count * size for count, size in zip(groups, items, strict=True)))
        return (grid, vector(*items)) if 0 not in groups else None


class KernelLauncher:
    """Launches a kernel of a text."""

    def __init__(self, memory: OpenClMemory, code: DeviceCode, kernel: KernelLaunch) -> None:
        self._memory, self._code, self._kernel = memory, code, kernel
        self._is_address = [not param for param in kernel.params]
        self._kernels: dict[int, _Kernel] = {}
        self._sizes = _Sizes(kernel)

    def __call__(self, index: int, values: Sequence[Any], extents: Sequence[int]) -> None:
        """Put a launch into the queue of a device."""
        sizes = self._sizes.of(tuple(extents))
        if sizes is None:
            return
        device = self._memory.opened(index)
        # The FFI passes addresses as ctypes objects, and the address 0 as None.
        numbers = [
            value and value.value if is_address else value
            for is_address, value in zip(self._is_address, values, strict=True)
        ]
        device.touch(
            sorted(value or 0 for is_address, value in zip(self._is_address, numbers, strict=True) if is_address)
        )
        with device.launching:
            kernel = self._kernels.get(index)
            if kernel is None:
                kernel = self._kernels[index] = _Kernel(device, self._code, self._kernel)
            kernel.set(numbers)
            kernel.enqueue(*sizes)
            device.launched += 1


class _Launch(NamedTuple):
    """A launch of a sequence."""

    position: int  # position in the sequence
    kernel: _Kernel
    arguments: list[Any]
    # Sizes in work-items.
    grid: Any
    group: Any


class _Recording:
    """Kernels of a sequence with arguments, which are launched again and again."""

    def __init__(self, device: Device, launches: list[_Launch]) -> None:
        self._device, self._launches = device, launches
        self._addresses = sorted({
            address
            for launch in launches
            for address, number in zip(launch.arguments, launch.kernel.numbers, strict=True)
            if number is None
        })  # fmt: skip
        self._releases = -1
        self._buffer: CommandBuffer | None = None

    def submit(self) -> None:
        """Launch the kernels; from the second time on as a command buffer of the driver, if it supports them."""
        device = self._device
        device.touch(self._addresses)
        releases = device.releases
        if self._releases != releases:
            self.close()
            for launch in self._launches:
                launch.kernel.set(launch.arguments)
            self._releases = releases  # after an error they are set again
        elif self._buffer is None and device.commands is not None and len(self._launches) > 1:
            launches = ((launch.kernel.handle, launch.grid, launch.group) for launch in self._launches)
            try:
                self._buffer = CommandBuffer(device.commands, device.name, device.queue.int_ptr, launches)
            except HeteroError as error:
                _log.warning("%s; kernels are launched one by one", error)
                device.commands = None
        try:
            if self._buffer is not None:
                self._buffer.submit()
            else:
                for launch in self._launches:
                    launch.kernel.enqueue(launch.grid, launch.group)
        finally:
            device.launched += 1  # an error may come after some launches

    def close(self) -> dict[int, _Kernel]:
        """Free the driver's command buffer; the kernels by position, whose arguments may change afterwards."""
        if self._buffer is not None:
            self._device.synchronize()
            self._buffer.release()
            self._buffer = None
        return {launch.position: launch.kernel for launch in self._launches}


class SequenceLauncher:
    """Launches all kernels of a command buffer in one call.

    It keeps recordings of recent arguments. Host code passes the same ones in most calls: machines reuse memory.
    """

    def __init__(self, memory: OpenClMemory, code: DeviceCode, sequence: LaunchSequence) -> None:
        self._memory, self._code, self._sequence = memory, code, sequence
        self._sizes = [_Sizes(kernel) for kernel in code.kernels]
        self._recordings: dict[int, dict[Any, _Recording]] = {}  # of each device, the most recent last
        self._floats = {
            place
            for number, *places in sequence.launches
            for place, param in zip(places, code.kernels[number].params, strict=False)
            if param.startswith(("float", "bfloat"))
        }

    def __call__(self, index: int, arguments: tuple[Any, ...]) -> None:
        """Put the launches into the queue of a device."""
        signs = tuple(math.copysign(1, arguments[place]) for place in self._floats)  # 0.0 equals -0.0
        key, device = (arguments, signs), self._memory.opened(index)
        with device.launching:
            recordings = self._recordings.setdefault(index, {})
            recording = recordings.pop(key, None)
            if recording is None:
                is_full = len(recordings) >= _MAX_RECORDINGS
                kernels = recordings.pop(next(iter(recordings))).close() if is_full else {}
                recording = self._record(device, arguments, kernels)
            recordings[key] = recording
            recording.submit()

    def _record(self, device: Device, arguments: tuple[Any, ...], kernels: dict[int, _Kernel]) -> _Recording:
        """A new recording, with the kernels of an old one by position."""
        values = (*arguments, *self._sequence.constants)
        launches = []
        for position, (number, *places) in enumerate(self._sequence.launches):
            kernel, count = self._code.kernels[number], len(self._code.kernels[number].params)
            sizes = self._sizes[number].of(tuple(values[place] for place in places[count:]))
            if sizes is not None:
                kernel_object = kernels.get(position) or _Kernel(device, self._code, kernel)
                launches.append(_Launch(position, kernel_object, [values[place] for place in places[:count]], *sizes))
        return _Recording(device, launches)
