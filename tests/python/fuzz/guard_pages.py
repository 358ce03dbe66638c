"""Arrays that end where a page begins that nobody may read or write.

A kernel that reads beyond such an array ends the process, where it would read foreign memory in silence otherwise.
Kernels may read to the end of the 64 bytes that hold the last element, as an aligned vector does: the array begins at a
multiple of 64 bytes, as the memory that the library allocates itself.
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)
ALIGNMENT = 64


def before_guard(value: np.ndarray) -> np.ndarray:
    """A copy of an array, followed by a guard page."""
    capacity = -(-max(value.nbytes, 1) // ALIGNMENT) * ALIGNMENT
    pages = -(-capacity // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if _libc.mprotect(ctypes.c_void_p(address + pages), ctypes.c_size_t(mmap.PAGESIZE), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    array = np.frombuffer(memory, "uint8", value.nbytes, pages - capacity).view(value.dtype).reshape(value.shape)
    array[...] = value
    return array
