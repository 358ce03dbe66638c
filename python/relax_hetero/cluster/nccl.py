"""NCCL, where it is installed: communicators of CuPy's binding, which is what Ray itself uses between GPUs.

Importing it takes a fifth of a second, so that nothing here is imported before a host has a GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..errors import HostError


@dataclass(frozen=True)
class Nccl:
    """Functions of NCCL that links use.

    Attributes
    ----------
    create_id : callable
        Makes what the processes of a communicator find each other by; this process has to live meanwhile.
    communicator : callable
        Function of the number of processes, an id and a rank; returns when all of them are there.
    start, end : callable
        Functions around a group of operations, which are one for the GPU.
    byte : int
        NCCL's number of the element type that has a byte.
    """

    create_id: Callable[[], Any]
    communicator: Callable[[int, Any, int], Any]
    start: Callable[[], None]
    end: Callable[[], None]
    byte: int


@cache
def load_nccl() -> Nccl | str:
    """NCCL, or why this process has none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a library that is not found, which is said below
            from cupy.cuda import nccl
    except Exception as error:  # CuPy looks for much of CUDA as it is imported
        return f"the package cupy-cuda13x cannot be imported ({error}): pip install 'relax-hetero[nccl]'"
    if not nccl.available:
        return "NCCL's library is not found: pip install 'relax-hetero[nccl]'"
    return Nccl(
        nccl.get_unique_id, nccl.NcclCommunicator, nccl.groupStart, nccl.groupEnd, int(nccl.NCCL_UINT8)
    )  # fmt: skip


def require_nccl() -> Nccl:
    """NCCL; HostError says what to install where there is none."""
    found = load_nccl()
    if isinstance(found, str):
        raise HostError(f"tensors cannot go from GPU to GPU by NCCL: {found}")
    return found
