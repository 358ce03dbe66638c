"""Alias analysis: the numbered tensors that a variable may alias, by another name, in a tuple, or after an `If`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from tvm import relax

from .op_names import RESHAPE
from .rewriting import op_name

Roots: TypeAlias = "frozenset[int] | tuple[Roots, ...]"
"""Numbers of the tensors that an expression may alias; for a tuple those of each field."""

NOTHING: frozenset[int] = frozenset()

_VIEWS = (RESHAPE, "relax.memory.view", "relax.memory.ensure_zero_offset")


def is_view(value: relax.Expr) -> bool:
    """Return whether a value is a view of its first operand's memory."""
    return op_name(value) in _VIEWS


class TensorAliases:
    """Aliases of the variables of a function, recorded while it is walked."""

    def __init__(self) -> None:
        self._roots: dict[relax.Var, Roots] = {}

    def bind(self, var: relax.Var, roots: Roots) -> None:
        """Record the aliases of `var`."""
        self._roots[var] = roots

    def of(self, expr: relax.Expr) -> Roots:
        """Aliases of a variable, a tuple, a field of one or a view; none for other expressions."""
        if isinstance(expr, relax.Var):
            return self._roots.get(expr, NOTHING)
        if isinstance(expr, relax.Tuple):
            return tuple(self.of(field) for field in expr.fields)
        if isinstance(expr, relax.TupleGetItem):
            fields = self.of(expr.tuple_value)
            return fields[expr.index] if isinstance(fields, tuple) else fields
        return self.of(expr.args[0]) if is_view(expr) else NOTHING


def flattened(roots: Roots) -> Iterator[int]:
    """The numbers, in the order of a tuple's fields."""
    if isinstance(roots, tuple):
        for field in roots:
            yield from flattened(field)
    else:
        yield from sorted(roots)


def merged(roots: Iterable[Roots]) -> Roots:
    """Aliases of a value that is one of several, as after an `If`."""
    result, *rest = roots
    for other in rest:
        if isinstance(result, tuple) and isinstance(other, tuple):
            result = tuple(merged(pair) for pair in zip(result, other, strict=True))
        else:
            result = frozenset((*flattened(result), *flattened(other)))
    return result
