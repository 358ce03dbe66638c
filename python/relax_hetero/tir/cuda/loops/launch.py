"""Launches: blocks of threads, each thread with its place in a nest of loops."""

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

_THREADS = 256
"""Number of threads of a block where nothing asks for another: four to eight blocks are on a multiprocessor then."""


@contextmanager
def launch(blocks: Expr, threads: int) -> Iterator[tuple[Expr, Expr]]:
    """The context of what a thread does, which gives the numbers of its block and of itself.

    Parameters
    ----------
    blocks : int or PrimExpr
        At least one is launched: a launch of none is an error.
    """
    with T.thread_binding(int64(at_least_one(blocks)), thread="blockIdx.x") as block:
        with T.thread_binding(int64(threads), thread="threadIdx.x") as thread:
            yield block, thread


def threads_for(units: Expr, gpu: GpuTarget) -> int:
    """Threads of a block where `units` threads are wanted in all: fewer where blocks would not reach every core."""
    if not isinstance(units, int):
        return _THREADS
    threads = _THREADS
    while threads > 2 * WARP and units < threads * gpu.multiprocessors:
        threads //= 2
    return threads


def count_of(loops: Sequence[Loop]) -> Expr:
    """How many points a nest of loops has."""
    return prod(loop.count for loop in loops)


def place_in(number: Expr, loops: Sequence[Loop], counts: Sequence[Expr] | None = None) -> dict[tirx.Var, Expr]:
    """Values of the variables of a nest of loops at a point, by its number in row-major order.

    Parameters
    ----------
    counts : sequence, optional
        How many units each loop has, where these are not its elements.
    """
    extents = [_divisor(count) for count in (counts or [loop.count for loop in loops])]
    places = unravel(number, extents)
    return {loop.var: place for loop, place in zip(loops, places, strict=True)}


def _divisor(extent: Expr) -> Expr:
    # TVM's analyzer must not find a division by zero, not even where nothing runs.
    return int64(max(extent, 1)) if isinstance(extent, int) else T.max(extent, int64(1))


@contextmanager
def inside(number: Expr, units: Expr, threads: int) -> Iterator[None]:
    """The context of threads that have a unit of their own, where there are more threads than units."""
    if isinstance(units, int) and units > 0 and units % threads == 0:
        yield
        return
    with T.If(number < int64(units)), T.Then():
        yield


def sync() -> None:
    """All threads of the block have come here, and see what the others wrote to shared memory."""
    T.evaluate(tirx.call_intrin("int32", "tirx.tvm_storage_sync", "shared"))
