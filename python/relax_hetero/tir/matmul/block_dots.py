"""Products with weights in blocks by dot products of bytes.

Fields of weights are small integers, which need no conversion: four of a column make a lane, and one instruction
multiplies them by four bytes of a row and adds up. Numbers of the left operand are one or two bytes each
(`block_codes`), so four weights of a column take one or two instructions, where numbers take four besides those that
convert. The sums of a chain are integers, exact, and are scaled once. (Measured on a Zen 4 against products of numbers,
numbers of two bytes: 512 rows 1.75 to 2.0 times as fast, 4 rows 1.4 to 2.0 times, one row of 4 to 6 bits 1.15 to 1.45
times.)

The loops, from outside: tasks, blocks of rows, whose bytes are written first, panels of columns, which many rows have
unpacked first (`unpacked_panel`), tiles of rows; within a tile the chains of weights that share a scale, groups, four
weights of each column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
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
    either,
    lane_indices,
    let,
    loop,
    materialize,
    minimum,
    prefetch,
    when,
    zeros,
)
from ..core.view import Coordinates, OperandView
from ..core.work_split import part, split_work
from .block_codes import Codes
from .block_spec import BlockSpec, for_columns, store_row
from .k_step import emit_step
from .matmul_spec import choose, row_cases
from .matmul_tile import IN_FLIGHT
from .unpacked_panel import UnpackedPanel
from .weight_bytes import ByteReader, byte_order

# Bytes of the left operand that all panels go over before the next rows: half of a second-level cache.
ROW_BLOCK_BYTES = 1 << 19

MAX_CHAIN = {1: 32, 2: 128}
"""The most weights that are added up as integers, by bytes of a number: what that may lose is a share of the largest
number beside it. (The formats of files have scales for 16 or 32.)"""

_ROWS = 8
"""Rows of a tile: two sums each, beside the lanes of a group. (Measured: 6 and 12 are slower by 2 to 15 %.)"""

_STRETCH = 32
"""Weights of a chain whose steps are written out; longer chains are loops."""

UNPACKED_ROWS = {1: 24, 2: 8}
"""From so many rows on, panels are unpacked first, by bytes of a number. (Measured on a Zen 5: with two bytes 8 to 16
rows are 1.3 to 2.0 times as fast so, with one byte 0.85 to 1.0 times.)"""

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
    block, most = spec.plan.block, MAX_CHAIN[_terms(spec)]
    return block if block <= most else gcd(block, most)


def _terms(spec: BlockSpec) -> int:
    return spec.problem.activation_bits // 8


def emit_block_dots(spec: BlockSpec, cpu: CpuTarget, dot: DotInstruction) -> None:
    """Write the loops, for many rows and for few where only a call knows how many there are."""

    def write(unpacks: bool) -> None:
        _Loops(spec, cpu, dot, unpacks).write()

    either(spec.m >= UNPACKED_ROWS[_terms(spec)], lambda: write(True), lambda: write(False))


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

    def __init__(self, spec: BlockSpec, cpu: CpuTarget, dot: DotInstruction, unpacks: bool) -> None:
        self.spec, self.cpu, self.dot, self.unpacks = spec, cpu, dot, unpacks
        self.terms = _terms(spec)
        self.reader = ByteReader.of(spec.reader, cpu)
        self.chain = _chain(spec)
        self.chains = ceil_div(spec.problem.depth, self.chain)
        self.stretch = gcd(self.chain, _STRETCH)
        self.rows = min(_ROWS, spec.m) if isinstance(spec.m, int) else _ROWS

    def write(self) -> None:
        spec, problem, form = self.spec, self.spec.problem, self.spec.plan.form
        tiles, panels = materialize(ceil_div(spec.m, self.rows)), ceil_div(problem.columns, problem.panel)
        split = split_work(self.cpu.cores, 1, tiles, panels, (self.rows, problem.panel), problem.depth)
        row_bytes = self.terms * self.chains * self.chain
        tiles_per_block = max(1, ROW_BLOCK_BYTES // (row_bytes * self.rows))
        if isinstance(tiles, int):
            tiles_per_block = min(tiles_per_block, tiles)
        height = tiles_per_block * self.rows
        with loop(split.tasks, parallel=split.tasks > 1) as task:
            count = height * self.chains
            self.codes = Codes(
                self.terms,
                T.alloc_buffer((height * row_bytes // 4,), "int32", scope="global"),
                T.alloc_buffer((count,), "float32", scope="global"),
                self._sums(count),
                self.chain,
                self.chains,
                0 if form.minimum else form.low,
                byte_order(form.bits),
            )
            at_once = spec.vectors if self.rows <= _FEW else 1
            banks = max(1, IN_FLIGHT // (self.rows * at_once * self.terms))
            self.sums = Registers(self.rows * at_once * self.terms * banks, "int32", spec.lanes)
            self.sums_of_chains = Registers(self.rows * at_once, "float32", spec.lanes)
            self.totals = T.alloc_buffer((self.rows * spec.vectors * spec.lanes,), "float32", scope="global")
            self.unpacked = UnpackedPanel.allocate(self.reader, self.chain) if self.unpacks else None
            _, row_part, column_part = split.place(task)
            first_m, last_m = part(tiles, split.rows, row_part)
            first_n, last_n = part(panels, split.columns, column_part)
            with loop(materialize(ceil_div(last_m - first_m, tiles_per_block))) as block:
                begin = materialize(first_m + block * tiles_per_block)
                end = materialize(minimum(begin + tiles_per_block, last_m))
                first_row = materialize(begin * self.rows)
                self._write_codes(first_row, materialize(minimum(end * self.rows, spec.m)))
                with loop(last_n - first_n) as number:
                    panel = materialize(first_n + number)
                    if self.unpacked is not None:
                        self.unpacked.fill(panel)
                    with loop(end - begin) as tile:
                        row = materialize(materialize(begin + tile) * self.rows)
                        self._write_rows(_Tile(row, self.rows, None, panel, first_row))

    def _sums(self, count: int) -> Expr:
        form = self.spec.plan.form
        if form.minimum:
            return T.alloc_buffer((count,), "float32", scope="global")
        return T.alloc_buffer((count,), "int32", scope="global") if form.low else None

    def _write_codes(self, begin: Expr, end: Expr) -> None:
        """The bytes of some rows."""
        whole, rest = divmod(self.spec.problem.depth, self.chain)

        with loop(end - begin) as r:
            row = materialize(begin + r)

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
        if self.unpacked is not None:
            self._fetch_epilogue(tile)
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

    def _fetch_epilogue(self, tile: _Tile) -> None:
        """Ask for what the tile's sums meet when they are done, and for where they are stored."""
        spec, rows = self.spec, self._rows_of(tile)

        def at(_: OperandView, i: int, j: int) -> Coordinates:
            return {"m": rows[i], "n": tile.panel * spec.problem.panel + j * spec.lanes}

        size = (tile.rows, spec.vectors)
        spec.epilogue.prefetch("m", size, at)
        for i in range(tile.rows):
            for j in range(spec.vectors):
                prefetch(spec.result.data, spec.result.address(at(spec.result, i, j)))

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
        first = materialize(chain * self.chain)
        rows = [materialize(row - tile.first) for row in self._rows_of(tile)]
        codes = [materialize(row * self.codes.row_words + chain * self.codes.chain_words) for row in rows]
        places = [materialize(row * self.chains + chain) for row in rows]
        if self.unpacked is not None:
            unpacked = self.unpacked
            words = [unpacked.word(j, chain) for j in vectors]
            self._add_up(tile, len(vectors), lambda first: unpacked.fours(words, first, self.stretch), codes, places)
            for at, j in enumerate(vectors):
                self._scale(tile, at, len(vectors), *unpacked.scale_and_minimum(j, first), places)
            return
        spec, plan, reader = self.spec, self.spec.plan, self.spec.reader
        in_record = materialize(first % plan.span) if plan.records > 1 else first
        record = materialize(reader.record(tile.panel, first // plan.span if plan.records > 1 else 0))
        block = materialize(in_record // plan.block) if plan.blocks > 1 else 0
        if isinstance(spec.m, int) and spec.m <= _FEW and plan.form.bits < 8:
            reader.fetch_ahead(tile.panel, first, self.chain)
        group = materialize(in_record // plan.group)

        def fours(first: Expr) -> Iterator[Sequence[Expr]]:
            return self._fours(vectors, record, materialize(group + first // plan.group))

        self._add_up(tile, len(vectors), fours, codes, places)
        for at, j in enumerate(vectors):
            outer = reader.outer(record, j)
            factors = (reader.scale(record, block, outer, j), reader.minimum(record, block, outer, j))
            self._scale(tile, at, len(vectors), *factors, places)

    def _fours(self, vectors: list[Expr], record: Expr, group: Expr) -> Iterator[Sequence[Expr]]:
        """A stretch of weights for some vectors of columns, four of each column after four."""
        for place in range(self.stretch // self.spec.plan.group):
            yield from zip(*(self.reader.group(record, group + place, j) for j in vectors), strict=True)

    def _number(self, bank: int, i: int, at: int, at_once: int, term: int, rows: int) -> int:
        return ((bank * rows + i) * at_once + at) * self.terms + term

    def _banks(self, rows: int, at_once: int) -> int:
        return max(1, min(len(self.sums), IN_FLIGHT) // (rows * at_once * self.terms))

    def _add_up(
        self,
        tile: _Tile,
        at_once: int,
        fours: Callable[[Expr], Iterable[Sequence[Expr]]],
        codes: list[Expr],
        places: list[Expr],
    ) -> None:
        """The sums of a chain's integers, for some vectors of columns; `fours` gives the weights from a place on."""
        lanes, count = self.spec.lanes, self.chain // self.stretch
        banks, last = self._banks(tile.rows, at_once), self.terms - 1
        for i in range(tile.rows):
            for bank, at, term in product(range(banks), range(at_once), range(self.terms)):
                begins = self.codes.low and bank == 0 and term == last
                start = broadcast(self.codes.sums[places[i]], lanes) if begins else zeros("int32", lanes)
                self.sums[self._number(bank, i, at, at_once, term, tile.rows)] = start

        def add_stretch(first: Expr, codes: list[Expr]) -> None:
            for quad, four in enumerate(fours(first)):
                for i in range(tile.rows):
                    for term in range(self.terms):
                        left = self.codes.words[codes[i] + (term * self.chain // 4 + quad)]
                        for at, right in enumerate(four):
                            number = self._number(quad % banks, i, at, at_once, term, tile.rows)
                            self.sums[number] = emit_step(self.dot, self.sums[number], left, right, lanes)

        if count == 1:
            add_stretch(0, codes)
            return
        with loop(count) as part_of_chain:
            first = materialize(part_of_chain * self.stretch)
            add_stretch(first, [materialize(code + first // 4) for code in codes])

    def _scale(
        self, tile: _Tile, at: int, at_once: int, scale: Expr | None, least: Expr | None, places: list[Expr]
    ) -> None:
        """Scale the sums of a vector of columns, and add them to the totals."""
        lanes, codes, low = self.spec.lanes, self.codes, self.spec.plan.form.low
        if least is not None and low:
            least = let(least + scale * constant(float(low), "float32", lanes))
        banks = self._banks(tile.rows, at_once)
        for i in range(tile.rows):
            terms = []
            for term in range(self.terms):
                total = self.sums[self._number(0, i, at, at_once, term, tile.rows)]
                for bank in range(1, banks):
                    total = total + self.sums[self._number(bank, i, at, at_once, term, tile.rows)]
                terms.append(total)
            whole = terms[0] if self.terms == 1 else tirx.shift_left(terms[0], constant(8, "int32", lanes)) + terms[1]
            factor = broadcast(codes.scales[places[i]], lanes)
            factor = factor if scale is None else scale * factor
            total = self.sums_of_chains[i * at_once + at] + tirx.Cast(f"float32x{lanes}", let(whole)) * factor
            if least is not None:
                total = total + least * broadcast(codes.sums[places[i]], lanes)
            self.sums_of_chains[i * at_once + at] = total
