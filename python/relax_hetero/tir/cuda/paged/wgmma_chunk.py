"""Attention of consecutive tokens over the pages of a cache, by Hopper's tensor cores.

A page is what wgmma reads without swizzle: keys as rows of k, eight elements of 64 tokens after each other, and values
the other way round. A warpgroup has 64 rows. It issues the scores of the next page before the values of this one, and
computes the softmax of the next while tensor cores add up this one's values. Warpgroups do not wait for each other,
but for places of pages that are free.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.pages import PAGE
from ....errors import EncodingError
from ....target.gpu_target import WARPGROUP, GpuTarget
from ...core.builder import Expr, Function, ceil_div, when
from ..core import ptx
from ..core.launch import enable_pdl, local
from .head_vector import HeadVector
from .page_scores import PageScores
from .paged_chunk import TOGETHER, ChunkKernel, ChunkPlan
from .paged_work import CHUNK, PagedTensors, PagedWork, unsupported_reason

MAX_HEAD = 128
"""Sums of a row of wider heads would leave no registers for scores."""

_UNIT = 16
"""Bytes that a descriptor counts in."""
_STEP = 16
"""Elements that one instruction multiplies."""


def wgmma_chunk_plan(work: PagedWork, gpu: GpuTarget) -> ChunkPlan | None:
    """Three warpgroups where they fill the GPU, else two; None where this kernel is not for the work.

    A prefill of 2,048 tokens through eight layers (32 heads of 128) takes 12.9 ms on an H200 with three, 13.2 with two.
    """
    if gpu.tensor != "wgmma" or work.size > MAX_HEAD or work.rows < MIN_ROWS:
        return None
    if ceil_div(work.rows, 192) * work.heads >= gpu.multiprocessors:
        return ChunkPlan(12, 3)
    return ChunkPlan(8, max(2, min(4, (gpu.shared_bytes - 128 * work.size * 2 - 1024) // (2 * work.tile_bytes))))


MIN_ROWS = 128
"""Minimum number of rows of a chunk: two warpgroups have so many."""


def wgmma_chunk_kernel(work: PagedWork, gpu: GpuTarget, plan: ChunkPlan) -> tirx.PrimFunc:
    """The kernel of an attention whose rows are of one sequence; `PagedTensors` says its parameters.

    Raises EncodingError if `unsupported_reason` says why the work is not for this kernel.
    """
    reason = unsupported_reason(work, gpu)
    if reason or gpu.tensor != "wgmma":
        raise EncodingError(f"cached_attention on {gpu.arch}: {reason or 'it has no wgmma'}")
    function = Function("paged_chunk", registers="local")
    with function:
        tensors = PagedTensors(function, work)
        with function.body():
            tensors.open()
            _Kernel(tensors, plan).emit()
    return enable_pdl(function.result)


class _Scores(PageScores):
    """Scores and sums of a warpgroup."""

    def open(self, first_row: Expr) -> None:
        """Descriptors of queries, keys and values; of the last two for offset 0."""
        self.base = local(3, "uint64")
        at = self.shared.at
        rows_of_8 = 8 * _UNIT
        query = self.query + first_row * _UNIT
        for i, (address, leading, stride) in enumerate(
            (
                (query, self.height * _UNIT, rows_of_8),
                (0, PAGE * _UNIT, rows_of_8),
                (0, rows_of_8, PAGE * _UNIT),
            )
        ):
            ptx.matrix_descriptor(self.base[i], at(address), leading // _UNIT, stride // _UNIT, is_swizzled=False)

    def issue_scores(self, tile: Expr) -> None:
        """Issue the product with the keys at an offset of shared memory."""
        keys = T.bind(self.base[1] + T.Cast("uint64", tirx.floordiv(tile, _UNIT)))
        ptx.wgmma_fence()
        for step in range(self.work.size // _STEP):
            chunk = step * _STEP // CHUNK
            ptx.wgmma(
                [self.scores[r] for r in range(self.keys // 2)],
                self.base[0] + T.uint64(chunk * self.height),
                keys + T.uint64(chunk * PAGE),
                self.types,
                T.uint32(1 if step else 0),
            )
        ptx.wgmma_commit()

    def issue_values(self, tile: Expr) -> None:
        """Issue the product of the weights and the page whose keys lie at an offset."""
        values = T.bind(self.base[2] + T.Cast("uint64", tirx.floordiv(tile + self.work.tile_bytes, _UNIT)))
        ptx.wgmma_fence()
        for step in range(self.keys // _STEP):
            ptx.wgmma_of_registers(
                [self.sums[r] for r in range(self.work.size // 2)],
                [self.weights[4 * step + r] for r in range(4)],
                values + T.uint64(step * _STEP),
                self.types,
                T.uint32(1),
                True,
            )
        ptx.wgmma_commit()


class _Kernel(ChunkKernel):
    """State that the parts of the kernel share while it is written."""

    def __init__(self, tensors: PagedTensors, plan: ChunkPlan) -> None:
        super().__init__(tensors, plan)
        self.free = self.shared.take(8 * plan.stages, 8)

    def _begin(self) -> None:
        for stage in range(self.plan.stages):
            ptx.barrier_init(self.shared.at(self.free + 8 * stage), self.plan.warps)
        self.ring.init()

    def _block(self) -> None:
        stages = self.plan.stages
        self.vectors = [HeadVector(self.tensors, self.lane) for _ in range(TOGETHER)]
        group = T.bind(tirx.floordiv(self.thread, WARPGROUP))
        scores = _Scores(self.work, PAGE, self.shared, self.lane, self.query_at, T.bind(group * 64), self.rows)
        # One page at least, of which no key counts.
        turns = T.bind(T.max(self.turns, 1))
        with when(self.thread == 0), T.serial(T.min(turns, stages)) as turn:
            self._ask(turn)
        self._queries()
        ptx.async_proxy_fence()
        scores.begin()
        scores.open(scores.first_row)
        ptx.block_barrier()
        tile, there = self._page(0)
        scores.issue_scores(tile)
        ptx.wgmma_wait(0)
        self._softmax(scores, 0, there)
        scores.go_on()
        with T.serial(turns - 1) as turn:
            following = T.bind(turn + 1)
            with when(tirx.all(self.thread == 0, turn > 0, turn + (stages - 1) < turns)):
                self._ask_again(T.bind(turn + (stages - 1)))
            tile, there = self._page(following)
            scores.issue_scores(tile)
            scores.issue_values(self._tile(turn))
            ptx.wgmma_wait(1)
            self._softmax(scores, following, there)
            ptx.wgmma_wait(0)
            with when(self.lane == 0):
                ptx.barrier_arrive(self.shared.at(self.free + T.truncmod(turn, stages) * 8))
            scores.go_on()
        scores.issue_values(self._tile(turns - 1))
        ptx.wgmma_wait(0)
        scores.add_lanes()
        self._store(scores)

    def _ask_again(self, turn: Expr) -> None:
        """Ask for a page whose place had another one, as soon as all warps are done with that."""
        stages = self.plan.stages
        parity = T.bitwise_and(T.truncdiv(turn, stages) - 1, 1)
        ptx.barrier_wait(self.shared.at(self.free + T.truncmod(turn, stages) * 8), parity)
        self._ask(turn)

    def _tile(self, turn: Expr) -> Expr:
        return T.bind(self.ring.at + T.truncmod(turn, self.plan.stages) * self.ring.stage_bytes)

    def _page(self, turn: Expr) -> tuple[Expr, Expr]:
        """Wait for a page; where it lies, and all bits, or 0 where it is not there."""
        tile = self.ring.wait(turn if not isinstance(turn, int) else tirx.const(turn, "int32"))
        return tile, self._complete(tile, T.bind(self.first_page + turn))

    def _clear(self, tile: Expr, known: Expr) -> None:
        super()._clear(tile, known)
        ptx.async_proxy_fence()

    def _softmax(self, scores: _Scores, turn: Expr, there: Expr) -> None:
        limits = [T.bitwise_and(seen, there) for seen in self.seen]
        first = T.bind((self.first_page + turn) * PAGE)
        scores.softmax(first, limits, T.bitwise_and(self.least, there), self.lows)
