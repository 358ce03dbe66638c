"""Products of rows by one of many matrices each: the experts that the tokens of a language model choose.

A row of the result is a pair of a token and one of its experts. Every task sorts the pairs by expert, which takes a
few microseconds and spares tasks from waiting for each other; then the rows of an expert go over its panels in tiles,
as the rows of any product do. A panel is read once for all rows of its expert, and the panels of experts that nobody
chose are not read.

The loops, from outside: tasks, blocks of tokens, panels of columns, experts that were chosen, tiles of rows. A task has
an equal share of pairs of panel and expert, panels outermost, so that experts of many rows are shared among tasks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...target.cpu_target import CpuTarget
from ..core.builder import Expr, Registers, ceil_div, int64, loop, materialize, minimum
from ..core.view import OperandView
from ..core.work_split import part, tasks_for
from .block_spec import BlockSpec
from .block_tile import BlockSums, BlockTile, emit_tile, rows_of_a_tile
from .matmul_spec import choose, row_cases
from .matmul_tile import IN_FLIGHT
from .row_sums import emit_row_sums

TOKENS_OF_A_BLOCK = 512
"""Number of tokens that are sorted at once: more find more rows of each expert, and take more memory."""


def emit_expert_loops(kernel: BlockSpec, cpu: CpuTarget, index: OperandView) -> None:
    """Write the loops; the index says the expert of each row of the result."""
    tokens, used = index.extents
    if 0 in (tokens, used, kernel.problem.columns):
        T.evaluate(0)
        return
    _Loops(kernel, cpu, index, tokens, used).write()


@dataclass(frozen=True)
class _Sorted:
    """The pairs of a block of tokens by expert.

    Attributes
    ----------
    order : Buffer
        Numbers of pairs within the block, those of one expert together.
    ends : Buffer
        Where an expert's begin, and those of the next.
    chosen : Buffer
        The experts that have any.
    count : PrimExpr
        How many these are.
    """

    order: Any
    ends: Any
    chosen: Any
    count: Expr


class _Loops:
    """Sizes, and the code of each loop."""

    def __init__(self, kernel: BlockSpec, cpu: CpuTarget, index: OperandView, tokens: Expr, used: int) -> None:
        self.kernel, self.index, self.tokens, self.used = kernel, index, tokens, used
        self.experts, self.panels = kernel.problem.experts, ceil_div(kernel.problem.columns, kernel.problem.panel)
        self.block = minimum(tokens, TOKENS_OF_A_BLOCK) if isinstance(tokens, int) else TOKENS_OF_A_BLOCK
        self.rows = min(rows_of_a_tile(kernel, cpu), self.block)
        self.lefts = used if kernel.problem.is_row_by_expert else 1
        """Rows of the left operand for a token."""
        work = tokens * used * kernel.problem.columns * kernel.problem.depth if isinstance(tokens, int) else None
        self.tasks = tasks_for(cpu.cores, "multiply-adds", work)

    def write(self) -> None:
        kernel = self.kernel
        with loop(self.tasks, parallel=self.tasks > 1) as task:
            accs = Registers(max(self.rows * kernel.vectors, IN_FLIGHT), "float32", kernel.lanes)
            totals = Registers(self.rows * kernel.vectors, "float32", kernel.lanes)
            row_sums = None
            if kernel.plan.form.minimum:
                size = self.block * self.lefts * kernel.chains
                row_sums = T.alloc_buffer((size,), "float32", scope="global")
            order = T.alloc_buffer((self.block * self.used,), "int32", scope="global")
            ends = T.alloc_buffer((self.experts + 1,), "int32", scope="global")
            chosen = T.alloc_buffer((self.experts,), "int32", scope="global")
            with loop(ceil_div(self.tokens, self.block)) as block:
                begin = materialize(block * self.block)
                end = materialize(minimum(begin + self.block, self.tokens))
                if row_sums is not None:
                    self._emit_sums(row_sums, materialize(begin * self.lefts), materialize(end * self.lefts))
                first_pair = materialize(begin * self.used)
                count = self._emit_sort(order, ends, chosen, first_pair, materialize(end * self.used - first_pair))
                pairs = _Sorted(order, ends, chosen, count)
                first, last = part(materialize(count * self.panels), self.tasks, task)
                with loop(last - first) as number:
                    self._emit_panel(pairs, materialize(first + number), begin, BlockSums(accs, totals, row_sums))

    def _emit_sums(self, target: Any, begin: Expr, end: Expr) -> None:
        """The sums of the left factors of some rows."""
        kernel = self.kernel
        with loop(end - begin) as r:
            place = (target, materialize(r * kernel.chains))
            emit_row_sums(kernel.lhs, materialize(begin + r), kernel.problem.depth, kernel.chain, kernel.lanes, place)

    def _emit_sort(self, order: Any, ends: Any, chosen: Any, first: Expr, count: Expr) -> Expr:
        """Sort `count` pairs from one on by counting; how many experts they have."""
        one, zero = tirx.const(1, "int32"), tirx.const(0, "int32")
        found = T.alloc_buffer((2,), "int32", scope="global")
        experts, begin = int64(0), int64(1)
        for place in (experts, begin):
            T.buffer_store(found, zero, [place])
        with loop(self.experts + 1) as e:
            T.buffer_store(ends, zero, [e])
        with loop(count) as p:
            e = self._expert(materialize(first + p))
            T.buffer_store(ends, ends[e + 1] + one, [e + 1])
        with loop(self.experts) as e:
            # Written past the last one that was found, and kept where the expert has pairs.
            T.buffer_store(chosen, tirx.Cast("int32", e), [tirx.Cast("int64", found[experts])])
            size = materialize(tirx.Cast("int64", ends[e + 1]))
            T.buffer_store(ends, found[begin], [e + 1])
            T.buffer_store(found, found[begin] + tirx.Cast("int32", size), [begin])
            T.buffer_store(found, found[experts] + tirx.Cast("int32", T.min(size, int64(1))), [experts])
        with loop(count) as p:
            e = self._expert(materialize(first + p))
            T.buffer_store(order, tirx.Cast("int32", p), [tirx.Cast("int64", ends[e + 1])])
            T.buffer_store(ends, ends[e + 1] + one, [e + 1])
        return materialize(tirx.Cast("int64", found[experts]))

    def _expert(self, pair: Expr) -> Expr:
        """Expert of a pair; the nearest that there is."""
        asked = tirx.Cast("int64", self.index.data[pair])
        return materialize(T.max(T.min(asked, int64(self.experts - 1)), int64(0)))

    def _emit_panel(self, pairs: _Sorted, number: Expr, begin: Expr, sums: BlockSums) -> None:
        """All rows of an expert by one of its panels."""
        panel = materialize(number // pairs.count)
        expert = materialize(tirx.Cast("int64", pairs.chosen[number % pairs.count]))
        first, end = (materialize(tirx.Cast("int64", pairs.ends[expert + i])) for i in (0, 1))
        packed = materialize(expert * self.panels + panel)
        with loop(ceil_div(end - first, self.rows)) as tile:
            row = materialize(first + tile * self.rows)

            def emit(count: int, stop: Expr, row: Expr = row) -> None:
                places = [row + i if stop is None or i == 0 else T.min(row + i, stop - 1) for i in range(count)]
                within = [materialize(tirx.Cast("int64", pairs.order[place])) for place in places]
                results = [materialize(begin * self.used + pair) for pair in within]
                lefts = results if self.lefts == self.used else [materialize(pair // self.used) for pair in results]
                first_left = materialize(begin * self.lefts)
                emit_tile(
                    self.kernel,
                    BlockTile(row, count, stop, panel, first_left, tuple(lefts), tuple(results), packed),
                    sums,
                )

            choose(row_cases(end, row, self.rows), emit)
