"""Pools of memory that is slow to allocate, mainly pinned host memory, and tensors in that memory."""

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

_MIN_BLOCK_BYTES = 4096  # bytes of the smallest block


class MemoryBlock(Protocol):
    """Memory that is freed when nothing refers to it."""

    address: int
    nbytes: int


class BlockPool:
    """Thread-safe pool of memory blocks.

    `make`: makes a block of a number of bytes. `limit`: maximum bytes of all blocks, in use and free.
    """

    def __init__(self, make: Callable[[int], MemoryBlock], limit: int) -> None:
        self._make, self._limit = make, limit
        self._lock = threading.Lock()
        self._free: dict[int, list[MemoryBlock]] = {}
        self._returned: deque[MemoryBlock] = deque()
        self.nbytes = 0  # bytes of all blocks, in use and free

    def tensor(self, shape: tuple[int, ...], dtype: str, device: runtime.Device) -> runtime.Tensor:
        """An uninitialised tensor on `device`, which must be able to use the blocks.

        Its memory is reused as soon as no tensor or array over it is left, so it must be kept during asynchronous
        copies. Beyond the limit it has memory of `tensors.empty`.
        """
        tensor = self.pooled_tensor(shape, dtype, device)
        return empty(shape, dtype, device) if tensor is None else tensor

    def pooled_tensor(self, shape: tuple[int, ...], dtype: str, device: runtime.Device) -> runtime.Tensor | None:
        """A tensor as in `tensor`; None beyond the limit and for empty tensors."""
        nbytes = bytes_for(shape, dtype)
        block = self._take(_rounded(nbytes)) if nbytes else None
        if block is None:
            return None
        memory = (ctypes.c_uint8 * nbytes).from_address(block.address)
        weakref.finalize(memory, self._returned.append, block).atexit = False
        return alias(view_bytes(np.ctypeslib.as_array(memory), shape, dtype), device)

    def release(self) -> None:
        """Free the blocks that no tensor uses."""
        with self._lock:
            self._collect()
            self._drop_free()

    def _take(self, nbytes: int) -> MemoryBlock | None:
        with self._lock:
            self._collect()
            if self._free.get(nbytes):
                return self._free[nbytes].pop()
            if self.nbytes + nbytes > self._limit:
                self._drop_free()
            if self.nbytes + nbytes > self._limit:
                return None
            block = self._make(nbytes)
            self.nbytes += nbytes
            return block

    def _collect(self) -> None:
        while self._returned:  # filled by finalizers, which run in any thread and must not take locks
            block = self._returned.popleft()
            self._free.setdefault(block.nbytes, []).append(block)

    def _drop_free(self) -> None:
        self.nbytes -= sum(block.nbytes for blocks in self._free.values() for block in blocks)
        self._free.clear()


def _rounded(nbytes: int) -> int:
    """`nbytes` rounded up by at most a quarter (or to `_MIN_BLOCK_BYTES`), so that similar tensors share blocks."""
    unit = max(_MIN_BLOCK_BYTES, 1 << max(0, nbytes.bit_length() - 3))
    return -(-nbytes // unit) * unit


PINNED_BYTES = 128 << 10  # minimum bytes of a tensor that is copied faster from and to pinned memory
TRANSFER_BYTES = 2 << 30  # maximum bytes of host memory pinned for each GPU, for transfers from and to it


class PinnedPool(BlockPool):
    """Pool of pinned host memory, because pinning takes longer than copying. Its tensors are on CPUs.

    `gpu`: any GPU. `limit`: maximum bytes of pinned memory, in use and free; tensors beyond it are not pinned.
    """

    def __init__(self, library: CudaLibrary, gpu: int, limit: int) -> None:
        super().__init__(partial(PinnedBlock, library, gpu), limit)


def receive_buffer(
    source: runtime.Tensor,
    device: runtime.Device,
    buffer: runtime.Tensor | None = None,
    min_bytes: int = PINNED_BYTES,
) -> runtime.Tensor | None:
    """A pinned tensor on a CPU as the target of a copy of `source` from a GPU; `buffer` itself if that is pinned.

    None for other devices, for tensors of less than `min_bytes`, and beyond the limit.
    """
    if not backend_of_device(source.device).pins_memory or not is_host(device) or nbytes_of(source) < min_bytes:
        return None
    library = cuda_library()
    if library is not None and buffer is not None and library.is_pinned(buffer.data_ptr()):
        return buffer
    return _pooled(tuple(source.shape), str(source.dtype), device, source.device.index)


def send_buffer(nbytes: int, device: runtime.Device, gpu: int) -> runtime.Tensor | None:
    """Pinned bytes on a CPU as the source of a copy to a GPU; None for small sizes and beyond the limit."""
    return None if nbytes < PINNED_BYTES else _pooled((nbytes,), "uint8", device, gpu)


def release_pinned() -> None:
    """Free unused pinned memory for transfers of all machines."""
    for pool in list(_pools.values()):
        pool.release()


def _pooled(shape: tuple[int, ...], dtype: str, device: runtime.Device, gpu: int) -> runtime.Tensor | None:
    library = cuda_library()
    if library is None:
        return None
    if gpu not in _pools:
        _pools.setdefault(gpu, PinnedPool(library, gpu, TRANSFER_BYTES))
    return _pools[gpu].pooled_tensor(shape, dtype, device)


_pools: dict[int, PinnedPool] = {}
