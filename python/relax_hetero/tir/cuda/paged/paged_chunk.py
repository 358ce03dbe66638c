"""Paged prefill attention: consecutive tokens of one sequence, whose keys and values are already in the cache.

A block has a query head and a tile of rows, 16 per warp; it normalizes and rotates its own queries. Pages are loaded by
bulk copies into a ring of stages. Tiles with the most keys are launched first.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.pages import PAGE
from ....errors import EncodingError
from ....target.gpu_target import WARP, GpuTarget
from ...core.builder import Expr, Function, ceil_div, when
from ..core import ptx
from ..core.launch import SharedMemory, enable_pdl, launch, local, unrolled
from ..tile.register_tile import reduce_lanes
from ..tile.softmax import average_factor
from .head_vector import HeadVector
from .page_ring import PageRing
from .page_scores import PageScores
from .paged_work import CHUNK, PagedTensors, PagedWork, unsupported_reason

QUERIES_IN_FLIGHT = 4
"""Query rows that a warp loads at a time."""


@dataclass(frozen=True)
class ChunkPlan:
    """Tiling of the rows of a chunk.

    Attributes
    ----------
    warps : int
        Warps of a block, with 16 rows each: 2, 4 or 8.
    stages : int
        Pages that a block has in flight.
    """

    warps: int
    stages: int


def chunk_plan(work: PagedWork, gpu: GpuTarget) -> ChunkPlan:
    """Choose a plan: more rows per block, which share loads of pages, if blocks with fewer need several waves."""
    warps = 8 if ceil_div(work.rows, 64) * work.heads > gpu.multiprocessors and work.size <= MAX_NARROW else 4
    capacity = gpu.shared_bytes - warps * 16 * work.size * 2 - 1024
    return ChunkPlan(warps, max(1, min(2, capacity // (2 * work.tile_bytes))))


MAX_NARROW = 128
"""Maximum head size for which registers suffice for eight warps per block."""


def paged_chunk_kernel(work: PagedWork, gpu: GpuTarget, plan: ChunkPlan | None = None) -> tirx.PrimFunc:
    """Kernel of a paged prefill attention; `PagedTensors` documents its parameters.

    Raises
    ------
    EncodingError
        If the kernel does not support the work (`unsupported_reason`).
    """
    reason = unsupported_reason(work, gpu)
    if reason:
        raise EncodingError(f"cached_attention on {gpu.arch}: {reason}")
    function = Function("paged_chunk", registers="local")
    with function:
        tensors = PagedTensors(function, work)
        with function.body():
            tensors.open()
            ChunkKernel(tensors, plan or chunk_plan(work, gpu)).emit()
    return enable_pdl(function.result)


class ChunkKernel:
    """Writer of the kernel."""

    def __init__(self, tensors: PagedTensors, plan: ChunkPlan, consumers: int = 0) -> None:
        self.tensors, self.work, self.plan = tensors, tensors.work, plan
        self.threads, self.rows = plan.warps * WARP, plan.warps * 16
        self.shared = SharedMemory()
        self.ring = PageRing(tensors, self.shared, plan.stages, consumers)
        self.query_at = self.shared.reserve(self.rows * self.work.size * 2)

    def emit(self) -> None:
        """Write the launch."""
        work = self.work
        tiles = ceil_div(work.rows, self.rows)
        with launch(tiles * work.heads, self.threads, min_blocks_per_sm=1) as place:
            self.shared.open()
            self.thread = place.thread
            with when(self.thread == 0):
                self.ring.initialize()
            ptx.griddepcontrol_wait()
            ptx.launch_dependents()
            block = T.bind(T.Cast("int32", place.block))
            # Longest rows first; heads that share keys are neighbours.
            self.head = T.bind(T.truncmod(block, work.heads))
            self.first_row = T.bind((tiles - 1 - T.truncdiv(block, work.heads)) * self.rows)
            self.kv_head = T.bind(T.truncdiv(self.head, work.group))
            self.lane, self.warp = T.bind(tirx.floormod(self.thread, WARP)), T.bind(tirx.floordiv(self.thread, WARP))
            self._locate()
            self._block()

    def _position(self, row: Expr) -> Expr:
        """Position of a row of the chunk; -1 for padding."""
        tensors, last = self.tensors, self.work.rows - 1
        clamped = T.min(row, last)
        is_token = tirx.all(row <= last, tensors.sequences[clamped] >= 0)
        return T.if_then_else(is_token, tensors.positions[clamped], -1)

    def _locate(self) -> None:
        """Compute the tile's sequence, last position and pages, and the visible keys of the thread's rows."""
        window = self.work.window
        self.sequence = T.bind(T.max(self.tensors.sequences[0], 0))
        last = local(1, "int32")
        T.buffer_store(last, T.int32(-1), [0])
        for iteration in range(ceil_div(self.rows, WARP)):
            T.buffer_store(last, T.max(last[0], self._position(self.first_row + iteration * WARP + self.lane)), [0])
        reduce_lanes(last, 0, T.max)
        self.last = T.bind(last[0])
        self.first_page: Expr = 0
        if window:
            first = T.bind(self._position(self.first_row))
            self.first_page = T.bind(T.truncdiv(T.max(first - (window - 1), 0), PAGE))
        self.num_pages = T.bind(T.max(tirx.floordiv(self.last, PAGE) + 1 - self.first_page, 0))
        first_own_row = T.bind(self.first_row + self.warp * 16 + tirx.floordiv(self.lane, 4))
        self.thread_rows = [first_own_row, first_own_row + 8]
        self.limits = [T.bind(self._position(row) + 1) for row in self.thread_rows]
        self.lows = [T.bind(limit - window) for limit in self.limits] if window else None
        # Padding rows are the last of a chunk, so a warp's first row sees the fewest keys, unless some are padding.
        self.min_limit = T.bind(T.max(self._position(self.first_row + self.warp * 16) + 1, 0))
        is_whole = self._position(self.first_row + self.warp * 16 + 15) >= 0
        self.min_limit = T.bind(T.Select(is_whole, self.min_limit, 0))

    def _load_page(self, index: Expr) -> None:
        page = T.bind(self.tensors.page_of(self.sequence, self.first_page + index))
        self.ring.load(index, page, self.kv_head)

    def _complete_page(self, tile: Expr, index: Expr) -> Expr:
        """Zero uninitialized values of a page; the mask 0 if the page is missing, else all ones."""
        page, number = self.ring.page(index), self.first_page + index
        num_tokens = T.bind(T.Select(page < 0, 0, self.last + 1 - number * PAGE))
        with when(num_tokens < PAGE):
            self._clear(tile, num_tokens)
            ptx.block_barrier()
        return T.bind(T.Select(page < 0, 0, -1))

    def _clear(self, tile: Expr, num_tokens: Expr) -> None:
        self.ring.clear_values(tile, num_tokens, self.thread, self.threads)

    def _block(self) -> None:
        stages = self.plan.stages
        self.vectors = [HeadVector(self.tensors, self.lane) for _ in range(QUERIES_IN_FLIGHT)]
        first_own = T.bind(self.warp * 16)
        scores = PageScores(self.work, PAGE, self.shared, self.lane, self.query_at, first_own, self.rows)
        with when(self.thread == 0), T.serial(T.min(self.num_pages, stages)) as index:
            self._load_page(index)
        self._queries()
        scores.begin()
        ptx.block_barrier()
        with T.serial(self.num_pages) as index:
            tile = self.ring.wait(index)
            page_mask = self._complete_page(tile, index)
            first = T.bind((self.first_page + index) * PAGE)
            scores.multiply_keys(tile, 0)
            limits = [T.bitwise_and(limit, page_mask) for limit in self.limits]
            scores.update(first, limits, T.bitwise_and(self.min_limit, page_mask), self.lows)
            scores.rescale()
            scores.add_values(tile + self.work.tile_bytes, 0)
            ptx.block_barrier()
            with when(tirx.all(self.thread == 0, index + stages < self.num_pages)):
                self._load_page(index + stages)
        scores.softmax.finish()
        self._store(scores)

    def _queries(self) -> None:
        """Prepare the warp's 16 query rows in shared memory, several at a time; rows beyond the chunk are clamped."""
        norm = self.tensors.q_norm
        with T.serial(16 // len(self.vectors)) as iteration:
            block_rows = [T.bind(self.warp * 16 + iteration * len(self.vectors) + i) for i in range(len(self.vectors))]
            for vector, block_row in zip(self.vectors, block_rows, strict=True):
                row = T.bind(T.min(self.first_row + block_row, self.work.rows - 1))
                vector.load(row, self.head, True)
            for vector, block_row in zip(self.vectors, block_rows, strict=True):

                def store(element: Expr, bits: Expr, block_row: Expr = block_row) -> None:
                    at = (tirx.floordiv(element, CHUNK) * self.rows + block_row) * CHUNK + tirx.floormod(element, CHUNK)
                    ptx.store_shared(self.shared.at(self.query_at + at * 2), [bits], "u16")

                vector.finish(norm, True, store)

    def _store(self, scores: PageScores) -> None:
        """Normalize and store results; rows without visible keys become zeros."""
        work, out, pair = self.work, self.tensors.out, local(1, "uint32")
        for h in range(2):
            factor = T.bind(average_factor(scores.softmax.row_sum[h], nan_to_zero=True))
            with when(self.thread_rows[h] < work.rows):
                begin = T.Cast("int64", self.thread_rows[h]) * (work.heads * work.size)
                begin = T.bind(begin + T.Cast("int64", self.head * work.size + tirx.floormod(self.lane, 4) * 2))
                with unrolled(work.size // 8) as block:
                    pair_values = [scores.sums[block * 4 + 2 * h + c] * factor for c in range(2)]
                    if work.dtype == "float32":
                        for c in range(2):
                            T.buffer_store(out, pair_values[c], [begin + (block * 8 + c)])
                    else:
                        ptx.pack_pair(pair[0], pair_values[0], pair_values[1], work.dtype)
                        ptx.store_global(T.address_of(out[begin + block * 8]), [pair[0]])
