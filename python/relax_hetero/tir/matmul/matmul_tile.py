"""The micro-kernel of a matrix product: a register tile of accumulators, from their initialization to their stores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...target.dot_instructions import DotInstruction
from ...target.element_types import bytes_of
from ..core.builder import (
    CACHE_LINE_BYTES,
    Expr,
    Registers,
    ceil_div,
    either,
    loop,
    materialize,
    minimum,
    prefetch,
    vector_type,
    when,
)
from ..core.view import OperandView
from ..microkernel.fp16_partial_sums import Fp16PartialSums
from ..microkernel.k_step import lhs_group, rhs_groups, zero
from ..microkernel.microkernel import FMAS_IN_FLIGHT, VectorTile
from .matmul_spec import (
    KRange,
    MatmulSpec,
    Sweep,
    Tile,
    element_or_zero,
    left_factors,
    mask_in,
    position_in,
    row_in,
)

# Bytes of a row of the left operand in a block of k (kc): 32 columns of that length are a fraction of the L2 cache. The
# error of a sum of random numbers grows with their count, that of a sum of block sums with its square root.
K_BLOCK_BYTES = 4096


def k_blocks(spec: MatmulSpec) -> tuple[Expr, Expr]:
    """Number of blocks of k with separate sums, and the k of a block; independent of the number of rows."""
    block = K_BLOCK_BYTES // bytes_of(spec.lhs.dtype)
    if not isinstance(spec.k, int):
        return T.max(ceil_div(spec.k, block), tirx.const(1, "int64")), block
    if spec.k <= block * 3 // 2:
        return 1, spec.k
    count = ceil_div(spec.k, block)
    return count, ceil_div(ceil_div(spec.k, count), spec.dot.k0) * spec.dot.k0


def accumulator_count(dot: DotInstruction, rows: int, vectors: int) -> int:
    """Number of accumulators of a tile with at most so many rows and vectors."""
    return max(dot.whole_rows(rows) * vectors, FMAS_IN_FLIGHT)


def emit_tile(spec: MatmulSpec, tile: Tile, k: KRange, accs: Registers) -> None:
    """Write the code of a tile for a range of k; `accs` has at least `accumulator_count` registers."""
    sums = VectorTile(spec.dot, accs, spec.dot.whole_rows(tile.rows), tile.vectors, spec.lanes)
    banks = _bank_count(spec, tile, sums.rows)
    if k.whole:
        spec.epilogue.prefetch("m", (tile.rows, tile.vectors), lambda view, i, j: position_in(spec, tile, view, i, j))
    starts_at_zero = spec.dot.short > 0 or spec.dot.rows > 1
    if starts_at_zero:
        sums.clear()
    else:
        either(k.first, lambda: _initialize(spec, tile, accs), sums.clear)
    add = _accumulate_fp16 if spec.dot.short else _accumulate_banks
    _accumulate_blocks(spec, k, sums, lambda block: add(spec, tile, sums, block, banks))
    if not spec.dot.short:
        sums.deinterleave()
    if starts_at_zero and spec.init is not None:
        with when(k.first):
            _add_operand(spec, tile, spec.init, accs)
    if k.first is not True:
        with when(tirx.Not(k.first)):
            _add_operand(spec, tile, spec.result, accs)
    either(k.last, lambda: _store(spec, tile, accs, True), lambda: _store(spec, tile, accs, False))


def _bank_count(spec: MatmulSpec, tile: Tile, rows: int) -> int:
    """Number of banks of accumulators that alternate between steps, so that enough multiply-adds are in flight.

    Packed columns and static m have one bank, else the order of additions would depend on m; their tiles are wide.
    """
    packed = spec.rhs.layout.tile(spec.rhs.index_map.index("n")) // spec.lanes
    if spec.lanes == 1 or tile.multiply is not None or (packed and isinstance(spec.m, int)):
        return 1
    # The same number for all tiles of a panel, so that equal columns have bitwise equal sums.
    panel = max(tile.vectors, packed)
    return max(1, min(FMAS_IN_FLIGHT, spec.registers - panel) // (rows * panel))


def _accumulate_blocks(spec: MatmulSpec, k: KRange, sums: VectorTile, add: Callable[[KRange], None]) -> None:
    """Accumulate a range of k with `add`; all of k in blocks with separate sums, which limits rounding errors."""
    blocks, block = k_blocks(spec)
    if "float" not in spec.dot.types[2] or not k.whole or (isinstance(blocks, int) and blocks == 1):
        add(k)
        return
    totals = replace(sums, sums=Registers(sums.count, spec.dot.types[2], spec.lanes))
    totals.clear()
    with loop(materialize(blocks)) as number:
        begin = materialize(number) * block
        add(KRange(begin, materialize(minimum(begin + block, k.end)), True, True))
        for acc in range(sums.count):
            totals.sums[acc] = totals.sums[acc] + sums.sums[acc]
        sums.clear()
    for acc in range(sums.count):
        sums.sums[acc] = totals.sums[acc]


def _accumulate_banks(spec: MatmulSpec, tile: Tile, sums: VectorTile, k: KRange, banks: int) -> None:
    """Accumulate a range of k in `banks` banks, and add them up."""
    sums.clear(1, banks - 1)
    _accumulate(spec, tile, sums, k, banks)
    sums.add_banks(banks)


def _accumulate_fp16(spec: MatmulSpec, tile: Tile, sums: VectorTile, k: KRange, banks: int) -> None:
    """Accumulate a range of k with fp16 partial sums, and again in float32 if one is out of range."""

    def accumulate_steps(first: Expr, size: Expr, registers: Registers) -> None:
        begin = k.begin + first
        _accumulate(spec, tile, replace(sums, sums=registers), KRange(begin, begin + size, True, True), banks)

    partial_sums = Fp16PartialSums(spec.dot, sums.sums, sums.count, spec.lanes, banks)
    partial_sums.add(k.size, partial_sums.length * spec.dot.k0, accumulate_steps)
    masks = [mask_in(spec, tile, spec.rhs, j) for j in range(tile.vectors)]
    sums.again_if_out_of_range(
        k.size, lambda wide: _accumulate(replace(spec, dot=wide.dot), replace(tile, sweep=None), wide, k, 1), masks
    )


def _initialize(spec: MatmulSpec, tile: Tile, accs: Registers) -> None:
    for j in range(tile.vectors):
        compensation = _compensation(spec, tile, j)
        for i in range(tile.rows):
            value = zero(spec.dot, spec.lanes)
            if spec.init is not None:
                value = _load(spec, tile, spec.init, i, j)
            accs[i * tile.vectors + j] = value if compensation is None else value + compensation


def _add_operand(spec: MatmulSpec, tile: Tile, view: OperandView, accs: Registers) -> None:
    for i in range(tile.rows):
        for j in range(tile.vectors):
            number = i * tile.vectors + j
            accs[number] = accs[number] + _load(spec, tile, view, i, j)


def _load(spec: MatmulSpec, tile: Tile, view: OperandView, i: int, j: int) -> Expr:
    """The elements of a view at vector j of row i."""
    return view.load(position_in(spec, tile, view, i, j), "n", spec.lanes, mask_in(spec, tile, view, j))


def _compensation(spec: MatmulSpec, tile: Tile, j: int) -> Expr | None:
    """Term that compensates the flipped sign bits of the left operand in vector j; None without a flip."""
    sign = spec.dot.compensation
    if sign == 0:
        return None
    at = {**tile.batch, "k": tirx.const(0, "int64"), "n": tile.column + j * spec.lanes}
    sums = T.bind(spec.rhs.load_compensation(at, spec.lanes))
    return sums if sign > 0 else zero(spec.dot, spec.lanes) - sums


def _accumulate(spec: MatmulSpec, tile: Tile, sums: VectorTile, k: KRange, banks: int) -> None:
    dot, k0 = spec.dot, spec.dot.k0

    def left(i: int, at_k: Expr, k_left: Expr | None) -> Expr:
        coordinates = {**tile.batch, "m": row_in(tile, spec.lhs, min(i, tile.rows - 1)), "k": at_k}
        return lhs_group(dot, left_factors(spec, coordinates, k_left))

    def right(j: int, at_k: Expr, k_left: Expr | None) -> Expr:
        return rhs_groups(dot, _right_factors(spec, tile, at_k, j, k_left), spec.lanes)

    def emit_step(at_k: Expr, bank: int, k_left: Expr | None = None) -> None:
        sums.step(lambda i: left(i, at_k, k_left), lambda j: right(j, at_k, k_left), bank)

    size = k.size
    steps = materialize(size // k0)
    if tile.multiply is not None:
        tile.multiply(sums, k, {**tile.batch, "n": tile.column})
    else:
        unroll = banks if tile.sweep is None else tile.sweep.prefetch_steps(banks, tile.vectors, spec.dot.short > 0)
        iterations = materialize(steps // unroll)
        with loop(iterations) as iteration:
            if tile.sweep is not None:
                _prefetch_panel(spec, tile, tile.sweep, k, iterations, iteration, unroll)
            for number in range(unroll):
                emit_step(k.begin + iteration * (k0 * unroll) + number * k0, number % banks)
        if unroll > 1 and not (isinstance(steps, int) and steps % unroll == 0):
            with loop(materialize(steps % unroll)) as iteration:
                emit_step(k.begin + (iterations * unroll + iteration) * k0, 0)
    if k0 > 1 and not (isinstance(size, int) and size % k0 == 0):
        k_left = materialize(size % k0)
        with when(True if isinstance(k_left, int) else k_left > 0):
            emit_step(k.begin + steps * k0, 0, k_left)


def _prefetch_panel(
    spec: MatmulSpec, tile: Tile, sweep: Sweep, k: KRange, iterations: Expr, iteration: Expr, unroll: int
) -> None:
    """Prefetch the share of the next panel that belongs to an iteration of the loop over k."""
    lines = sweep.lines(unroll, tile.vectors)
    start = spec.rhs.address({**tile.batch, "k": tirx.const(0, "int64") + k.begin, "n": sweep.panel})
    number = sweep.number if isinstance(sweep.tiles, int) else materialize(sweep.number % (unroll * tile.vectors))
    first = materialize(number * iterations + iteration) * lines

    def prefetch_line(line: Expr) -> None:
        prefetch(spec.rhs.data, start + (first + line) * (CACHE_LINE_BYTES // bytes_of(spec.rhs.dtype)))

    if isinstance(lines, int):
        for line in range(lines):
            prefetch_line(line)
    else:
        with loop(lines) as line:
            prefetch_line(line)


def _right_factors(spec: MatmulSpec, tile: Tile, k: Expr, j: int, k_left: Expr | None) -> Expr:
    """The right factors of vector j, the k0 of a column adjacent; for `k_left` see `left_factors`."""
    k0, lanes = spec.dot.k0, spec.lanes
    at = {**tile.batch, "k": k, "n": tile.column + j * lanes}
    mask = mask_in(spec, tile, spec.rhs, j)
    if k0 == 1:
        return spec.rhs.load(at, "n", lanes, mask)
    if spec.rhs.layout.tile(spec.rhs.index_map.index("k")) == k0 and spec.rhs.stride("n") == k0:
        return spec.rhs.load_run(at, lanes * k0)
    rows = [element_or_zero(spec.rhs, at, i, k_left, lanes, mask) for i in range(k0)]
    if spec.rhs.dtype == "bfloat16":  # as bits: TVM's legalization would widen shuffled values
        rows = [tirx.reinterpret(vector_type("uint16", lanes), row) for row in rows]
    return T.Shuffle(rows, [i * lanes + lane for lane in range(lanes) for i in range(k0)])


def _store(spec: MatmulSpec, tile: Tile, accs: Registers, is_result: bool) -> None:
    """Store results, or partial sums."""
    is_partial = tile.existing_rows is not None and not spec.result.is_padded("m", tile.rows)

    def store_vector(i: int, j: int) -> None:
        at = {**tile.batch, "m": tile.row + i, "n": tile.column + j * spec.lanes}
        value = accs[i * tile.vectors + j]
        if is_result:
            value = spec.epilogue.result(value, lambda view: _load(spec, tile, view, i, j))
        spec.result.store(at, "n", value, spec.lanes, mask_in(spec, tile, spec.result, j))

    for i in range(tile.rows):
        with when(tile.row + i < tile.rows_end if is_partial and i > 0 else True):
            for j in range(tile.vectors):
                store_vector(i, j)
