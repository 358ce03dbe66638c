"""Products of many rows with block-quantized weights, with AMX, as exact as products of float32 or of bfloat16.

bfloat16 represents quants exactly, a float16 weight as the sum of two bfloat16 terms, and a float32 activation as the
sum of three. AMX multiplies each term of the activations by each term of the weights, and accumulates in float32. If
activations may have 8 bits, their first term is enough: its error is at most one in 512, at a third of the work.

The products of a chain, weights of one scale, accumulate in tiles; vectors then scale the sums and add them to totals.
A chain therefore consists of whole k-steps of 32, or of 16 in tiles of half the size.

In the loops of `block_loops`, the terms of a block of rows are copied to scratch, and a panel is unpacked once per
block; within are loops over pairs of tiles of rows, chains, k-steps.
"""

from __future__ import annotations

from typing import Any

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
from .block_spec import BlockSpec, PanelProduct, RowBlock, emit_row_sums, for_columns, store_row

MIN_ROWS = 16
"""Minimum number of rows for AMX, unless the problem says that rows are prefill."""

_TERM_BLOCK_BYTES = 3 << 19
"""Bytes of the terms of a block of rows: most of the L2 cache."""

_ACTIVATION_TERMS = {8: 1, 16: 3}
"""Number of bfloat16 terms of a float32 factor, by `activation_bits`."""

_UNSCALED_CHAIN = 1024
"""Length of a chain of weights without a scale; storing its tiles takes as long as several steps."""

_MAX_STEP = 2 * TILE_ROWS  # k of a step; chains of an odd multiple of 16 have steps of half of it


def amx_for_blocks(spec: BlockSpec, cpu: CpuTarget) -> AmxInstruction | None:
    """The AMX instruction for a block-quantized product; None if it is unsupported, or vectors are better."""
    problem = spec.problem
    has_whole_steps = spec.chain % TILE_ROWS == 0 or spec.chains == 1
    has_few_rows = isinstance(spec.m, int) and spec.rows_of_matrix < MIN_ROWS
    prefers_vectors = problem.rows == "decode" or (has_few_rows and not problem.rows)
    if not has_whole_steps or prefers_vectors or problem.panel != 2 * LANES or 0 in (problem.depth, problem.columns):
        return None
    return amx_instruction_for(cpu, "bfloat16", "bfloat16", "float32")


class AmxProduct(PanelProduct):
    """Products by AMX, in a process that may use it.

    Parameters
    ----------
    spec : BlockSpec
    instruction : AmxInstruction
    """

    def __init__(self, spec: BlockSpec, instruction: AmxInstruction) -> None:
        self.spec = spec
        self.terms = _ACTIVATION_TERMS[16 if spec.plan.form.is_plain else spec.problem.activation_bits]
        depth, columns = spec.problem.depth, spec.problem.panel
        self.step_k = _MAX_STEP if spec.chain % _MAX_STEP == 0 or spec.chains == 1 else TILE_ROWS
        self.steps = ceil_div(depth, self.step_k)
        chain = _UNSCALED_CHAIN if spec.plan.form.is_plain else spec.chain
        self.chain_steps = self.steps if spec.chains == 1 else chain // self.step_k
        """Steps whose products accumulate in tiles."""
        self.weight_terms = 2 if spec.plan.form.name == "f16" else 1
        self.panel_words = self.steps * self.step_k // 2 * columns
        self.row_bytes = (ceil_div(self.terms * self.steps * self.step_k * 2, TILE_BYTES) | 1) * TILE_BYTES
        rows = 2 * TILE_ROWS
        m = spec.max_rows
        self.tile_rows = ceil_div(m, ceil_div(m, rows)) if isinstance(m, int) and m else rows
        self.tile = AmxTile(instruction, pair_heights(self.tile_rows), 2, streamed=True)
        self.block_bytes = _TERM_BLOCK_BYTES
        self.work = ceil_div(depth * self.terms, instruction.rate)

    def allocate(self, rows: int) -> None:
        """Allocate scratch of a task, for blocks of at most `rows` rows."""
        spec = self.spec
        self.row_terms = amx.scratch(rows * self.row_bytes // 2, "uint16")
        self.weights = amx.scratch(self.weight_terms * self.panel_words, "int32")
        self._allocate_scales(rows)
        self.products = amx.scratch(self.tile_rows * spec.problem.panel, "float32")
        self.totals = amx.scratch(self.tile_rows * spec.problem.panel, "float32")
        self.tile.configure(self.step_k // 2, 2 * self.step_k)

    def prepare(self, row: Expr, number: Expr) -> None:
        """Copy the terms of a row, and add up its chains."""
        spec = self.spec
        self._copy_row(row, materialize(number * (self.row_bytes // 2)))
        if self.row_sums is not None:
            target = (self.row_sums, materialize(number * spec.chains))
            rounding = _round_to_bfloat16 if self.terms == 1 else let
            emit_row_sums(spec.lhs, row, spec.problem.depth, spec.chain, LANES, target, rounding)

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

    def _allocate_scales(self, rows: int) -> None:
        """Allocate a panel's scales and minimums, and the sums of rows that multiply the minimums."""
        spec, form = self.spec, self.spec.plan.form
        count = spec.chains * spec.problem.panel
        self.scales = T.alloc_buffer((count,), "float32", scope="global") if form.scale else None
        self.minimums = T.alloc_buffer((count,), "float32", scope="global") if form.minimum else None
        self.row_sums: Any = T.alloc_buffer((rows * spec.chains,), "float32", scope="global") if form.minimum else None

    def _copy_row(self, row: Expr, target: Expr) -> None:
        """Copy the terms of a row of the left operand, with zeros after the end of each."""
        lhs, depth = self.spec.lhs, self.spec.problem.depth
        length = self.steps * self.step_k

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
        """Unpack a panel to pairs of bfloat16, ``[k / 2, column]``, and the scales of its blocks."""
        plan, reader = self.spec.plan, self.spec.reader
        columns, groups = plan.columns, ceil_div(plan.depth, plan.group)
        with loop(groups) as group:
            first = materialize(group * plan.group)
            superblock = materialize(reader.superblock(panel, first // plan.superblock_size))
            group_in_superblock = materialize(first % plan.superblock_size // plan.group)
            for j in (0, 1):
                number_at = reader.group(superblock, group_in_superblock, j)
                for pair in range(plan.group // 2):
                    start = first // 2 * columns + pair * columns + j * LANES
                    self._store_pair([let(number_at(2 * pair + i)) for i in (0, 1)], start)
        written_words = groups * (plan.group // 2) * columns
        if self.panel_words > written_words:
            for term in range(self.weight_terms):
                with loop((self.panel_words - written_words) // LANES) as vector:
                    index = lane_indices(term * self.panel_words + written_words + vector * LANES, LANES)
                    T.buffer_store(self.weights, zeros("int32", LANES), [index])
        if self.scales is not None:
            self._unpack_scales(panel)

    def _store_pair(self, numbers: list[Expr], start: Expr) -> None:
        """Store two vectors of neighbours along k as bfloat16 terms; the second term, if any, is the remainder."""
        for term in range(self.weight_terms):
            low, high = (T.reinterpret("uint32x16", number) for number in numbers)
            high = let(tirx.bitwise_and(high, constant(0xFFFF0000, "uint32", LANES)))
            index = lane_indices(term * self.panel_words + start, LANES)
            word = tirx.bitwise_or(tirx.shift_right(low, constant(16, "uint32", LANES)), high)
            T.buffer_store(self.weights, T.reinterpret("int32x16", word), [index])
            if term + 1 < self.weight_terms:
                first = let(tirx.bitwise_and(low, constant(0xFFFF0000, "uint32", LANES)))
                numbers = [
                    let(number - T.reinterpret("float32x16", upper))
                    for number, upper in zip(numbers, (first, high), strict=True)
                ]

    def _unpack_scales(self, panel: Expr) -> None:
        spec, plan, reader = self.spec, self.spec.plan, self.spec.reader
        with loop(spec.chains) as chain:
            first = materialize(chain * spec.chain)
            superblock = materialize(reader.superblock(panel, first // plan.superblock_size))
            block = materialize(first % plan.superblock_size // plan.block)
            for j in (0, 1):
                outer_scales = reader.outer(superblock, j)
                index = lane_indices(materialize(chain * plan.columns + j * LANES), LANES)
                T.buffer_store(self.scales, reader.scale(superblock, block, outer_scales, j), [index])
                if self.minimums is not None:
                    T.buffer_store(self.minimums, reader.minimum(superblock, block, outer_scales, j), [index])

    def _multiply(self, block: RowBlock, row_in_block: Expr, panel: Expr) -> None:
        """Multiply a pair of tiles of rows by a panel, and store the result; their copies begin at `row_in_block`."""
        spec, columns = self.spec, self.spec.problem.panel
        row = materialize(block.begin + row_in_block)
        count = materialize(minimum(block.limit - row, self.tile_rows))
        chains = ceil_div(self.steps, self.chain_steps)
        with loop(chains) as chain:
            first = materialize(chain * self.chain_steps)
            self.tile.clear()
            with loop(materialize(minimum(self.steps - first, self.chain_steps)) if chains > 1 else self.steps) as step:
                self._step(row_in_block, materialize(first + step))
            self.tile.store(self.products, int64(0), columns)
            self._add_scaled(count, row_in_block, chain)

        def store(masks: Masks) -> None:
            with loop(count) as r:
                index = [lane_indices(r * columns + j * LANES, LANES) for j in range(len(masks))]
                result_row = materialize(block.result_row(row + r))
                store_row(spec, result_row, panel, masks, lambda j: let(self.totals[index[j]]))

        for_columns(spec, panel, store)

    def _step(self, row_in_block: Expr, step: Expr) -> None:
        """Add the products of a k-step's terms of weights and of rows."""
        columns, step_k = self.spec.problem.panel, self.step_k
        for weight_term in range(self.weight_terms):
            weights = weight_term * self.panel_words + step * (step_k // 2 * columns)
            # Products of two small terms are below the last bit of the sum.
            for term in range(max(1, self.terms - weight_term)):
                at = (term * self.steps + step) * step_k

                def left(i: int, at: Expr = at) -> tuple[Expr, Expr]:
                    row = row_in_block + self.tile.first_row(i)
                    return amx.address(self.row_terms, row * (self.row_bytes // 2) + at), self.row_bytes

                def right(j: int, weights: Expr = weights) -> tuple[Expr, Expr]:
                    return amx.address(self.weights, weights + j * LANES), columns * 4

                self.tile.step(left, right if term == 0 else None)

    def _add_scaled(self, count: Expr, row_in_block: Expr, chain: Expr) -> None:
        """Add the scaled sums of a chain to the totals."""
        columns, chains = self.spec.problem.panel, self.spec.chains
        indices = [lane_indices(materialize(chain * columns + j * LANES), LANES) for j in (0, 1)]
        scales = [None if self.scales is None else let(self.scales[index]) for index in indices]
        minimums = [None if self.minimums is None else let(self.minimums[index]) for index in indices]
        is_first = T.broadcast(chain < 1, LANES)
        with loop(count) as r:
            for j in (0, 1):
                index = lane_indices(r * columns + j * LANES, LANES)
                total = T.Select(is_first, zeros("float32", LANES), let(self.totals[index]))
                product = let(self.products[index])
                total = total + (product if scales[j] is None else product * scales[j])
                if minimums[j] is not None:
                    row_sum = self.row_sums[materialize((row_in_block + r) * chains + chain)]
                    total = total + minimums[j] * T.broadcast(row_sum, LANES)
                T.buffer_store(self.totals, total, [index])


def _split_float32(count: int, x: Expr) -> list[Expr]:
    """The first `count` bfloat16 terms of x, as bits; three add up to x. If x is not finite, the others are zero."""
    lowest = constant(-3.4028234663852886e38, "float32", LANES)
    terms = []
    for _ in range(count):
        bits = let(bfloat16_bits(x))
        terms.append(bits)
        rest = let(x - _widen_bfloat16(bits))
        # Infinity minus itself is NaN, for which comparisons are false.
        x = let(T.Select(rest >= lowest, rest, zeros("float32", LANES)))
    return terms


def _round_to_bfloat16(x: Expr) -> Expr:
    return _widen_bfloat16(let(bfloat16_bits(let(x))))


def _widen_bfloat16(bits: Expr) -> Expr:
    """Vectors of bfloat16 bits as float32."""
    wide = tirx.shift_left(tirx.Cast("uint32x16", bits), constant(16, "uint32", LANES))
    return T.reinterpret("float32x16", wide)
