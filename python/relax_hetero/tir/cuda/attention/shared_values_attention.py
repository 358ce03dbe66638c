"""Paged attention whose keys are the values (multi-head latent attention), of single tokens and of chunks.

All heads read the same wide keys, so a page is loaded once, as keys and as values, and heads of a token are rows of a
tile. Accumulators as wide as a key do not fit the registers of a warp: four warps, a team, have the same 16 rows. Each
of them multiplies a part of the scores, exchanges it through shared memory, and accumulates a quarter of the columns
of values. The online softmax is that of all scores of the team, in each of its warps.

On Hopper, two warpgroups have 64 rows of a chunk, and half of the keys of a page and of the columns each; they exchange
row maxima and probabilities (`team.Team`).

The teams of a chunk have different rows. Those of a decode step have halves of the keys of a page; the pages are
distributed over the blocks of a cluster, and the results of teams and blocks are combined in a fixed order.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.packed_layout import CHUNK_BYTES
from ....encoding.pages import PAGE
from ....encoding.problem import CachedAttentionProblem
from ....target.gpu_target import WARP, WARPGROUP, GpuTarget
from ...core.builder import Expr
from ..core import ptx
from ..core.launch import SharedMemory, local
from ..tile.register_tile import RegisterTile
from ..tile.shared_tile import add_by_columns, multiply_by_rows
from ..tile.softmax import as_bits, as_float
from .attention_plan import TEAM_WARPS, TEAMS, WARP_ROWS, AttentionPlan, paged_extents, paged_plan, shared_values_plan
from .attention_tensors import CHUNK, PagedTensors, kernel_of, require_supported, unsupported_reason
from .decode_attention import TokenHeads, early_reads
from .key_values import PagedKeyValues
from .queries import PagedQueries
from .row_store import PartialResults, RowStore
from .score_tile import ScoreTile
from .team import Team
from .wgmma_attention import WGMMA_DEPTH, issue_products

_THREADS = TEAMS * TEAM_WARPS * WARP
_TEAM_THREADS = TEAM_WARPS * WARP
WGMMA_ROWS = 64
"""Rows of a chunk's block by wgmma."""
_EXCHANGE_BYTES = 10 << 10
"""Bytes of shared memory for the exchange of two warpgroups, barriers and alignment."""


def shared_values_kernel(
    problem: CachedAttentionProblem, gpu: GpuTarget, plan: AttentionPlan | None = None
) -> tirx.PrimFunc:
    """Kernel of a paged attention with shared values; `CachedAttentionProblem` documents its parameters.

    New keys must be in their pages already, unless rows are "decode" and a block has all heads that share a key.

    Raises
    ------
    EncodingError
        If the kernel does not support the problem (`unsupported_reason`).
    """
    require_supported(problem, gpu, unsupported_reason(problem, gpu))
    if not plan and _fits_wgmma(problem, gpu):
        plan = paged_plan(problem, WGMMA_ROWS, 2)
        return kernel_of("latent_chunk", problem, plan, gpu, lambda tensors: _WgmmaChunk(tensors).emit())
    plan = plan or shared_values_plan(problem, gpu)
    if not problem.is_decode:
        return kernel_of("latent_chunk", problem, plan, gpu, lambda tensors: _Kernel(tensors).emit_chunk())
    write = lambda tensors: _Kernel(tensors).emit_decode()  # noqa: E731
    return kernel_of("latent_decode", problem, plan, gpu, write, reads_early=early_reads(problem, plan))


class _Kernel:
    """Writer of the kernel."""

    def __init__(self, tensors: PagedTensors) -> None:
        self.tensors, self.is_decode = tensors, tensors.problem.is_decode
        shared = self.shared = SharedMemory()
        self.queries = (TokenHeads if self.is_decode else PagedQueries)(tensors, shared, TEAMS * TEAM_WARPS)
        self.append = self.queries.append if isinstance(self.queries, TokenHeads) else None
        self.source = PagedKeyValues(tensors, shared, _THREADS, append=self.append)
        self.columns = tensors.problem.value_size // TEAM_WARPS
        self.keys = PAGE // TEAMS if self.is_decode else PAGE
        self.scores_at = shared.reserve(_THREADS // WARP * WARP_ROWS * WARP_ROWS * 4)

    def emit_decode(self) -> None:
        """Write the launch for single tokens."""
        tensors, source = self.tensors, self.source
        # Results are stored over the pages.
        lines = PartialResults(self.shared, source.offset, TEAMS * WARP_ROWS, tensors.problem.value_size)
        assert lines.size <= tensors.plan.stages * tensors.page_bytes
        waits = self.append is None
        with tensors.launch(_THREADS, self.shared, source.initialize, min_blocks_per_sm=1, waits=waits) as place:
            if not waits:
                ptx.launch_dependents()
            self._locate(place.thread)
            if not waits:
                ptx.griddepcontrol_wait()
            tile = self._attend(row=0, key=T.bind(self.team * self.keys))
            for h in range(2):
                line = T.bind(self.team * WARP_ROWS + tirx.floordiv(tile.lane, 4) + 8 * h)
                lines.put(tile, h, line, self.column)
            barrier = ptx.block_barrier if tensors.plan.split_keys == 1 else ptx.cluster_barrier
            barrier()
            lines.store(tensors, place.thread, _THREADS, tile.softmax.factor, TEAMS)
            barrier()

    def emit_chunk(self) -> None:
        """Write the launch for a chunk."""
        tensors = self.tensors
        with tensors.launch(_THREADS, self.shared, self.source.initialize, min_blocks_per_sm=1) as place:
            self._locate(place.thread)
            row = T.bind(self.team * WARP_ROWS)
            tile = self._attend(row, key=0)
            ptx.block_barrier()  # all warps have read their queries
            store = RowStore(tensors, self.shared, self.columns)
            store.store_tile(tile, tensors.row + row, self.queries.staging(row), self.column)

    def _locate(self, thread: Expr) -> None:
        """Issue the first loads, and compute the warp's share of the work."""
        self.source.locate(thread)
        self.source.start()
        self.team = T.bind(tirx.floordiv(thread, _TEAM_THREADS))
        self.warp = T.bind(tirx.floormod(tirx.floordiv(thread, WARP), TEAM_WARPS))
        self.column = T.bind(self.warp * self.columns)

    def _attend(self, row: Expr, key: Expr) -> ScoreTile:
        """Write the loop over pages; the tile has the warp's columns of the results.

        Parameters
        ----------
        row, key : PrimExpr
            First row, and first key of each page, of the team.
        """
        tensors, source, size = self.tensors, self.source, self.tensors.problem.size
        tile = ScoreTile(tensors, self.keys, source.thread, self.columns)
        part, types = RegisterTile(WARP_ROWS), (tensors.dtype, tensors.dtype)
        # Warps that have the same keys multiply different elements of them.
        num_parts = self.keys // WARP_ROWS
        depth = size * num_parts // TEAM_WARPS
        own_key = T.bind(key + tirx.floormod(self.warp, num_parts) * WARP_ROWS)
        own_step = T.bind(tirx.floordiv(self.warp, num_parts) * (depth // 16))
        first_row = T.bind(tensors.row + row)
        lane_row = T.bind(first_row + tirx.floordiv(tile.lane, 4))
        source.begin_rows(lane_row, first_row)
        self.queries.load(source.thread)
        has_sinks = tirx.all(tensors.rank == 0, key == 0)
        tile.begin(lane_row, has_sinks)
        with T.serial(source.count) as index:
            first = T.bind(source.first_key(index) + key)
            source.wait(keys=index)
            left, right = (self.queries.tile(), row), (source.key_tile(index), own_key)
            multiply_by_rows(part, left, right, depth * 2, types, tile.lane, own_step)
            self._exchange(part, tile)
            tile.update(first, source.visible())
            tile.pack()
            tile.rescale()
            values = source.value_tile(index), key
            add_by_columns(tile.sums, tile.weights, values, self.keys, types, tile.lane, self.column)
            source.release(values=index)
        tile.softmax.finish()
        return tile

    def _exchange(self, part: RegisterTile, tile: ScoreTile) -> None:
        """Combine the parts of a team's warps to its scores: lanes read what the same lanes of other warps have."""
        parts, registers = self.keys // WARP_ROWS, local(4, "uint32")
        begin = T.bind(self.scores_at + self.team * (TEAM_WARPS * 1024) + tile.lane * 16)

        def address(warp: Expr, block: int) -> Expr:
            return self.shared.at(begin + warp * 1024 + block * 512)

        for block in range(2):
            ptx.store_shared(address(self.warp, block), [as_bits(part[block * 4 + i]) for i in range(4)])
        ptx.named_barrier(1 + self.team, _TEAM_THREADS)
        for warp in range(TEAM_WARPS):
            for block in range(2):
                ptx.load_shared([registers[i] for i in range(4)], address(warp, block))
                for i in range(4):
                    score = (warp % parts * 2 + block) * 4 + i
                    value = as_float(registers[i])
                    T.buffer_store(tile.scores.data, value if warp < parts else tile.scores[score] + value, [score])


def _fits_wgmma(problem: CachedAttentionProblem, gpu: GpuTarget) -> bool:
    """Return whether a chunk has enough rows for wgmma, columns for two warpgroups, and two pages in shared memory."""
    if gpu.tensor != "wgmma" or problem.is_decode:
        return False
    tiles = WGMMA_ROWS + 2 * PAGE
    has_room = tiles * problem.size * 2 + _EXCHANGE_BYTES <= gpu.shared_bytes
    return has_room and problem.value_size <= 512 and paged_extents(problem)[0] >= WGMMA_ROWS


class _WgmmaChunk:
    """Writer of the kernel of a chunk by wgmma."""

    def __init__(self, tensors: PagedTensors) -> None:
        self.tensors, self.threads = tensors, 2 * WARPGROUP
        shared = self.shared = SharedMemory()
        self.queries = PagedQueries(tensors, shared, self.threads // WARP, for_wgmma=True)
        self.source = PagedKeyValues(tensors, shared, self.threads, for_wgmma=True)
        self.keys, self.columns = PAGE // 2, tensors.problem.value_size // 2
        self.team = Team(shared, 2, self.keys // 4)

    def emit(self) -> None:
        """Write the launch."""
        tensors, source, team = self.tensors, self.source, self.team
        with tensors.launch(self.threads, self.shared, source.initialize, min_blocks_per_sm=1) as place:
            source.locate(place.thread)
            source.start()
            team.locate(place.thread)
            tile = ScoreTile(tensors, self.keys, place.thread, self.columns, team)
            warp_row = T.bind(tirx.floordiv(tirx.floormod(place.thread, WARPGROUP), WARP) * WARP_ROWS)
            first_row = T.bind(tensors.row + warp_row)
            lane_row = T.bind(first_row + tirx.floordiv(tile.lane, 4))
            source.begin_rows(lane_row, first_row)
            tile.begin(lane_row, has_sinks=team.member == 0)
            self.queries.load(place.thread)
            column = T.bind(team.member * self.columns)
            self._loop(tile, column)
            tile.softmax.finish()
            ptx.block_barrier()  # all warps have read the queries
            store = RowStore(tensors, self.shared, self.columns)
            store.store_tile(tile, first_row, self.queries.staging(warp_row), column)

    def _loop(self, tile: ScoreTile, column: Expr) -> None:
        """Write the loop over pages. Shared memory has no page to multiply ahead, so that products do not overlap."""
        source, dtype, operand = self.source, self.tensors.dtype, self.queries.matrix(0)
        queries, (keys, values) = operand.at(operand.begin), source.matrices()
        steps, own_key = self.tensors.problem.size // WGMMA_DEPTH, T.bind(self.team.member * self.keys)
        with T.serial(source.count) as index:
            source.wait(keys=index)
            own_keys = keys.at(source.key_tile(index).offset + own_key * CHUNK_BYTES)
            issue_products(tile.scores, queries, own_keys, steps, dtype, False, (False, False))
            ptx.wgmma_wait(0)
            tile.update(T.bind(source.first_key(index) + own_key), source.visible())
            tile.pack()
            tile.rescale()
            own_values = values.at(source.value_tile(index).offset + column * (PAGE * CHUNK_BYTES // CHUNK))
            issue_products(tile.sums, tile.weight_fragment, own_values, PAGE // WGMMA_DEPTH, dtype, True, (False, True))
            ptx.wgmma_wait(0)
            source.release(values=index)
