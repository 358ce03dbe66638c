"""Products with weights of 4 bits, which are unpacked in registers where they are multiplied.

A group of eight weights of a column is one 32-bit lane (see `relax_hetero.encoding.block_weights`): a vector of lanes,
shifted by 4 bits a step, gives the columns' next weight. What a weight means, ``(q - zero) * scale``, is one look-up or
conversion and one multiplication, a share of the work that falls with the rows of a tile. Nothing is unpacked into
memory: one row is as fast as memory gives weights, and many rows nearly as fast as a product of float32.

The loops, from outside: tasks, blocks of rows, panels of columns, tiles of rows; within a tile chains of blocks, blocks
of one scale, groups, the eight weights of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..encoding.block_weights import GROUP
from ..encoding.expression import Expression
from ..encoding.machine import Machine
from ..encoding.problem import BlockProductProblem
from ..encoding.tiles import tile_sizes
from . import expression_code
from .builder import (
    Expr,
    Function,
    Registers,
    broadcast,
    ceil_div,
    either,
    held,
    lane_indices,
    lane_numbers,
    loop,
    settled,
    smaller,
    vector_type,
    when,
    zeros,
)
from .matmul_tile import IN_FLIGHT, MAX_CHAIN
from .operand_view import OperandView, extent_of
from .work_split import part, split_work

# Bytes of the left operand that all panels go over before the next rows: half of a second-level cache.
ROW_BLOCK_BYTES = 1 << 19

_LOOKUP = "llvm.x86.avx512.permvar.sf.512"
"""Sixteen of sixteen floats, by the low four bits of every lane (Intel SDM: VPERMPS)."""

MIDDLE = 8
"""The zero point of weights that have none of their own."""


@dataclass(frozen=True)
class _Kernel:
    """What every tile of a kernel shares.

    Attributes
    ----------
    problem : BlockProductProblem
    lhs, result : OperandView
    extra : tuple of OperandView
        The epilogue's operands.
    weight, scales, zeros : Buffer
        In one dimension; `zeros` may be None.
    lanes, vectors : int
        Of a panel.
    table : PrimExpr or None
        What the 16 weights are as numbers, less `MIDDLE`; None where the machine has no look-up of floats.
    m : PrimExpr or int
    """

    problem: BlockProductProblem
    lhs: OperandView
    result: OperandView
    extra: tuple[OperandView, ...]
    weight: Expr
    scales: Expr
    zeros: Expr
    lanes: int
    vectors: int
    table: Expr
    m: Expr


@dataclass(frozen=True)
class _Tile:
    """Rows of a panel: `rows` of them from `row` on, those from `end` on (None: none) are not stored."""

    row: Expr
    rows: int
    end: Expr
    panel: Expr


def block_product_kernel(problem: BlockProductProblem, machine: Machine) -> tirx.PrimFunc:
    """The kernel of a product with weights of 4 bits.

    Parameters
    ----------
    problem : BlockProductProblem
    machine : Machine

    Returns
    -------
    tirx.PrimFunc
        Its parameters are those that `BlockProductProblem` says; it is parallel over the machine's cores.
    """
    function = Function("block_product")
    with function:
        lhs = OperandView(function, "lhs", problem.lhs)
        packed = [
            OperandView(function, name, operand)
            for name, operand in zip(("weight", "scales", "zeros"), problem.weights, strict=False)
        ]
        operands = problem.epilogue.operands if problem.epilogue else ()
        extra = tuple(OperandView(function, f"x{i + 1}", operand) for i, operand in enumerate(operands))
        result = OperandView(function, "result", problem.result)
        views = [lhs, *extra, result]
        for name in reversed([name for name in result.index_map if name.startswith("b")]):
            for view in views:
                view.merge(name, "m")
        with function.body():
            for view in (*views, *packed):
                view.open()
            lanes = machine.lanes("float32")
            data = [view.data for view in packed]
            table = None
            if machine.isa.name == "avx512":
                table = T.bind(tirx.Cast("float32x16", lane_numbers(16)) - broadcast(tirx.const(MIDDLE, "float32"), 16))
            kernel = _Kernel(
                problem,
                lhs,
                result,
                extra,
                data[0],
                data[1],
                data[2] if len(data) > 2 else None,
                lanes,
                problem.panel // lanes,
                table,
                extent_of([result], "m"),
            )
            _emit_loops(kernel, machine)
    return function.result


def _rows_of_a_tile(kernel: _Kernel, machine: Machine) -> int:
    # Beside the accumulators: weights as they are and as numbers, scales and offsets, what is broadcast, the table.
    spare = machine.isa.registers - 4 * kernel.vectors - 2
    rows = max(1, min(tile_sizes(machine).rows, spare // kernel.vectors))
    return min(rows, kernel.m) if isinstance(kernel.m, int) else rows


def _emit_loops(kernel: _Kernel, machine: Machine) -> None:
    problem = kernel.problem
    if 0 in (kernel.m, problem.columns):
        T.evaluate(0)
        return
    rows = _rows_of_a_tile(kernel, machine)
    tiles, panels = settled(ceil_div(kernel.m, rows)), ceil_div(problem.columns, problem.panel)
    split = split_work(machine.cores, 1, tiles, panels, (rows, problem.panel), problem.depth)
    tiles_per_block = max(1, ROW_BLOCK_BYTES // (4 * problem.depth * rows))
    with loop(split.tasks, parallel=split.tasks > 1) as task:
        accs = Registers(max(rows * kernel.vectors, IN_FLIGHT), "float32", kernel.lanes)
        totals = Registers(rows * kernel.vectors, "float32", kernel.lanes)
        _, row_part, column_part = split.place(task)
        first_m, last_m = part(tiles, split.rows, row_part)
        first_n, last_n = part(panels, split.columns, column_part)
        with loop(settled(ceil_div(last_m - first_m, tiles_per_block))) as block:
            begin = settled(first_m + block * tiles_per_block)
            end = settled(smaller(begin + tiles_per_block, last_m))
            with loop(last_n - first_n) as panel, loop(end - begin) as tile:
                row = settled(settled(begin + tile) * rows)
                _emit_rows(kernel, row, rows, settled(first_n + panel), accs, totals)


def _emit_rows(kernel: _Kernel, row: Expr, rows: int, panel: Expr, accs: Registers, totals: Registers) -> None:
    """A tile in the form that its place needs: whole, or of what rows are left."""

    def form(count: int, end: Expr) -> Callable[[], None]:
        return lambda: _emit_tile(kernel, _Tile(row, count, end, panel), accs, totals)

    if isinstance(kernel.m, int):
        left = kernel.m % rows
        whole = row + rows <= kernel.m if left else True
        either(whole, form(rows, None), form(left, None))
        return
    forms = [rows, *(count for count in (4, 2, 1) if count < rows)]

    def choose(number: int) -> None:
        if number == len(forms) - 1:
            form(forms[number], kernel.m)()
            return
        either(row + forms[number + 1] < kernel.m, form(forms[number], kernel.m), lambda: choose(number + 1))

    choose(0)


def _emit_tile(kernel: _Kernel, tile: _Tile, accs: Registers, totals: Registers) -> None:
    problem = kernel.problem
    count = tile.rows * kernel.vectors
    banks = max(1, IN_FLIGHT // count)
    block = problem.block
    whole, rest = divmod(problem.depth, block)
    chain = max(1, MAX_CHAIN * banks // block)
    chains, left = divmod(whole, chain)

    def finish_chain() -> None:
        for number in range(count):
            total = accs[number]
            for bank in range(1, banks):
                total = total + accs[bank * count + number]
            totals[number] = totals[number] + total

    def clear() -> None:
        for number in range(count * banks):
            accs[number] = zeros("float32", kernel.lanes)

    for number in range(count):
        totals[number] = zeros("float32", kernel.lanes)
    if chains:
        with loop(chains) as number:
            clear()
            with loop(chain) as within:
                _emit_block(kernel, tile, accs, settled(number * chain + within), block, banks)
            finish_chain()
    if left or rest:
        clear()
        if left:
            with loop(left) as within:
                _emit_block(kernel, tile, accs, settled(within + chains * chain), block, banks)
        if rest:
            _emit_block(kernel, tile, accs, tirx.const(whole, "int64"), rest, banks)
        finish_chain()
    _finish(kernel, tile, totals)


def _rows_in(kernel: _Kernel, tile: _Tile) -> list[Expr]:
    """The tile's rows, those that do not exist replaced by the last that does."""
    return [tile.row + i if tile.end is None or i == 0 else T.min(tile.row + i, tile.end - 1) for i in range(tile.rows)]


def _emit_block(kernel: _Kernel, tile: _Tile, accs: Registers, block: Expr, size: int, banks: int) -> None:
    """Add the products of the `size` weights of every column that share a scale."""
    problem, lanes, panel = kernel.problem, kernel.lanes, kernel.problem.panel
    groups = ceil_div(problem.depth, GROUP)
    blocks = ceil_div(problem.depth, problem.block)
    start = settled((tile.panel * blocks + block) * panel)
    scales = [held(kernel.scales[lane_indices(start + j * lanes, lanes)]) for j in range(kernel.vectors)]
    offsets = [_offset(kernel, scales[j], start + j * lanes) for j in range(kernel.vectors)]
    weights = settled((tile.panel * groups + block * (problem.block // GROUP)) * panel)
    rows = [settled(kernel.lhs.address({"m": row, "k": block * problem.block})) for row in _rows_in(kernel, tile)]

    def group(number: Expr, steps: int) -> None:
        at = settled(weights + number * panel)
        bits = [held(kernel.weight[lane_indices(at + j * lanes, lanes)]) for j in range(kernel.vectors)]
        for step in range(steps):
            right = [held(_number(kernel, bits[j], step, scales[j], offsets[j])) for j in range(kernel.vectors)]
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


def _offset(kernel: _Kernel, scale: Expr, start: Expr) -> Expr:
    """What is added to a scaled weight, a look-up's being less `MIDDLE` already; None for nothing."""
    lanes = kernel.lanes
    middle = broadcast(tirx.const(MIDDLE, "float32"), lanes)
    if kernel.zeros is None:
        return None if kernel.table is not None else held(scale * (zeros("float32", lanes) - middle))
    point = kernel.zeros[lane_indices(start, lanes)]
    if str(kernel.zeros.dtype) != "float32":
        point = tirx.Cast(vector_type("float32", lanes), tirx.Cast(vector_type("int32", lanes), point))
    base = zeros("float32", lanes) if kernel.table is None else middle
    return held(scale * (base - point))


def _number(kernel: _Kernel, bits: Expr, step: int, scale: Expr, offset: Expr) -> Expr:
    """Weight `step` of every lane's group, as the number that it means."""
    lanes = kernel.lanes
    moved = bits if step == 0 else tirx.shift_right(bits, broadcast(tirx.const(4 * step, "int32"), lanes))
    if kernel.table is not None:
        number = tirx.call_llvm_pure_intrin("float32x16", _LOOKUP, kernel.table, moved)
    else:
        number = tirx.Cast(
            vector_type("float32", lanes), tirx.bitwise_and(moved, broadcast(tirx.const(15, "int32"), lanes))
        )
    return number * scale if offset is None else number * scale + offset


def _finish(kernel: _Kernel, tile: _Tile, totals: Registers) -> None:
    """Apply the epilogue and store what exists."""
    problem, lanes = kernel.problem, kernel.lanes
    left = problem.columns % problem.panel
    if left == 0:
        _store(kernel, tile, totals, [None] * kernel.vectors)
        return
    masks = []
    for j in range(ceil_div(left, lanes)):
        exist = left - j * lanes
        limit = broadcast(tirx.const(exist, "int32"), lanes)
        masks.append(None if exist >= lanes else lane_numbers(lanes) < limit)
    last = problem.columns // problem.panel
    either(
        tile.panel < last,
        lambda: _store(kernel, tile, totals, [None] * kernel.vectors),
        lambda: _store(kernel, tile, totals, masks),
    )


def _store(kernel: _Kernel, tile: _Tile, totals: Registers, masks: list[Expr]) -> None:
    """Write vectors of the tile, one for each mask (None: whole)."""
    epilogue, lanes = kernel.problem.epilogue, kernel.lanes
    expression = epilogue.expression if epilogue else Expression.operand(0)
    dtypes = ["float32", *(view.dtype for view in kernel.extra)]
    rows = _rows_in(kernel, tile)
    for i in range(tile.rows):
        with when(True if tile.end is None or i == 0 else tile.row + i < tile.end):
            for j, mask in enumerate(masks):
                at = {"m": rows[i], "n": tile.panel * kernel.problem.panel + j * lanes}
                values = [totals[i * kernel.vectors + j]]
                for view in kernel.extra:
                    values.append(view.load(at, "n", lanes, mask if view.runs_along("n") else None))
                value = expression_code.emit(expression, values, dtypes, lanes)
                if expression.dtype(dtypes) != kernel.result.dtype:
                    value = tirx.Cast(vector_type(kernel.result.dtype, lanes), value)
                kernel.result.store(at, "n", value, lanes, mask)
