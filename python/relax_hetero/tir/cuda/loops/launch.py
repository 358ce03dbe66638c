"""Launches of one-dimensional grids, and the mapping of threads to points of a loop nest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....target.gpu_target import WARP, GpuTarget
from ...core.builder import Expr, int64
from ...core.work_split import unravel
from ...loops.flat import Loop
from ..core.launch import at_least_one

_BLOCK_THREADS = 256  # default threads of a block, with which four to eight blocks are resident on a multiprocessor


@contextmanager
def launch(blocks: Expr, threads: int) -> Iterator[tuple[Expr, Expr]]:
    """Context of a kernel's body, which yields the numbers of the block and of the thread.

    Parameters
    ----------
    blocks : int or PrimExpr
        At least one is launched: an empty grid is an error.
    """
    with T.thread_binding(int64(at_least_one(blocks)), thread="blockIdx.x") as block:
        with T.thread_binding(int64(threads), thread="threadIdx.x") as thread:
            yield block, thread


def threads_for(units: Expr, gpu: GpuTarget) -> int:
    """Threads of a block for `units` threads in all: fewer where there would be idle multiprocessors."""
    if not isinstance(units, int):
        return _BLOCK_THREADS
    threads = _BLOCK_THREADS
    while threads > 2 * WARP and units < threads * gpu.multiprocessors:
        threads //= 2
    return threads


def count_of(loops: Sequence[Loop]) -> Expr:
    """Number of points of a loop nest."""
    return prod(loop.count for loop in loops)


def position_of(number: Expr, loops: Sequence[Loop], counts: Sequence[Expr] | None = None) -> dict[tirx.Var, Expr]:
    """Values of the loop variables at a point with a row-major number.

    `counts`: extents of the loops, by default their numbers of iterations.
    """
    # TVM's analyzer rejects a division by zero even in code that never runs.
    extents = [int64(at_least_one(count)) for count in (counts or [loop.count for loop in loops])]
    return {loop.var: value for loop, value in zip(loops, unravel(number, extents), strict=True)}


@contextmanager
def inside(number: Expr, units: Expr, threads: int) -> Iterator[None]:
    """Context of the threads whose number is less than `units`."""
    if isinstance(units, int) and units > 0 and units % threads == 0:
        yield
        return
    with T.If(number < int64(units)), T.Then():
        yield


def sync() -> None:
    """Synchronize the block (``__syncthreads``)."""
    T.evaluate(tirx.call_intrin("int32", "tirx.tvm_storage_sync", "shared"))


def scheduled_as(func: tirx.PrimFunc, kernel: tirx.PrimFunc) -> tirx.PrimFunc:
    """A written kernel with the result type and the attributes of the PrimFunc that it stands for."""
    kernel = tirx.PrimFunc(kernel.params, kernel.body, func.ret_type, func.attrs, func.span)
    return kernel.with_attr("tirx.is_scheduled", True)
