"""Loops around the products of blocks of rows by panels: of one matrix, and of a mixture of experts.

The loops, outermost first: tasks, blocks of rows, which are prepared first, panels of columns, tiles of rows.

If each row selects a matrix (mixture of experts), a row of the result is a pair of a token and one of its experts.
Every task sorts all pairs by expert, which takes a few microseconds and saves a barrier; the pairs of an expert are
then rows of a product like any other. A panel is read once for all rows of a block of its expert, and panels of unused
experts are not read. A task has a contiguous range of the used experts' panels, which it reads sequentially, and all
ranges take about the same time for any number of experts and tasks: `PANEL_ROWS` is the time of a panel itself. Pairs
of a negative number, whose expert is on another device, are left out.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...target.cpu_target import CpuTarget
from ..core.builder import Expr, ceil_div, int64, loop, materialize, minimum, scratch, when
from ..core.view import OperandView
from ..core.work_split import loop_blocks, split_work, tasks_for
from .block_spec import PanelProduct, RowBlock

PANEL_ROWS = 8  # time of reading and unpacking a panel, in rows that are multiplied by it

TOKEN_BLOCK = 4096
"""Number of tokens that are sorted together: more give more rows of each expert, whose weights are unpacked once for
all of them, and take more memory."""


def emit_loops(product: PanelProduct, cpu: CpuTarget, index: OperandView | None) -> None:
    """Write the product of all rows by one matrix, or by those that `index`, ``(tokens, used)``, selects for each."""
    if index is None:
        _emit_dense_loops(product, cpu)
    else:
        _ExpertLoops(product, index).write(cpu)


def _emit_dense_loops(product: PanelProduct, cpu: CpuTarget) -> None:
    """Write the product of all rows by one matrix."""
    spec, problem, rows = product.spec, product.spec.problem, product.tile_rows
    tiles, panels = materialize(ceil_div(spec.m, rows)), ceil_div(problem.columns, problem.panel)
    split = split_work(cpu.cores, 1, tiles, panels, (rows, problem.panel), product.work)
    block_tiles = max(1, product.block_bytes // (product.row_bytes * rows))
    if isinstance(tiles, int):
        block_tiles = min(block_tiles, tiles)
    with loop(split.tasks, parallel=split.tasks > 1) as task:
        product.allocate(block_tiles * rows)
        _, (first_m, last_m), (first_n, last_n) = split.ranges(task, 1, tiles, panels)
        with loop_blocks(first_m, last_m, block_tiles) as (begin, end):
            block = RowBlock(materialize(begin * rows), materialize(minimum(end * rows, spec.m)), spec.m)
            _emit_block(product, block, spec.m, first_n, last_n)
        product.release()


def _emit_block(product: PanelProduct, block: RowBlock, count: Expr, first: Expr, last: Expr) -> None:
    with loop(block.end - block.begin) as number:
        product.prepare(materialize(block.lhs_row(materialize(block.begin + number))), number)
    product.multiply(block, count, first, last)


class _ExpertLoops:
    """Writer of the loops over the experts of a mixture, and over their rows and panels."""

    def __init__(self, product: PanelProduct, index: OperandView) -> None:
        self.product, self.index = product, index
        self.tokens, self.used = index.extents
        problem, rows = product.spec.problem, product.tile_rows
        self.experts, self.panels = problem.experts, ceil_div(problem.columns, problem.panel)
        self.has_row_per_expert = problem.has_row_per_expert
        self.block_tokens = minimum(self.tokens, TOKEN_BLOCK) if isinstance(self.tokens, int) else TOKEN_BLOCK
        self.pairs = self.block_tokens * self.used
        tiles = max(1, product.block_bytes // (product.row_bytes * rows))
        self.block_rows = rows * min(tiles, ceil_div(self.pairs, rows))

    def write(self, cpu: CpuTarget) -> None:
        problem = self.product.spec.problem
        work = self.tokens * self.used * problem.columns * problem.depth if isinstance(self.tokens, int) else None
        tasks = tasks_for(cpu.cores, "multiply-adds", work)
        with loop(tasks, parallel=tasks > 1) as task:
            self.product.allocate(self.block_rows)
            self.order = scratch(self.pairs, "int32")
            self.offsets = scratch(self.experts + 1, "int32")
            self.counters = scratch(2, "int64")
            with loop(ceil_div(self.tokens, self.block_tokens)) as block:
                first = materialize(block * self.block_tokens * self.used)
                count = materialize(minimum(self.tokens * self.used - first, self.pairs))
                total = self._sort_pairs(first, count)
                ends = [materialize((task + i) * total // tasks) for i in (0, 1)]
                self._emit_experts(first, ends)
            self.product.release()

    def _sort_pairs(self, first: Expr, count: Expr) -> Expr:
        """Sort `count` pairs from `first` on with counting sort, and return the time of all used experts' panels."""
        one, zero = tirx.const(1, "int32"), tirx.const(0, "int32")
        end, time = int64(0), int64(1)
        for counter in (end, time):
            T.buffer_store(self.counters, int64(0), [counter])
        with loop(self.experts + 1) as expert:
            T.buffer_store(self.offsets, zero, [expert])
        with loop(count) as pair:
            expert = self._expert(materialize(first + pair))
            with when(expert >= 0):
                T.buffer_store(self.offsets, self.offsets[expert + 1] + one, [expert + 1])
        with loop(self.experts) as expert:
            rows = materialize(tirx.Cast("int64", self.offsets[expert + 1]))
            T.buffer_store(self.offsets, tirx.Cast("int32", self.counters[end]), [expert + 1])
            T.buffer_store(self.counters, self.counters[end] + rows, [end])
            T.buffer_store(self.counters, self.counters[time] + self._panel_time(rows), [time])
        with loop(count) as pair:
            expert = self._expert(materialize(first + pair))
            with when(expert >= 0):
                T.buffer_store(self.order, tirx.Cast("int32", pair), [tirx.Cast("int64", self.offsets[expert + 1])])
                T.buffer_store(self.offsets, self.offsets[expert + 1] + one, [expert + 1])
        return materialize(self.counters[time] * self.panels)

    def _expert(self, pair: Expr) -> Expr:
        """Expert of a pair, negative for none; numbers above are the last expert."""
        return materialize(T.min(tirx.Cast("int64", self.index.data[pair]), int64(self.experts - 1)))

    def _panel_time(self, rows: Expr) -> Expr:
        """Time of a panel of an expert with so many rows; an expert without rows takes none."""
        return rows + PANEL_ROWS * T.min(rows, int64(1))

    def _emit_experts(self, first_pair: Expr, ends: list[Expr]) -> None:
        """Multiply the panels in a task's range of times."""
        start = int64(0)
        T.buffer_store(self.counters, int64(0), [start])
        with loop(self.experts) as expert:
            begin, end = (materialize(tirx.Cast("int64", self.offsets[expert + i])) for i in (0, 1))
            with when(begin < end):
                time, before = materialize(self._panel_time(end - begin)), materialize(self.counters[start])
                T.buffer_store(self.counters, before + time * self.panels, [start])
                # A panel belongs to the range in which it begins.
                first, last = (
                    materialize(T.max(T.min((at - before + time - 1) // time, int64(self.panels)), int64(0)))
                    for at in ends
                )
                with when(first < last):
                    self._emit_expert(first_pair, expert, (begin, end), (first, last))

    def _emit_expert(self, first_pair: Expr, expert: Expr, rows: tuple[Expr, Expr], panels: tuple[Expr, Expr]) -> None:
        """Multiply the sorted pairs `rows` by some panels of their expert."""

        def result_row(row: Expr) -> Expr:
            return materialize(first_pair + tirx.Cast("int64", self.order[row]))

        def lhs_row(row: Expr) -> Expr:
            pair = result_row(row)
            return pair if self.has_row_per_expert else materialize(pair // self.used)

        packed = materialize(expert * self.panels)
        with loop_blocks(*rows, self.block_rows) as (begin, end):
            block = RowBlock(begin, end, end, packed, lhs_row, result_row)
            _emit_block(self.product, block, materialize(end - begin), *panels)
