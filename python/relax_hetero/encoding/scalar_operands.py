"""Numbers of an expression as operands, so that layers that differ in scales and zero points alone share a kernel.

Before and after::

    cast(clip(add(round(multiply(x0, 3.7)), 131.0), 0.0, 255.0), 'uint8')
    cast(clip(add(round(multiply(x0, x1)), x2), 0.0, 255.0), 'uint8')
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .expression import Expression, Term

_TAKEN_FROM = ("add", "subtract", "multiply")
_OF_FORMULAS = (-1.0, 0.0, 0.5, 1.0, 2.0)
"""Numbers that an op is written with, not measured of a model's data: they are alike in all its layers."""
_STEPS = 255.0
"""Between the least and the greatest byte."""


def numbers_as_operands(expression: Expression, dtypes: Sequence[str]) -> tuple[Expression, list[np.ndarray]]:
    """The expression with its numbers of float32 and int32 as operands.

    Parameters
    ----------
    expression : Expression
    dtypes : sequence of str
        Element types of its operands.

    Returns
    -------
    expression, numbers
        Operands from ``len(dtypes)`` on are the numbers, of shape ().
    """
    rewriter = _Rewriter(dtypes)
    result = Expression(rewriter.rewritten(expression.term))
    return result, [np.asarray(number, dtype) for dtype, number in rewriter.numbers]


class _Rewriter:
    """Terms rewritten from the leaves up; each distinct one once."""

    def __init__(self, dtypes: Sequence[str]) -> None:
        self.dtypes = list(dtypes)
        self.numbers: dict[tuple[str, float], Term] = {}
        self.done: dict[Term, Term] = {}

    def rewritten(self, term: Term) -> Term:
        if term not in self.done:
            args = tuple(self.rewritten(arg) for arg in term.args)
            dtype = Expression(term).dtype(self.dtypes) if term.op in _TAKEN_FROM else ""
            if dtype in ("float32", "int32"):
                args = tuple(self._operand(arg, dtype) for arg in args)
            new = Term(term.op, args, term.params)
            self.done[term] = self._between_bytes(new) if _is_moved_clip(term) else new
        return self.done[term]

    def _operand(self, term: Term, dtype: str) -> Term:
        """A measured number as an operand; any other term as it is."""
        if term.op != "number" or term.params[0] in _OF_FORMULAS:
            return term
        place = len(self.dtypes) + len(self.numbers)
        return self.numbers.setdefault((dtype, term.params[0]), Term("operand", (), (place,)))

    def _between_bytes(self, term: Term) -> Term:
        """``clip(round(x), -zero, 255 - zero)`` with the bounds of bytes, whatever the zero point."""
        zero = self._operand(Term("number", (), (-float(term.params[0]),)), "float32")
        clipped = Term("clip", (Term("add", (term.args[0], zero)),), (0.0, _STEPS))
        return Term("subtract", (clipped, zero))


def _is_moved_clip(term: Term) -> bool:
    """Whether a term holds what has been quantized between bounds that depend on a zero point."""
    if term.op != "clip" or term.args[0].op != "round":
        return False
    low, high = map(float, term.params)
    return high - low == _STEPS and low not in (0.0, -128.0) and -low not in _OF_FORMULAS
