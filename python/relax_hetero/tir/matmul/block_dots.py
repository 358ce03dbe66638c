"""Products with weights in blocks by dot products of bytes.

Fields of weights are small integers, which need no conversion: four of a column make a lane, and one instruction
multiplies them by four bytes of a row and adds up. Numbers of the left operand are two bytes each (`block_codes`), so
four weights of a column take two instructions, where numbers take four besides those that convert. The sums of a chain
are integers, exact, and are scaled once. (Measured on a Zen 4 against products of numbers: 512 rows 1.75 to 2.0 times
as fast, 4 rows 1.4 to 2.0 times, one row of 4 to 6 bits 1.15 to 1.45 times.)

The loops, from outside: tasks, blocks of rows, whose bytes are written first, panels of columns, tiles of rows; within
a tile the chains of weights that share a scale, groups, four weights of each column.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...target.cpu_target import CpuTarget
from ...target.dot_instructions import DotInstruction, dot_instruction_for
from ..core.builder import (
    Expr,
    Registers,
    broadcast,
    ceil_div,
    constant,
    lane_indices,
    let,
    loop,
    minimum,
    opaque,
    when,
    zeros,
)
from ..core.work_split import part, split_work
from .block_codes import TERMS, Codes
from .block_spec import BlockSpec, for_columns, store_row
from .k_step import emit_step
from .matmul_spec import choose, row_cases
from .matmul_tile import IN_FLIGHT
from .weight_bytes import ByteReader, byte_order

# Bytes of the left operand that all panels go over before the next rows: half of a second-level cache.
ROW_BLOCK_BYTES = 1 << 19

MOST_CHAIN = 128
"""The most weights that are added up as integers: what a number may lose is a share of the largest beside it."""

_ROWS = 8
"""Rows of a tile: two sums each, beside the lanes of a group. (Measured: 6 and 12 are slower by 2 to 15 %.)"""

_FEW = 4
"""Up to so many rows of a tile, all vectors of a panel are added up at once, so that enough sums are in flight."""


def dot_of_bytes(spec: BlockSpec, cpu: CpuTarget) -> DotInstruction | None:
    """The instruction that multiplies weights as bytes; None where the CPU or the format has none."""
    form, lanes = spec.plan.form, spec.lanes
    if cpu.isa.name != "avx512" or form.is_plain or spec.problem.panel != 2 * lanes:
        return None
    if 0 in (spec.m, spec.problem.columns, spec.problem.depth) or _chain(spec) % max(lanes, spec.plan.group):
        return None
    dot = dot_instruction_for(cpu, "int8", "uint8", "int32")
    return dot if dot is not None and dot.form == "dot" else None


def _chain(spec: BlockSpec) -> int:
    block = spec.plan.block
    return block if block <= MOST_CHAIN else gcd(block, MOST_CHAIN)


def emit_block_dots(spec: BlockSpec, cpu: CpuTarget, dot: DotInstruction) -> None:
    """Write the loops."""
    _Loops(spec, cpu, dot).write()


@dataclass(frozen=True)
class _Tile:
    """Rows of a panel: `rows` of them from `row` on, those from `end` on (None: none) are not stored."""

    row: Expr
    rows: int
    end: Expr
    panel: Expr
    first: Expr


class _Loops:
    """Sizes, and the code of each loop."""

    def __init__(self, spec: BlockSpec, cpu: CpuTarget, dot: DotInstruction) -> None:
        self.spec, self.cpu, self.dot = spec, cpu, dot
        self.reader = ByteReader.of(spec.reader, cpu)
        self.chain = _chain(spec)
        self.chains = ceil_div(spec.problem.depth, self.chain)
        self.rows = min(_ROWS, spec.m) if isinstance(spec.m, int) else _ROWS

    def write(self) -> None:
        spec, problem, form = self.spec, self.spec.problem, self.spec.plan.form
        tiles, panels = opaque(ceil_div(spec.m, self.rows)), ceil_div(problem.columns, problem.panel)
        split = split_work(self.cpu.cores, 1, tiles, panels, (self.rows, problem.panel), problem.depth)
        row_bytes = TERMS * self.chains * self.chain
        tiles_per_block = max(1, ROW_BLOCK_BYTES // (row_bytes * self.rows))
        if isinstance(tiles, int):
            tiles_per_block = min(tiles_per_block, tiles)
        height = tiles_per_block * self.rows
        with loop(split.tasks, parallel=split.tasks > 1) as task:
            count = height * self.chains
            self.codes = Codes(
                T.alloc_buffer((height * row_bytes // 4,), "int32", scope="global"),
                T.alloc_buffer((count,), "float32", scope="global"),
                self._sums(count),
                self.chain,
                self.chains,
                0 if form.minimum else form.low,
                byte_order(form.bits),
            )
            at_once = spec.vectors if self.rows <= _FEW else 1
            banks = max(1, IN_FLIGHT // (self.rows * at_once * TERMS))
            self.sums = Registers(self.rows * at_once * TERMS * banks, "int32", spec.lanes)
            self.sums_of_chains = Registers(self.rows * at_once, "float32", spec.lanes)
            self.totals = T.alloc_buffer((self.rows * spec.vectors * spec.lanes,), "float32", scope="global")
            _, row_part, column_part = split.place(task)
            first_m, last_m = part(tiles, split.rows, row_part)
            first_n, last_n = part(panels, split.columns, column_part)
            with loop(opaque(ceil_div(last_m - first_m, tiles_per_block))) as block:
                begin = opaque(first_m + block * tiles_per_block)
                end = opaque(minimum(begin + tiles_per_block, last_m))
                first_row = opaque(begin * self.rows)
                self._write_codes(first_row, opaque(minimum(end * self.rows, spec.m)))
                with loop(last_n - first_n) as panel, loop(end - begin) as tile:
                    row = opaque(opaque(begin + tile) * self.rows)
                    self._write_rows(_Tile(row, self.rows, None, opaque(first_n + panel), first_row))

    def _sums(self, count: int) -> Expr:
        form = self.spec.plan.form
        if form.minimum:
            return T.alloc_buffer((count,), "float32", scope="global")
        return T.alloc_buffer((count,), "int32", scope="global") if form.low else None

    def _write_codes(self, begin: Expr, end: Expr) -> None:
        """The bytes of some rows."""
        whole, rest = divmod(self.spec.problem.depth, self.chain)

        with loop(end - begin) as r:
            row = opaque(begin + r)

            def chain(number: Expr, size: int) -> None:
                self.codes.write_chain(self.spec.lhs, row, r, number, size, self.spec.lanes)

            if whole:
                with loop(whole) as number:
                    chain(number, self.chain)
            if rest:
                chain(tirx.const(whole, "int64"), rest)

    def _write_rows(self, tile: _Tile) -> None:
        """A tile in the form that its place needs: whole, or of what rows are left."""
        choose(
            row_cases(self.spec.m, tile.row, tile.rows),
            lambda count, end: self._write_tile(_Tile(tile.row, count, end, tile.panel, tile.first)),
        )

    def _write_tile(self, tile: _Tile) -> None:
        spec = self.spec
        if tile.rows <= _FEW:
            self._write_vectors(tile, list(range(spec.vectors)))
        else:
            # Bytes of the left operand are then read where they are multiplied. Written out for all vectors, LLVM
            # reads them once, and has no registers for them.
            with loop(spec.vectors) as vector:
                self._write_vectors(tile, [vector])

        def store_one(i: int, row: Expr, masks: list[Expr]) -> None:
            store_row(spec, row, tile.panel, masks, lambda j: self.totals[self._total_at(i, j)])

        def store(masks: list[Expr]) -> None:
            for i, row in enumerate(self._rows_of(tile)):
                with when(True if tile.end is None or i == 0 else tile.row + i < tile.end):
                    store_one(i, row, masks)

        for_columns(spec, tile.panel, store)

    def _total_at(self, i: int, vector: Expr) -> list[Expr]:
        return [lane_indices((i * self.spec.vectors + vector) * self.spec.lanes, self.spec.lanes)]

    def _write_vectors(self, tile: _Tile, vectors: list[Expr]) -> None:
        """The totals of a tile's rows for some vectors of columns."""
        count = tile.rows * len(vectors)
        for number in range(count):
            self.sums_of_chains[number] = zeros("float32", self.spec.lanes)
        with loop(self.chains) as chain:
            self._write_chain(tile, chain, vectors)
        for number in range(count):
            i, at = divmod(number, len(vectors))
            T.buffer_store(self.totals, self.sums_of_chains[number], self._total_at(i, vectors[at]))

    def _rows_of(self, tile: _Tile) -> list[Expr]:
        """The tile's rows, those that do not exist replaced by the last that does."""
        last = tile.end
        return [tile.row + i if last is None or i == 0 else T.min(tile.row + i, last - 1) for i in range(tile.rows)]

    def _write_chain(self, tile: _Tile, chain: Expr, vectors: list[Expr]) -> None:
        """Add the products of a chain of weights."""
        spec, plan, reader = self.spec, self.spec.plan, self.spec.reader
        first = opaque(chain * self.chain)
        in_record = opaque(first % plan.span) if plan.records > 1 else first
        record = opaque(reader.record(tile.panel, first // plan.span if plan.records > 1 else 0))
        block = opaque(in_record // plan.block) if plan.blocks > 1 else 0
        rows = [opaque(row - tile.first) for row in self._rows_of(tile)]
        codes = [opaque(row * self.codes.row_words + chain * self.codes.chain_words) for row in rows]
        places = [opaque(row * self.chains + chain) for row in rows]
        if isinstance(spec.m, int) and spec.m <= _FEW and plan.form.bits < 8:
            reader.fetch_ahead(tile.panel, first, self.chain)
        self._add_up(tile, vectors, record, opaque(in_record // plan.group), codes)
        for at, j in enumerate(vectors):
            self._scale(tile, j, at, len(vectors), record, block, places)

    def _number(self, bank: int, i: int, at: int, at_once: int, term: int, rows: int) -> int:
        return ((bank * rows + i) * at_once + at) * TERMS + term

    def _banks(self, rows: int, at_once: int) -> int:
        return max(1, min(len(self.sums), IN_FLIGHT) // (rows * at_once * TERMS))

    def _add_up(self, tile: _Tile, vectors: list[Expr], record: Expr, group: Expr, codes: list[Expr]) -> None:
        """The sums of a chain's integers, for some vectors of columns."""
        lanes, plan, at_once = self.spec.lanes, self.spec.plan, len(vectors)
        banks = self._banks(tile.rows, at_once)
        for number in range(tile.rows * at_once * TERMS * banks):
            self.sums[number] = zeros("int32", lanes)
        quad = 0
        for place in range(self.chain // plan.group):
            for bytes_of_vectors in zip(*(self.reader.group(record, group + place, j) for j in vectors), strict=True):
                for i in range(tile.rows):
                    for term in range(TERMS):
                        left = self.codes.words[codes[i] + (term * self.chain // 4 + quad)]
                        for at, right in enumerate(bytes_of_vectors):
                            number = self._number(quad % banks, i, at, at_once, term, tile.rows)
                            self.sums[number] = emit_step(self.dot, self.sums[number], left, right, lanes)
                quad += 1

    def _scale(
        self, tile: _Tile, j: Expr, at: int, at_once: int, record: Expr, block: Expr, places: list[Expr]
    ) -> None:
        """Scale the sums of a vector of columns, and add them to the totals."""
        lanes, reader, codes = self.spec.lanes, self.spec.reader, self.codes
        outer = reader.outer(record, j)
        scale, least = reader.scale(record, block, outer, j), reader.minimum(record, block, outer, j)
        if least is not None and self.spec.plan.form.low:
            least = let(least + scale * constant(float(self.spec.plan.form.low), "float32", lanes))
        banks = self._banks(tile.rows, at_once)
        for i in range(tile.rows):
            terms = []
            for term in range(TERMS):
                total = self.sums[self._number(0, i, at, at_once, term, tile.rows)]
                for bank in range(1, banks):
                    total = total + self.sums[self._number(bank, i, at, at_once, term, tile.rows)]
                terms.append(total)
            whole = tirx.shift_left(terms[0], constant(8, "int32", lanes)) + terms[1]
            if codes.low:
                whole = whole + broadcast(codes.sums[places[i]], lanes)
            factor = broadcast(codes.scales[places[i]], lanes)
            factor = factor if scale is None else scale * factor
            total = self.sums_of_chains[i * at_once + at] + tirx.Cast(f"float32x{lanes}", let(whole)) * factor
            if least is not None:
                total = total + least * broadcast(codes.sums[places[i]], lanes)
            self.sums_of_chains[i * at_once + at] = total
