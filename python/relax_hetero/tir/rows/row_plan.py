"""Plans of row programs: the passes over a row, the value that each stores for later ones, and terms once per row."""

from __future__ import annotations

from dataclasses import dataclass

from ...encoding.expression import Expression, Term
from ...encoding.functions import FUNCTIONS
from ...encoding.row_program import RowProgram, operands_of, replaced

_STORE_INSTRUCTIONS = 1.5  # cost of a store; a load costs 1


@dataclass(frozen=True)
class RowPass:
    """One pass over a row.

    Operands of its expressions: those of the program, its reductions, the kept value from an earlier pass
    (`RowPlan.kept`), the one that this pass stores (`RowPlan.keeping`), and terms that are uniform over the row.
    """

    kind: str  # kind of the reduction; empty for the pass that makes the result
    per_row: tuple[tuple[int, Expression], ...]  # terms to compute before the pass, and their operand numbers
    keep: Expression | None  # expression that is stored in the result's row for later passes
    expression: Expression


@dataclass(frozen=True)
class RowPlan:
    """The passes of a program, and the numbers of their additional operands."""

    # The value in the result's row, as loaded and as the pass stores it.
    kept: int
    keeping: int
    passes: tuple[RowPass, ...]
    cost: int  # approximate number of instructions for a vector of a row


def plan_rows(
    program: RowProgram,
    varying: frozenset[int],  # the operands that run along a row; others have one value for all of it
    may_keep: bool,  # whether the result's row can hold a value as exact as it is computed
    in_place: int | None = None,  # the operand that the result's row holds when the kernel starts
    # Whether a quotient by a softmax's sum is a product with its reciprocal, which costs one more rounding.
    reciprocals: bool = False,
) -> RowPlan:
    """Cut a program into passes, one for a reduction and one for the result.

    What takes many instructions and is needed again, an exponential or a sum of operands, is computed by the first
    pass that needs it, and waits in the result's row.
    """
    return _Planner(program, varying, may_keep, in_place, reciprocals).plan()


def is_read_after_keeping(plan: RowPlan, operand: int) -> bool:
    """Return whether a pass reads an operand after a value was stored in the result's row for later passes."""
    has_stored = False
    for row_pass in plan.passes:
        if has_stored and row_pass.keep is not None and operand in operands_of(row_pass.keep):
            return True
        has_stored = has_stored or row_pass.keep is not None
        if has_stored and operand in operands_of(row_pass.expression):
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
        self.hoisted: dict[Term, Term] = {}
        self.terms = [self._simplify(expression.term) for expression in program.expressions]

    def plan(self) -> RowPlan:
        kinds = [*(reduction.kind for reduction in self.program.reductions), ""]
        stored = None if self.in_place is None else _operand(self.in_place)
        passes, cost = [], 0.0
        for number, (kind, term) in enumerate(zip(kinds, self.terms, strict=True)):
            keep = self._best_to_keep(term, self.terms[number + 1 :], stored) if self.may_keep else None
            substitution = {} if stored is None else {stored: _operand(self.kept)}
            cost += (
                self._cost(replaced(term, substitution))
                + 1
                + (_STORE_INSTRUCTIONS if keep is not None or not kind else 0)
            )
            per_row: list[tuple[int, Expression]] = []
            kept = None if keep is None else self._hoist(replaced(keep, substitution), per_row)
            if keep is not None:
                substitution = {**substitution, keep: _operand(self.keeping)}
            expression = self._hoist(replaced(term, substitution), per_row)
            passes.append(RowPass(kind, tuple(per_row), kept, expression))
            stored = keep if keep is not None else stored
        return RowPlan(self.kept, self.keeping, tuple(passes), round(cost))

    def _varies(self, term: Term) -> bool:
        if term.op == "operand":
            index = term.params[0]
            return index in self.varying or index in (self.kept, self.keeping)
        return any(map(self._varies, term.args))

    def _simplify(self, term: Term) -> Term:
        """`term` with ops of fewer instructions where a program allows them.

        A quotient by a root that is uniform over a row becomes a product with its reciprocal, which is finite: the
        difference is one more rounding. An exponential of a difference from the row's maximum is at most 1.
        """
        args = tuple(map(self._simplify, term.args))
        if term.op == "divide" and args[1].op == "sqrt" and self._varies(args[0]) and not self._varies(args[1]):
            return Term("multiply", (args[0], Term("rsqrt", args[1].args)))
        if self.reciprocals and term.op == "divide" and self._varies(args[0]) and self._is_softmax_sum(args[1]):
            return Term("multiply", (args[0], Term("divide", (Term("number", (), (1.0,)), args[1]))))
        if term.op == "exp" and self._is_below_max(term.args[0]):
            return Term("exp_nonpositive", args)
        return Term(term.op, args, term.params)

    def _is_below_max(self, term: Term) -> bool:
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
        return summed.op == "exp" and self._is_below_max(summed.args[0])

    def _best_to_keep(self, term: Term, later: list[Term], stored: Term | None) -> Term | None:
        """The term whose value saves most if this pass stores it; None: the row keeps what is stored, if anything."""
        mark = _operand(self.kept)
        substitution = {} if stored is None else {stored: mark}
        later_terms = [replaced(other, substitution) for other in later]
        best, best_gain = None, 0.0
        for candidate in Expression(replaced(term, substitution)).terms():
            uses = sum(_contains(other, candidate) for other in later_terms)
            if not uses or not candidate.args or not self._varies(candidate):
                continue
            gain = uses * (self._cost(candidate) - 1) - _STORE_INSTRUCTIONS
            if stored is not None:
                remaining = sum(
                    _contains(replaced(other, {candidate: _operand(self.keeping)}), mark) for other in later_terms
                )
                if remaining and self.in_place is not None and stored == _operand(self.in_place):
                    continue  # the operand itself would be overwritten
                gain -= remaining * self._cost(stored)
            if gain > best_gain:
                best, best_gain = candidate, gain
        return best if best is None or stored is None else replaced(best, {mark: stored})

    def _cost(self, term: Term) -> float:
        """Instructions for one vector of the distinct terms below `term`."""
        visited: set[Term] = set()

        def visit(subterm: Term) -> float:
            if subterm in visited or not self._varies(subterm):
                return 0
            visited.add(subterm)
            if subterm.op == "operand":
                return 1
            return FUNCTIONS[subterm.op].cost + sum(map(visit, subterm.args))

        return visit(term)

    def _hoist(self, term: Term, per_row: list[tuple[int, Expression]]) -> Expression:
        """`term` with operands in place of subterms that are uniform over a row, which are appended to `per_row`."""

        def visit(subterm: Term) -> Term:
            if not subterm.args:
                return subterm
            if self._varies(subterm):
                return Term(subterm.op, tuple(map(visit, subterm.args)), subterm.params)
            if subterm not in self.hoisted:
                self.hoisted[subterm] = _operand(self.next)
                per_row.append((self.next, Expression(subterm)))
                self.next += 1
            return self.hoisted[subterm]

        return Expression(visit(term))


def _contains(term: Term, part: Term) -> bool:
    return term == part or any(_contains(arg, part) for arg in term.args)


def _operand(index: int) -> Term:
    return Term("operand", (), (index,))
