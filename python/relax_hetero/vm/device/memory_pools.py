"""Pools of memory that takes long to get, pinned host memory above all, and the tensors in it."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
from tvm import runtime

from ...target.backend import backend_of_device
from ...target.element_types import bytes_for
from .cuda_library import CudaLibrary, cuda_library
from .cuda_memory import PinnedBlock
from .tensors import alias, empty, is_host, nbytes_of, view_bytes

_MIN_BLOCK_BYTES = 4096
"""Bytes of the smallest block."""


class MemoryBlock(Protocol):
    """Memory, given back when nothing refers to it."""

    address: int
    nbytes: int


class BlockPool:
    """Keeps blocks for reuse.

    May be used from any thread.

    Parameters
    ----------
    make : callable
        Makes a block of so many bytes.
    limit : int
        Bytes in blocks, lent and kept, beyond which none is made.

    Attributes
    ----------
    nbytes : int
        Bytes in blocks, lent and kept.
    """

    def __init__(self, make: Callable[[int], MemoryBlock], limit: int) -> None:
        self._make, self._limit = make, limit
        self._lock = threading.Lock()
        self._reserved: dict[int, list[MemoryBlock]] = {}
        self._returned: deque[MemoryBlock] = deque()
        self.nbytes = 0

    def tensor(self, shape: tuple[int, ...], dtype: str, device: runtime.Device) -> runtime.Tensor:
        """An uninitialised tensor on `device`, which must be able to use the blocks.

        Its memory is reused as soon as no tensor or array over it is left: who lets a GPU copy from or to it keeps it
        until the copy has ended. Beyond the limit it has memory of its own, as `tensors.empty` gives it.
        """
        tensor = self.reserved_tensor(shape, dtype, device)
        return empty(shape, dtype, device) if tensor is None else tensor

    def reserved_tensor(self, shape: tuple[int, ...], dtype: str, device: runtime.Device) -> runtime.Tensor | None:
        """A tensor as `tensor` gives it; None beyond the limit, and where there are no elements."""
        nbytes = bytes_for(shape, dtype)
        block = self._take(_rounded(nbytes)) if nbytes else None
        if block is None:
            return None
        memory = (ctypes.c_uint8 * nbytes).from_address(block.address)
        weakref.finalize(memory, self._returned.append, block).atexit = False
        return alias(view_bytes(np.ctypeslib.as_array(memory), shape, dtype), device)

    def release(self) -> None:
        """Give back the blocks that no tensor uses."""
        with self._lock:
            self._collect()
            self._drop_reserved()

    def _take(self, nbytes: int) -> MemoryBlock | None:
        with self._lock:
            self._collect()
            if self._reserved.get(nbytes):
                return self._reserved[nbytes].pop()
            if self.nbytes + nbytes > self._limit:
                self._drop_reserved()
            if self.nbytes + nbytes > self._limit:
                return None
            block = self._make(nbytes)
            self.nbytes += nbytes
            return block

    def _collect(self) -> None:
        while self._returned:  # filled by finalizers, which run anywhere and so take no lock
            block = self._returned.popleft()
            self._reserved.setdefault(block.nbytes, []).append(block)

    def _drop_reserved(self) -> None:
        self.nbytes -= sum(block.nbytes for blocks in self._reserved.values() for block in blocks)
        self._reserved.clear()


def _rounded(nbytes: int) -> int:
    """At most a quarter more than `nbytes`, so that similar tensors share blocks."""
    step = max(_MIN_BLOCK_BYTES, 1 << max(0, nbytes.bit_length() - 3))
    return -(-nbytes // step) * step


PINNED_BYTES = 128 << 10
"""Smaller tensors arrive as soon in memory that is not pinned, and leave as soon from there."""

TRANSFER_BYTES = 2 << 30
"""Bytes of host memory pinned for each GPU: for transfers of plain calls from it, and for tensors that go to it."""


class PinnedPool(BlockPool):
    """Keeps pinned memory for reuse: pinning takes longer than copying.

    Its tensors are on CPUs. Beyond the limit their memory is not pinned.

    Parameters
    ----------
    gpu : int
        Any.
    limit : int
        Bytes of pinned memory, lent and kept, beyond which none is pinned.
    """

    def __init__(self, library: CudaLibrary, gpu: int, limit: int) -> None:
        super().__init__(partial(PinnedBlock, library, gpu), limit)


def receive_buffer(
    source: runtime.Tensor, device: runtime.Device, buffer: runtime.Tensor | None = None
) -> runtime.Tensor | None:
    """The tensor in which a copy of `source`, on a GPU, should arrive on a CPU: pinned, to be written at full rate.

    That is `buffer`, if its memory is pinned. None for other devices, and where any memory will do or the limit is
    reached.
    """
    is_fast = backend_of_device(source.device).pins_memory
    if not is_fast or not is_host(device) or nbytes_of(source) < PINNED_BYTES:
        return None
    library = cuda_library()
    if library is not None and buffer is not None and library.is_pinned(buffer.data_ptr()):
        return buffer
    return _reserved(tuple(source.shape), str(source.dtype), device, source.device.index)


def send_buffer(nbytes: int, device: runtime.Device, gpu: int) -> runtime.Tensor | None:
    """Bytes on a CPU for what is to go to a GPU: pinned memory, which the GPU reads at full rate.

    None where any memory will do or the limit is reached.
    """
    return None if nbytes < PINNED_BYTES else _reserved((nbytes,), "uint8", device, gpu)


def release_pinned() -> None:
    """Give back what is pinned for arrivals and departures, of all machines, and no tensor uses."""
    for pool in list(_pools.values()):
        pool.release()


def _reserved(shape: tuple[int, ...], dtype: str, device: runtime.Device, gpu: int) -> runtime.Tensor | None:
    library = cuda_library()
    if library is None:
        return None
    if gpu not in _pools:
        _pools.setdefault(gpu, PinnedPool(library, gpu, TRANSFER_BYTES))
    return _pools[gpu].reserved_tensor(shape, dtype, device)


_pools: dict[int, PinnedPool] = {}
