"""Elementwise work on encoded tensors, as text: ``"maximum(add(x0, x1), 0.0)"``.

``x0``, ``x1``, ... are operands; numbers are constants of the other arguments' type. The grammar is a subset of
Python's, and Python's own parser reads it. The table `functions.FUNCTIONS` defines every op; `relax_hetero.tir` turns
an expression into vector code, and cancelled encodings turn it back into Relax ops.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, TypeVar

import numpy as np

from ..errors import EncodingError
from .encoding import is_element_type
from .functions import FUNCTIONS

T = TypeVar("T")

_NUMBERS = ("inf", "nan")


@dataclass(frozen=True)
class Term:
    """A node of an expression: an operand, a number, or an op over terms."""

    op: str  # a name of `FUNCTIONS`, "operand" or "number"
    args: tuple[Term, ...] = ()
    params: tuple[Any, ...] = ()  # the operand's index, the number, or the op's parameters

    @cached_property
    def _hash(self) -> int:
        return hash((self.op, self.args, self.params))

    def __hash__(self) -> int:
        return self._hash  # of all terms below, which every look-up would hash again

    def __str__(self) -> str:
        if self.op == "operand":
            return f"x{self.params[0]}"
        if self.op == "number":
            return repr(self.params[0])
        return f"{self.op}({', '.join([*map(str, self.args), *map(repr, self.params)])})"


def split_sum(term: Term) -> tuple[Term, float]:
    """``a`` and the number of ``a + number``; any other term itself and 0."""
    if term.op == "add" and term.args[1].op == "number":
        return term.args[0], float(term.args[1].params[0])
    return term, 0.0


@dataclass(frozen=True)
class Expression:
    """An elementwise function of several operands.

    Attributes
    ----------
    term : Term
        The result.
    """

    term: Term

    def __str__(self) -> str:
        return str(self.term)

    @staticmethod
    def parse(text: str) -> Expression:
        """The expression that `str` wrote; EncodingError for other text.

        Parameters
        ----------
        text : str
            Expression in the form that `str` gives, such as ``maximum(x0, 0.0)``.
        """
        return _parse(text)

    @staticmethod
    def operand(index: int) -> Expression:
        """``x<index>`` alone.

        Parameters
        ----------
        index : int
            Position among the operands.
        """
        return Expression(Term("operand", (), (index,)))

    @property
    def num_operands(self) -> int:
        """One more than the highest operand index."""
        return 1 + max((term.params[0] for term in self.terms() if term.op == "operand"), default=-1)

    def terms(self) -> list[Term]:
        """Every term, arguments before their users; equal terms once."""
        terms: dict[Term, None] = {}

        def visit(term: Term) -> None:
            for arg in term.args:
                visit(arg)
            terms.setdefault(term)

        visit(self.term)
        return list(terms)

    def evaluate(self, operands: Sequence[np.ndarray]) -> np.ndarray:
        """The value of the expression, computed by numpy op by op in the type of the op's operands.

        Parameters
        ----------
        operands : sequence of np.ndarray
            Values of ``x0``, ``x1``, ...
        """

        def apply(op: str, args: list[Any], params: tuple[Any, ...]) -> Any:
            if op == "number":
                return params[0]
            dtype = next(arg.dtype for arg in args[op == "where" :] if isinstance(arg, np.ndarray))
            typed = [arg if isinstance(arg, np.ndarray) else np.asarray(arg, dtype) for arg in args]
            result = np.asarray(FUNCTIONS[op].evaluate(*typed, *params))
            return result if op == "cast" else result.astype(dtype, copy=False)

        with np.errstate(all="ignore"):
            return self.fold([np.asarray(operand) for operand in operands], apply)

    def fold(self, operands: Sequence[T], apply: Callable[[str, list[T], tuple[Any, ...]], T]) -> T:
        """The value under an interpretation: `apply` computes op(args, params) and numbers, equal terms once.

        Parameters
        ----------
        operands : sequence of T
            Values of ``x0``, ``x1``, ...
        apply : callable
            Function ``apply(op, args, params)`` that computes one term.
        """
        values: dict[Term, T] = {}
        for term in self.terms():
            if term.op == "operand":
                values[term] = operands[term.params[0]]
            else:
                values[term] = apply(term.op, [values[arg] for arg in term.args], term.params)
        return values[self.term]

    def substitute(self, replacements: Sequence[Expression]) -> Expression:
        """The expression with operand i replaced by ``replacements[i]``, which fuses expressions.

        Parameters
        ----------
        replacements : sequence of Expression
            Expressions, one for each operand.
        """

        def apply(op: str, args: list[Term], params: tuple[Any, ...]) -> Term:
            return Term(op, tuple(args), params)

        return Expression(self.fold([r.term for r in replacements], apply))

    def dtype(self, operands: Sequence[str]) -> str:
        """Element type of the result for operands of these types; EncodingError where an op's operands differ.

        Parameters
        ----------
        operands : sequence of str
            Element types of ``x0``, ``x1``, ...
        """

        def apply(op: str, args: list[str], params: tuple[Any, ...]) -> str:
            if op == "number":
                return ""
            if op == "cast":
                return str(params[0])
            # A condition is of another type, bool or bytes.
            dtypes = {arg for arg in (args[1:] if op == "where" else args) if arg}
            if len(dtypes) > 1:
                raise EncodingError(f"{op} in expression {self} mixes element types {sorted(dtypes)}; expected one")
            return dtypes.pop() if dtypes else ""

        return self.fold(operands, apply)


@cache
def _parse(text: str) -> Expression:
    try:
        return Expression(_term(ast.parse(text, mode="eval").body, text))
    except SyntaxError as error:
        raise EncodingError(f"{text!r} is not an elementwise expression: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes; nested too deeply
        raise EncodingError(f"{text[:80]!r} is not an elementwise expression: {error}") from error


def _term(tree: ast.expr, text: str) -> Term:
    if isinstance(tree, ast.Name) and re.fullmatch("x[0-9]+", tree.id):
        return Term("operand", (), (int(tree.id[1:]),))
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and not tree.keywords:
        op, function = tree.func.id, FUNCTIONS.get(tree.func.id)
        if function is None or not function.op:
            raise EncodingError(f"expression {text!r}: {op} is not a function of expressions")
        count = function.num_args
        if len(tree.args) != count + function.num_params:
            raise EncodingError(f"expression {text!r}: {op} takes {count + function.num_params} arguments")
        params = tuple((_element_type if op == "cast" else _number)(arg, text) for arg in tree.args[count:])
        return Term(op, tuple(_term(arg, text) for arg in tree.args[:count]), params)
    if isinstance(tree, (ast.Constant, ast.UnaryOp)) or (isinstance(tree, ast.Name) and tree.id in _NUMBERS):
        return Term("number", (), (_number(tree, text),))
    raise EncodingError(f"expression {text!r}: found {ast.unparse(tree)}, expected an operand, a number or an op")


def _number(tree: ast.expr, text: str) -> int | float:
    if isinstance(tree, ast.Name) and tree.id in _NUMBERS:
        return float(tree.id)
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        return -_number(tree.operand, text)
    if isinstance(tree, ast.Constant) and type(tree.value) in (int, float):
        return tree.value  # type: ignore[return-value]
    raise EncodingError(f"expression {text!r}: found {ast.unparse(tree)}, expected a number")


def _element_type(tree: ast.expr, text: str) -> str:
    if isinstance(tree, ast.Constant) and isinstance(tree.value, str) and is_element_type(tree.value):
        return tree.value
    raise EncodingError(f"expression {text!r}: found {ast.unparse(tree)}, expected an element type")
