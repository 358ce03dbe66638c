"""Attention of consecutive tokens of one sequence over the pages of a cache, where their keys and values are already.

A block has a head of queries and a tile of rows, 16 for each of its warps; it normalizes and rotates its queries, which
no other block reads. Pages come by bulk copies, a ring of stages ahead. Tiles with the most keys go first.
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

TOGETHER = 4
"""Rows of queries that a warp asks for at once."""


@dataclass(frozen=True)
class ChunkPlan:
    """How the rows of a chunk are shared out.

    Attributes
    ----------
    warps : int
        Number of warps of a block, with 16 rows each: 2, 4 or 8.
    stages : int
        Pages that a block asks for at once.
    """

    warps: int
    stages: int


def chunk_plan(work: PagedWork, gpu: GpuTarget) -> ChunkPlan:
    """More rows a block, which read each page once, as soon as blocks of fewer would be too many to run at once."""
    warps = 8 if ceil_div(work.rows, 64) * work.heads > gpu.multiprocessors and work.size <= WIDE else 4
    room = gpu.shared_bytes - warps * 16 * work.size * 2 - 1024
    return ChunkPlan(warps, max(1, min(2, room // (2 * work.tile_bytes))))


WIDE = 128
"""Heads up to here leave a thread registers enough for eight warps a block."""


def paged_chunk_kernel(work: PagedWork, gpu: GpuTarget, plan: ChunkPlan | None = None) -> tirx.PrimFunc:
    """The kernel of an attention whose rows are of one sequence; `PagedTensors` says its parameters.

    Raises EncodingError if `unsupported_reason` says why the work is not for this kernel.
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
    """State that the parts of the kernel share while it is written."""

    def __init__(self, tensors: PagedTensors, plan: ChunkPlan, consumers: int = 0) -> None:
        self.tensors, self.work, self.plan = tensors, tensors.work, plan
        self.threads, self.rows = plan.warps * WARP, plan.warps * 16
        self.shared = SharedMemory()
        self.ring = PageRing(tensors, self.shared, plan.stages, consumers)
        self.query_at = self.shared.reserve(self.rows * self.work.size * 2)

    def emit(self) -> None:
        """The launch."""
        work = self.work
        tiles = ceil_div(work.rows, self.rows)
        with launch(tiles * work.heads, self.threads, min_blocks_per_sm=1) as place:
            self.shared.open()
            self.thread = place.thread
            with when(self.thread == 0):
                self.ring.init()
            ptx.griddepcontrol_wait()
            ptx.launch_dependents()
            block = T.bind(T.Cast("int32", place.block))
            # Long rows first; heads that share keys are neighbours.
            self.head = T.bind(T.truncmod(block, work.heads))
            self.first_row = T.bind((tiles - 1 - T.truncdiv(block, work.heads)) * self.rows)
            self.kv_head = T.bind(T.truncdiv(self.head, work.group))
            self.lane, self.warp = T.bind(tirx.floormod(self.thread, WARP)), T.bind(tirx.floordiv(self.thread, WARP))
            self._find()
            self._block()

    def _position(self, row: Expr) -> Expr:
        """Position of a row of the chunk; -1 of one that is of no sequence."""
        tensors, last = self.tensors, self.work.rows - 1
        at = T.min(row, last)
        exists = tirx.all(row <= last, tensors.sequences[at] >= 0)
        return T.if_then_else(exists, tensors.positions[at], -1)

    def _find(self) -> None:
        """The sequence, the last position of the tile, and its pages."""
        window = self.work.window
        self.sequence = T.bind(T.max(self.tensors.sequences[0], 0))
        last = local(1, "int32")
        T.buffer_store(last, T.int32(-1), [0])
        for part in range(ceil_div(self.rows, WARP)):
            T.buffer_store(last, T.max(last[0], self._position(self.first_row + part * WARP + self.lane)), [0])
        reduce_lanes(last, 0, T.max)
        self.last = T.bind(last[0])
        self.first_page: Expr = 0
        if window:
            first = T.bind(self._position(self.first_row))
            self.first_page = T.bind(T.truncdiv(T.max(first - (window - 1), 0), PAGE))
        self.turns = T.bind(T.max(tirx.floordiv(self.last, PAGE) + 1 - self.first_page, 0))
        own = T.bind(self.first_row + self.warp * 16 + tirx.floordiv(self.lane, 4))
        self.own = [own, own + 8]
        self.seen = [T.bind(self._position(row) + 1) for row in self.own]
        self.lows = [T.bind(seen - window) for seen in self.seen] if window else None
        # Rows of no sequence are the last of a chunk: the first row of a warp sees the fewest keys, or none exists.
        self.least = T.bind(T.max(self._position(self.first_row + self.warp * 16) + 1, 0))
        is_whole = self._position(self.first_row + self.warp * 16 + 15) >= 0
        self.least = T.bind(T.Select(is_whole, self.least, 0))

    def _ask(self, turn: Expr) -> None:
        page = T.bind(self.tensors.page_of(self.sequence, self.first_page + turn))
        self.ring.ask(turn, page, self.kv_head)

    def _complete(self, tile: Expr, number: Expr) -> Expr:
        """Zeros for values that nobody has written; 0 where the page is not there, else all bits."""
        page = T.bind(self.tensors.page_of(self.sequence, number))
        known = T.bind(T.Select(page < 0, 0, self.last + 1 - number * PAGE))
        with when(known < PAGE):
            self._clear(tile, known)
            ptx.block_barrier()
        return T.bind(T.Select(page < 0, 0, -1))

    def _clear(self, tile: Expr, known: Expr) -> None:
        self.ring.clear_values(tile, known, self.thread, self.threads)

    def _block(self) -> None:
        stages = self.plan.stages
        self.vectors = [HeadVector(self.tensors, self.lane) for _ in range(TOGETHER)]
        first_own = T.bind(self.warp * 16)
        scores = PageScores(self.work, PAGE, self.shared, self.lane, self.query_at, first_own, self.rows)
        with when(self.thread == 0), T.serial(T.min(self.turns, stages)) as turn:
            self._ask(turn)
        self._queries()
        scores.begin()
        ptx.block_barrier()
        with T.serial(self.turns) as turn:
            tile = self.ring.wait(turn)
            number = T.bind(self.first_page + turn)
            there = self._complete(tile, number)
            first = T.bind(number * PAGE)
            scores.multiply_keys(tile, 0)
            limits = [T.bitwise_and(seen, there) for seen in self.seen]
            scores.update(first, limits, T.bitwise_and(self.least, there), self.lows)
            scores.rescale()
            scores.add_values(tile + self.work.tile_bytes, 0)
            ptx.block_barrier()
            with when(tirx.all(self.thread == 0, turn + stages < self.turns)):
                self._ask(turn + stages)
        scores.softmax.finish()
        self._store(scores)

    def _queries(self) -> None:
        """The warp's 16 rows into shared memory, several at a time; rows beyond the chunk are those of its last."""
        norm = self.tensors.q_norm
        with T.serial(16 // len(self.vectors)) as turn:
            owns = [T.bind(self.warp * 16 + turn * len(self.vectors) + i) for i in range(len(self.vectors))]
            for vector, own in zip(self.vectors, owns, strict=True):
                row = T.bind(T.min(self.first_row + own, self.work.rows - 1))
                vector.load(row, self.head, True)
            for vector, own in zip(self.vectors, owns, strict=True):

                def store(element: Expr, bits: Expr, own: Expr = own) -> None:
                    at = (tirx.floordiv(element, CHUNK) * self.rows + own) * CHUNK + tirx.floormod(element, CHUNK)
                    ptx.store_shared(self.shared.at(self.query_at + at * 2), [bits], "u16")

                vector.finish(norm, True, store)

    def _store(self, scores: PageScores) -> None:
        """Averages; zeros of rows that see nothing."""
        work, out, pair = self.work, self.tensors.out, local(1, "uint32")
        for h in range(2):
            factor = T.bind(average_factor(scores.softmax.row_sum[h], nan_to_zero=True))
            with when(self.own[h] < work.rows):
                begin = T.Cast("int64", self.own[h]) * (work.heads * work.size)
                begin = T.bind(begin + T.Cast("int64", self.head * work.size + tirx.floormod(self.lane, 4) * 2))
                with unrolled(work.size // 8) as block:
                    both = [scores.sums[block * 4 + 2 * h + c] * factor for c in range(2)]
                    if work.dtype == "float32":
                        for c in range(2):
                            T.buffer_store(out, both[c], [begin + (block * 8 + c)])
                    else:
                        ptx.pack_pair(pair[0], both[0], both[1], work.dtype)
                        ptx.store_global(T.address_of(out[begin + block * 8]), [pair[0]])
