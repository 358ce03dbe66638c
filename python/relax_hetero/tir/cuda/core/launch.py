"""How a kernel is launched: blocks, clusters of blocks, threads; and its shared memory, one allocation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...core.builder import Expr, int64
from ...core.raw_kernel import LAUNCH_BOUNDS

SWIZZLED_ALIGN = 1024
"""Alignment of tiles with swizzled rows: the swizzle is of address bits, and repeats every eight rows of 128 bytes."""


@dataclass(frozen=True)
class Place:
    """Where a thread is.

    Attributes
    ----------
    block : PrimExpr
        Number of the block; blocks of a cluster are neighbours.
    rank : PrimExpr
        Number of the block in its cluster, 0 without clusters.
    thread : PrimExpr
        Number of the thread in the block.
    """

    block: Expr
    rank: Expr
    thread: Expr


@contextmanager
def launch(
    blocks: Expr, threads: int, cluster: int = 1, moves_registers: bool = False, min_blocks_per_sm: int = 0
) -> Iterator[Place]:
    """The one nest of loops of a kernel; its context gives the place of the thread that runs the statements within.

    Parameters
    ----------
    blocks : PrimExpr or int
        A multiple of `cluster`.
    cluster : int
        Blocks that run at the same time and share their shared memory: 1 to 8.
    moves_registers : bool
        Whether warpgroups take registers of each other (`ptx.set_max_registers`).
    min_blocks_per_sm : int
        Blocks that share a multiprocessor's registers at least; 0: as many as do.
    """
    # The compiler drops setmaxnreg where it does not know how many blocks share a multiprocessor's registers.
    min_blocks_per_sm = min_blocks_per_sm or int(moves_registers)
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
    """An extent, 1 where it is 0: a launch has blocks even where there is nothing to store."""
    return max(extent, 1) if isinstance(extent, int) else tirx.max(extent, int64(1))


class SharedMemory:
    """The shared memory of a kernel: parts are taken first; within the launch it is opened, and parts have addresses.

    Take swizzled tiles first: the allocation begins at a multiple of their alignment, and nothing is lost.

    Attributes
    ----------
    size : int
        Bytes that are taken.
    """

    def __init__(self) -> None:
        self.size = 0
        self._bytes: Any = None

    def take(self, size: int, align: int = 16) -> int:
        """The offset of so many bytes."""
        begin = -(-self.size // align) * align
        self.size = begin + size
        return begin

    def open(self) -> None:
        """Allocate all that was taken; within `launch`."""
        size = max(self.size, 16)
        self._bytes = T.alloc_buffer((size,), "uint8", scope="shared.dyn")
        # TVM cuts an allocation down to the bytes whose addresses it sees, and a copy takes only that of its first one.
        for end in (0, size - 1):
            T.evaluate(T.address_of(self._bytes[end]))

    def at(self, offset: Expr) -> Expr:
        """Pointer to a byte."""
        return T.address_of(self._bytes[offset])


def local(count: int, dtype: str) -> Any:
    """Registers of a thread, a buffer; its indices are constants once loops over it are unrolled."""
    return T.alloc_buffer((count,), dtype, scope="local")


@contextmanager
def unrolled(count: int) -> Iterator[Expr]:
    """A loop that the CUDA compiler writes out; TVM, whose passes take long over much code, keeps the loop."""
    with T.attr(0, "pragma_unroll_explicit", False), T.unroll(count) as i:
        yield i


READS_EARLY = "relax_hetero.reads_early"
"""On a kernel that may begin before the launch before it has ended: the operands that it reads before it waits."""


def enable_pdl(kernel: tirx.PrimFunc, operands: Sequence[int] = ()) -> tirx.PrimFunc:
    """The kernel with a note that it may begin before the launch before it in the stream has ended.

    Every thread waits (`ptx.griddepcontrol_wait`) before it writes, or reads anything but `operands`: who launches
    it early makes sure that these are constants, or that no launch before it in the graph writes them. It may let the
    next launch begin (`ptx.launch_dependents`) at once: that one waits for this one, which ends no sooner than
    those before.
    """
    return kernel.with_attr(READS_EARLY, list(operands))
