"""The back end of OpenCL devices, on pyopencl: memory, launches, and kernels that TVM writes in OpenCL C.

Tensors are in shared virtual memory (OpenCL 2.0), whose addresses host code may add offsets to. Each device has one
queue, which runs commands in order.
"""

from __future__ import annotations

import ctypes
import json
import re
import threading
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from ..artifact.cache_folder import resolve_cache_folder
from ..errors import BindingError, BuildError, MemoryLimitError
from ..vm.device.device_api import DeviceMemory, Location
from .gpu import GpuBackend
from .managed import ManagedBackend

if TYPE_CHECKING:
    import tvm
    from tvm import runtime

    from ..artifact.device_code import DeviceCode, KernelLaunch

_MARK = "unrolled"
"""Begin of the names of variables of unrolled loops, by which they are found in the text."""
_MAX_LOCAL_BYTES, _CPU_LOCAL_BYTES = 64 << 10, 16 << 10
"""Maximum local memory of targets of GPUs, and of CPUs, on which plain loops are faster than tiles (`SimtResolver`)."""

# Functions of C that TVM calls for float32, of which OpenCL C has the name without the suffix.
_SUFFIXED = re.compile(
    r"\b((?:a?(?:cos|sin|tan)h?|atan2|exp(?:2|10|m1)?|log(?:2|10|1p)?|erfc?|sqrt|cbrt|pow|fmod|hypot|ldexp"
    r"|floor|ceil|round|trunc|rint|fabs|copysign|nextafter))f\("
)
_UNROLLED = re.compile(rf"^( *)for \(int {_MARK}", re.MULTILINE)
_EXTENSIONS = {"cl_khr_fp16": "float16 (half)", "cl_khr_fp64": "float64 (double)"}
"""Optional extensions that TVM's text enables where kernels need them, and what they are for."""


class OpenClBackend(ManagedBackend, GpuBackend):
    """Back end of OpenCL devices with shared virtual memory; GPUs come before CPUs."""

    has_sorts = True

    def __init__(self) -> None:
        super().__init__("opencl", 4, "", "an OpenCL device", "cl ocl pocl")

    def native_target(self, index: int) -> tvm.target.Target:
        """The target of a device, or that of all devices if it is absent."""
        import tvm

        memory = self.memory()
        if memory is None or not 0 <= index < memory.count():
            return self.default_target()
        local_bytes = min(memory.local_bytes(index), _CPU_LOCAL_BYTES if memory.is_cpu(index) else _MAX_LOCAL_BYTES)
        return tvm.target.Target({"kind": self.kind, "max_shared_memory_per_block": local_bytes})

    def completed(self, target: tvm.target.Target, index: int) -> tvm.target.Target | None:
        """The native target, unless `target` differs from TVM's default."""
        import tvm_ffi

        return self.native_target(index) if tvm_ffi.structural_equal(target, self.default_target()) else None

    def peaks(self, target: tvm.target.Target) -> tuple[float, float, float]:
        """Peaks of a plain GPU, or of OpenCL on a CPU."""
        is_gpu = int(target.attrs.get("max_shared_memory_per_block", 0)) > _CPU_LOCAL_BYTES
        return super().peaks(target) if is_gpu else (1e10, 1e10, 1.0)

    def check_device(self, name: str, spec: Any, device: runtime.Device) -> None:
        """Require the local memory that kernels were written for."""
        needed = json.loads(spec.target).get("max_shared_memory_per_block", 0)
        found = _memory().local_bytes(device.index)
        if found < needed:
            raise BindingError(
                f"{name} is to run on {device}, which has {found:,} bytes of local memory, expected {needed:,}: "
                f'compile for the target {{"kind": "{self.kind}", "max_shared_memory_per_block": {found}}}'
            )

    def resolvers(self) -> Sequence[tuple[Any, tuple[str, ...]]]:
        """The resolver of products and convolutions by plain threads."""
        from ..resolvers import SimtResolver

        return ((SimtResolver(), ()),)

    def generate(self, kernel: tvm.IRModule, target: tvm.target.Target) -> str:
        """OpenCL C of a kernel."""
        text = _SUFFIXED.sub(r"\1(", super().generate(_with_marked_loops(kernel), target))
        text = _UNROLLED.sub(r"\1#pragma unroll\n\g<0>", text)
        # Kernels exchange values in global memory, too, as CUDA's barriers allow.
        return text.replace("barrier(CLK_LOCAL_MEM_FENCE)", "barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE)")

    def memory(self) -> OpenClMemory | None:
        """Memory of all devices that can be used; None without pyopencl."""
        try:
            return _memory()
        except ImportError:
            return None

    def why_absent(self) -> str:
        """The absent package, driver or ability."""
        memory = self.memory()
        if memory is None:
            return "pyopencl is not installed; expected pip install 'relax-hetero[opencl]'"
        return memory.why_absent

    def launcher(self, code: DeviceCode, kernel: KernelLaunch) -> Callable[..., None]:
        """A launch in the device's queue."""
        return _Launcher(_memory(), code, kernel)

    def load_code(self, code: DeviceCode, indices: Sequence[int]) -> None:
        """Compile the text for the devices that will run it."""
        for index in indices:
            _memory().opened(index).program(code.text)
        super().load_code(code, indices)


def _with_marked_loops(kernel: tvm.IRModule) -> tvm.IRModule:
    """Name the variables of unrolled loops by `_MARK`: TVM's generator of OpenCL C writes them as plain loops."""
    import tvm
    from tvm import tirx
    from tvm_ffi import structural_map

    def mark(loop: tirx.For) -> tirx.For:
        if loop.kind != tirx.ForKind.UNROLLED:
            return loop
        var = tirx.Var(f"{_MARK}_{loop.loop_var.name}", loop.loop_var.ty)
        body = structural_map(loop.body, (tvm.ir.Var, lambda each: var if each.same_as(loop.loop_var) else each))
        return tirx.For(var, loop.min, loop.extent, loop.kind, body)

    return tvm.IRModule({gv: structural_map(func, (tirx.For, mark)) for gv, func in kernel.functions.items()})


_MAX_FREED_BYTES = 64 << 20
"""Bytes that are freed, but kept until the queue is empty, before an allocation waits for the queue."""


class _Device:
    """A device with its context and its queue."""

    def __init__(self, index: int, device: Any) -> None:
        import pyopencl

        self._cl, self._device = pyopencl, device
        self.name = f"opencl:{index} ({device.name.strip()})"
        self.context = pyopencl.Context([device])
        self.queue = pyopencl.CommandQueue(self.context)
        self.launching = threading.Lock()
        self._changing = threading.Lock()
        self._allocations: dict[int, Any] = {}
        self._freed: list[Any] = []
        self.program = lru_cache(256)(self._built)

    def allocate(self, nbytes: int, alignment: int) -> int:
        """Allocate shared virtual memory; MemoryLimitError if there is none left."""
        with self._changing:
            freed_bytes = sum(memory.size for memory in self._freed)
        if freed_bytes > _MAX_FREED_BYTES:
            self.synchronize()
        try:
            memory = self._new(nbytes, alignment)
        except self._cl.Error:
            self.synchronize()  # frees memory
            try:
                memory = self._new(nbytes, alignment)
            except self._cl.Error as error:
                raise MemoryLimitError(f"{self.name} has no {nbytes:,} bytes left: {error}") from error
        with self._changing:
            self._allocations[memory.svm_ptr] = memory
        return int(memory.svm_ptr)

    def _new(self, nbytes: int, alignment: int) -> Any:
        return self._cl.SVMAllocation(self.context, nbytes, alignment, self._cl.svm_mem_flags.READ_WRITE)

    def free(self, address: int) -> None:
        """Free memory when the queue is next empty: PoCL 3 frees other memory if it is to be freed in the queue."""
        with self._changing:
            self._freed.append(self._allocations.pop(address))

    def synchronize(self) -> None:
        """Wait for the queue."""
        with self._changing:
            freed, self._freed = self._freed, []
        self.queue.finish()
        for memory in freed:
            memory.release()

    def _built(self, text: str) -> Any:
        """The compiled text; BuildError if the device cannot compile it.

        Binaries are cached by device and driver, by pyopencl unless the driver does it.
        """
        available = self._device.extensions.split()
        lacking = [f"{name} ({use})" for name, use in _EXTENSIONS.items() if name in text and name not in available]
        if lacking:
            raise BuildError(f"{self.name} lacks {', '.join(lacking)}, which the model's kernels need")
        folder = resolve_cache_folder()
        cache_dir = False if folder is None else str(folder.path.parent / "opencl")
        try:
            if self._device.type & self._cl.device_type.CPU:  # PoCL takes long for unrolled loops with barriers
                text = text.replace("#pragma unroll\n", "")
            return self._cl.Program(self.context, text).build(cache_dir=cache_dir)
        except self._cl.RuntimeError as error:
            raise BuildError(f"{self.name} cannot compile the model's kernels: {error}") from error


class OpenClMemory(DeviceMemory):
    """Shared virtual memory of OpenCL devices.

    Attributes
    ----------
    opened : callable
        The opened device of an index.
    why_absent : str
        Reason why there are no more devices; empty if there are none to be had.
    """

    def __init__(self) -> None:
        import pyopencl

        self._cl = pyopencl
        self._devices, self.why_absent = _usable_devices(pyopencl)
        self.opened = cache(lambda index: _Device(index, self._devices[index]))

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
def _memory() -> OpenClMemory:
    return OpenClMemory()


def _usable_devices(cl: Any) -> tuple[list[Any], str]:
    """The devices with shared virtual memory, CPUs last, and why there are no others."""
    try:
        platforms = cl.get_platforms()
    except cl.Error as error:
        return [], f"no OpenCL platform ({error}); expected its vendor's driver, or PoCL (Debian: pocl-opencl-icd)"
    devices = sorted(
        (device for platform in platforms for device in platform.get_devices()),
        key=lambda device: bool(device.type & cl.device_type.CPU),
    )
    usable = [device for device in devices if _has_shared_memory(cl, device)]
    others = [device.name.strip() for device in devices if device not in usable]
    if others:
        return usable, f"{', '.join(others)} without shared virtual memory, expected that of OpenCL 2.0"
    return usable, "" if usable else f"no device of {', '.join(platform.name for platform in platforms)}"


def _has_shared_memory(cl: Any, device: Any) -> bool:
    try:
        return bool(device.svm_capabilities)
    except cl.Error:  # devices of OpenCL 1.2 do not know the question
        return False


class _Launcher:
    """Launches a kernel of a text."""

    def __init__(self, memory: OpenClMemory, code: DeviceCode, kernel: KernelLaunch) -> None:
        import numpy as np

        self._memory, self._text, self._name = memory, code.text, kernel.name
        self._types = [np.dtype(param).type if param else None for param in kernel.params]
        self._axes = [(axis.startswith("thread"), "xyz".index(axis[-1])) for axis in kernel.axes]
        self._kernel = cache(self._built)

    def __call__(self, index: int, values: Sequence[Any], extents: Sequence[int]) -> None:
        """Put a launch into the queue of a device."""
        groups, items = [1, 1, 1], [1, 1, 1]
        for (is_item, axis), extent in zip(self._axes, extents, strict=True):
            (items if is_item else groups)[axis] = extent
        if 0 in groups:
            return
        device, kernel = self._kernel(index)
        with device.launching:  # a kernel has one set of arguments, which belongs to the queue after the launch
            for position, (dtype, value) in enumerate(zip(self._types, values, strict=True)):
                kernel.set_arg(position, _address(value) if dtype is None else dtype(value))
            sizes = [count * size for count, size in zip(groups, items, strict=True)]
            self._memory._cl.enqueue_nd_range_kernel(device.queue, kernel, sizes, items)

    def _built(self, index: int) -> tuple[_Device, Any]:
        device = self._memory.opened(index)
        return device, self._memory._cl.Kernel(device.program(self._text), self._name)


def _address(value: Any) -> Any:
    """An argument for an address, which the FFI passes as None if it is 0."""
    return _shared(value.value) if value is not None and value.value else None


@lru_cache(4096)
def _shared(address: int) -> Any:
    import pyopencl

    return pyopencl.SVM(ctypes.c_char.from_address(address))
