"""Range checks of indices and divisors before an op uses them.

The kernel copies a tensor; the op reads the copy, so that it cannot run before the check. On a CPU the first value out
of range ends the call: the kernel calls `relax_hetero.refuse` with the number of the check, the value and the range.

A GPU kernel cannot end a call. There the first thread that meets such a value claims the GPU's error record and writes
the same numbers there, in CPU memory that the machine reads after each wait for the GPU (`vm.device.error_records`).

Extents and the number of the check are arguments: checks of equal shapes share a kernel.
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
from .core.work_split import MIN_WORK, is_worth_tasks, unravel

REFUSE = "relax_hetero.refuse"
"""The packed function that raises; its arguments are the number of a check, the value, the minimum and the end."""

CHECKED = "relax_hetero.checked"  # on a PrimFunc: its results are in range, and an op may use them without clamping

RANGE = "relax_hetero.range"
"""On a PrimFunc: an operand's number, another operand's, an axis of the latter, and an offset. The first operand's
values, int64, must be from 0 to the size of the axis plus the offset; to the offset alone without another operand."""

_TASK_ROWS = MIN_WORK["elements"]

_BLOCK_THREADS = 256


@dataclass(frozen=True)
class CheckProblem:
    """A tensor and the ranges that its values must be in."""

    shape: tuple[Dim, ...]  # symbolic extents are names
    dtype: str  # element type of the data
    # Checked positions of the last axis; each may have a range of its own. One entry stands for all values.
    columns: tuple[bool, ...] = (True,)
    # Whether negative values count from the end of their range, which then begins at the negated end.
    wraps: bool = True
    is_divisor: bool = False  # whether the value must only differ from 0; there are no ranges then

    @property
    def result(self) -> str:
        """The element type of the result."""
        is_index = not self.is_divisor and self.dtype.startswith(("int", "uint"))
        return "int64" if is_index else self.dtype

    @property
    def ends(self) -> int:
        """Number of ranges; the kernel takes the end of each."""
        return 0 if self.is_divisor else sum(self.columns)


def check_kernel(problem: CheckProblem) -> tirx.PrimFunc:
    """The kernel for CPUs; parameters: the values, the number of the check, the end of each range, and the result."""
    function = Function("check_values")
    width = len(problem.columns)
    with function:
        extents = list(map(function.size, problem.shape))
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
                _write_check(
                    _Check(problem, values.data, result.data, number, ends), total if width == 1 else total // width
                )
    return function.result.with_attrs({BOUNDED: True, CHECKED: True})


def reporting_kernel(problem: CheckProblem) -> tirx.PrimFunc:
    """The kernel for GPUs: parameters are those of `check_kernel`, with the error record after the values.

    A thread for each row. The first that meets a value out of range claims the record and fills it; later ones are
    dropped. The ready flag is written last, so that nobody reads an incomplete record.
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
        # Perhaps one block too many: a launch without blocks is an error.
        blocks = tirx.floordiv(rows, _word(_BLOCK_THREADS)) + _word(1)
        with function.body(), T.thread_binding(blocks, thread="blockIdx.x") as block:
            with T.thread_binding(_word(_BLOCK_THREADS), thread="threadIdx.x") as thread:
                row = block * _word(_BLOCK_THREADS) + thread
                with T.If(row < rows), T.Then():
                    for column in range(width):
                        check.report(unravel(row * _word(width) + _word(column), shape), column, record)
    return function.result.with_attrs({BOUNDED: True, CHECKED: True, "tirx.is_scheduled": True})


def _word(value: int) -> tirx.IntImm:
    return tirx.IntImm("int64", value)


def _halves(number: Expr) -> tuple[Expr, Expr]:
    """The low and the high word of a number as int64; a number that TVM narrowed is extended by its sign."""
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
        remaining_ends = iter(ends)
        self._ends = [
            next(remaining_ends) if is_checked and not problem.is_divisor else None for is_checked in problem.columns
        ]

    def copy(self, row: Expr, bad: Expr) -> None:
        """Write the values of a row as int64 from the front; set `bad` where one is out of range."""
        zero = tirx.const(0, "int64")
        for column in range(self.width):
            index = row * self.width + column
            value = self._values[index]
            if self.problem.columns[column]:
                T.buffer_store(bad, tirx.Or(bad[zero], tirx.Not(self._is_in_range(value, column))), [zero])
            T.buffer_store(self._result, self._from_front(value, column), [index])

    def refuse(self, row: Expr, has_raised: Expr) -> None:
        """Raise for the first value of a row that is out of range."""
        zero = tirx.const(0, "int64")
        for column in filter(self.problem.columns.__getitem__, range(self.width)):
            value = self._values[row * self.width + column]
            with when(tirx.all(tirx.Not(self._is_in_range(value, column)), tirx.Not(has_raised[zero]))):
                T.buffer_store(has_raised, tirx.const(True, "bool"), [zero])
                first, end = self._range(column)
                T.evaluate(T.call_packed(REFUSE, self._number, tirx.Cast("int64", value), first, end))

    def report(self, indices: Sequence[Expr], column: int, record: Any) -> None:
        """Write a value as int64 from the front; if out of range, also to the record, unless that is claimed."""
        value = self._values[indices]
        T.buffer_store(self._result, self._from_front(value, column), list(indices))
        if not self.problem.columns[column]:
            return
        claim = tirx.call_extern("int32", "atomicCAS", T.address_of(record[_word(CLAIMED)]), _ZERO, _ONE)
        with T.If(tirx.Not(self._is_in_range(value, column))), T.Then(), T.If(tirx.EQ(claim, _ZERO)), T.Then():
            first, end = self._range(column)
            number_found = _word(0) if self.problem.is_divisor else value
            for at, number in ((KEY, self._number), (FOUND, number_found), (FIRST, first), (END, end)):
                for i, half in enumerate(_halves(number)):
                    T.buffer_store(record, half, [_word(at + i)])
            T.evaluate(tirx.call_extern("void", "__threadfence_system"))
            T.buffer_store(record, _ONE, [_word(READY)])

    def _range(self, column: int) -> tuple[Expr, Expr]:
        end = self._ends[column]
        zero = tirx.const(0, "int64")
        if end is None:
            return zero, zero
        is_signed = self.problem.wraps and not self.problem.dtype.startswith("uint")
        return (zero - end if is_signed else zero), end

    def _is_in_range(self, value: Expr, column: int) -> Expr:
        dtype = self.problem.dtype
        if self.problem.is_divisor:
            return tirx.NE(value, tirx.const(0, dtype))
        first, end = self._range(column)
        wide = value if dtype == "int64" else tirx.Cast("int64" if _is_integer(dtype) else "float64", value)
        if not _is_integer(dtype):
            first, end = tirx.Cast("float64", first), tirx.Cast("float64", end)
        return tirx.all(wide >= first, wide < end)

    def _from_front(self, value: Expr, column: int) -> Expr:
        if self.problem.result != "int64" or self.problem.is_divisor:
            return value
        wide = value if self.problem.dtype == "int64" else tirx.Cast("int64", value)
        end = self._ends[column]
        return wide if end is None or not self.problem.wraps else from_front(value, end)


def _write_check(check: _Check, rows: Expr) -> None:
    zero = tirx.const(0, "int64")
    any_bad = T.alloc_buffer((1,), "bool", scope="global")
    T.buffer_store(any_bad, tirx.const(False, "bool"), [zero])
    chunks = ceil_div(rows, _TASK_ROWS)
    is_shared = is_worth_tasks("elements", rows if isinstance(rows, int) else None)
    with loop(chunks, parallel=is_shared) as chunk:
        begin = chunk * _TASK_ROWS
        any_bad_row = T.alloc_buffer((1,), "bool", scope="global")
        T.buffer_store(any_bad_row, tirx.const(False, "bool"), [zero])
        with loop(T.min(rows - begin, tirx.const(_TASK_ROWS, "int64"))) as row:
            check.copy(begin + row, any_bad_row)
        with when(any_bad_row[zero]):
            T.buffer_store(any_bad, tirx.const(True, "bool"), [zero])
    with when(any_bad[zero]):
        has_raised = T.alloc_buffer((1,), "bool", scope="global")
        T.buffer_store(has_raised, tirx.const(False, "bool"), [zero])
        with loop(rows) as row:
            check.refuse(row, has_raised)


_ZERO, _ONE = tirx.const(0, "int32"), tirx.const(1, "int32")


def _is_integer(dtype: str) -> bool:
    return dtype.startswith(("int", "uint"))
