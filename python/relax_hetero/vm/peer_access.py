"""Direct copies between CUDA GPUs.

Without peer access the driver copies from GPU to GPU through the host, ten times slower than the link between two
H200s. TVM does not ask for it. The driver's library is called directly: it is there wherever CUDA works.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Sequence

from tvm import runtime

_CUDA = 2  # kDLCUDA


def enable_peer_access(devices: Sequence[runtime.Device]) -> None:
    """Let every pair of CUDA devices among `devices` read each other, where the hardware can; else nothing happens."""
    gpus = sorted({device.index for device in devices if device.dlpack_device_type() == _CUDA})
    for gpu, peer in itertools.permutations(gpus, 2):
        _enable(gpu, peer)


@functools.cache
def _enable(gpu: int, peer: int) -> bool:
    """Whether `gpu` can now read memory of `peer` (asked for once: the driver keeps it for the whole process)."""
    driver = _driver()
    able = ctypes.c_int(0)
    if driver is None or driver.cuDeviceCanAccessPeer(ctypes.byref(able), gpu, peer) or not able.value:
        return False
    mine, other = _context(gpu), _context(peer)
    if mine is None or other is None or driver.cuCtxPushCurrent_v2(mine):
        return False
    try:
        return driver.cuCtxEnablePeerAccess(other, 0) == 0
    finally:
        driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


@functools.cache
def _context(gpu: int) -> ctypes.c_void_p | None:
    """The context that CUDA's runtime, hence TVM, uses on a GPU; kept for the life of the process."""
    driver = _driver()
    context = ctypes.c_void_p()
    if driver is None or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu):
        return None
    return context


@functools.cache
def _driver() -> ctypes.CDLL | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return None if driver.cuInit(0) else driver
