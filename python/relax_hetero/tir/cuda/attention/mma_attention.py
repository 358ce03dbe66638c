"""Attention by ``mma.sync``, for all GPUs since compute capability 8.0, and over pages on GPUs with bulk copies.

Types are 16-bit floats, and float32 if products may be rounded to tf32. A warp has 16 rows of queries. Tiles of keys
and values are copied while others are used; several resident blocks per multiprocessor hide each other's latencies.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.problem import AttentionProblem, CachedAttentionProblem
from ....target.element_types import bytes_of
from ....target.gpu_target import WARP, GpuTarget
from ...core.builder import Expr
from ..core import ptx
from ..core.launch import SharedMemory, local, unrolled
from ..tile.shared_tile import SharedTile, add_by_columns, multiply_by_rows
from .attention_plan import WARP_ROWS, AttentionPlan, chunk_plan, mma_plan
from .attention_tensors import (
    AttentionTensors,
    DenseTensors,
    PagedTensors,
    kernel_of,
    require_supported,
    unsupported_reason,
)
from .key_values import CopiedKeyValues, KeyValueSource, PagedKeyValues
from .queries import DenseQueries, PagedQueries, QueryTile
from .row_store import RowStore
from .score_tile import ScoreTile

_TF32_ROUNDING = 1 << 12
"""Half of the last place of tf32: added to a float32's bits, it rounds, where tensor cores truncate."""


def mma_attention_kernel(
    problem: AttentionProblem | CachedAttentionProblem, gpu: GpuTarget, plan: AttentionPlan | None = None
) -> tirx.PrimFunc:
    """Kernel of an attention by mma.sync, one launch; the problem documents its parameters.

    Of a cached attention, keys and values of the chunk must be in their pages already.

    Raises
    ------
    EncodingError
        If the kernel does not support the problem (`unsupported_reason`).
    """
    require_supported(problem, gpu, unsupported_reason(problem, gpu, with_tf32=True))
    if isinstance(problem, CachedAttentionProblem):
        plan, name = plan or chunk_plan(problem, gpu), "paged_chunk"
    else:
        plan, name = plan or mma_plan(problem), "attention"
    return kernel_of(name, problem, plan, gpu, lambda tensors: _Prefill(tensors).emit())


def attend(
    tensors: AttentionTensors,
    queries: QueryTile,
    source: KeyValueSource,
    row: Expr,
    keys: int,
    key: Expr = 0,
    has_sinks: Expr = True,
) -> ScoreTile:
    """Write a warp's loop over tiles, after the loads of the first keys have been issued; the tile has its results.

    Parameters
    ----------
    row, key : PrimExpr
        First row, and first key of each tile, of the warp.
    keys : int
        Keys of a tile that the warp multiplies.
    has_sinks : PrimExpr
        Whether the warp counts sinks; see `ScoreTile.begin`.
    """
    tile = ScoreTile(tensors, keys, source.thread)
    first_row = T.bind(tensors.row + row)
    lane_row = T.bind(first_row + tirx.floordiv(tile.lane, 4))
    source.begin_rows(lane_row, first_row)
    queries.load(source.thread)
    tile.begin(lane_row, has_sinks)
    types, width = (tensors.dtype, tensors.dtype), int(tensors.sizes["d"]) * bytes_of(tensors.dtype)
    with T.serial(source.count) as index:
        first = T.bind(source.first_key(index) + key)
        tile.load_masks(first)
        source.wait(keys=index)
        multiply_by_rows(tile.scores, (queries.tile(), row), (source.key_tile(index), key), width, types, tile.lane)
        source.wait(values=index)
        tile.update(first, source.visible())
        tile.pack()
        tile.rescale()
        values = source.value_tile(index)
        if bytes_of(tensors.dtype) == 2:
            add_by_columns(tile.sums, tile.weights, (values, key), keys, types, tile.lane)
        else:
            _add_float32_values(tile, values, types)
        source.release(values=index)
    tile.softmax.finish()
    return tile


def _add_float32_values(tile: ScoreTile, values: SharedTile, types: tuple[str, str]) -> None:
    """Accumulate float32 values, weighted with probabilities that are rounded to tf32 in place.

    A left fragment has keys t and t + 4 of eight in lane t of a row, an accumulator fragment keys 2 t and 2 t + 1: the
    keys are permuted accordingly in both operands.
    """
    left, right = local(4, "uint32"), local(2, "uint32")
    column, own_key = T.bind(tirx.floordiv(tile.lane, 4)), T.bind(tirx.floormod(tile.lane, 4) * 2)
    within = T.bind(tirx.floormod(column, 4) * 4)
    with unrolled(tile.keys // 8) as step:
        for i, score in enumerate((0, 2, 1, 3)):
            bits = T.reinterpret("uint32", tile.scores[step * 4 + score])
            T.buffer_store(left, bits + T.uint32(_TF32_ROUNDING), [i])
        with unrolled(tile.sums.columns // 8) as block:
            chunk = block * 2 + tirx.floordiv(column, 4)
            for i in range(2):
                address = values.address(own_key + (step * 8 + i), chunk) + within
                ptx.load_shared([right[i]], values.shared.at(address))
            sums = [tile.sums[block * 4 + i] for i in range(4)]
            ptx.multiply_fragments(sums, [left[i] for i in range(4)], [right[i] for i in range(2)], types)


class _Prefill:
    """Writer of the kernel: a warp for every 16 rows."""

    def __init__(self, tensors: DenseTensors | PagedTensors) -> None:
        self.tensors, self.shared = tensors, SharedMemory()
        self.threads = tensors.plan.rows // WARP_ROWS * WARP
        self.queries: QueryTile
        self.source: CopiedKeyValues | PagedKeyValues
        if isinstance(tensors, PagedTensors):
            self.queries = PagedQueries(tensors, self.shared)
            self.source = PagedKeyValues(tensors, self.shared, self.threads)
        else:
            self.queries = DenseQueries(tensors, self.shared, self.threads, may_transpose=False)
            self.source = CopiedKeyValues(tensors, self.shared, self.threads)

    def emit(self) -> None:
        """Write the launch."""
        tensors, source = self.tensors, self.source
        min_blocks = int(isinstance(source, PagedKeyValues))
        with tensors.launch(self.threads, self.shared, source.initialize, min_blocks_per_sm=min_blocks) as place:
            source.locate(place.thread)
            source.start()
            row = T.bind(tirx.floordiv(place.thread, WARP) * WARP_ROWS)
            tile = attend(tensors, self.queries, source, row, source.keys)
            ptx.block_barrier()  # all warps have read their queries
            RowStore(tensors, self.shared).store_tile(tile, tensors.row + row, self.queries.staging(row))
