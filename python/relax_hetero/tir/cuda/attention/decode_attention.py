"""Paged decode attention: single tokens, whose keys and values are appended to the cache in the same launch.

Rows that may belong to one sequence (``rows="verify"``) are in their pages already: a block does not wait for others.

The query heads of one key head are the rows of a tensor core tile. The pages of a sequence are distributed round-robin
over the blocks of a cluster (flash decoding) and the teams of four warps of a block, and the warps of a team split the
keys of a page. Each warp has an online softmax of its own; at the end, the results of warps, then those of blocks, are
combined in a fixed order. The team with the token's page appends the token's key and value, to shared memory and to the
page.

The first pages are loaded before the launch that writes the projection has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.problem import CachedAttentionProblem
from ....target.gpu_target import WARP, GpuTarget
from ...core.builder import Expr, ceil_div, when
from ..core import ptx
from ..core.launch import SWIZZLED_ALIGN, SharedMemory, local
from ..tile.ring import Ring
from ..tile.softmax import SplitSums, as_bits
from .attention_plan import MMA_WARPS, PARTIAL_BYTES, WARP_ROWS, AttentionPlan, decode_plan
from .attention_tensors import (
    CHUNK,
    READ_EARLY,
    PagedTensors,
    in_tile,
    kernel_of,
    require_supported,
    unsupported_reason,
)
from .head_vector import HeadVector
from .key_values import PagedKeyValues
from .mma_attention import attend
from .queries import PagedQueries
from .row_store import PartialResults, RowStore

_PART_BYTES = 24
"""Bytes of a block's result for four columns that are sent, of `PARTIAL_BYTES`."""
TEAM_THREADS = MMA_WARPS * WARP
"""Threads that read pages together."""


def decode_attention_kernel(
    problem: CachedAttentionProblem, gpu: GpuTarget, plan: AttentionPlan | None = None
) -> tirx.PrimFunc:
    """Kernel of a paged decode attention; `CachedAttentionProblem` documents its parameters.

    Raises
    ------
    EncodingError
        If the kernel does not support the problem (`unsupported_reason`).
    """
    require_supported(problem, gpu, unsupported_reason(problem, gpu))
    plan = plan or decode_plan(problem, gpu)
    write = lambda tensors: _Decode(tensors).emit()  # noqa: E731
    return kernel_of("paged_decode", problem, plan, gpu, write, reads_early=early_reads(problem, plan))


def early_reads(problem: CachedAttentionProblem, plan: AttentionPlan) -> tuple[int, ...]:
    """Operands that a decode kernel reads before the launches before it have ended: none if one of them appends."""
    return READ_EARLY if _appends(problem, plan) else ()


def _appends(problem: CachedAttentionProblem, plan: AttentionPlan) -> bool:
    """Return whether the block of a token appends it: other blocks must not read its page."""
    return problem.rows == "decode" and plan.heads_per_tile == problem.group


class TeamMemory(SharedMemory):
    """Shared memory of a team of warps, by offsets in it.

    Attributes
    ----------
    begin : int
        Offset of the first team's memory in the block's.
    team : PrimExpr
        Number of the thread's team, known within the launch.
    """

    begin: int
    team: Expr

    def __init__(self, block: SharedMemory) -> None:
        super().__init__()
        self._block = block

    def reserve_all(self, teams: int) -> None:
        """Reserve the memory of all teams in the block's, after the reservations of one."""
        self.size = ceil_div(self.size, SWIZZLED_ALIGN) * SWIZZLED_ALIGN if teams > 1 else self.size
        self.begin = self._block.reserve(teams * self.size, SWIZZLED_ALIGN)

    def at(self, offset: Expr) -> Expr:
        """Pointer to the byte at an offset of the thread's team."""
        return self._block.at(offset + (self.begin + self.team * self.size))


class TokenHeads(PagedQueries):
    """Query heads of a token that share a key head, zeros for missing ones, and the token's own key and value.

    Attributes
    ----------
    append : callable or None
        Writer of the token to its page, for `PagedKeyValues`; None if it is there already.
    barrier : callable
        Function that synchronizes the warps, by default those of the block.
    """

    def __init__(self, tensors: PagedTensors, shared: SharedMemory, warps: int) -> None:
        super().__init__(tensors, shared, warps)
        self.append = self._append if _appends(tensors.problem, tensors.plan) else None
        self.barrier: Callable[[], None] = ptx.block_barrier

    def load(self, thread: Expr) -> None:
        """Prepare the queries, and load the key and value; all loads are in flight together."""
        tensors, problem = self.tensors, self.tensors.problem
        self.lane, self.warp = T.bind(tirx.floormod(thread, WARP)), T.bind(tirx.floordiv(thread, WARP))
        row, group, chunks = tensors.at["b"], tensors.plan.heads_per_tile, problem.size // CHUNK
        vectors = [HeadVector(tensors, self.lane) for _ in range(ceil_div(group, self.warps))]
        self.token = HeadVector(tensors, self.lane)
        for index, vector in enumerate(vectors):
            head = T.min(index * self.warps + self.warp, group - 1)
            vector.load(row, tensors.at["group"] * group + head, "query")
        for number, kind in enumerate(tensors.kinds if self.append else ()):
            with when(self.warp == number):
                self.token.load(row, problem.heads + number * problem.kv_heads + tensors.at_keys["g"], kind)
        for index in range(WARP_ROWS // self.warps):
            head = T.bind(index * self.warps + self.warp)
            if index < len(vectors):
                with when(True if (index + 1) * self.warps <= group else head < group):
                    vectors[index].finish("query", self.store_to(head))
            if (index + 1) * self.warps > group:
                with when(head >= group), T.serial(ceil_div(chunks, WARP)) as part:
                    chunk = part * WARP + self.lane
                    with when(chunk < chunks):
                        target = self.shared.at(self.offset + in_tile(chunk * CHUNK, head, WARP_ROWS) * 2)
                        ptx.store_shared(target, [T.uint32(0)] * 4)
        self.barrier()

    def _append(self, tile: Expr, page: Expr, token: Expr) -> None:
        """Append the token's key and value to its page, in shared and in global memory."""
        tensors = self.tensors
        for number, kind in enumerate(tensors.kinds):
            begin = T.bind(tensors.tile(page, tensors.at_keys["g"], number))

            def store(element: Expr, bits: Expr, begin: Expr = begin, number: int = number) -> None:
                offset = T.bind(in_tile(element, token))
                ptx.store_shared(self.shared.at(tile + (number * tensors.tile_bytes + offset * 2)), [bits], "u16")
                T.buffer_store(tensors.pages, bits, [begin + offset])

            with when(self.warp == number):
                self.token.finish(kind, store)


class _Decode:
    """Writer of the kernel."""

    def __init__(self, tensors: PagedTensors) -> None:
        self.tensors, self.split = tensors, tensors.plan.split_keys
        self.num_heads, self.quads, self.teams = tensors.problem.group, tensors.problem.size // 4, tensors.plan.teams
        shared = self.shared = SharedMemory()
        own = self.own = TeamMemory(shared)
        self.queries = TokenHeads(tensors, own, MMA_WARPS)
        self.source = PagedKeyValues(tensors, own, TEAM_THREADS, append=self.queries.append)
        own.reserve_all(self.teams)
        self.items = self.num_heads * self.quads
        self.items_per_block = ceil_div(self.items, self.split)
        if self.split > 1:
            self.parts_at = shared.reserve(self.items_per_block * self.split * PARTIAL_BYTES)
            self.exchange = Ring(shared, 1, producers=1)
        # The warps' results reuse the memory of pages.
        self.warps = PartialResults(own, self.source.offset, MMA_WARPS * self.num_heads, tensors.problem.size)
        assert self.warps.size <= tensors.plan.stages * tensors.page_bytes

    def emit(self) -> None:
        """Write the launch."""
        tensors, source = self.tensors, self.source
        waits = source.append is None
        self.threads = self.teams * TEAM_THREADS
        with tensors.launch(self.threads, self.shared, self._set_up, waits=waits) as place:
            if not waits:
                ptx.launch_dependents()
            if self.split > 1:
                self._expect_parts(place.thread)
            if self.teams > 1:
                source.share = self.split * self.teams, T.bind(tensors.rank * self.teams + self.own.team)
            source.locate(self.thread)
            source.start()
            if not waits:
                ptx.griddepcontrol_wait()
            if self.split > 1:
                ptx.cluster_begin()
            warp, keys = T.bind(tirx.floordiv(self.thread, WARP)), source.keys // MMA_WARPS
            has_sinks = tirx.all(tensors.rank == 0, place.thread < WARP)
            tile = attend(tensors, self.queries, source, 0, keys, T.bind(warp * keys), has_sinks)
            for h in range(ceil_div(self.num_heads, 8)):
                head = tirx.floordiv(tile.lane, 4) + 8 * h
                with when(head < self.num_heads):
                    self.warps.put(tile, h, T.bind(warp * self.num_heads + head))
            ptx.block_barrier()
            if self.split > 1:
                ptx.cluster_wait()
            self._combine(place.thread, tile.softmax.factor)

    def _set_up(self, thread: Expr) -> None:
        """Find the thread's team, whose barriers it initializes."""
        self.thread, self.own.team = thread, 0
        if self.teams > 1:
            self.thread = T.bind(tirx.floormod(thread, TEAM_THREADS))
            self.own.team = T.bind(tirx.floordiv(thread, TEAM_THREADS))
            self.source.barrier = self.queries.barrier = partial(ptx.named_barrier, self.own.team + 1, TEAM_THREADS)
        self.source.initialize(self.thread)

    def _expect_parts(self, thread: Expr) -> None:
        """Initialize the barrier of the results that the blocks of the cluster send to this one."""
        with when(thread == 0):
            self.exchange.initialize()
            ptx.barrier_init_fence()
            own_items = T.truncdiv(self.items + self.split - 1 - self.tensors.rank, self.split)
            ptx.barrier_expect(self.exchange.full(0), own_items * (self.split * _PART_BYTES))

    def _combine(self, thread: Expr, factor: float) -> None:
        """Combine the results of warps, then those of blocks, four columns per thread and iteration."""
        split, rank = self.split, self.tensors.rank
        self._remote = local(2, "uint32")
        warps = SplitSums(self.teams * MMA_WARPS, factor)
        with T.serial(ceil_div(self.items, self.threads)) as iteration:
            item = T.bind(iteration * self.threads + thread)
            with when(item < self.items):
                head, quad = T.bind(tirx.floordiv(item, self.quads)), T.bind(tirx.floormod(item, self.quads))
                lines = [warp * self.num_heads + head for warp in range(MMA_WARPS)]
                in_team = [self.warps.addresses(line, quad * 4) for line in lines]
                begins = [self.own.begin + team * self.own.size for team in range(self.teams)]
                warps.add([(begin + a, begin + b) for begin in begins for a, b in in_team], self._read)
                (self._store if split == 1 else self._send)(warps, item)
        if split == 1:
            return
        ptx.barrier_wait(self.exchange.full(0), 0)
        blocks = SplitSums(split, factor)
        with T.serial(ceil_div(self.items_per_block, self.threads)) as iteration:
            number = T.bind(iteration * self.threads + thread)
            item = T.bind(number * split + rank)
            with when(tirx.all(number < self.items_per_block, item < self.items)):
                sums = [self.parts_at + (number * split + part) * PARTIAL_BYTES for part in range(split)]
                blocks.add([(offset + 16, offset) for offset in sums], self._read)
                self._store(blocks, item)

    def _read(self, registers: Sequence[Expr], offset: Expr) -> None:
        ptx.load_shared(registers, self.shared.at(offset))

    def _send(self, parts: SplitSums, item: Expr) -> None:
        """Send four columns of this block to the block that stores them."""
        target = self.parts_at + (tirx.floordiv(item, self.split) * self.split + self.tensors.rank) * PARTIAL_BYTES
        for number, pointer in enumerate((self.shared.at(target), self.exchange.full(0))):
            address = T.bind(ptx.shared_address(pointer))
            ptx.remote_address(self._remote[number], address, tirx.floormod(item, self.split))
        words = [as_bits(parts.total[i]) for i in range(4)], [as_bits(parts.state[i]) for i in range(2)]
        for offset, each in zip((0, 16), words, strict=True):
            ptx.store_async(self._remote[0] + T.uint32(offset), each, self._remote[1])

    def _store(self, parts: SplitSums, item: Expr) -> None:
        """Normalize and store four columns; padding rows become zeros."""
        parts.average(nan_to_zero=True)
        row, column = tirx.floordiv(item, self.quads), tirx.floormod(item, self.quads) * 4
        RowStore(self.tensors, self.shared).store_quad(parts.total, row, column)
