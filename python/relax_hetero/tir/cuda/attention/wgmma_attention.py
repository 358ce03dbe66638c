"""Attention on Hopper's tensor cores, as in FlashAttention-3: both products by wgmma, softmax in registers.

A block has one to three consumer warpgroups with 64 rows of queries each, and a producer warpgroup that copies tiles of
keys and values to a multistage pipeline in shared memory. A consumer issues the scores of the next tile before the
product with this one's values, and computes the softmax of the next during that product, or after it (other warpgroups
overlap, too). Tiles are processed from the last to the first, so that masked tiles come first.

With few queries, the blocks of a cluster split the keys. Their results are combined through distributed shared memory
in the order of blocks, so results are deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.packed_layout import SWIZZLED_BYTES
from ....encoding.problem import AttentionProblem
from ....errors import EncodingError
from ....target.gpu_target import WARP, WARPGROUP, GpuTarget
from ...core.builder import Expr, Function, ceil_div, when
from ...core.view import Coordinates
from ..core import ptx
from ..core.launch import SWIZZLED_ALIGN, SharedMemory, enable_pdl, launch, local, to_int32
from ..tile.operand_tiles import PRODUCERS, OperandTile, Source, arrive, source_of
from ..tile.register_tile import RegisterTile
from ..tile.ring import BARRIER_BYTES, Ring
from ..tile.softmax import LOG2_E, SplitSums, as_bits, average_factor, averaged
from .attention_plan import WIDTH, AttentionPlan, choose_plan
from .attention_tensors import AttentionTensors, tensor_core_unsupported_reason, tiles_of
from .row_store import RowStore
from .score_tile import ScoreTile

_PAD_FLOATS = 4
"""Floats between rows of accumulators in shared memory, to avoid bank conflicts."""


class ClusterSums:
    """Combination of results over a cluster whose blocks split the keys, in the order of blocks.

    Parameters
    ----------
    tensors : AttentionTensors
    tile : ScoreTile
        Scores of a warp, after its last keys.
    shared : SharedMemory
        Its first `size` bytes are reused.
    width : int
        Columns of accumulators, a multiple of 4.
    """

    def __init__(self, tensors: AttentionTensors, tile: ScoreTile, shared: SharedMemory, width: int) -> None:
        self.tensors, self.tile, self.shared, self.width = tensors, tile, shared, width
        self.height, self.pitch = tensors.plan.consumers * 64, width + _PAD_FLOATS

    @property
    def size(self) -> int:
        """Required bytes of shared memory."""
        return self.height * (self.pitch + 2) * 4

    def share(self, sums: RegisterTile, group: Expr, warp: Expr) -> None:
        """Store accumulators and softmax statistics of this block's keys to shared memory, over the tiles."""
        tile, height = self.tile, self.height
        ptx.named_barrier(1, self.tensors.plan.consumers * WARPGROUP)
        row_of_lane = T.bind(group * 64 + warp * 16 + tirx.floordiv(tile.lane, 4))
        for i in range(0, self.width // 2, 2):
            row = row_of_lane + i // 2 % 2 * 8
            column = i // 4 * 8 + tirx.floormod(tile.lane, 4) * 2
            target = self.shared.at((row * self.pitch + column) * 4)
            ptx.store_shared(target, [as_bits(sums[i + c]) for c in range(2)])
        with when(tirx.floormod(tile.lane, 4) == 0):
            for h in range(2):
                target = self.shared.at((height * self.pitch + (row_of_lane + 8 * h) * 2) * 4)
                ptx.store_shared(target, [as_bits(tile.softmax.row_max[h]), as_bits(tile.softmax.row_sum[h])])

    def combine(self, thread: Expr, rank: Expr, first: Expr, at: Coordinates) -> None:
        """Combine and store the block's share of the rows from `first` on, by all threads.

        The caller adds cluster barriers before and after it.
        """
        plan, result, problem = self.tensors.plan, self.tensors.result, self.tensors.problem
        height, width = self.height, int(self.tensors.sizes["e"])
        threads = PRODUCERS + plan.consumers * WARPGROUP
        quads = self.width // 4
        items = -(-height // plan.split_keys) * quads
        remote, factor = local(1, "uint32"), local(1, "float32")
        splits = SplitSums(plan.split_keys, LOG2_E * (self.tile.scale or 1.0))
        store = RowStore(self.tile, self.shared, at)
        with T.serial(-(-items // threads)) as index:
            item = T.bind(index * threads + thread)
            row = T.bind(tirx.floordiv(item, quads) * plan.split_keys + rank)
            column = T.bind(tirx.floormod(item, quads) * 4)
            result_row = T.bind(first + row)
            with when(tirx.all(row < height, result_row < to_int32(self.tensors.rows.count), column < width)):
                sums_at = T.bind(ptx.shared_address(self.shared.at((row * self.pitch + column) * 4)))
                stats_at = T.bind(ptx.shared_address(self.shared.at((height * self.pitch + row * 2) * 4)))
                for other in range(plan.split_keys):

                    def read(stats: Sequence[Expr], sums: Sequence[Expr], other: int = other) -> None:
                        for address, registers in ((stats_at, stats), (sums_at, sums)):
                            ptx.remote_address(remote[0], address, other)
                            ptx.load_remote(registers, remote[0])

                    splits.load(other, read)
                splits.add()
                total = splits.total
                T.buffer_store(factor, average_factor(splits.row_sum, problem.nan_to_zero), [0])
                for i in range(4):
                    T.buffer_store(total, averaged(total[i], factor[0], problem.nan_to_zero), [i])
                if result.is_contiguous("k") and width % 4 == 0 and result.alignment("k", 8) == 8:
                    pairs = local(2, "uint32")
                    for pair in range(2):
                        ptx.pack_pair(pairs[pair], total[2 * pair], total[2 * pair + 1], self.tensors.query.nominal)
                    position = {**at, "row": T.Cast("int64", result_row), "k": T.Cast("int64", column)}
                    ptx.store_global(T.address_of(result.data[result.address(position)]), [pairs[0], pairs[1]])
                else:
                    for i in range(4):
                        with when(column + i < width):
                            store.store_element(result_row, column + i, total[i])


REGISTERS = {1: (0, 0), 2: (40, 232), 3: (32, 160)}
"""Registers per thread of producers and consumers, by consumer warpgroups. Their total must not exceed that of the
launch (168 per thread with three warpgroups, 128 with four), or consumers would wait forever."""


def unsupported_reason(problem: AttentionProblem, gpu: GpuTarget) -> str:
    """Reason why `wgmma_attention_kernel` does not support a problem; empty if it does."""
    if gpu.tensor != "wgmma":
        return f"{gpu.arch} lacks wgmma"
    return tensor_core_unsupported_reason(problem, gpu)


def wgmma_attention_kernel(
    problem: AttentionProblem, gpu: GpuTarget, plan: AttentionPlan | None = None
) -> tirx.PrimFunc:
    """Kernel of an attention for sm_90a, one launch; `AttentionProblem` documents its parameters.

    Parameters
    ----------
    plan : AttentionPlan, optional
        Tiling, by default that of `choose_plan`.

    Raises
    ------
    EncodingError
        If the kernel does not support the problem (`unsupported_reason`).
    """
    reason = unsupported_reason(problem, gpu)
    if reason:
        raise EncodingError(f"attention on {gpu.arch}: {reason}")
    function = Function("attention", registers="local")
    with function:
        tensors = AttentionTensors.of(function, problem, plan or choose_plan(problem, gpu))
        with function.body():
            tensors.open(raw=True)
            _Kernel(tensors).emit()
    return enable_pdl(function.result)


class _Kernel:
    """Writer of the kernel."""

    def __init__(self, tensors: AttentionTensors) -> None:
        self.tensors, self.plan, self.problem = tensors, tensors.plan, tensors.problem
        sizes, plan, rows = tensors.sizes, tensors.plan, tensors.rows
        self.dtype = tensors.query.nominal
        n, d, e = sizes["n"], sizes["d"], sizes["e"]
        height = plan.consumers * 64
        is_copied = all(source_of(view, "n")[0] is Source.LINES for view in (tensors.key, tensors.value))
        self.keys = plan.keys if is_copied else max(plan.keys // 64, 1) * 64
        self.q = OperandTile.of(tensors.query, "row", height, rows.count, d)
        self.k = OperandTile.of(tensors.key, "n", self.keys, n, d)
        self.v = OperandTile.of(tensors.value, "n", self.keys, n, e, may_transpose=False)
        self.depth_steps, self.width_steps = ceil_div(d, WIDTH), ceil_div(e, WIDTH)
        self.width = ceil_div(int(e), 16) * 16
        is_whole = isinstance(n, int) and n % self.keys == 0
        self.tile = ScoreTile(tensors, self.keys, bool(self.problem.causal) or plan.split_keys > 1 or not is_whole)

    def emit(self) -> None:
        """Write the launch."""
        plan, stages = self.plan, self.plan.stages
        height = plan.consumers * 64
        shared = self.shared = SharedMemory()
        self.q_at = shared.reserve(self.q.size * max(self.depth_steps, self.width_steps), SWIZZLED_ALIGN)
        self.k_size, self.v_size = self.k.size * self.depth_steps, self.v.size * self.width_steps
        self.k_at = shared.reserve(stages * self.k_size, SWIZZLED_ALIGN)
        self.v_at = shared.reserve(stages * self.v_size, SWIZZLED_ALIGN)
        if plan.split_keys > 1:
            # The cluster's combination reuses the memory of tiles.
            self.cluster_sums = ClusterSums(self.tensors, self.tile, shared, self.width)
            shared.size = max(shared.size, self.cluster_sums.size)
        self.queries_at = shared.reserve(BARRIER_BYTES, BARRIER_BYTES)
        self.key_ring, self.value_ring = (Ring(shared, stages, PRODUCERS, plan.consumers) for _ in range(2))
        tiles, threads = self.tensors.tiles(height), PRODUCERS + plan.consumers * WARPGROUP
        with launch(
            self.tensors.blocks(height) * plan.split_keys, threads, plan.split_keys, plan.consumers > 1
        ) as place:
            self.thread, self.rank = place.thread, place.rank
            shared.open()
            block = T.bind(T.Cast("int32", place.block))
            if isinstance(tiles, int):
                self._work(block)
            else:
                with when(block < tiles * plan.split_keys):
                    self._work(block)

    # -- blocks

    def _work(self, block: Expr) -> None:
        """Write the code of a block."""
        self._locate_tile(block if self.plan.split_keys == 1 else T.bind(T.truncdiv(block, self.plan.split_keys)))
        self._set_up()
        with T.If(self.thread < PRODUCERS):
            with T.Then():
                self._produce()
            with T.Else():
                self._consume()
        if self.plan.split_keys > 1:
            ptx.cluster_barrier()
            self.cluster_sums.combine(self.thread, self.rank, self.row, self.at)
            ptx.cluster_barrier()

    def _locate_tile(self, tile: Expr) -> None:
        """Compute the rows and the range of keys of a tile."""
        plan = self.plan
        height = plan.consumers * 64
        self.row, self.at, self.at_keys = self.tensors.locate(tile, height)
        visible = self.tensors.visible(self.row, height)
        tiles = tiles_of(visible, self.keys)
        begin: Expr = 0
        if plan.split_keys > 1:
            tiles = tiles if isinstance(tiles, int) else T.bind(tiles)
            begin = T.bind(T.truncdiv(self.rank * tiles, plan.split_keys))
            tiles = T.truncdiv((self.rank + 1) * tiles, plan.split_keys) - begin
        # At least one tile, whose keys may all be masked.
        self.count = max(tiles, 1) if isinstance(tiles, int) else T.bind(T.max(tiles, 1))
        self.begin = begin
        own_end = (begin + tiles) * self.keys
        self.end = visible if plan.split_keys == 1 else T.bind(T.min(visible, own_end))
        if plan.split_keys == 1 and not isinstance(self.end, int):
            self.end = T.bind(self.end)

    @property
    def queries_full(self) -> Expr:
        """Full barrier of the queries."""
        return self.shared.at(self.queries_at)

    def _set_up(self) -> None:
        with when(self.thread == 0):
            ptx.barrier_init(self.queries_full, PRODUCERS)
            self.key_ring.initialize()
            self.value_ring.initialize()
            ptx.barrier_init_fence()
        ptx.block_barrier()
        ptx.griddepcontrol_wait()
        ptx.launch_dependents()

    def _first_key(self, step: Expr) -> Expr:
        """First key of the tile of a step, int32, from the last tile to the first."""
        return (self.begin + (self.count - 1) - step) * self.keys

    # -- producers

    def _produce(self) -> None:
        if self.plan.consumers > 1:
            ptx.set_max_registers(REGISTERS[self.plan.consumers][0], grows=False)
        row = T.bind(T.Cast("int64", self.row))
        for step in range(self.depth_steps):
            target = self.q_at + step * self.q.size
            self.q.load(self.shared, target, self.at, row, step, self.thread)
        arrive(self.queries_full, self.q.source is Source.GATHER)
        with T.serial(self.count) as number:
            first = T.bind(T.Cast("int64", self._first_key(number)))
            loads = (
                (self.key_ring, self.k, self.k_at, self.k_size),
                (self.value_ring, self.v, self.v_at, self.v_size),
            )
            for ring, tile, begin, size in loads:
                stage = ring.acquire(number)
                for step in range(size // tile.size):
                    target = begin + stage * size + step * tile.size
                    tile.load(self.shared, target, self.at_keys, first, step, self.thread)
                arrive(ring.full(stage), tile.source is Source.GATHER)

    # -- consumers

    def _consume(self) -> None:
        if self.plan.consumers > 1:
            ptx.set_max_registers(REGISTERS[self.plan.consumers][1], grows=True)
        tile = self.tile
        self.group = T.bind(self.thread // WARPGROUP - 1)
        self.member = T.bind(self.thread % WARPGROUP)
        self.warp = T.bind(self.member // WARP)
        tile.declare(self.thread)
        self.sums = RegisterTile(self.width)
        self.base = local(3, "uint64")
        ptx.matrix_descriptor(
            self.base[0], self.shared.at(self.q_at + self.group * (64 * SWIZZLED_BYTES)), self.q.leading
        )
        ptx.matrix_descriptor(self.base[1], self.shared.at(self.k_at), self.k.leading)
        ptx.matrix_descriptor(self.base[2], self.shared.at(self.v_at), self.keys * SWIZZLED_BYTES // 16)
        self._main_loop()

    def _main_loop(self) -> None:
        """Write the main loop of a consumer: scores, softmax and accumulation of values."""
        tile, count, keys, values = self.tile, self.count, self.key_ring, self.value_ring
        row = T.bind(self.row + self.group * 64 + self.warp * 16 + tirx.floordiv(tile.lane, 4))
        tile.begin(self.at, row, self.row + self.group * 64, self.end)
        self.sums.fill(0)
        tile.load_masks(self._first_key(0))
        ptx.barrier_wait(self.queries_full, 0)
        self._wait_for((keys, 0))
        self._issue_scores(0)
        ptx.wgmma_wait(0)
        self._release(keys, 0)
        tile.update(self._first_key(0))
        tile.pack(self.dtype)
        if not (isinstance(count, int) and count == 1):
            with T.serial(count - 1) as number:
                next_index = T.bind(number + 1)
                first = T.bind(self._first_key(next_index))
                if self.plan.consumers > 1:
                    # One wait for both, so that products are issued back to back.
                    self._wait_for((keys, next_index), (values, number))
                    self._issue_scores(next_index)
                else:
                    self._wait_for((keys, next_index))
                    self._issue_scores(next_index)
                    self._wait_for((values, number))
                self._issue_values(number)
                tile.load_masks(first)
                ptx.wgmma_wait(1)
                self._release(keys, next_index)
                if self.plan.overlaps_own_product:
                    tile.update(first)
                    ptx.force_evaluation(tile.softmax.row_sum[0] + tile.softmax.row_sum[1])
                ptx.wgmma_wait(0)
                self._release(values, number)
                if not self.plan.overlaps_own_product:
                    tile.update(first)
                tile.pack(self.dtype)
                self.sums.scale_rows(tile.softmax.rescale)
        last = count - 1 if isinstance(count, int) else T.bind(count - 1)
        self._wait_for((values, last))
        self._issue_values(last)
        ptx.wgmma_wait(0)
        tile.softmax.finish()
        if self.plan.split_keys > 1:
            self.cluster_sums.share(self.sums, self.group, self.warp)
        else:
            self._store()

    def _wait_for(self, *tiles: tuple[Ring, Expr]) -> None:
        """Wait for tiles of keys or values, given their rings and indices."""
        for ring, index in tiles:
            ring.wait(index)
        # Writes of cp.async belong to the generic proxy, wgmma reads by the async proxy.
        ptx.async_proxy_fence()

    def _issue_scores(self, index: Expr) -> None:
        """Issue the product of queries and a tile of keys."""
        stage = self.key_ring.stage(index)
        keys = T.bind(self.base[1] + T.Cast("uint64", stage) * T.uint64(self.k_size // 16))
        ptx.wgmma_fence()
        for i in range(ceil_div(int(self.tensors.sizes["d"]), 16)):
            step, part = divmod(i, WIDTH // 16)
            ptx.wgmma(
                self.tile.scores.registers,
                self.base[0] + T.uint64(step * self.q.size // 16 + part * self.q.advance),
                keys + T.uint64(step * self.k.size // 16 + part * self.k.advance),
                (self.dtype, self.dtype),
                T.uint32(1 if i else 0),
                (self.q.is_transposed, self.k.is_transposed),
            )
        ptx.wgmma_commit()

    def _issue_values(self, index: Expr) -> None:
        """Issue the product of probabilities and a tile of values."""
        stage = self.value_ring.stage(index)
        values = T.bind(self.base[2] + T.Cast("uint64", stage) * T.uint64(self.v_size // 16))
        ptx.wgmma_fence()
        for i in range(self.keys // 16):
            ptx.wgmma(
                self.sums.registers,
                [self.tile.weights[4 * i + r] for r in range(4)],
                values + T.uint64(i * 16 * SWIZZLED_BYTES // 16),
                (self.dtype, self.dtype),
                T.uint32(1),
                transposed=(False, True),
            )
        ptx.wgmma_commit()

    def _release(self, ring: Ring, index: Expr) -> None:
        """Release the stage of a tile of keys or values."""
        with when(self.member == 0):
            ring.release(index)

    # -- results

    def _store(self) -> None:
        """Normalize and store the warpgroup's rows, staged in the queries' shared memory."""
        ptx.warpgroup_barrier(1 + self.group)  # all warps have read their queries
        row_in_block = T.bind(self.group * 64 + self.warp * 16)
        staging = self.q_at + row_in_block * SWIZZLED_BYTES
        store = RowStore(self.tile, self.shared, self.at)
        store.emit(self.sums, self.row + row_in_block, staging, self.q.rows * SWIZZLED_BYTES)
