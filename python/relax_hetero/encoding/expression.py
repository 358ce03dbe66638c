"""Elementwise work on encoded tensors, as text: ``"maximum(add(x0, x1), 0.0)"``.

``x0``, ``x1``, ... are operands, numbers are constants of the type of what they meet. The grammar is a subset of
Python's, and Python's own parser reads it. What every op computes is said by the table `OPS`; `relax_hetero.tir`
turns an expression into vector code, and cancelled encodings turn it back into Relax ops.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from ..errors import EncodingError
from .encoding import is_element_type

T = TypeVar("T")

# Op name -> number of tensor arguments. Names are those of Relax ops (``relax.add``, ``relax.nn.relu``), so that the
# way there and back is a table look-up.
OPS: dict[str, int] = {
    "add": 2, "subtract": 2, "multiply": 2, "divide": 2, "maximum": 2, "minimum": 2,
    "relu": 1, "gelu": 1, "gelu_tanh": 1, "silu": 1, "sigmoid": 1, "tanh": 1, "erf": 1, "exp": 1, "log": 1,
    "sqrt": 1, "rsqrt": 1, "square": 1, "abs": 1, "negative": 1, "round": 1, "floor": 1, "ceil": 1,
    "leaky_relu": 1, "clip": 1, "cast": 1, "where": 3,
}  # fmt: skip
# Further arguments: numbers, or a dtype for cast.
PARAMETERS: dict[str, int] = {"leaky_relu": 1, "clip": 2, "cast": 1}
_NUMBERS = ("inf", "nan")


@dataclass(frozen=True)
class Term:
    """A node of an expression: an operand, a number, or an op over terms.

    Attributes
    ----------
    op : str
        A name of `OPS`, "operand" or "number".
    args : tuple of Term
    params : tuple
        The operand's index, the number, or the op's parameters.
    """

    op: str
    args: tuple[Term, ...] = ()
    params: tuple[Any, ...] = ()

    def __str__(self) -> str:
        if self.op == "operand":
            return f"x{self.params[0]}"
        if self.op == "number":
            return repr(self.params[0])
        return f"{self.op}({', '.join([*map(str, self.args), *map(repr, self.params)])})"


def split_sum(term: Term) -> tuple[Term, float]:
    """``a`` and the number of ``a + number``; of other terms the term itself and 0."""
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
        seen: dict[Term, None] = {}

        def visit(term: Term) -> None:
            for arg in term.args:
                visit(arg)
            seen.setdefault(term)

        visit(self.term)
        return list(seen)

    def evaluate(self, operands: Sequence[T], apply: Callable[[str, list[T], tuple[Any, ...]], T]) -> T:
        """Fold the expression: `apply` computes op(args, params), and makes numbers; equal terms are computed once.

        Parameters
        ----------
        operands : sequence of T
            Values of ``x0``, ``x1``, ...
        apply : callable
            Function ``apply(op, args, params)`` that computes one term.
        """
        done: dict[Term, T] = {}
        for term in self.terms():
            if term.op == "operand":
                done[term] = operands[term.params[0]]
            else:
                done[term] = apply(term.op, [done[arg] for arg in term.args], term.params)
        return done[self.term]

    def substitute(self, replacements: Sequence[Expression]) -> Expression:
        """The expression with operand i replaced by ``replacements[i]``: how two of them become one.

        Parameters
        ----------
        replacements : sequence of Expression
            Expressions, one for each operand.
        """

        def apply(op: str, args: list[Term], params: tuple[Any, ...]) -> Term:
            return Term(op, tuple(args), params)

        return Expression(self.evaluate([r.term for r in replacements], apply))

    def dtype(self, operands: Sequence[str]) -> str:
        """Element type of the result for operands of these types; EncodingError where two of them differ in one op.

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
            known = {arg for arg in (args[1:] if op == "where" else args) if arg}
            if len(known) > 1:
                raise EncodingError(f"{op} in expression {self} meets element types {sorted(known)}; expected one")
            return known.pop() if known else ""

        return self.evaluate(operands, apply)


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
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.id in OPS and not tree.keywords:
        op = tree.func.id
        count = OPS[op]
        if len(tree.args) != count + PARAMETERS.get(op, 0):
            raise EncodingError(f"expression {text!r}: {op} takes {count + PARAMETERS.get(op, 0)} arguments")
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
