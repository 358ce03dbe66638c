"""Products with block-quantized weights, computed with dot products of bytes (VNNI, AArch64's DotProd).

Quants are small integers, which need no conversion: a lane holds four of a column, and one instruction multiplies them
by four bytes of a row and accumulates. Activations are quantized to one or two bytes (`Codes`), so four weights of a
column take one or two instructions, where floats take four and the conversions. The sums of a chain are exact integers,
and are scaled once. (Measured on a Zen 4 against float products, with two bytes: 512 rows 1.75 to 2.0 times as fast, 4
rows 1.4 to 2.0 times, one row of 4 to 6 bits 1.15 to 1.45 times.)

In the loops of `block_loops`, blocks of rows are quantized first, and panels are unpacked first if there are many rows
(`UnpackedPanel`); within a tile are loops over the chains of weights of one scale, groups, four weights of each column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...target.cpu_target import ZEN4, CpuTarget
from ...target.dot_instructions import DotInstruction, block_dot_instruction
from ...target.tiles import tile_sizes
from ..core.builder import (
    Expr,
    Masks,
    Registers,
    broadcast,
    ceil_div,
    constant,
    either,
    lane_indices,
    lane_mask,
    lane_of,
    let,
    loop,
    materialize,
    over_lanes,
    prefetch,
    scratch,
    vector_type,
    zeros,
)
from ..core.view import Coordinates, OperandView
from ..math.vector_math import ROUNDER, ROUNDER_BITS
from ..microkernel.k_step import widen_int16_sums
from ..microkernel.microkernel import FMAS_IN_FLIGHT, VectorTile
from .block_spec import ROW_BLOCK_BYTES, BlockSpec, BlockTile, PanelProduct, RowBlock, for_columns, store_row
from .weight_bytes import ByteReader, byte_order, max_code

# A panel of weights is unpacked to scratch once for all rows of a block, as bytes and float32 scales, in the order in
# which a tile reads it. (Measured on a Zen 5, prefill of 512 tokens of Gemma 3 270M, prefetch of epilogues included:
# 1.18 times as fast with 8-bit activations, 1.10 times with 16 bits.)


@dataclass(frozen=True)
class UnpackedPanel:
    """Buffers of an unpacked panel."""

    reader: ByteReader
    chain: int  # number of weights that are added up as integers
    words: Any  # int32 ``[vector, chain, ...]``: lanes of four bytes, as from `ByteReader.group`
    # float32 ``[vector, block, lane]``: factors of the sums of quants and of the sums of rows.
    scales: Any
    minimums: Any

    @staticmethod
    def allocate(reader: ByteReader, chain: int) -> UnpackedPanel:
        """Scratch for the panels of a format."""
        plan, lanes = reader.panel.plan, reader.panel.lanes
        vectors, chains = plan.columns // lanes, ceil_div(plan.depth, chain)
        count = vectors * ceil_div(plan.depth, plan.block) * lanes
        return UnpackedPanel(
            reader,
            chain,
            scratch(vectors * chains * chain // 4 * lanes, "int32"),
            scratch(count, "float32") if plan.form.scale else None,
            scratch(count, "float32") if plan.form.minimum else None,
        )

    def fill(self, panel: Expr) -> None:
        """Unpack a panel."""
        reader, plan = self.reader.panel, self.reader.panel.plan
        with loop(plan.columns // reader.lanes) as vector:
            with loop(ceil_div(plan.depth, plan.block)) as block:
                first = materialize(block * plan.block)
                superblock = materialize(reader.superblock(panel, first // plan.superblock_size))
                self._fill_scales(superblock, vector, block, materialize(first % plan.superblock_size // plan.block))
            with loop(ceil_div(plan.depth, self.chain)) as chain:
                first = materialize(chain * self.chain)
                superblock = materialize(reader.superblock(panel, first // plan.superblock_size))
                group = materialize(first % plan.superblock_size // plan.group)
                start, quad = self.chain_offset(vector, chain), 0
                for number in range(self.chain // plan.group):
                    for quad_lanes in self.reader.group(superblock, group + number, vector):
                        index = lane_indices(start + quad * reader.lanes, reader.lanes)
                        T.buffer_store(self.words, quad_lanes, [index])
                        quad += 1

    def _fill_scales(self, superblock: Expr, vector: Expr, block: Expr, block_in_superblock: Expr) -> None:
        reader = self.reader.panel
        outer_scales = reader.outer(superblock, vector)
        for buffer, read in ((self.scales, reader.scale), (self.minimums, reader.minimum)):
            value = read(superblock, block_in_superblock, outer_scales, vector)
            if value is not None:
                T.buffer_store(buffer, value, [self._block_lanes(vector, block)])

    def quads(self, offsets: Sequence[Expr], first: Expr, count: int) -> Iterator[Sequence[Expr]]:
        """Iterate over `count` weights of the chains at `offsets`, from `first` on, four of each column at a time."""
        lanes = self.reader.panel.lanes
        starts = [offset + first * (lanes // 4) for offset in offsets]
        for number in range(count // 4):
            yield [self.words[lane_indices(start + number * lanes, lanes)] for start in starts]

    def scale_and_minimum(self, vector: Expr, first: Expr) -> tuple[Expr | None, Expr | None]:
        """Scale and minimum of the block at k = `first`; None if the format lacks them."""
        index = self._block_lanes(vector, materialize(first // self.reader.panel.plan.block))
        return (
            None if self.scales is None else self.scales[index],
            None if self.minimums is None else self.minimums[index],
        )

    def chain_offset(self, vector: Expr, chain: Expr) -> Expr:
        """Offset in `words` of the weights of a vector of columns and a chain."""
        plan, lanes = self.reader.panel.plan, self.reader.panel.lanes
        return materialize((vector * ceil_div(plan.depth, self.chain) + chain) * (self.chain // 4 * lanes))

    def _block_lanes(self, vector: Expr, block: Expr) -> Expr:
        plan, lanes = self.reader.panel.plan, self.reader.panel.lanes
        return lane_indices((vector * ceil_div(plan.depth, plan.block) + block) * lanes, lanes)


# Rows of the left operand are quantized to bytes with a scale for each chain.
#
# A number is ``scale * (256 * high + low)``, two signed bytes with a product each, or ``scale * high``, half of the
# work. The error is at most 1/65,024 of the largest number of the chain, or 1/254.

_MAX_INTEGER = {1: 127, 2: 127 * 256}  # largest magnitude of a quantized number, by its bytes

_MIN_MAGNITUDE = 1e-30
"""A chain whose numbers are all smaller becomes zeros: the reciprocal of its scale would overflow float32."""


@dataclass(frozen=True)
class Codes:
    """Buffers of a quantized block of rows."""

    terms: int  # bytes of a number: 1 or 2
    words: Any  # int32 ``[row, chain, ...]``: the high bytes of a chain, then the low ones
    scales: Any  # float32 ``[row, chain]``
    # Sums of integers ``[row, chain]``: times `min_code` as int32, or times the scale as float32 if that is 0.
    sums: Any
    # Numbers of a chain, and chains of a row.
    chain: int
    chains: int
    min_code: int  # smallest code of the format, the factor of the sums of integers; 0 if the sums are scaled instead
    order: Sequence[int]  # permutation of the numbers of a group in which their bytes are stored

    @property
    def row_words(self) -> int:
        """Number of words of a row."""
        return self.chains * self.chain_words

    @property
    def chain_words(self) -> int:
        """Number of words of a chain."""
        return self.terms * self.chain // 4

    def write_chain(
        self,
        lhs: OperandView,  # operand of float32
        # row, row_in_block: index of the row in the operand and in the block.
        row: Expr,
        row_in_block: Expr,
        number: Expr,  # index of the chain
        size: int,  # number of its elements that exist
        lanes: int,  # lanes of a vector
    ) -> None:
        """Write the bytes of a chain."""
        first = materialize(number * self.chain)
        values = [
            let(lhs.load({"m": row, "k": first + start}, "k", lanes, lane_mask(size - start, lanes)))
            for start in range(0, size, lanes)
        ]
        while len(values) * lanes < self.chain:
            values.append(constant(0.0, "float32", lanes))
        index = materialize(row_in_block * self.chains + number)
        scale, inverse_scale = self._scale(values, lanes)
        T.buffer_store(self.scales, scale, [index])
        integers = [
            let(_nearest(value * broadcast(inverse_scale, lanes), lanes))
            for value in self._in_byte_order(values, lanes)
        ]
        if self.sums is not None:
            # Sums of the rounded integers: a rounding error is then multiplied by a weight, not by its larger quant.
            total = _total(integers, lanes)
            min_code = tirx.const(self.min_code, "int32")
            row_sum = total * min_code if self.min_code else tirx.Cast("float32", total) * scale
            T.buffer_store(self.sums, row_sum, [index])
        words = materialize(row_in_block * self.row_words + number * self.chain_words)
        byte_bits = constant(8, "int32", lanes)
        for vector, integer in enumerate(integers):
            term_bytes = [integer]
            if self.terms == 2:
                high = let(tirx.shift_right(integer + constant(128, "int32", lanes), byte_bits))
                term_bytes = [high, integer - tirx.shift_left(high, byte_bits)]
            for term, byte in enumerate(term_bytes):
                start = words + term * (self.chain // 4) + vector * (lanes // 4)
                packed = tirx.reinterpret(vector_type("int32", lanes // 4), tirx.Cast(vector_type("int8", lanes), byte))
                T.buffer_store(self.words, packed, [lane_indices(start, lanes // 4)])

    def _scale(self, values: list[Expr], lanes: int) -> tuple[Expr, Expr]:
        """The scale of a chain and its reciprocal; NaN if a number is NaN."""
        max_bits = None
        for value in values:
            bits = tirx.bitwise_and(
                tirx.reinterpret(vector_type("int32", lanes), value), constant(0x7FFFFFFF, "int32", lanes)
            )
            # As bits, NaN is larger than all numbers.
            max_bits = let(bits) if max_bits is None else let(T.max(max_bits, bits))
        max_magnitude = T.bind(tirx.reinterpret("float32", over_lanes(max_bits, T.max, lanes)))
        is_zero = max_magnitude < tirx.const(_MIN_MAGNITUDE, "float32")
        zero, max_integer = tirx.const(0, "float32"), _MAX_INTEGER[self.terms]
        scale = T.bind(tirx.Select(is_zero, zero, max_magnitude * tirx.const(1 / max_integer, "float32")))
        return scale, T.bind(tirx.Select(is_zero, zero, tirx.const(max_integer, "float32") / max_magnitude))

    def _in_byte_order(self, values: list[Expr], lanes: int) -> list[Expr]:
        """The numbers of a chain in byte order."""
        run_length = max(len(self.order), lanes)
        order = [start + position for start in range(0, run_length, len(self.order)) for position in self.order]
        if order == list(range(run_length)):
            return values
        reordered = []
        for first in range(0, len(values), run_length // lanes):
            run_values = values[first : first + run_length // lanes]
            for start in range(0, run_length, lanes):
                reordered.append(let(T.Shuffle(run_values, order[start : start + lanes])))
        return reordered


def _total(values: list[Expr], lanes: int) -> Expr:
    total = values[0]
    for value in values[1:]:
        total = let(total + value)
    return over_lanes(let(total), lambda a, b: a + b, lanes)


def _nearest(value: Expr, lanes: int) -> Expr:
    """The nearest integers."""
    bits = tirx.reinterpret(vector_type("int32", lanes), value + constant(ROUNDER, "float32", lanes))
    return bits - constant(ROUNDER_BITS, "int32", lanes)


MAX_INTEGER_CHAIN = {1: 32, 2: 128}
"""Maximum number of weights that are added up as integers, by bytes of an activation: quantization errors are relative
to the largest number of the chain. (Formats of files have scales for 16 or 32 weights.)"""

_ROWS = 8
"""Rows of a register tile, with a sum for each byte of an activation. (Measured: 6 and 12 are slower by 2 to 15 %.)"""

_UNROLLED_WEIGHTS = 32  # maximum number of weights of a chain whose steps are unrolled; longer chains are loops

MIN_UNPACKED_ROWS = {1: 24, 2: 8}
"""Minimum number of rows for which panels are unpacked first, by bytes of an activation. (Measured on a Zen 5: 8 to 16
rows are then 1.3 to 2.0 times as fast with two bytes, 0.85 to 1.0 times with one.)"""

ZEN4_MIN_UNPACKED_ROWS = 256
"""The same on a Zen 4, where loads of unpacked bytes are slower. (Measured with experts: 16 to 128 rows are 1.2 to 1.5
times as fast without in q4_0, 1.05 to 1.2 times in q4_k; 512 rows of one matrix 1.0 times, 0.9 times in q6_k.)"""

_FEW_ROWS = 4
"""Maximum rows of a tile that accumulates all vectors of a panel together, so that enough sums are in flight."""


def byte_dot_instruction(spec: BlockSpec, cpu: CpuTarget) -> DotInstruction | None:
    """The instruction that multiplies weights as bytes; None if the CPU or the format lacks it."""
    form, lanes = spec.plan.form, spec.lanes
    if form.is_plain or spec.problem.panel != 2 * lanes:
        return None
    if 0 in (spec.m, spec.problem.columns, spec.problem.depth) or _chain_length(spec) % max(lanes, spec.plan.group):
        return None
    return block_dot_instruction(cpu, max_code(form), _unrolled_weights(spec) // 4, _activation_bytes(spec) == 1)


def _chain_length(spec: BlockSpec) -> int:
    block, max_chain = spec.plan.block, MAX_INTEGER_CHAIN[_activation_bytes(spec)]
    return block if block <= max_chain else gcd(block, max_chain)


def _unrolled_weights(spec: BlockSpec) -> int:
    return gcd(_chain_length(spec), _UNROLLED_WEIGHTS)


def _activation_bytes(spec: BlockSpec) -> int:
    return spec.problem.activation_bits // 8


class DotProduct(PanelProduct):
    """Products by dot products of bytes."""

    def __init__(self, spec: BlockSpec, cpu: CpuTarget, dot: DotInstruction) -> None:
        self.spec, self.dot, self.terms = spec, dot, _activation_bytes(spec)
        is_zen4 = ZEN4 in cpu.features
        self.min_unpacked_rows = ZEN4_MIN_UNPACKED_ROWS if is_zen4 else MIN_UNPACKED_ROWS[self.terms]
        self.reader = ByteReader.of(spec.reader, cpu, is_signed=dot.types[1] == "int8")
        self.chain = _chain_length(spec)
        self.chains = ceil_div(spec.problem.depth, self.chain)
        self.unrolled_weights = _unrolled_weights(spec)
        # Quads of a row that one load fetches, for instructions that multiply by a lane of it.
        self.left_quads = gcd(self.unrolled_weights // 4, max(1, tile_sizes(cpu).left_bytes // 4))
        self.tile_rows = min(_ROWS, spec.max_rows) if isinstance(spec.max_rows, int) else _ROWS
        self.row_bytes, self.block_bytes = self.terms * self.chains * self.chain, ROW_BLOCK_BYTES
        self.work = spec.problem.depth

    def allocate(self, rows: int) -> None:
        """Allocate scratch of a task, for blocks of at most `rows` rows."""
        spec, form, count = self.spec, self.spec.plan.form, rows * self.chains
        self.codes = Codes(
            self.terms,
            scratch(rows * self.row_bytes // 4, "int32"),
            scratch(count, "float32"),
            self._allocate_row_sums(count),
            self.chain,
            self.chains,
            0 if form.minimum else self.reader.min_code,
            byte_order(form.bits),
        )
        size = max(self.tile_rows, min(self.tile_rows, _FEW_ROWS) * spec.vectors)
        self.sums = Registers(max(size * self.terms, FMAS_IN_FLIGHT), "int32", spec.lanes)
        self.chain_totals = Registers(size, "float32", spec.lanes)
        self.partial_sums = Registers(len(self.sums), "int32", spec.lanes) if self.dot.short else self.sums
        self.totals = scratch(self.tile_rows * spec.vectors * spec.lanes, "float32")
        may_unpack = not isinstance(spec.m, int) or spec.m >= self.min_unpacked_rows
        self.panel = UnpackedPanel.allocate(self.reader, self.chain) if may_unpack else None

    def _allocate_row_sums(self, count: int) -> Expr:
        if self.spec.plan.form.minimum:
            return scratch(count, "float32")
        return scratch(count, "int32") if self.reader.min_code else None

    def prepare(self, row: Expr, number: Expr) -> None:
        """Quantize a row."""
        chains, tail = divmod(self.spec.problem.depth, self.chain)

        def quantize_chain(chain: Expr, size: int) -> None:
            self.codes.write_chain(self.spec.lhs, row, number, chain, size, self.spec.lanes)

        if chains:
            with loop(chains) as chain:
                quantize_chain(chain, self.chain)
        if tail:
            quantize_chain(tirx.const(chains, "int64"), tail)

    def multiply(self, block: RowBlock, count: Expr, first: Expr, last: Expr) -> None:
        """Multiply by panels that are unpacked first if they meet many rows."""

        def multiply(unpacked: UnpackedPanel | None) -> None:
            self.unpacked = unpacked
            with loop(last - first) as number:
                panel = materialize(first + number)
                if unpacked is not None:
                    unpacked.fill(block.packed_panel(panel))
                block.tiles(panel, self.tile_rows, self._write_tile)

        is_many = False if self.panel is None else count >= self.min_unpacked_rows
        either(is_many, lambda: multiply(self.panel), lambda: multiply(None))

    def _write_tile(self, tile: BlockTile) -> None:
        spec = self.spec
        if self.unpacked is not None:
            self._prefetch_epilogue(tile)
        if tile.rows <= _FEW_ROWS:
            self._write_vectors(tile, list(range(spec.vectors)))
        else:
            # A loop makes LLVM load bytes of the left operand where they are multiplied. With the vectors unrolled it
            # loads them once for all, and spills them.
            with loop(spec.vectors) as vector:
                self._write_vectors(tile, [vector])

        def store(masks: Masks) -> None:
            tile.for_rows(
                lambda i: store_row(
                    spec, tile.result_rows[i], tile.panel, masks, lambda j: self.totals[self._total_index(i, j)]
                )
            )

        for_columns(spec, tile.panel, store)

    def _prefetch_epilogue(self, tile: BlockTile) -> None:
        """Prefetch the operands of the tile's epilogue and the lines of its result."""
        spec, rows = self.spec, tile.result_rows

        def at(_: OperandView, i: int, j: int) -> Coordinates:
            return {"m": rows[i], "n": tile.panel * spec.problem.panel + j * spec.lanes}

        spec.epilogue.prefetch("m", (tile.rows, spec.vectors), at)
        for i in range(tile.rows):
            for j in range(spec.vectors):
                prefetch(spec.result.data, spec.result.address(at(spec.result, i, j)))

    def _total_index(self, i: int, vector: Expr) -> list[Expr]:
        return [lane_indices((i * self.spec.vectors + vector) * self.spec.lanes, self.spec.lanes)]

    def _write_vectors(self, tile: BlockTile, vectors: list[Expr]) -> None:
        """Write the totals of a tile's rows for some vectors of columns."""
        count = tile.rows * len(vectors)
        for number in range(count):
            self.chain_totals[number] = zeros("float32", self.spec.lanes)
        with loop(self.chains) as chain:
            self._write_chain(tile, chain, vectors)
        for number in range(count):
            i, vector = divmod(number, len(vectors))
            T.buffer_store(self.totals, self.chain_totals[number], self._total_index(i, vectors[vector]))

    def _write_chain(self, tile: BlockTile, chain: Expr, vectors: list[Expr]) -> None:
        """Add the products of a chain of weights."""
        first = materialize(chain * self.chain)
        rows = [materialize(row - tile.block.begin) for row in tile.row_numbers]
        code_at = [materialize(row * self.codes.row_words + chain * self.codes.chain_words) for row in rows]
        scale_at = [materialize(row * self.chains + chain) for row in rows]
        if self.unpacked is not None:
            unpacked = self.unpacked
            starts = [unpacked.chain_offset(j, chain) for j in vectors]
            read_quads = partial(unpacked.quads, starts, count=self.unrolled_weights)
            self._add_products(tile, len(vectors), read_quads, code_at, scale_at)
            for number, j in enumerate(vectors):
                self._scale(tile, number, len(vectors), *unpacked.scale_and_minimum(j, first), scale_at)
            return
        spec, plan, reader = self.spec, self.spec.plan, self.spec.reader
        start_in_superblock = materialize(first % plan.superblock_size) if plan.superblocks > 1 else first
        number = first // plan.superblock_size if plan.superblocks > 1 else 0
        superblock = materialize(reader.superblock(tile.packed_panel, number))
        block = materialize(start_in_superblock // plan.block) if plan.blocks > 1 else 0
        if isinstance(spec.m, int) and spec.rows_of_matrix <= _FEW_ROWS and reader.is_prefetched:
            reader.prefetch_weights(tile.packed_panel, first, self.chain, reader.prefetch.distance)
        group = materialize(start_in_superblock // plan.group)

        def quads(first: Expr) -> Iterator[Sequence[Expr]]:
            return self._unpack_quads(vectors, superblock, materialize(group + first // plan.group))

        self._add_products(tile, len(vectors), quads, code_at, scale_at)
        for number, j in enumerate(vectors):
            outer_scales = reader.outer(superblock, j)
            scale = reader.scale(superblock, block, outer_scales, j)
            minimum = reader.minimum(superblock, block, outer_scales, j)
            self._scale(tile, number, len(vectors), scale, minimum, scale_at)

    def _unpack_quads(self, vectors: list[Expr], superblock: Expr, group: Expr) -> Iterator[Sequence[Expr]]:
        """Weights of an unrolled loop body for some vectors of columns, four of each column at a time."""
        for number in range(self.unrolled_weights // self.spec.plan.group):
            yield from zip(*(self.reader.group(superblock, group + number, j) for j in vectors), strict=True)

    def _sums_of(self, tile: BlockTile, tile_vectors: int) -> tuple[VectorTile, int]:
        """The sums of a tile, with a row for each term of a row, and the number of their banks."""
        sums = VectorTile(self.dot, self.sums, tile.rows * self.terms, tile_vectors, self.spec.lanes)
        return sums, max(1, min(len(self.sums), FMAS_IN_FLIGHT) // sums.count)

    def _add_products(
        self,
        tile: BlockTile,
        tile_vectors: int,
        quads: Callable[[Expr], Iterable[Sequence[Expr]]],
        code_at: list[Expr],
        scale_at: list[Expr],
    ) -> None:
        """Add the products of a chain; `quads` gives its weights from a k on, the lists have its index for each row."""
        lanes, iterations = self.spec.lanes, self.chain // self.unrolled_weights
        sums, banks = self._sums_of(tile, tile_vectors)
        sums.clear(banks=banks)
        if self.codes.min_code:
            for i in range(tile.rows):
                last_row = (i + 1) * self.terms - 1
                for vector in range(tile_vectors):
                    self.sums[last_row * tile_vectors + vector] = broadcast(self.codes.sums[scale_at[i]], lanes)

        def add_unrolled(first: Expr, code_at: list[Expr]) -> None:
            def left(quad: int, row: int) -> Expr:
                i, term = divmod(row, self.terms)
                return self.codes.words[code_at[i] + (term * self.chain // 4 + quad)]

            if self.left_quads > 1:
                self._add_by_lane(list(quads(first)), code_at, sums, banks)
                return
            for quad, quad_lanes in enumerate(quads(first)):
                bank = quad % banks
                if not self.dot.short:
                    sums.step(partial(left, quad), quad_lanes.__getitem__, bank)
                    continue
                partial_sums = replace(sums, sums=self.partial_sums)
                if quad % self.dot.short == 0:
                    partial_sums.clear()
                partial_sums.step(partial(left, quad), quad_lanes.__getitem__)
                if (quad + 1) % self.dot.short == 0:
                    for number in range(sums.count):
                        self.sums[number] = self.sums[number] + widen_int16_sums(self.partial_sums[number], lanes)

        if iterations == 1:
            add_unrolled(0, code_at)
            return
        with loop(iterations) as iteration:
            first = materialize(iteration * self.unrolled_weights)
            add_unrolled(first, [materialize(offset + first // 4) for offset in code_at])

    def _add_by_lane(self, quads: Sequence[Sequence[Expr]], code_at: list[Expr], sums: VectorTile, banks: int) -> None:
        """Add the products of unrolled quads, row by row, since a register holds several left factors of a row."""

        def lane(words: Expr, s: int, _: int) -> Expr:
            return lane_of(words, s)

        for first in range(0, len(quads), self.left_quads):
            for row in range(sums.rows):
                i, term = divmod(row, self.terms)
                at = code_at[i] + (term * self.chain // 4 + first)
                words = let(self.codes.words[lane_indices(at, self.left_quads)])
                for s in range(self.left_quads):
                    right = quads[first + s].__getitem__
                    sums.step(partial(lane, words, s), right, (first + s) % banks, rows=[row])

    def _scale(
        self, tile: BlockTile, j: int, tile_vectors: int, scale: Expr | None, minimum: Expr | None, scale_at: list[Expr]
    ) -> None:
        """Scale the sums of vector j of the tile, and add them to its totals."""
        lanes, codes, min_code = self.spec.lanes, self.codes, self.reader.min_code
        if minimum is not None and min_code:
            minimum = let(minimum + scale * constant(float(min_code), "float32", lanes))
        sums, banks = self._sums_of(tile, tile_vectors)
        for i in range(tile.rows):
            terms = []
            for term in range(self.terms):
                first = (i * self.terms + term) * tile_vectors + j
                terms.append(sum((self.sums[first + bank * sums.count] for bank in range(1, banks)), self.sums[first]))
            integer_sum = (
                terms[0] if self.terms == 1 else tirx.shift_left(terms[0], constant(8, "int32", lanes)) + terms[1]
            )
            factor = broadcast(codes.scales[scale_at[i]], lanes)
            factor = factor if scale is None else scale * factor
            number = i * tile_vectors + j
            total = self.chain_totals[number] + tirx.Cast(f"float32x{lanes}", let(integer_sum)) * factor
            if minimum is not None:
                total = total + minimum * broadcast(codes.sums[scale_at[i]], lanes)
            self.chain_totals[number] = total
