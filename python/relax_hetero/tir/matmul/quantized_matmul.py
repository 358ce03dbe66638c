"""Products with weights in blocks of few bits, which are unpacked in registers where they are multiplied.

A panel of columns is one stretch of memory (see `relax_hetero.encoding.block_panels`). Turning a field of a lane into a
number takes two or three instructions, a share of the work that falls with the rows of a tile; scales are applied to
the sums of a block, and minimums to the sums of the left factors that meet it. Nothing is unpacked into memory: what is
read for one row is the file's bits, and many rows are nearly as fast as a product of float32.

The loops, from outside: tasks, blocks of rows, panels of columns, tiles of rows; within a tile the chains of weights
that share a scale, groups, the weights of a group. CPUs with tile registers multiply many rows by them
(`amx_blocks`). Where each row has a matrix of its own, rows are sorted by these first (`block_experts`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.problem import QuantizedMatmulProblem
from ...target.cpu_target import CpuTarget
from ..core.builder import Expr, Function, Registers, ceil_div, either, int64, loop, materialize, minimum
from ..core.view import OperandView, extent_of
from ..core.work_split import part, split_work, tasks_for
from ..elementwise.expression_code import EpilogueCode
from . import amx
from .amx_blocks import MIN_ROWS, block_tiles, emit_block_tiles
from .block_dots import dot_of_bytes, emit_block_dots
from .block_spec import BlockSpec, emit_row_sums
from .block_tile import BlockSums, BlockTile, emit_tile, rows_of_a_tile
from .matmul_spec import choose, row_cases
from .matmul_tile import IN_FLIGHT
from .weight_unpacking import PanelReader

# Products of rows by one of many matrices each: the experts that the tokens of a language model choose.
#
# A row of the result is a pair of a token and one of its experts. Every task sorts the pairs by expert, which takes a
# few microseconds and spares tasks from waiting for each other; then the rows of an expert go over its panels in
# tiles, as the rows of any product do. A panel is read once for all rows of its expert, and the panels of experts
# that nobody chose are not read.
#
# The loops, from outside: tasks, blocks of tokens, panels of columns, experts that were chosen, tiles of rows. A task
# has an equal share of pairs of panel and expert, panels outermost, so that experts of many rows are shared among
# tasks.

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


# Bytes of the left operand that all panels go over before the next rows: half of a second-level cache.
ROW_BLOCK_BYTES = 1 << 19


def quantized_matmul_kernel(problem: QuantizedMatmulProblem, cpu: CpuTarget) -> tirx.PrimFunc:
    """The kernel of a product with weights in blocks, parallel over the CPU's cores.

    Its parameters are those that `QuantizedMatmulProblem` says.
    """
    function = Function("block_product")
    with function:
        lhs = OperandView(function, "lhs", problem.lhs)
        packed = OperandView(function, "weight", problem.weights[0])
        index = None if problem.index is None else OperandView(function, "index", problem.index)
        lanes = cpu.lanes("float32")
        epilogue = EpilogueCode.of(function, problem.epilogue, "float32", problem.result.dtype, lanes)
        result = OperandView(function, "result", problem.result)
        views = [lhs, *epilogue.views, result]
        for name in reversed([name for name in result.index_map if name.startswith("b")]):
            for view in views:
                view.merge(name, "m")
        with function.body():
            for view in (*views, packed, *([] if index is None else [index])):
                view.open()
            vectors = problem.panel // lanes
            reader = PanelReader.of(cpu, packed, problem.plan)
            of_a_vector, of_all = reader.shape
            free = cpu.isa.registers - of_a_vector * vectors - of_all - 1
            m = extent_of([result], "m")
            kernel = BlockSpec(problem, lhs, result, epilogue, reader, lanes, vectors, free, m)
            tiles = block_tiles(kernel, cpu) if index is None else None
            if index is not None:
                emit_expert_loops(kernel, cpu, index)
            elif tiles is None:
                _emit_vectors(kernel, cpu)
            else:
                with T.attr(0, "pragma_import_llvm", amx.LLVM_TEXT):
                    allowed = amx.may_use_tiles()
                    if not isinstance(kernel.m, int) and not problem.rows:
                        allowed = tirx.And(kernel.m >= MIN_ROWS, allowed)
                    either(allowed, lambda: emit_block_tiles(kernel, cpu, tiles), lambda: _emit_vectors(kernel, cpu))
    return function.result


def _emit_vectors(kernel: BlockSpec, cpu: CpuTarget) -> None:
    """Write the product by dot products of bytes where the CPU has them, else by numbers."""
    dot = dot_of_bytes(kernel, cpu)
    if dot is None:
        _emit_loops(kernel, cpu)
    else:
        emit_block_dots(kernel, cpu, dot)


def _emit_loops(kernel: BlockSpec, cpu: CpuTarget) -> None:
    problem = kernel.problem
    if 0 in (kernel.m, problem.columns):
        T.evaluate(0)
        return
    rows = rows_of_a_tile(kernel, cpu)
    if isinstance(kernel.m, int):
        rows = min(rows, kernel.m)
    tiles, panels = materialize(ceil_div(kernel.m, rows)), ceil_div(problem.columns, problem.panel)
    split = split_work(cpu.cores, 1, tiles, panels, (rows, problem.panel), problem.depth)
    tiles_per_block = max(1, ROW_BLOCK_BYTES // (4 * problem.depth * rows))
    if isinstance(tiles, int):
        tiles_per_block = min(tiles_per_block, tiles)
    with loop(split.tasks, parallel=split.tasks > 1) as task:
        accs = Registers(max(rows * kernel.vectors, IN_FLIGHT), "float32", kernel.lanes)
        totals = Registers(rows * kernel.vectors, "float32", kernel.lanes)
        row_sums = None
        if kernel.plan.form.minimum:
            row_sums = T.alloc_buffer((tiles_per_block * rows * kernel.chains,), "float32", scope="global")
        sums = BlockSums(accs, totals, row_sums)
        _, row_part, column_part = split.place(task)
        first_m, last_m = part(tiles, split.rows, row_part)
        first_n, last_n = part(panels, split.columns, column_part)
        with loop(materialize(ceil_div(last_m - first_m, tiles_per_block))) as block:
            begin = materialize(first_m + block * tiles_per_block)
            end = materialize(minimum(begin + tiles_per_block, last_m))
            first_row = materialize(begin * rows)
            if row_sums is not None:
                _emit_sums(kernel, row_sums, first_row, materialize(minimum(end * rows, kernel.m)))
            with loop(last_n - first_n) as panel, loop(end - begin) as tile:
                row = materialize(materialize(begin + tile) * rows)
                _emit_rows(kernel, BlockTile(row, rows, None, materialize(first_n + panel), first_row), sums)


def _emit_sums(kernel: BlockSpec, target: Expr, begin: Expr, end: Expr) -> None:
    """The sums of the left factors of some rows."""
    with loop(end - begin) as r:
        place = (target, materialize(r * kernel.chains))
        emit_row_sums(kernel.lhs, materialize(begin + r), kernel.problem.depth, kernel.chain, kernel.lanes, place)


def _emit_rows(kernel: BlockSpec, tile: BlockTile, sums: BlockSums) -> None:
    """A tile in the form that its place needs: whole, or of what rows are left."""
    choose(
        row_cases(kernel.m, tile.row, tile.rows),
        lambda count, end: emit_tile(kernel, replace(tile, rows=count, end=end), sums),
    )
