"""Requirements on sizes as data: conditions, the text of their errors, and the position of their checks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import tvm
from tvm import relax, tirx
from tvm_ffi import StructuralKey

from ...op.require import is_requirement
from ...tir.core.walks import nodes
from .rewriting import tensor_types

MAX_EXTENT = 2**62  # upper bound of sizes for analyzers: more than any extent of a tensor
DIVISIONS = (tirx.FloorDiv, tirx.Div, tirx.FloorMod, tirx.Mod)  # expressions of sizes that fail where ``b`` is 0


@dataclass(frozen=True, eq=False)
class Requirement:
    """A condition over sizes, and the text of the error for sizes that do not meet it."""

    condition: Any
    message: str

    @classmethod
    def of(cls, call: relax.Call) -> Requirement:
        """Requirement of a ``require`` statement, given its call."""
        return cls(call.args[0], str(call.attrs.message))

    @property
    def sizes(self) -> list[tirx.Var]:
        """The symbolic sizes of the condition, in order."""
        return symbols_in(self.condition)


Monomial: TypeAlias = tuple[StructuralKey, ...]  # the symbolic factors of a number of bytes, in a canonical order


def factors_of(ty: relax.TensorType) -> tuple[int, list[Any]]:
    """The bytes of a tensor as a number and symbolic factors."""
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
    """A key for symbolic factors that does not depend on their order."""
    return tuple(sorted(map(StructuralKey, symbolic), key=hash))


def text_of(expr: Any) -> str:
    """A condition or a shape in Python's notation, for messages."""
    if isinstance(expr, relax.ShapeExpr):
        extents = ", ".join(map(text_of, expr.values))
        return f"({extents},)" if len(expr.values) == 1 else f"({extents})"
    return re.sub(r"T\.(int64|float64|bool)\((-?[^()]*)\)", r"\2", str(expr)).replace("T.", "")


def requirement_positions(bindings: Sequence[relax.Binding]) -> set[int]:
    """The positions of bindings that belong to ``require`` statements.

    A statement is one binding, or two once TVM has bound the value of its ``match_cast`` to a variable.
    """
    positions: set[int] = set()
    values: set[relax.Var] = set()
    for position, binding in enumerate(bindings):
        value = binding.value
        if is_requirement(value):
            values.add(binding.var)
            positions.add(position)
        elif isinstance(value, relax.Var) and value in values:
            positions.add(position)
    return positions


def symbols_in(expr: Any) -> list[tirx.Var]:
    """The symbolic sizes of an expression, or of a type, each once, in order."""
    return list(dict.fromkeys(nodes(expr, tvm.ir.Var)))


def divisors_in(expr: Any) -> list[Any]:
    """The divisors in an expression of sizes that are not numbers, in order; none in an int."""
    divisions = [] if isinstance(expr, int) else nodes(expr, *DIVISIONS)
    return [division.b for division in divisions if not isinstance(division.b, tirx.IntImm)]


def sizes_of_parameters(func: relax.Function) -> set[tirx.Var]:
    """The sizes that the parameters of a function define."""
    return {symbol for param in func.params for symbol in (param, *symbols_in(param.ty))}


def defined_sizes(bindings: Sequence[relax.Binding], known: Set[tirx.Var]) -> dict[tirx.Var, int]:
    """The sizes that bindings of a scope define, each with the position of its binding.

    A ``match_cast`` defines the sizes of its type that are not known before, and a scalar variable is a size itself.
    """
    positions: dict[tirx.Var, int] = {}
    for position, binding in enumerate(bindings):
        symbols = symbols_in(binding.ty) if isinstance(binding, relax.MatchCast) else []
        for symbol in [*symbols, binding.var]:
            if symbol not in known:
                positions.setdefault(symbol, position)
    return positions


def bind_extents(analyzer: tvm.sym.Analyzer, ty: tvm.ir.Type) -> None:
    """Tell an analyzer that extents of tensors of a type, which exist, are not negative."""
    for tensor in tensor_types(ty):
        if isinstance(tensor.shape, relax.ShapeExpr):
            for extent in tensor.shape.values:
                if isinstance(extent, tvm.ir.Var):
                    analyzer.bind(extent, tvm.ir.Range(0, MAX_EXTENT), allow_override=True)


_RequirementT = TypeVar("_RequirementT", bound=Requirement)


def by_position(
    required: Iterable[_RequirementT], bindings: Sequence[relax.Binding], known: Set[tirx.Var]
) -> dict[int, list[_RequirementT]]:
    """Requirements by the position of the binding after which all their sizes are known; -1 for the scope's beginning.

    `known` are the sizes of parameters and of enclosing scopes (`sizes_of_parameters`).
    """
    definitions = defined_sizes(bindings, known)
    result: dict[int, list[_RequirementT]] = {}
    for requirement in required:
        position = max((definitions.get(symbol, -1) for symbol in requirement.sizes), default=-1)
        result.setdefault(position, []).append(requirement)
    return result
