"""Matrix products on tensor cores by ``mma.sync``: Ampere, Ada, and Hopper code without wgmma.

A block computes a tile of the result. All its threads copy operand tiles into a multistage pipeline in shared memory,
some k-steps ahead (``cp.async``); each warp loads fragments of its warp tile by ``ldmatrix``, and multiplies them.
Tiles in shared memory have the layout that wgmma reads (`operand_tiles`), so a packed right operand has one layout on
all GPUs.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.packed_layout import SWIZZLED_BYTES
from ....encoding.problem import MatmulProblem
from ....errors import EncodingError
from ....target.gpu_target import WARP, GpuTarget
from ...core.builder import Expr, Function, ceil_div, int64, when
from ..core import ptx
from ..core.launch import SWIZZLED_ALIGN, SharedMemory, at_least_one, launch, local, unrolled
from ..tile.batches import Batches
from ..tile.fragment_store import FragmentStore
from ..tile.operand_tiles import PACKED_ROWS, OperandTile, Source, StageTile
from ..tile.register_tile import WARP_ROWS, RegisterTile, sums_dtype
from ..tile.shared_tile import SharedTile, SwizzledTile
from .mma_tiling import MmaTiling, choose_mma_tiling
from .product_parameters import ProductParameters
from .wgmma_matmul import tensor_core_unsupported_reason


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
        parameters = ProductParameters.declare(function, problem)
        (m, n, k), batches = parameters.sizes, parameters.batches
        with function.body():
            store = parameters.open(gpu)
            tiling = tiling or choose_mma_tiling(problem, gpu, (m, n, k), list(batches.extents.values()))
            left = OperandTile.of(parameters.lhs, "m", tiling.rows, m, k, tiling.threads)
            right = OperandTile.of(parameters.rhs, "n", tiling.columns, n, k, tiling.threads)
            MmaProduct(left, right, store, tiling, batches).emit()
    return parameters.tied(function.result)


class MmaProduct:
    """Writer of a product's launch.

    Parameters
    ----------
    store : FragmentStore
        Opened.
    """

    def __init__(
        self, left: StageTile, right: OperandTile, store: FragmentStore, tiling: MmaTiling, batches: Batches
    ) -> None:
        self.left, self.right, self.store, self.tiling, self.batches = left, right, store, tiling, batches
        self.kind = sums_dtype(left.view.nominal)
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
        sums = [RegisterTile(tiling.warp_columns, self.kind) for _ in range(tiling.warp_rows // WARP_ROWS)]
        for block in sums:
            block.fill(0)

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
            tiles = [
                SwizzledTile(
                    self.shared,
                    T.bind(offset + stage * operand.size),
                    PACKED_ROWS * SWIZZLED_BYTES,
                    is_transposed=operand.is_transposed,
                )
                for operand, offset in ((self.left, self.left_at), (self.right, self.right_at))
            ]
            self._multiply(sums, (tiles[0], warp_row), (tiles[1], warp_column), lane)
        ptx.copy_wait(0)
        for i, block in enumerate(sums):
            first_row = row + T.Cast("int64", warp_row + i * WARP_ROWS)
            first = (T.bind(first_row), T.bind(column + T.Cast("int64", warp_column)))
            self.store.emit(block.data, (1, tiling.warp_columns), at, first, warp, lane)

    def _multiply(
        self, sums: list[RegisterTile], left: tuple[SharedTile, Expr], right: tuple[SharedTile, Expr], lane: Expr
    ) -> None:
        """Multiply a warp tile's k-step."""
        pairs = self.tiling.warp_columns // 16
        a, b = local(len(sums) * 4, "uint32"), local(pairs * 4, "uint32")
        types = (self.left.view.nominal, self.right.view.nominal)
        with unrolled(SWIZZLED_BYTES // ptx.CONTRACTION_BYTES) as k:
            with unrolled(len(sums)) as i:
                left[0].load_left([a[i * 4 + r] for r in range(4)], left[1] + i * WARP_ROWS, k, lane)
            with unrolled(pairs) as j:
                right[0].load_right([b[j * 4 + r] for r in range(4)], right[1] + j * 16, k, lane)
            for i, block in enumerate(sums):
                with unrolled(2 * pairs) as j:
                    ptx.multiply_fragments(
                        [block[j * 4 + r] for r in range(4)],
                        [a[i * 4 + r] for r in range(4)],
                        [b[j * 2 + r] for r in range(2)],
                        types,
                    )
