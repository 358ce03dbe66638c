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
from ...target.tiles import tile_sizes
from ..core.builder import (
    Expr,
    Function,
    Registers,
    broadcast,
    ceil_div,
    either,
    int64,
    let,
    loop,
    materialize,
    minimum,
    when,
    zeros,
)
from ..core.view import OperandView, extent_of
from ..core.work_split import part, split_work, tasks_for
from ..elementwise.expression_code import EpilogueCode
from . import amx
from .amx_blocks import MIN_ROWS, block_tiles, emit_block_tiles
from .block_dots import dot_of_bytes, emit_block_dots
from .block_spec import BlockSpec, emit_row_sums, for_columns, store_row
from .matmul_spec import choose, row_cases
from .matmul_tile import IN_FLIGHT
from .weight_unpacking import PanelReader

# A tile of rows by a panel of weights in blocks, which are unpacked in registers where they are multiplied.

FETCHING_ROWS = 16
"""Up to so many rows, weights are asked for ahead of their use: reading them is what takes time."""

FETCHED_CHAIN = 64
"""The longest chain whose lines are asked for at once."""


@dataclass(frozen=True)
class BlockTile:
    """Rows of a panel: `rows` of them from `row` on, those from `end` on (None: none) are not stored.

    Attributes
    ----------
    panel : PrimExpr
        Panel of the result's columns.
    first : PrimExpr
        The first row of the left operand whose sums are known.
    lefts, results : tuple of PrimExpr
        For each row its number in the left operand and in the result, where these are not the tile's own.
    packed : PrimExpr or None
        The panel's number among the packed weights, where that is another.
    """

    row: Expr
    rows: int
    end: Expr
    panel: Expr
    first: Expr
    lefts: tuple[Expr, ...] = ()
    results: tuple[Expr, ...] = ()
    packed: Expr = None


@dataclass(frozen=True)
class BlockSums:
    """Sums of a task: of a chain, of a tile, and of the left factors (None where nobody asks for them)."""

    accs: Registers
    totals: Registers
    rows: Expr


def rows_of_a_tile(kernel: BlockSpec, cpu: CpuTarget) -> int:
    """How many rows are multiplied at once, at most."""
    return max(1, min(tile_sizes(cpu).rows, kernel.free // kernel.vectors))


def emit_tile(kernel: BlockSpec, tile: BlockTile, sums: BlockSums) -> None:
    """Multiply the rows of a tile by a panel, and store what exists.

    The sums of a chain are added up weight by weight, and those of chains one after the other, however many rows a
    tile has. Few rows go over several chains at once, so that enough sums are in flight.
    """
    count = tile.rows * kernel.vectors
    whole, rest = divmod(kernel.problem.depth, kernel.chain)
    together = max(1, min(min(IN_FLIGHT, kernel.free) // count, whole))
    for number in range(count):
        sums.totals[number] = zeros("float32", kernel.lanes)

    def chains(first: Expr, together: int, size: int) -> None:
        _emit_chains(kernel, tile, sums, [materialize(first + number) for number in range(together)], size)

    if whole >= together:
        with loop(whole // together) as number:
            chains(materialize(number * together), together, kernel.chain)
    if whole % together:
        chains(tirx.const(whole // together * together, "int64"), whole % together, kernel.chain)
    if rest:
        chains(tirx.const(whole, "int64"), 1, rest)
    _finish(kernel, tile, sums.totals)


def row_numbers(tile: BlockTile) -> list[Expr]:
    """The tile's rows, those that do not exist replaced by the last that does."""
    return [tile.row + i if tile.end is None or i == 0 else T.min(tile.row + i, tile.end - 1) for i in range(tile.rows)]


def _emit_chains(kernel: BlockSpec, tile: BlockTile, sums: BlockSums, chains: list[Expr], size: int) -> None:
    """Add the products of the `size` weights of every column in each of some chains, which share a scale."""
    lanes, plan, reader, accs = kernel.lanes, kernel.plan, kernel.reader, sums.accs
    count = tile.rows * kernel.vectors
    lefts, packed = tile.lefts or row_numbers(tile), tile.panel if tile.packed is None else tile.packed
    firsts = [materialize(chain * kernel.chain) for chain in chains]
    in_records = [materialize(first % plan.span) if plan.records > 1 else first for first in firsts]
    records = [materialize(reader.record(packed, first // plan.span if plan.records > 1 else 0)) for first in firsts]
    rows = [[materialize(kernel.lhs.address({"m": row, "k": first})) for row in lefts] for first in firsts]
    # Vectors are of LLVM, as prefetching is: portable C has neither. Bytes are unpacked faster than they arrive, and
    # asking for them takes the CPU's line buffers from its own prefetching: a table of 178 MB was read in 15.8 ms
    # without, in 18.5 with it (Xeon), while 4 to 6 bits took two thirds of the time with it.
    few = isinstance(kernel.m, int) and kernel.m // max(1, kernel.problem.experts) <= FETCHING_ROWS
    fetches = kernel.lanes > 1 and few and plan.form.bits < 8
    fetches_by_chain = fetches and kernel.chain <= FETCHED_CHAIN
    for number in range(count * len(chains)):
        accs[number] = zeros("float32", lanes)

    if fetches_by_chain:
        for first in firsts:
            reader.fetch_ahead(packed, first, kernel.chain)

    def group(number: Expr, steps: int) -> None:
        numbers = []
        for first, in_record, record in zip(firsts, in_records, records, strict=True):
            place = materialize(in_record // plan.group + number)
            if fetches and not fetches_by_chain:
                reader.fetch_ahead(packed, first + number * plan.group, plan.group)
            numbers.append([reader.group(record, place, j) for j in range(kernel.vectors)])
        for step in range(steps):
            for c in range(len(chains)):
                right = [let(number_at(step)) for number_at in numbers[c]]
                for i in range(tile.rows):
                    left = broadcast(kernel.lhs.data[rows[c][i] + number * plan.group + step], lanes)
                    for j in range(kernel.vectors):
                        acc = c * count + i * kernel.vectors + j
                        accs[acc] = accs[acc] + left * right[j]

    whole, rest = divmod(size, plan.group)
    if whole:
        with loop(whole) as number:
            group(number, plan.group)
    if rest:
        group(tirx.const(whole, "int64"), rest)
    for c, chain in enumerate(chains):
        block = materialize(in_records[c] // plan.block) if plan.blocks > 1 else 0
        for j in range(kernel.vectors):
            outer = reader.outer(records[c], j)
            scale, least = reader.scale(records[c], block, outer, j), reader.minimum(records[c], block, outer, j)
            for i, row in enumerate(lefts):
                number = i * kernel.vectors + j
                total = accs[c * count + number]
                added = total if scale is None else total * scale
                sums.totals[number] = sums.totals[number] + added
                if least is not None:
                    of_row = sums.rows[materialize((row - tile.first) * kernel.chains + chain)]
                    sums.totals[number] = sums.totals[number] + least * broadcast(of_row, lanes)


def _finish(kernel: BlockSpec, tile: BlockTile, totals: Registers) -> None:
    """Apply the epilogue and store what exists."""
    rows = tile.results or row_numbers(tile)

    def store_one(i: int, masks: list[Expr]) -> None:
        store_row(kernel, rows[i], tile.panel, masks, lambda j: totals[i * kernel.vectors + j])

    def store(masks: list[Expr]) -> None:
        for i in range(tile.rows):
            with when(True if tile.end is None or i == 0 else tile.row + i < tile.end):
                store_one(i, masks)

    for_columns(kernel, tile.panel, store)


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
        _, row_part, column_part = split.parts_of(task)
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
