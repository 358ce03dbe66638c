"""Which of some numbered tensors each variable shows: by another name, in a tuple, or after an `If`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from tvm import relax

from .op_names import RESHAPE
from .rewriting import op_name

Roots: TypeAlias = "frozenset[int] | tuple[Roots, ...]"
"""The tensors that an expression may be, by number; of a tuple field by field."""

NOTHING: frozenset[int] = frozenset()

_VIEWS = (RESHAPE, "relax.memory.view", "relax.memory.ensure_zero_offset")


def is_view(value: relax.Expr) -> bool:
    """Return whether this shows the memory of its first operand."""
    return op_name(value) in _VIEWS


class TensorAliases:
    """Tensors that the variables of a function alias, filled in as it is read."""

    def __init__(self) -> None:
        self._roots: dict[relax.Var, Roots] = {}

    def bind(self, var: relax.Var, roots: Roots) -> None:
        """`var` is bound to what shows these."""
        self._roots[var] = roots

    def of(self, expr: relax.Expr) -> Roots:
        """Aliases of a variable, a tuple, a field of one or a view; nothing for anything else."""
        if isinstance(expr, relax.Var):
            return self._roots.get(expr, NOTHING)
        if isinstance(expr, relax.Tuple):
            return tuple(self.of(part) for part in expr.fields)
        if isinstance(expr, relax.TupleGetItem):
            whole = self.of(expr.tuple_value)
            return whole[expr.index] if isinstance(whole, tuple) else whole
        return self.of(expr.args[0]) if is_view(expr) else NOTHING


def flattened(roots: Roots) -> Iterator[int]:
    """The numbers, in the order of a tuple's fields."""
    if isinstance(roots, tuple):
        for part in roots:
            yield from flattened(part)
    else:
        yield from sorted(roots)


def merged(roots: Iterable[Roots]) -> Roots:
    """Aliases of something that is one of these."""
    left, *rest = roots
    for right in rest:
        if isinstance(left, tuple) and isinstance(right, tuple):
            left = tuple(merged(pair) for pair in zip(left, right, strict=True))
        else:
            left = frozenset((*flattened(left), *flattened(right)))
    return left
