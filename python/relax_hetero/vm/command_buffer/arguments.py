"""What callers give a command buffer besides memory, checked: counts, pairs of slots, patterns, parameters."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ...errors import BindingError
from ...target.element_types import numpy_dtype
from .operands import INT64, Integer, as_float, integer, within_int64


def as_count(value: object, what: str) -> int:
    """A number of things."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise BindingError(f"{what} is {value!r}, expected a number of them")
    return value


def as_pairs(pairs: object, slots: int) -> frozenset[tuple[int, int]]:
    """Pairs of slots, both ways round."""
    found: set[tuple[int, int]] = set()
    for pair in pairs if isinstance(pairs, Iterable) else [pairs]:
        both = tuple(pair) if isinstance(pair, Iterable) else (pair,)
        if len(both) != 2 or not all(isinstance(slot, int) and 0 <= slot < slots for slot in both):
            raise BindingError(f"may_overlap has {pair!r}, expected pairs of the {slots} slots")
        found |= {(both[0], both[1]), (both[1], both[0])}
    return frozenset(found)


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
        data = _element(pattern, dtype)
    if len(data) not in (1, 2, 4, 8):
        raise BindingError(f"the pattern of fill has {len(data)} bytes, expected 1, 2, 4 or 8")
    return data


def _element(value: numbers.Real, dtype: str) -> bytes:
    try:
        kind = numpy_dtype(dtype)
        with np.errstate(over="raise"):  # a number that would become infinite
            data = np.asarray(value).astype(kind) if kind.kind not in "iu" else np.array(operator.index(value), kind)  # type: ignore[arg-type]
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise BindingError(f"the pattern of fill, {value!r}, is no element of {dtype} ({error})") from None
    return bytes(data.tobytes())


def as_numbers(parameters: Sequence[int | float], dtypes: Sequence[str]) -> tuple[int | float, ...]:
    """The parameters of a submission."""
    if len(parameters) != len(dtypes):
        raise BindingError(f"{len(parameters)} parameters are given, expected {len(dtypes)}")
    return tuple(map(_number, parameters, dtypes, range(len(dtypes))))


def _number(value: Any, dtype: str, index: int) -> int | float:
    if value.__class__ is not int or dtype != "int64":
        value = _converted(value, dtype, index)
        if dtype == "float64":
            return value
    return value if INT64[0] <= value <= INT64[1] else within_int64(value, f"parameter {index}")


def _converted(value: object, dtype: str, index: int) -> Any:
    if dtype == "float64" and isinstance(value, numbers.Real) and not isinstance(value, bool):
        return as_float(value, dtype, f"parameter {index}")
    try:
        if dtype == "float64" or isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        expected = f"expected a number of type {dtype}"
        raise BindingError(f"parameter {index} is {value!r} ({type(value).__name__}), {expected}") from None
