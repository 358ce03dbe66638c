"""The CUDA driver's own library: it is there wherever CUDA works, and needs no package.

Called through ctypes, which lets other Python threads run during a call. Where many threads make short calls, taking
turns costs more than the calls: those can be made without. Contexts are the primary ones, which CUDA's runtime, hence
TVM, uses.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ushort, c_void_p
from functools import cache
from typing import Any

from tvm import runtime

from .cuda_driver import CudaError

CUDA = 2  # kDLCUDA
CUDA_HOST = 3  # kDLCUDAHost, pinned memory of the host
NOT_READY = 600  # CUDA_ERROR_NOT_READY

_PORTABLE, _DEVICEMAP = 1, 2  # CU_MEMHOSTALLOC_*
_MEMORY_TYPE, _HOST = 2, 1  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_MEMORYTYPE_HOST

_ADDRESS = c_uint64  # CUdeviceptr
_ARGUMENTS = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuDeviceCanAccessPeer": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuCtxEnablePeerAccess": (c_void_p, c_uint),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamQuery": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventDestroy_v2": (c_void_p,),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    "cuEventQuery": (c_void_p,),
    "cuEventElapsedTime": (POINTER(ctypes.c_float), c_void_p, c_void_p),
    "cuMemAlloc_v2": (POINTER(c_void_p), c_size_t),
    "cuMemFree_v2": (_ADDRESS,),
    "cuMemHostAlloc": (POINTER(c_void_p), c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuPointerGetAttribute": (c_void_p, c_int, _ADDRESS),
    "cuMemcpyHtoDAsync_v2": (_ADDRESS, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, _ADDRESS, c_size_t, c_void_p),
    "cuMemcpyDtoDAsync_v2": (_ADDRESS, _ADDRESS, c_size_t, c_void_p),
    "cuMemsetD8Async": (_ADDRESS, c_ubyte, c_size_t, c_void_p),
    "cuMemsetD16Async": (_ADDRESS, c_ushort, c_size_t, c_void_p),
    "cuMemsetD32Async": (_ADDRESS, c_uint, c_size_t, c_void_p),
    "cuMemsetD2D32Async": (_ADDRESS, c_size_t, c_uint, c_size_t, c_size_t, c_void_p),
    "cuMemcpyPeerAsync": (_ADDRESS, c_void_p, _ADDRESS, c_void_p, c_size_t, c_void_p),
}


class CudaLibrary:
    """Functions of the driver by name; those that fail raise `CudaError`.

    Parameters
    ----------
    library : object
        With the driver's functions.
    quick : object
        The same, for calls during which no other Python thread runs.
    """

    def __init__(self, library: Any, quick: Any) -> None:
        self._functions, self._quick = _typed(library), _typed(quick)
        self._contexts: dict[int, int] = {}
        self.call("cuInit", 0)

    def call(self, name: str, *args: Any) -> None:
        """Call a function."""
        status = self._functions[name](*args)
        if status:
            raise self.error(name, status)

    def quick(self, name: str, *args: Any) -> None:
        """Call a function that waits for nothing, while other Python threads wait."""
        status = self._quick[name](*args)
        if status:
            raise self.error(name, status)

    def status(self, name: str, *args: Any) -> int:
        """The status that a function returns which does not wait, where a failure is an answer."""
        return int(self._quick[name](*args))

    def address(self, name: str) -> int:
        """The address of a function, for code that calls it itself."""
        return ctypes.cast(self._functions[name], c_void_p).value or 0

    def error(self, name: str, status: int) -> CudaError:
        """The text of a failing function's status."""
        text = c_char_p()
        self._functions["cuGetErrorName"](status, ctypes.byref(text))
        return CudaError(f"{name} failed: {text.value.decode() if text.value else status}")

    def create(self, name: str, *args: Any) -> int:
        """The handle or address that a function stores through its first argument."""
        result = c_void_p()
        self.call(name, ctypes.byref(result), *args)
        return result.value or 0

    def context(self, gpu: int) -> int:
        """The primary context of a GPU, kept for the life of the process."""
        context = self._contexts.get(gpu)
        if context is None:
            context = self._contexts[gpu] = self.create("cuDevicePrimaryCtxRetain", gpu)
        return context

    def use(self, gpu: int) -> None:
        """Make a GPU this thread's current one, as TVM does before it allocates or launches there."""
        self.quick("cuCtxSetCurrent", self.context(gpu))

    def pinned(self, nbytes: int) -> int:
        """The address of host memory that every GPU copies from and to without the driver's help; needs a context."""
        return self.create("cuMemHostAlloc", nbytes, _PORTABLE | _DEVICEMAP)

    def is_pinned(self, address: int) -> bool:
        """Return whether host memory is pinned, whoever has done it."""
        kind = c_uint(0)
        failed = self.status("cuPointerGetAttribute", ctypes.byref(kind), _MEMORY_TYPE, address)
        return not failed and kind.value == _HOST


def _typed(library: Any) -> dict[str, Any]:
    functions = {}
    for name, arguments in _ARGUMENTS.items():
        functions[name] = function = getattr(library, name)
        function.argtypes, function.restype = arguments, c_int
    return functions


@cache
def cuda_library() -> CudaLibrary | None:
    """The driver's library, or None where CUDA does not work."""
    try:
        return CudaLibrary(ctypes.CDLL("libcuda.so.1"), ctypes.PyDLL("libcuda.so.1"))
    except (OSError, AttributeError, CudaError):  # none, older than what is used of it, or no GPU
        return None


def cuda_device(index: int) -> runtime.Device:
    """A GPU as TVM names it."""
    return runtime.device("cuda", index)
