"""A tile of rows by a panel of weights in blocks, which are unpacked in registers where they are multiplied."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...target.cpu_target import CpuTarget
from ...target.tiles import tile_sizes
from ..core.builder import Expr, Registers, broadcast, let, loop, materialize, when, zeros
from .block_spec import BlockSpec, for_columns, store_row
from .matmul_tile import IN_FLIGHT

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
