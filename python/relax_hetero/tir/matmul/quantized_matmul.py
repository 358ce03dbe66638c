"""Products with weights in blocks of few bits, which are unpacked in registers where they are multiplied.

A panel of columns is one stretch of memory (see `relax_hetero.encoding.block_panels`). Turning a field of a lane into a
number takes two or three instructions, a share of the work that falls with the rows of a tile; scales are applied to
the sums of a block, and minimums to the sums of the left factors that meet it. Nothing is unpacked into memory: what is
read for one row is the file's bits, and many rows are nearly as fast as a product of float32.

The loops, from outside: tasks, blocks of rows, panels of columns, tiles of rows; within a tile the chains of weights
that share a scale, groups, the weights of a group. CPUs with tile registers multiply many rows by them
(`amx_blocks`). Where each row has a matrix of its own, rows are sorted by these first (`block_experts`).
"""

from __future__ import annotations

from dataclasses import replace

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.problem import QuantizedMatmulProblem
from ...target.cpu_target import CpuTarget
from ..core.builder import Expr, Function, Registers, ceil_div, either, loop, materialize, minimum
from ..core.view import OperandView, extent_of
from ..core.work_split import part, split_work
from ..elementwise.expression_code import EpilogueCode
from . import amx
from .amx_blocks import MIN_ROWS, block_tiles, emit_block_tiles
from .block_dots import dot_of_bytes, emit_block_dots
from .block_experts import emit_expert_loops
from .block_spec import BlockSpec
from .block_tile import BlockSums, BlockTile, emit_tile, rows_of_a_tile
from .matmul_spec import choose, row_cases
from .matmul_tile import IN_FLIGHT
from .row_sums import emit_row_sums
from .weight_unpacking import PanelReader

# Bytes of the left operand that all panels go over before the next rows: half of a second-level cache.
ROW_BLOCK_BYTES = 1 << 19


def quantized_matmul_kernel(problem: QuantizedMatmulProblem, cpu: CpuTarget) -> tirx.PrimFunc:
    """The kernel of a product with weights in blocks, parallel over the CPU's cores.

    Its parameters are those that `QuantizedMatmulProblem` says.
    """
    function = Function("block_product")
    with function:
        lhs = OperandView(function, "lhs", problem.lhs)
        packed = OperandView(function, "weight", problem.weights[0])
        index = None if problem.index is None else OperandView(function, "index", problem.index)
        lanes = cpu.lanes("float32")
        epilogue = EpilogueCode.of(function, problem.epilogue, "float32", problem.result.dtype, lanes)
        result = OperandView(function, "result", problem.result)
        views = [lhs, *epilogue.views, result]
        for name in reversed([name for name in result.index_map if name.startswith("b")]):
            for view in views:
                view.merge(name, "m")
        with function.body():
            for view in (*views, packed, *([] if index is None else [index])):
                view.open()
            vectors = problem.panel // lanes
            reader = PanelReader.of(cpu, packed, problem.plan)
            of_a_vector, of_all = reader.shape
            free = cpu.isa.registers - of_a_vector * vectors - of_all - 1
            m = extent_of([result], "m")
            kernel = BlockSpec(problem, lhs, result, epilogue, reader, lanes, vectors, free, m)
            tiles = block_tiles(kernel, cpu) if index is None else None
            if index is not None:
                emit_expert_loops(kernel, cpu, index)
            elif tiles is None:
                _emit_vectors(kernel, cpu)
            else:
                with T.attr(0, "pragma_import_llvm", amx.LLVM_TEXT):
                    allowed = amx.may_use_tiles()
                    if not isinstance(kernel.m, int) and not problem.rows:
                        allowed = tirx.And(kernel.m >= MIN_ROWS, allowed)
                    either(allowed, lambda: emit_block_tiles(kernel, cpu, tiles), lambda: _emit_vectors(kernel, cpu))
    return function.result


def _emit_vectors(kernel: BlockSpec, cpu: CpuTarget) -> None:
    """Write the product by dot products of bytes where the CPU has them, else by numbers."""
    dot = dot_of_bytes(kernel, cpu)
    if dot is None:
        _emit_loops(kernel, cpu)
    else:
        emit_block_dots(kernel, cpu, dot)


def _emit_loops(kernel: BlockSpec, cpu: CpuTarget) -> None:
    problem = kernel.problem
    if 0 in (kernel.m, problem.columns):
        T.evaluate(0)
        return
    rows = rows_of_a_tile(kernel, cpu)
    if isinstance(kernel.m, int):
        rows = min(rows, kernel.m)
    tiles, panels = materialize(ceil_div(kernel.m, rows)), ceil_div(problem.columns, problem.panel)
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
        sums = BlockSums(accs, totals, row_sums)
        _, row_part, column_part = split.place(task)
        first_m, last_m = part(tiles, split.rows, row_part)
        first_n, last_n = part(panels, split.columns, column_part)
        with loop(materialize(ceil_div(last_m - first_m, tiles_per_block))) as block:
            begin = materialize(first_m + block * tiles_per_block)
            end = materialize(minimum(begin + tiles_per_block, last_m))
            first_row = materialize(begin * rows)
            if row_sums is not None:
                _emit_sums(kernel, row_sums, first_row, materialize(minimum(end * rows, kernel.m)))
            with loop(last_n - first_n) as panel, loop(end - begin) as tile:
                row = materialize(materialize(begin + tile) * rows)
                _emit_rows(kernel, BlockTile(row, rows, None, materialize(first_n + panel), first_row), sums)


def _emit_sums(kernel: BlockSpec, target: Expr, begin: Expr, end: Expr) -> None:
    """The sums of the left factors of some rows."""
    with loop(end - begin) as r:
        place = (target, materialize(r * kernel.chains))
        emit_row_sums(kernel.lhs, materialize(begin + r), kernel.problem.depth, kernel.chain, kernel.lanes, place)


def _emit_rows(kernel: BlockSpec, tile: BlockTile, sums: BlockSums) -> None:
    """A tile in the form that its place needs: whole, or of what rows are left."""
    choose(
        row_cases(kernel.m, tile.row, tile.rows),
        lambda count, end: emit_tile(kernel, replace(tile, rows=count, end=end), sums),
    )
