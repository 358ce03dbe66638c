"""NCCL, by CuPy's binding, as Ray uses it: links of a cluster, and exchanges of the GPUs of a mesh.

Importing CuPy takes 0.2 s, so it is imported only on hosts with a GPU.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from ...errors import HostError, pip_install


@dataclass(frozen=True)
class Nccl:
    """Functions and numbers of NCCL."""

    # Creates the identifier of a communicator; this process must live until it is connected.
    create_id: Callable[[], Any]
    # Function of the number of ranks, an id and a rank; returns once all ranks have called it.
    communicator: Callable[[int, Any, int], Any]
    # Function of a list of GPUs, that returns a communicator of each for this process.
    communicators: Callable[[list[int]], list[Any]]
    # Function of a communicator that ends its kernels, and may wait until no CUDA graph has them any more. It leaves
    # Python's global lock to others, which CuPy's method keeps; the communicator must live on.
    abort: Callable[[Any], None]
    # Begin and end a group of operations, which run as one.
    start: Callable[[], None]
    end: Callable[[], None]
    byte: int  # NCCL's number of the data type uint8
    float32: int  # NCCL's number of float32
    sum: int  # NCCL's number of the reduction


@cache
def load_nccl() -> Nccl | str:
    """Load NCCL; returns the reason if it is missing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a missing library, which is reported below
            from cupy.cuda import nccl
    except Exception as error:  # CuPy raises various errors if parts of CUDA are missing
        return f"the package cupy-cuda13x cannot be imported ({error}): {pip_install('nccl')}"
    if not nccl.available:
        return f"NCCL's library is not found: {pip_install('nccl')}"
    return Nccl(
        create_id=nccl.get_unique_id,
        communicator=nccl.NcclCommunicator,
        communicators=nccl.NcclCommunicator.initAll,
        abort=_abort,
        start=nccl.groupStart,
        end=nccl.groupEnd,
        byte=int(nccl.NCCL_UINT8),
        float32=int(nccl.NCCL_FLOAT32),
        sum=int(nccl.NCCL_SUM),
    )


def _abort(communicator: Any) -> None:
    function = ctypes.CDLL("libnccl.so.2").ncclCommAbort  # of the library that CuPy has loaded
    function.argtypes = [ctypes.c_void_p]
    if status := function(communicator.comm):
        raise HostError(f"ncclCommAbort failed: {status}")


def require_nccl() -> Nccl:
    """Load NCCL; HostError if it is missing."""
    nccl = load_nccl()
    if isinstance(nccl, str):
        raise HostError(f"tensors cannot go from GPU to GPU by NCCL: {nccl}")
    return nccl
