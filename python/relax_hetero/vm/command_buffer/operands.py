"""Operands of recorded commands and their checks: ranges of memory, and parameters of submissions."""

from __future__ import annotations

import ast
import ctypes
import math
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from ...artifact.dims import parse_dim
from ...artifact.signature import Dim
from ...errors import BindingError
from ...target.element_types import numpy_dtype

MAX_CHARACTERS = 1000  # maximum length of the text of a `Number`
INT64_RANGE = -(1 << 63), (1 << 63) - 1  # minimum and maximum of the integers in commands


@dataclass(frozen=True)
class Number:
    """A symbolic integer that each submission evaluates: arithmetic (``+ - * // %``) of parameters and ints."""

    # Text in the grammar of `dims.parse_dim`, limited to `MAX_CHARACTERS` because deeper nesting cannot be parsed.
    text: str

    def __add__(self, other: Integer) -> Number:
        return _binary(self, "+", other)

    def __radd__(self, other: Integer) -> Number:
        return _binary(other, "+", self)

    def __sub__(self, other: Integer) -> Number:
        return _binary(self, "-", other)

    def __rsub__(self, other: Integer) -> Number:
        return _binary(other, "-", self)

    def __mul__(self, other: Integer) -> Number:
        return self if other == 1 and not isinstance(other, Number) else _binary(self, "*", other)

    def __rmul__(self, other: Integer) -> Number:
        return self if other == 1 and not isinstance(other, Number) else _binary(other, "*", self)

    def __floordiv__(self, other: int) -> Number:
        return _binary(self, "//", _divisor(other))

    def __mod__(self, other: int) -> Number:
        return _binary(self, "%", _divisor(other))


Integer: TypeAlias = int | Number


@dataclass(frozen=True)
class MemoryRange:
    """Bytes that a command reads or writes, in a slot of the binding table or in a direct buffer."""

    owner: Any = field(repr=False, compare=False)  # command buffer that it belongs to
    space: str  # ``"slot"`` or ``"direct"``
    index: int
    offset: Integer = 0  # bytes
    # Bytes; None for the bytes that the command needs, if it determines them, else all bytes from `offset` on.
    length: Integer | None = None


def parameter_name(index: int) -> str:
    """The name of a parameter in the text of a `Number`."""
    return f"parameter_{index}"


def size_name(slot: int) -> str:
    """The name of the size of a slot's binding in the text of a `Number`."""
    return f"bytes_{slot}"


def dim(value: Integer) -> Dim:
    """An integer as commands store it: an int or text."""
    return value.text if isinstance(value, Number) else value


def names_in(value: Integer) -> frozenset[str]:
    """The parameters and sizes that a number depends on."""
    return parse_dim(value.text).names if isinstance(value, Number) else frozenset()


def divided(value: Integer) -> list[Number]:
    """The dividends in a number: they must fit into int64, because ``//`` and ``%`` of wrapped-around values differ."""
    if not isinstance(value, Number) or not ("//" in value.text or "%" in value.text):
        return []
    nodes = ast.walk(ast.parse(value.text, mode="eval"))
    return [
        Number(f"({ast.unparse(node.left)})")
        for node in nodes
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv | ast.Mod)
    ]


def integer(value: object, what: str) -> Integer:
    """`value` as an int or a Number; for other types a BindingError that begins with `what`."""
    if isinstance(value, Number):
        return value
    try:
        if isinstance(value, bool):
            raise TypeError
        return within_int64(operator.index(value), what)  # type: ignore[arg-type]
    except TypeError:
        raise BindingError(
            f"{what} is {value!r} ({type(value).__name__}), expected an integer or a parameter"
        ) from None


def within_int64(value: int, what: str) -> int:
    """`value` if it fits into int64; otherwise a BindingError that begins with `what`."""
    if not INT64_RANGE[0] <= value <= INT64_RANGE[1]:
        raise BindingError(f"{what} is {value:#x}, expected a number of type int64")
    return value


def as_float(value: Any, dtype: str, what: str) -> float:
    """`value` as a Python float; a BindingError that begins with `what` if it overflows `dtype`."""
    try:
        number = float(value)
        fits = dtype != "float32" or math.isinf(number) or not math.isinf(ctypes.c_float(number).value)
    except OverflowError:
        fits = False
    if not fits:
        raise BindingError(f"{what} exceeds the range of {dtype}")
    return number


def substituted(extent: Dim, values: dict[str, Integer], what: str) -> Integer:
    """Substitute values for the names in an extent.

    Raises BindingError if the extent is not arithmetic of names that have values; the message begins with `what`.
    """
    if not isinstance(extent, str):
        return extent
    expression = parse_dim(extent)
    evaluate: Callable[[Any], Integer] | None = expression.evaluate
    if evaluate is None or not expression.names <= values.keys():
        raise BindingError(f"{what} has the extent {extent}, expected arithmetic of {', '.join(values) or 'numbers'}")
    try:
        return evaluate(values)
    except (TypeError, ZeroDivisionError) as error:
        raise BindingError(f"{what} has the extent {extent}, which cannot be known before a submission") from error


def _binary(left: Integer, operation: str, right: Integer) -> Number:
    for operand in (left, right):
        if not isinstance(operand, Number | int) or isinstance(operand, bool):
            raise BindingError(f"{operand!r} ({type(operand).__name__}) in arithmetic of parameters, expected an int")
        if isinstance(operand, int):
            within_int64(operand, "an int in arithmetic of parameters")
    text = f"({dim(left)} {operation} {dim(right)})"
    if len(text) > MAX_CHARACTERS:
        raise BindingError(f"arithmetic of parameters takes {len(text)} characters, expected at most {MAX_CHARACTERS}")
    return Number(text)


def _divisor(value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise BindingError(f"a parameter is divided by {value!r}, expected a positive int")
    return value


@dataclass(frozen=True)
class Limit:
    """A condition on a number of each submission."""

    what: str  # subject of messages
    value: str  # arithmetic of parameters and sizes of bindings
    # Minimum and maximum.
    low: int | None = 0
    high: int | None = None
    multiple: int = 1  # required divisor

    def check(self, values: Mapping[str, int]) -> None:
        """Require the condition for a submission's values; BindingError otherwise."""
        evaluate = parse_dim(self.value).evaluate
        assert evaluate is not None, f"{self.value} is arithmetic by construction"
        self._check(evaluate(values), f", {self.value}")

    def _check(self, number: int, text: str) -> None:
        if self.low is not None and number < self.low:
            expected = f"at least {self.low}"
        elif self.high is not None and number > self.high:
            expected = f"at most {self.high}"
        elif number % self.multiple:
            expected = f"a multiple of {self.multiple}"
        else:
            return
        raise BindingError(f"{self.what} is {number}{text}, expected {expected}")


class Limits:
    """Distinct limits of a recording: constants are checked while recording, other numbers at each submission.

    The limits of a command are pending until `commit`, so that a refused command leaves none.
    """

    def __init__(self) -> None:
        self._limits: dict[tuple[object, ...], Limit] = {}
        self._pending: list[Limit] = []

    def require(
        self, what: str, value: Integer, low: int | None = 0, high: int | None = None, multiple: int = 1
    ) -> None:
        """Add a limit of a number; a BindingError that begins with `what` if a constant violates it."""
        limit = Limit(what, str(dim(value)), low, high, multiple)
        if isinstance(value, int):
            limit._check(value, "")
        else:
            self._pending.append(limit)

    def roll_back(self) -> None:
        """Drop the pending limits."""
        self._pending.clear()

    def commit(self) -> None:
        """Keep the pending limits."""
        for limit in self._pending:
            self._limits.setdefault((limit.value, limit.low, limit.high, limit.multiple), limit)
        self._pending.clear()

    def all(self) -> tuple[Limit, ...]:
        """The limits that each submission is checked against."""
        return tuple(self._limits.values())


def as_count(value: object, what: str) -> int:
    """A non-negative count; BindingError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise BindingError(f"{what} is {value!r}, expected a non-negative int")
    return value


def as_pairs(pairs: object, slots: int) -> frozenset[tuple[int, int]]:
    """Pairs of slots, each in both orders."""
    symmetric: set[tuple[int, int]] = set()
    for pair in pairs if isinstance(pairs, Iterable) else [pairs]:
        pair_slots = tuple(pair) if isinstance(pair, Iterable) else (pair,)
        if len(pair_slots) != 2 or not all(isinstance(slot, int) and 0 <= slot < slots for slot in pair_slots):
            raise BindingError(f"may_overlap has {pair!r}, expected pairs of the {slots} slots")
        symmetric |= {pair_slots, pair_slots[::-1]}
    return frozenset(symmetric)


def as_grid(grid: object) -> tuple[Integer, ...]:
    """One to three workgroup counts."""
    counts = tuple(grid) if isinstance(grid, Sequence) and not isinstance(grid, str) else (grid,)
    if not 1 <= len(counts) <= 3:
        raise BindingError(f"the grid has {len(counts)} workgroup counts, expected 1 to 3: along x, y, z")
    return tuple(
        integer(count, f"the workgroup count along {axis}") for count, axis in zip(counts, "xyz", strict=False)
    )


def as_pattern(pattern: object, dtype: str | None) -> bytes:
    """The bytes that a fill repeats."""
    if isinstance(pattern, bytes | bytearray):
        data = bytes(pattern)
    elif isinstance(pattern, np.generic) and dtype is None:
        data = pattern.tobytes()
    elif not isinstance(pattern, numbers.Real):
        raise BindingError(f"the pattern of fill is a {type(pattern).__name__}, expected bytes or a number")
    elif dtype is None:
        if pattern != 0 or str(pattern).startswith("-"):
            raise BindingError(f"fill with the number {pattern!r} needs dtype=, the element type it is written as")
        data = b"\0"
    else:
        data = _element_bytes(pattern, dtype)
    if len(data) not in (1, 2, 4, 8):
        raise BindingError(f"the pattern of fill has {len(data)} bytes, expected 1, 2, 4 or 8")
    return data


def _element_bytes(value: numbers.Real, dtype: str) -> bytes:
    try:
        element_type = numpy_dtype(dtype)
        with np.errstate(over="raise"):  # instead of becoming infinite
            if element_type.kind in "iu":
                data = np.array(operator.index(value), element_type)  # type: ignore[arg-type]
            else:
                data = np.asarray(value).astype(element_type)
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise BindingError(f"the pattern of fill, {value!r}, is not an element of {dtype} ({error})") from None
    return bytes(data.tobytes())


def as_numbers(parameters: Sequence[int | float], dtypes: Sequence[str]) -> tuple[int | float, ...]:
    """The parameters of a submission, checked against their types."""
    if len(parameters) != len(dtypes):
        raise BindingError(f"{len(parameters)} parameters are given, expected {len(dtypes)}")
    return tuple(map(_checked_number, parameters, dtypes, range(len(dtypes))))


def _checked_number(value: Any, dtype: str, index: int) -> int | float:
    if value.__class__ is not int or dtype != "int64":
        value = _as_dtype(value, dtype, index)
        if dtype == "float64":
            return value
    return value if INT64_RANGE[0] <= value <= INT64_RANGE[1] else within_int64(value, f"parameter {index}")


def _as_dtype(value: object, dtype: str, index: int) -> Any:
    if dtype == "float64" and isinstance(value, numbers.Real) and not isinstance(value, bool):
        return as_float(value, dtype, f"parameter {index}")
    try:
        if dtype == "float64" or isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        expected = f"expected a number of type {dtype}"
        raise BindingError(f"parameter {index} is {value!r} ({type(value).__name__}), {expected}") from None
