"""How a program of rows is computed: passes over a row, what each keeps for the next, what is computed once a row."""

from __future__ import annotations

from dataclasses import dataclass

from ...encoding.expression import Expression, Term
from ...encoding.functions import FUNCTIONS
from ...encoding.row_program import RowProgram, operands_of, replaced

# Instructions; a load is one.
_STORE = 1.5


@dataclass(frozen=True)
class RowPass:
    """One pass over a row.

    Operands of its expressions: those of the program, its reductions, the kept value as it was (`RowPlan.kept`), as
    this pass makes it (`RowPlan.keeping`), and terms that are the same for all of the row.

    Attributes
    ----------
    kind : str
        Kind of the reduction; empty for the pass that makes the result.
    per_row : tuple of (int, Expression)
        Terms to compute before the pass, and their operand numbers.
    keep : Expression or None
        Expression that is stored in the result's row for later passes.
    """

    kind: str
    per_row: tuple[tuple[int, Expression], ...]
    keep: Expression | None
    expression: Expression


@dataclass(frozen=True)
class RowPlan:
    """The passes of a program, and what their operands are numbered from.

    Attributes
    ----------
    kept, keeping : int
        The value in the result's row, as loaded and as this pass makes it.
    cost : int
        Instructions for a vector of a row, roughly.
    """

    kept: int
    keeping: int
    passes: tuple[RowPass, ...]
    cost: int


def plan_rows(
    program: RowProgram,
    varying: frozenset[int],
    may_keep: bool,
    in_place: int | None = None,
    reciprocals: bool = False,
) -> RowPlan:
    """Cut a program into passes, one for a reduction and one for the result.

    What takes many instructions and is needed again, an exponential or a sum of operands, is computed by the first
    pass that needs it, and waits in the result's row.

    Parameters
    ----------
    varying : frozenset of int
        The operands that run along a row; others have one value for all of it.
    may_keep : bool
        Whether the result's row can hold a value as exact as it is computed.
    in_place : int, optional
        The operand that the result's row holds when the kernel starts.
    reciprocals : bool
        Whether a quotient by a softmax's sum is a product with its reciprocal, which costs one more rounding.
    """
    return _Planner(program, varying, may_keep, in_place, reciprocals).plan()


def is_read_after_keeping(plan: RowPlan, operand: int) -> bool:
    """Return whether an element of an operand is read once something waits for a later pass in the result's row."""
    keeps = False
    for step in plan.passes:
        if keeps and step.keep is not None and operand in operands_of(step.keep):
            return True
        keeps = keeps or step.keep is not None
        if keeps and operand in operands_of(step.expression):
            return True
    return False


class _Planner:
    def __init__(
        self,
        program: RowProgram,
        varying: frozenset[int],
        may_keep: bool,
        in_place: int | None,
        reciprocals: bool,
    ) -> None:
        self.reciprocals = reciprocals
        self.program, self.varying, self.may_keep, self.in_place = program, varying, may_keep, in_place
        self.kept = program.num_operands + len(program.reductions)
        self.keeping = self.kept + 1
        self.next = self.kept + 2
        self.known: dict[Term, Term] = {}  # what is computed once a row already
        self.terms = [self._cheaper(expression.term) for expression in program.expressions]

    def plan(self) -> RowPlan:
        kinds = [*(reduction.kind for reduction in self.program.reductions), ""]
        held = None if self.in_place is None else _operand(self.in_place)
        passes, cost = [], 0.0
        for number, (kind, term) in enumerate(zip(kinds, self.terms, strict=True)):
            keep = self._best(term, self.terms[number + 1 :], held) if self.may_keep else None
            own = {} if held is None else {held: _operand(self.kept)}
            cost += self._cost(replaced(term, own)) + 1 + (_STORE if keep is not None or not kind else 0)
            per_row: list[tuple[int, Expression]] = []
            kept = None if keep is None else self._hoisted(replaced(keep, own), per_row)
            if keep is not None:
                own = {**own, keep: _operand(self.keeping)}
            expression = self._hoisted(replaced(term, own), per_row)
            passes.append(RowPass(kind, tuple(per_row), kept, expression))
            held = keep if keep is not None else held
        return RowPlan(self.kept, self.keeping, tuple(passes), round(cost))

    def _varies(self, term: Term) -> bool:
        if term.op == "operand":
            index = term.params[0]
            return index in self.varying or index in (self.kept, self.keeping)
        return any(map(self._varies, term.args))

    def _cheaper(self, term: Term) -> Term:
        """`term` with ops of fewer instructions where a program allows them.

        A quotient by a root that is the same for all of a row is a product with its reciprocal: a root is far from
        what has no finite reciprocal, so that the difference is one more rounding. An exponential of what the greatest
        of the row was subtracted from is not above 1.
        """
        args = tuple(map(self._cheaper, term.args))
        if term.op == "divide" and args[1].op == "sqrt" and self._varies(args[0]) and not self._varies(args[1]):
            return Term("multiply", (args[0], Term("rsqrt", args[1].args)))
        if self.reciprocals and term.op == "divide" and self._varies(args[0]) and self._is_softmax_sum(args[1]):
            return Term("multiply", (args[0], Term("divide", (Term("number", (), (1.0,)), args[1]))))
        if term.op == "exp" and self._is_below_greatest(term.args[0]):
            return Term("exp_nonpositive", args)
        return Term(term.op, args, term.params)

    def _is_below_greatest(self, term: Term) -> bool:
        if term.op != "subtract" or term.args[1].op != "operand":
            return False
        number = term.args[1].params[0] - self.program.num_operands
        if not 0 <= number < len(self.program.reductions):
            return False
        reduction = self.program.reductions[number]
        return reduction.kind == "max" and reduction.expression.term == term.args[0]

    def _is_softmax_sum(self, term: Term) -> bool:
        """Return whether a term is a sum of exponentials of which one is 1, so that it has a finite reciprocal."""
        number = term.params[0] - self.program.num_operands if term.op == "operand" else -1
        if not 0 <= number < len(self.program.reductions) or self.program.reductions[number].kind != "sum":
            return False
        summed = self.program.reductions[number].expression.term
        return summed.op == "exp" and self._is_below_greatest(summed.args[0])

    def _best(self, term: Term, later: list[Term], held: Term | None) -> Term | None:
        """The term that it pays most to keep from this pass on; None: what is held stays, if anything is."""
        mark = _operand(self.kept)
        own = {} if held is None else {held: mark}
        rest = [replaced(other, own) for other in later]
        best, best_gain = None, 0.0
        for candidate in Expression(replaced(term, own)).terms():
            uses = sum(_contains(other, candidate) for other in rest)
            if not uses or not candidate.args or not self._varies(candidate):
                continue
            gain = uses * (self._cost(candidate) - 1) - _STORE
            if held is not None:
                left = sum(_contains(replaced(other, {candidate: _operand(self.keeping)}), mark) for other in rest)
                if left and self.in_place is not None and held == _operand(self.in_place):
                    continue  # the operand itself would be overwritten
                gain -= left * self._cost(held)
            if gain > best_gain:
                best, best_gain = candidate, gain
        return best if best is None or held is None else replaced(best, {mark: held})

    def _cost(self, term: Term) -> float:
        """Instructions for one vector of the distinct terms below `term`."""
        done: set[Term] = set()

        def visit(part: Term) -> float:
            if part in done or not self._varies(part):
                return 0
            done.add(part)
            if part.op == "operand":
                return 1
            return FUNCTIONS[part.op].cost + sum(map(visit, part.args))

        return visit(term)

    def _hoisted(self, term: Term, per_row: list[tuple[int, Expression]]) -> Expression:
        """`term` with what is the same for all of a row replaced by operands, which `per_row` gets."""

        def visit(part: Term) -> Term:
            if not part.args:
                return part
            if self._varies(part):
                return Term(part.op, tuple(map(visit, part.args)), part.params)
            if part not in self.known:
                self.known[part] = _operand(self.next)
                per_row.append((self.next, Expression(part)))
                self.next += 1
            return self.known[part]

        return Expression(visit(term))


def _contains(term: Term, part: Term) -> bool:
    return term == part or any(_contains(arg, part) for arg in term.args)


def _operand(index: int) -> Term:
    return Term("operand", (), (index,))
