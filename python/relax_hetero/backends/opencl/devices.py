"""Memory, queues and launches of OpenCL devices, on pyopencl.

Tensors are in shared virtual memory (OpenCL 2.0), whose addresses host code may add offsets to. Each device has one
queue, which runs commands in order.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

from ...artifact.cache_folder import resolve_cache_folder
from ...artifact.device_code import DeviceCode, KernelLaunch
from ...errors import BuildError, HeteroError, MemoryLimitError, pip_install
from ...target.backend import DeviceMemory, Location

_EXTENSIONS = {"cl_khr_fp16": "float16 (half)", "cl_khr_fp64": "float64 (double)"}
"""Optional extensions that TVM's text enables where kernels need them, and what they are for."""

_PAGE_BYTES = 4096
"""Sizes of memory are multiples of it, so that more allocations find a freed one of their size."""
_MAX_FREED_BYTES = 64 << 20
"""Maximum freed bytes that an allocation of another size leaves; until then they are kept for those of their sizes."""


class _Device:
    """A device with its context and its queue."""

    def __init__(self, index: int, device: Any) -> None:
        import pyopencl

        warnings.filterwarnings("ignore", category=pyopencl.CompilerWarning)  # drivers report success, too
        self.cl, self._device = pyopencl, device
        self.name = f"opencl:{index} ({device.name.strip()})"
        self.context = pyopencl.Context([device])
        self.queue = pyopencl.CommandQueue(self.context)
        self.launching = threading.Lock()
        self._changing = threading.RLock()  # a garbage collection within may free
        self._allocations: dict[int, Any] = {}
        self._freed: list[Any] = []  # later work of the queue may use them at once
        self.releases = 0
        """Number of times that memory was returned to the driver."""
        self.program = lru_cache(256)(self._built)

    def allocate(self, nbytes: int, alignment: int) -> int:
        """Allocate shared virtual memory; MemoryLimitError if there is none left."""
        nbytes = -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES
        memory = self._taken_again(nbytes, alignment) or self._new(nbytes, alignment)
        with self._changing:
            self._allocations[memory.svm_ptr] = memory
        return int(memory.svm_ptr)

    def _taken_again(self, nbytes: int, alignment: int) -> Any:
        """Freed memory of this size, or None."""
        with self._changing:
            for index, memory in enumerate(self._freed):
                if memory.size == nbytes and memory.svm_ptr % alignment == 0:
                    return self._freed.pop(index)
            freed_bytes = sum(memory.size for memory in self._freed)
        if freed_bytes > _MAX_FREED_BYTES:
            self._release()
        return None

    def _new(self, nbytes: int, alignment: int) -> Any:
        try:
            return self._shared_memory(nbytes, alignment)
        except self.cl.Error:
            self._release()
        try:
            return self._shared_memory(nbytes, alignment)
        except self.cl.Error as error:
            raise MemoryLimitError(f"{self.name} has no {nbytes:,} bytes left: {error}") from error

    def _shared_memory(self, nbytes: int, alignment: int) -> Any:
        return self.cl.SVMAllocation(self.context, nbytes, alignment, self.cl.svm_mem_flags.READ_WRITE)

    def free(self, address: int) -> None:
        """Keep memory for later allocations: PoCL 3 frees other memory if it is to be freed in the queue."""
        with self._changing:
            self._freed.append(self._allocations.pop(address))

    def synchronize(self) -> None:
        """Wait for the queue."""
        self.queue.finish()

    def _release(self) -> None:
        """Wait for the queue, and return freed memory to the driver."""
        with self._changing:
            freed, self._freed = self._freed, []
            self.releases += 1
        self.synchronize()
        for memory in freed:
            memory.release()

    def _built(self, text: str) -> Any:
        """The compiled text; BuildError if the device cannot compile it.

        Binaries are cached by device and driver, by pyopencl unless the driver does it.
        """
        available = self._device.extensions.split()
        lacking = [f"{name} ({use})" for name, use in _EXTENSIONS.items() if name in text and name not in available]
        if lacking:
            raise BuildError(
                f"{self.name} lacks {', '.join(lacking)}, which the model's kernels need: "
                "place ops of these types on another device, or convert the model to float32"
            )
        folder = resolve_cache_folder()
        cache_dir = False if folder is None else str(folder.path.parent / "opencl")
        try:
            if self._device.type & self.cl.device_type.CPU:
                # Unrolled, a product of 256 takes 18 instead of 3 s to compile (Intel's driver), and as long to run.
                text = text.replace("#pragma unroll\n", "#pragma nounroll\n")
            return self.cl.Program(self.context, text).build(cache_dir=cache_dir)
        except self.cl.RuntimeError as error:
            raise BuildError(f"{self.name} cannot compile the model's kernels: {error}") from error


class OpenClMemory(DeviceMemory):
    """Shared virtual memory of OpenCL devices.

    Attributes
    ----------
    why_absent : str
        Reason why there are no more devices; empty if there are none to be had.
    """

    def __init__(self) -> None:
        import pyopencl

        self._cl = pyopencl
        self._devices, self.why_absent = _usable_devices(pyopencl)
        self._opening = threading.RLock()
        self._opened: dict[int, _Device] = {}

    def opened(self, index: int) -> _Device:
        """A device with its context and queue, the same at each call."""
        with self._opening:
            if index not in self._opened:
                self._opened[index] = _Device(index, self._devices[index])
            return self._opened[index]

    def count(self) -> int:
        """Number of devices that can be used."""
        return len(self._devices)

    def name(self, index: int) -> str:
        """Name that the driver gives a device."""
        return str(self._devices[index].name.strip())

    def num_units(self, index: int) -> int:
        """Compute units of a device."""
        return int(self._devices[index].max_compute_units)

    def local_bytes(self, index: int) -> int:
        """Local memory of a work-group, which CUDA calls shared memory."""
        return int(self._devices[index].local_mem_size)

    def is_cpu(self, index: int) -> bool:
        """Return whether a device is a CPU."""
        return bool(self._devices[index].type & self._cl.device_type.CPU)

    def computes(self, index: int, dtype: str) -> bool:
        """Return whether a device computes with an element type."""
        extension = next((name for name, use in _EXTENSIONS.items() if use.startswith(dtype)), "")
        return not extension or extension in self._devices[index].extensions.split()

    def host_reads(self, index: int) -> bool:
        """Return whether memory is the host's, and fine-grained: readable without calls of the driver."""
        device, flags = self._devices[index], self._cl.device_svm_capabilities
        is_fine = device.svm_capabilities & (flags.FINE_GRAIN_BUFFER | flags.FINE_GRAIN_SYSTEM)
        return bool(is_fine and (device.host_unified_memory or self.is_cpu(index)))

    def memory_bytes(self, index: int) -> int:
        """Global memory of a device."""
        return int(self._devices[index].global_mem_size)

    def allocate(self, index: int, nbytes: int, alignment: int) -> int:
        """Allocate shared virtual memory."""
        return self.opened(index).allocate(nbytes, alignment)

    def free(self, index: int, address: int) -> None:
        """Free memory after the queue's work."""
        self.opened(index).free(address)

    def copy(self, source: Location, target: Location, nbytes: int) -> None:
        """Copy in the queue of the source, or of the target if the source is the host."""
        if source.device is not None and target.device is not None and source.device != target.device:
            staging = ctypes.create_string_buffer(nbytes)
            between = Location(None, ctypes.addressof(staging))
            self.copy(source, between, nbytes)
            self.copy(between, target, nbytes)
            return
        index = target.device if source.device is None else source.device
        assert index is not None, "copies within the host are not ours"
        is_blocking = source.device != target.device
        places = [self._cl.SVM((ctypes.c_char * nbytes).from_address(place.address)) for place in (target, source)]
        self._cl.enqueue_copy(self.opened(index).queue, *places, is_blocking=is_blocking)

    def synchronize(self, index: int) -> None:
        """Wait for the queue."""
        self.opened(index).synchronize()


@cache
def opencl_memory() -> OpenClMemory:
    """Memory of all devices, one for the process; ImportError without pyopencl."""
    return OpenClMemory()


def _usable_devices(cl: Any) -> tuple[list[Any], str]:
    """The devices with shared virtual memory, CPUs last, and why there are no others."""
    try:
        platforms = cl.get_platforms()
    except cl.Error as error:
        return [], (
            f"no OpenCL platform ({error}); expected its vendor's driver or, for a CPU, PoCL (Debian: pocl-opencl-icd) "
            f"or {pip_install('opencl-cpu')}, whose libintelocl.so OCL_ICD_VENDORS then names"
        )
    devices = sorted(
        (device for platform in platforms for device in platform.get_devices()),
        key=lambda device: bool(device.type & cl.device_type.CPU),
    )
    reasons = {device: _why_unusable(cl, device) for device in devices}
    usable = [device for device in devices if not reasons[device]]
    others = [f"{device.name.strip()} {reason}" for device, reason in reasons.items() if reason]
    if others:
        return usable, "; ".join(others)
    return usable, "" if usable else f"no device of {', '.join(platform.name for platform in platforms)}"


def _why_unusable(cl: Any, device: Any) -> str:
    """Reason why kernels cannot use a device; empty if they can."""
    try:
        has_shared_memory = bool(device.svm_capabilities)
    except cl.Error:  # devices of OpenCL 1.2 do not know the question
        has_shared_memory = False
    if not has_shared_memory:
        return "lacks shared virtual memory, expected that of OpenCL 2.0"
    if not device.type & cl.device_type.CPU:
        return ""
    try:  # PoCL lists CPUs that its LLVM does not know, and compiles nothing for them
        cl.Program(cl.Context([device]), "__kernel void nothing() {}").build(cache_dir=False)
    except cl.Error as error:
        lines = str(error).strip().splitlines()
        reason = next((line for line in lines if line.startswith("error")), lines[0] if lines else "no message")
        return f"cannot compile kernels ({reason}), expected a newer driver"
    return ""


class Launcher:
    """Launches a kernel of a text.

    It calls the driver through ctypes: a launch takes a few microseconds of the host's time, of which pyopencl's
    objects for arguments and events would be most.
    """

    def __init__(self, memory: OpenClMemory, code: DeviceCode, kernel: KernelLaunch) -> None:
        import numpy as np

        self._memory, self._text, self._name = memory, code.text, kernel.name
        self._types = [np.dtype(param) if param else None for param in kernel.params]
        self._axes = [(axis.startswith("thread"), "xyz".index(axis[-1])) for axis in kernel.axes]
        self._launches: dict[int, _Launch] = {}
        self._sizes = lru_cache(256)(self._sizes_of)

    def __call__(self, index: int, values: Sequence[Any], extents: Sequence[int]) -> None:
        """Put a launch into the queue of a device."""
        sizes = self._sizes(tuple(extents))
        if sizes is None:
            return
        launch = self._launches.get(index)
        if launch is None:
            device = self._memory.opened(index)
            launch = self._launches.setdefault(index, _Launch(device, self._text, self._name, self._types))
        launch(values, *sizes)

    def _sizes_of(self, extents: tuple[int, ...]) -> tuple[Any, Any] | None:
        """Sizes of the grid and of a group in work-items; None for an empty grid."""
        groups, items = [1, 1, 1], [1, 1, 1]
        for (is_item, axis), extent in zip(self._axes, extents, strict=True):
            (items if is_item else groups)[axis] = extent
        vector = ctypes.c_size_t * 3
        grid = vector(*(count * size for count, size in zip(groups, items, strict=True)))
        return (grid, vector(*items)) if 0 not in groups else None


class _Launch:
    """A kernel of a device, with the arguments of its last launch."""

    def __init__(self, device: _Device, text: str, name: str, types: Sequence[Any]) -> None:
        import numpy as np

        self._cl, self._device = device.cl, device
        self._kernel = device.cl.Kernel(device.program(text), name)
        self._queue, self._handle = device.queue.int_ptr, self._kernel.int_ptr
        # Numbers are passed by the address of their bytes.
        self._numbers = [None if dtype is None else np.zeros(1, dtype) for dtype in types]
        self._last: list[Any] = [_UNSET] * len(types)
        self._releases = device.releases
        self._driver = _driver()

    def __call__(self, values: Sequence[Any], grid: Any, group: Any) -> None:
        driver, last, handle = self._driver, self._last, self._handle
        with self._device.launching:  # a kernel has one set of arguments, which belongs to the queue after the launch
            if self._releases != self._device.releases:  # an equal address may be of other memory
                self._releases = self._device.releases
                last[:] = [_UNSET] * len(last)
            for position, (number, value) in enumerate(zip(self._numbers, values, strict=True)):
                if number is None:
                    value = value and value.value  # the FFI passes the address 0 as None
                if value == last[position] and value != 0:  # 0.0 equals -0.0
                    continue
                last[position] = _UNSET
                if number is None:
                    status = driver.clSetKernelArgSVMPointer(handle, position, value)
                else:
                    number[0] = value
                    status = driver.clSetKernelArg(handle, position, number.itemsize, number.ctypes.data)
                self._check(status, "clSetKernelArg")
                last[position] = value
            status = driver.clEnqueueNDRangeKernel(self._queue, handle, 3, None, grid, group, 0, None, None)
        self._check(status, "clEnqueueNDRangeKernel")

    def _check(self, status: int, call: str) -> None:
        if status:
            reason = self._cl.status_code.to_string(status, "status %d")
            raise HeteroError(f"{self._device.name}: {call} of the kernel {self._kernel.function_name}: {reason}")


_UNSET = object()


@cache
def _driver() -> Any:
    """Functions of the OpenCL library that pyopencl uses."""
    import pyopencl

    library = ctypes.CDLL(pyopencl._cl.__file__)
    handle, count, pointer = ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p
    library.clSetKernelArg.argtypes = [handle, count, ctypes.c_size_t, pointer]
    library.clSetKernelArgSVMPointer.argtypes = [handle, count, pointer]
    library.clEnqueueNDRangeKernel.argtypes = [handle, handle, count, *[pointer] * 3, count, pointer, pointer]
    return library
