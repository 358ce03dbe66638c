"""Row programs, as text: ``"r0 = max(x0); r1 = sum(exp(subtract(x0, r0))); divide(exp(subtract(x0, r0)), r1)"``.

A row runs along the last axis. A program computes one result from every row of its operands: reductions in order, each
of an elementwise expression over the operands and the reductions before it, then the expression of the result.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import EncodingError
from .expression import Expression, Term

KINDS = ("sum", "mean", "max", "min", "prod")
"""Kinds of reductions. Maximum and minimum of a row with NaN are NaN, as in numpy."""


@dataclass(frozen=True)
class Reduction:
    """Reduction of a row to one number."""

    kind: str  # one of `KINDS`
    # Expression that is reduced: operands are the program's, followed by the reductions before this one.
    expression: Expression


@dataclass(frozen=True)
class RowProgram:
    """Function of every row of its operands."""

    num_operands: int
    reductions: tuple[Reduction, ...]
    result: Expression  # ``x0`` to ``x<num_operands - 1>`` are the operands, those after them the reductions

    def __str__(self) -> str:
        statements = [f"r{i} = {r.kind}({self._text(r.expression)})" for i, r in enumerate(self.reductions)]
        return "; ".join([*statements, self._text(self.result)])

    @property
    def expressions(self) -> list[Expression]:
        """Expressions of the reductions, then of the result."""
        return [*(reduction.expression for reduction in self.reductions), self.result]

    @staticmethod
    def parse(text: str) -> RowProgram:
        """The program that `str` wrote.

        Raises EncodingError for other text: an unknown kind, a reduction used before its definition, or an operand that
        is never used.
        """
        *statements, last = (part.strip() for part in text.split(";"))
        count = 1 + max(map(int, re.findall(r"\bx([0-9]{1,6})\b", text)), default=-1)
        reductions: list[Reduction] = []
        for number, statement in enumerate(statements):
            match = re.fullmatch(r"r([0-9]+) = ([a-z]+)\((.*)\)", statement)
            if match is None or int(match[1]) != number or match[2] not in KINDS:
                raise EncodingError(
                    f"found {statement!r} in {text!r}, expected 'r{number} = kind(expression)' of {KINDS}"
                )
            reductions.append(Reduction(match[2], _parse(match[3], count, number, text)))
        program = RowProgram(count, tuple(reductions), _parse(last, count, len(reductions), text))
        used = {index for expression in program.expressions for index in operands_of(expression)}
        if not used.issuperset(range(count)) or count == 0:
            raise EncodingError(f"{text!r} uses operands {sorted(used)}, expected all of x0, x1, ... up to the last")
        return program

    def dtype(self, operands: list[str]) -> str:
        """Element type of the result for operands of these types; EncodingError where two differ in one op."""
        types = list(operands)
        for reduction in self.reductions:
            types.append(reduction.expression.dtype(types))
        return self.result.dtype(types)

    def _text(self, expression: Expression) -> str:
        return re.sub(r"\bx([0-9]+)\b", lambda m: self._name(int(m[1])), str(expression))

    def _name(self, index: int) -> str:
        return f"x{index}" if index < self.num_operands else f"r{index - self.num_operands}"


def operands_of(expression: Expression) -> list[int]:
    """The indices of operands that an expression uses, in order."""
    return sorted(term.params[0] for term in expression.terms() if term.op == "operand")


def replaced(term: Term, table: dict[Term, Term]) -> Term:
    """`term` with subterms replaced by those of a table, the outermost first."""
    if term in table:
        return table[term]
    if not term.args:
        return term
    return Term(term.op, tuple(replaced(arg, table) for arg in term.args), term.params)


def _parse(text: str, operands: int, reductions: int, program: str) -> Expression:
    for name in re.findall(r"\br([0-9]+)\b", text):
        if int(name) >= reductions:
            raise EncodingError(f"{program!r} uses r{name} before it is defined")
    return Expression.parse(re.sub(r"\br([0-9]+)\b", lambda m: f"x{operands + int(m[1])}", text))
