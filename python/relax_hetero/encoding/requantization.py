"""Expressions that requantize, with fewer ops: what stands between integer sums and bytes again.

Before, as models write it: sums are scaled, shifted, cut and divided by the result's scale::

    cast(clip(add(round(divide(relu(add(multiply(cast(x0, 'float32'), x1), x2)), 0.05)), 3.0), 0.0, 255.0), 'uint8')

After, with x1 and x2 constants that have taken the division in::

    cast(clip(add(round(add(multiply(cast(x0, 'float32'), x3), x4)), 3.0), 3.0, 255.0), 'uint8')

Where bytes are dequantized again, the number they stand for goes on as the float that it was before it was cast.
Divisors become factors and factors of a factor one, so that results may differ by a unit in the last place of float32
before they are rounded: the integer next to another where a number is half-way between them. Expressions that round
nothing stay.

`numbers_as_operands` then makes operands of numbers, so that layers that differ in scales and zero points alone share a
kernel::

    cast(clip(add(round(multiply(x0, 3.7)), 131.0), 0.0, 255.0), 'uint8')
    cast(clip(add(round(multiply(x0, x1)), x2), 0.0, 255.0), 'uint8')
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .expression import Expression, Term, split_sum

_BYTES = ("int8", "uint8")
_FLOAT = "float32"


def simplify_requantization(
    expression: Expression, dtypes: Sequence[str], constants: Mapping[int, np.ndarray]
) -> tuple[Expression, dict[int, np.ndarray]]:
    """The expression with fewer ops, if it rounds anything.

    Parameters
    ----------
    dtypes : sequence of str
        Element types of its operands.
    constants : mapping
        From number of an operand to its elements, where they are known.

    Returns
    -------
    expression, constants
        Operands from ``len(dtypes)`` on are new constants, which broadcast as those did that they were made of.
    """
    if not any(term.op == "round" for term in expression.terms()):
        return expression, {}
    known = {number: array for number, array in constants.items() if str(array.dtype) == _FLOAT}
    simplifier = _Simplifier(list(dtypes), known)
    result = Expression(simplifier.simplified(expression.term))
    used = {term.params[0] for term in result.terms() if term.op == "operand"}
    made = [number for number in sorted(used) if number >= len(dtypes)]
    places = [Expression.operand(number) for number in range(len(dtypes))]
    places += [Expression.operand(0)] * (simplifier.count - len(dtypes))
    for place, number in enumerate(made, len(dtypes)):
        places[number] = Expression.operand(place)
    return result.substitute(places), {len(dtypes) + i: simplifier.constants[n] for i, n in enumerate(made)}


class _Simplifier:
    """Terms rewritten from the leaves up; each distinct one once."""

    def __init__(self, dtypes: list[str], constants: dict[int, np.ndarray]) -> None:
        self.dtypes, self.constants, self.count = dtypes, dict(constants), len(dtypes)
        self.done: dict[Term, Term] = {}

    def simplified(self, term: Term) -> Term:
        if term not in self.done:
            args = tuple(self.simplified(arg) for arg in term.args)
            self.done[term] = self._rewritten(Term(term.op, args, term.params))
        return self.done[term]

    def _rewritten(self, term: Term) -> Term:
        if term.op in ("multiply", "divide"):
            return self._product(term)
        if term.op == "cast" and term.params == (_FLOAT,):
            return self._as_float(term.args[0]) or term
        if term.op == "round":
            return Term("round", (self._scaled_through(term.args[0]),))
        if term.op == "clip":
            return _without_relu(term)
        return term

    def _product(self, term: Term) -> Term:
        """Factors that are known as one, last."""
        first, second = term.args
        if term.op == "divide":
            factor = self._known(second)
            return term if factor is None or not np.all(factor) else self._times(first, _inverse(factor))
        for value, other in ((first, second), (second, first)):
            factor = self._known(other)
            if factor is not None and self._known(value) is None:
                return self._times(value, factor)
        return term

    def _times(self, term: Term, factor: np.ndarray) -> Term:
        if term.op == "multiply":
            own = self._known(term.args[1])
            if own is not None:
                return Term("multiply", (term.args[0], self._constant(own * factor)))
        return Term("multiply", (term, self._constant(factor)))

    def _scaled_through(self, term: Term) -> Term:
        """A product with a known factor, which goes into what can take it in."""
        factor = self._known(term.args[1]) if term.op == "multiply" else None
        taken = None if factor is None else self._absorbed(term.args[0], factor)
        return term if taken is None else taken

    def _absorbed(self, term: Term, factor: np.ndarray) -> Term | None:
        """``term * factor`` with no op more than `term`, None where that needs one."""
        known = self._known(term)
        if known is not None:
            return self._constant(known * factor)
        if term.op == "multiply":
            own = self._known(term.args[1])
            return None if own is None else Term("multiply", (term.args[0], self._constant(own * factor)))
        if term.op in ("add", "subtract"):
            args = [self._absorbed(arg, factor) for arg in term.args]
            return None if None in args else Term(term.op, tuple(arg for arg in args if arg is not None))
        if term.op == "relu" and np.all(factor > 0):
            inner = self._absorbed(term.args[0], factor)
            return None if inner is None else Term("relu", (inner,))
        return None

    def _as_float(self, term: Term) -> Term | None:
        """The float that an integer term is, exactly; None where it is not known to be one."""
        if term.op == "cast":
            value = term.args[0]
            if term.params[0] not in (*_BYTES, "int32"):
                return None
            if value.op == "operand":
                is_byte = value.params[0] < len(self.dtypes) and self.dtypes[value.params[0]] in _BYTES
                return Term("cast", (value,), (_FLOAT,)) if is_byte and term.params[0] == "int32" else None
            if value.op == "cast":
                return self._as_float(value) if term.params[0] == "int32" else None
            return value if _is_integral(value) else None
        if term.op == "subtract" and term.args[1].op == "number":
            minuend = self._as_float(term.args[0])
            return None if minuend is None else _less(minuend, float(term.args[1].params[0]))
        return None

    def _known(self, term: Term) -> np.ndarray | None:
        if term.op == "number":
            return np.asarray(term.params[0], "float64")
        if term.op == "operand":
            array = self.constants.get(term.params[0])
            return None if array is None else array.astype("float64")
        return None

    def _constant(self, array: np.ndarray) -> Term:
        if array.ndim == 0:
            return Term("number", (), (float(array),))
        self.constants[self.count] = array.astype(_FLOAT)
        self.count += 1
        return Term("operand", (), (self.count - 1,))


def _inverse(factor: np.ndarray) -> np.ndarray:
    return np.asarray(1.0 / factor)


def _is_integral(term: Term) -> bool:
    """True if a float term is a whole number within bounds that a cast to its type keeps: what QuantizeLinear casts."""
    if term.op != "clip":
        return False
    inner, offset = split_sum(term.args[0])
    return inner.op == "round" and all(float(number).is_integer() for number in (offset, *term.params))


def _less(term: Term, number: float) -> Term:
    """``term - number``; of ``clip(add(a, number), low, high)`` without the addition."""
    if term.op == "clip" and term.args[0].op == "add":
        inner, added = term.args[0].args
        if added.op == "number" and added.params[0] == number:
            return Term("clip", (inner,), tuple(float(bound) - number for bound in term.params))
    return Term("subtract", (term, Term("number", (), (number,))))


def _without_relu(term: Term) -> Term:
    """A clip of what is rounded behind a relu: the relu is a bound, too."""
    (inner, offset), (low, high) = split_sum(term.args[0]), term.params
    if inner.op != "round" or inner.args[0].op != "relu" or offset > high:
        return term
    rounded = Term("round", inner.args[0].args)
    moved = Term("add", (rounded, *term.args[0].args[1:])) if term.args[0].op == "add" else rounded
    return Term("clip", (moved,), (max(float(low), offset), high))


_ABSORBED_BY = ("add", "subtract", "multiply")
_OF_FORMULAS = (-1.0, 0.0, 0.5, 1.0, 2.0)
"""Numbers that an op is written with, not measured of a model's data: they are alike in all its layers."""
_STEPS = 255.0
"""Between the least and the greatest byte."""


def numbers_as_operands(expression: Expression, dtypes: Sequence[str]) -> tuple[Expression, list[np.ndarray]]:
    """The expression with its numbers of float32 and int32 as operands.

    Parameters
    ----------
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
            dtype = Expression(term).dtype(self.dtypes) if term.op in _ABSORBED_BY else ""
            if dtype in ("float32", "int32"):
                args = tuple(self._operand(arg, dtype) for arg in args)
            new = Term(term.op, args, term.params)
            self.done[term] = self._between_bytes(new) if _is_reordered_clip(term) else new
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


def _is_reordered_clip(term: Term) -> bool:
    """Return whether a term holds what has been quantized between bounds that depend on a zero point."""
    if term.op != "clip" or term.args[0].op != "round":
        return False
    low, high = map(float, term.params)
    return high - low == _STEPS and low not in (0.0, -128.0) and -low not in _OF_FORMULAS
