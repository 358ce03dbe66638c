"""Matrix products on tensor cores by ``mma.sync``: Ampere, Ada, and Hopper code without wgmma.

A block computes a tile of the result. All its threads copy operand tiles into a multistage pipeline in shared memory,
some k-steps ahead (``cp.async``); each warp loads fragments of its warp tile by ``ldmatrix``, and multiplies them.
Tiles in shared memory have the layout that wgmma reads (`operand_tiles`), so a packed right operand has one layout on
all GPUs.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.packed_layout import CHUNK_BYTES, SWIZZLED_BYTES
from ....encoding.problem import MatmulProblem
from ....errors import EncodingError
from ....target.gpu_target import WARP, GpuTarget
from ...core.builder import Expr, Function, ceil_div, int64, when
from ..core import ptx
from ..core.launch import SWIZZLED_ALIGN, SharedMemory, at_least_one, launch, local, unrolled
from ..tile.fragment_store import FragmentStore
from .mma_tiling import MmaTiling, choose_mma_tiling
from .operand_tiles import PACKED_ROWS, LeftTile, OperandTile, Source
from .product_parameters import ProductParameters
from .simt_tiles import Batches
from .wgmma_matmul import tensor_core_unsupported_reason

_BYTES = ("int8", "uint8")


def unsupported_reason(problem: MatmulProblem, gpu: GpuTarget) -> str:
    """Reason why `mma_matmul_kernel` does not support a problem; empty if it does."""
    if not gpu.tensor or not gpu.async_copies:
        return f"{gpu.arch} lacks tensor cores or asynchronous copies"
    return tensor_core_unsupported_reason(problem, gpu)


def mma_matmul_kernel(problem: MatmulProblem, gpu: GpuTarget, tiling: MmaTiling | None = None) -> tirx.PrimFunc:
    """Kernel of a matrix product, one launch; `MatmulProblem` documents its parameters.

    Parameters
    ----------
    tiling : MmaTiling, optional
        Tiling, by default that of `choose_mma_tiling`.

    Raises
    ------
    EncodingError
        If the kernel does not support the problem (`unsupported_reason`).
    """
    reason = unsupported_reason(problem, gpu)
    if reason:
        raise EncodingError(f"matmul on {gpu.arch}: {reason}")
    function = Function("matmul", registers="local")
    with function:
        parameters = ProductParameters.declare(function, problem, gpu)
        (m, n, k), batches = parameters.sizes, Batches(parameters.counts)
        with function.body():
            parameters.open()
            tiling = tiling or choose_mma_tiling(problem, gpu, (m, n, k), list(batches.extents.values()))
            left = OperandTile.of(parameters.lhs, "m", tiling.rows, m, k, tiling.threads)
            right = OperandTile.of(parameters.rhs, "n", tiling.columns, n, k, tiling.threads)
            MmaProduct(left, right, parameters.store, tiling, batches).emit()
    return parameters.tied(function.result)


class MmaProduct:
    """Writer of a product's launch.

    Parameters
    ----------
    left : LeftTile
    right : OperandTile
    store : FragmentStore
        Opened.
    tiling : MmaTiling
    batches : Batches
    """

    def __init__(
        self, left: LeftTile, right: OperandTile, store: FragmentStore, tiling: MmaTiling, batches: Batches
    ) -> None:
        self.left, self.right, self.store, self.tiling, self.batches = left, right, store, tiling, batches
        self.kind = "uint32" if left.view.nominal in _BYTES else "float32"
        self.steps = ceil_div(left.depth, left.step)

    def emit(self) -> None:
        """Write the launch."""
        tiling, shared = self.tiling, SharedMemory()
        self.shared = shared
        self.left_at = shared.reserve(tiling.stages * self.left.size, SWIZZLED_ALIGN)
        self.right_at = shared.reserve(tiling.stages * self.right.size, SWIZZLED_ALIGN)
        self.store.plan(shared, (tiling.rows, tiling.columns), tiling.threads // WARP, tiling.epilogue_columns)
        row_tiles, column_tiles = ceil_div(self.left.extent, tiling.rows), ceil_div(self.right.extent, tiling.columns)
        tiles = self.batches.count * row_tiles * column_tiles
        with launch(int64(at_least_one(tiles)), tiling.threads) as place:
            shared.open()
            self.thread = place.thread
            with when(True if isinstance(tiles, int) else int64(place.block) < tiles):
                self._tile(int64(place.block), row_tiles, column_tiles)

    def _tile(self, block: Expr, row_tiles: Expr, column_tiles: Expr) -> None:
        tiling = self.tiling
        at, row_tile, column_tile = self.batches.tile(block, row_tiles, column_tiles)
        row, column = T.bind(row_tile * tiling.rows), T.bind(column_tile * tiling.columns)
        warp, lane = T.bind(self.thread // WARP), T.bind(self.thread % WARP)
        warps_n = tiling.columns // tiling.warp_columns
        warp_row = T.bind(warp // warps_n * tiling.warp_rows)
        warp_column = T.bind(warp % warps_n * tiling.warp_columns)
        sums = [local(tiling.warp_columns // 2, self.kind) for _ in range(tiling.warp_rows // 16)]
        for accumulators in sums:
            with unrolled(tiling.warp_columns // 2) as i:
                T.buffer_store(accumulators, tirx.const(0, self.kind), [i])

        self.left.begin(at, row, self.thread)

        def load(step: Expr, stage: Expr) -> None:
            for operand, base, first in ((self.left, self.left_at, row), (self.right, self.right_at, column)):
                target = base + stage * operand.size
                if isinstance(operand, OperandTile) and operand.source is Source.PACKED:
                    operand.load_packed(self.shared, target, at, first, step, self.thread)
                else:
                    operand.load(self.shared, target, at, first, step, self.thread)

        stages = tiling.stages
        for stage in range(stages - 1):
            with when(stage < self.steps) if not isinstance(self.steps, int) else when(True):
                if not isinstance(self.steps, int) or stage < self.steps:
                    load(tirx.const(stage, "int32"), tirx.const(stage, "int32"))
            ptx.copy_commit()
        with T.serial(T.Cast("int32", int64(self.steps))) as step:
            ptx.copy_wait(stages - 2)
            ptx.block_barrier()
            ahead = T.bind(step + (stages - 1))
            with T.If(ahead < T.Cast("int32", int64(self.steps))), T.Then():
                load(ahead, T.bind(ahead % stages))
            ptx.copy_commit()
            stage = T.bind(step % stages)
            left_at, right_at = self.left_at + stage * self.left.size, self.right_at + stage * self.right.size
            self._multiply(sums, T.bind(left_at), T.bind(right_at), warp_row, warp_column, lane)
        ptx.copy_wait(0)
        for i, accumulators in enumerate(sums):
            first_row = row + T.Cast("int64", warp_row + i * 16)
            first = (T.bind(first_row), T.bind(column + T.Cast("int64", warp_column)))
            self.store.emit(accumulators, (1, tiling.warp_columns), at, first, warp, lane)

    def _multiply(
        self, sums: list[Expr], left_at: Expr, right_at: Expr, warp_row: Expr, warp_column: Expr, lane: Expr
    ) -> None:
        """Multiply a warp tile's k-step."""
        tiling = self.tiling
        blocks, pairs = tiling.warp_rows // 16, tiling.warp_columns // 16
        a, b = local(blocks * 4, "uint32"), local(pairs * 4, "uint32")
        types = (self.left.view.nominal, self.right.view.nominal)
        with unrolled(SWIZZLED_BYTES // ptx.CONTRACTION_BYTES) as k:
            with unrolled(blocks) as i:
                address = left_at + _matrix_row(self.left, warp_row + i * 16, k, lane, is_left=True)
                registers = [a[i * 4 + r] for r in range(4)]
                ptx.load_matrices(registers, self.shared.at(address), self.left.is_transposed)
            with unrolled(pairs) as j:
                address = right_at + _matrix_row(self.right, warp_column + j * 16, k, lane, is_left=False)
                registers = [b[j * 4 + r] for r in range(4)]
                ptx.load_matrices(registers, self.shared.at(address), self.right.is_transposed)
            for i, accumulators in enumerate(sums):
                with unrolled(2 * pairs) as j:
                    ptx.multiply_fragments(
                        [accumulators[j * 4 + r] for r in range(4)],
                        [a[i * 4 + r] for r in range(4)],
                        [b[j * 2 + r] for r in range(2)],
                        types,
                    )


def _matrix_row(operand: LeftTile, first: Expr, k: Expr, lane: Expr, is_left: bool) -> Expr:
    """Byte offset in a tile of the row that a lane addresses in ``ldmatrix`` of a fragment's four matrices.

    Matrices of a left fragment are rows 0 and 8 of the first 16 bytes of k, then of the next ones. Those of a right
    fragment, which has two blocks of 8 columns, are both halves of k of the first block, then of the second.
    """
    low, matrix = lane % 8, lane // 8
    next_rows, next_k = (matrix % 2, matrix // 2) if is_left else (matrix // 2, matrix % 2)
    if operand.is_transposed:
        # Lines are values of k, 16 per fragment; chunks have 8 rows.
        row = first % PACKED_ROWS
        stripe = first // PACKED_ROWS * (PACKED_ROWS * SWIZZLED_BYTES)
        line = k * 16 + next_k * 8 + low
        chunk = T.bitwise_xor(row // 8 + next_rows, low)
        return stripe + line * SWIZZLED_BYTES + chunk * CHUNK_BYTES
    chunk = T.bitwise_xor(k * 2 + next_k, low)
    return (first + next_rows * 8 + low) * SWIZZLED_BYTES + chunk * CHUNK_BYTES
