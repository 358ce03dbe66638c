"""Cumulative sums and products along an axis.

Where lines along the axis are contiguous, a block scans each line chunk by chunk: every thread has a few neighbouring
elements, the totals of the threads are scanned in shared memory, and the total so far is carried to the next chunk.
Otherwise a thread scans a line, and neighbouring threads read neighbouring elements.

A few long lines are cut into tiles (`tiles_of`): one launch reduces each tile to its total, a second one scans the
totals, exclusively, and a third one scans the tiles, each from the total of all tiles before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.problem import Dim
from ...core.bounds import BOUNDED
from ...core.builder import Expr, Function, ceil_div, flat, int64
from .arithmetic import accumulator_type
from .lanes import register
from .launch import inside, launch, sync

COMBINE: dict[str, tuple[float, Callable[[Expr, Expr], Expr]]] = {
    "sum": (0, lambda a, b: a + b),
    "prod": (1, lambda a, b: a * b),
}
"""Initial value and function of each kind of scan."""

_THREADS, _LANES = 256, 4
_MAX_THREAD_LINE = 32  # maximum elements of a line that one thread scans


@dataclass(frozen=True)
class ScanProblem:
    """A scan along an axis."""

    shape: tuple[Dim, ...]  # symbolic extents are names
    axis: int
    # Element types of the data and of the result.
    dtype: str
    result: str
    kind: str  # one of `COMBINE`
    exclusive: bool  # whether the scan is exclusive: an element's result excludes the element


TILE = 8192  # elements of a tile, which one block scans
_OCCUPYING_LINES = 128  # number of lines that occupy a GPU without tiles


def tiles_of(problem: ScanProblem) -> int:
    """Number of tiles of a line, 1 for lines that are not cut."""
    outer, count, inner = problem.shape[: problem.axis], problem.shape[problem.axis], problem.shape[problem.axis + 1 :]
    if not isinstance(count, int) or any(not isinstance(e, int) for e in (*outer, *inner)):
        return 1
    lines = prod(int(e) for e in outer)
    is_long = all(e == 1 for e in inner) and count >= 4 * TILE
    return -(-count // TILE) if is_long and 0 < lines < _OCCUPYING_LINES else 1


def totals_problem(problem: ScanProblem) -> ScanProblem:
    """Exclusive scan of the tiles' totals of each line."""
    lines = prod(int(e) for e in problem.shape[: problem.axis])
    dtype = accumulator_type(problem.result)
    return ScanProblem((lines, tiles_of(problem)), 1, dtype, dtype, problem.kind, True)


def totals_kernel(problem: ScanProblem) -> tirx.PrimFunc:
    """Kernel that reduces each tile to its total; parameters are the data and the totals ``(lines, tiles)``."""
    return _tiles_kernel(problem, False)


def tiles_kernel(problem: ScanProblem) -> tirx.PrimFunc:
    """Kernel that scans tiles; parameters are the data, the scanned totals ``(lines, tiles)``, and the result."""
    return _tiles_kernel(problem, True)


def _tiles_kernel(problem: ScanProblem, writes: bool) -> tirx.PrimFunc:
    function, totals = Function(f"cum{problem.kind}"), totals_problem(problem)
    with function:
        shape = [int64(int(dim)) for dim in problem.shape]
        data = function.argument("data", shape, problem.dtype)
        other_shape = [int64(int(dim)) for dim in totals.shape]
        other = function.argument("totals", other_shape, totals.dtype)
        result = function.argument("result", shape, problem.result) if writes else None
        with function.body():
            scan = _Scan(problem, shape, data, result, int(problem.shape[problem.axis]))
            scan.scan_by_tiles(int(totals.shape[0]), int(totals.shape[1]), lambda: flat(other, other_shape))
    return function.result.with_attrs({BOUNDED: True, "tirx.is_scheduled": True})


def scan_kernel(problem: ScanProblem) -> tirx.PrimFunc:
    """Kernel that scans whole lines; parameters are the data and the result."""
    function = Function(f"cum{problem.kind}")
    with function:
        shape = [function.extent(dim) for dim in problem.shape]
        data = function.argument("data", shape, problem.dtype)
        result = function.argument("result", shape, problem.result)
        extents: list[Expr] = [function.symbol(dim) if isinstance(dim, str) else dim for dim in problem.shape]
        outer, count = prod(extents[: problem.axis]), extents[problem.axis]
        inner = prod(extents[problem.axis + 1 :])
        with function.body():
            scan = _Scan(problem, shape, data, result, count)
            is_short = isinstance(count, int) and count <= _MAX_THREAD_LINE
            if isinstance(inner, int) and inner == 1 and not is_short:
                scan.scan_by_blocks(outer)
            else:
                scan.scan_by_threads(outer, inner)
    return function.result.with_attrs({BOUNDED: True, "tirx.is_scheduled": True})


class _Scan:
    def __init__(self, problem: ScanProblem, shape: list[Expr], data: Expr, result: Expr, count: Expr) -> None:
        self.problem, self.shape, self.count = problem, shape, count
        self._data, self._result = data, result
        self.type = accumulator_type(problem.result)
        start, self.combine = COMBINE[problem.kind]
        self.start = tirx.const(start, self.type)

    def open(self) -> tuple[Expr, Expr]:
        """Declare the elements of data and result inside the launch."""
        return flat(self._data, self.shape), None if self._result is None else flat(self._result, self.shape)

    def _read(self, data: Expr, index: Expr) -> Expr:
        value = data[index]
        for dtype in (self.problem.result, self.type):  # terms are rounded to the result's type
            value = value if str(value.ty.dtype) == dtype else tirx.Cast(dtype, value)
        return value

    def _write(self, result: Expr, index: Expr, value: Expr) -> None:
        dtype = self.problem.result
        T.buffer_store(result, value if dtype == self.type else tirx.Cast(dtype, value), [index])

    def scan_by_threads(self, outer: Expr, inner: Expr) -> None:
        """Scan a line per thread."""
        lines = outer * inner
        with launch(ceil_div(lines, _THREADS), _THREADS) as (block, thread):
            data, result = self.open()
            line = block * _THREADS + thread
            with inside(line, lines, _THREADS):
                width = T.max(int64(inner), int64(1))
                first = tirx.floordiv(line, width) * int64(self.count) * width + tirx.floormod(line, width)
                total = register(self.type, 1)
                zero = int64(0)
                T.buffer_store(total, self.start, [zero])
                with T.serial(int64(self.count)) as i:
                    index = first + i * width
                    if self.problem.exclusive:
                        term = register(self.type, 1)
                        T.buffer_store(term, self._read(data, index), [zero])
                        self._write(result, index, total[zero])
                        T.buffer_store(total, self.combine(total[zero], term[zero]), [zero])
                    else:
                        T.buffer_store(total, self.combine(total[zero], self._read(data, index)), [zero])
                        self._write(result, index, total[zero])

    def scan_by_blocks(self, lines: Expr) -> None:
        """Scan a line per block."""
        with launch(lines, _THREADS) as (line, thread):
            self._scan_range(line, thread, int64(0), int64(self.count), self.start, line < int64(lines))

    def scan_by_tiles(self, lines: int, tiles: int, open_totals: Callable[[], Any]) -> None:
        """Scan a tile per block, starting from its scanned total; without a result, store the tile's total.

        Parameters
        ----------
        opened : callable
            Function that declares the elements of the totals inside the launch.
        """
        with launch(lines * tiles, _THREADS) as (block, thread):
            totals, zero = open_totals(), int64(0)
            begin = block % tiles * TILE
            end = T.min(begin + TILE, int64(self.count))
            start = self.start if self._result is None else totals[block]
            carry = self._scan_range(block // tiles, thread, begin, end, start, None)
            if self._result is None:
                with T.If(tirx.EQ(thread, zero)), T.Then():
                    T.buffer_store(totals, carry[zero], [block])

    def _scan_range(self, line: Expr, thread: Expr, begin: Expr, end: Expr, start: Expr, is_line: Expr | None) -> Any:
        """Scan a range of a line with a block; a register with its total."""
        count, zero = int64(self.count), int64(0)
        data, result = self.open()
        shared = T.alloc_buffer((2 * _THREADS,), self.type, scope="shared")
        lanes, carry = register(self.type, _LANES), register(self.type, 1)
        offset = register(self.type, 1)
        T.buffer_store(carry, start, [zero])

        def exists(position: Expr) -> Expr:
            return position < end if is_line is None else tirx.all(position < end, is_line)

        chunks = ceil_div(count, _THREADS * _LANES) if is_line is not None else TILE // (_THREADS * _LANES)
        with T.serial(int64(chunks)) as chunk:
            first = begin + chunk * (_THREADS * _LANES) + thread * _LANES
            for lane in range(_LANES):
                read = self._read(data, line * count + first + lane)
                value = tirx.if_then_else(exists(first + lane), read, self.start)
                value = value if lane == 0 else self.combine(lanes[int64(lane - 1)], value)
                T.buffer_store(lanes, value, [int64(lane)])
            last = self._scan_shared(shared, lanes, thread)
            sync()
            if result is not None:
                lower = tirx.Select(thread > zero, shared[T.max(thread - 1, zero) + last], self.start)
                T.buffer_store(offset, self.combine(carry[zero], lower), [zero])
                for lane in range(_LANES):
                    if self.problem.exclusive:
                        value = offset[zero] if lane == 0 else self.combine(offset[zero], lanes[int64(lane - 1)])
                    else:
                        value = self.combine(offset[zero], lanes[int64(lane)])
                    with T.If(exists(first + lane)), T.Then():
                        self._write(result, line * count + first + lane, value)
            T.buffer_store(carry, self.combine(carry[zero], shared[int64(last + _THREADS - 1)]), [zero])
            sync()
        return carry

    def _scan_shared(self, shared: Expr, lanes: Expr, thread: Expr) -> int:
        """Scan the threads' totals in shared memory, double-buffered; the offset of the half with the result."""
        half = 0
        T.buffer_store(shared, lanes[int64(_LANES - 1)], [thread])
        distance = 1
        while distance < _THREADS:
            sync()
            other = _THREADS - half
            lower = shared[T.max(thread - distance, int64(0)) + half]
            combined = self.combine(lower, shared[thread + half])
            T.buffer_store(shared, tirx.Select(thread >= distance, combined, shared[thread + half]), [thread + other])
            half, distance = other, distance * 2
        return half
