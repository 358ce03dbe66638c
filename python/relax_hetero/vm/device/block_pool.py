"""Tensors in memory that is kept for reuse: in blocks of some kind, which take long to make."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
from tvm import runtime

from ...target.element_types import bytes_for
from .tensors import alias, empty, view_bytes

_SMALLEST = 4096
"""Bytes of the smallest block."""


class Block(Protocol):
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

    def __init__(self, make: Callable[[int], Block], limit: int) -> None:
        self._make, self._limit = make, limit
        self._lock = threading.Lock()
        self._kept: dict[int, list[Block]] = {}
        self._returned: deque[Block] = deque()
        self.nbytes = 0

    def tensor(self, shape: tuple[int, ...], dtype: str, device: runtime.Device) -> runtime.Tensor:
        """An uninitialised tensor on `device`, which must be able to use the blocks.

        Its memory is reused as soon as no tensor or array over it is left: who lets a GPU copy from or to it keeps it
        until the copy has ended. Beyond the limit it has memory of its own, as `tensors.empty` gives it.
        """
        tensor = self.kept_tensor(shape, dtype, device)
        return empty(shape, dtype, device) if tensor is None else tensor

    def kept_tensor(self, shape: tuple[int, ...], dtype: str, device: runtime.Device) -> runtime.Tensor | None:
        """As `tensor`, but None beyond the limit, and where there are no elements."""
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
            self._drop_kept()

    def _take(self, nbytes: int) -> Block | None:
        with self._lock:
            self._collect()
            if self._kept.get(nbytes):
                return self._kept[nbytes].pop()
            if self.nbytes + nbytes > self._limit:
                self._drop_kept()
            if self.nbytes + nbytes > self._limit:
                return None
            block = self._make(nbytes)
            self.nbytes += nbytes
            return block

    def _collect(self) -> None:
        while self._returned:  # filled by finalizers, which run anywhere and so take no lock
            block = self._returned.popleft()
            self._kept.setdefault(block.nbytes, []).append(block)

    def _drop_kept(self) -> None:
        self.nbytes -= sum(block.nbytes for blocks in self._kept.values() for block in blocks)
        self._kept.clear()


def _rounded(nbytes: int) -> int:
    """At most a quarter more than `nbytes`, so that similar tensors share blocks."""
    step = max(_SMALLEST, 1 << max(0, nbytes.bit_length() - 3))
    return -(-nbytes // step) * step
