"""Products and gathers of block-quantized weights in panels, without tensor cores (`encoding.block_panels`).

A panel has `COLUMNS` columns, and a thread one of them: neighbouring threads read neighbouring words. The warps of a
block split the blocks of weights along k, and add their accumulators in shared memory. A weight is dequantized in
registers, once for all rows of a block of threads.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.block_panels import PanelPlan
from ....encoding.problem import BlockRowsProblem, QuantizedMatmulProblem
from ....errors import EncodingError
from ....target.cpu_target import WeightPrefetch
from ....target.gpu_target import WARP
from ...core.builder import Expr, Function, ceil_div, int64, lane_indices, let, when
from ...core.view import View, extent_of
from ...matmul.weight_unpacking import PanelReader
from ..core.dialect import shared_scope
from ..core.launch import at_least_one, launch, local, unrolled
from ..core.operand import GpuOperand, divides
from ..tile.epilogue import EpilogueWriter
from .simt_tiles import barrier

COLUMNS = WARP
"""Columns of a panel."""
_WARPS, _MAX_ROWS = 8, 8
_THREADS = _WARPS * WARP
_VECTOR = 4
"""Neighbours of a left row that a thread loads at once."""


def _reader(view: View, plan: PanelPlan, thread: Expr, shared: Any = None) -> PanelReader:
    """A reader of single columns, with a table of codes at the beginning of shared memory."""
    elements = {kind: view.elements(kind) for kind in ("float32", "int8", "uint8", "int32", "uint16")}
    codes = None
    if plan.form.codes:
        codes = T.alloc_buffer((len(plan.form.codes),), "float32", scope="shared") if shared is None else shared
        for number, code in enumerate(plan.form.codes):
            with when(thread == number):
                T.buffer_store(codes, T.float32(code), [number])
        barrier()
    return PanelReader(plan, 1, elements, [], False, WeightPrefetch(0, max_bits=0, max_rows=0), codes)


class _Block:
    """Weights of a column that share a scale, as numbers of their groups."""

    def __init__(self, reader: PanelReader, panel: Expr, number: Expr, column: Expr) -> None:
        plan = reader.plan
        first = T.bind(number * plan.block)
        in_superblock = T.bind(tirx.floormod(first, plan.superblock_size))
        self.reader, self.column, self.first = reader, column, first
        self._superblock = T.bind(reader.superblock(panel, tirx.floordiv(first, plan.superblock_size)))
        outer = reader.outer(self._superblock, column)
        inner = T.bind(tirx.floordiv(in_superblock, plan.block))
        self._scale = reader.scale(self._superblock, inner, outer, column)
        self._minimum = reader.minimum(self._superblock, inner, outer, column)
        self._first_group = T.bind(tirx.floordiv(in_superblock, plan.group))

    def group(self, number: Expr) -> list[Expr]:
        """The numbers of a group of the block."""
        numbers = self.reader.group(self._superblock, T.bind(self._first_group + number), self.column)
        values = [let(numbers(position)) for position in range(self.reader.plan.group)]
        scaled = values if self._scale is None else [value * self._scale for value in values]
        return [let(value if self._minimum is None else value + self._minimum) for value in scaled]


def simt_quantized_matmul_kernel(problem: QuantizedMatmulProblem) -> tirx.PrimFunc:
    """Kernel of a product with weights in panels, one launch; `QuantizedMatmulProblem` documents its parameters.

    Raises
    ------
    EncodingError
        If the left operand is not float32, or weights are not in panels of `COLUMNS` columns.
    """
    if problem.lhs.dtype != "float32" or len(problem.weights) != 1 or problem.plan.columns != COLUMNS:
        raise EncodingError(
            f"block_matmul: found a left operand of {problem.lhs.dtype} and weights of {problem.weights[0].shape}, "
            f"expected float32, and panels of {COLUMNS} columns"
        )
    function = Function("block_product", registers="local")
    with function:
        lhs = GpuOperand(function, "lhs", problem.lhs)
        weight = GpuOperand(function, "weight", problem.weights[0])
        index = None if problem.index is None else GpuOperand(function, "index", problem.index)
        writer = EpilogueWriter.of(function, problem.epilogue, problem.result, "float32")
        for name in reversed([name for name in lhs.index_map if name.startswith("b")]):
            for view in (lhs, *(view for view in writer.operands if view.runs_along(name))):
                view.merge(name, "m")
        with function.body():
            for view in (lhs, weight, *([] if index is None else [index]), *writer.operands):
                view.open_for_gpu()
            _Product(problem, lhs, weight, index, writer).emit()
    return function.result


class _Product:
    """Writer of a product."""

    def __init__(
        self,
        problem: QuantizedMatmulProblem,
        lhs: GpuOperand,
        weight: GpuOperand,
        index: GpuOperand | None,
        writer: EpilogueWriter,
    ) -> None:
        self.problem, self.plan = problem, problem.plan
        self.lhs, self.weight, self.index, self.writer = lhs, weight, index, writer
        self.m = extent_of([writer.result], "m")
        # Pairs of a token and an expert have matrices of their own.
        is_single = index is not None
        self.rows = 1 if is_single else min(_MAX_ROWS, max(self.m, 1)) if isinstance(self.m, int) else _MAX_ROWS
        self.panels = ceil_div(problem.columns, COLUMNS)

    def emit(self) -> None:
        """Write the launch."""
        row_tiles = at_least_one(ceil_div(self.m, self.rows))
        with launch(int64(row_tiles * max(self.panels, 1)), _THREADS) as place:
            block = int64(place.block)
            panel = T.bind(tirx.floordiv(block, int64(row_tiles)))
            first = T.bind(tirx.floormod(block, int64(row_tiles)) * self.rows)
            count = _WARPS * self.rows * WARP
            shared = T.alloc_buffer((len(self.plan.form.codes) + count,), "float32", scope=shared_scope())
            reader = _reader(self.weight, self.plan, place.thread, shared)
            if self.index is None:
                with when(first < int64(self.m)):
                    self._tile(reader, shared, panel, panel, first, place.thread)
                return
            with when(first < int64(self.m)):
                last = int64(self.problem.experts - 1)
                expert = T.bind(T.min(T.Cast("int64", self.index.data[first]), last))
                with when(expert >= 0):
                    self._tile(reader, shared, panel, T.bind(expert * self.panels + panel), first, place.thread)

    def _tile(self, reader: PanelReader, shared: Any, panel: Expr, stored: Expr, first: Expr, thread: Expr) -> None:
        """Multiply some rows by a panel, which is stored as number `stored`."""
        plan, rows = self.plan, self.rows
        column = T.bind(int64(tirx.floormod(thread, WARP)))
        warp = T.bind(int64(tirx.floordiv(thread, WARP)))
        sums = local(rows, "float32")
        with unrolled(rows) as row:
            T.buffer_store(sums, T.float32(0), [row])
        blocks = ceil_div(plan.depth, plan.block)
        with T.serial(int64(ceil_div(blocks, _WARPS))) as step:
            number = T.bind(step * _WARPS + warp)
            with when(True if blocks % _WARPS == 0 else number < int64(blocks)):
                block = _Block(reader, stored, number, column)
                with T.serial(int64(plan.block // plan.group)) as group:
                    k = T.bind(block.first + group * plan.group)
                    with when(True if plan.depth % plan.block == 0 else k < int64(plan.depth)):
                        self._multiply(sums, block.group(group), first, k)
        if plan.form.codes:
            barrier()  # TVM cannot tell the codes from the sums
        with unrolled(rows) as row:
            index = (T.Cast("int32", warp) * rows + row) * WARP + T.Cast("int32", column)
            T.buffer_store(shared, sums[row], [len(plan.form.codes) + index])
        barrier()
        self._store(shared, panel, first, thread)

    def _multiply(self, sums: Any, weights: list[Expr], first: Expr, k: Expr) -> None:
        """Add the products of a group of weights."""
        depth, values = self.plan.depth, local(_VECTOR, "float32")
        with unrolled(self.rows) as row:
            # Rows beyond the last are copies of it, and are not stored.
            number = self._left_row(T.min(first + row, int64(self.m - 1)))
            for begin in range(0, len(weights), _VECTOR):
                if depth % _VECTOR == 0 and self.lhs.vector("k") >= _VECTOR:
                    address = self.lhs.address({"m": number, "k": k + begin})
                    with when(True if depth % self.plan.group == 0 else k + begin < int64(depth)):
                        T.buffer_store(
                            values, self.lhs.data[lane_indices(address, _VECTOR)], [lane_indices(T.int32(0), _VECTOR)]
                        )
                        self._add(sums, row, values, weights[begin : begin + _VECTOR])
                    continue
                for i in range(min(_VECTOR, len(weights) - begin)):
                    with when(True if depth % self.plan.group == 0 else k + (begin + i) < int64(depth)):
                        T.buffer_store(
                            values, self.lhs.data[self.lhs.address({"m": number, "k": k + (begin + i)})], [0]
                        )
                        self._add(sums, row, values, weights[begin + i : begin + i + 1])

    def _add(self, sums: Any, row: Expr, values: Any, weights: list[Expr]) -> None:
        total: Expr = sums[row]
        for i, weight in enumerate(weights):
            total = total + values[i] * weight
        T.buffer_store(sums, total, [row])

    def _left_row(self, row: Expr) -> Expr:
        """Row of the left operand for a row of the result."""
        if self.problem.index is None or self.problem.has_row_per_expert:
            return row
        return tirx.floordiv(row, int64(self.problem.index.shape[1]))

    def _store(self, shared: Any, panel: Expr, first: Expr, thread: Expr) -> None:
        """Add the accumulators of the warps, and store them."""
        rows, total = self.rows, local(1, "float32")
        count = rows * WARP
        with unrolled(ceil_div(count, _THREADS)) as iteration:
            number = T.bind(iteration * _THREADS + thread)
            with when(True if count % _THREADS == 0 else number < count):
                T.buffer_store(total, T.float32(0), [0])
                with unrolled(_WARPS) as warp:
                    T.buffer_store(total, total[0] + shared[len(self.plan.form.codes) + warp * count + number], [0])
                row = T.bind(first + int64(tirx.floordiv(number, WARP)))
                at = {"m": row, "n": T.bind(panel * COLUMNS + int64(tirx.floormod(number, WARP)))}
                exists = None if divides(self.m, rows) else row < int64(self.m)
                end = None if self.problem.columns % COLUMNS == 0 else self.problem.columns
                self.writer.write([lambda: total[0]], at, "n", [exists], end)


def simt_block_rows_kernel(problem: BlockRowsProblem) -> tirx.PrimFunc:
    """Kernel that gathers rows of weights in panels, one launch; `BlockRowsProblem` documents its parameters."""
    function = Function("block_rows", registers="local")
    with function:
        weight = GpuOperand(function, "weight", problem.weights[0])
        index, result = GpuOperand(function, "index", problem.index), GpuOperand(function, "result", problem.result)
        plan = problem.plan
        groups = ceil_div(plan.depth, plan.group)
        with function.body():
            for view in (weight, index, result):
                view.open()
            items = int64(index.extents[0] * groups)
            with launch(at_least_one(ceil_div(items, _THREADS)), _THREADS) as place:
                reader = _reader(weight, plan, place.thread)
                item = T.bind(int64(place.block) * _THREADS + int64(place.thread))
                with when(item < items):
                    row, k = T.bind(tirx.floordiv(item, groups)), T.bind(tirx.floormod(item, groups) * plan.group)
                    number = T.Cast("int64", index.data[row])
                    number = T.bind(T.max(T.min(number, int64(problem.rows - 1)), int64(0)))
                    panel, column = tirx.floordiv(number, COLUMNS), T.bind(tirx.floormod(number, COLUMNS))
                    block = _Block(reader, T.bind(panel), T.bind(tirx.floordiv(k, plan.block)), column)
                    in_block = T.bind(tirx.floordiv(tirx.floormod(k, plan.block), plan.group))
                    for i, value in enumerate(block.group(in_block)):
                        with when(True if plan.depth % plan.group == 0 else k + i < int64(plan.depth)):
                            T.buffer_store(result.data, value, [row * plan.depth + k + i])
    return function.result
