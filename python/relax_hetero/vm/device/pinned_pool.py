"""Tensors in pinned host memory; the memory is kept for reuse."""

from __future__ import annotations

from functools import partial

from tvm import runtime

from .block_pool import BlockPool
from .cuda_library import CUDA, CudaLibrary, cuda_library
from .pinned_memory import PinnedBlock
from .tensors import is_host, nbytes_of

PINNED_BYTES = 128 << 10
"""Smaller tensors arrive as soon in memory that is not pinned, and leave as soon from there."""

TRANSFER_BYTES = 2 << 30
"""Of host memory that is pinned for each GPU: for what plain calls bring from it, and for what is made to go to it."""


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


def arrival(
    source: runtime.Tensor, device: runtime.Device, room: runtime.Tensor | None = None
) -> runtime.Tensor | None:
    """Where a copy of `source`, on a GPU, should arrive on a CPU: pinned memory, which the GPU writes at full rate.

    That is `room`, if its memory is pinned. None for other devices, and where any memory will do or the limit is
    reached.
    """
    if source.device.dlpack_device_type() != CUDA or not is_host(device) or nbytes_of(source) < PINNED_BYTES:
        return None
    library = cuda_library()
    if library is not None and room is not None and library.is_pinned(room.data_ptr()):
        return room
    return _kept(tuple(source.shape), str(source.dtype), device, source.device.index)


def departure(nbytes: int, device: runtime.Device, gpu: int) -> runtime.Tensor | None:
    """Bytes on a CPU for what is to go to a GPU: pinned memory, which the GPU reads at full rate.

    None where any memory will do or the limit is reached.
    """
    return None if nbytes < PINNED_BYTES else _kept((nbytes,), "uint8", device, gpu)


def release_pinned() -> None:
    """Give back what is pinned for arrivals and departures, of all machines, and no tensor uses."""
    for pool in list(_pools.values()):
        pool.release()


def _kept(shape: tuple[int, ...], dtype: str, device: runtime.Device, gpu: int) -> runtime.Tensor | None:
    library = cuda_library()
    if library is None:
        return None
    if gpu not in _pools:
        _pools.setdefault(gpu, PinnedPool(library, gpu, TRANSFER_BYTES))
    return _pools[gpu].kept_tensor(shape, dtype, device)


_pools: dict[int, PinnedPool] = {}
