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

BLOCKS = 16  # blocks of each direction: the messages that may wait for the receiver, such as those of calls in flight
BLOCK_BYTES = 32 << 20  # maximum bytes of a message's arrays in a block; larger messages go through the socket
MIN_BYTES = 4 << 10  # bytes from which arrays go through a block; fewer are faster in the socket
NO_BLOCK = -1  # index of a message whose arrays go through the socket
_FLAGS_BYTES = mmap.PAGESIZE  # bytes before the blocks: the first ones are 1 for each block that is in use
_BYTES = _FLAGS_BYTES + 2 * BLOCKS * BLOCK_BYTES


def create_blocks() -> int:
    """Create the memory of a connection; returns its file descriptor. OSError where the system does not allow it."""
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no files without a name (memfd_create)")
    descriptor = os.memfd_create("relax_hetero")
    os.ftruncate(descriptor, _BYTES)
    return descriptor


class SharedBlocks:
    """One end of a connection's memory.

    `descriptor`: result of `create_blocks`, which the constructor closes; `end`: 0 in one of the two processes, and 1
    in the other; `copies`: whether `read` returns copies, because received arrays may live for long. Raises OSError if
    the process may not map so much memory.
    """

    def __init__(self, descriptor: int, end: int, copies: bool = False) -> None:
        try:
            self._memory = memory = mmap.mmap(descriptor, _BYTES)
        finally:
            os.close(descriptor)
        self._first, self._copies = end * BLOCKS, copies
        # References to blocks that this end reads, whose callbacks free them.
        self._in_use: dict[int, weakref.ref[np.ndarray]] = {}
        self._free = [partial(_free, memory, index, os.getpid()) for index in range(2 * BLOCKS)]

    def write(self, arrays: Sequence[memoryview]) -> int:
        """Copy the bytes of arrays to a free block.

        Returns the index of the block; `NO_BLOCK` if there are too few bytes or too many, or no block is free.
        """
        nbytes = sum([_padded(array.nbytes) for array in arrays])
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
        """Make arrays of bytes of a block that the other end has written, once for each message.

        `index`: result of `write`; `sizes`: bytes of each array.
        """
        block = np.ndarray(BLOCK_BYTES, np.uint8, self._memory, _FLAGS_BYTES + index * BLOCK_BYTES)
        arrays, begin = [], 0
        for size in sizes:
            arrays.append(block[begin : begin + size])
            begin += _padded(size)
        if self._copies:
            arrays = [*map(_copy, arrays)]
            self._free[index]()
        else:
            self._in_use[index] = weakref.ref(block, self._free[index])
        return arrays


def aligned_bytes(nbytes: int) -> np.ndarray:
    """Allocate uninitialised bytes that kernels can read in place."""
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    begin = -memory.__array_interface__["data"][0] % ALIGNMENT
    return memory[begin : begin + nbytes]


def _copy(array: np.ndarray) -> np.ndarray:
    copy = aligned_bytes(array.nbytes)
    copy[:] = array
    return copy


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _free(memory: mmap.mmap, index: int, owner: int, _: Any = None) -> None:
    """Let the sender write to a block; system calls, which both make in between, order this after the last read.

    A process that `owner`, the reader, has forked drops copies of its arrays, whose memory the reader still uses.
    """
    if os.getpid() == owner:
        memory[index] = 0
