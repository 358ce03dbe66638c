"""Launches of a kernel (grid, clusters, threads) and the allocation of its shared memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...core.builder import Expr, int64
from ...core.raw_kernel import LAUNCH_BOUNDS
from .dialect import has_ptx

_WORD_BYTES = 4
SWIZZLED_ALIGN = 1024
"""Alignment of swizzled tiles in bytes: the swizzle XORs address bits, with a period of eight rows of 128 bytes."""


@dataclass(frozen=True)
class Place:
    """Indices of a thread."""

    block: Expr  # index of the block in the grid; blocks of a cluster are neighbours
    rank: Expr  # rank of the block in its cluster, 0 without clusters
    thread: Expr  # index of the thread in the block


@contextmanager
def launch(
    blocks: Expr, threads: int, cluster: int = 1, reallocates_registers: bool = False, min_blocks_per_sm: int = 0
) -> Iterator[Place]:
    """Context of a kernel's body, which yields the indices of the thread.

    Parameters
    ----------
    blocks : PrimExpr or int
        A multiple of `cluster`.
    cluster : int
        Blocks of a cluster: 1 to 8.
    reallocates_registers : bool
        Whether warpgroups reallocate registers (`ptx.set_max_registers`).
    min_blocks_per_sm : int
        Minimum resident blocks of a multiprocessor (launch bound); 0: unbounded.
    """
    # The compiler ignores setmaxnreg without a launch bound.
    min_blocks_per_sm = min_blocks_per_sm or int(reallocates_registers)
    zero = tirx.const(0, "int32")
    with T.thread_binding(blocks, thread="blockIdx.x") as block:
        if cluster > 1:
            with T.thread_binding(cluster, thread="clusterCtaIdx.x") as rank:
                with T.thread_binding(threads, thread="threadIdx.x") as thread, _bounds(min_blocks_per_sm):
                    yield Place(block, rank, thread)
        else:
            with T.thread_binding(threads, thread="threadIdx.x") as thread, _bounds(min_blocks_per_sm):
                yield Place(block, zero, thread)


@contextmanager
def _bounds(min_blocks_per_sm: int) -> Iterator[None]:
    if not min_blocks_per_sm:
        yield
        return
    with T.attr(0, LAUNCH_BOUNDS, min_blocks_per_sm):
        yield


def at_least_one(extent: Expr) -> Expr:
    """Maximum of an extent and 1: a grid must not be empty."""
    return max(extent, 1) if isinstance(extent, int) else tirx.max(extent, int64(1))


def to_int32(value: Expr) -> Expr:
    """Cast an extent to int32, unless it is static."""
    return value if isinstance(value, int) else T.Cast("int32", value)


class SharedMemory:
    """The shared memory of a kernel: regions are reserved before the launch, and addressed in it after `open`.

    Reserve swizzled tiles first: the allocation has their alignment, and no bytes are lost.

    Attributes
    ----------
    size : int
        Reserved bytes.
    """

    def __init__(self) -> None:
        self.size = 0
        self._bytes: Any = None

    def reserve(self, size: int, align: int = 16) -> int:
        """Reserve a region, and return its offset."""
        begin = -(-self.size // align) * align
        self.size = begin + size
        return begin

    def open(self) -> None:
        """Allocate all regions, within `launch`."""
        size = max(self.size, 16)
        if not has_ptx():
            self._bytes = T.alloc_buffer((size // _WORD_BYTES,), "float32", scope="shared")
            return
        self._bytes = T.alloc_buffer((size,), "uint8", scope="shared.dyn")
        # TVM shrinks an allocation to the bytes whose addresses are taken, and copies name only their first byte.
        for end in (0, size - 1):
            T.evaluate(T.address_of(self._bytes[end]))

    def at(self, offset: Expr) -> Expr:
        """Pointer to the byte at an offset, which is of a float32 in other languages than CUDA."""
        if not has_ptx():
            words = offset // _WORD_BYTES if isinstance(offset, int) else tirx.floordiv(offset, _WORD_BYTES)
            return T.address_of(self._bytes[words])
        return T.address_of(self._bytes[offset])


def local(count: int, dtype: str) -> Any:
    """Allocate registers of a thread; loops over them must be unrolled, so that indices are constants."""
    return T.alloc_buffer((count,), dtype, scope="local")


@contextmanager
def unrolled(count: int) -> Iterator[Expr]:
    """Loop that the CUDA compiler unrolls; TVM keeps the loop, as its passes are slow on long code."""
    with T.attr(0, "pragma_unroll_explicit", False), T.unroll(count) as i:
        yield i


READS_EARLY = "relax_hetero.reads_early"
"""Attribute of a kernel with programmatic dependent launch: operands that it reads before `griddepcontrol_wait`."""


LATE_WAIT = "relax_hetero.late_wait"
"""Attribute of a kernel that may wait for the previous launch in its epilogue, or after its first loads: operands that
it reads before, which the previous launch must not write. Attribute of a statement: place of that wait."""


def wait_late() -> None:
    """Write a place of the wait of a kernel with `LATE_WAIT`; each block executes one at least."""
    with T.attr(0, LATE_WAIT, 1):
        T.evaluate(0)


WAIT = "relax_hetero.wait"
"""Attribute of a statement: place where the kernel waits for the previous launch, and lets the next one begin, on GPUs
with programmatic dependent launch. Kernels that also run on other GPUs have it instead of `ptx.griddepcontrol_wait`."""


def enable_pdl(kernel: tirx.PrimFunc, operands: Sequence[int] = ()) -> tirx.PrimFunc:
    """Mark a kernel for programmatic dependent launch: it may begin before the previous launch has ended.

    Every thread executes `ptx.griddepcontrol_wait`, or a statement with `WAIT`, before it writes, or reads anything but
    `operands`: these must be constants, or not be written by earlier launches of the graph. The kernel may call
    `ptx.launch_dependents` at once: the next launch waits for the end of this one, and so for all earlier ones.
    """
    return kernel.with_attr(READS_EARLY, list(operands))
