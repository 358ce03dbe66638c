"""Products with block-quantized weights, which are dequantized in registers where they are multiplied.

A panel of columns is contiguous in memory (see `relax_hetero.encoding.block_panels`). Turning a quant into a number
takes two or three instructions, a share of the work that falls with the rows of a tile; scales are applied to the sums
of a block, and minimums to the sums of the left factors of the block. Nothing is unpacked to memory: a single row reads
only the quantized bits, and many rows are nearly as fast as a product of float32.

The loops around tiles are in `block_loops`, for one matrix and for a mixture of experts; within a tile are chains
(weights of one scale, which an accumulator adds up), groups, the weights of a group. CPUs with dot products of bytes
use them (`block_dots`); this file has all other products.

AMX, which multiplies bfloat16 and accumulates in float32, computes many rows. Weights are dequantized, with their
scales and minimums, and rounded to the sum of one or two bfloat16 terms, activations to that of one to three; AMX
multiplies each term of the activations by each term of the weights. If activations may have 8 bits, one term of both is
enough: each is rounded by at most one in 512. If they may have 16, both have two terms. Plain weights are exact: a
bfloat16 is one term, a float16 two, and the activations have three, which make up a float32.

Scales could instead multiply sums of blocks, which weights as integers would make exact. Storing tiles and adding their
rows up for each block of 32 takes several times as long as multiplying them.

In the loops of `block_loops`, the terms of a block of rows are copied to scratch, and a panel is unpacked once per
block; within are loops over pairs of tiles of rows, and k-steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.problem import QuantizedMatmulProblem
from ...target.amx_instructions import TILE_BYTES, TILE_ROWS, AmxInstruction, amx_instruction_for
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
    constant,
    either,
    int64,
    lane_indices,
    lane_mask,
    let,
    loop,
    materialize,
    minimum,
    zeros,
)
from ..core.view import OperandView, extent_of
from ..elementwise.expression_code import EpilogueCode
from ..math.casts import bfloat16_bits
from ..microkernel import amx
from ..microkernel.amx import LANES
from ..microkernel.microkernel import FMAS_IN_FLIGHT, AmxTile, VectorTile, pair_heights
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

MAX_PREFETCHED_CHAIN = 64  # maximum number of weights of a chain that is prefetched as a whole


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


MIN_ROWS = 16
"""Minimum number of rows of a matrix for AMX, unless all prefill of the only matrix needs the same order of sums."""

_TERM_BLOCK_BYTES = 3 << 19  # bytes of the terms of a block of rows: most of the L2 cache
_TERMS = {8: 1, 16: 2}  # number of bfloat16 terms of activations and of weights with scales, by `activation_bits`
_PLAIN_TERMS = 3  # number of bfloat16 terms of activations that plain weights multiply, which make up a float32
_STEP = 2 * TILE_ROWS  # number of weights of a column that a tile multiplies at once


def amx_for_blocks(spec: BlockSpec, cpu: CpuTarget) -> AmxInstruction | None:
    """The AMX instruction for a block-quantized product; None if it is unsupported, or vectors are better."""
    problem = spec.problem
    has_few_rows = isinstance(spec.m, int) and spec.rows_of_matrix < MIN_ROWS
    prefers_vectors = problem.rows == "decode" or (has_few_rows and (not problem.rows or problem.experts > 0))
    if prefers_vectors or problem.panel != 2 * LANES or 0 in (problem.depth, problem.columns):
        return None
    return amx_instruction_for(cpu, "bfloat16", "bfloat16", "float32")


class AmxProduct(PanelProduct):
    """Products by AMX, in a process that may use it."""

    def __init__(self, spec: BlockSpec, instruction: AmxInstruction) -> None:
        self.spec = spec
        form, depth, columns = spec.plan.form, spec.problem.depth, spec.problem.panel
        self.terms = _PLAIN_TERMS if form.is_plain else _TERMS[spec.problem.activation_bits]
        self.weight_terms = {"f16": 2, "bf16": 1}.get(form.name, self.terms)
        self.steps = ceil_div(depth, _STEP)
        self.panel_words = self.steps * _STEP // 2 * columns
        self.row_bytes = (ceil_div(self.terms * self.steps * _STEP * 2, TILE_BYTES) | 1) * TILE_BYTES
        rows = 2 * TILE_ROWS
        m = spec.max_rows
        self.tile_rows = ceil_div(m, ceil_div(m, rows)) if isinstance(m, int) and m else rows
        self.tile = AmxTile(instruction, pair_heights(self.tile_rows), 2, streamed=True)
        self.block_bytes = _TERM_BLOCK_BYTES
        self.work = ceil_div(depth * len(self._products), instruction.rate)

    @property
    def _products(self) -> list[tuple[int, int]]:
        """Pairs of a term of the weights and one of the activations that are multiplied.

        Products of two small terms are below the last bit of the sum.
        """
        return [(weight, term) for weight in range(self.weight_terms) for term in range(max(1, self.terms - weight))]

    def allocate(self, rows: int) -> None:
        """Allocate scratch of a task, for blocks of at most `rows` rows."""
        spec = self.spec
        self.row_terms = amx.scratch(rows * self.row_bytes // 2, "uint16")
        self.weights = amx.scratch(self.weight_terms * self.panel_words, "int32")
        self.products = amx.scratch(self.tile_rows * spec.problem.panel, "float32")
        self.tile.configure(_STEP // 2, 2 * _STEP)

    def prepare(self, row: Expr, number: Expr) -> None:
        """Copy the terms of a row."""
        self._copy_row(row, materialize(number * (self.row_bytes // 2)))

    def multiply(self, block: RowBlock, count: Expr, first: Expr, last: Expr) -> None:
        """Multiply by panels, each of which is unpacked first."""
        with loop(last - first) as n:
            panel = materialize(first + n)
            self._unpack(block.packed_panel(panel))
            with loop(ceil_div(block.end - block.begin, self.tile_rows)) as pair:
                self._multiply(block, materialize(pair * self.tile_rows), panel)

    def release(self) -> None:
        """Release the tiles."""
        amx.release()

    def _copy_row(self, row: Expr, target: Expr) -> None:
        """Copy the terms of a row of the left operand, with zeros after the end of each."""
        lhs, depth = self.spec.lhs, self.spec.problem.depth
        length = self.steps * _STEP

        def store(column: Expr, terms: list[Expr]) -> None:
            for number, bits in enumerate(terms):
                index = lane_indices(target + number * length + column, LANES)
                T.buffer_store(self.row_terms, bits, [index])

        def copy(column: Expr, mask: Expr | None) -> None:
            store(column, _split_float32(self.terms, let(lhs.load({"m": row, "k": column}, "k", LANES, mask))))

        vectors, tail = divmod(depth, LANES)
        with loop(vectors) as vector:
            copy(materialize(vector * LANES), None)
        if tail:
            copy(tirx.const(vectors * LANES, "int64"), lane_mask(tail, LANES))
        for column in range(ceil_div(depth, LANES) * LANES, length, LANES):
            store(tirx.const(column, "int64"), [zeros("uint16", LANES)] * self.terms)

    def _unpack(self, panel: Expr) -> None:
        """Dequantize a panel to pairs of bfloat16, ``[k / 2, column]``, for each term."""
        plan = self.spec.plan
        groups, per_block = ceil_div(plan.depth, plan.group), plan.block // plan.group
        with loop(ceil_div(groups, per_block)) as block:
            first = materialize(block * plan.block)
            superblock = materialize(self.spec.reader.superblock(panel, first // plan.superblock_size))
            in_superblock = materialize(first % plan.superblock_size)
            factors = [self._factors(superblock, materialize(in_superblock // plan.block), j) for j in (0, 1)]
            is_whole = groups % per_block == 0
            with loop(per_block if is_whole else minimum(groups - block * per_block, per_block)) as group:
                number = materialize(in_superblock // plan.group + group)
                start = materialize((block * per_block + group) * (plan.group // 2) * plan.columns)
                for j in (0, 1):
                    self._unpack_group(superblock, number, j, factors[j], start + j * LANES)
        written_words = groups * (plan.group // 2) * plan.columns
        if self.panel_words > written_words:
            for term in range(self.weight_terms):
                with loop((self.panel_words - written_words) // LANES) as vector:
                    index = lane_indices(term * self.panel_words + written_words + vector * LANES, LANES)
                    T.buffer_store(self.weights, zeros("int32", LANES), [index])

    def _factors(self, superblock: Expr, block: Expr, j: int) -> tuple[Expr | None, Expr | None]:
        """Scale and minimum of a block in a vector of columns."""
        reader = self.spec.reader
        outer = reader.outer(superblock, j)
        return reader.scale(superblock, block, outer, j), reader.minimum(superblock, block, outer, j)

    def _unpack_group(
        self, superblock: Expr, number: Expr, j: int, factors: tuple[Expr | None, Expr | None], start: Expr
    ) -> None:
        """Dequantize a group of weights in a vector of columns."""
        plan, (scale, least) = self.spec.plan, factors
        number_at = self.spec.reader.group(superblock, number, j)

        def terms_at(position: int) -> list[Expr]:
            value = number_at(position)
            value = value if scale is None else value * scale
            return _split_float32(self.weight_terms, let(value if least is None else value + least))

        for pair in range(plan.group // 2):
            low, high = (terms_at(2 * pair + i) for i in (0, 1))
            for term in range(self.weight_terms):
                halves = [tirx.Cast("uint32x16", bits[term]) for bits in (low, high)]
                word = tirx.bitwise_or(halves[0], tirx.shift_left(halves[1], constant(16, "uint32", LANES)))
                index = lane_indices(term * self.panel_words + start + pair * plan.columns, LANES)
                T.buffer_store(self.weights, T.reinterpret("int32x16", word), [index])

    def _multiply(self, block: RowBlock, row_in_block: Expr, panel: Expr) -> None:
        """Multiply a pair of tiles of rows by a panel, and store the result; their copies begin at `row_in_block`."""
        spec, columns = self.spec, self.spec.problem.panel
        row = materialize(block.begin + row_in_block)
        count = materialize(minimum(block.limit - row, self.tile_rows))
        self.tile.clear()
        with loop(self.steps) as step:
            self._step(row_in_block, step)
        self.tile.store(self.products, int64(0), columns)

        def store(masks: Masks) -> None:
            with loop(count) as r:
                index = [lane_indices(r * columns + j * LANES, LANES) for j in range(len(masks))]
                result_row = materialize(block.result_row(row + r))
                store_row(spec, result_row, panel, masks, lambda j: let(self.products[index[j]]))

        for_columns(spec, panel, store)

    def _step(self, row_in_block: Expr, step: Expr) -> None:
        """Add the products of a k-step's terms of weights and of rows."""
        columns = self.spec.problem.panel
        for weight_term, term in self._products:
            weights = weight_term * self.panel_words + step * (_STEP // 2 * columns)
            at = (term * self.steps + step) * _STEP

            def left(i: int, at: Expr = at) -> tuple[Expr, Expr]:
                row = row_in_block + self.tile.first_row(i)
                return amx.address(self.row_terms, row * (self.row_bytes // 2) + at), self.row_bytes

            def right(j: int, weights: Expr = weights) -> tuple[Expr, Expr]:
                return amx.address(self.weights, weights + j * LANES), columns * 4

            self.tile.step(left, right if term == 0 else None)


def _split_float32(count: int, x: Expr) -> list[Expr]:
    """The first `count` bfloat16 terms of x, as bits; three add up to x. If x is not finite, the others are zero."""
    lowest = constant(-3.4028234663852886e38, "float32", LANES)
    terms = [let(bfloat16_bits(x))]
    while len(terms) < count:
        rest = let(x - _widen_bfloat16(terms[-1]))
        # Infinity minus itself is NaN, for which comparisons are false.
        x = let(T.Select(rest >= lowest, rest, zeros("float32", LANES)))
        terms.append(let(bfloat16_bits(x)))
    return terms


def _widen_bfloat16(bits: Expr) -> Expr:
    """Vectors of bfloat16 bits as float32."""
    wide = tirx.shift_left(tirx.Cast("uint32x16", bits), constant(16, "uint32", LANES))
    return T.reinterpret("float32x16", wide)
