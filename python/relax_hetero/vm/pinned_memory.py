"""Pinned host memory, which GPUs copy from and to at full rate while the host does other work."""

from __future__ import annotations

import weakref

from .cuda_library import CudaLibrary


class PinnedBlock:
    """Pinned memory, given back when nothing refers to it.

    Parameters
    ----------
    library : CudaLibrary
    gpu : int
        Any: each can use the memory.
    nbytes : int
    """

    def __init__(self, library: CudaLibrary, gpu: int, nbytes: int) -> None:
        library.use(gpu)
        self.address, self.nbytes = library.pinned(nbytes), nbytes
        # When the process ends the driver may have ended before, and frees everything.
        weakref.finalize(self, _give_back, library, gpu, self.address).atexit = False


def _give_back(library: CudaLibrary, gpu: int, address: int) -> None:
    library.use(gpu)
    library.call("cuMemFreeHost", address)
