"""Products with weights of 4 bits, which are unpacked in registers where they are multiplied.

A group of eight weights of a column is one 32-bit lane (see `relax_hetero.encoding.block_weights`): a vector of lanes
holds the next eight weights of as many columns. Turning one of them into numbers takes two or three instructions, a
share of the work that falls with the rows of a tile; scales are applied to the sums of a block. Nothing is unpacked
into memory: what is read for one row is the 4 bits, and many rows are nearly as fast as a product of float32.

The loops, from outside: tasks, blocks of rows, panels of columns, tiles of rows; within a tile the blocks that share a
scale, groups, the eight weights of a group. CPUs with tile registers multiply many rows by them
(`tile_register_blocks`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.block_weights import GROUP
from ...encoding.problem import BlockProductProblem
from ...target.cpu_target import CpuTarget
from ...target.tiles import tile_sizes
from ..core.builder import (
    Expr,
    Function,
    Registers,
    broadcast,
    ceil_div,
    either,
    lane_indices,
    let,
    loop,
    minimum,
    opaque,
    when,
    zeros,
)
from ..core.view import OperandView, extent_of
from ..core.work_split import part, split_work
from ..elementwise.expression_code import EpilogueCode
from . import tile_registers
from .block_spec import BlockSpec, for_columns, store_row
from .matmul_spec import choose, row_cases
from .matmul_tile import IN_FLIGHT, MAX_CHAIN
from .tile_register_blocks import LEAST_ROWS, block_tiles, emit_block_tiles
from .weight_unpacking import PLACES, Unpacking

# Bytes of the left operand that all panels go over before the next rows: half of a second-level cache.
ROW_BLOCK_BYTES = 1 << 19


@dataclass(frozen=True)
class _Tile:
    """Rows of a panel: `rows` of them from `row` on, those from `end` on (None: none) are not stored."""

    row: Expr
    rows: int
    end: Expr
    panel: Expr


def block_product_kernel(problem: BlockProductProblem, cpu: CpuTarget) -> tirx.PrimFunc:
    """The kernel of a product with weights of 4 bits, parallel over the CPU's cores.

    Its parameters are those that `BlockProductProblem` says.
    """
    function = Function("block_product")
    with function:
        lhs = OperandView(function, "lhs", problem.lhs)
        packed = [
            OperandView(function, name, operand)
            for name, operand in zip(("weight", "scales", "zeros"), problem.weights, strict=False)
        ]
        lanes = cpu.lanes("float32")
        epilogue = EpilogueCode.of(function, problem.epilogue, "float32", problem.result.dtype, lanes)
        result = OperandView(function, "result", problem.result)
        views = [lhs, *epilogue.views, result]
        for name in reversed([name for name in result.index_map if name.startswith("b")]):
            for view in views:
                view.merge(name, "m")
        with function.body():
            for view in (*views, *packed):
                view.open()
            vectors = problem.panel // lanes
            data = [view.data for view in packed]
            kernel = BlockSpec(
                problem,
                lhs,
                result,
                epilogue,
                data[0],
                data[1],
                Unpacking.of(cpu, data[2] if len(data) > 2 else None),
                lanes,
                vectors,
                cpu.isa.registers - (2 + PLACES) * vectors - 1,
                extent_of([result], "m"),
            )
            tiles = block_tiles(kernel, cpu)
            if tiles is None:
                _emit_loops(kernel, cpu)
            else:
                with T.attr(0, "pragma_import_llvm", tile_registers.LLVM_TEXT):
                    allowed = tile_registers.may_use_tiles()
                    if not isinstance(kernel.m, int):
                        allowed = tirx.And(kernel.m >= LEAST_ROWS, allowed)
                    either(allowed, lambda: emit_block_tiles(kernel, cpu, tiles), lambda: _emit_loops(kernel, cpu))
    return function.result


def _rows_of_a_tile(kernel: BlockSpec, cpu: CpuTarget) -> int:
    rows = max(1, min(tile_sizes(cpu).rows, kernel.free // kernel.vectors))
    return min(rows, kernel.m) if isinstance(kernel.m, int) else rows


def _emit_loops(kernel: BlockSpec, cpu: CpuTarget) -> None:
    problem = kernel.problem
    if 0 in (kernel.m, problem.columns):
        T.evaluate(0)
        return
    rows = _rows_of_a_tile(kernel, cpu)
    tiles, panels = opaque(ceil_div(kernel.m, rows)), ceil_div(problem.columns, problem.panel)
    split = split_work(cpu.cores, 1, tiles, panels, (rows, problem.panel), problem.depth)
    tiles_per_block = max(1, ROW_BLOCK_BYTES // (4 * problem.depth * rows))
    with loop(split.tasks, parallel=split.tasks > 1) as task:
        accs = Registers(max(rows * kernel.vectors, IN_FLIGHT), "float32", kernel.lanes)
        totals = Registers(rows * kernel.vectors, "float32", kernel.lanes)
        _, row_part, column_part = split.place(task)
        first_m, last_m = part(tiles, split.rows, row_part)
        first_n, last_n = part(panels, split.columns, column_part)
        with loop(opaque(ceil_div(last_m - first_m, tiles_per_block))) as block:
            begin = opaque(first_m + block * tiles_per_block)
            end = opaque(minimum(begin + tiles_per_block, last_m))
            with loop(last_n - first_n) as panel, loop(end - begin) as tile:
                row = opaque(opaque(begin + tile) * rows)
                _emit_rows(kernel, row, rows, opaque(first_n + panel), accs, totals)


def _emit_rows(kernel: BlockSpec, row: Expr, rows: int, panel: Expr, accs: Registers, totals: Registers) -> None:
    """A tile in the form that its place needs: whole, or of what rows are left."""

    choose(
        row_cases(kernel.m, row, rows),
        lambda count, end: _emit_tile(kernel, _Tile(row, count, end, panel), accs, totals),
    )


def _emit_tile(kernel: BlockSpec, tile: _Tile, accs: Registers, totals: Registers) -> None:
    problem = kernel.problem
    count = tile.rows * kernel.vectors
    banks = max(1, min(IN_FLIGHT, kernel.free) // count)
    # Weights of one scale that are added up at once; a long block is several of these.
    chain = problem.block if problem.block <= MAX_CHAIN else gcd(problem.block, MAX_CHAIN)
    whole, rest = divmod(problem.depth, chain)
    for number in range(count):
        totals[number] = zeros("float32", kernel.lanes)
    if whole:
        with loop(whole) as number:
            _emit_chain(kernel, tile, (accs, totals), opaque(number * chain), chain, banks)
    if rest:
        _emit_chain(kernel, tile, (accs, totals), tirx.const(whole * chain, "int64"), rest, banks)
    _finish(kernel, tile, totals)


def _rows_in(kernel: BlockSpec, tile: _Tile) -> list[Expr]:
    """The tile's rows, those that do not exist replaced by the last that does."""
    return [tile.row + i if tile.end is None or i == 0 else T.min(tile.row + i, tile.end - 1) for i in range(tile.rows)]


def _emit_chain(
    kernel: BlockSpec, tile: _Tile, sums: tuple[Registers, Registers], first: Expr, size: int, banks: int
) -> None:
    """Add the products of the `size` weights of every column from `first` on, which share a scale."""
    problem, lanes, panel = kernel.problem, kernel.lanes, kernel.problem.panel
    accs, totals = sums
    count = tile.rows * kernel.vectors
    groups, blocks = ceil_div(problem.depth, GROUP), ceil_div(problem.depth, problem.block)
    at_scale = opaque((tile.panel * blocks + first // problem.block) * panel)
    points = [kernel.unpacking.points(at_scale + j * lanes) for j in range(kernel.vectors)]
    weights = opaque((tile.panel * groups + first // GROUP) * panel)
    rows = [opaque(kernel.lhs.address({"m": row, "k": first})) for row in _rows_in(kernel, tile)]
    for number in range(count * banks):
        accs[number] = zeros("float32", lanes)

    def group(number: Expr, steps: int) -> None:
        at = opaque(weights + number * panel)
        bits = [let(kernel.weight[lane_indices(at + j * lanes, lanes)]) for j in range(kernel.vectors)]
        numbers = [kernel.unpacking.numbers(bits[j], points[j]) for j in range(kernel.vectors)]
        for step in range(steps):
            right = [let(number(step)) for number in numbers]
            bank = step % banks
            for i in range(tile.rows):
                left = broadcast(kernel.lhs.data[rows[i] + number * GROUP + step], lanes)
                for j in range(kernel.vectors):
                    acc = (bank * tile.rows + i) * kernel.vectors + j
                    accs[acc] = accs[acc] + left * right[j]

    whole, rest = divmod(size, GROUP)
    if whole:
        with loop(whole) as number:
            group(number, GROUP)
    if rest:
        group(tirx.const(whole, "int64"), rest)
    for j in range(kernel.vectors):
        scale = let(kernel.scales[lane_indices(at_scale + j * lanes, lanes)])
        for i in range(tile.rows):
            number = i * kernel.vectors + j
            total = accs[number]
            for bank in range(1, banks):
                total = total + accs[bank * count + number]
            totals[number] = totals[number] + total * scale


def _finish(kernel: BlockSpec, tile: _Tile, totals: Registers) -> None:
    """Apply the epilogue and store what exists."""
    rows = _rows_in(kernel, tile)

    def store_one(i: int, masks: list[Expr]) -> None:
        store_row(kernel, rows[i], tile.panel, masks, lambda j: totals[i * kernel.vectors + j])

    def store(masks: list[Expr]) -> None:
        for i in range(tile.rows):
            with when(True if tile.end is None or i == 0 else tile.row + i < tile.end):
                store_one(i, masks)

    for_columns(kernel, tile.panel, store)
