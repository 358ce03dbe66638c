"""Requirements on sizes as data: conditions, the text of their errors, and the place where they can be checked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import tvm
from tvm import relax, tirx
from tvm_ffi import StructuralKey, structural_walk

from ...op.require import is_requirement
from .rewriting import tensor_types

MAX_EXTENT = 2**62
"""More than any extent of a tensor: what analyzers are told that sizes stay below."""

DIVISIONS = (tirx.FloorDiv, tirx.Div, tirx.FloorMod, tirx.Mod)
"""Expressions of sizes that fail where ``b`` is 0."""


@dataclass(frozen=True, eq=False)
class Requirement:
    """A condition over sizes, and the text of the error for sizes that do not meet it."""

    condition: Any
    message: str

    @classmethod
    def of(cls, call: relax.Call) -> Requirement:
        """Requirement of the value of a ``require`` statement."""
        return cls(call.args[0], str(call.attrs.message))

    @property
    def sizes(self) -> list[tirx.Var]:
        """The symbolic sizes that it is about, in order."""
        return symbols_in(self.condition)


Monomial: TypeAlias = tuple[StructuralKey, ...]
"""The symbolic factors of a number of bytes, in an order of their own."""


def factors_of(ty: relax.TensorType) -> tuple[int, list[Any]]:
    """The bytes of a tensor: a number, times symbolic extents."""
    number, symbolic = (ty.dtype.dtype.bits * ty.dtype.dtype.lanes + 7) // 8, []
    pending = list(ty.shape.values)
    while pending:
        extent = pending.pop()
        if isinstance(extent, tirx.Mul):
            pending += [extent.a, extent.b]
        elif isinstance(extent, tirx.IntImm):
            number *= max(int(extent), 0)
        else:
            symbolic.append(extent)
    return number, symbolic


def monomial(symbolic: Iterable[Any]) -> Monomial:
    """A key for symbolic factors, whatever their order."""
    return tuple(sorted(map(StructuralKey, symbolic), key=hash))


def text_of(expr: Any) -> str:
    """A condition or a shape as messages show it, in Python's notation."""
    if isinstance(expr, relax.ShapeExpr):
        shown = ", ".join(map(text_of, expr.values))
        return f"({shown},)" if len(expr.values) == 1 else f"({shown})"
    return re.sub(r"T\.(int64|float64|bool)\((-?[^()]*)\)", r"\2", str(expr)).replace("T.", "")


def in_requirements(bindings: Sequence[relax.Binding]) -> set[int]:
    """The positions of those of some bindings that ``require`` statements consist of.

    A statement is one binding, or two once TVM has given the value of its ``match_cast`` a variable.
    """
    found: set[int] = set()
    values: set[relax.Var] = set()
    for position, binding in enumerate(bindings):
        value = binding.value
        if is_requirement(value):
            values.add(binding.var)
            found.add(position)
        elif isinstance(value, relax.Var) and value in values:
            found.add(position)
    return found


def symbols_in(expr: Any) -> list[tirx.Var]:
    """The symbolic sizes of an expression, or of a type, each once, in order."""
    found: dict[tirx.Var, None] = {}
    structural_walk(expr, (tvm.ir.Var, lambda var: found.setdefault(var)))
    return list(found)


def divisors_in(expr: Any) -> list[Any]:
    """The divisors in an expression of sizes that are not numbers, in order; an int has none."""
    divisors: list[Any] = []

    def note(division: Any) -> None:
        if not isinstance(division.b, tirx.IntImm):
            divisors.append(division.b)

    if not isinstance(expr, int):
        structural_walk(expr, (DIVISIONS, note))
    return divisors


def sizes_of_parameters(func: relax.Function) -> set[tirx.Var]:
    """The sizes that the parameters of a function give."""
    return {symbol for param in func.params for symbol in (param, *symbols_in(param.ty))}


def sizes_made(bindings: Sequence[relax.Binding], known: Set[tirx.Var]) -> dict[tirx.Var, int]:
    """The sizes that bindings of a scope make, each with the position of its binding.

    A ``match_cast`` makes the sizes of its type that nothing made before, and a number is a size itself.
    """
    made: dict[tirx.Var, int] = {}
    for position, binding in enumerate(bindings):
        found = symbols_in(binding.ty) if isinstance(binding, relax.MatchCast) else []
        for symbol in [*found, binding.var]:
            if symbol not in known:
                made.setdefault(symbol, position)
    return made


def bind_extents(analyzer: tvm.sym.Analyzer, ty: tvm.ir.Type) -> None:
    """Tell an analyzer that sizes which are extents of tensors of a type, which exist, are not negative."""
    for tensor in tensor_types(ty):
        if isinstance(tensor.shape, relax.ShapeExpr):
            for extent in tensor.shape.values:
                if isinstance(extent, tvm.ir.Var):
                    analyzer.bind(extent, tvm.ir.Range(0, MAX_EXTENT), allow_override=True)


_Found = TypeVar("_Found", bound=Requirement)


def by_place(
    required: Iterable[_Found], bindings: Sequence[relax.Binding], known: Set[tirx.Var]
) -> dict[int, list[_Found]]:
    """Requirements by the binding of a scope behind which all their sizes are known; -1 for the scope's beginning.

    `known` are the sizes of parameters and of scopes around this one (`sizes_of_parameters`).
    """
    defined = sizes_made(bindings, known)
    due: dict[int, list[_Found]] = {}
    for requirement in required:
        place = max((defined.get(symbol, -1) for symbol in requirement.sizes), default=-1)
        due.setdefault(place, []).append(requirement)
    return due
