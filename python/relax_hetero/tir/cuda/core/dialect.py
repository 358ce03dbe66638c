"""Dialect of the kernel that is being written: all of CUDA, or only what the languages of other GPUs have, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ....target.gpu_target import GpuTarget

_has_ptx: ContextVar[bool] = ContextVar("has_ptx", default=True)


@contextmanager
def dialect_of(gpu: GpuTarget) -> Iterator[None]:
    """Context of the writing of a kernel for a GPU."""
    token = _has_ptx.set(gpu.has_ptx)
    try:
        yield
    finally:
        _has_ptx.reset(token)


def has_ptx() -> bool:
    """Return whether kernels may use PTX, dynamic shared memory, and arrays as words of 32 bits.

    In other languages all threads of a block take part in shuffles, in blocks of whole warps. Accesses of an array by
    two types are undefined in C, which other languages of GPUs follow.
    """
    return _has_ptx.get()


def shared_scope() -> str:
    """Scope of shared memory: dynamic, which is not limited to 48 KB, where kernels may have it."""
    return "shared.dyn" if has_ptx() else "shared"
