"""What commands recorded by hand work on: memory, and numbers that come with each submission."""

from __future__ import annotations

import ast
import ctypes
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ...artifact.dims import parse_dim
from ...artifact.signature import Dim
from ...errors import BindingError

MOST_CHARACTERS = 1000
INT64 = -(1 << 63), (1 << 63) - 1
"""The least and greatest number that commands count with."""


@dataclass(frozen=True)
class Number:
    """An integer of each submission: a parameter, or arithmetic (``+ - * // %``) of parameters and ints.

    Attributes
    ----------
    text : str
        In the grammar of `dims.parse_dim`, of at most `MOST_CHARACTERS`: what nests deeper cannot be parsed.
    """

    text: str

    def __add__(self, other: Integer) -> Number:
        return _joined(self, "+", other)

    def __radd__(self, other: Integer) -> Number:
        return _joined(other, "+", self)

    def __sub__(self, other: Integer) -> Number:
        return _joined(self, "-", other)

    def __rsub__(self, other: Integer) -> Number:
        return _joined(other, "-", self)

    def __mul__(self, other: Integer) -> Number:
        return self if other == 1 and not isinstance(other, Number) else _joined(self, "*", other)

    def __rmul__(self, other: Integer) -> Number:
        return self if other == 1 and not isinstance(other, Number) else _joined(other, "*", self)

    def __floordiv__(self, other: int) -> Number:
        return _joined(self, "//", _divisor(other))

    def __mod__(self, other: int) -> Number:
        return _joined(self, "%", _divisor(other))


Integer: TypeAlias = int | Number


@dataclass(frozen=True)
class MemoryRange:
    """Bytes that a command reads or writes: of a slot of the binding table, or of a buffer that the recording keeps.

    Attributes
    ----------
    owner : object
        The command buffer it belongs to.
    space : str
        ``"slot"`` or ``"direct"``.
    index : int
    offset : int or Number
        Bytes.
    length : int, Number or None
        Bytes; None for as many as the command asks for, where it asks for any, else all there are from `offset` on.
    """

    owner: Any = field(repr=False, compare=False)
    space: str
    index: int
    offset: Integer = 0
    length: Integer | None = None


def parameter_name(index: int) -> str:
    """What texts call a parameter."""
    return f"parameter_{index}"


def size_name(slot: int) -> str:
    """What texts call the bytes of a slot's binding."""
    return f"bytes_{slot}"


def dim(value: Integer) -> Dim:
    """An integer as commands hold it."""
    return value.text if isinstance(value, Number) else value


def names_in(value: Integer) -> frozenset[str]:
    """The parameters and sizes that a number depends on."""
    return parse_dim(value.text).names if isinstance(value, Number) else frozenset()


def divided(value: Integer) -> list[Number]:
    """What ``//`` and ``%`` in a number divide: machine code wraps where it is no int64, which they alone reveal."""
    if not isinstance(value, Number) or not ("//" in value.text or "%" in value.text):
        return []
    nodes = ast.walk(ast.parse(value.text, mode="eval"))
    return [
        Number(f"({ast.unparse(node.left)})")
        for node in nodes
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv | ast.Mod)
    ]


def integer(value: object, what: str) -> Integer:
    """`value`, where it is an int or a Number; BindingError, which begins with `what`, for anything else."""
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
    """`value`, where it is of the type that commands count in; BindingError, which begins with `what`, where not."""
    if not INT64[0] <= value <= INT64[1]:
        raise BindingError(f"{what} is {value:#x}, expected a number of type int64")
    return value


def as_float(value: Any, dtype: str, what: str) -> float:
    """`value` as a Python float; BindingError, which begins with `what`, where `dtype` has no number of its size."""
    try:
        found = float(value)
        is_there = dtype != "float32" or math.isinf(found) or not math.isinf(ctypes.c_float(found).value)
    except OverflowError:
        is_there = False
    if not is_there:
        raise BindingError(f"{what} is beyond the numbers of {dtype}")
    return found


def substituted(extent: Dim, values: dict[str, Integer], what: str) -> Integer:
    """An extent over names, as a number over parameters.

    Raises
    ------
    BindingError
        The extent is no arithmetic of names that have values; the message begins with `what`.
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


def _joined(left: Integer, sign: str, right: Integer) -> Number:
    for side in (left, right):
        if not isinstance(side, Number | int) or isinstance(side, bool):
            raise BindingError(f"{side!r} ({type(side).__name__}) in arithmetic of parameters, expected an int")
        if isinstance(side, int):
            within_int64(side, "an int in arithmetic of parameters")
    text = f"({dim(left)} {sign} {dim(right)})"
    if len(text) > MOST_CHARACTERS:
        raise BindingError(f"arithmetic of parameters takes {len(text)} characters, expected at most {MOST_CHARACTERS}")
    return Number(text)


def _divisor(value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise BindingError(f"a parameter is divided by {value!r}, expected a positive int")
    return value
