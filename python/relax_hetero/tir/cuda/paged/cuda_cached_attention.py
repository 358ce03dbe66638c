"""Selection of the paged attention kernel; prefill by wgmma, and the kernel that appends to pages."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.pages import PAGE
from ....encoding.problem import APPEND, CachedAttentionProblem, Dim
from ....errors import EncodingError
from ....target.gpu_target import WARP, WARPGROUP, GpuTarget
from ...core.builder import Expr, Function, ceil_div, when
from ..core import ptx
from ..core.launch import enable_pdl, launch, local
from .head_vector import HeadVector
from .page_scores import PageScores
from .paged_chunk import QUERIES_IN_FLIGHT, ChunkKernel, ChunkPlan, paged_chunk_kernel
from .paged_decode import paged_decode_kernel
from .paged_work import CHUNK, PagedTensors, PagedWork, in_tile, unsupported_reason

# Paged prefill attention by wgmma.
#
# The layout of pages is that of wgmma without swizzle, with values as transposed operands. A warpgroup has 64 rows. It
# issues the scores of the next page before the product with this one's values, and computes the next softmax during
# that product. Warpgroups synchronize only through empty barriers of stages.

MAX_HEAD_SIZE = 128
"""Maximum head size: accumulators of wider heads leave no registers for scores."""

_UNIT = 16
"""Bytes per unit of matrix descriptors."""
_STEP = 16
"""Extent of k of one wgmma."""


def wgmma_chunk_plan(work: PagedWork, gpu: GpuTarget) -> ChunkPlan | None:
    """Plan with three warpgroups if they occupy the GPU, else two; None if this kernel does not apply.

    A prefill of 2,048 tokens through eight layers (32 heads of 128) takes 12.9 ms on an H200 with three, 13.2 with two.
    """
    if gpu.tensor != "wgmma" or work.size > MAX_HEAD_SIZE or work.rows < MIN_ROWS:
        return None
    if ceil_div(work.rows, 192) * work.heads >= gpu.multiprocessors:
        return ChunkPlan(12, 3)
    return ChunkPlan(8, max(2, min(4, (gpu.shared_bytes - 128 * work.size * 2 - 1024) // (2 * work.tile_bytes))))


MIN_ROWS = 128
"""Minimum rows of a chunk, those of two warpgroups."""


def wgmma_chunk_kernel(work: PagedWork, gpu: GpuTarget, plan: ChunkPlan) -> tirx.PrimFunc:
    """Kernel of a paged prefill attention by wgmma; `PagedTensors` documents its parameters.

    Raises
    ------
    EncodingError
        If the kernel does not support the work (`unsupported_reason`).
    """
    reason = unsupported_reason(work, gpu)
    if reason or gpu.tensor != "wgmma":
        raise EncodingError(f"cached_attention on {gpu.arch}: {reason or 'it lacks wgmma'}")
    function = Function("paged_chunk", registers="local")
    with function:
        tensors = PagedTensors(function, work)
        with function.body():
            tensors.open()
            _Kernel(tensors, plan).emit()
    return enable_pdl(function.result)


class _Scores(PageScores):
    """Writer of a warpgroup's scores and accumulators."""

    def open(self, first_row: Expr) -> None:
        """Encode matrix descriptors of queries, keys and values; the last two for offset 0."""
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
        """Issue the product of queries and the keys at an offset of shared memory."""
        keys = T.bind(self.base[1] + T.Cast("uint64", tirx.floordiv(tile, _UNIT)))
        ptx.wgmma_fence()
        for step in range(self.work.size // _STEP):
            chunk = step * _STEP // CHUNK
            ptx.wgmma(
                self.scores.registers,
                self.base[0] + T.uint64(chunk * self.height),
                keys + T.uint64(chunk * PAGE),
                self.types,
                T.uint32(1 if step else 0),
            )
        ptx.wgmma_commit()

    def issue_values(self, tile: Expr) -> None:
        """Issue the product of probabilities and the values of the page at an offset."""
        values = T.bind(self.base[2] + T.Cast("uint64", tirx.floordiv(tile + self.work.tile_bytes, _UNIT)))
        ptx.wgmma_fence()
        for step in range(self.keys // _STEP):
            ptx.wgmma(
                self.sums.registers,
                [self.weights[4 * step + r] for r in range(4)],
                values + T.uint64(step * _STEP),
                self.types,
                T.uint32(1),
                transposed=(False, True),
            )
        ptx.wgmma_commit()


class _Kernel(ChunkKernel):
    """Writer of the kernel."""

    def __init__(self, tensors: PagedTensors, plan: ChunkPlan) -> None:
        super().__init__(tensors, plan, consumers=plan.warps)

    def _block(self) -> None:
        stages = self.plan.stages
        self.vectors = [HeadVector(self.tensors, self.lane) for _ in range(QUERIES_IN_FLIGHT)]
        group = T.bind(tirx.floordiv(self.thread, WARPGROUP))
        scores = _Scores(self.work, PAGE, self.shared, self.lane, self.query_at, T.bind(group * 64), self.rows)
        # At least one page, whose keys may all be masked.
        num_pages = T.bind(T.max(self.num_pages, 1))
        with when(self.thread == 0), T.serial(T.min(num_pages, stages)) as index:
            self._load_page(index)
        self._queries()
        ptx.async_proxy_fence()
        scores.begin()
        scores.open(scores.first_row)
        ptx.block_barrier()
        tile, page_mask = self._page(0)
        scores.issue_scores(tile)
        ptx.wgmma_wait(0)
        self._update(scores, 0, page_mask)
        scores.rescale()
        with T.serial(num_pages - 1) as index:
            next_index = T.bind(index + 1)
            with when(tirx.all(self.thread == 0, index > 0, index + (stages - 1) < num_pages)):
                self._reload_stage(T.bind(index + (stages - 1)))
            tile, page_mask = self._page(next_index)
            scores.issue_scores(tile)
            scores.issue_values(self.ring.tile(index))
            ptx.wgmma_wait(1)
            self._update(scores, next_index, page_mask)
            ptx.wgmma_wait(0)
            ptx.warp_barrier()  # all lanes have read the page's number
            with when(self.lane == 0):
                self.ring.release(index)
            scores.rescale()
        scores.issue_values(self.ring.tile(num_pages - 1))
        ptx.wgmma_wait(0)
        scores.softmax.finish()
        self._store(scores)

    def _reload_stage(self, index: Expr) -> None:
        """Load a page into a reused stage, once all warps have released it."""
        self.ring.acquire(index)
        self._load_page(index)

    def _page(self, index: Expr) -> tuple[Expr, Expr]:
        """Wait for a page; its offset, and a mask of all ones, or 0 if the page is missing."""
        index = index if not isinstance(index, int) else tirx.const(index, "int32")
        tile = self.ring.wait(index)
        return tile, self._complete_page(tile, index)

    def _clear(self, tile: Expr, num_tokens: Expr) -> None:
        super()._clear(tile, num_tokens)
        ptx.async_proxy_fence()

    def _update(self, scores: _Scores, index: Expr, page_mask: Expr) -> None:
        limits = [T.bitwise_and(limit, page_mask) for limit in self.limits]
        first = T.bind((self.first_page + index) * PAGE)
        scores.update(first, limits, T.bitwise_and(self.min_limit, page_mask), self.lows)


# Appending of new keys and values to pages: a warp per key or value head of a row.

_WARPS = 4


def page_append_kernel(work: PagedWork, gpu: GpuTarget) -> tirx.PrimFunc:
    """Kernel that normalizes and rotates new keys, and appends keys and values to their pages, without a result.

    Padding rows, and rows whose page is missing, write nothing. `PagedTensors` documents the parameters.

    Raises
    ------
    EncodingError
        If the kernel does not support the work (`unsupported_reason`).
    """
    reason = unsupported_reason(work, gpu)
    if reason:
        raise EncodingError(f"cached_attention on {gpu.arch}: {reason}")
    function = Function("page_append", registers="local")
    with function:
        tensors = PagedTensors(function, work, has_result=False)
        with function.body():
            tensors.open()
            _emit(tensors)
    return enable_pdl(function.result)


def _emit(tensors: PagedTensors) -> None:
    work = tensors.work
    items = work.rows * 2 * work.kv_heads
    with launch(ceil_div(items, _WARPS), _WARPS * WARP) as place:
        ptx.griddepcontrol_wait()
        ptx.launch_dependents()
        lane, warp = T.bind(tirx.floormod(place.thread, WARP)), T.bind(tirx.floordiv(place.thread, WARP))
        vector = HeadVector(tensors, lane)
        item = T.bind(T.Cast("int32", place.block) * _WARPS + warp)
        with when(True if items % _WARPS == 0 else item < items):
            row, head = T.bind(T.truncdiv(item, 2 * work.kv_heads)), T.bind(T.truncmod(item, 2 * work.kv_heads))
            sequence = T.bind(tensors.sequences[row])
            with when(sequence >= 0):
                position = T.bind(tensors.positions[row])
                page = T.bind(tensors.page_of(sequence, tirx.floordiv(position, PAGE)))
                with when(page >= 0):
                    _append(tensors, vector, row, head, page, T.bind(tirx.floormod(position, PAGE)))


def _append(tensors: PagedTensors, vector: HeadVector, row: Expr, head: Expr, page: Expr, token: Expr) -> None:
    work = tensors.work
    for kind in range(2):
        kv_head = head - kind * work.kv_heads
        with when(head < work.kv_heads if kind == 0 else head >= work.kv_heads):
            begin = T.bind(tensors.tile(page, kv_head, kind))

            def store(element: Expr, bits: Expr, begin: Expr = begin) -> None:
                T.buffer_store(tensors.pages, bits, [begin + in_tile(element, token)])

            norm = tensors.k_norm if kind == 0 else None
            vector.emit(row, work.heads + head, norm, kind == 0, store)


def cuda_cached_attention_kernel(problem: CachedAttentionProblem, gpu: GpuTarget) -> tirx.PrimFunc:
    """Kernel of a paged attention, one launch without scratch; `CachedAttentionProblem` documents its parameters.

    Keys and values of a chunk must be in their pages already; a problem with the rows "append" writes them.

    Raises
    ------
    EncodingError
        If sizes are symbolic, or no kernel supports the element types, head size or GPU.
    """
    work = _paged_work(problem)
    if problem.rows == APPEND:
        return page_append_kernel(work, gpu)
    if not work.is_chunk:
        return paged_decode_kernel(work, gpu)
    plan = wgmma_chunk_plan(work, gpu)
    return wgmma_chunk_kernel(work, gpu, plan) if plan else paged_chunk_kernel(work, gpu)


def _paged_work(problem: CachedAttentionProblem) -> PagedWork:
    qkv, pages, table = problem.operands[:3]
    return PagedWork(
        rows=_static_extent(qkv.shape[0], "rows"),
        heads=problem.heads,
        kv_heads=problem.kv_heads,
        size=problem.size,
        scale=problem.scale,
        slots=_static_extent(table.shape[0], "slots of the table"),
        max_pages=_static_extent(table.shape[1], "pages of a slot"),
        pages=pages.shape[0],
        window=problem.window,
        softcap=problem.softcap,
        rotary=problem.rotary,
        rotated=problem.rotary_size,
        eps=problem.eps,
        has_q_norm="q" in problem.norms,
        has_k_norm="k" in problem.norms,
        dtype=qkv.dtype,
        page_dtype=problem.page_type,
        is_chunk=problem.rows != "decode",
    )


def _static_extent(extent: Dim, description: str) -> int:
    if isinstance(extent, int):
        return extent
    raise EncodingError(f"cached_attention on GPUs: found {extent!r} {description}, expected a number")
