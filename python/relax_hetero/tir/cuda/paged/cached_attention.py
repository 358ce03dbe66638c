"""The kernel of an attention with a paged cache on a GPU."""

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
from .paged_chunk import TOGETHER, ChunkKernel, ChunkPlan, paged_chunk_kernel
from .paged_decode import paged_decode_kernel
from .paged_work import CHUNK, PagedTensors, PagedWork, in_tile, unsupported_reason

# Attention of consecutive tokens over the pages of a cache, by Hopper's tensor cores.
#
# A page is what wgmma reads without swizzle: keys as rows of k, eight elements of 64 tokens after each other, and
# values the other way round. A warpgroup has 64 rows. It issues the scores of the next page before the values of this
# one, and computes the softmax of the next while tensor cores add up this one's values. Warpgroups do not wait for
# each other, but for places of pages that are free.

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
        raise EncodingError(f"cached_attention on {gpu.arch}: {reason or 'it lacks wgmma'}")
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
                self.scores.registers,
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
                self.sums.registers,
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
        super().__init__(tensors, plan, consumers=plan.warps)

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
        self._update(scores, 0, there)
        scores.rescale()
        with T.serial(turns - 1) as turn:
            following = T.bind(turn + 1)
            with when(tirx.all(self.thread == 0, turn > 0, turn + (stages - 1) < turns)):
                self._ask_again(T.bind(turn + (stages - 1)))
            tile, there = self._page(following)
            scores.issue_scores(tile)
            scores.issue_values(self._tile(turn))
            ptx.wgmma_wait(1)
            self._update(scores, following, there)
            ptx.wgmma_wait(0)
            with when(self.lane == 0):
                self.ring.ring.release(turn)
            scores.rescale()
        scores.issue_values(self._tile(turns - 1))
        ptx.wgmma_wait(0)
        scores.softmax.finish()
        self._store(scores)

    def _ask_again(self, turn: Expr) -> None:
        """Ask for a page whose place had another one, as soon as all warps are done with that."""
        self.ring.ring.acquire(turn)
        self._ask(turn)

    def _tile(self, turn: Expr) -> Expr:
        return T.bind(self.ring.at + self.ring.ring.stage(turn) * self.ring.stage_bytes)

    def _page(self, turn: Expr) -> tuple[Expr, Expr]:
        """Wait for a page; where it lies, and all bits, or 0 where it is not there."""
        tile = self.ring.wait(turn if not isinstance(turn, int) else tirx.const(turn, "int32"))
        return tile, self._complete(tile, T.bind(self.first_page + turn))

    def _clear(self, tile: Expr, known: Expr) -> None:
        super()._clear(tile, known)
        ptx.async_proxy_fence()

    def _update(self, scores: _Scores, turn: Expr, there: Expr) -> None:
        limits = [T.bitwise_and(seen, there) for seen in self.seen]
        first = T.bind((self.first_page + turn) * PAGE)
        scores.update(first, limits, T.bitwise_and(self.least, there), self.lows)


# New keys and values into the pages of a cache: a launch with a warp for each head of keys, or values, of a row.

_WARPS = 4


def page_append_kernel(work: PagedWork, gpu: GpuTarget) -> tirx.PrimFunc:
    """Norm and rotation of new keys, and they and new values into their pages; it has no result of its own.

    Rows of no sequence, and those whose page is not there, write nothing. `PagedTensors` says the parameters.

    Raises EncodingError if `unsupported_reason` says why the work is not for this kernel.
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
    """The kernel of an attention with a cache, one launch; `CachedAttentionProblem` says its parameters, no scratch.

    Of a chunk, the keys and values of its rows are in their pages already: a problem of rows "append" writes them.

    Raises
    ------
    EncodingError
        For sizes that only a call knows, element types and head sizes that no kernel has, and GPUs without one.
    """
    work = _work(problem)
    if problem.rows == APPEND:
        return page_append_kernel(work, gpu)
    if not work.is_chunk:
        return paged_decode_kernel(work, gpu)
    plan = wgmma_chunk_plan(work, gpu)
    return wgmma_chunk_kernel(work, gpu, plan) if plan else paged_chunk_kernel(work, gpu)


def _work(problem: CachedAttentionProblem) -> PagedWork:
    qkv, pages, table = problem.operands[:3]
    return PagedWork(
        rows=_known(qkv.shape[0], "rows"),
        heads=problem.heads,
        kv_heads=problem.kv_heads,
        size=problem.size,
        scale=problem.scale,
        slots=_known(table.shape[0], "slots of the table"),
        max_pages=_known(table.shape[1], "pages of a slot"),
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


def _known(extent: Dim, what: str) -> int:
    if isinstance(extent, int):
        return extent
    raise EncodingError(f"cached_attention on GPUs: found {extent!r} {what}, expected a number")
