"""Checks of values: indices and divisors as they are to be used, and an error for those that are out of range.

The kernel reads a tensor, and writes the values that the op behind it may use without a doubt. On a CPU the first value
out of range ends the call: the kernel asks the machine to refuse it (`relax_hetero.refuse`), with the number of the
check, the value, and the range. The op reads what the kernel writes, so that it cannot run before.

On a GPU a kernel cannot end a call. There the first thread that finds such a value claims the error record of the GPU,
memory of the host which the machine looks at whenever it has waited for the GPU (`vm.device.error_records`), and writes
the same into it.

Numbers, such as extents, are arguments: checks of equal shapes share a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..artifact.checks import CLAIMED, END, FIRST, FOUND, KEY, READY, WORDS
from ..encoding.problem import Dim
from .core.bounds import BOUNDED, from_front
from .core.builder import Expr, Function, ceil_div, loop, when
from .core.view import View
from .core.work_split import LEAST as LEAST_WORK
from .core.work_split import is_worth_tasks

REFUSE = "relax_hetero.refuse"
"""The packed function that raises: takes the number of a check, the value found, the least and one past the last."""

CHECKED = "relax_hetero.checked"
"""On a PrimFunc: an op may use what it writes as it is."""

RANGE = "relax_hetero.range"
"""On a PrimFunc: an operand's number, another operand's, an axis of the latter, and an offset. The first operand's
values, int64, must be from 0 to the size of the axis plus the offset; to the offset alone without another operand."""

_CHUNK = LEAST_WORK["elements"]

_THREADS = 256
"""Number of threads of a block on a GPU."""


@dataclass(frozen=True)
class CheckProblem:
    """Which values of a tensor have to be in which range.

    Attributes
    ----------
    shape : tuple of int or str
        Symbolic extents are names.
    dtype : str
        Element type of the data.
    columns : tuple of bool
        Along the last axis, which places are checked; a place may have a range of its own. One entry for all values
        where the last axis means nothing.
    wraps : bool
        Whether negative values count from the end of their range, which begins at the negated end then.
    is_divisor : bool
        Whether the value must not be 0, and may be any other; there are no ranges then.
    """

    shape: tuple[Dim, ...]
    dtype: str
    columns: tuple[bool, ...] = (True,)
    wraps: bool = True
    is_divisor: bool = False

    @property
    def result(self) -> str:
        """The element type of what is written."""
        is_index = not self.is_divisor and self.dtype.startswith(("int", "uint"))
        return "int64" if is_index else self.dtype

    @property
    def ends(self) -> int:
        """How many ranges the kernel is given, the end of each."""
        return 0 if self.is_divisor else sum(self.columns)


def check_kernel(problem: CheckProblem) -> tirx.PrimFunc:
    """The kernel: parameters are the values, the number of the check, the end of each range, and the result."""
    function = Function("check_values")
    width = len(problem.columns)
    with function:
        extents: list[Expr] = [function.symbol(d) if isinstance(d, str) else d for d in problem.shape]
        values = View(function, "values", list(map(function.extent, problem.shape)), problem.dtype)
        number = T.arg("check", tirx.Var("check", "int64"))
        ends = [T.arg(f"end_{i}", tirx.Var(f"end_{i}", "int64")) for i in range(problem.ends)]
        result = View(function, "result", list(map(function.extent, problem.shape)), problem.result)
        with function.body():
            values.open()
            result.open()
            total: Expr = prod(extents)
            if isinstance(total, int) and total == 0:
                T.evaluate(0)
            else:
                _write(_Check(problem, values.data, result.data, number, ends), total if width == 1 else total // width)
    return function.result.with_attrs({BOUNDED: True, CHECKED: True})


def reporting_kernel(problem: CheckProblem) -> tirx.PrimFunc:
    """The kernel for GPUs: parameters are those of `check_kernel`, and behind the values the error record.

    A thread for each row. The first that finds a value out of range claims the record, and fills it; the others' are
    not told. It is said to be ready last, so that nobody reads a part of it.
    """
    function = Function("check_values")
    shape = list(map(function.extent, problem.shape))
    width = len(problem.columns)
    with function:
        values = function.argument("values", shape, problem.dtype)
        record = function.argument("record", [_word(WORDS)], "int32")
        number = T.arg("check", tirx.Var("check", "int64"))
        ends = [T.arg(f"end_{i}", tirx.Var(f"end_{i}", "int64")) for i in range(problem.ends)]
        result = function.argument("result", shape, problem.result)
        check = _Check(problem, values, result, number, ends)
        total = prod(shape, start=_word(1))
        rows = total if width == 1 else tirx.floordiv(total, _word(width))
        # One block more than there may have to be: a launch of none is an error.
        blocks = tirx.floordiv(rows, _word(_THREADS)) + _word(1)
        with function.body(), T.thread_binding(blocks, thread="blockIdx.x") as block:
            with T.thread_binding(_word(_THREADS), thread="threadIdx.x") as thread:
                row = block * _word(_THREADS) + thread
                with T.If(row < rows), T.Then():
                    for column in range(width):
                        check.report(_coordinates(row * _word(width) + _word(column), shape), column, record)
    return function.result.with_attrs({BOUNDED: True, CHECKED: True, "tirx.is_scheduled": True})


def _word(value: int) -> tirx.IntImm:
    return tirx.IntImm("int64", value)


def _coordinates(place: Expr, shape: Sequence[Expr]) -> list[Expr]:
    """Where an element stands, by its number in row-major order."""
    found: list[Expr] = []
    for extent in reversed(shape[1:]):
        found.append(tirx.floormod(place, extent))
        place = tirx.floordiv(place, extent)
    return [place, *reversed(found)] if shape else []


def _halves(number: Expr) -> tuple[Expr, Expr]:
    """The low and the high word of a number as int64.

    TVM may narrow an int64 that is made of a shorter number, which has no bits to shift down then.
    """
    if not _is_integer(str(number.ty.dtype)):
        number = tirx.Cast("int64", number)
    dtype = str(number.ty.dtype)
    low = tirx.Cast("int32", number)
    if tvm.DataType(dtype).bits == 64:
        return low, tirx.Cast("int32", tirx.shift_right(number, tirx.const(32, dtype)))
    is_negative = number < tirx.const(0, dtype) if dtype.startswith("int") else tirx.const(False, "bool")
    return low, tirx.Select(is_negative, tirx.const(-1, "int32"), _ZERO)


class _Check:
    """The parameters of a kernel while it is being written."""

    def __init__(self, problem: CheckProblem, values: Any, result: Any, number: Expr, ends: Sequence[Expr]) -> None:
        self.problem, self.width = problem, len(problem.columns)
        self._values, self._result, self._number = values, result, number
        given = iter(ends)
        self._ends = [next(given) if is_checked and not problem.is_divisor else None for is_checked in problem.columns]

    def copy(self, row: Expr, bad: Expr) -> None:
        """The values of a row, as they are to be used; sets `bad` where one is out of range."""
        zero = tirx.const(0, "int64")
        for column in range(self.width):
            place = row * self.width + column
            value = self._values[place]
            if self.problem.columns[column]:
                T.buffer_store(bad, tirx.Or(bad[zero], tirx.Not(self._is_good(value, column))), [zero])
            T.buffer_store(self._result, self._used(value, column), [place])

    def refuse(self, row: Expr, is_told: Expr) -> None:
        """Raise for the first value of a row that is out of range."""
        zero = tirx.const(0, "int64")
        for column in filter(self.problem.columns.__getitem__, range(self.width)):
            value = self._values[row * self.width + column]
            with when(tirx.all(tirx.Not(self._is_good(value, column)), tirx.Not(is_told[zero]))):
                T.buffer_store(is_told, tirx.const(True, "bool"), [zero])
                least, end = self._range(column)
                found = tirx.Cast("int64", value)
                T.evaluate(T.call_packed(REFUSE, self._number, found, least, end))

    def report(self, place: Sequence[Expr], column: int, record: Any) -> None:
        """Write a value, as it is to be used; where it is out of range, to the record too, unless that is claimed."""
        value = self._values[place]
        T.buffer_store(self._result, self._used(value, column), list(place))
        if not self.problem.columns[column]:
            return
        claim = tirx.call_extern("int32", "atomicCAS", T.address_of(record[_word(CLAIMED)]), _ZERO, _ONE)
        with T.If(tirx.Not(self._is_good(value, column))), T.Then(), T.If(tirx.EQ(claim, _ZERO)), T.Then():
            least, end = self._range(column)
            found = _word(0) if self.problem.is_divisor else value
            for at, number in ((KEY, self._number), (FOUND, found), (FIRST, least), (END, end)):
                for i, half in enumerate(_halves(number)):
                    T.buffer_store(record, half, [_word(at + i)])
            T.evaluate(tirx.call_extern("void", "__threadfence_system"))
            T.buffer_store(record, _ONE, [_word(READY)])

    def _range(self, column: int) -> tuple[Expr, Expr]:
        end = self._ends[column]
        zero = tirx.const(0, "int64")
        if end is None:
            return zero, zero
        has_negative = self.problem.wraps and not self.problem.dtype.startswith("uint")
        return (zero - end if has_negative else zero), end

    def _is_good(self, value: Expr, column: int) -> Expr:
        dtype = self.problem.dtype
        if self.problem.is_divisor:
            return tirx.NE(value, tirx.const(0, dtype))
        least, end = self._range(column)
        wide = value if dtype == "int64" else tirx.Cast("int64" if _is_integer(dtype) else "float64", value)
        if not _is_integer(dtype):
            least, end = tirx.Cast("float64", least), tirx.Cast("float64", end)
        return tirx.all(wide >= least, wide < end)

    def _used(self, value: Expr, column: int) -> Expr:
        if self.problem.result != "int64" or self.problem.is_divisor:
            return value
        wide = value if self.problem.dtype == "int64" else tirx.Cast("int64", value)
        end = self._ends[column]
        return wide if end is None or not self.problem.wraps else from_front(value, end)


def _write(check: _Check, rows: Expr) -> None:
    zero = tirx.const(0, "int64")
    any_bad = T.alloc_buffer((1,), "bool", scope="global")
    T.buffer_store(any_bad, tirx.const(False, "bool"), [zero])
    chunks = ceil_div(rows, _CHUNK)
    is_shared = is_worth_tasks("elements", rows if isinstance(rows, int) else None)
    with loop(chunks, parallel=is_shared) as chunk:
        begin = chunk * _CHUNK
        bad = T.alloc_buffer((1,), "bool", scope="global")
        T.buffer_store(bad, tirx.const(False, "bool"), [zero])
        with loop(T.min(rows - begin, tirx.const(_CHUNK, "int64"))) as row:
            check.copy(begin + row, bad)
        with when(bad[zero]):
            T.buffer_store(any_bad, tirx.const(True, "bool"), [zero])
    with when(any_bad[zero]):
        is_told = T.alloc_buffer((1,), "bool", scope="global")
        T.buffer_store(is_told, tirx.const(False, "bool"), [zero])
        with loop(rows) as row:
            check.refuse(row, is_told)


_ZERO, _ONE = tirx.const(0, "int32"), tirx.const(1, "int32")


def _is_integer(dtype: str) -> bool:
    return dtype.startswith(("int", "uint"))
