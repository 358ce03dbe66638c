"""Attention by ``mma.sync``, for all GPUs since compute capability 8.0.

Types are 16-bit floats, and float32 if products may be rounded to tf32. A block has four warps with 16 rows of queries
each. They copy a tile of values while they compute scores, and the next tile of keys while they accumulate values;
several resident blocks per multiprocessor hide each other's latencies.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.packed_layout import CHUNK_BYTES, SWIZZLED_BYTES
from ....encoding.problem import AttentionProblem
from ....errors import EncodingError
from ....target.element_types import bytes_of
from ....target.gpu_target import WARP, GpuTarget
from ...core.builder import Expr, Function, ceil_div, when
from ..core import ptx
from ..core.launch import SWIZZLED_ALIGN, SharedMemory, enable_pdl, local, unrolled
from ..tile.operand_tiles import OperandTile
from ..tile.register_tile import RegisterTile
from ..tile.shared_tile import SwizzledTile, add_by_columns, multiply_by_rows
from .attention_plan import MAX_GROUPED_ROWS, AttentionPlan
from .attention_tensors import AttentionTensors, tensor_core_unsupported_reason, tiles_of
from .row_store import RowStore
from .score_tile import ScoreTile

_WARPS = 4
_ROWS = 16 * _WARPS
_THREADS = WARP * _WARPS
KEYS = 64
KEYS_WIDE = 32
"""Keys of a tile with wide heads."""
_TF32_ROUNDING = 1 << 12
"""Half of the last place of tf32: added to a float32's bits, it rounds, where tensor cores truncate."""


def unsupported_reason(problem: AttentionProblem, gpu: GpuTarget) -> str:
    """Reason why `mma_attention_kernel` does not support a problem; empty if it does."""
    return tensor_core_unsupported_reason(problem, gpu, with_tf32=True)


def mma_attention_kernel(problem: AttentionProblem, gpu: GpuTarget) -> tirx.PrimFunc:
    """Kernel of an attention by mma.sync, one launch; `AttentionProblem` documents its parameters.

    Raises
    ------
    EncodingError
        If the kernel does not support the problem (`unsupported_reason`).
    """
    reason = unsupported_reason(problem, gpu)
    if reason:
        raise EncodingError(f"attention on {gpu.arch}: {reason}")
    sizes = dict(problem.sizes)
    h, g, m = int(sizes["h"]), int(sizes["g"]), sizes["m"]
    heads_per_tile = h // g if isinstance(m, int) and m * (h // g) <= MAX_GROUPED_ROWS else 1
    max_size = max(int(sizes["d"]), int(sizes["e"]))
    keys = KEYS if max_size * bytes_of(problem.query.dtype) <= 256 else KEYS_WIDE
    uses_pdl = gpu.overlaps_launches
    function = Function("attention", registers="local")
    with function:
        tensors = AttentionTensors.of(function, problem, AttentionPlan(1, keys, 1, 1, heads_per_tile))
        with function.body():
            tensors.open(raw=True)
            _Kernel(tensors, keys, uses_pdl).emit()
    return enable_pdl(function.result) if uses_pdl else function.result


class _Kernel:
    """Writer of the kernel."""

    def __init__(self, tensors: AttentionTensors, keys: int, uses_pdl: bool) -> None:
        self.uses_pdl = uses_pdl
        self.tensors, self.problem, self.keys = tensors, tensors.problem, keys
        sizes, rows = tensors.sizes, tensors.rows
        self.dtype = tensors.query.nominal
        n, d, e = sizes["n"], sizes["d"], sizes["e"]
        self.q = OperandTile.of(tensors.query, "row", _ROWS, rows.count, d, _THREADS, may_transpose=False)
        self.k = OperandTile.of(tensors.key, "n", keys, n, d, _THREADS, may_transpose=False)
        self.v = OperandTile.of(tensors.value, "n", keys, n, e, _THREADS, may_transpose=False)
        self.element = bytes_of(self.dtype)
        self.depth_steps, self.width_steps = ceil_div(d, self.q.step), ceil_div(e, self.q.step)
        self.width = ceil_div(int(e), 16) * 16
        is_masked = bool(self.problem.causal) or not (isinstance(n, int) and n % keys == 0)
        self.tile = ScoreTile(tensors, keys, is_masked)
        shared = self.shared = SharedMemory()
        self.q_at = shared.reserve(self.q.size * max(self.depth_steps, self.width_steps), SWIZZLED_ALIGN)
        self.k_at = shared.reserve(self.k.size * self.depth_steps, SWIZZLED_ALIGN)
        self.v_at = shared.reserve(self.v.size * self.width_steps, SWIZZLED_ALIGN)

    def emit(self) -> None:
        """Write the launch."""
        self.tensors.launch(_ROWS, _THREADS, self.shared, self.uses_pdl, self._block)

    def _block(self, thread: Expr, block: Expr) -> None:
        tensors, tile, self.thread = self.tensors, self.tile, thread
        self.row, at, self.at_keys = tensors.locate(block, _ROWS)
        visible = tensors.visible(self.row, _ROWS)
        self.end = visible if isinstance(visible, int) else T.bind(visible)
        self.warp = T.bind(tirx.floordiv(self.thread, WARP))
        tile.declare(self.thread)
        self.sums = RegisterTile(self.width)
        first_row = T.bind(self.row + self.warp * 16)
        tile.begin(at, T.bind(first_row + tirx.floordiv(tile.lane, 4)), first_row, self.end)
        self.sums.fill(0)
        origin = T.bind(T.Cast("int64", self.row))
        for step in range(self.depth_steps):
            self.q.load(self.shared, self.q_at + step * self.q.size, at, origin, step, self.thread)
        self._load(self.k, self.k_at, self.depth_steps, 0)
        ptx.copy_commit()
        count = tiles_of(self.end, self.keys)
        with T.serial(count) as index:
            first = T.bind(index * self.keys)
            tile.load_masks(first)
            # Keys are complete, and all warps have read the previous values.
            ptx.copy_wait(0)
            ptx.block_barrier()
            self._load(self.v, self.v_at, self.width_steps, first)
            ptx.copy_commit()
            multiply_by_rows(
                tile.scores,
                (SwizzledTile(self.shared, self.q_at, self.q.size), self.warp * 16),
                (SwizzledTile(self.shared, self.k_at, self.k.size), 0),
                int(tensors.sizes["d"]) * self.element,
                (self.dtype, self.dtype),
                tile.lane,
            )
            ptx.copy_wait(0)
            ptx.block_barrier()
            with when(index + 1 < count):
                self._load(self.k, self.k_at, self.depth_steps, first + self.keys)
            ptx.copy_commit()
            tile.update(first)
            if self.element == 2:
                tile.pack(self.dtype)
            self.sums.scale_rows(tile.softmax.rescale)
            if self.element == 2:
                values = SwizzledTile(self.shared, self.v_at, self.v.size, is_transposed=True)
                add_by_columns(self.sums, tile.weights, (values, 0), self.keys, (self.dtype, self.dtype), tile.lane)
            else:
                self._add_float32_values()
        ptx.copy_wait(0)
        tile.softmax.finish()
        staging = self.q_at + self.warp * (16 * SWIZZLED_BYTES)
        ptx.block_barrier()
        RowStore(tile, self.shared, at).emit(self.sums, first_row, staging, self.q.size)

    def _load(self, tile: OperandTile, offset: int, steps: int, first: Expr) -> None:
        """Issue the copies of a tile of keys or values."""
        begin = T.Cast("int64", first) if not isinstance(first, int) else tirx.IntImm("int64", first)
        for step in range(steps):
            tile.load(self.shared, offset + step * tile.size, self.at_keys, begin, step, self.thread)

    def _add_float32_values(self) -> None:
        """Accumulate float32 values, weighted with probabilities that are rounded to tf32 in place.

        A left fragment has keys t and t + 4 of eight in lane t of a row, an accumulator fragment keys 2 t and 2 t + 1:
        the keys are permuted accordingly in both operands.
        """
        lane, scores = self.tile.lane, self.tile.scores
        left, right = local(4, "uint32"), local(2, "uint32")
        column, own_key = T.bind(tirx.floordiv(lane, 4)), T.bind(tirx.floormod(lane, 4) * 2)
        within = T.bind(tirx.floormod(column, 4) * 4)
        with unrolled(self.keys // 8) as step:
            for i, score in enumerate((0, 2, 1, 3)):
                bits = T.reinterpret("uint32", scores[step * 4 + score])
                T.buffer_store(left, bits + T.uint32(_TF32_ROUNDING), [i])
            with unrolled(self.width // 8) as block:
                chunk = block * 2 + tirx.floordiv(column, 4)
                for i in range(2):
                    line = own_key + (step * 8 + i)
                    swizzled = T.bitwise_xor(tirx.floormod(chunk, 8), own_key + i) * CHUNK_BYTES + within
                    address = self.v_at + tirx.floordiv(chunk, 8) * self.v.size + line * SWIZZLED_BYTES + swizzled
                    ptx.load_shared([right[i]], self.shared.at(address))
                ptx.multiply_fragments(
                    [self.sums[block * 4 + i] for i in range(4)],
                    [left[i] for i in range(4)],
                    [right[i] for i in range(2)],
                    (self.dtype, self.dtype),
                )
