"""Functions of pyopencl's OpenCL library, called through ctypes: launches, and command buffers of the driver.

A launch takes the host a few microseconds, most of which pyopencl would spend on objects for arguments and events.
pyopencl lacks ``cl_khr_command_buffer``, whose constants below are those of its specification (version 0.9).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from ctypes import c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from typing import Any, NamedTuple

from ...errors import HeteroError

EXTENSION = "cl_khr_command_buffer"
_CAPABILITIES, _CAN_BE_PENDING_TWICE = 0x12A9, 4  # CL_DEVICE_COMMAND_BUFFER_CAPABILITIES_KHR, ..._SIMULTANEOUS_USE_KHR
_REQUIRED_PROPERTIES = 0x12AA  # CL_DEVICE_COMMAND_BUFFER_REQUIRED_QUEUE_PROPERTIES_KHR
_FLAGS, _SIMULTANEOUS_USE = 0x1293, 1  # CL_COMMAND_BUFFER_FLAGS_KHR, CL_COMMAND_BUFFER_SIMULTANEOUS_USE_KHR


@cache
def driver() -> Any:
    """The library."""
    import pyopencl

    library = ctypes.CDLL(pyopencl._cl.__file__)
    library.clSetKernelArg.argtypes = [c_void_p, c_uint, c_size_t, c_void_p]
    library.clSetKernelArgSVMPointer.argtypes = [c_void_p, c_uint, c_void_p]
    library.clEnqueueNDRangeKernel.argtypes = [c_void_p, c_void_p, c_uint, *[c_void_p] * 3, c_uint, c_void_p, c_void_p]
    library.clGetDeviceInfo.argtypes = [c_void_p, c_uint, c_size_t, c_void_p, c_void_p]
    library.clGetExtensionFunctionAddressForPlatform.argtypes = [c_void_p, ctypes.c_char_p]
    library.clGetExtensionFunctionAddressForPlatform.restype = c_void_p
    return library


def check(status: int, device_name: str, call: str) -> None:
    """Raise HeteroError for a status of the driver that is not success."""
    if status:
        import pyopencl

        raise HeteroError(f"{device_name}: {call}: {pyopencl.status_code.to_string(status, 'status %d')}")


class CommandBuffers(NamedTuple):
    """Functions of ``cl_khr_command_buffer`` of a platform."""

    create: Any
    launch: Any
    finalize: Any
    enqueue: Any
    release: Any


_TYPES = CommandBuffers(
    ctypes.CFUNCTYPE(c_void_p, c_uint, c_void_p, c_void_p, c_void_p),
    ctypes.CFUNCTYPE(c_int, *[c_void_p] * 4, c_uint, *[c_void_p] * 3, c_uint, *[c_void_p] * 3),
    ctypes.CFUNCTYPE(c_int, c_void_p),
    ctypes.CFUNCTYPE(c_int, c_uint, c_void_p, c_void_p, c_uint, c_void_p, c_void_p),
    ctypes.CFUNCTYPE(c_int, c_void_p),
)
_NAMES = CommandBuffers(
    "clCreateCommandBufferKHR", "clCommandNDRangeKernelKHR", "clFinalizeCommandBufferKHR", "clEnqueueCommandBufferKHR",
    "clReleaseCommandBufferKHR",
)  # fmt: skip


def command_buffers_of(device: Any) -> CommandBuffers | None:
    """Functions for a device whose command buffers may be submitted again while they run; None without them."""
    if EXTENSION not in device.extensions.split():
        return None
    if not _info(device, _CAPABILITIES) & _CAN_BE_PENDING_TWICE or _info(device, _REQUIRED_PROPERTIES):
        return None
    find = driver().clGetExtensionFunctionAddressForPlatform
    addresses = [find(device.platform.int_ptr, name.encode()) for name in _NAMES]
    if not all(addresses):
        return None
    return CommandBuffers(*(make(address) for make, address in zip(_TYPES, addresses, strict=True)))


def _info(device: Any, name: int) -> int:
    """A number that describes a device; 0 if its driver lacks it."""
    value = c_uint64(0)
    status = driver().clGetDeviceInfo(device.int_ptr, name, ctypes.sizeof(value), ctypes.byref(value), None)
    return 0 if status else value.value


_SUB_GROUP_SIZES, _WARP_SIZE, _WAVEFRONT_WIDTH = 0x4108, 0x4003, 0x4043
"""CL_DEVICE_SUB_GROUP_SIZES_INTEL (an array of size_t), CL_DEVICE_WARP_SIZE_NV, CL_DEVICE_WAVEFRONT_WIDTH_AMD."""


def subgroups_of(device: Any) -> tuple[int, ...]:
    """Sizes of a device's sub-groups (warps, wavefronts) from its vendor's extension; empty without one."""
    extensions = device.extensions.split()
    if "cl_intel_required_subgroup_size" in extensions:
        sizes, used = (c_size_t * 8)(), c_size_t(0)
        arguments = device.int_ptr, _SUB_GROUP_SIZES, ctypes.sizeof(sizes), sizes, ctypes.byref(used)
        if not driver().clGetDeviceInfo(*arguments):
            return tuple(sizes[: used.value // ctypes.sizeof(c_size_t)])
    vendors = {"cl_nv_device_attribute_query": _WARP_SIZE, "cl_amd_device_attribute_query": _WAVEFRONT_WIDTH}
    widths = (_info(device, name) for extension, name in vendors.items() if extension in extensions)
    return tuple(width for width in widths if width)


class CommandBuffer:
    """Launches that the driver has recorded.

    Parameters
    ----------
    functions : CommandBuffers
    device_name : str
    queue : int
        Handle of the queue that runs them.
    launches : iterable
        Handle of a kernel, and sizes of the grid and of a group. The driver may keep the kernel instead of its
        arguments (PoCL 3.1), so that each launch needs its own kernel object, whose arguments must not change.
    """

    def __init__(self, functions: CommandBuffers, device_name: str, queue: int, launches: Iterable[Any]) -> None:
        self._functions, self._name = functions, device_name
        queues, properties, status = (c_void_p * 1)(queue), (c_uint64 * 3)(_FLAGS, _SIMULTANEOUS_USE, 0), c_int()
        self._handle = functions.create(1, queues, properties, ctypes.byref(status))
        check(status.value, device_name, _NAMES.create)
        for kernel, grid, group in launches:
            result = functions.launch(self._handle, None, None, kernel, 3, None, grid, group, 0, None, None, None)
            check(result, device_name, _NAMES.launch)
        check(functions.finalize(self._handle), device_name, _NAMES.finalize)

    def submit(self) -> None:
        """Put the launches into the queue."""
        check(self._functions.enqueue(0, None, self._handle, 0, None, None), self._name, _NAMES.enqueue)

    def release(self) -> None:
        """Free the command buffer, which must not be in the queue any more."""
        check(self._functions.release(self._handle), self._name, _NAMES.release)
