"""Matrix products: one definition for every type, layout, tail and epilogue.

The loops, outermost first: tasks, batches, blocks of rows (mc), blocks of k (kc), panels of columns, register tiles. A
panel of the right operand stays in the L2 cache while the tiles of a block of rows use it.

CPUs with Intel AMX use it for some types (`amx_matmul`), from the same packed weights; the loops here are then
for few rows, and for processes that may not use AMX.
"""

from __future__ import annotations

from contextlib import nullcontext
from math import prod

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
from ..core.work_split import Split, split_work, tasks_for, unravel
from ..elementwise.expression_code import EpilogueCode
from ..microkernel.amx import LLVM_TEXT, amx_or_vectors
from ..microkernel.fp16_partial_sums import mark_fp16_partial_sums
from ..microkernel.k_step import llvm_import
from ..microkernel.microkernel import FMAS_IN_FLIGHT
from ..rows.row_code import RowSpec, RowWriter
from ..rows.rows import emit_rows, phase_code
from .amx_matmul import emit_amx_product, supports_amx
from .matmul_spec import Case, KRange, MatmulSpec, PanelProducts, Sweep, emit_cases, make_tile, row_cases
from .matmul_tile import accumulator_count, emit_tile, k_blocks
from .panels import Panels, panel_kernels, panel_width

# Approximate rows of a block (mc): with one block of k, they fill half of the L2 cache. Blocks have equal sizes,
# because each reads the whole right operand, however few its rows (measured for 128 rows and weights in memory: one
# block is 3 % faster than blocks of 96 and 32 rows).
ROWS_PER_BLOCK = 96

# Right operands of more bytes are prefetched, panel by panel: measured 20 % faster for 8 rows, 30 % for 32, 8 % for
# 128, 2 % for 2,048; slower for one or two rows, which are bound by reads. A model's weights come from memory or the L3
# cache, however small: 12 % for 128x384 times 384x384.
PREFETCH_BYTES = 1 << 16
PREFETCH_ROWS = 3


def matmul_kernel(problem: MatmulProblem, cpu: CpuTarget) -> tirx.PrimFunc:
    """The kernel of a matrix product, parallel over the CPU's cores, with the parameters of `MatmulProblem`.

    Raises EncodingError if the CPU lacks a product of these element types, or the product cannot read an operand's
    layout.
    """
    types = (problem.lhs.dtype, problem.rhs.dtype, problem.acc_dtype)
    dot = dot_instruction_for(cpu, *types)
    if dot is None:
        raise EncodingError(
            "matmul: found element types {} * {} -> {}, expected ones that {} multiplies".format(*types, cpu.isa.name)
        )
    with Function("matmul") as function:
        lhs = OperandView(function, "lhs", problem.lhs)
        rhs = OperandView(function, "rhs", problem.rhs)
        init = OperandView(function, "init", problem.init) if problem.init else None
        lanes = cpu.lanes(problem.acc_dtype)
        epilogue = EpilogueCode.of(function, problem.epilogue, problem.acc_dtype, problem.result.dtype, lanes)
        phase_operands = [
            OperandView(function, f"y{i}", o) for i, o in enumerate(problem.rows.operands if problem.rows else ())
        ]
        result = OperandView(function, "result", problem.result)
        views = [lhs, rhs, *([init] if init else []), *epilogue.views, *phase_operands, result]
        batch = merge_batches(views, lhs, rhs, result)
        # One register holds the broadcast left factor.
        free_registers = cpu.isa.registers - 1 - dot.temporaries
        m, n, k = (extent_of(views, name) for name in "mnk")
        spec = MatmulSpec(lhs, rhs, result, init, epilogue, dot, lanes, free_registers, m, n, k)
        with function.body():
            for view in views:
                view.open()
            rows = phase_code(problem.rows, phase_operands, result, cpu, n) if problem.rows else None
            instruction = amx_instruction_for(cpu, *types)
            if instruction is not None and not supports_amx(spec, instruction):
                instruction = None
            panel_rows = Panels.rows_of(spec, cpu, _loop_k_blocks(spec)[0])
            texts = [text for text in (llvm_import(dot, lanes), LLVM_TEXT if instruction else None) if text is not None]
            if panel_rows:
                texts += panel_kernels(spec, panel_rows, [size for _, size, _ in _cases_along_m(spec, 0, panel_rows)])
            with T.attr(0, "pragma_import_llvm", "".join(texts)) if texts else nullcontext():
                _emit_product(spec, cpu, batch, rows, instruction)
    return mark_fp16_partial_sums(_with_ties(function.result, problem, spec), dot)


def _emit_product(
    spec: MatmulSpec, cpu: CpuTarget, batch: list[str], rows: RowSpec | None, instruction: AmxInstruction | None
) -> None:
    """Write the product with AMX, if the CPU and the process may use it and m is large enough, and with vectors."""
    if instruction is None:
        _emit_loops(spec, cpu, batch, rows)
        return
    amx_or_vectors(
        lambda: emit_amx_product(spec, cpu, batch, rows, instruction),
        lambda: _emit_loops(spec, cpu, batch, rows),
        True if isinstance(spec.m, int) else spec.m >= instruction.min_rows,
    )


def _with_ties(func: tirx.PrimFunc, problem: MatmulProblem, spec: MatmulSpec) -> tirx.PrimFunc:
    """Tie the result to the initial accumulators and the epilogue's operands, unless partial sums are stored in it.

    Operands of a row phase cannot be tied: they are read after the product's rows are stored.
    """
    blocks, _ = _loop_k_blocks(spec)
    has_one_block = isinstance(blocks, int) and blocks == 1
    tile_operands = [
        *([problem.init] if problem.init else []),
        *(problem.epilogue.operands if problem.epilogue else ()),
    ]
    return tied_to(func, tile_operands if has_one_block else [], 2, problem.result)


def merge_batches(views: list[OperandView], lhs: OperandView, rhs: OperandView, result: OperandView) -> list[str]:
    """Merge batch dimensions that the right operand lacks into m, where storage allows; return the remaining ones."""
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
    k_block_count, k_block_size = _loop_k_blocks(spec)
    panel_rows = Panels.rows_of(spec, cpu, k_block_count)
    rows, vectors = (panel_rows, panel_width(spec) // spec.lanes) if panel_rows else _tile_size(spec, cpu)
    tiles, panels = ceil_div(spec.m, rows), ceil_div(spec.n, vectors * spec.lanes)
    extents = {name: extent_of([spec.result], name) for name in batch}
    batch_count = prod(extents.values())
    batch_count, tiles, panels, k_block_count = (
        materialize(value) for value in (batch_count, tiles, panels, k_block_count)
    )
    split = split_work(cpu.cores, batch_count, tiles, panels, (rows, vectors * spec.lanes), spec.k)
    prefetches = not panel_rows and _prefetches_panels(spec, cpu, split)
    tasks_have_whole_rows = isinstance(split.columns, int) and split.columns == 1
    with loop(split.tasks, parallel=split.tasks > 1) as task:
        accs = Registers(accumulator_count(spec.dot, rows, vectors), spec.dot.types[2], spec.lanes)
        (first_b, last_b), (first_m, last_m), (first_n, last_n) = split.ranges(task, batch_count, tiles, panels)
        block_tiles, panel_scratch = _tiles_per_block(tiles, split, rows), None
        if panel_rows:
            max_k = spec.k if isinstance(k_block_count, int) and k_block_count == 1 else k_block_size
            block_tiles = min(block_tiles, Panels.max_tiles(spec, rows, max_k))
            panel_scratch = Panels.of(spec, rows, block_tiles, max_k)
        row_writer = RowWriter(rows_code) if rows_code is not None and tasks_have_whole_rows else None
        with loop(last_b - first_b) as b, loop(materialize(ceil_div(last_m - first_m, block_tiles))) as block:
            batch_at = dict(zip(extents, unravel(first_b + b, list(extents.values()), place=materialize), strict=True))
            begin_m = materialize(first_m + block * block_tiles)
            end_m = materialize(minimum(begin_m + block_tiles, last_m))
            sweep_tiles = min(ceil_div(tiles, split.rows), block_tiles) if isinstance(tiles, int) else end_m - begin_m
            with loop(k_block_count) as k_block:
                k_range = KRange.of(spec.k, k_block_count, k_block_size, k_block)
                if panel_scratch is not None:
                    with loop(end_m - begin_m) as tile:
                        panel_scratch.pack_left(batch_at, materialize(begin_m + tile) * rows, tile, k_range)
                with loop(last_n - first_n) as panel:
                    column = materialize(first_n + panel) * (vectors * spec.lanes)
                    if panel_scratch is not None:
                        panel_scratch.widen_right(batch_at, column, k_range)
                    with loop(end_m - begin_m) as tile:
                        first_row = materialize(begin_m + tile) * rows
                        sweep = Sweep(tile, sweep_tiles, column + vectors * spec.lanes) if prefetches else None
                        multiply = panel_scratch.products(tile, k_range.begin) if panel_scratch is not None else None
                        _emit_tile_cases(
                            spec, batch_at, (first_row, column), (rows, vectors), k_range, accs, sweep, multiply
                        )
            if row_writer is not None:
                first_row = materialize(begin_m * rows)
                with loop(materialize(minimum(end_m * rows, spec.m)) - first_row) as r:
                    row_writer.emit({**batch_at, "m": materialize(first_row + r)})
    if rows_code is not None and not tasks_have_whole_rows:
        emit_rows(rows_code, [*batch, "m"], cpu)


def _tile_size(spec: MatmulSpec, cpu: CpuTarget) -> tuple[int, int]:
    """Rows and vectors of a register tile: as wide as a packed panel, as high as registers allow."""
    sizes = tile_sizes(cpu)
    panel_vectors = spec.rhs.layout.tile(spec.rhs.index_map.index("n")) // spec.lanes
    vectors = panel_vectors if 0 < panel_vectors <= sizes.vectors * 2 else sizes.vectors
    if panel_vectors == 0 and isinstance(spec.m, int) and 0 < spec.m <= sizes.rows and spec.lanes > 1:
        # Rows of a row-major right operand are far apart: tiles of fewer rows read longer runs of each. The
        # multiply-adds of a single row read right factors from memory; those of several rows, from registers.
        max_vectors = spec.registers // (spec.m + 1 if spec.m > 1 else 1)
        vectors = max(vectors, min(max_vectors, 16))
    rows = max(1, min(sizes.rows, (spec.registers - vectors) // vectors))
    if not isinstance(spec.m, int):
        return rows, vectors
    rows = max(1, min(rows, spec.m))
    return rows, vectors * (_panels_per_tile(spec, cpu, rows, vectors) if panel_vectors and spec.lanes > 1 else 1)


def _panels_per_tile(spec: MatmulSpec, cpu: CpuTarget, rows: int, vectors: int) -> int:
    """Number of panels of a tile of few rows, such that enough multiply-adds are in flight.

    It minimizes the number of tiles of a task: a tile takes as long as the latency of its chained instructions.
    """
    max_panels = min(FMAS_IN_FLIGHT, spec.registers // (rows + 1)) // (rows * vectors)
    if max_panels < 2 or not isinstance(spec.n, int):
        return 1
    panels = ceil_div(spec.n, vectors * spec.lanes)
    tasks = tasks_for(cpu.cores, "multiply-adds", spec.m * spec.n * spec.k if isinstance(spec.k, int) else None)
    return min(range(1, min(max_panels, panels) + 1), key=lambda count: ceil_div(ceil_div(panels, count), tasks))


def _tiles_per_block(tiles: Expr, split: Split, rows: int) -> int:
    """Number of tiles of rows that use a panel before the next one."""
    per_block = max(1, ROWS_PER_BLOCK // rows)
    if not isinstance(tiles, int) or not isinstance(split.rows, int):
        return per_block
    task_tiles = ceil_div(tiles, split.rows)
    return ceil_div(task_tiles, max(1, (2 * task_tiles + per_block) // (2 * per_block)))


def _prefetches_panels(spec: MatmulSpec, cpu: CpuTarget, split: Split) -> bool:
    """Return whether the tiles of a panel prefetch the next one.

    It pays if a packed right operand comes from memory or the L3 cache, except for one or two rows.
    """
    is_packed = spec.rhs.layout.tile(spec.rhs.index_map.index("n")) > 1
    if cpu.kind != "llvm" or spec.lanes == 1 or not is_packed or not isinstance(split.rows, int):
        return False
    if not isinstance(spec.n, int) or not isinstance(spec.k, int):
        return False
    # If a product needs temporaries, the addresses of prefetches would make LLVM spill accumulators.
    if spec.dot.temporaries:
        return False
    is_read_bound = isinstance(spec.m, int) and spec.m < PREFETCH_ROWS
    return spec.n * spec.k * bytes_of(spec.rhs.dtype) > PREFETCH_BYTES and not is_read_bound


def _loop_k_blocks(spec: MatmulSpec) -> tuple[Expr, Expr]:
    """Number of blocks of k in the loops, and the k of a block; (1, 0) if a tile sums over all of k."""
    has_few_rows = isinstance(spec.m, int) and spec.m < PREFETCH_ROWS
    return (1, 0) if spec.result.dtype != spec.dot.types[2] or has_few_rows else k_blocks(spec)


def _cases_along_m(spec: MatmulSpec, row: Expr, rows: int) -> list[Case]:
    """The cases of a tile along m: whole, or the tail."""
    views = (spec.lhs, spec.result, *([spec.init] if spec.init else []), *spec.epilogue.views)
    if all(view.is_padded("m", rows) for view in views if view.runs_along("m")):
        return [(None, rows, None)]
    return row_cases(spec.m, row, rows)


def _cases_along_n(spec: MatmulSpec, column: Expr, vectors: int) -> list[Case]:
    """The cases of a tile along n: whole, or the tail."""
    views = (spec.rhs, spec.result, *([spec.init] if spec.init else []), *spec.epilogue.views)
    columns = vectors * spec.lanes
    if all(view.is_padded("n", columns) for view in views if view.runs_along("n")):
        tail = spec.n % columns if isinstance(spec.n, int) else 0
        count = ceil_div(tail, spec.lanes)
        return (
            [(None, vectors, None)] if tail == 0 else [(column + columns <= spec.n, vectors, None), (None, count, None)]
        )
    if not isinstance(spec.n, int):
        return [(column + columns <= spec.n, vectors, None), (None, vectors, spec.n)]
    tail = spec.n % columns
    tail_case: Case = (None, ceil_div(tail, spec.lanes), tail)
    if tail == 0:
        return [(None, vectors, None)]
    return [tail_case] if spec.n < columns else [(column + columns <= spec.n, vectors, None), tail_case]


def _emit_tile_cases(
    spec: MatmulSpec,
    batch: Coordinates,
    origin: tuple[Expr, Expr],
    size: tuple[int, int],
    k_range: KRange,
    accs: Registers,
    sweep: Sweep | None,
    multiply: PanelProducts | None,
) -> None:
    """Write the cases of the tile at (row, column)."""

    def emit_columns(rows: int, rows_end: Expr) -> None:
        def emit_one_tile(vectors: int, columns_end: Expr) -> None:
            tile_sweep = None if rows < PREFETCH_ROWS and not isinstance(spec.m, int) else sweep
            tile = make_tile(spec, batch, origin, (rows, vectors), (rows_end, columns_end), tile_sweep, multiply)
            emit_tile(spec, tile, k_range, accs)

        emit_cases(_cases_along_n(spec, origin[1], size[1]), emit_one_tile)

    emit_cases(_cases_along_m(spec, origin[0], size[0]), emit_columns)
