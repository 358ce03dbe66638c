"""Checks of values: indices and divisors as they are to be used, and an error for those that are out of range.

The kernel reads a tensor, and writes the values that the op behind it may use without a doubt. On a CPU the first value
out of range ends the call: the kernel asks the machine to refuse it (`relax_hetero.refuse`), with the number of the
check, the value, and the range. The op reads what the kernel writes, so that it cannot run before.

Numbers, such as extents, are arguments: checks of equal shapes share a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..encoding.problem import Dim
from .core.bounds import BOUNDED, from_front
from .core.builder import Expr, Function, ceil_div, loop, when
from .core.view import View
from .core.work_split import LEAST, is_worth_tasks

REFUSE = "relax_hetero.refuse"
"""The packed function that raises: takes the number of a check, the value found, the least and one past the last."""

CHECKED = "relax_hetero.checked"
"""On a PrimFunc: an op may use what it writes as it is."""

_CHUNK = LEAST["elements"]


@dataclass(frozen=True)
class CheckProblem:
    """Which values of a tensor have to be in which range.

    Attributes
    ----------
    shape : tuple of int or str
        Symbolic extents are names.
    dtype : str
        Of what is read.
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
                _write(_Check(problem, values, result, number, ends), total if width == 1 else total // width)
    return function.result.with_attrs({BOUNDED: True, CHECKED: True})


class _Check:
    """The parameters of a kernel while it is being written."""

    def __init__(self, problem: CheckProblem, values: View, result: View, number: Expr, ends: Sequence[Expr]) -> None:
        self.problem, self.width = problem, len(problem.columns)
        self._values, self._result, self._number = values.data, result.data, number
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


def _is_integer(dtype: str) -> bool:
    return dtype.startswith(("int", "uint"))
