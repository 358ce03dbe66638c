"""Rows of weights in panels as numbers: what a language model's tokens are, from the table of its last product."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.problem import BlockRowsProblem
from ...target.cpu_target import CpuTarget
from ..core.builder import Expr, Function, int64, let, loop, materialize
from ..core.view import OperandView
from ..core.work_split import part, tasks_for
from .weight_unpacking import PanelReader


def block_rows_kernel(problem: BlockRowsProblem, cpu: CpuTarget) -> tirx.PrimFunc:
    """The kernel that unpacks the rows of some indices, parallel over the CPU's cores.

    Its parameters are those that `BlockRowsProblem` says.
    """
    function = Function("block_rows")
    with function:
        weight = OperandView(function, "weight", problem.weight)
        index = OperandView(function, "index", problem.index)
        result = OperandView(function, "result", problem.result)
        with function.body():
            for view in (weight, index, result):
                view.open()
            reader = PanelReader.of_columns(cpu, weight, problem.plan)
            count = result.extents[0]
            work = count * problem.plan.depth if isinstance(count, int) else None
            tasks = tasks_for(cpu.cores, "elements", work)
            with loop(tasks, parallel=tasks > 1) as task:
                first, last = part(count, tasks, task)
                with loop(last - first) as i:
                    _emit_row(problem, reader, index, result, materialize(first + i))
    return function.result


def _emit_row(
    problem: BlockRowsProblem, reader: PanelReader, index: OperandView, result: OperandView, number: Expr
) -> None:
    plan = problem.plan
    asked = tirx.Cast("int64", index.data[number])
    row = materialize(T.max(T.min(asked, int64(problem.rows - 1)), int64(0)))
    panel, column = materialize(row // plan.columns), materialize(row % plan.columns)
    start = materialize(number * plan.depth)

    def block(chain: Expr, size: int) -> None:
        first = materialize(chain * plan.block)
        in_record = materialize(first % plan.span)
        record = materialize(reader.record(panel, first // plan.span))
        outer = reader.outer(record, column)
        inner = materialize(in_record // plan.block)
        scale = reader.scale(record, inner, outer, column)
        least = reader.minimum(record, inner, outer, column)

        def group(place: Expr, steps: int) -> None:
            numbers = reader.group(record, materialize(in_record // plan.group + place), column)
            for step in range(steps):
                value = let(numbers(step))
                value = value if scale is None else value * scale
                value = value if least is None else value + least
                T.buffer_store(result.data, value, [start + first + place * plan.group + step])

        whole, rest = divmod(size, plan.group)
        if whole:
            with loop(whole) as place:
                group(place, plan.group)
        if rest:
            group(tirx.const(whole, "int64"), rest)

    whole, rest = divmod(plan.depth, plan.block)
    if whole:
        with loop(whole) as chain:
            block(chain, plan.block)
    if rest:
        block(tirx.const(whole, "int64"), rest)
