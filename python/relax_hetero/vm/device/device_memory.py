"""Memory of a GPU that is not of TVM's pool.

That pool gives memory again as soon as nothing on the host refers to it: right for work that follows in the stream of
the kernels which used it, wrong for copies that run beside them.
"""

from __future__ import annotations

import weakref

from .cuda_library import CudaLibrary


class DeviceBlock:
    """Memory of a GPU, given back when nothing refers to it.

    Parameters
    ----------
    library : CudaLibrary
    gpu : int
        Whose memory.
    nbytes : int
    """

    def __init__(self, library: CudaLibrary, gpu: int, nbytes: int) -> None:
        library.use(gpu)
        self.address, self.nbytes = library.made("cuMemAlloc_v2", nbytes), nbytes
        # When the process ends the driver may have ended before, and frees everything.
        weakref.finalize(self, _give_back, library, gpu, self.address).atexit = False


def _give_back(library: CudaLibrary, gpu: int, address: int) -> None:
    library.use(gpu)
    library.call("cuMemFree_v2", address)
