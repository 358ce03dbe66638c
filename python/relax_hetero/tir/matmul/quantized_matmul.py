"""Products with block-quantized weights, which are dequantized in registers where they are multiplied.

A panel of columns is contiguous in memory (see `relax_hetero.encoding.block_panels`). Turning a quant into a number
takes two or three instructions, a share of the work that falls with the rows of a tile; scales are applied to the sums
of a block, and minimums to the sums of the left factors of the block. Nothing is unpacked to memory: a single row reads
only the quantized bits, and many rows are nearly as fast as a product of float32.

The loops around tiles are in `block_loops`, for one matrix and for a mixture of experts; within a tile are chains
(weights of one scale, which an accumulator adds up), groups, the weights of a group. CPUs that can use AMX for many
rows (`amx_blocks`), or dot products of bytes (`block_dots`); this file has the products of all others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

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
    either,
    loop,
    materialize,
    zeros,
)
from ..core.view import OperandView, extent_of
from ..elementwise.expression_code import EpilogueCode
from ..microkernel import amx
from ..microkernel.microkernel import FMAS_IN_FLIGHT, VectorTile
from .amx_blocks import MIN_ROWS, AmxProduct, amx_for_blocks
from .block_dots import DotProduct, byte_dot_instruction
from .block_loops import emit_loops
from .block_spec import (
    ROW_BLOCK_BYTES,
    BlockSpec,
    BlockTile,
    PanelProduct,
    RowBlock,
    emit_row_sums,
    for_columns,
    store_row,
)
from .weight_unpacking import Numbers, PanelReader

MAX_NARROW_CHAINS = 2
"""Maximum number of parallel chains with vectors of 16 bytes, whose weights take many instructions: for four, LLVM
needs 418 instructions for 64 multiply-adds on Neoverse N1, and spills; for two, 314."""

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


class FloatProduct(PanelProduct):
    """Products in float32 vectors, for all CPUs and formats."""

    def __init__(self, spec: BlockSpec, cpu: CpuTarget) -> None:
        self.spec = spec
        max_rows = max_tile_rows(spec, cpu)
        self.tile_rows = min(max_rows, spec.max_rows) if isinstance(spec.max_rows, int) else max_rows
        self.row_bytes, self.block_bytes = 4 * spec.problem.depth, ROW_BLOCK_BYTES
        self.work = spec.problem.depth

    def allocate(self, rows: int) -> None:
        """Allocate scratch of a task, for blocks of at most `rows` rows."""
        spec, count = self.spec, self.tile_rows * self.spec.vectors
        row_sums = None
        if spec.plan.form.minimum:
            row_sums = T.alloc_buffer((rows * spec.chains,), "float32", scope="global")
        self.sums = BlockSums(
            Registers(max(count, FMAS_IN_FLIGHT), "float32", spec.lanes),
            Registers(count, "float32", spec.lanes),
            row_sums,
        )

    def prepare(self, row: Expr, number: Expr) -> None:
        """Add up the chains of a row, which minimums multiply."""
        spec = self.spec
        if self.sums.row_sums is not None:
            target = (self.sums.row_sums, materialize(number * spec.chains))
            emit_row_sums(spec.lhs, row, spec.problem.depth, spec.chain, spec.lanes, target)

    def multiply(self, block: RowBlock, count: Expr, first: Expr, last: Expr) -> None:
        """Multiply by panels, whose weights are dequantized in registers."""
        with loop(last - first) as panel:
            block.tiles(materialize(first + panel), self.tile_rows, lambda tile: emit_tile(self.spec, tile, self.sums))


def emit_tile(spec: BlockSpec, tile: BlockTile, sums: BlockSums) -> None:
    """Multiply the rows of a tile by a panel, and store those that exist.

    The order of additions does not depend on the rows of a tile: weights within a chain, then chains in order. Few rows
    accumulate several chains in parallel, so that enough additions are in flight.
    """
    count = tile.rows * spec.vectors
    left_rows = list(map(tile.block.lhs_row, tile.row_numbers))
    whole_chains, tail = divmod(spec.problem.depth, spec.chain)
    parallel_chains = max(1, min(min(FMAS_IN_FLIGHT, spec.free) // count, whole_chains))
    if spec.lanes <= 4:
        parallel_chains = min(parallel_chains, MAX_NARROW_CHAINS)
    if _prefetches(spec) and spec.chain > MAX_PREFETCHED_CHAIN:
        parallel_chains = 1  # memory is read faster in order (`CpuTarget.weight_prefetch`)
    for index in range(count):
        sums.totals[index] = zeros("float32", spec.lanes)

    def emit_chains(first: Expr, parallel_chains: int, size: int) -> None:
        chains = [materialize(first + index) for index in range(parallel_chains)]
        _emit_chains(spec, tile, left_rows, sums, chains, size)

    if whole_chains >= parallel_chains:
        with loop(whole_chains // parallel_chains) as index:
            emit_chains(materialize(index * parallel_chains), parallel_chains, spec.chain)
    rest = whole_chains % parallel_chains
    if rest:
        emit_chains(tirx.const(whole_chains - rest, "int64"), rest, spec.chain)
    if tail:
        emit_chains(tirx.const(whole_chains, "int64"), 1, tail)
    _finish(spec, tile, sums.totals)


def _emit_chains(
    spec: BlockSpec, tile: BlockTile, left_rows: list[Expr], sums: BlockSums, chains: list[Expr], size: int
) -> None:
    """Add the products of the first `size` weights of every column in each of `chains`."""
    lanes, plan, reader, accs = spec.lanes, spec.plan, spec.reader, sums.accs
    count = tile.rows * spec.vectors
    panel = tile.packed_panel
    starts = [materialize(chain * spec.chain) for chain in chains]
    starts_in_superblock = [
        materialize(start % plan.superblock_size) if plan.superblocks > 1 else start for start in starts
    ]
    superblocks = [
        materialize(reader.superblock(panel, start // plan.superblock_size if plan.superblocks > 1 else 0))
        for start in starts
    ]
    rows = [[materialize(spec.lhs.address({"m": row, "k": start})) for row in left_rows] for start in starts]
    prefetch = partial(reader.prefetch_weights, panel, distance=reader.prefetch.distance) if _prefetches(spec) else None
    prefetches_chain = spec.chain <= MAX_PREFETCHED_CHAIN
    chain_sums = VectorTile(FLOAT32_FMA, accs, tile.rows, spec.vectors, lanes)
    chain_sums.clear(banks=len(chains))

    if prefetch is not None and prefetches_chain:
        for start in starts:
            prefetch(start, spec.chain)

    def left(row_starts: list[Expr], at_k: Expr, i: int) -> Expr:
        return spec.lhs.data[row_starts[i] + at_k]

    def right(numbers_at: list[Numbers], step: int, j: int) -> Expr:
        return numbers_at[j](step)

    def emit_group(number: Expr, steps: int) -> None:
        readers = []
        for start, start_in_superblock, superblock in zip(starts, starts_in_superblock, superblocks, strict=True):
            group_index = materialize(start_in_superblock // plan.group + number)
            if prefetch is not None and not prefetches_chain:
                prefetch(start + number * plan.group, plan.group)
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
            for i, row in enumerate(tile.row_numbers):
                number = i * spec.vectors + j
                total = accs[c * count + number]
                scaled = total if scale is None else total * scale
                sums.totals[number] = sums.totals[number] + scaled
                if minimum is not None:
                    row_sum = sums.row_sums[materialize((row - tile.block.begin) * spec.chains + chain)]
                    sums.totals[number] = sums.totals[number] + minimum * broadcast(row_sum, lanes)


def _prefetches(spec: BlockSpec) -> bool:
    """Return whether weights are prefetched: for few rows. The C target lacks prefetching (and vectors)."""
    prefetch = spec.reader.prefetch
    has_few_rows = isinstance(spec.m, int) and spec.rows_of_matrix <= prefetch.max_rows
    return spec.lanes > 1 and has_few_rows and spec.reader.is_prefetched


def _finish(spec: BlockSpec, tile: BlockTile, totals: Registers) -> None:
    """Apply the epilogue and store the existing rows."""

    def store(masks: Masks) -> None:
        tile.for_rows(
            lambda i: store_row(spec, tile.result_rows[i], tile.panel, masks, lambda j: totals[i * spec.vectors + j])
        )

    for_columns(spec, tile.panel, store)


def quantized_matmul_kernel(problem: QuantizedMatmulProblem, cpu: CpuTarget) -> tirx.PrimFunc:
    """The kernel of a product with block-quantized weights, parallel over the CPU's cores.

    For its parameters see `QuantizedMatmulProblem`.
    """
    with Function("block_product") as function:
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
            _emit_product(spec, cpu, index)
    return function.result


def _emit_product(spec: BlockSpec, cpu: CpuTarget, index: OperandView | None) -> None:
    if 0 in (spec.m, spec.problem.columns):
        T.evaluate(0)
        return
    instruction = amx_for_blocks(spec, cpu)

    def emit_vectors() -> None:
        dot = byte_dot_instruction(spec, cpu)
        emit_loops(FloatProduct(spec, cpu) if dot is None else DotProduct(spec, cpu, dot), cpu, index)

    if instruction is None:
        emit_vectors()
        return
    with T.attr(0, "pragma_import_llvm", amx.LLVM_TEXT):
        use_amx = amx.may_use_amx()
        if not isinstance(spec.m, int) and not spec.problem.rows:
            use_amx = tirx.And(spec.rows_of_matrix >= MIN_ROWS, use_amx)
        either(use_amx, lambda: emit_loops(AmxProduct(spec, instruction), cpu, index), emit_vectors)
