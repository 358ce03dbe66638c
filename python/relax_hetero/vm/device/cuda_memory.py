"""Memory for copies from and to GPUs: pinned host memory, and GPU memory outside of TVM's pool.

GPUs copy from and to pinned memory at full rate and asynchronously. TVM's pool reuses memory as soon as nothing on the
host refers to it. That is safe for later work in the same stream, but not for copies in other streams.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tvm import runtime

from ...errors import BindingError
from ...target.element_types import numpy_dtype
from .cuda_library import CudaLibrary, cuda_library

_log = logging.getLogger("relax_hetero")


class PinnedBlock:
    """Pinned memory, freed when nothing refers to it.

    `gpu`: GPU whose context allocates it; all GPUs can use the memory.
    """

    def __init__(self, library: CudaLibrary, gpu: int, nbytes: int) -> None:
        library.use(gpu)
        self.address, self.nbytes = library.pinned(nbytes), nbytes
        # Not at process exit: the driver may have shut down, and frees everything itself.
        weakref.finalize(self, _free, library, gpu, "cuMemFreeHost", self.address).atexit = False


class DeviceBlock:
    """Memory of a GPU, freed when nothing refers to it. `gpu`: GPU that owns the memory."""

    def __init__(self, library: CudaLibrary, gpu: int, nbytes: int) -> None:
        library.use(gpu)
        self.address, self.nbytes = library.create("cuMemAlloc_v2", nbytes), nbytes
        weakref.finalize(self, _free, library, gpu, "cuMemFree_v2", self.address).atexit = False


def _free(library: CudaLibrary, gpu: int, function: str, address: int) -> None:
    library.use(gpu)
    library.call(function, address)


def pinned_array(shape: int | tuple[int, ...], dtype: str | np.dtype[Any] = "float32") -> np.ndarray:
    """An uninitialised array in pinned host memory: an argument or ``out=`` that GPUs copy from and to at full rate.

    Pinning takes longer than copying: make such arrays once and reuse them. The memory is freed with the last array
    over it.

    Parameters
    ----------
    shape : int or tuple of int
        Extents.
    dtype : str or numpy.dtype
        Element type; names may be of types that numpy lacks (``"bfloat16"``).

    Returns
    -------
    numpy.ndarray
        Array of these extents.

    Raises
    ------
    BindingError
        CUDA does not work.
    CudaError
        The memory cannot be pinned.
    """
    kind = numpy_dtype(dtype) if isinstance(dtype, str) else np.dtype(dtype)
    library = cuda_library()
    if library is None:
        raise BindingError("pinned_array needs a CUDA driver and a GPU, found none; numpy.empty gives plain memory")
    nbytes = math.prod((shape,) if isinstance(shape, int) else shape) * kind.itemsize
    if not nbytes:
        return np.empty(shape, kind)
    return np.asarray(_Array(PinnedBlock(library, 0, nbytes))).view(kind).reshape(shape)


class _Array:
    """A block with numpy's array interface; arrays over it keep it alive."""

    def __init__(self, block: PinnedBlock) -> None:
        self._block = block
        data = (block.address, False)
        self.__array_interface__ = {"shape": (block.nbytes,), "typestr": "|u1", "data": data, "version": 3}


def free_after_use(
    library: CudaLibrary, devices: Sequence[runtime.Device], address: int, graphs: Mapping[Any, int] | None = None
) -> None:
    """Free pinned memory that launches of devices may still use, and destroy graphs that use it; for finalizers."""
    try:
        for device in devices:
            device.sync()
        for graph in (graphs or {}).values():
            library.call("cuGraphExecDestroy", graph)
        library.call("cuMemFreeHost", address)
    except Exception:  # at process exit the driver may have shut down already
        _log.debug("pinned memory of %s was not freed", ", ".join(map(str, devices)), exc_info=True)
