"""Reductions whose terms may be combined in any order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from ..core.builder import Expr
from .flat import FlatBox
from .nests import Sum
from .stages import Load, loads

_COMBINERS: dict[type, Callable[[Expr, Expr], Expr]] = {
    tirx.Add: lambda a, b: a + b,
    tirx.Mul: lambda a, b: a * b,
    tirx.Max: tirx.max,
    tirx.Min: tirx.min,
}


@dataclass(frozen=True)
class Combined:
    """``buffer = combine(buffer, term)``, which may be done in any order."""

    sum: Sum
    combine: Callable[[Expr, Expr], Expr]
    term: Expr
    neutral: Expr


def combined(s: Sum) -> Combined | None:
    """What a reduction combines, if that is one value with what is there so far."""
    kind = type(s.value)
    if kind not in _COMBINERS:
        return None
    for own, term in ((s.value.a, s.value.b), (s.value.b, s.value.a)):
        if isinstance(own, Load) and own.source.same_as(s.buffer):
            if any(load.source.same_as(s.buffer) for load in loads(term)):
                return None
            dtype = s.buffer.dtype
            neutral = {tirx.Add: tirx.const(0, dtype), tirx.Mul: tirx.const(1, dtype)}.get(kind, s.initial)
            return Combined(s, _COMBINERS[kind], term, neutral)
    return None


def parts_of(box: FlatBox) -> list[Combined]:
    """What each reduction of a box combines, where all of them do."""
    return [c for c in (combined(s) for s in box.nest.sums) if c is not None]


def is_number(value: Expr, number: Expr) -> bool:
    """Whether an expression is a certain constant."""
    numbers = (tirx.IntImm, tirx.FloatImm)
    return isinstance(value, numbers) and isinstance(number, numbers) and float(value) == float(number)
