"""Tensors in pinned host memory; the memory is kept for reuse."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque

import numpy as np
from tvm import runtime

from .cuda_library import CudaLibrary
from .pinned_memory import PinnedBlock
from .tensors import alias, bytes_for, empty, view_bytes

_SMALLEST = 4096
"""Bytes of the smallest block."""


class PinnedPool:
    """Keeps pinned memory for reuse: pinning takes longer than copying.

    May be used from any thread.

    Parameters
    ----------
    library : CudaLibrary
    gpu : int
        Any.
    limit : int
        Bytes of pinned memory, lent and kept, beyond which none is pinned.
    """

    def __init__(self, library: CudaLibrary, gpu: int, limit: int) -> None:
        self._library, self._gpu, self._limit = library, gpu, limit
        self._lock = threading.Lock()
        self._kept: dict[int, list[PinnedBlock]] = {}
        self._returned: deque[PinnedBlock] = deque()
        self.nbytes = 0
        """Bytes of pinned memory, lent and kept."""

    def tensor(self, shape: tuple[int, ...], dtype: str, device: runtime.Device) -> runtime.Tensor:
        """An uninitialised tensor on `device`, a CPU.

        Its memory is reused as soon as no tensor or array over it is left: who lets a GPU copy from or to it keeps it
        until the copy has ended. Beyond the limit its memory is not pinned.
        """
        nbytes = bytes_for(shape, dtype)
        block = self._take(_rounded(nbytes)) if nbytes else None
        if block is None:
            return empty(shape, dtype, device)
        memory = (ctypes.c_uint8 * nbytes).from_address(block.address)
        weakref.finalize(memory, self._returned.append, block).atexit = False
        return alias(view_bytes(np.ctypeslib.as_array(memory), shape, dtype), device)

    def _take(self, nbytes: int) -> PinnedBlock | None:
        with self._lock:
            while self._returned:  # filled by finalizers, which run anywhere and so take no lock
                block = self._returned.popleft()
                self._kept.setdefault(block.nbytes, []).append(block)
            if self._kept.get(nbytes):
                return self._kept[nbytes].pop()
            if self.nbytes + nbytes > self._limit:
                self.nbytes -= sum(block.nbytes for blocks in self._kept.values() for block in blocks)
                self._kept.clear()
            if self.nbytes + nbytes > self._limit:
                return None
            block = PinnedBlock(self._library, self._gpu, nbytes)
            self.nbytes += nbytes
            return block


def _rounded(nbytes: int) -> int:
    """At most a quarter more than `nbytes`, so that similar tensors share blocks."""
    step = max(_SMALLEST, 1 << max(0, nbytes.bit_length() - 3))
    return -(-nbytes // step) * step
