"""Tensors in pinned host memory; the memory is kept for reuse."""

from __future__ import annotations

from functools import partial

from .block_pool import BlockPool
from .cuda_library import CudaLibrary
from .pinned_memory import PinnedBlock


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
