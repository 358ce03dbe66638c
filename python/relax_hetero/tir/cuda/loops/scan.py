"""Cumulative sums and products along an axis, one launch.

Where lines along the axis are contiguous, a block goes along each: every thread has a few neighbours, the sums of the
threads are scanned in shared memory, and what all chunks so far came to is carried to the next. Otherwise a thread goes
along each line, and neighbouring threads read neighbouring elements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

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
"""Of a scan, what it starts from and what it does."""

_THREADS, _LANES = 256, 4
# Lines up to so long are one thread's.
_SHORT = 32


@dataclass(frozen=True)
class ScanProblem:
    """A scan along an axis.

    Attributes
    ----------
    shape : tuple of int or str
        Symbolic extents are names.
    dtype, result : str
        Element types of what is read and written.
    kind : str
        One of `COMBINE`.
    exclusive : bool
        Whether an element is left out of its own sum.
    """

    shape: tuple[Dim, ...]
    axis: int
    dtype: str
    result: str
    kind: str
    exclusive: bool


def scan_kernel(problem: ScanProblem) -> tirx.PrimFunc:
    """The kernel: parameters are the data and the result."""
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
            is_short = isinstance(count, int) and count <= _SHORT
            if isinstance(inner, int) and inner == 1 and not is_short:
                scan.by_blocks(outer)
            else:
                scan.by_threads(outer, inner)
    return function.result.with_attrs({BOUNDED: True, "tirx.is_scheduled": True})


class _Scan:
    def __init__(self, problem: ScanProblem, shape: list[Expr], data: Expr, result: Expr, count: Expr) -> None:
        self.problem, self.shape, self.count = problem, shape, count
        self._data, self._result = data, result
        self.type = accumulator_type(problem.result)
        start, self.combine = COMBINE[problem.kind]
        self.start = tirx.const(start, self.type)

    def open(self) -> tuple[Expr, Expr]:
        """The elements of both parameters, declared inside the launch."""
        return flat(self._data, self.shape), flat(self._result, self.shape)

    def _read(self, data: Expr, at: Expr) -> Expr:
        value = data[at]
        for dtype in (self.problem.result, self.type):  # the terms are numbers of the result's type
            value = value if str(value.ty.dtype) == dtype else tirx.Cast(dtype, value)
        return value

    def _write(self, result: Expr, at: Expr, value: Expr) -> None:
        dtype = self.problem.result
        T.buffer_store(result, value if dtype == self.type else tirx.Cast(dtype, value), [at])

    def by_threads(self, outer: Expr, inner: Expr) -> None:
        """A thread goes along a line."""
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
                    at = first + i * width
                    if self.problem.exclusive:
                        term = register(self.type, 1)
                        T.buffer_store(term, self._read(data, at), [zero])
                        self._write(result, at, total[zero])
                        T.buffer_store(total, self.combine(total[zero], term[zero]), [zero])
                    else:
                        T.buffer_store(total, self.combine(total[zero], self._read(data, at)), [zero])
                        self._write(result, at, total[zero])

    def by_blocks(self, lines: Expr) -> None:
        """A block goes along a line, chunk by chunk."""
        count, zero = int64(self.count), int64(0)
        with launch(lines, _THREADS) as (line, thread):
            data, result = self.open()
            shared = T.alloc_buffer((2 * _THREADS,), self.type, scope="shared")
            own, carry = register(self.type, _LANES), register(self.type, 1)
            before = register(self.type, 1)
            T.buffer_store(carry, self.start, [zero])
            is_line = line < int64(lines)
            with T.serial(ceil_div(count, _THREADS * _LANES)) as chunk:
                first = chunk * (_THREADS * _LANES) + thread * _LANES
                for lane in range(_LANES):
                    there = tirx.all(first + lane < count, is_line)
                    value = tirx.if_then_else(there, self._read(data, line * count + first + lane), self.start)
                    value = value if lane == 0 else self.combine(own[int64(lane - 1)], value)
                    T.buffer_store(own, value, [int64(lane)])
                last = self._scan_shared(shared, own, thread)
                sync()
                lower = tirx.Select(thread > zero, shared[T.max(thread - 1, zero) + last], self.start)
                T.buffer_store(before, self.combine(carry[zero], lower), [zero])
                for lane in range(_LANES):
                    if self.problem.exclusive:
                        value = before[zero] if lane == 0 else self.combine(before[zero], own[int64(lane - 1)])
                    else:
                        value = self.combine(before[zero], own[int64(lane)])
                    with T.If(tirx.all(first + lane < count, is_line)), T.Then():
                        self._write(result, line * count + first + lane, value)
                T.buffer_store(carry, self.combine(carry[zero], shared[int64(last + _THREADS - 1)]), [zero])
                sync()

    def _scan_shared(self, shared: Expr, own: Expr, thread: Expr) -> int:
        """The scan of what all threads have, in one of two halves of shared memory; where that half begins."""
        half = 0
        T.buffer_store(shared, own[int64(_LANES - 1)], [thread])
        distance = 1
        while distance < _THREADS:
            sync()
            other = _THREADS - half
            below = shared[T.max(thread - distance, int64(0)) + half]
            joined = self.combine(below, shared[thread + half])
            T.buffer_store(shared, tirx.Select(thread >= distance, joined, shared[thread + half]), [thread + other])
            half, distance = other, distance * 2
        return half
