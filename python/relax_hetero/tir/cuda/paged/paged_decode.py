"""Paged decode attention: single tokens, whose keys and values are appended to the cache in the same launch.

The query heads of one key head are the rows of a tensor core tile. The pages of a sequence are distributed round-robin
over the blocks of a cluster (flash decoding), and the four warps of a block split the keys of a page. Each warp has an
online softmax of its own; at the end, the results of warps, then those of blocks, are combined in a fixed order. The
block with the token's page appends the token's key and value, to shared memory and to the page.

Sequence lengths are read on the device, so that the launch has one shape for all lengths. The first pages are loaded
before the launch that writes the projection has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.pages import PAGE
from ....errors import EncodingError
from ....target.gpu_target import WARP, GpuTarget
from ...core.builder import Expr, Function, ceil_div, when
from ..core import ptx
from ..core.launch import SharedMemory, enable_pdl, launch, local
from ..tile.softmax import SplitSums, as_bits, average_factor
from .head_vector import HeadVector
from .page_ring import PageRing
from .page_scores import PageScores
from .paged_work import CHUNK, MAX_GROUP_HEADS, PagedTensors, PagedWork, in_tile, unsupported_reason

_WARPS = 4
_THREADS = _WARPS * WARP
_ROWS = MAX_GROUP_HEADS
_KEYS = PAGE // _WARPS
"""Keys of a page per warp."""
_PAD_FLOATS = 4
"""Floats between rows of accumulators, to avoid bank conflicts."""
_READ_EARLY = ("pages", "table", "sequences", "positions")
"""Operands read before previous launches have ended: earlier steps have written all keys and values but the token's."""
_PARTIAL_BYTES = 32
"""Bytes of a partial result for four columns: accumulators, maximum score and row sum."""
MAX_SPLIT = 8
BLOCKS_PER_MULTIPROCESSOR = 2
MAX_STAGES = 3
_RESERVED = 2 << 10
"""Bytes of shared memory for barriers, alignment, and the system's reservation per block."""


@dataclass(frozen=True)
class DecodePlan:
    """Distribution of the pages of a sequence.

    Attributes
    ----------
    split : int
        Blocks of a cluster, which split the pages: 1 to 8. A GPU holds fewer blocks of large clusters.
    stages : int
        Pages that a block has in flight.
    """

    split: int
    stages: int


def decode_plan(work: PagedWork, gpu: GpuTarget) -> DecodePlan:
    """Choose a plan: as many blocks as are resident, if sequences may have as many pages."""
    blocks = work.rows * work.kv_heads
    num_pages = min(work.max_pages, ceil_div(work.window, PAGE) + 1) if work.window else work.max_pages

    def fits(split: int) -> bool:
        resident = gpu.model.resident_blocks[split] * gpu.multiprocessors // gpu.model.resident_blocks[1]
        return blocks * split <= resident * BLOCKS_PER_MULTIPROCESSOR

    split = next((count for count in range(min(MAX_SPLIT, max(num_pages, 1)), 1, -1) if fits(count)), 1)
    other_bytes = _ROWS * work.size * 2 + work.group * work.size // 4 * _PARTIAL_BYTES + _RESERVED
    capacity = gpu.shared_bytes_sm // BLOCKS_PER_MULTIPROCESSOR - other_bytes
    # At most the pages of a block: the remaining shared memory lets a block of the previous launch be resident, too.
    max_stages = min(MAX_STAGES, -(-num_pages // split))
    return DecodePlan(split, max(2, min(max_stages, capacity // (2 * work.tile_bytes))))


def paged_decode_kernel(work: PagedWork, gpu: GpuTarget, plan: DecodePlan | None = None) -> tirx.PrimFunc:
    """Kernel of a paged decode attention; `PagedTensors` documents its parameters.

    Raises
    ------
    EncodingError
        If the kernel does not support the work (`unsupported_reason`).
    """
    reason = unsupported_reason(work, gpu)
    if reason:
        raise EncodingError(f"cached_attention on {gpu.arch}: {reason}")
    function = Function("paged_decode", registers="local")
    with function:
        tensors = PagedTensors(function, work)
        with function.body():
            tensors.open()
            _Kernel(tensors, plan or decode_plan(work, gpu)).emit()
    return enable_pdl(function.result, [tensors.order.index(name) for name in _READ_EARLY])


class _Kernel:
    """Writer of the kernel."""

    def __init__(self, tensors: PagedTensors, plan: DecodePlan) -> None:
        self.tensors, self.work, self.plan = tensors, tensors.work, plan
        work = self.work
        self.num_heads = work.group
        self.pitch = work.size + _PAD_FLOATS
        self.shared = SharedMemory()
        self.ring = PageRing(tensors, self.shared, plan.stages)
        self.query_at = self.shared.reserve(_ROWS * work.size * 2)
        self.items = self.num_heads * work.size // 4
        self.items_per_block = ceil_div(self.items, plan.split)
        self.parts_at = self.shared.reserve(self.items_per_block * plan.split * _PARTIAL_BYTES) if plan.split > 1 else 0
        # The warps' accumulators reuse the memory of pages.
        sums = _WARPS * self.num_heads * (self.pitch + 2) * 4
        assert sums <= plan.stages * self.ring.stage_bytes, "accumulators of a block fit the memory of its pages"

    def emit(self) -> None:
        """Write the launch."""
        work, split = self.work, self.plan.split
        with launch(work.rows * work.kv_heads * split, _THREADS, split) as place:
            self.shared.open()
            self.thread, self.rank = place.thread, place.rank
            with when(self.thread == 0):
                self.ring.initialize()
            item = T.bind(tirx.floordiv(T.Cast("int32", place.block), split))
            self.kv_head = T.bind(tirx.floormod(item, work.kv_heads))
            self.row = T.bind(tirx.floordiv(item, work.kv_heads))
            self.lane, self.warp = T.bind(tirx.floormod(self.thread, WARP)), T.bind(tirx.floordiv(self.thread, WARP))
            self.first_head = T.bind(self.kv_head * work.group)
            ptx.launch_dependents()
            self._locate()
            with when(self.thread == 0), T.serial(T.min(self.num_pages, self.plan.stages)) as index:
                self._load_page(index)
            ptx.griddepcontrol_wait()
            if split > 1:
                ptx.cluster_arrive()
            self._block()

    def _locate(self) -> None:
        """Compute the row's sequence, position and pages."""
        tensors, window = self.tensors, self.work.window
        sequence = T.bind(tensors.sequences[self.row])
        self.position = T.bind(T.Select(sequence < 0, -1, tensors.positions[self.row]))
        self.sequence = T.bind(T.max(sequence, 0))
        self.low: Expr = T.bind(T.max(self.position - (window - 1), 0)) if window else 0
        self.first_page: Expr = T.bind(T.truncdiv(self.low, PAGE)) if window else 0
        self.last_page = T.bind(tirx.floordiv(self.position, PAGE))  # -1 for padding rows
        pages_of_rank = self.last_page - self.first_page + self.plan.split - self.rank
        self.num_pages = T.bind(T.truncdiv(T.max(pages_of_rank, 0), self.plan.split))

    def _page(self, index: Expr) -> Expr:
        """Number in the sequence of the block's page `index`."""
        return self.first_page + self.rank + index * self.plan.split

    def _load_page(self, index: Expr) -> None:
        page = T.bind(self.tensors.page_of(self.sequence, self._page(index)))
        self.ring.load(index, page, self.kv_head)

    def _complete_page(self, tile: Expr, index: Expr, number: Expr) -> Expr:
        """Complete a loaded page; the number of the sequence's tokens up to the page's end.

        Uninitialized values become zeros, as probability 0 times NaN would be NaN, and the token's key and value are
        appended.
        """
        page = self.ring.page(index)
        token = T.bind(T.Select(page < 0, -1, self.position - number * PAGE))
        with when(token < PAGE):
            self.ring.clear_values(tile, token + 1, self.thread, _THREADS)
            with when(token >= 0):
                self._append(tile, page, token)
            ptx.block_barrier()
        return T.bind(number * PAGE + T.min(token + 1, PAGE))

    def _block(self) -> None:
        stages = self.plan.stages
        heads_per_warp = ceil_div(self.work.group, _WARPS)
        self.vectors = [HeadVector(self.tensors, self.lane) for _ in range(heads_per_warp)]
        self.token = HeadVector(self.tensors, self.lane)
        self.scores = PageScores(self.work, _KEYS, self.shared, self.lane, self.query_at, 0, _ROWS)
        self._queries()
        self.scores.begin()
        ptx.block_barrier()
        first_key = T.bind(self.warp * _KEYS)
        lows = [self.low, self.low] if self.work.window else None
        with T.serial(self.num_pages) as index:
            tile = self.ring.wait(index)
            number = T.bind(self._page(index))
            limit = self._complete_page(tile, index, number)
            first = T.bind(number * PAGE + first_key)
            self.scores.multiply_keys(tile, first_key)
            self.scores.update(first, [limit, limit], limit, lows)
            self.scores.rescale()
            self.scores.add_values(tile + self.work.tile_bytes, first_key)
            ptx.block_barrier()
            with when(tirx.all(self.thread == 0, index + stages < self.num_pages)):
                self._load_page(index + stages)
        self.scores.softmax.finish()
        self._combine()

    def _queries(self) -> None:
        """Prepare the query heads of the tile in shared memory, zeros for missing ones, and load the token's head.

        All loads are in flight together.
        """
        work, norm = self.work, self.tensors.q_norm
        for index, vector in enumerate(self.vectors):
            vector.load(self.row, self.first_head + T.min(index * _WARPS + self.warp, work.group - 1), True)
        for kind in range(2):
            with when(self.warp == kind):
                self.token.load(self.row, work.heads + kind * work.kv_heads + self.kv_head, kind == 0)
        for index in range(_ROWS // _WARPS):
            head = T.bind(index * _WARPS + self.warp)

            def store(element: Expr, bits: Expr, head: Expr = head) -> None:
                offset = (tirx.floordiv(element, CHUNK) * _ROWS + head) * CHUNK + tirx.floormod(element, CHUNK)
                ptx.store_shared(self.shared.at(self.query_at + offset * 2), [bits], "u16")

            if index < len(self.vectors):
                with when(True if (index + 1) * _WARPS <= work.group else head < work.group):
                    self.vectors[index].finish(norm, True, store)
            if (index + 1) * _WARPS > work.group:
                with when(head >= work.group), T.serial(ceil_div(work.size // CHUNK, WARP)) as part:
                    chunk = part * WARP + self.lane
                    with when(chunk < work.size // CHUNK):
                        offset = (chunk * _ROWS + head) * CHUNK
                        ptx.store_shared(self.shared.at(self.query_at + offset * 2), [T.uint32(0)] * 4)

    def _append(self, tile: Expr, page: Expr, token: Expr) -> None:
        """Append the token's key and value to its page, in shared and in global memory."""
        work, tensors = self.work, self.tensors
        for kind in range(2):
            begin = T.bind(tensors.tile(page, self.kv_head, kind))

            def store(element: Expr, bits: Expr, begin: Expr = begin, kind: int = kind) -> None:
                offset = T.bind(in_tile(element, token))
                ptx.store_shared(self.shared.at(tile + (kind * work.tile_bytes + offset * 2)), [bits], "u16")
                T.buffer_store(tensors.pages, bits, [begin + offset])

            with when(self.warp == kind):
                self.token.finish(tensors.k_norm if kind == 0 else None, kind == 0, store)

    # Combination of warps, then of blocks.

    def _combine(self) -> None:
        work, scores, split = self.work, self.scores, self.plan.split
        stats_at = _WARPS * self.num_heads * self.pitch * 4
        ring = self.ring.offset
        for h in range(2):
            head = tirx.floordiv(self.lane, 4) + 8 * h
            if 8 * h >= self.num_heads:
                break
            with when(head < self.num_heads):
                line = T.bind(self.warp * self.num_heads + head)
                with T.serial(work.size // 8) as block:
                    offset_of_pair = ring + (line * self.pitch + block * 8 + tirx.floormod(self.lane, 4) * 2) * 4
                    values = [as_bits(scores.sums[block * 4 + 2 * h + c]) for c in range(2)]
                    ptx.store_shared(self.shared.at(offset_of_pair), values)
                with when(tirx.floormod(self.lane, 4) == 0):
                    stats = [as_bits(scores.softmax.row_max[h]), as_bits(scores.softmax.row_sum[h])]
                    ptx.store_shared(self.shared.at(ring + stats_at + line * 8), stats)
        ptx.block_barrier()
        if split > 1:
            ptx.cluster_wait()
        self._remote = local(1, "uint32")
        warps = SplitSums(_WARPS, scores.softmax.factor)
        quads = work.size // 4
        with T.serial(ceil_div(self.items, _THREADS)) as iteration:
            item = T.bind(iteration * _THREADS + self.thread)
            with when(item < self.items):
                head, quad = T.bind(tirx.floordiv(item, quads)), T.bind(tirx.floormod(item, quads))
                lines = [warp * self.num_heads + head for warp in range(_WARPS)]
                self._add(
                    warps,
                    [ring + (line * self.pitch + quad * 4) * 4 for line in lines],
                    [ring + stats_at + line * 8 for line in lines],
                )
                if split == 1:
                    self._store(warps, item)
                else:
                    self._send(warps, item)
        if split == 1:
            return
        ptx.cluster_barrier()
        blocks = SplitSums(split, scores.softmax.factor)
        with T.serial(ceil_div(self.items_per_block, _THREADS)) as iteration:
            number = T.bind(iteration * _THREADS + self.thread)
            item = T.bind(number * split + self.rank)
            with when(tirx.all(number < self.items_per_block, item < self.items)):
                offsets = [self.parts_at + (number * split + part) * _PARTIAL_BYTES for part in range(split)]
                self._add(blocks, offsets, [offset + 16 for offset in offsets])
                self._store(blocks, item)

    def _add(self, parts: SplitSums, sums: list[Expr], stats: list[Expr]) -> None:
        """Combine splits, given the offsets of their accumulators and of their softmax statistics."""
        for part in range(parts.parts):

            def read(fact_registers: Sequence[Expr], sum_registers: Sequence[Expr], part: int = part) -> None:
                ptx.load_shared(fact_registers, self.shared.at(stats[part]))
                ptx.load_shared(sum_registers, self.shared.at(sums[part]))

            parts.load(part, read)
        parts.add()

    def _send(self, parts: SplitSums, item: Expr) -> None:
        """Send four columns of this block to the block that stores them."""
        split = self.plan.split
        target = self.parts_at + (tirx.floordiv(item, split) * split + self.rank) * _PARTIAL_BYTES
        address = T.bind(ptx.shared_address(self.shared.at(target)))
        ptx.remote_address(self._remote[0], address, tirx.floormod(item, split))
        ptx.store_remote(self._remote[0], [as_bits(parts.total[i]) for i in range(4)])
        ptx.store_remote(self._remote[0] + T.uint32(16), [as_bits(parts.state[i]) for i in range(2)])

    def _store(self, parts: SplitSums, item: Expr) -> None:
        """Normalize and store four columns; padding rows become zeros."""
        work = self.work
        quads = work.size // 4
        head, quad = tirx.floordiv(item, quads), tirx.floormod(item, quads)
        factor = T.bind(average_factor(parts.row_sum, nan_to_zero=True))
        row = T.Cast("int64", self.row) * (work.heads * work.size)
        offset = T.bind(row + T.Cast("int64", (self.first_head + head) * work.size + quad * 4))
        out = self.tensors.out
        for i in range(4):
            T.buffer_store(out, T.Cast(work.dtype, parts.total[i] * factor), [offset + i])
