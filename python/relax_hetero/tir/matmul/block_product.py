"""Products with weights in blocks of few bits, which are unpacked in registers where they are multiplied.

A panel of columns is one stretch of memory (see `relax_hetero.encoding.block_panels`). Turning a field of a lane into a
number takes two or three instructions, a share of the work that falls with the rows of a tile; scales are applied to
the sums of a block, and minimums to the sums of the left factors that meet it. Nothing is unpacked into memory: what is
read for one row is the file's bits, and many rows are nearly as fast as a product of float32.

The loops, from outside: tasks, blocks of rows, panels of columns, tiles of rows; within a tile the chains of weights
that share a scale, groups, the weights of a group. CPUs with tile registers multiply many rows by them
(`tile_register_blocks`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm import tirx
from tvm.script.ir_builder import tirx as T

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
from .block_dots import dot_of_bytes, emit_block_dots
from .block_spec import BlockSpec, for_columns, store_row
from .matmul_spec import choose, row_cases
from .matmul_tile import IN_FLIGHT
from .row_sums import emit_row_sums
from .tile_register_blocks import LEAST_ROWS, block_tiles, emit_block_tiles
from .weight_unpacking import PanelReader

# Bytes of the left operand that all panels go over before the next rows: half of a second-level cache.
ROW_BLOCK_BYTES = 1 << 19

FETCHING_ROWS = 16
"""Up to so many rows, weights are asked for ahead of their use: reading them is what takes time."""

FETCHED_CHAIN = 64
"""The longest chain whose lines are asked for at once."""


@dataclass(frozen=True)
class _Tile:
    """Rows of a panel: `rows` of them from `row` on, those from `end` on (None: none) are not stored.

    Attributes
    ----------
    first : PrimExpr
        The first row of the block of rows.
    """

    row: Expr
    rows: int
    end: Expr
    panel: Expr
    first: Expr


@dataclass(frozen=True)
class _Sums:
    """What a task adds up: of a chain, of a tile, and of the left factors (None where nobody asks for them)."""

    accs: Registers
    totals: Registers
    rows: Expr


def block_product_kernel(problem: BlockProductProblem, cpu: CpuTarget) -> tirx.PrimFunc:
    """The kernel of a product with weights in blocks, parallel over the CPU's cores.

    Its parameters are those that `BlockProductProblem` says.
    """
    function = Function("block_product")
    with function:
        lhs = OperandView(function, "lhs", problem.lhs)
        packed = OperandView(function, "weight", problem.weights[0])
        lanes = cpu.lanes("float32")
        epilogue = EpilogueCode.of(function, problem.epilogue, "float32", problem.result.dtype, lanes)
        result = OperandView(function, "result", problem.result)
        views = [lhs, *epilogue.views, result]
        for name in reversed([name for name in result.index_map if name.startswith("b")]):
            for view in views:
                view.merge(name, "m")
        with function.body():
            for view in (*views, packed):
                view.open()
            vectors = problem.panel // lanes
            reader = PanelReader.of(cpu, packed, problem.plan)
            of_a_vector, of_all = reader.shape
            free = cpu.isa.registers - of_a_vector * vectors - of_all - 1
            m = extent_of([result], "m")
            kernel = BlockSpec(problem, lhs, result, epilogue, reader, lanes, vectors, free, m)
            tiles = block_tiles(kernel, cpu)
            if tiles is None:
                _emit_vectors(kernel, cpu)
            else:
                with T.attr(0, "pragma_import_llvm", tile_registers.LLVM_TEXT):
                    allowed = tile_registers.may_use_tiles()
                    if not isinstance(kernel.m, int):
                        allowed = tirx.And(kernel.m >= LEAST_ROWS, allowed)
                    either(allowed, lambda: emit_block_tiles(kernel, cpu, tiles), lambda: _emit_vectors(kernel, cpu))
    return function.result


def _emit_vectors(kernel: BlockSpec, cpu: CpuTarget) -> None:
    """By dot products of bytes where the CPU has them, else by numbers."""
    dot = dot_of_bytes(kernel, cpu)
    if dot is None:
        _emit_loops(kernel, cpu)
    else:
        emit_block_dots(kernel, cpu, dot)


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
    if isinstance(tiles, int):
        tiles_per_block = min(tiles_per_block, tiles)
    with loop(split.tasks, parallel=split.tasks > 1) as task:
        accs = Registers(max(rows * kernel.vectors, IN_FLIGHT), "float32", kernel.lanes)
        totals = Registers(rows * kernel.vectors, "float32", kernel.lanes)
        row_sums = None
        if kernel.plan.form.minimum:
            row_sums = T.alloc_buffer((tiles_per_block * rows * kernel.chains,), "float32", scope="global")
        sums = _Sums(accs, totals, row_sums)
        _, row_part, column_part = split.place(task)
        first_m, last_m = part(tiles, split.rows, row_part)
        first_n, last_n = part(panels, split.columns, column_part)
        with loop(opaque(ceil_div(last_m - first_m, tiles_per_block))) as block:
            begin = opaque(first_m + block * tiles_per_block)
            end = opaque(minimum(begin + tiles_per_block, last_m))
            first_row = opaque(begin * rows)
            if row_sums is not None:
                _emit_sums(kernel, row_sums, first_row, opaque(minimum(end * rows, kernel.m)))
            with loop(last_n - first_n) as panel, loop(end - begin) as tile:
                row = opaque(opaque(begin + tile) * rows)
                _emit_rows(kernel, _Tile(row, rows, None, opaque(first_n + panel), first_row), sums)


def _emit_sums(kernel: BlockSpec, target: Expr, begin: Expr, end: Expr) -> None:
    """The sums of the left factors of some rows."""
    with loop(end - begin) as r:
        place = (target, opaque(r * kernel.chains))
        emit_row_sums(kernel.lhs, opaque(begin + r), kernel.problem.depth, kernel.chain, kernel.lanes, place)


def _emit_rows(kernel: BlockSpec, tile: _Tile, sums: _Sums) -> None:
    """A tile in the form that its place needs: whole, or of what rows are left."""
    choose(
        row_cases(kernel.m, tile.row, tile.rows),
        lambda count, end: _emit_tile(kernel, replace(tile, rows=count, end=end), sums),
    )


def _emit_tile(kernel: BlockSpec, tile: _Tile, sums: _Sums) -> None:
    count = tile.rows * kernel.vectors
    banks = max(1, min(IN_FLIGHT, kernel.free) // count)
    whole, rest = divmod(kernel.problem.depth, kernel.chain)
    for number in range(count):
        sums.totals[number] = zeros("float32", kernel.lanes)
    if whole:
        with loop(whole) as number:
            _emit_chain(kernel, tile, sums, number, kernel.chain, banks)
    if rest:
        _emit_chain(kernel, tile, sums, tirx.const(whole, "int64"), rest, banks)
    _finish(kernel, tile, sums.totals)


def _rows_in(kernel: BlockSpec, tile: _Tile) -> list[Expr]:
    """The tile's rows, those that do not exist replaced by the last that does."""
    return [tile.row + i if tile.end is None or i == 0 else T.min(tile.row + i, tile.end - 1) for i in range(tile.rows)]


def _emit_chain(kernel: BlockSpec, tile: _Tile, sums: _Sums, chain: Expr, size: int, banks: int) -> None:
    """Add the products of the `size` weights of every column in a chain, which share a scale."""
    lanes, plan, reader, accs = kernel.lanes, kernel.plan, kernel.reader, sums.accs
    count = tile.rows * kernel.vectors
    first = opaque(chain * kernel.chain)
    in_record = opaque(first % plan.span) if plan.records > 1 else first
    record = opaque(reader.record(tile.panel, first // plan.span if plan.records > 1 else 0))
    block = opaque(in_record // plan.block) if plan.blocks > 1 else 0
    rows = [opaque(kernel.lhs.address({"m": row, "k": first})) for row in _rows_in(kernel, tile)]
    # Vectors are of LLVM, as prefetching is: portable C has neither. Bytes are unpacked faster than they arrive, and
    # asking for them takes the CPU's line buffers from its own prefetching: a table of 178 MB was read in 15.8 ms
    # without, in 18.5 with it (Xeon), while 4 to 6 bits took two thirds of the time with it.
    fetches = kernel.lanes > 1 and isinstance(kernel.m, int) and kernel.m <= FETCHING_ROWS and plan.form.bits < 8
    fetches_by_chain = fetches and kernel.chain <= FETCHED_CHAIN
    for number in range(count * banks):
        accs[number] = zeros("float32", lanes)

    if fetches_by_chain:
        reader.fetch_ahead(tile.panel, first, kernel.chain)

    def group(number: Expr, steps: int) -> None:
        place = opaque(in_record // plan.group + number)
        if fetches and not fetches_by_chain:
            reader.fetch_ahead(tile.panel, first + number * plan.group, plan.group)
        numbers = [reader.group(record, place, j) for j in range(kernel.vectors)]
        for step in range(steps):
            right = [let(number_at(step)) for number_at in numbers]
            bank = step % banks
            for i in range(tile.rows):
                left = broadcast(kernel.lhs.data[rows[i] + number * plan.group + step], lanes)
                for j in range(kernel.vectors):
                    acc = (bank * tile.rows + i) * kernel.vectors + j
                    accs[acc] = accs[acc] + left * right[j]

    whole, rest = divmod(size, plan.group)
    if whole:
        with loop(whole) as number:
            group(number, plan.group)
    if rest:
        group(tirx.const(whole, "int64"), rest)
    for j in range(kernel.vectors):
        outer = reader.outer(record, j)
        scale, least = reader.scale(record, block, outer, j), reader.minimum(record, block, outer, j)
        for i, row in enumerate(_rows_in(kernel, tile)):
            number = i * kernel.vectors + j
            total = accs[number]
            for bank in range(1, banks):
                total = total + accs[bank * count + number]
            added = total if scale is None else total * scale
            sums.totals[number] = sums.totals[number] + added
            if least is not None:
                of_row = sums.rows[opaque((row - tile.first) * kernel.chains + chain)]
                sums.totals[number] = sums.totals[number] + least * broadcast(of_row, lanes)


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
