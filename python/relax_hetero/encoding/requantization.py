"""Simplification of requantization: the expression that turns integer sums back into bytes, with fewer ops.

Before, as models write it: sums are scaled, shifted, cut and divided by the result's scale::

    cast(clip(add(round(divide(relu(add(multiply(cast(x0, 'float32'), x1), x2)), 0.05)), 3.0), 0.0, 255.0), 'uint8')

After, with constants x3 and x4 that include the division::

    cast(clip(add(round(add(multiply(cast(x0, 'float32'), x3), x4)), 3.0), 3.0, 255.0), 'uint8')

A cast to bytes and back to float is removed: the float is used as it was before the cast. Divisions become
multiplications and successive factors are merged, so that results may differ by a unit in the last place of float32
before rounding, that is by one integer where a number is half-way between two. Expressions without a rounding are not
changed.

`numbers_as_operands` then turns numbers into operands, so that layers that differ only in scales and zero points share
a kernel::

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
    """The expression with fewer ops, if it has a rounding.

    `dtypes`: element types of the expression's operands. `constants`: index of each constant operand, and its elements.
    Operands from ``len(dtypes)`` on are new constants, which broadcast like those that they replace.
    """
    if not any(term.op == "round" for term in expression.terms()):
        return expression, {}
    floats = {index: array for index, array in constants.items() if str(array.dtype) == _FLOAT}
    simplifier = _Simplifier(list(dtypes), floats)
    result = Expression(simplifier.simplified(expression.term))
    used = {term.params[0] for term in result.terms() if term.op == "operand"}
    new_constants = [index for index in sorted(used) if index >= len(dtypes)]
    operands = [Expression.operand(index) for index in range(len(dtypes))]
    operands += [Expression.operand(0)] * (simplifier.count - len(dtypes))
    for new_index, index in enumerate(new_constants, len(dtypes)):
        operands[index] = Expression.operand(new_index)
    return result.substitute(operands), {len(dtypes) + i: simplifier.constants[n] for i, n in enumerate(new_constants)}


class _Simplifier:
    """Rewriter of terms from the leaves up; each distinct term once."""

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
        """A product with its constant factors merged into one, as the second argument."""
        first, second = term.args
        if term.op == "divide":
            factor = self._constant_value(second)
            return term if factor is None or not np.all(factor) else self._times(first, np.asarray(1.0 / factor))
        for value, other in ((first, second), (second, first)):
            factor = self._constant_value(other)
            if factor is not None and self._constant_value(value) is None:
                return self._times(value, factor)
        return term

    def _times(self, term: Term, factor: np.ndarray) -> Term:
        if term.op == "multiply":
            scale = self._constant_value(term.args[1])
            if scale is not None:
                return Term("multiply", (term.args[0], self._constant(scale * factor)))
        return Term("multiply", (term, self._constant(factor)))

    def _scaled_through(self, term: Term) -> Term:
        """A product with a constant factor, which is absorbed by the other argument where that is possible."""
        factor = self._constant_value(term.args[1]) if term.op == "multiply" else None
        product = None if factor is None else self._absorbed(term.args[0], factor)
        return term if product is None else product

    def _absorbed(self, term: Term, factor: np.ndarray) -> Term | None:
        """``term * factor`` with as many ops as `term`; None where it takes more."""
        value = self._constant_value(term)
        if value is not None:
            return self._constant(value * factor)
        if term.op == "multiply":
            scale = self._constant_value(term.args[1])
            return None if scale is None else Term("multiply", (term.args[0], self._constant(scale * factor)))
        if term.op in ("add", "subtract"):
            args = [self._absorbed(arg, factor) for arg in term.args]
            return None if None in args else Term(term.op, tuple(arg for arg in args if arg is not None))
        if term.op == "relu" and np.all(factor > 0):
            inner = self._absorbed(term.args[0], factor)
            return None if inner is None else Term("relu", (inner,))
        return None

    def _as_float(self, term: Term) -> Term | None:
        """A float term that is exactly equal to an integer term; None without one."""
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
            return None if minuend is None else _subtract(minuend, float(term.args[1].params[0]))
        return None

    def _constant_value(self, term: Term) -> np.ndarray | None:
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


def _is_integral(term: Term) -> bool:
    """True if a float term is a whole number within the bounds of its cast, as QuantizeLinear clips it."""
    if term.op != "clip":
        return False
    inner, offset = split_sum(term.args[0])
    return inner.op == "round" and all(float(number).is_integer() for number in (offset, *term.params))


def _subtract(term: Term, number: float) -> Term:
    """``term - number``; for ``clip(add(a, number), low, high)`` the clip without the addition."""
    if term.op == "clip" and term.args[0].op == "add":
        inner, added = term.args[0].args
        if added.op == "number" and added.params[0] == number:
            return Term("clip", (inner,), tuple(float(bound) - number for bound in term.params))
    return Term("subtract", (term, Term("number", (), (number,))))


def _without_relu(term: Term) -> Term:
    """A clip of a rounded relu, with the relu as the clip's lower bound."""
    (inner, offset), (low, high) = split_sum(term.args[0]), term.params
    if inner.op != "round" or inner.args[0].op != "relu" or offset > high:
        return term
    rounded = Term("round", inner.args[0].args)
    shifted = Term("add", (rounded, *term.args[0].args[1:])) if term.args[0].op == "add" else rounded
    return Term("clip", (shifted,), (max(float(low), offset), high))


_OPS_WITH_NUMBERS = ("add", "subtract", "multiply")
_FORMULA_CONSTANTS = (-1.0, 0.0, 0.5, 1.0, 2.0)
"""Numbers of a formula, not measured on a model's data: they are the same in all its layers."""
_BYTE_RANGE = 255.0  # difference of the maximum and the minimum byte


def numbers_as_operands(expression: Expression, dtypes: Sequence[str]) -> tuple[Expression, list[np.ndarray]]:
    """The expression with its float32 and int32 numbers as operands.

    `dtypes`: element types of the expression's operands. Operands from ``len(dtypes)`` on are the numbers, of shape ().
    """
    rewriter = _Rewriter(dtypes)
    result = Expression(rewriter.rewritten(expression.term))
    return result, [np.asarray(number, dtype) for dtype, number in rewriter.numbers]


class _Rewriter:
    """Rewriter of terms from the leaves up; each distinct term once."""

    def __init__(self, dtypes: Sequence[str]) -> None:
        self.dtypes = list(dtypes)
        self.numbers: dict[tuple[str, float], Term] = {}
        self.done: dict[Term, Term] = {}

    def rewritten(self, term: Term) -> Term:
        if term not in self.done:
            args = tuple(self.rewritten(arg) for arg in term.args)
            dtype = Expression(term).dtype(self.dtypes) if term.op in _OPS_WITH_NUMBERS else ""
            if dtype in ("float32", "int32"):
                args = tuple(self._operand(arg, dtype) for arg in args)
            new = Term(term.op, args, term.params)
            self.done[term] = self._clip_to_bytes(new) if _is_reordered_clip(term) else new
        return self.done[term]

    def _operand(self, term: Term, dtype: str) -> Term:
        """A measured number as an operand; any other term unchanged."""
        if term.op != "number" or term.params[0] in _FORMULA_CONSTANTS:
            return term
        index = len(self.dtypes) + len(self.numbers)
        return self.numbers.setdefault((dtype, term.params[0]), Term("operand", (), (index,)))

    def _clip_to_bytes(self, term: Term) -> Term:
        """``clip(round(x), -zero, 255 - zero)`` with constant bounds, so that the zero point is an operand."""
        zero = self._operand(Term("number", (), (-float(term.params[0]),)), "float32")
        clipped = Term("clip", (Term("add", (term.args[0], zero)),), (0.0, _BYTE_RANGE))
        return Term("subtract", (clipped, zero))


def _is_reordered_clip(term: Term) -> bool:
    """Return whether a term clips rounded numbers to bounds that depend on a zero point."""
    if term.op != "clip" or term.args[0].op != "round":
        return False
    low, high = map(float, term.params)
    return high - low == _BYTE_RANGE and low not in (0.0, -128.0) and -low not in _FORMULA_CONSTANTS
