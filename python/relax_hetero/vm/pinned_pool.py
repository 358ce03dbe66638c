"""Tensors in pinned host memory; the memory is kept for reuse."""

from __future__ import annotations

from functools import cache, partial

from tvm import runtime

from .block_pool import BlockPool
from .cuda_library import CUDA, CudaLibrary, cuda_library
from .pinned_memory import PinnedBlock
from .tensors import is_host, nbytes_of

PINNED_BYTES = 128 << 10
"""Smaller tensors arrive as soon in memory that is not pinned."""

ARRIVALS_BYTES = 1 << 30
"""Of host memory that plain calls pin for what comes from each GPU."""


class PinnedPool(BlockPool):
    """Keeps pinned memory for reuse: pinning takes longer than copying.

    Its tensors are on CPUs. Beyond the limit their memory is not pinned.

    Parameters
    ----------
    library : CudaLibrary
    gpu : int
        Any.
    limit : int
        Bytes of pinned memory, lent and kept, beyond which none is pinned.
    """

    def __init__(self, library: CudaLibrary, gpu: int, limit: int) -> None:
        super().__init__(partial(PinnedBlock, library, gpu), limit)


def arrival(source: runtime.Tensor, device: runtime.Device) -> runtime.Tensor | None:
    """Where a copy of `source`, on a GPU, should arrive on a CPU: pinned memory, which the GPU writes at full rate.

    None for other devices, and where any memory will do or the limit is reached.
    """
    if source.device.dlpack_device_type() != CUDA or not is_host(device) or nbytes_of(source) < PINNED_BYTES:
        return None
    library = cuda_library()
    if library is None:
        return None
    return _arrivals(library, source.device.index).kept_tensor(tuple(source.shape), str(source.dtype), device)


@cache
def _arrivals(library: CudaLibrary, gpu: int) -> PinnedPool:
    return PinnedPool(library, gpu, ARRIVALS_BYTES)
