"""Attention of single tokens over the pages of a cache, into which their keys and values go: one launch.

The heads of queries that read one head of keys are the rows of a tile of tensor cores. The blocks of a cluster take
turns at the pages of a sequence, and the four warps of a block share the keys of a page. Each warp goes on with a
softmax of its own, and at the end the sums of warps, then those of blocks, are put together in a fixed order. The block
that has the page with the token itself puts its key and value there, into shared memory and into the page.

How far a sequence has come is read from its position, on the device: the launch is of one shape for all lengths. The
first pages are asked for before the launch that writes the projection has ended.
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
from .paged_work import CHUNK, MAX_BLOCKS_PER_SM, PagedTensors, PagedWork, in_tile, unsupported_reason

_WARPS = 4
_THREADS = _WARPS * WARP
_ROWS = MAX_BLOCKS_PER_SM
_KEYS = PAGE // _WARPS
"""Number of keys of a page for each warp."""
_PAD = 4
"""Floats between the rows of sums: rows begin in different banks."""
_READ_EARLY = ("pages", "table", "sequences", "positions")
"""Before the launches before have ended: all keys and values but the token's own were written by earlier steps."""
_ITEM = 32
"""Bytes that a block gets of each part of four sums: the sums, the greatest score and the sum of powers."""
MAX_SPLIT = 8
BLOCKS_PER_MULTIPROCESSOR = 2
MAX_STAGES = 3
_RESERVED = 2 << 10
"""Bytes of shared memory: barriers, what begins at a multiple of 128, and what the system takes of each block."""


@dataclass(frozen=True)
class DecodePlan:
    """How the pages of a sequence are shared out.

    Attributes
    ----------
    split : int
        Blocks of a cluster, that share them: 1, 2, 4 or 8.
    stages : int
        Pages that a block asks for at once.
    """

    split: int
    stages: int


def decode_plan(work: PagedWork, gpu: GpuTarget) -> DecodePlan:
    """As many blocks as run at the same time, if sequences may have as many pages."""
    blocks = work.rows * work.kv_heads
    most = gpu.multiprocessors * BLOCKS_PER_MULTIPROCESSOR
    reach = min(work.max_pages, ceil_div(work.window, PAGE) + 1) if work.window else work.max_pages
    split = 1
    while split < MAX_SPLIT and blocks * split * 2 <= most and split < reach:
        split *= 2
    others = _ROWS * work.size * 2 + work.group * work.size // 4 * _ITEM + _RESERVED
    room = gpu.shared_bytes_sm // BLOCKS_PER_MULTIPROCESSOR - others
    # No more than a block has: what is left over lets a block of the launch before share the multiprocessor.
    max_stages = min(MAX_STAGES, -(-reach // split))
    return DecodePlan(split, max(2, min(max_stages, room // (2 * work.tile_bytes))))


def paged_decode_kernel(work: PagedWork, gpu: GpuTarget, plan: DecodePlan | None = None) -> tirx.PrimFunc:
    """The kernel of an attention whose rows are of different sequences; `PagedTensors` says its parameters.

    Raises EncodingError if `unsupported_reason` says why the work is not for this kernel.
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
    """State that the parts of the kernel share while it is written."""

    def __init__(self, tensors: PagedTensors, plan: DecodePlan) -> None:
        self.tensors, self.work, self.plan = tensors, tensors.work, plan
        work = self.work
        self.own = work.group
        self.pitch = work.size + _PAD
        self.shared = SharedMemory()
        self.ring = PageRing(tensors, self.shared, plan.stages)
        self.query_at = self.shared.reserve(_ROWS * work.size * 2)
        self.items = self.own * work.size // 4
        self.own_items = ceil_div(self.items, plan.split)
        self.parts_at = self.shared.reserve(self.own_items * plan.split * _ITEM) if plan.split > 1 else 0
        # The warps' sums lie where pages were.
        sums = _WARPS * self.own * (self.pitch + 2) * 4
        assert sums <= plan.stages * self.ring.stage_bytes, "sums of a block fit where its pages were"

    def emit(self) -> None:
        """The launch."""
        work, split = self.work, self.plan.split
        with launch(work.rows * work.kv_heads * split, _THREADS, split) as place:
            self.shared.open()
            self.thread, self.rank = place.thread, place.rank
            with when(self.thread == 0):
                self.ring.init()
            item = T.bind(tirx.floordiv(T.Cast("int32", place.block), split))
            self.kv_head = T.bind(tirx.floormod(item, work.kv_heads))
            self.row = T.bind(tirx.floordiv(item, work.kv_heads))
            self.lane, self.warp = T.bind(tirx.floormod(self.thread, WARP)), T.bind(tirx.floordiv(self.thread, WARP))
            self.first_head = T.bind(self.kv_head * work.group)
            ptx.launch_dependents()
            self._find()
            with when(self.thread == 0), T.serial(T.min(self.turns, self.plan.stages)) as turn:
                self._ask(turn)
            ptx.griddepcontrol_wait()
            if split > 1:
                ptx.cluster_arrive()
            self._block()

    def _find(self) -> None:
        """The row's sequence, and its pages."""
        tensors, window = self.tensors, self.work.window
        sequence = T.bind(tensors.sequences[self.row])
        self.position = T.bind(T.Select(sequence < 0, -1, tensors.positions[self.row]))
        self.sequence = T.bind(T.max(sequence, 0))
        self.low: Expr = T.bind(T.max(self.position - (window - 1), 0)) if window else 0
        self.first_page: Expr = T.bind(T.truncdiv(self.low, PAGE)) if window else 0
        self.last_page = T.bind(tirx.floordiv(self.position, PAGE))  # -1 of a row that is none
        mine = self.last_page - self.first_page + self.plan.split - self.rank
        self.turns = T.bind(T.truncdiv(T.max(mine, 0), self.plan.split))

    def _page(self, turn: Expr) -> Expr:
        """The number of a turn's page in its sequence."""
        return self.first_page + self.rank + turn * self.plan.split

    def _ask(self, turn: Expr) -> None:
        page = T.bind(self.tensors.page_of(self.sequence, self._page(turn)))
        self.ring.ask(turn, page, self.kv_head)

    def _complete(self, tile: Expr, number: Expr) -> Expr:
        """Make a page that has come one without holes; how many tokens of the sequence are there, up to its end.

        Values of tokens that nobody has written become zeros, for their weight 0 times NaN is NaN; the token's own key
        and value come in.
        """
        page = T.bind(self.tensors.page_of(self.sequence, number))
        token = T.bind(T.Select(page < 0, -1, self.position - number * PAGE))
        with when(token < PAGE):
            self.ring.clear_values(tile, token + 1, self.thread, _THREADS)
            with when(token >= 0):
                self._append(tile, page, token)
            ptx.block_barrier()
        return T.bind(number * PAGE + T.min(token + 1, PAGE))

    def _block(self) -> None:
        stages = self.plan.stages
        self.vector = HeadVector(self.tensors, self.lane)
        self.scores = PageScores(self.work, _KEYS, self.shared, self.lane, self.query_at, 0, _ROWS)
        self._queries()
        self.scores.begin()
        ptx.block_barrier()
        own_key = T.bind(self.warp * _KEYS)
        lows = [self.low, self.low] if self.work.window else None
        with T.serial(self.turns) as turn:
            tile = self.ring.wait(turn)
            number = T.bind(self._page(turn))
            limit = self._complete(tile, number)
            first = T.bind(number * PAGE + own_key)
            self.scores.multiply_keys(tile, own_key)
            self.scores.update(first, [limit, limit], limit, lows)
            self.scores.rescale()
            self.scores.add_values(tile + self.work.tile_bytes, own_key)
            ptx.block_barrier()
            with when(tirx.all(self.thread == 0, turn + stages < self.turns)):
                self._ask(turn + stages)
        self.scores.softmax.finish()
        self._put_together()

    def _queries(self) -> None:
        """Heads of the tile into shared memory, zeros for those that are none."""
        with T.serial(_ROWS // _WARPS) as turn:
            head = T.bind(turn * _WARPS + self.warp)

            def store(element: Expr, bits: Expr, head: Expr = head) -> None:
                at = (tirx.floordiv(element, CHUNK) * _ROWS + head) * CHUNK + tirx.floormod(element, CHUNK)
                ptx.store_shared(self.shared.at(self.query_at + at * 2), [bits], "u16")

            exists = head < self.work.group
            with T.If(exists):
                with T.Then():
                    norm = self.tensors.q_norm
                    self.vector.emit(self.row, self.first_head + head, norm, True, store)
                with T.Else(), T.serial(ceil_div(self.work.size // CHUNK, WARP)) as part:
                    chunk = part * WARP + self.lane
                    with when(chunk < self.work.size // CHUNK):
                        at = (chunk * _ROWS + head) * CHUNK
                        ptx.store_shared(self.shared.at(self.query_at + at * 2), [T.uint32(0)] * 4)

    def _append(self, tile: Expr, page: Expr, token: Expr) -> None:
        """The token's key and value into its page, here and in memory."""
        work, tensors = self.work, self.tensors
        for kind in range(2):
            begin = T.bind(tensors.tile(page, self.kv_head, kind))

            def store(element: Expr, bits: Expr, begin: Expr = begin, kind: int = kind) -> None:
                at = T.bind(in_tile(element, token))
                ptx.store_shared(self.shared.at(tile + (kind * work.tile_bytes + at * 2)), [bits], "u16")
                T.buffer_store(tensors.pages, bits, [begin + at])

            with when(self.warp == kind):
                norm = tensors.k_norm if kind == 0 else None
                head = work.heads + kind * work.kv_heads + self.kv_head
                self.vector.emit(self.row, head, norm, kind == 0, store)

    # The end: sums of warps, then those of blocks.

    def _put_together(self) -> None:
        work, scores, split = self.work, self.scores, self.plan.split
        facts_at = _WARPS * self.own * self.pitch * 4
        ring = self.ring.at
        for h in range(2):
            head = tirx.floordiv(self.lane, 4) + 8 * h
            if 8 * h >= self.own:
                break
            with when(head < self.own):
                line = T.bind(self.warp * self.own + head)
                with T.serial(work.size // 8) as block:
                    at = ring + (line * self.pitch + block * 8 + tirx.floormod(self.lane, 4) * 2) * 4
                    values = [as_bits(scores.sums[block * 4 + 2 * h + c]) for c in range(2)]
                    ptx.store_shared(self.shared.at(at), values)
                with when(tirx.floormod(self.lane, 4) == 0):
                    facts = [as_bits(scores.softmax.row_max[h]), as_bits(scores.softmax.row_sum[h])]
                    ptx.store_shared(self.shared.at(ring + facts_at + line * 8), facts)
        ptx.block_barrier()
        if split > 1:
            ptx.cluster_wait()
        self._remote = local(1, "uint32")
        warps = SplitSums(_WARPS, scores.softmax.factor)
        quads = work.size // 4
        with T.serial(ceil_div(self.items, _THREADS)) as turn:
            item = T.bind(turn * _THREADS + self.thread)
            with when(item < self.items):
                head, quad = T.bind(tirx.floordiv(item, quads)), T.bind(tirx.floormod(item, quads))
                lines = [warp * self.own + head for warp in range(_WARPS)]
                self._add(
                    warps,
                    [ring + (line * self.pitch + quad * 4) * 4 for line in lines],
                    [ring + facts_at + line * 8 for line in lines],
                )
                if split == 1:
                    self._store(warps, item)
                else:
                    self._send(warps, item)
        if split == 1:
            return
        ptx.cluster_barrier()
        blocks = SplitSums(split, scores.softmax.factor)
        with T.serial(ceil_div(self.own_items, _THREADS)) as turn:
            number = T.bind(turn * _THREADS + self.thread)
            item = T.bind(number * split + self.rank)
            with when(tirx.all(number < self.own_items, item < self.items)):
                places = [self.parts_at + (number * split + part) * _ITEM for part in range(split)]
                self._add(blocks, places, [place + 16 for place in places])
                self._store(blocks, item)

    def _add(self, parts: SplitSums, sums: list[Expr], facts: list[Expr]) -> None:
        """Put parts of four sums together: offsets of their sums, and of their greatest scores and row sums."""
        for part in range(parts.parts):

            def read(fact_registers: Sequence[Expr], sum_registers: Sequence[Expr], part: int = part) -> None:
                ptx.load_shared(fact_registers, self.shared.at(facts[part]))
                ptx.load_shared(sum_registers, self.shared.at(sums[part]))

            parts.load(part, read)
        parts.add()

    def _send(self, parts: SplitSums, item: Expr) -> None:
        """Four sums of this block to the block that stores them."""
        split = self.plan.split
        target = self.parts_at + (tirx.floordiv(item, split) * split + self.rank) * _ITEM
        address = T.bind(ptx.shared_address(self.shared.at(target)))
        ptx.remote_address(self._remote[0], address, tirx.floormod(item, split))
        ptx.store_remote(self._remote[0], [as_bits(parts.total[i]) for i in range(4)])
        ptx.store_remote(self._remote[0] + T.uint32(16), [as_bits(parts.state[i]) for i in range(2)])

    def _store(self, parts: SplitSums, item: Expr) -> None:
        """Four averages into the result; zeros of a row that is none."""
        work = self.work
        quads = work.size // 4
        head, quad = tirx.floordiv(item, quads), tirx.floormod(item, quads)
        factor = T.bind(average_factor(parts.row_sum, nan_to_zero=True))
        row = T.Cast("int64", self.row) * (work.heads * work.size)
        at = T.bind(row + T.Cast("int64", (self.first_head + head) * work.size + quad * 4))
        out = self.tensors.out
        for i in range(4):
            T.buffer_store(out, T.Cast(work.dtype, parts.total[i] * factor), [at + i])
