"""Dequantized rows of packed weights, such as token embeddings from the table of a language model's last product."""

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
    """The kernel that dequantizes the rows of some indices, parallel over the CPU's cores; see `BlockRowsProblem`."""
    with Function("block_rows") as function:
        weight = OperandView(function, "weight", problem.weights[0])
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
    index_value = tirx.Cast("int64", index.data[number])
    row = materialize(T.max(T.min(index_value, int64(problem.rows - 1)), int64(0)))
    panel, column = materialize(row // plan.columns), materialize(row % plan.columns)
    start = materialize(number * plan.depth)

    def block(chain: Expr, size: int) -> None:
        first = materialize(chain * plan.block)
        in_superblock = materialize(first % plan.superblock_size)
        superblock = materialize(reader.superblock(panel, first // plan.superblock_size))
        outer = reader.outer(superblock, column)
        inner = materialize(in_superblock // plan.block)
        scale = reader.scale(superblock, inner, outer, column)
        minimum = reader.minimum(superblock, inner, outer, column)

        def group(group_index: Expr, steps: int) -> None:
            numbers = reader.group(superblock, materialize(in_superblock // plan.group + group_index), column)
            for step in range(steps):
                value = let(numbers(step))
                value = value if scale is None else value * scale
                value = value if minimum is None else value + minimum
                T.buffer_store(result.data, value, [start + first + group_index * plan.group + step])

        whole, rest = divmod(size, plan.group)
        if whole:
            with loop(whole) as group_index:
                group(group_index, plan.group)
        if rest:
            group(tirx.const(whole, "int64"), rest)

    whole, rest = divmod(plan.depth, plan.block)
    if whole:
        with loop(whole) as chain:
            block(chain, plan.block)
    if rest:
        block(tirx.const(whole, "int64"), rest)
