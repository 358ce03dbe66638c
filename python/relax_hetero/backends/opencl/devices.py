"""Memory, queues and launches of OpenCL devices, on pyopencl.

Tensors are in shared virtual memory (OpenCL 2.0), whose addresses host code may add offsets to. Each device has two
queues, which run commands in order: one for launches, one for copies from and to the host.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
from bisect import bisect_left
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

from ...artifact.cache_folder import resolve_cache_folder
from ...errors import BuildError, MemoryLimitError, pip_install
from ...target.backend import DeviceMemory, Location
from ...target.gpu_target import OTHER_BLOCK_THREADS, DeviceFacts
from .driver import command_buffers_of, subgroups_of

_EXTENSIONS = {"cl_khr_fp16": "float16 (half)", "cl_khr_fp64": "float64 (double)"}
"""Optional extensions that TVM's text enables where kernels need them, and what they are for."""

BYTE_DOT = "byte_dot_"  # prefix of the names of functions for dot products of bytes
_BYTE_DOT_EXTENSIONS = ("cl_khr_integer_dot_product", "cl_arm_integer_dot_product_int8")

_PAGE_BYTES = 4096  # sizes of memory are multiples of it, so that more allocations find a freed one of their size
_MAX_FREED_BYTES = 64 << 20
"""Maximum freed bytes that an allocation of another size leaves; until then they are kept for those of their sizes."""


class _Block:
    """Allocated memory."""

    def __init__(self, memory: Any) -> None:
        self.memory, self.begin, self.end = memory, int(memory.svm_ptr), int(memory.svm_ptr) + int(memory.size)
        self.is_received = False  # whether the host has copied to it since it was allocated
        # Event after which work that used the memory before it was freed has ended, None if that is unknown; empty
        # without such work.
        self.free_after: list[Any] = []


class Device:
    """A device with its context and its queues: one for launches, and one for copies from and to the host.

    Copies overlap with launches. A copy from the device begins after all earlier launches. So does a copy to the
    device, unless no launch has got the memory since it was allocated; then it begins after those that used it before.
    The host waits for both, so that later launches need not.
    """

    def __init__(self, index: int, device: Any) -> None:
        import pyopencl

        self.index = index
        warnings.filterwarnings("ignore", category=pyopencl.CompilerWarning)  # drivers report success, too
        self.cl, self._device = pyopencl, device
        self.name = f"opencl:{index} ({device.name.strip()})"
        self.context = pyopencl.Context([device])
        self.queue, self.copies = (pyopencl.CommandQueue(self.context) for _ in range(2))
        self.launching = threading.Lock()
        self._changing = threading.RLock()  # a garbage collection within may free
        self._allocations: dict[int, _Block] = {}
        self._freed: list[_Block] = []  # later work of the queue may use them at once
        self._untouched: dict[int, _Block] = {}  # that no launch has got
        self._lent: dict[int, int] = {}  # end by begin, of memory that the host writes
        self.releases = 0
        """Number of times that memory was returned to the driver."""
        self._nothing = self._shared_memory(_PAGE_BYTES, 64)
        self.nothing = int(self._nothing.svm_ptr)
        """Address for tensors without elements: NVIDIA's driver takes the address 0 for an argument that is not set."""
        self.launched = 0
        """Number of launches in the queue, increased after each."""
        self._ended = 0
        self.program = lru_cache(256)(self._build)
        self.commands = command_buffers_of(device)
        """Functions of the driver's command buffers; None without them, and after they have failed."""

    def allocate(self, nbytes: int, alignment: int) -> int:
        """Allocate shared virtual memory; MemoryLimitError if there is none left."""
        nbytes = -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES
        block = self._reused_block(nbytes, alignment) or _Block(self._new(nbytes, alignment))
        with self._changing:
            self._allocations[block.begin] = self._untouched[block.begin] = block
        return block.begin

    def _reused_block(self, nbytes: int, alignment: int) -> _Block | None:
        """Freed memory of this size, or None; the lowest, so that repeated calls get the same addresses."""
        with self._changing:
            fitting = (each for each in self._freed if each.end - each.begin == nbytes and each.begin % alignment == 0)
            block = min(fitting, key=lambda each: each.begin, default=None)
            if block is not None:
                self._freed.remove(block)
                return block
            freed_bytes = sum(each.end - each.begin for each in self._freed)
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
            self._lent.pop(address, None)
            block, is_used = self._allocations.pop(address), self._untouched.pop(address, None) is None
            if self._ended == self.launched:
                block.free_after = []
            elif is_used:
                # Copies to other blocks wait for all launches.
                block.free_after = [self._end_event()] if block.is_received else [None]
            block.is_received = False
            self._freed.append(block)

    def lend(self, address: int, nbytes: int) -> None:
        """Let the host write new memory, which earlier work of the queue may have read before it was freed."""
        self.synchronize()
        with self._changing:
            self._lent[address] = address + nbytes

    def is_lent(self, address: int) -> bool:
        """Return whether memory at an address is lent."""
        with self._changing:
            return any(begin <= address < end for begin, end in self._lent.items())

    def touch(self, addresses: Sequence[int]) -> None:
        """Note that a launch gets sorted addresses."""
        with self._changing:
            touched = []
            for block in self._untouched.values():
                first = bisect_left(addresses, block.begin)
                if first < len(addresses) and addresses[first] < block.end:
                    touched.append(block.begin)
            for begin in touched:
                del self._untouched[begin]

    def receive(self, source: int, target: int, nbytes: int) -> None:
        """Copy from the host, which waits for the end."""
        with self._changing:
            block = next((each for each in self._untouched.values() if each.begin <= target < each.end), None)
            if block is not None:
                block.is_received = True
            waits = [None] if block is None else block.free_after
            waits = [self._end_event() if event is None else event for event in waits]
        self._copy(target, source, nbytes, waits)
        if block is not None:
            block.free_after = []

    def send(self, source: int, target: int, nbytes: int) -> None:
        """Copy to the host, which waits for the end."""
        self._copy(target, source, nbytes, [self._end_event()])

    def copy_within(self, source: int, target: int, nbytes: int) -> None:
        """Copy between addresses of the device, in order with launches."""
        self.touch(sorted((source, target)))
        self.cl.enqueue_copy(self.queue, *_places(target, source, nbytes), is_blocking=False)
        with self.launching:
            self.launched += 1

    def _copy(self, target: int, source: int, nbytes: int, waits: list[Any]) -> None:
        waits = [event for event in waits if event is not None]
        self.cl.enqueue_copy(self.copies, *_places(target, source, nbytes), is_blocking=True, wait_for=waits)

    def _end_event(self) -> Any:
        """Event at the end of the launches so far; None if they have ended."""
        if self._ended == self.launched:
            return None
        event = self.cl.enqueue_marker(self.queue)
        self.queue.flush()  # a queue may wait for an event of another one only if that has been flushed
        return event

    def synchronize(self) -> None:
        """Wait for the launches so far."""
        launched = self.launched
        self.queue.finish()
        self._ended = max(self._ended, launched)

    def _release(self) -> None:
        """Wait for the queue, and return freed memory to the driver."""
        with self._changing:
            freed, self._freed = self._freed, []
            self.releases += 1
        self.synchronize()
        for block in freed:
            block.memory.release()

    def _build(self, text: str) -> Any:
        """Compile a text; BuildError if the device cannot.

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
            # OpenCL C 3.0 has dot products of bytes; by default drivers compile another version.
            has_dots = BYTE_DOT in text and _BYTE_DOT_EXTENSIONS[0] in available
            return self.cl.Program(self.context, text).build(["-cl-std=CL3.0"] * has_dots, cache_dir=cache_dir)
        except self.cl.RuntimeError as error:
            raise BuildError(f"{self.name} cannot compile the model's kernels: {error}") from error


class OpenClMemory(DeviceMemory):
    """Shared virtual memory of OpenCL devices.

    Attributes
    ----------
    why_absent : str
        Reason why other devices are not usable, or why there are none; empty if all are.
    """

    def __init__(self) -> None:
        import pyopencl

        self._cl = pyopencl
        self._devices, self.why_absent = _usable_devices(pyopencl)
        self._opening = threading.RLock()
        self._opened: dict[int, Device] = {}

    def opened(self, index: int) -> Device:
        """A device with its context and queue, the same at each call."""
        with self._opening:
            if index not in self._opened:
                self._opened[index] = Device(index, self._devices[index])
            return self._opened[index]

    def count(self) -> int:
        """Number of devices that can be used."""
        return len(self._devices)

    def name(self, index: int) -> str:
        """Name that the driver gives a device."""
        return str(self._devices[index].name.strip())

    def driver_version(self, index: int) -> str:
        """Version of the driver."""
        return str(self._devices[index].driver_version)

    def num_units(self, index: int) -> int:
        """Compute units of a device."""
        return int(self._devices[index].max_compute_units)

    def local_bytes(self, index: int) -> int:
        """Local memory of a work-group, which CUDA calls shared memory."""
        return int(self._devices[index].local_mem_size)

    def is_cpu(self, index: int) -> bool:
        """Return whether a device is a CPU."""
        return bool(self._devices[index].type & self._cl.device_type.CPU)

    def facts(self, index: int) -> DeviceFacts:
        """Facts about a device for the choice of kernels and their sizes."""
        device, flags = self._devices[index], self._cl.device_local_mem_type
        return DeviceFacts(
            self.num_units(index),
            self.is_cpu(index),
            self.host_reads(index),
            device.local_mem_type == flags.LOCAL,
            subgroups_of(device),
            int(device.global_mem_cacheline_size),
            command_buffers_of(device) is not None,
            any(name in device.extensions.split() for name in _BYTE_DOT_EXTENSIONS),
        )

    def computes(self, index: int, dtype: str) -> bool:
        """Return whether a device computes with an element type."""
        extension = next((name for name, use in _EXTENSIONS.items() if use.startswith(dtype)), "")
        return not extension or extension in self._devices[index].extensions.split()

    def host_reads(self, index: int) -> bool:
        """Return whether memory is the host's, and fine-grained: readable without calls of the driver."""
        device, flags = self._devices[index], self._cl.device_svm_capabilities
        is_fine = device.svm_capabilities & (flags.FINE_GRAIN_BUFFER | flags.FINE_GRAIN_SYSTEM)
        return bool(is_fine and (device.host_unified_memory or self.is_cpu(index)))

    def lend(self, index: int, address: int, nbytes: int) -> None:
        """Let the host write memory that was just allocated."""
        self.opened(index).lend(address, nbytes)

    def is_lent(self, index: int, address: int) -> bool:
        """Return whether an address is in lent memory."""
        return self.opened(index).is_lent(address)

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
        """Copy between devices through the host."""
        if source.device is not None and target.device is not None and source.device != target.device:
            staging = ctypes.create_string_buffer(nbytes)
            between = Location(None, ctypes.addressof(staging))
            self.copy(source, between, nbytes)
            self.copy(between, target, nbytes)
            return
        index = target.device if source.device is None else source.device
        assert index is not None, "copies within the host are not ours"
        device = self.opened(index)
        copy = (
            device.receive if source.device is None
            else device.send if target.device is None
            else device.copy_within
        )  # fmt: skip
        copy(source.address, target.address, nbytes)

    def synchronize(self, index: int) -> None:
        """Wait for the queue."""
        self.opened(index).synchronize()


def _places(*addresses_and_bytes: int) -> list[Any]:
    """Memory at addresses, for pyopencl."""
    import pyopencl

    *addresses, nbytes = addresses_and_bytes
    return [pyopencl.SVM((ctypes.c_char * nbytes).from_address(address)) for address in addresses]


@cache
def opencl_memory() -> OpenClMemory:
    """Memory of all devices, one for the process; ImportError without pyopencl."""
    return OpenClMemory()


def _usable_devices(cl: Any) -> tuple[list[Any], str]:
    """Devices with shared virtual memory, CPUs last, and the reason why others are not usable."""
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
    reasons = {device: _unsupported_reason(cl, device) for device in devices}
    usable = [device for device in devices if not reasons[device]]
    others = [f"{device.name.strip()} {reason}" for device, reason in reasons.items() if reason]
    if others:
        return usable, "; ".join(others)
    return usable, "" if usable else f"no device of {', '.join(platform.name for platform in platforms)}"


def _unsupported_reason(cl: Any, device: Any) -> str:
    """Reason why kernels cannot use a device; empty if they can."""
    try:
        has_shared_memory = bool(device.svm_capabilities)
    except cl.Error:  # devices of OpenCL 1.2 lack the query
        has_shared_memory = False
    if not has_shared_memory:
        return "lacks shared virtual memory, expected that of OpenCL 2.0"
    if device.max_work_group_size < OTHER_BLOCK_THREADS:
        return f"has groups of {device.max_work_group_size} work-items, expected {OTHER_BLOCK_THREADS}"
    if not device.type & cl.device_type.CPU:
        return ""
    try:  # PoCL lists CPUs that its LLVM does not know, and compiles nothing for them
        cl.Program(cl.Context([device]), "__kernel void nothing() {}").build(cache_dir=False)
    except cl.Error as error:
        lines = str(error).strip().splitlines()
        reason = next((line for line in lines if line.startswith("error")), lines[0] if lines else "no message")
        return f"cannot compile kernels ({reason}), expected a newer driver"
    return ""
