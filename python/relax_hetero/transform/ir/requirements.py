"""Requirements on sizes as data: conditions, the text of their errors, and the place where they can be checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeVar

import tvm
from tvm import relax, tirx
from tvm_ffi import structural_walk

from ...op.require import is_requirement

MOST = 2**62
"""More than any extent of a tensor: what analyzers are told that sizes stay below."""


@dataclass(frozen=True, eq=False)
class Requirement:
    """A condition over sizes, and the text of the error for sizes that do not meet it."""

    condition: Any
    message: str

    @classmethod
    def of(cls, call: relax.Call) -> Requirement:
        """What the value of a ``require`` statement says."""
        return cls(call.args[0], str(call.attrs.message))

    @property
    def sizes(self) -> list[tirx.Var]:
        """The symbolic sizes that it is about, in order."""
        return symbols_in(self.condition)


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
