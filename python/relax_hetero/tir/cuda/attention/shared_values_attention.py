"""Paged attention whose keys are the values (multi-head latent attention), of single tokens and of chunks.

All heads read the same wide keys, so a page is loaded once, as keys and as values, and heads of a token are rows of a
tile. Accumulators as wide as a key do not fit the registers of a warp: four warps, a team, have the same 16 rows. Each
of them multiplies a part of the scores, exchanges it through shared memory, and accumulates a quarter of the columns
of values. The online softmax is that of all scores of the team, in each of its warps.

The teams of a chunk have different rows. Those of a decode step have halves of the keys of a page; the pages are
distributed over the blocks of a cluster, and the results of teams and blocks are combined in a fixed order.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.pages import PAGE
from ....encoding.problem import CachedAttentionProblem
from ....target.gpu_target import WARP, GpuTarget
from ...core.builder import Expr
from ..core import ptx
from ..core.launch import SharedMemory, local
from ..tile.register_tile import RegisterTile
from ..tile.shared_tile import add_by_columns, multiply_by_rows
from ..tile.softmax import as_bits, as_float
from .attention_plan import TEAM_WARPS, TEAMS, WARP_ROWS, AttentionPlan, shared_values_plan
from .attention_tensors import READ_EARLY, PagedTensors, kernel_of, require_supported, unsupported_reason
from .decode_attention import TokenHeads
from .key_values import PagedKeyValues
from .queries import PagedQueries
from .row_store import PartialResults, RowStore
from .score_tile import ScoreTile

_THREADS = TEAMS * TEAM_WARPS * WARP
_TEAM_THREADS = TEAM_WARPS * WARP


def shared_values_kernel(
    problem: CachedAttentionProblem, gpu: GpuTarget, plan: AttentionPlan | None = None
) -> tirx.PrimFunc:
    """Kernel of a paged attention with shared values; `CachedAttentionProblem` documents its parameters.

    New keys must be in their pages already, unless a block has all heads of a token that share its key.

    Raises
    ------
    EncodingError
        If the kernel does not support the problem (`unsupported_reason`).
    """
    require_supported(problem, gpu, unsupported_reason(problem, gpu))
    plan = plan or shared_values_plan(problem, gpu)
    if problem.rows != "decode":
        return kernel_of("latent_chunk", problem, plan, gpu, lambda tensors: _Kernel(tensors).emit_chunk())
    early = READ_EARLY if plan.heads_per_tile == problem.group else ()
    write = lambda tensors: _Kernel(tensors).emit_decode()  # noqa: E731
    return kernel_of("latent_decode", problem, plan, gpu, write, reads_early=early)


class _Kernel:
    """Writer of the kernel."""

    def __init__(self, tensors: PagedTensors) -> None:
        self.tensors, self.is_decode = tensors, tensors.problem.rows == "decode"
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
