"""Direct copies between CUDA GPUs.

Without peer access the driver copies from GPU to GPU through the host, ten times slower than the link between two
H200s. TVM does not ask for it.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Sequence

from tvm import runtime

from .cuda_driver import CudaError
from .cuda_library import CUDA, CudaLibrary, cuda_library


def enable_peer_access(devices: Sequence[runtime.Device]) -> None:
    """Let every pair of CUDA devices among `devices` read each other, where the hardware can; else nothing happens."""
    gpus = sorted({device.index for device in devices if device.dlpack_device_type() == CUDA})
    library = cuda_library() if len(gpus) > 1 else None
    if library is not None:
        for gpu, peer in itertools.permutations(gpus, 2):
            _enable(library, gpu, peer)


@functools.cache
def _enable(library: CudaLibrary, gpu: int, peer: int) -> bool:
    """Whether `gpu` can now read memory of `peer` (asked for once: the driver keeps it for the whole process)."""
    able = ctypes.c_int(0)
    try:
        library.call("cuDeviceCanAccessPeer", ctypes.byref(able), gpu, peer)
        if not able.value:
            return False
        library.call("cuCtxPushCurrent_v2", library.context(gpu))
        try:
            library.call("cuCtxEnablePeerAccess", library.context(peer), 0)
        finally:
            library.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
    except CudaError:  # a GPU that is lost, or access that others have enabled
        return False
    return True
