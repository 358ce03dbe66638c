"""Dequantization of weights of 4 or 8 bits to 16-bit floats, in the packed tiles of Hopper's tensor cores.

With many rows this is faster than dequantization within the product, which is repeated for every row tile. A value is
rounded once, from float32. A warp unpacks a fragment block; a lane stores 16 bytes along k (8 if blocks are short).
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.block_weights import FRAGMENT_COLUMNS
from ....encoding.packed_layout import CHUNK_BYTES, SWIZZLED_BYTES
from ....encoding.problem import BlockUnpackProblem, QuantizedMatmulProblem
from ....errors import EncodingError
from ....target.gpu_target import WARP, GpuTarget
from ...core.builder import Expr, Function, ceil_div, int64, when
from ..core import ptx
from ..core.launch import enable_pdl, launch, local
from ..core.operand import GpuOperand
from ..tile.operand_tiles import PACKED_ROWS
from .block_fragments import WeightFragments
from .block_plan import STEP, BlockPlan, BlockWork

TILE_DEPTH = SWIZZLED_BYTES // 2
"""Extent of k of a tile of 16-bit floats."""
_WARPS = 8
_PLAN = BlockPlan(1, 1, _WARPS, 1)


def block_unpack_kernel(problem: BlockUnpackProblem, gpu: GpuTarget) -> tirx.PrimFunc:
    """Kernel that dequantizes a weight, one launch; `BlockUnpackProblem` documents its parameters.

    It supports programmatic dependent launch.

    Raises
    ------
    EncodingError
        If the result is not in swizzled tiles of 16-bit floats, or the depth does not fill them.
    """
    product, result = problem.product, problem.result
    layout = result.layout
    is_tiled = layout.swizzle and layout.inner_tiles == (PACKED_ROWS, TILE_DEPTH)
    if not is_tiled or result.dtype != product.lhs.dtype or product.depth % TILE_DEPTH or product.block % STEP:
        raise EncodingError(
            f"block_unpack on {gpu.arch}: found {product.depth} weights of a row in blocks of {product.block} for "
            f"{result.dtype} {layout}, expected multiples of {TILE_DEPTH} and {STEP} and swizzled tiles"
        )
    function = Function("block_unpack", registers="local")
    with function:
        packed = [
            GpuOperand(function, name, operand)
            for name, operand in zip(("weight", "scales", "zeros"), product.weights, strict=False)
        ]
        tiles = GpuOperand(function, "result", result)
        with function.body():
            for view in packed:
                view.open()
            tiles.open(raw=True)
            _Kernel(product, packed, tiles).emit(gpu)
    return enable_pdl(function.result) if gpu.overlaps_launches else function.result


class _Kernel:
    """Writer of the kernel."""

    def __init__(self, product: QuantizedMatmulProblem, packed: list[GpuOperand], tiles: GpuOperand) -> None:
        self.work = BlockWork(product, _PLAN, 1)
        self.weight_operands, self.tiles = packed, tiles
        self.column_tiles, self.depth_tiles = ceil_div(product.columns, PACKED_ROWS), product.depth // TILE_DEPTH

    def emit(self, gpu: GpuTarget) -> None:
        """Write the launch."""
        work = self.work
        items = work.tiles * work.chunks
        with launch(ceil_div(items, _WARPS), _WARPS * WARP) as place:
            lane = T.bind(tirx.floormod(place.thread, WARP))
            self.high, self.low = T.bind(tirx.floordiv(lane, 4)), T.bind(tirx.floormod(lane, 4))
            self.weights = WeightFragments(work, self.weight_operands, lane, self.high)
            self.packed_pairs = local(work.steps * 2, "uint32")
            self.values = local(2, "float32")
            if gpu.overlaps_launches:
                ptx.griddepcontrol_wait()
                ptx.launch_dependents()
            item = T.bind(T.Cast("int64", place.block) * _WARPS + tirx.floordiv(place.thread, WARP))
            with when(True if items % _WARPS == 0 else item < int64(items)):
                tile, chunk = T.bind(tirx.floordiv(item, work.chunks)), T.bind(tirx.floormod(item, work.chunks))
                self.weights.load(0, tile, chunk)
                for number in range(work.scaled):
                    self._unpack(tile, chunk, number)

    def _unpack(self, tile: Expr, chunk: Expr, number: int) -> None:
        """Unpack the steps of a chunk that share a scale, for both columns of a lane."""
        work, weights = self.work, self.weights
        weights.begin(0, 0, number)
        for half in range(2):
            scale = weights.scale(0, 0, number, half)
            addend = weights.addend(0, 0, number, half, scale)
            for step in range(work.steps):
                fragment = weights.unpack(0, 0, number * work.steps + step)
                for pair in range(2):
                    self._scale(step * 2 + pair, fragment[pair * 2 + half], scale, addend)
            column = T.bind(tile * FRAGMENT_COLUMNS + T.Cast("int64", self.high + 8 * half))
            run = 4 * work.steps
            k = T.bind(chunk * work.chunk + T.Cast("int64", (number * 4 + self.low) * run))
            self._store(column, k, run)

    def _scale(self, index: int, pair: Expr, scale: Expr, addend: Expr | None) -> None:
        """Scale two 16-bit weights of `unpack`."""
        for i in range(2):
            value = self.weights.number(pair, i)
            T.buffer_store(self.values, value * scale if addend is None else value * scale + addend, [i])
        ptx.pack_pair(self.packed_pairs[index], self.values[0], self.values[1], self.work.type)

    def _store(self, column: Expr, k: Expr, run: int) -> None:
        """Store a lane's neighbours along k of a column, 8 or 16 bytes."""
        number = tirx.floordiv(column, PACKED_ROWS) * self.depth_tiles + tirx.floordiv(k, TILE_DEPTH)
        row, in_row = tirx.floormod(column, PACKED_ROWS), tirx.floormod(k, TILE_DEPTH)
        chunk = CHUNK_BYTES // 2
        words, width = run // 2, min(4, run // 2)
        with when(column < int64(self.column_tiles * PACKED_ROWS)):
            for first in range(0, words, width):
                inner = in_row + first * 2
                swizzled = T.bitwise_xor(tirx.floordiv(inner, chunk), tirx.floormod(row, 8)) * chunk
                offset = (number * PACKED_ROWS + row) * TILE_DEPTH + swizzled + tirx.floormod(inner, chunk)
                values = [self.packed_pairs[first + i] for i in range(width)]
                ptx.store_global(T.address_of(self.tiles.data[T.bind(offset)]), values)
