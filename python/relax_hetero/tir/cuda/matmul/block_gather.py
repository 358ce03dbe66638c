"""Gather of rows of block-quantized weights as float32, such as the embeddings of tokens.

Weights are in fragments, so that embeddings and the last product share them. A thread has the part of a chunk of k that
a lane has in products, of one of its two columns.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.block_weights import FRAGMENT_COLUMNS
from ....encoding.packed_layout import PackedLayout
from ....encoding.problem import BlockRowsProblem, Operand, QuantizedMatmulProblem
from ....target.gpu_target import GpuTarget
from ...core.builder import Expr, Function, ceil_div, int64, when
from ..core import ptx
from ..core.launch import enable_pdl, launch
from ..core.operand import GpuOperand
from .block_fragments import WeightFragments
from .block_plan import BlockPlan, BlockWork
from .simt_quantized_matmul import simt_block_rows_kernel

_THREADS, _LANES = 128, 4


def block_rows_kernel(problem: BlockRowsProblem, gpu: GpuTarget) -> tirx.PrimFunc:
    """Kernel that gathers rows, one launch; `BlockRowsProblem` documents its parameters."""
    if not gpu.has_ptx:
        return simt_block_rows_kernel(problem)
    function = Function("block_rows", registers="local")
    with function:
        packed = [
            GpuOperand(function, name, operand)
            for name, operand in zip(("weight", "scales", "zeros"), problem.weights, strict=False)
        ]
        index, result = GpuOperand(function, "index", problem.index), GpuOperand(function, "result", problem.result)
        with function.body():
            for view in (*packed, index, result):
                view.open()
            _Kernel(problem, packed, index, result).emit(gpu)
    return enable_pdl(function.result, range(len(packed))) if gpu.overlaps_launches else function.result


def _product_of(problem: BlockRowsProblem) -> QuantizedMatmulProblem:
    """A product of one row with the weights, whose codes its type represents."""
    dtype = "bfloat16" if problem.form.name == "bf16" else "float16"
    depth = problem.result.shape[-1]

    def operand(shape: tuple[int | str, ...], dtype: str, last: str) -> Operand:
        return Operand(shape, dtype, ("m", last), PackedLayout.identity(2))

    lhs, result = operand((1, depth), dtype, "k"), operand((1, problem.rows), "float32", "n")
    form = problem.form if problem.form.superblock_bytes else None
    return QuantizedMatmulProblem(lhs, problem.weights, result, problem.form.block, bits=problem.form.bits, form=form)


class _Kernel:
    """Writer of the kernel."""

    def __init__(
        self, problem: BlockRowsProblem, packed: list[GpuOperand], index: GpuOperand, result: GpuOperand
    ) -> None:
        self.work = BlockWork(_product_of(problem), BlockPlan(1, 1, 1, 1), 1)
        self.rows, self.packed, self.index, self.result = problem.rows, packed, index, result
        self.depth = self.work.problem.depth

    def emit(self, gpu: GpuTarget) -> None:
        """Write the launch."""
        work = self.work
        items = self.index.extents[0] * (work.chunks * _LANES)
        with launch(T.max(ceil_div(items, _THREADS), 1), _THREADS) as place:
            if gpu.overlaps_launches:
                ptx.griddepcontrol_wait()
                ptx.launch_dependents()
            item = T.bind(T.Cast("int64", place.block) * _THREADS + T.Cast("int64", place.thread))
            with when(item < items):
                self._row(T.bind(tirx.floordiv(item, work.chunks * _LANES)), item)

    def _row(self, row: Expr, item: Expr) -> None:
        work = self.work
        chunk = T.bind(tirx.floormod(tirx.floordiv(item, _LANES), work.chunks))
        low = T.bind(tirx.floormod(item, _LANES))
        number = T.Cast("int64", self.index.data[row])
        number = T.bind(T.max(T.min(number, int64(self.rows - 1)), int64(0)))
        column = T.bind(tirx.floormod(number, FRAGMENT_COLUMNS))
        high, self.is_second = T.bind(tirx.floormod(column, 8)), column >= 8
        weights = WeightFragments(work, self.packed, T.bind(high * _LANES + low), high)
        weights.load(0, T.bind(tirx.floordiv(number, FRAGMENT_COLUMNS)), chunk)
        run = 4 * work.steps
        for i in range(work.scaled):
            weights.begin(0, 0, i)
            scale = None if work.is_plain else self._of_column(*(weights.scale(0, 0, i, half) for half in range(2)))
            addends = [None if scale is None else weights.addend(0, 0, i, half, scale) for half in range(2)]
            addend = None if None in addends else self._of_column(*addends)
            for step in range(work.steps):
                fragment = weights.unpack(0, 0, i * work.steps + step)
                pairs = [self._of_column(fragment[2 * pair], fragment[2 * pair + 1]) for pair in range(2)]
                numbers = [weights.number(pair, which) for pair in pairs for which in range(2)]
                scaled = [value if scale is None else value * scale for value in numbers]
                values = [value if addend is None else value + addend for value in scaled]
                self._store(row, T.bind(chunk * work.chunk + (i * 4 + low) * run + step * 4), values)

    def _of_column(self, first: Expr, second: Expr) -> Expr:
        """The value of the row's column, of those of a lane's two."""
        return T.bind(T.Select(self.is_second, second, first))

    def _store(self, row: Expr, k: Expr, values: list[Expr]) -> None:
        """Store four neighbours."""
        if self.depth % 4 == 0:
            with when(self.depth % self.work.chunk == 0 or k < int64(self.depth)):
                ptx.store_global(T.address_of(self.result.data[row * self.depth + k]), values, "f32")
            return
        for i, value in enumerate(values):
            with when(k + i < int64(self.depth)):
                T.buffer_store(self.result.data, value, [row * self.depth + k + i])
