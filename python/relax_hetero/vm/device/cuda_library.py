"""The CUDA driver's own library, which exists wherever CUDA works and needs no Python package.

ctypes calls release Python's global lock. For short calls from many threads taking the lock again costs more than the
call, so `quick` keeps it. Contexts are the primary ones, which CUDA's runtime, and hence TVM, uses.
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
_NOT_SUPPORTED = 801  # CUDA_ERROR_NOT_SUPPORTED

_PORTABLE, _DEVICEMAP = 1, 2  # CU_MEMHOSTALLOC_*
_MEMORY_TYPE = 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE
HOST_MEMORY, DEVICE_MEMORY = 1, 2  # CU_MEMORYTYPE_*

_ADDRESS = c_uint64  # CUdeviceptr


class RowCopy(ctypes.Structure):
    """A copy of rows with a distance between their begins (CUDA_MEMCPY2D)."""

    _fields_ = [
        (f"{side}{name}", kind)
        for side in ("src", "dst")
        for name, kind in (
            ("XInBytes", c_size_t), ("Y", c_size_t), ("MemoryType", c_uint), ("Host", c_void_p),
            ("Device", _ADDRESS), ("Array", c_void_p), ("Pitch", c_size_t),
        )
    ] + [("WidthInBytes", c_size_t), ("Height", c_size_t)]  # fmt: skip


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
    "cuMemcpy2DAsync_v2": (POINTER(RowCopy), c_void_p),
    "cuMemsetD8Async": (_ADDRESS, c_ubyte, c_size_t, c_void_p),
    "cuMemsetD16Async": (_ADDRESS, c_ushort, c_size_t, c_void_p),
    "cuMemsetD32Async": (_ADDRESS, c_uint, c_size_t, c_void_p),
    "cuMemsetD2D32Async": (_ADDRESS, c_size_t, c_uint, c_size_t, c_size_t, c_void_p),
    "cuMemcpyPeerAsync": (_ADDRESS, c_void_p, _ADDRESS, c_void_p, c_size_t, c_void_p),
}

_GRAPH_ARGUMENTS = {
    "cuStreamBeginCapture_v2": (c_void_p, c_int),
    "cuStreamEndCapture": (c_void_p, POINTER(c_void_p)),
    "cuStreamGetCaptureInfo_v2": (
        *(c_void_p, POINTER(c_int), POINTER(c_uint64), POINTER(c_void_p), POINTER(c_void_p)),
        POINTER(c_size_t),
    ),
    "cuStreamUpdateCaptureDependencies": (c_void_p, POINTER(c_void_p), c_size_t, c_uint),
    "cuGraphAddChildGraphNode": (POINTER(c_void_p), c_void_p, c_void_p, c_size_t, c_void_p),
    "cuGraphDestroy": (c_void_p,),
    "cuGraphDestroyNode": (c_void_p,),
    "cuGraphGetNodes": (c_void_p, c_void_p, POINTER(c_size_t)),
    "cuGraphGetEdges_v2": (c_void_p, c_void_p, c_void_p, c_void_p, POINTER(c_size_t)),
    "cuGraphNodeGetType": (c_void_p, POINTER(c_int)),
    "cuGraphRemoveDependencies_v2": (c_void_p, c_void_p, c_void_p, c_void_p, c_size_t),
    "cuGraphAddDependencies_v2": (c_void_p, c_void_p, c_void_p, c_void_p, c_size_t),
    "cuGraphAddEventRecordNode": (POINTER(c_void_p), c_void_p, c_void_p, c_size_t, c_void_p),
    "cuGraphInstantiateWithFlags": (POINTER(c_void_p), c_void_p, c_uint64),
    "cuGraphUpload": (c_void_p, c_void_p),
    "cuGraphLaunch": (c_void_p, c_void_p),
    "cuGraphExecDestroy": (c_void_p,),
}
"""Functions of graphs, which a driver may lack."""

_GRAPHS_DRIVER = "; expected a driver of CUDA 12.3 or later (nvidia-smi shows its version)"


class CudaLibrary:
    """Functions of the driver by name; those that fail raise `CudaError`.

    `library`: ``ctypes.CDLL`` of the driver. `quick`: ``ctypes.PyDLL`` of it, whose calls keep Python's global lock.
    """

    def __init__(self, library: Any, quick: Any) -> None:
        self._functions, self._quick = _typed(library), _typed(quick)
        self._contexts: dict[int, int] = {}
        self.call("cuInit", 0)

    def call(self, name: str, *args: Any) -> None:
        """Call a function without Python's global lock."""
        status = self._functions[name](*args)
        if status:
            raise self.error(name, status)

    def quick(self, name: str, *args: Any) -> None:
        """Call a non-blocking function with Python's global lock held."""
        status = self._quick[name](*args)
        if status:
            raise self.error(name, status)

    def status(self, name: str, *args: Any, quick: bool = True) -> int:
        """Call a non-blocking function as `quick` does, or as `call`, and return its status instead of raising."""
        return int((self._quick if quick else self._functions)[name](*args))

    def address(self, name: str) -> int:
        """The address of a function, for compiled code."""
        return ctypes.cast(self._functions[name], c_void_p).value or 0

    def error(self, name: str, status: int) -> CudaError:
        """The exception for a failing function's status."""
        text = c_char_p()
        self._functions["cuGetErrorName"](status, ctypes.byref(text))
        hint = _GRAPHS_DRIVER if self._functions.get(name) is _missing else ""
        return CudaError(f"{name} failed: {text.value.decode() if text.value else status}{hint}")

    def create(self, name: str, *args: Any) -> int:
        """Call a function, and return the handle or address that it stores through its first argument."""
        result = c_void_p()
        self.call(name, ctypes.byref(result), *args)
        return result.value or 0

    def context(self, gpu: int) -> int:
        """The primary context of a GPU, retained for the life of the process."""
        context = self._contexts.get(gpu)
        if context is None:
            context = self._contexts[gpu] = self.create("cuDevicePrimaryCtxRetain", gpu)
        return context

    def use(self, gpu: int) -> None:
        """Make a GPU this thread's current one, as TVM does before it allocates or launches there."""
        self.quick("cuCtxSetCurrent", self.context(gpu))

    def pinned(self, nbytes: int) -> int:
        """Allocate pinned host memory for all GPUs; returns its address. A context must be current."""
        return self.create("cuMemHostAlloc", nbytes, _PORTABLE | _DEVICEMAP)

    def is_pinned(self, address: int) -> bool:
        """Return whether host memory is pinned, by any library."""
        kind = c_uint(0)
        failed = self.status("cuPointerGetAttribute", ctypes.byref(kind), _MEMORY_TYPE, address)
        return not failed and kind.value == HOST_MEMORY


def _missing(*_: Any) -> int:
    """Stand-in for a function that the driver lacks."""
    return _NOT_SUPPORTED


def _typed(library: Any) -> dict[str, Any]:
    functions: dict[str, Any] = {}
    for name, arguments in {**_ARGUMENTS, **_GRAPH_ARGUMENTS}.items():
        if name in _GRAPH_ARGUMENTS and not hasattr(library, name):
            functions[name] = _missing
            continue
        functions[name] = function = getattr(library, name)
        function.argtypes, function.restype = arguments, c_int
    return functions


@cache
def cuda_library() -> CudaLibrary | None:
    """The driver's library, or None if CUDA does not work."""
    try:
        return CudaLibrary(ctypes.CDLL("libcuda.so.1"), ctypes.PyDLL("libcuda.so.1"))
    except (OSError, AttributeError, CudaError):  # no driver, too old a driver, or no GPU
        return None


def cuda_device(index: int) -> runtime.Device:
    """The TVM device of a GPU."""
    return runtime.device("cuda", index)
