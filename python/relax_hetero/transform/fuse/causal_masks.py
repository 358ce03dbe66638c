"""Masks that are triangles: constants by which a query sees the keys up to its own place, and no others.

Masks that hide nothing are left out, too.

Before::

    scores: where(x1, multiply(x0, 0.125), -3.4e38), where x1 is a constant triangle of conditions

After::

    scores: multiply(x0, 0.125), causal="bottom_right"

The kernel then leaves out the keys that no query of a tile sees: half of the work.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tvm
from tvm import relax

from ...encoding.expression import Expression, Term

HIDDEN = -1e30
"""A score from here down has no weight beside any other: what masks are filled with."""


def without_triangle(
    expression: Expression, masks: Sequence[relax.Expr], queries: int, keys: int
) -> tuple[Expression, list[relax.Expr], str]:
    """Scores without masks that are triangles or hide nothing, the others, and how attention is causal ("" for not).

    Parameters
    ----------
    expression : Expression
        Expression of the scores: ``x0`` is the product, ``x1``, ... are the masks.
    masks : sequence of relax.Expr
    queries, keys : int
        How many there are.
    """
    for index, mask in enumerate(masks):
        is_triangle = _is_triangle(mask, queries, keys)
        if not is_triangle and not _hides_nothing(mask):
            continue
        term = _stripped(expression.term, index + 1, str(mask.ty.dtype) == "bool")
        if term is None:
            continue
        stripped = Expression(term)
        if any(one.op == "operand" and one.params[0] == index + 1 for one in stripped.terms()):
            continue
        places = [Expression.operand(number - (number > index + 1)) for number in range(len(masks) + 1)]
        others = [other for number, other in enumerate(masks) if number != index]
        expression = stripped.substitute(places)
        if is_triangle:
            return expression, others, "bottom_right"
        return without_triangle(expression, others, queries, keys)
    return expression, list(masks), ""


def _is_triangle(mask: relax.Expr, queries: int, keys: int) -> bool:
    """Return whether a constant hides from query i the keys behind i + keys - queries, and nothing else."""
    if not isinstance(mask, tvm.ir.GenericConst) or not 1 < queries <= keys:
        return False
    array = mask.value.numpy()
    if array.size != queries * keys or array.shape[-2:] != (queries, keys):
        return False
    array = array.reshape(queries, keys)
    seen = np.tril(np.ones((queries, keys), bool), keys - queries)
    if array.dtype == bool:
        return bool((array == seen).all())
    return bool((array[seen] == 0).all() and (array[~seen] <= HIDDEN).all())


def _hides_nothing(mask: relax.Expr) -> bool:
    """Return whether a constant lets every query see every key."""
    if not isinstance(mask, tvm.ir.GenericConst):
        return False
    array = mask.value.numpy()
    return bool(array.all() if array.dtype == bool else (array == 0).all())


def _stripped(term: Term, mask: int, is_condition: bool) -> Term | None:
    """A term without the mask, None where it is applied in no way that hides scores."""
    operand = Term("operand", (), (mask,))
    if term.op == "where":
        condition, then, otherwise = term.args
        if otherwise.op != "number" or not otherwise.params[0] <= HIDDEN:
            return None
        if is_condition and condition == operand:
            return then
        inner = _stripped(then, mask, is_condition)
        return None if inner is None else Term("where", (condition, inner, otherwise))
    if term.op != "add":
        return None
    for own, other in (term.args, term.args[::-1]):
        if not is_condition and other == operand:
            return own
        inner = _stripped(own, mask, is_condition)
        if inner is not None:
            return Term("add", (inner, other))
    return None
