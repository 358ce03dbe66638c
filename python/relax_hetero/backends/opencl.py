"""The back end of OpenCL devices, on pyopencl: memory, launches, and kernels that TVM writes in OpenCL C.

Tensors are in shared virtual memory (OpenCL 2.0), whose addresses host code may add offsets to. Each device has one
queue, which runs commands in order.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from ..errors import BuildError, HeteroError
from ..vm.device.device_api import DeviceMemory, Location
from .gpu import GpuBackend
from .managed import ManagedBackend

if TYPE_CHECKING:
    import tvm

    from ..artifact.device_code import DeviceCode, KernelLaunch


class OpenClBackend(ManagedBackend, GpuBackend):
    """Back end of OpenCL devices with shared virtual memory, GPUs before CPUs."""

    def __init__(self) -> None:
        super().__init__("opencl", 4, "", "an OpenCL device", "cl ocl pocl")

    def native_target(self, index: int) -> tvm.target.Target:
        """The target of any OpenCL device: code for it runs on all."""
        return self.default_target()

    def memory(self) -> OpenClMemory | None:
        """Memory of all devices that are useable; None without pyopencl."""
        try:
            return _memory()
        except ImportError:
            return None

    def why_absent(self) -> str:
        """Absent packages, drivers or abilities."""
        memory = self.memory()
        if memory is None:
            return "pyopencl is not installed; expected pip install 'relax-hetero[opencl]'"
        return memory.why_absent

    def schedule(self, kernel: tvm.tirx.PrimFunc) -> tvm.tirx.PrimFunc:
        """Bind loops to work-groups and work-items."""
        from ..target.gpu_target import GENERIC
        from ..tir.cuda.loops import schedule

        return schedule(kernel, GENERIC)

    def launcher(self, code: DeviceCode, kernel: KernelLaunch) -> Callable[..., None]:
        """A launch in the device's queue; the text is compiled for a device at its first launch."""
        memory = self.memory()
        assert memory is not None, "there are devices"
        return _Launcher(memory, code, kernel)


_MAX_FREED_BYTES = 64 << 20
"""Bytes that are freed, but kept until the queue is empty, before an allocation waits for the queue."""


class _Device:
    """A device, with its context and queue."""

    def __init__(self, device: Any) -> None:
        import pyopencl

        self.device = device
        self.context = pyopencl.Context([device])
        self.queue = pyopencl.CommandQueue(self.context)
        self.lock = threading.Lock()
        self.allocations: dict[int, Any] = {}
        self._freed: deque[Any] = deque()
        self._freed_bytes = 0

    def allocate(self, nbytes: int, alignment: int) -> int:
        """Allocate shared virtual memory; pyopencl.Error if there is none left."""
        import pyopencl

        if self._freed_bytes > _MAX_FREED_BYTES:
            self.synchronize()
        flags = pyopencl.svm_mem_flags.READ_WRITE
        try:
            memory = pyopencl.SVMAllocation(self.context, nbytes, alignment, flags)
        except pyopencl.Error:
            self.synchronize()
            memory = pyopencl.SVMAllocation(self.context, nbytes, alignment, flags)
        self.allocations[memory.svm_ptr] = memory
        return int(memory.svm_ptr)

    def free(self, address: int) -> None:
        """Free memory once the queue is empty: PoCL 3 frees other memory if it is asked to free in the queue."""
        memory = self.allocations.pop(address)
        self._freed_bytes += memory.size
        self._freed.append(memory)

    def synchronize(self) -> None:
        """Wait for the queue."""
        freed = len(self._freed)
        self.queue.finish()
        for memory in [self._freed.popleft() for _ in range(min(freed, len(self._freed)))]:
            self._freed_bytes -= memory.size
            memory.release()


class OpenClMemory(DeviceMemory):
    """Shared virtual memory of OpenCL devices.

    Attributes
    ----------
    devices : list of pyopencl.Device
        Devices with shared virtual memory.
    why_absent : str
        Reason why there are no more devices.
    """

    def __init__(self) -> None:
        import pyopencl

        self._cl = pyopencl
        found, self.why_absent = _find_devices(pyopencl)
        self.devices = [device for device in found if _svm_capabilities(device)]
        if len(self.devices) < len(found):
            names = ", ".join(device.name for device in found if device not in self.devices)
            self.why_absent = f"found {names} without shared virtual memory, expected OpenCL 2.0's"
        self.opened = cache(lambda index: _Device(self.devices[index]))

    def count(self) -> int:
        """Number of useable devices."""
        return len(self.devices)

    def memory_bytes(self, index: int) -> int:
        """Global memory of a device."""
        return int(self.devices[index].global_mem_size)

    def allocate(self, index: int, nbytes: int, alignment: int) -> int:
        """Allocate shared virtual memory."""
        device = self.opened(index)
        try:
            return device.allocate(nbytes, alignment)
        except self._cl.Error as error:
            raise HeteroError(f"opencl:{index} ({device.device.name}) has no {nbytes:,} bytes left: {error}") from error

    def free(self, index: int, address: int) -> None:
        """Free memory after the queue's work."""
        self.opened(index).free(address)

    def copy(self, source: Location, target: Location, nbytes: int) -> None:
        """Copy in the queue of the target, or of the source if that is the host."""
        if None not in (source.index, target.index) and source.index != target.index:
            staging = ctypes.create_string_buffer(nbytes)
            between = Location(None, ctypes.addressof(staging))
            self.copy(source, between, nbytes)
            self.copy(between, target, nbytes)
            return
        index = source.index if target.index is None else target.index
        assert index is not None, "the host's memory is not copied here"
        is_blocking = source.index != target.index
        places = (self._cl.SVM((ctypes.c_char * nbytes).from_address(place.address)) for place in (target, source))
        self._cl.enqueue_copy(self.opened(index).queue, *places, is_blocking=is_blocking)

    def synchronize(self, index: int) -> None:
        """Wait for the queue."""
        self.opened(index).synchronize()


@cache
def _memory() -> OpenClMemory:
    return OpenClMemory()


def _find_devices(cl: Any) -> tuple[list[Any], str]:
    """All devices, GPUs first, and why there are none."""
    try:
        platforms = cl.get_platforms()
    except cl.Error as error:
        return [], f"no OpenCL platform ({error}); expected the driver of its vendor, or PoCL (package pocl-opencl-icd)"
    devices = [device for platform in platforms for device in platform.get_devices()]
    devices.sort(key=lambda device: bool(device.type & cl.device_type.CPU))
    return devices, "" if devices else f"no device of {', '.join(platform.name for platform in platforms)}"


def _svm_capabilities(device: Any) -> int:
    try:
        return int(device.svm_capabilities)
    except Exception:  # devices of OpenCL 1.2 do not know the question
        return 0


class _Launcher:
    """Launches a kernel of a text."""

    def __init__(self, memory: OpenClMemory, code: DeviceCode, kernel: KernelLaunch) -> None:
        import numpy as np

        self._memory, self._code, self._kernel = memory, code, kernel
        self._types = [np.dtype(param).type if param else None for param in kernel.params]
        self._axes = [(axis[0] == "t", "xyz".index(axis[-1])) for axis in kernel.axes]
        self._kernels = lru_cache(None)(self._built)

    def __call__(self, index: int, values: Sequence[Any], extents: Sequence[int]) -> None:
        """Launch the kernel on a device."""
        groups, threads = [1, 1, 1], [1, 1, 1]
        for (is_thread, axis), extent in zip(self._axes, extents, strict=True):
            (threads if is_thread else groups)[axis] = extent
        if 0 in groups:
            return
        device, kernel = self._kernels(index)
        cl = self._memory._cl
        with device.lock:  # arguments belong to the kernel until it is in the queue
            for position, (dtype, value) in enumerate(zip(self._types, values, strict=True)):
                kernel.set_arg(position, _svm(value.value or 0) if dtype is None else dtype(value))
            sizes = [group * thread for group, thread in zip(groups, threads, strict=True)]
            cl.enqueue_nd_range_kernel(device.queue, kernel, sizes, threads)

    def _built(self, index: int) -> tuple[_Device, Any]:
        device = self._memory.opened(index)
        return device, self._memory._cl.Kernel(_program(self._memory, self._code, index), self._kernel.name)


@lru_cache(4096)
def _svm(address: int) -> Any:
    """An argument for an address."""
    import pyopencl

    return pyopencl.SVM(ctypes.c_char.from_address(address)) if address else None


@lru_cache(256)
def _program(memory: OpenClMemory, code: DeviceCode, index: int) -> Any:
    device = memory.opened(index)
    try:
        return memory._cl.Program(device.context, code.text).build()
    except memory._cl.RuntimeError as error:
        raise BuildError(f"opencl:{index} ({device.device.name}) cannot compile its kernels: {error}") from error
