"""Products of many rows with block-quantized weights, with AMX, which multiplies bfloat16 and accumulates in float32.

Weights are dequantized, with their scales and minimums, and rounded to the sum of one or two bfloat16 terms,
activations to that of one to three; AMX multiplies each term of the activations by each term of the weights. If
activations may have 8 bits, one term of both is enough: each is rounded by at most one in 512. If they may have 16,
both have two terms. Plain weights are exact: a bfloat16 is one term, a float16 two, and the activations have three,
which make up a float32.

Scales could instead multiply sums of blocks, which weights as integers would make exact. Storing tiles and adding their
rows up for each block of 32 takes several times as long as multiplying them.

In the loops of `block_loops`, the terms of a block of rows are copied to scratch, and a panel is unpacked once per
block; within are loops over pairs of tiles of rows, and k-steps.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...target.amx_instructions import TILE_BYTES, TILE_ROWS, AmxInstruction, amx_instruction_for
from ...target.cpu_target import CpuTarget
from ..core.builder import (
    Expr,
    Masks,
    ceil_div,
    constant,
    int64,
    lane_indices,
    lane_mask,
    let,
    loop,
    materialize,
    minimum,
    zeros,
)
from ..math.casts import bfloat16_bits
from ..microkernel import amx
from ..microkernel.amx import LANES
from ..microkernel.microkernel import AmxTile, pair_heights
from .block_spec import BlockSpec, PanelProduct, RowBlock, for_columns, store_row

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
