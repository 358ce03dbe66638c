"""Products with block-quantized weights, which are dequantized in registers where they are multiplied.

A panel of columns is contiguous in memory (see `relax_hetero.encoding.block_panels`). Turning a quant into a number
takes two or three instructions, a share of the work that falls with the rows of a tile; scales are applied to the sums
of a block, and minimums to the sums of the left factors of the block. Nothing is unpacked to memory: a single row reads
only the quantized bits, and many rows are nearly as fast as a product of float32.

The loops, outermost first: tasks, blocks of rows, panels of columns, tiles of rows; within a tile chains (weights of
one scale, which an accumulator adds up), groups, the weights of a group. CPUs that can use AMX for many rows
(`amx_blocks`), or dot products of bytes (`block_dots`). If each row selects a matrix (mixture of experts), rows are
sorted by expert first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.problem import QuantizedMatmulProblem
from ...target.cpu_target import CpuTarget
from ...target.dot_instructions import FLOAT32_FMA
from ...target.tiles import tile_sizes
from ..core.builder import (
    Expr,
    Function,
    Masks,
    Registers,
    broadcast,
    ceil_div,
    either,
    int64,
    loop,
    materialize,
    minimum,
    when,
    zeros,
)
from ..core.view import OperandView, extent_of
from ..core.work_split import loop_blocks, part, split_work, tasks_for
from ..elementwise.expression_code import EpilogueCode
from ..microkernel import amx
from ..microkernel.microkernel import FMAS_IN_FLIGHT, VectorTile
from .amx_blocks import MIN_ROWS, amx_for_blocks, emit_amx_blocks
from .block_dots import byte_dot_instruction, emit_block_dots
from .block_spec import BlockSpec, BlockTile, clamped_rows, emit_row_sums, for_columns, store_row
from .matmul_spec import emit_cases, row_cases
from .weight_unpacking import Numbers, PanelReader

PREFETCH_ROWS = 16
"""Maximum number of rows for which weights are prefetched: reading them takes most of the time."""

MAX_PREFETCHED_CHAIN = 64
"""Maximum number of weights of a chain that is prefetched as a whole."""


@dataclass(frozen=True)
class BlockSums:
    """Accumulators of chains, totals of a tile, and sums of rows of the left operand (None without minimums)."""

    accs: Registers
    totals: Registers
    row_sums: Expr


def max_tile_rows(spec: BlockSpec, cpu: CpuTarget) -> int:
    """Maximum number of rows of a register tile."""
    return max(1, min(tile_sizes(cpu).rows, spec.free // spec.vectors))


def emit_tile(spec: BlockSpec, tile: BlockTile, sums: BlockSums) -> None:
    """Multiply the rows of a tile by a panel, and store those that exist.

    The order of additions does not depend on the rows of a tile: weights within a chain, then chains in order. Few rows
    accumulate several chains in parallel, so that enough additions are in flight.
    """
    count = tile.rows * spec.vectors
    whole_chains, tail = divmod(spec.problem.depth, spec.chain)
    parallel_chains = max(1, min(min(FMAS_IN_FLIGHT, spec.free) // count, whole_chains))
    for index in range(count):
        sums.totals[index] = zeros("float32", spec.lanes)

    def emit_chains(first: Expr, parallel_chains: int, size: int) -> None:
        _emit_chains(spec, tile, sums, [materialize(first + index) for index in range(parallel_chains)], size)

    if whole_chains >= parallel_chains:
        with loop(whole_chains // parallel_chains) as index:
            emit_chains(materialize(index * parallel_chains), parallel_chains, spec.chain)
    rest = whole_chains % parallel_chains
    if rest:
        emit_chains(tirx.const(whole_chains - rest, "int64"), rest, spec.chain)
    if tail:
        emit_chains(tirx.const(whole_chains, "int64"), 1, tail)
    _finish(spec, tile, sums.totals)


def _emit_chains(spec: BlockSpec, tile: BlockTile, sums: BlockSums, chains: list[Expr], size: int) -> None:
    """Add the products of the first `size` weights of every column in each of `chains`."""
    lanes, plan, reader, accs = spec.lanes, spec.plan, spec.reader, sums.accs
    count = tile.rows * spec.vectors
    left_rows, panel = tile.lefts or tile.row_numbers, tile.panel if tile.packed is None else tile.packed
    starts = [materialize(chain * spec.chain) for chain in chains]
    starts_in_superblock = [
        materialize(start % plan.superblock_size) if plan.superblocks > 1 else start for start in starts
    ]
    superblocks = [
        materialize(reader.superblock(panel, start // plan.superblock_size if plan.superblocks > 1 else 0))
        for start in starts
    ]
    rows = [[materialize(spec.lhs.address({"m": row, "k": start})) for row in left_rows] for start in starts]
    # The C target lacks prefetching (and vectors). 8-bit quants are unpacked faster than they arrive, and prefetching
    # takes line fill buffers from the CPU's own prefetcher: weights of 178 MB were read in 15.8 ms without it, in
    # 18.5 ms with it (Xeon), while those of 4 to 6 bits took two thirds of the time with it.
    has_few_rows = isinstance(spec.m, int) and spec.m // max(1, spec.problem.experts) <= PREFETCH_ROWS
    prefetches = spec.lanes > 1 and has_few_rows and plan.form.bits < 8
    prefetches_chain = prefetches and spec.chain <= MAX_PREFETCHED_CHAIN
    chain_sums = VectorTile(FLOAT32_FMA, accs, tile.rows, spec.vectors, lanes)
    chain_sums.clear(banks=len(chains))

    if prefetches_chain:
        for start in starts:
            reader.prefetch_weights(panel, start, spec.chain)

    def left(row_starts: list[Expr], at_k: Expr, i: int) -> Expr:
        return spec.lhs.data[row_starts[i] + at_k]

    def right(numbers_at: list[Numbers], step: int, j: int) -> Expr:
        return numbers_at[j](step)

    def emit_group(number: Expr, steps: int) -> None:
        readers = []
        for start, start_in_superblock, superblock in zip(starts, starts_in_superblock, superblocks, strict=True):
            group_index = materialize(start_in_superblock // plan.group + number)
            if prefetches and not prefetches_chain:
                reader.prefetch_weights(panel, start + number * plan.group, plan.group)
            readers.append([reader.group(superblock, group_index, j) for j in range(spec.vectors)])
        for step in range(steps):
            for c in range(len(chains)):
                chain_sums.step(
                    partial(left, rows[c], number * plan.group + step), partial(right, readers[c], step), bank=c
                )

    groups, tail = divmod(size, plan.group)
    if groups:
        with loop(groups) as number:
            emit_group(number, plan.group)
    if tail:
        emit_group(tirx.const(groups, "int64"), tail)
    for c, chain in enumerate(chains):
        block = materialize(starts_in_superblock[c] // plan.block) if plan.blocks > 1 else 0
        for j in range(spec.vectors):
            outer_scales = reader.outer(superblocks[c], j)
            scale = reader.scale(superblocks[c], block, outer_scales, j)
            minimum = reader.minimum(superblocks[c], block, outer_scales, j)
            for i, row in enumerate(left_rows):
                number = i * spec.vectors + j
                total = accs[c * count + number]
                scaled = total if scale is None else total * scale
                sums.totals[number] = sums.totals[number] + scaled
                if minimum is not None:
                    row_sum = sums.row_sums[materialize((row - tile.first) * spec.chains + chain)]
                    sums.totals[number] = sums.totals[number] + minimum * broadcast(row_sum, lanes)


def _finish(spec: BlockSpec, tile: BlockTile, totals: Registers) -> None:
    """Apply the epilogue and store the existing rows."""
    rows = tile.results or tile.row_numbers

    def store_tile_row(i: int, masks: Masks) -> None:
        store_row(spec, rows[i], tile.panel, masks, lambda j: totals[i * spec.vectors + j])

    def store(masks: Masks) -> None:
        for i in range(tile.rows):
            with when(True if tile.end is None or i == 0 else tile.row + i < tile.end):
                store_tile_row(i, masks)

    for_columns(spec, tile.panel, store)


# Mixture of experts: each row is multiplied by the matrix of one of many experts.
#
# A row of the result is a pair of a token and one of its experts. Every task sorts all pairs by expert, which takes a
# few microseconds and saves a barrier; then tiles of an expert's rows are multiplied by its panels, as in any product.
# A panel is read once for all rows of its expert, and panels of unused experts are not read.
#
# The loops, outermost first: tasks, blocks of tokens, panels of columns, used experts, tiles of rows. Tasks have
# equal shares of the used experts' panels, panels outermost, so that they share an expert with many rows.

TOKEN_BLOCK = 512
"""Number of tokens that are sorted together: more give more rows of each expert, and take more memory."""


def emit_expert_loops(spec: BlockSpec, cpu: CpuTarget, index: OperandView) -> None:
    """Write the loops; `index` is the operand ``(token, top_k)`` with the experts of each token."""
    tokens, top_k = index.extents
    if 0 in (tokens, top_k, spec.problem.columns):
        T.evaluate(0)
        return
    _Loops(spec, cpu, index, tokens, top_k).write()


@dataclass(frozen=True)
class _SortedPairs:
    """The (token, expert) pairs of a block of tokens, sorted by expert.

    Attributes
    ----------
    order : Buffer
        Indices of pairs within the block, sorted by expert.
    offsets : Buffer
        Start of each expert's pairs in `order`, then the number of pairs.
    used_experts : Buffer
        The experts with pairs.
    used_count : PrimExpr
        Number of experts with pairs.
    """

    order: Any
    offsets: Any
    used_experts: Any
    used_count: Expr


class _Loops:
    """Sizes, and the code of each loop."""

    def __init__(self, spec: BlockSpec, cpu: CpuTarget, index: OperandView, tokens: Expr, top_k: int) -> None:
        self.spec, self.index, self.tokens, self.top_k = spec, index, tokens, top_k
        self.experts, self.panels = spec.problem.experts, ceil_div(spec.problem.columns, spec.problem.panel)
        self.block_tokens = minimum(tokens, TOKEN_BLOCK) if isinstance(tokens, int) else TOKEN_BLOCK
        self.tile_rows = min(max_tile_rows(spec, cpu), self.block_tokens)
        self.rows_per_token = top_k if spec.problem.has_row_per_expert else 1
        """Rows of the left operand per token."""
        work = tokens * top_k * spec.problem.columns * spec.problem.depth if isinstance(tokens, int) else None
        self.tasks = tasks_for(cpu.cores, "multiply-adds", work)

    def write(self) -> None:
        spec = self.spec
        with loop(self.tasks, parallel=self.tasks > 1) as task:
            accs = Registers(max(self.tile_rows * spec.vectors, FMAS_IN_FLIGHT), "float32", spec.lanes)
            totals = Registers(self.tile_rows * spec.vectors, "float32", spec.lanes)
            row_sums = None
            if spec.plan.form.minimum:
                size = self.block_tokens * self.rows_per_token * spec.chains
                row_sums = T.alloc_buffer((size,), "float32", scope="global")
            order = T.alloc_buffer((self.block_tokens * self.top_k,), "int32", scope="global")
            offsets = T.alloc_buffer((self.experts + 1,), "int32", scope="global")
            used_experts = T.alloc_buffer((self.experts,), "int32", scope="global")
            with loop(ceil_div(self.tokens, self.block_tokens)) as block:
                begin = materialize(block * self.block_tokens)
                end = materialize(minimum(begin + self.block_tokens, self.tokens))
                if row_sums is not None:
                    first_row = materialize(begin * self.rows_per_token)
                    end_row = materialize(end * self.rows_per_token)
                    _emit_block_row_sums(spec, row_sums, first_row, end_row)
                first_pair = materialize(begin * self.top_k)
                pair_count = materialize(end * self.top_k - first_pair)
                used_count = self._sort_pairs(order, offsets, used_experts, first_pair, pair_count)
                pairs = _SortedPairs(order, offsets, used_experts, used_count)
                first, last = part(materialize(used_count * self.panels), self.tasks, task)
                with loop(last - first) as number:
                    self._emit_panel(pairs, materialize(first + number), begin, BlockSums(accs, totals, row_sums))

    def _sort_pairs(self, order: Any, offsets: Any, used_experts: Any, first: Expr, count: Expr) -> Expr:
        """Sort `count` pairs from `first` on with counting sort, and return the number of used experts."""
        one, zero = tirx.const(1, "int32"), tirx.const(0, "int32")
        counters = T.alloc_buffer((2,), "int32", scope="global")
        used_counter, offset_counter = int64(0), int64(1)
        for counter in (used_counter, offset_counter):
            T.buffer_store(counters, zero, [counter])
        with loop(self.experts + 1) as expert:
            T.buffer_store(offsets, zero, [expert])
        with loop(count) as pair:
            expert = self._expert(materialize(first + pair))
            T.buffer_store(offsets, offsets[expert + 1] + one, [expert + 1])
        with loop(self.experts) as expert:
            # Every expert is written after the last used one; unless it has pairs, the next expert overwrites it.
            T.buffer_store(used_experts, tirx.Cast("int32", expert), [tirx.Cast("int64", counters[used_counter])])
            size = materialize(tirx.Cast("int64", offsets[expert + 1]))
            T.buffer_store(offsets, counters[offset_counter], [expert + 1])
            T.buffer_store(counters, counters[offset_counter] + tirx.Cast("int32", size), [offset_counter])
            T.buffer_store(counters, counters[used_counter] + tirx.Cast("int32", T.min(size, int64(1))), [used_counter])
        with loop(count) as pair:
            expert = self._expert(materialize(first + pair))
            T.buffer_store(order, tirx.Cast("int32", pair), [tirx.Cast("int64", offsets[expert + 1])])
            T.buffer_store(offsets, offsets[expert + 1] + one, [expert + 1])
        return materialize(tirx.Cast("int64", counters[used_counter]))

    def _expert(self, pair: Expr) -> Expr:
        """Expert of a pair, clamped to the existing ones."""
        expert = tirx.Cast("int64", self.index.data[pair])
        return materialize(T.max(T.min(expert, int64(self.experts - 1)), int64(0)))

    def _emit_panel(self, pairs: _SortedPairs, number: Expr, first_token: Expr, sums: BlockSums) -> None:
        """Multiply all rows of an expert by a panel: `number` counts the used experts' panels, panels outermost."""
        panel = materialize(number // pairs.used_count)
        expert = materialize(tirx.Cast("int64", pairs.used_experts[number % pairs.used_count]))
        first, end = (materialize(tirx.Cast("int64", pairs.offsets[expert + i])) for i in (0, 1))
        weight_panel = materialize(expert * self.panels + panel)
        with loop(ceil_div(end - first, self.tile_rows)) as tile:
            row = materialize(first + tile * self.tile_rows)

            def emit(count: int, tile_end: Expr, row: Expr = row) -> None:
                indices = clamped_rows(row, count, tile_end)
                pair_numbers = [materialize(tirx.Cast("int64", pairs.order[index])) for index in indices]
                results = [materialize(first_token * self.top_k + pair) for pair in pair_numbers]
                has_own_rows = self.rows_per_token == self.top_k
                left_rows = results if has_own_rows else [materialize(pair // self.top_k) for pair in results]
                first_left = materialize(first_token * self.rows_per_token)
                emit_tile(
                    self.spec,
                    BlockTile(row, count, tile_end, panel, first_left, tuple(left_rows), tuple(results), weight_panel),
                    sums,
                )

            emit_cases(row_cases(end, row, self.tile_rows), emit)


# Bytes of a block of rows of the left operand (mc): half of an L2 cache.
ROW_BLOCK_BYTES = 1 << 19


def quantized_matmul_kernel(problem: QuantizedMatmulProblem, cpu: CpuTarget) -> tirx.PrimFunc:
    """The kernel of a product with block-quantized weights, parallel over the CPU's cores.

    For its parameters see `QuantizedMatmulProblem`.
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
            vector_registers, kernel_registers = reader.shape
            free_registers = cpu.isa.registers - vector_registers * vectors - kernel_registers - 1
            m = extent_of([result], "m")
            spec = BlockSpec(problem, lhs, result, epilogue, reader, lanes, vectors, free_registers, m)
            instruction = amx_for_blocks(spec, cpu) if index is None else None
            if index is not None:
                emit_expert_loops(spec, cpu, index)
            elif instruction is None:
                _emit_vectors(spec, cpu)
            else:
                with T.attr(0, "pragma_import_llvm", amx.LLVM_TEXT):
                    use_amx = amx.may_use_amx()
                    if not isinstance(spec.m, int) and not problem.rows:
                        use_amx = tirx.And(spec.m >= MIN_ROWS, use_amx)
                    either(use_amx, lambda: emit_amx_blocks(spec, cpu, instruction), lambda: _emit_vectors(spec, cpu))
    return function.result


def _emit_vectors(spec: BlockSpec, cpu: CpuTarget) -> None:
    """Write the product with dot products of bytes if the CPU has them, else in float32."""
    dot = byte_dot_instruction(spec, cpu)
    if dot is None:
        _emit_loops(spec, cpu)
    else:
        emit_block_dots(spec, cpu, dot)


def _emit_loops(spec: BlockSpec, cpu: CpuTarget) -> None:
    problem = spec.problem
    if 0 in (spec.m, problem.columns):
        T.evaluate(0)
        return
    rows = max_tile_rows(spec, cpu)
    if isinstance(spec.m, int):
        rows = min(rows, spec.m)
    tiles, panels = materialize(ceil_div(spec.m, rows)), ceil_div(problem.columns, problem.panel)
    split = split_work(cpu.cores, 1, tiles, panels, (rows, problem.panel), problem.depth)
    tiles_per_block = max(1, ROW_BLOCK_BYTES // (4 * problem.depth * rows))
    if isinstance(tiles, int):
        tiles_per_block = min(tiles_per_block, tiles)
    with loop(split.tasks, parallel=split.tasks > 1) as task:
        accs = Registers(max(rows * spec.vectors, FMAS_IN_FLIGHT), "float32", spec.lanes)
        totals = Registers(rows * spec.vectors, "float32", spec.lanes)
        row_sums = None
        if spec.plan.form.minimum:
            row_sums = T.alloc_buffer((tiles_per_block * rows * spec.chains,), "float32", scope="global")
        sums = BlockSums(accs, totals, row_sums)
        _, (first_m, last_m), (first_n, last_n) = split.ranges(task, 1, tiles, panels)
        with loop_blocks(first_m, last_m, tiles_per_block) as (begin, end):
            first_row = materialize(begin * rows)
            if row_sums is not None:
                _emit_block_row_sums(spec, row_sums, first_row, materialize(minimum(end * rows, spec.m)))
            with loop(last_n - first_n) as panel, loop(end - begin) as tile:
                row = materialize(materialize(begin + tile) * rows)
                _emit_tile_cases(spec, BlockTile(row, rows, None, materialize(first_n + panel), first_row), sums)


def _emit_block_row_sums(spec: BlockSpec, target: Expr, begin: Expr, end: Expr) -> None:
    """Write the sums of the elements of some rows to `target`."""
    with loop(end - begin) as r:
        sums = (target, materialize(r * spec.chains))
        emit_row_sums(spec.lhs, materialize(begin + r), spec.problem.depth, spec.chain, spec.lanes, sums)


def _emit_tile_cases(spec: BlockSpec, tile: BlockTile, sums: BlockSums) -> None:
    """Write the cases of a tile: whole, or the remaining rows."""
    emit_cases(
        row_cases(spec.m, tile.row, tile.rows),
        lambda count, end: emit_tile(spec, replace(tile, rows=count, end=end), sums),
    )
