"""Kernels on rows: softmax, norms, reductions along the last axis and elementwise work around them.

Every pass reads a row from the L1 cache again, which is cheap; expensive terms are computed once and stored in the
result's row (`row_plan`). Rows are shared among the cores.
"""

from __future__ import annotations

from math import prod
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.expression import Expression, Term
from ...encoding.problem import RowPhase, RowsProblem
from ...encoding.row_program import Reduction, RowProgram
from ...errors import EncodingError
from ...target.cpu_target import CpuTarget
from ..core.builder import Expr, Function, ceil_div, loop, materialize
from ..core.ties import with_ties
from ..core.view import OperandView, extent_of
from ..core.work_split import is_worth_tasks, part, unravel
from ..math.casts import computed_in
from .row_code import RowSpec, RowWriter
from .row_plan import is_read_after_keeping, plan_rows

_ROW_COST = 20
"""Instructions of a reduction besides those on vectors: the lanes of the last vector are reduced in sequence."""


def rows_kernel(problem: RowsProblem, cpu: CpuTarget) -> tirx.PrimFunc:
    """The kernel of a row program, parallel over the CPU's cores, with the parameters of `RowsProblem`.

    Raises EncodingError if an operand is not row-major, or an op does not exist for its type.
    """
    if not all(operand.layout.is_identity for operand in problem.parameters):
        raise EncodingError(f"rows {problem.program}: found a packed operand, expected row-major ones")
    with Function("rows") as function:
        operands = [OperandView(function, f"x{i}", operand) for i, operand in enumerate(problem.operands)]
        result = OperandView(function, "result", problem.result)
        views = [*operands, result]
        names = merge_rows(views, [name for name in result.index_map if name.startswith("d")])
        wide = [view for view in operands if view.runs_along("n")]
        if not wide:
            raise EncodingError(f"rows {problem.program}: found no operand that runs along the rows")
        n = extent_of(wide, "n")
        lanes = _lanes(views, cpu)
        program = in_single(problem.program)
        plan = plan_rows(
            program,
            frozenset(i for i, view in enumerate(operands) if view.runs_along("n")),
            may_keep=result.runs_along("n") and _holds_floats(problem.result.dtype),
        )
        with function.body():
            for view in views:
                view.open(raw=view.dtype in ("bfloat16", "bool"))
            code = RowSpec(program, plan, operands, result, lanes, n)
            emit_rows(code, names, cpu)
    last = len(operands)
    return with_ties(
        function.result,
        [
            (number, last)
            for number, operand in enumerate(problem.operands)
            if operand == problem.result and not is_read_after_keeping(plan, number)
        ],
    )


def phase_code(
    phase: RowPhase, phase_operands: list[OperandView], result: OperandView, cpu: CpuTarget, n: Expr
) -> RowSpec:
    """The code of a row phase on a product's result, in place.

    `phase_operands`, `result`: open views of the phase's operands, and of the result with the product's rows. `n`:
    elements of a row.
    """
    operands = [*phase_operands[: phase.product], result, *phase_operands[phase.product :]]
    varying = frozenset(i for i, view in enumerate(operands) if view.runs_along("n"))
    program = in_single(phase.program)
    plan = plan_rows(program, varying, _holds_floats(result.dtype), phase.product)
    return RowSpec(program, plan, operands, result, _lanes(operands, cpu), n)


def _lanes(views: list[OperandView], cpu: CpuTarget) -> int:
    """Lanes of vectors in which everything, bytes included, is computed in floats."""
    return min(cpu.lanes(dtype) for dtype in ("float32", *(computed_in(view.dtype) for view in views)))


def _holds_floats(dtype: str) -> bool:
    """Return whether rows of a type can store intermediate values without rounding."""
    return dtype in ("float32", "float64")


def in_single(program: RowProgram) -> RowProgram:
    """The program with a cast back to float32 after every cast to a 16-bit float, except that the store does the last.

    Operands of 16-bit floats are computed in float32 too.
    """

    def apply(op: str, args: list[Term], params: tuple[Any, ...]) -> Term:
        term = Term(op, tuple(args), params)
        narrow = op == "cast" and computed_in(params[0]) != params[0]
        return Term("cast", (term,), (computed_in(params[0]),)) if narrow else term

    def widened(expression: Expression) -> Expression:
        operands = [Expression.operand(index).term for index in range(expression.num_operands)]
        return Expression(expression.fold(operands, apply))

    reductions = tuple(Reduction(r.kind, widened(r.expression)) for r in program.reductions)
    last = program.result.term
    is_rounding = last.op == "cast" and last.args[0].args and computed_in(last.params[0]) != last.params[0]
    result = Expression(last.args[0]) if is_rounding else program.result
    return RowProgram(program.num_operands, reductions, widened(result))


def merge_rows(views: list[OperandView], names: list[str]) -> list[str]:
    """Merge neighbouring dimensions wherever every operand has both or neither; return the remaining ones."""
    remaining = list(names)
    for first, second in zip(names, names[1:], strict=False):
        if all(_can_merge(view, first, second) for view in views):
            for view in views:
                view.merge(first, second)
            remaining.remove(first)
    return remaining


def _can_merge(view: OperandView, first: str, second: str) -> bool:
    if view.runs_along(first) and view.runs_along(second):
        return view.index_map.index(first) + 1 == view.index_map.index(second)
    return not view.runs_along(first) and not view.runs_along(second)


def emit_rows(code: RowSpec, names: list[str], cpu: CpuTarget) -> None:
    """The loops over all rows, whose positions run along the dimensions `names`, shared by the CPU's cores."""
    extents = {name: materialize(extent_of([*code.operands, code.result], name)) for name in names}
    total: Expr = prod(extents.values())
    if any(isinstance(extent, int) and extent == 0 for extent in (*extents.values(), code.n)):
        # Reductions of empty rows never reach a kernel: shapes are checked before.
        T.evaluate(0)
        return
    total = materialize(total)
    tasks = _tasks(code, total, cpu.cores)
    with loop(tasks, parallel=tasks > 1) as task:
        row = RowWriter(code)
        first, last = part(total, tasks, task)
        with loop(materialize(last - first)) as number:
            coordinates = unravel(
                materialize(first + number), list(extents.values()), place=materialize, rest=materialize
            )
            row.emit(dict(zip(extents, coordinates, strict=True)))


def _tasks(code: RowSpec, total: Expr, cores: int) -> int:
    """One task for each core, or one for rows that are known to be too few, or too short."""
    if cores == 1 or (isinstance(total, int) and total < cores):
        return 1
    if not isinstance(total, int) or not isinstance(code.n, int):
        return cores
    work = total * (-(-code.n // code.lanes) * code.plan.cost + _ROW_COST * len(code.plan.passes))
    return cores if is_worth_tasks("vector instructions a task", ceil_div(work, cores)) else 1
