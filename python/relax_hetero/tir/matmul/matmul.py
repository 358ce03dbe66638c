"""Matrix products: one definition for every type, layout, tail and epilogue.

The loops, from outside: tasks, batches, blocks of rows, blocks of k, panels of columns, tiles. A panel of the right
operand stays in the second-level cache while the tiles of a block of rows go over it.

CPUs with tile registers multiply some types by them (`tile_register_product`), from the same packed weights; the loops
here are then for few rows, and for processes that may not use them.
"""

from __future__ import annotations

from contextlib import nullcontext

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.problem import MatmulProblem
from ...errors import EncodingError
from ...target.amx_instructions import AmxInstruction, amx_instruction_for
from ...target.cpu_target import CpuTarget
from ...target.dot_instructions import dot_instruction_for
from ...target.element_types import bytes_of
from ...target.tiles import tile_sizes
from ..core.builder import Expr, Function, Registers, ceil_div, loop, materialize, minimum
from ..core.ties import tied_to
from ..core.view import Coordinates, OperandView, extent_of
from ..core.work_split import Split, part, split_work, tasks_for, unravel
from ..elementwise.expression_code import EpilogueCode
from ..rows.row_code import RowSpec, RowWriter
from ..rows.rows import emit_rows, phase_code
from .amx import LLVM_TEXT, tiles_or_vectors
from .amx_matmul import emit_tile_products, takes_tiles
from .fp16_partial_sums import marked
from .k_step import llvm_import
from .matmul_spec import Case, KRange, MatmulSpec, Sweep, choose, make_tile, row_cases
from .matmul_tile import IN_FLIGHT, accumulators, emit_tile, k_blocks

# Rows of a block, about: of one block of k, they fill half of the second-level cache. Blocks are of equal size, because
# each reads the right operand anew (measured for 128 rows of weights that come from memory: one block is 3 % faster
# than 96 rows and 32).
ROWS_PER_BLOCK = 96

# Right operands of more bytes are prefetched, panel by panel: measured 20 % faster for 8 rows, 30 % for 32, 8 % for
# 128, 2 % for 2,048; slower for one or two rows, which only read. A model's weights come from memory or the last-level
# cache, however small: 12 % for 128x384 times 384x384.
PREFETCH_BYTES = 1 << 16
PREFETCH_ROWS = 3


def matmul_kernel(problem: MatmulProblem, cpu: CpuTarget) -> tirx.PrimFunc:
    """The kernel of a matrix product, parallel over the CPU's cores; `MatmulProblem` says what its parameters are.

    Raises EncodingError if the CPU has no product of these element types, or an operand is stored in a way the product
    cannot read.
    """
    types = (problem.lhs.dtype, problem.rhs.dtype, problem.acc_dtype)
    dot = dot_instruction_for(cpu, *types)
    if dot is None:
        raise EncodingError(
            "matmul: found element types {} * {} -> {}, expected ones that {} multiplies".format(*types, cpu.isa.name)
        )
    function = Function("matmul")
    with function:
        lhs = OperandView(function, "lhs", problem.lhs)
        rhs = OperandView(function, "rhs", problem.rhs)
        init = OperandView(function, "init", problem.init) if problem.init else None
        lanes = cpu.lanes(problem.acc_dtype)
        epilogue = EpilogueCode.of(function, problem.epilogue, problem.acc_dtype, problem.result.dtype, lanes)
        in_rows = [
            OperandView(function, f"y{i}", o) for i, o in enumerate(problem.rows.operands if problem.rows else ())
        ]
        result = OperandView(function, "result", problem.result)
        views = [lhs, rhs, *([init] if init else []), *epilogue.views, *in_rows, result]
        batch = merge_batches(views, lhs, rhs, result)
        # One register holds what is broadcast of the left operand.
        free = cpu.isa.registers - 1 - dot.temporaries
        m, n, k = (extent_of(views, name) for name in "mnk")
        spec = MatmulSpec(lhs, rhs, result, init, epilogue, dot, lanes, free, m, n, k)
        with function.body():
            for view in views:
                view.open()
            rows = phase_code(problem.rows, in_rows, result, cpu, n) if problem.rows else None
            tiles = amx_instruction_for(cpu, *types)
            if tiles is not None and not takes_tiles(spec, tiles):
                tiles = None
            texts = [text for text in (llvm_import(dot, lanes), LLVM_TEXT if tiles else None) if text is not None]
            with T.attr(0, "pragma_import_llvm", "".join(texts)) if texts else nullcontext():
                _emit_ways(spec, cpu, batch, rows, tiles)
    return marked(_tied(function.result, problem, spec), dot)


def _emit_ways(
    spec: MatmulSpec, cpu: CpuTarget, batch: list[str], rows: RowSpec | None, tiles: AmxInstruction | None
) -> None:
    """Emit tile registers where the CPU has them, the process may use them, and rows are not few; else vectors."""
    if tiles is None:
        _emit_loops(spec, cpu, batch, rows)
        return
    tiles_or_vectors(
        lambda: emit_tile_products(spec, cpu, batch, rows, tiles),
        lambda: _emit_loops(spec, cpu, batch, rows),
        True if isinstance(spec.m, int) else spec.m >= tiles.min_rows,
    )


def _tied(func: tirx.PrimFunc, problem: MatmulProblem, spec: MatmulSpec) -> tirx.PrimFunc:
    """Tie the result to tensors that a tile starts from or its epilogue reads, unless partial sums wait there.

    Operands of work on rows may not: the rows of the product are there by then.
    """
    blocks, _ = _k_blocks(spec)
    is_whole = isinstance(blocks, int) and blocks == 1
    in_tile = [*([problem.init] if problem.init else []), *(problem.epilogue.operands if problem.epilogue else ())]
    return tied_to(func, in_tile if is_whole else [], 2, problem.result)


def merge_batches(views: list[OperandView], lhs: OperandView, rhs: OperandView, result: OperandView) -> list[str]:
    """Make batch dimensions that the right operand lacks part of m, where storage allows; the names of the others."""
    batch = [name for name in result.index_map if name.startswith("b")]
    while (
        batch
        and not rhs.runs_along(batch[-1])
        and all(_can_merge(view, batch[-1]) for view in views if view is not rhs)
    ):
        for view in views:
            view.merge(batch[-1], "m")
        batch.pop()
    return batch


def _can_merge(view: OperandView, name: str) -> bool:
    if not view.runs_along(name) or not view.runs_along("m"):
        return not view.runs_along(name) and not view.runs_along("m")
    return view.layout.is_identity and view.index_map.index(name) + 1 == view.index_map.index("m")


def _emit_loops(spec: MatmulSpec, cpu: CpuTarget, batch: list[str], rows_code: RowSpec | None) -> None:
    if 0 in (spec.m, spec.n):
        T.evaluate(0)
        return
    rows, vectors = _tile_size(spec, cpu)
    tiles, panels = ceil_div(spec.m, rows), ceil_div(spec.n, vectors * spec.lanes)
    extents = {name: extent_of([spec.result], name) for name in batch}
    count: Expr = 1
    for extent in extents.values():
        count = count * extent
    blocks_k, block_k = _k_blocks(spec)
    count, tiles, panels, blocks_k = (materialize(value) for value in (count, tiles, panels, blocks_k))
    split = split_work(cpu.cores, count, tiles, panels, (rows, vectors * spec.lanes), spec.k)
    prefetches = _is_prefetched(spec, cpu, split)
    in_task = isinstance(split.columns, int) and split.columns == 1  # a task makes whole rows
    with loop(split.tasks, parallel=split.tasks > 1) as task:
        accs = Registers(accumulators(spec.dot, rows, vectors), spec.dot.types[2], spec.lanes)
        place = split.parts_of(task)
        first_b, last_b = part(count, split.batch, place[0])
        first_m, last_m = part(tiles, split.rows, place[1])
        first_n, last_n = part(panels, split.columns, place[2])
        block_m = _tiles_per_block(tiles, split, rows)
        row = RowWriter(rows_code) if rows_code is not None and in_task else None
        with loop(last_b - first_b) as b, loop(materialize(ceil_div(last_m - first_m, block_m))) as block:
            at = dict(zip(extents, unravel(first_b + b, list(extents.values()), place=materialize), strict=True))
            begin_m = materialize(first_m + block * block_m)
            end_m = materialize(minimum(begin_m + block_m, last_m))
            sweep_tiles = min(ceil_div(tiles, split.rows), block_m) if isinstance(tiles, int) else end_m - begin_m
            with loop(blocks_k) as kb, loop(last_n - first_n) as panel, loop(end_m - begin_m) as tile:
                step = KRange.of(spec.k, blocks_k, block_k, kb)
                first_row, column = (
                    materialize(begin_m + tile) * rows,
                    materialize(first_n + panel) * (vectors * spec.lanes),
                )
                sweep = Sweep(tile, sweep_tiles, column + vectors * spec.lanes) if prefetches else None
                _emit_tile_at(spec, at, (first_row, column), (rows, vectors), step, accs, sweep)
            if row is not None:
                first_row = materialize(begin_m * rows)
                with loop(materialize(minimum(end_m * rows, spec.m)) - first_row) as number:
                    row.emit({**at, "m": materialize(first_row + number)})
    if rows_code is not None and not in_task:
        emit_rows(rows_code, [*batch, "m"], cpu)


def _tile_size(spec: MatmulSpec, cpu: CpuTarget) -> tuple[int, int]:
    """Rows and vectors of a tile: as wide as the right operand is packed, as high as registers allow."""
    sizes = tile_sizes(cpu)
    packed = spec.rhs.layout.tile(spec.rhs.index_map.index("n")) // spec.lanes
    vectors = packed if 0 < packed <= sizes.vectors * 2 else sizes.vectors
    if packed == 0 and isinstance(spec.m, int) and 0 < spec.m <= sizes.rows and spec.lanes > 1:
        # Rows of a row-major operand lie far apart: the fewer rows of the left one share it, the more of each is read.
        # A single row takes its factors straight from memory, others hold them.
        wide = spec.registers // (spec.m + 1 if spec.m > 1 else 1)
        vectors = max(vectors, min(wide, 16))
    rows = max(1, min(sizes.rows, (spec.registers - vectors) // vectors))
    if not isinstance(spec.m, int):
        return rows, vectors
    rows = max(1, min(rows, spec.m))
    return rows, vectors * (_panels_of_a_tile(spec, cpu, rows, vectors) if packed and spec.lanes > 1 else 1)


def _panels_of_a_tile(spec: MatmulSpec, cpu: CpuTarget, rows: int, vectors: int) -> int:
    """How many panels a tile of few rows goes over at once, so that enough sums are in flight.

    A task takes as many tiles one after the other as it has, and each takes as long as its sums, or as the latency of
    the instructions where these are fewer.
    """
    wanted = min(IN_FLIGHT, spec.registers // (rows + 1)) // (rows * vectors)
    if wanted < 2 or not isinstance(spec.n, int):
        return 1
    panels = ceil_div(spec.n, vectors * spec.lanes)
    tasks = tasks_for(cpu.cores, "multiply-adds", spec.m * spec.n * spec.k if isinstance(spec.k, int) else None)
    return min(range(1, min(wanted, panels) + 1), key=lambda count: ceil_div(ceil_div(panels, count), tasks))


def _tiles_per_block(tiles: Expr, split: Split, rows: int) -> int:
    """How many tiles of rows go over a panel before the next one."""
    most = max(1, ROWS_PER_BLOCK // rows)
    if not isinstance(tiles, int) or not isinstance(split.rows, int):
        return most
    own = ceil_div(tiles, split.rows)
    return ceil_div(own, max(1, (2 * own + most) // (2 * most)))


def _is_prefetched(spec: MatmulSpec, cpu: CpuTarget, split: Split) -> bool:
    """Return whether the tiles that go over a panel prefetch the next one.

    Worth it where a packed right operand comes from memory or the last-level cache, unless hardly a row goes over it.
    """
    packed = spec.rhs.layout.tile(spec.rhs.index_map.index("n")) > 1
    if cpu.kind != "llvm" or spec.lanes == 1 or not packed or not isinstance(split.rows, int):
        return False
    if not isinstance(spec.n, int) or not isinstance(spec.k, int):
        return False
    # Where a product needs registers besides, the addresses of what is fetched would drive accumulators out of theirs.
    if spec.dot.temporaries:
        return False
    is_read_only = isinstance(spec.m, int) and spec.m < PREFETCH_ROWS
    return spec.n * spec.k * bytes_of(spec.rhs.dtype) > PREFETCH_BYTES and not is_read_only


def _k_blocks(spec: MatmulSpec) -> tuple[Expr, Expr]:
    """How many blocks of k the loops go over, and the k of one; one, where a tile goes over all of k."""
    few = isinstance(spec.m, int) and spec.m < PREFETCH_ROWS
    return (1, 0) if spec.result.dtype != spec.dot.types[2] or few else k_blocks(spec)


def _row_cases(spec: MatmulSpec, row: Expr, rows: int) -> list[Case]:
    """The forms of a tile along m: whole, and what is left at the end."""
    views = (spec.lhs, spec.result, *([spec.init] if spec.init else []), *spec.epilogue.views)
    if all(view.is_padded("m", rows) for view in views if view.runs_along("m")):
        return [(None, rows, None)]
    return row_cases(spec.m, row, rows)


def _column_cases(spec: MatmulSpec, column: Expr, vectors: int) -> list[Case]:
    """The forms of a tile along n."""
    views = (spec.rhs, spec.result, *([spec.init] if spec.init else []), *spec.epilogue.views)
    columns = vectors * spec.lanes
    if all(view.is_padded("n", columns) for view in views if view.runs_along("n")):
        left = spec.n % columns if isinstance(spec.n, int) else 0
        whole = ceil_div(left, spec.lanes)
        return (
            [(None, vectors, None)] if left == 0 else [(column + columns <= spec.n, vectors, None), (None, whole, None)]
        )
    if not isinstance(spec.n, int):
        return [(column + columns <= spec.n, vectors, None), (None, vectors, spec.n)]
    left = spec.n % columns
    last: Case = (None, ceil_div(left, spec.lanes), left)
    if left == 0:
        return [(None, vectors, None)]
    return [last] if spec.n < columns else [(column + columns <= spec.n, vectors, None), last]


def _emit_tile_at(
    spec: MatmulSpec,
    at: Coordinates,
    place: tuple[Expr, Expr],
    size: tuple[int, int],
    step: KRange,
    accs: Registers,
    sweep: Sweep | None,
) -> None:
    """The tile at a place, in the form that the place needs."""

    def columns_of(rows: int, rows_end: Expr) -> None:
        def tile_of(vectors: int, columns_end: Expr) -> None:
            over = None if rows < PREFETCH_ROWS and not isinstance(spec.m, int) else sweep
            emit_tile(spec, make_tile(spec, at, place, (rows, vectors), (rows_end, columns_end), over), step, accs)

        choose(_column_cases(spec, place[1], size[1]), tile_of)

    choose(_row_cases(spec, place[0], size[0]), columns_of)
