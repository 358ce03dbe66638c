"""Memory that both ends of a connection within a node share: arrays are copied once, and read where they are.

Each direction has a few blocks. The sender copies the arrays of a message to a free block and sends the block's index;
the receiver's arrays are views of the block, which is free again when the last of them is dropped. The memory is a file
without a name, whose descriptor is sent when the processes connect, so nothing is left of it when they have ended.
Pages are allocated when they are first written.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ..vm.device.tensors import ALIGNMENT

BLOCKS = 8
"""Blocks of each direction: at least the calls in flight, which by default are two for each host."""
BLOCK_BYTES = 16 << 20
"""Maximum bytes of a message's arrays in a block; larger messages go through the socket."""
MIN_BYTES = 4 << 10
"""Bytes from which arrays go through a block; fewer are faster in the socket."""
NO_BLOCK = -1
"""Index of a message whose arrays go through the socket."""

_FLAGS_BYTES = mmap.PAGESIZE
"""Bytes before the blocks: the first ones are 1 for each block that is in use."""
_BYTES = _FLAGS_BYTES + 2 * BLOCKS * BLOCK_BYTES


def create_blocks() -> int:
    """Create the memory of a connection; returns its file descriptor."""
    descriptor = os.memfd_create("relax_hetero")
    os.ftruncate(descriptor, _BYTES)
    return descriptor


class SharedBlocks:
    """One end of a connection's memory.

    Parameters
    ----------
    descriptor : int
        Result of `create_blocks`, which the constructor closes.
    end : int
        0 in one of the two processes, and 1 in the other.
    """

    def __init__(self, descriptor: int, end: int) -> None:
        self._memory = memory = mmap.mmap(descriptor, _BYTES)
        os.close(descriptor)
        self._first = end * BLOCKS
        # The receiver's references to its blocks, whose callbacks free them.
        self._in_use: dict[int, weakref.ref[np.ndarray]] = {}
        self._free = [partial(_free, memory, index) for index in range(2 * BLOCKS)]

    def write(self, arrays: Sequence[np.ndarray]) -> int:
        """Copy arrays to a free block; returns its index, or `NO_BLOCK` if they are small or too large, or none is free.

        Parameters
        ----------
        arrays : sequence of numpy.ndarray
            Contiguous arrays.
        """
        nbytes = sum(_padded(array.nbytes) for array in arrays)
        if not MIN_BYTES <= nbytes <= BLOCK_BYTES:
            return NO_BLOCK
        memory = self._memory
        index = memory.find(b"\0", self._first, self._first + BLOCKS)
        if index < 0:
            return NO_BLOCK
        begin = _FLAGS_BYTES + index * BLOCK_BYTES
        for array in arrays:
            memory[begin : begin + array.nbytes] = array
            begin += _padded(array.nbytes)
        memory[index] = 1
        return index

    def read(self, index: int, sizes: Sequence[int]) -> list[np.ndarray]:
        """Make arrays over the bytes of a block; call it once for each message.

        Parameters
        ----------
        index : int
            Result of the sender's `write`.
        sizes : sequence of int
            Bytes of each array.
        """
        padded = [*map(_padded, sizes)]
        block = np.ndarray((sum(padded),), np.uint8, self._memory, _FLAGS_BYTES + index * BLOCK_BYTES)
        self._in_use[index] = weakref.ref(block, self._free[index])
        begins = [sum(padded[:position]) for position in range(len(sizes))]
        return [block[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _free(memory: mmap.mmap, index: int, _: Any) -> None:
    memory[index] = 0
