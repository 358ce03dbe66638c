"""Attention on Hopper's tensor cores, as in FlashAttention-3: both products by wgmma, softmax in registers.

A block has one to three consumer warpgroups with 64 rows of queries each. A consumer issues the scores of the next tile
before the product with this one's values, and computes the softmax of the next during that product, or after it (other
warpgroups overlap, too).

Dense tiles are copied to a multistage pipeline in shared memory by a producer warpgroup, pages by a thread of the
consumers. With few dense queries, the blocks of a cluster split the keys. Their results are combined through
distributed shared memory in the order of blocks, so results are deterministic.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.problem import AttentionProblem, CachedAttentionProblem
from ....target.gpu_target import WARP, WARPGROUP, GpuTarget
from ...core.builder import Expr, ceil_div
from ..core import ptx
from ..core.launch import SharedMemory
from ..tile.operand_tiles import PRODUCERS
from ..tile.register_tile import RegisterTile
from ..tile.shared_tile import MatrixOperand
from . import attention_tensors
from .attention_plan import AttentionPlan, wgmma_chunk_plan, wgmma_plan
from .attention_tensors import DenseTensors, PagedTensors, kernel_of, require_supported
from .key_values import PagedKeyValues, ProducedKeyValues
from .queries import PagedQueries, QueryTile
from .row_store import PartialResults, RowStore
from .score_tile import ScoreTile

Operand = Callable[[int], Expr | list[Expr]]
"""Function from the number of a wgmma to its operand: a matrix descriptor, or registers."""
WGMMA_DEPTH = 16
"""Extent of k of a wgmma."""
REGISTERS = {1: (0, 0), 2: (40, 232), 3: (32, 160)}
"""Registers per thread of producers and consumers, by consumer warpgroups. Their total must not exceed that of the
launch (168 per thread with three warpgroups, 128 with four), or consumers would wait forever."""


def unsupported_reason(problem: AttentionProblem | CachedAttentionProblem, gpu: GpuTarget) -> str:
    """Reason why `wgmma_attention_kernel` does not support a problem; empty if it does."""
    if gpu.tensor != "wgmma":
        return f"{gpu.arch} lacks wgmma"
    return attention_tensors.unsupported_reason(problem, gpu)


def wgmma_attention_kernel(
    problem: AttentionProblem | CachedAttentionProblem, gpu: GpuTarget, plan: AttentionPlan | None = None
) -> tirx.PrimFunc:
    """Kernel of an attention for sm_90a, one launch; the problem documents its parameters.

    Of a cached attention, keys and values of the chunk must be in their pages already.

    Parameters
    ----------
    plan : AttentionPlan, optional
        Tiling, by default that of `wgmma_plan` or `wgmma_chunk_plan`.

    Raises
    ------
    EncodingError
        If the kernel does not support the problem (`unsupported_reason`).
    """
    require_supported(problem, gpu, unsupported_reason(problem, gpu))
    if isinstance(problem, CachedAttentionProblem):
        name, chosen = "paged_chunk", plan or wgmma_chunk_plan(problem, gpu)
    else:
        name, chosen = "attention", plan or wgmma_plan(problem, gpu)
    return kernel_of(name, problem, chosen, gpu, lambda tensors: _Kernel(tensors).emit())


class _Kernel:
    """Writer of the kernel."""

    def __init__(self, tensors: DenseTensors | PagedTensors) -> None:
        self.tensors, self.plan = tensors, tensors.plan
        shared = self.shared = SharedMemory()
        consumers = self.plan.warpgroups * WARPGROUP
        self.partial: PartialResults | None = None
        self.queries: QueryTile
        self.source: ProducedKeyValues | PagedKeyValues
        if isinstance(tensors, PagedTensors):
            self.producers, self.queries = 0, PagedQueries(tensors, shared, for_wgmma=True)
            self.source = PagedKeyValues(tensors, shared, consumers, warps=consumers // WARP, for_wgmma=True)
        else:
            if self.plan.split_keys > 1:
                self.partial = PartialResults(shared, 0, self.plan.rows, ceil_div(int(tensors.sizes["e"]), 16) * 16)
            scratch_bytes = self.partial.size if self.partial else 0
            self.producers, self.source = PRODUCERS, ProducedKeyValues(tensors, shared, scratch_bytes)
            self.queries = self.source.queries
        self.threads = self.producers + consumers

    def emit(self) -> None:
        """Write the launch."""
        source, warpgroups = self.source, self.plan.warpgroups
        # The compiler ignores setmaxnreg without a launch bound.
        is_bounded = not self.producers or warpgroups > 1
        with self.tensors.launch(
            self.threads, self.shared, source.initialize, min_blocks_per_sm=int(is_bounded)
        ) as place:
            source.locate(place.thread)
            if not isinstance(source, ProducedKeyValues):
                self._consume(place.thread)
                return
            with T.If(place.thread < PRODUCERS):
                with T.Then():
                    if warpgroups > 1:
                        ptx.set_max_registers(REGISTERS[warpgroups][0], grows=False)
                    source.produce()
                with T.Else():
                    if warpgroups > 1:
                        ptx.set_max_registers(REGISTERS[warpgroups][1], grows=True)
                    self._consume(place.thread)
            if self.partial:
                ptx.cluster_barrier()
                self.partial.store(self.tensors, place.thread, self.threads, self.tile.softmax.factor)
                ptx.cluster_barrier()

    def _consume(self, thread: Expr) -> None:
        """Write the work of the consumers."""
        source, tensors = self.source, self.tensors
        group = T.bind(tirx.floordiv(thread, WARPGROUP) - self.producers // WARPGROUP)
        warp_row = T.bind(group * 64 + tirx.floordiv(tirx.floormod(thread, WARPGROUP), WARP) * 16)
        tile = self.tile = ScoreTile(tensors, source.keys, thread)
        first_row = T.bind(tensors.row + warp_row)
        lane_row = T.bind(first_row + tirx.floordiv(tile.lane, 4))
        source.begin_rows(lane_row, first_row)
        tile.begin(lane_row)
        tile.load_masks(source.first_key(0))
        if isinstance(source, ProducedKeyValues):
            source.query_ring.wait(0)
        else:
            source.start()
            self.queries.load(thread)
        self._main_loop(tile, self.queries.matrix(group * 64))
        tile.softmax.finish()
        if self.partial:
            # Results are stored over the tiles.
            ptx.named_barrier(1, self.plan.warpgroups * WARPGROUP)
            for h in range(2):
                self.partial.put(tile, h, T.bind(warp_row + tirx.floordiv(tile.lane, 4) + 8 * h))
            return
        # All warps that read queries in the memory of the results have done so.
        if self.producers:
            ptx.warpgroup_barrier(1 + group)
        else:
            ptx.block_barrier()
        RowStore(tensors, self.shared).store_tile(tile, first_row, self.queries.staging(warp_row))

    def _main_loop(self, tile: ScoreTile, queries: MatrixOperand) -> None:
        """Write the loop over tiles: scores, softmax and accumulation of values."""
        source, count, left = self.source, self.source.count, queries.at(queries.begin)
        keys, values = source.matrices()
        steps, transposed = (
            ceil_div(int(self.tensors.sizes["d"]), WGMMA_DEPTH),
            (queries.is_transposed, keys.is_transposed),
        )

        def issue_scores(index: Expr) -> None:
            right = keys.at(source.key_tile(index).offset)
            issue_products(tile.scores, left, right, steps, self.tensors.dtype, False, transposed)

        def issue_values(index: Expr) -> None:
            right = values.at(source.value_tile(index).offset)
            steps = tile.keys // WGMMA_DEPTH
            issue_products(tile.sums, tile.weight_fragment, right, steps, self.tensors.dtype, True, (False, True))

        index: Expr = tirx.const(0, "int32")
        source.wait(keys=index)
        issue_scores(index)
        ptx.wgmma_wait(0)
        source.release(keys=index)
        tile.update(source.first_key(index), source.visible())
        tile.pack()
        if not (isinstance(count, int) and count == 1):
            with T.serial(count - 1) as index:
                next_index = T.bind(index + 1)
                first = T.bind(source.first_key(next_index))
                if isinstance(source, PagedKeyValues):
                    source.advance(index)
                if self.plan.warpgroups > 1:
                    # One wait for both, so that products are issued back to back.
                    source.wait(keys=next_index, values=index)
                    issue_scores(next_index)
                else:
                    source.wait(keys=next_index)
                    issue_scores(next_index)
                    source.wait(values=index)
                issue_values(index)
                tile.load_masks(first)
                ptx.wgmma_wait(1)
                source.release(keys=next_index)
                if self.plan.overlaps_own_product:
                    tile.update(first, source.visible())
                    ptx.force_evaluation(tile.softmax.row_sum[0] + tile.softmax.row_sum[1])
                ptx.wgmma_wait(0)
                source.release(values=index)
                if not self.plan.overlaps_own_product:
                    tile.update(first, source.visible())
                tile.pack()
                tile.rescale()
        last = count - 1 if isinstance(count, int) else T.bind(count - 1)
        source.wait(values=last)
        issue_values(last)
        ptx.wgmma_wait(0)


def issue_products(
    sums: RegisterTile,
    left: Operand,
    right: Operand,
    steps: int,
    dtype: str,
    adds: bool,
    transposed: tuple[bool, bool],
) -> None:
    """Issue a product of `steps` wgmmas, added to `sums` if `adds`."""
    ptx.wgmma_fence()
    for step in range(steps):
        is_added = T.uint32(1 if step or adds else 0)
        ptx.wgmma(sums.registers, left(step), right(step), (dtype, dtype), is_added, transposed)
    ptx.wgmma_commit()
