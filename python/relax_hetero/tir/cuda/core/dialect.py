"""Dialect of the kernel that is being written: all of CUDA, or only what the languages of other GPUs have, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from tvm.script.ir_builder import tirx as T

from ....target.gpu_target import GpuTarget
from ...core.builder import Expr

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


BYTES_OF_WORD = 4


def has_byte_dots() -> bool:
    """Return whether kernels may call `byte_dot`: back ends of other languages than CUDA define it."""
    return not has_ptx()


def byte_dot(left_dtype: str, right_dtype: str, left: Expr, right: Expr, addend: Expr) -> Expr:
    """Dot product of four bytes in each of two words (int32), plus an int32."""
    return T.call_extern("int32", f"byte_dot_{left_dtype[0]}{right_dtype[0]}", left, right, addend)
