"""Attention on Hopper's tensor cores: scores by wgmma, softmax in registers, powers from registers into wgmma.

A block has 64 rows of queries for each of its one to three warpgroups of consumers, and a warpgroup of producers, which
brings tiles of keys and values to shared memory, a ring of stages ahead. A consumer issues the scores of the next tile
before the values of this one, and computes the softmax of the next while tensor cores add up this one's values, or
when they have: warpgroups, too, fill each other's gaps. Tiles are taken from the last to the first, so that the ones
with hidden keys come first.

Where queries are few, the blocks of a cluster share the keys. Their sums are put together through the shared memory of
all of them, in the order of the blocks: equal inputs give equal bits.
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
from ..core.launch import SWIZZLED_ALIGN, SharedMemory, enable_pdl, launch, local
from ..matmul.operand_tiles import PRODUCERS, OperandTile, Source, source_of
from ..tile.register_tile import RegisterTile
from ..tile.ring import BARRIER_BYTES, Ring
from ..tile.softmax import LOG2_E, SplitSums, as_bits, average_factor, averaged
from .attention_plan import WIDTH, AttentionPlan, choose_plan
from .attention_tensors import AttentionTensors, tensor_core_unsupported_reason, tiles_of, to_int32
from .row_store import RowStore
from .score_tile import ScoreTile

# Sums of the blocks of a cluster, each of its own keys, put together through the shared memory of all of them.

_PITCH = 4
"""Floats between the rows of sums: rows begin in different banks."""


class ClusterSums:
    """The end of an attention whose keys the blocks of a cluster share, in the order of the blocks.

    Parameters
    ----------
    tensors : AttentionTensors
    tile : ScoreTile
        Scores of a warp, after its last keys.
    shared : SharedMemory
        Its first `size` bytes are free by then.
    width : int
        Columns of sums, a multiple of 4.
    """

    def __init__(self, tensors: AttentionTensors, tile: ScoreTile, shared: SharedMemory, width: int) -> None:
        self.tensors, self.tile, self.shared, self.width = tensors, tile, shared, width
        self.height, self.pitch = tensors.plan.consumers * 64, width + _PITCH

    @property
    def size(self) -> int:
        """Bytes of shared memory."""
        return self.height * (self.pitch + 2) * 4

    def share(self, sums: RegisterTile, group: Expr, warp: Expr) -> None:
        """Sums and maxima of this block's keys into shared memory, in the place of all tiles."""
        tile, height = self.tile, self.height
        ptx.named_barrier(1, self.tensors.plan.consumers * WARPGROUP)
        own = T.bind(group * 64 + warp * 16 + tirx.floordiv(tile.lane, 4))
        for i in range(0, self.width // 2, 2):
            row = own + i // 2 % 2 * 8
            column = i // 4 * 8 + tirx.floormod(tile.lane, 4) * 2
            target = self.shared.at((row * self.pitch + column) * 4)
            ptx.store_shared(target, [as_bits(sums[i + c]) for c in range(2)])
        with when(tirx.floormod(tile.lane, 4) == 0):
            for h in range(2):
                target = self.shared.at((height * self.pitch + (own + 8 * h) * 2) * 4)
                ptx.store_shared(target, [as_bits(tile.softmax.row_max[h]), as_bits(tile.softmax.row_sum[h])])

    def put_together(self, thread: Expr, rank: Expr, first: Expr, at: Coordinates) -> None:
        """Write the block's share of the rows from `first` on: averages over the keys of all blocks.

        All threads take part. Barriers of the cluster stand before and after it.
        """
        plan, result, problem = self.tensors.plan, self.tensors.result, self.tensors.problem
        height, width = self.height, int(self.tensors.sizes["e"])
        threads = PRODUCERS + plan.consumers * WARPGROUP
        quads = self.width // 4
        items = -(-height // plan.split_keys) * quads
        remote, factor = local(1, "uint32"), local(1, "float32")
        parts = SplitSums(plan.split_keys, LOG2_E * (self.tile.scale or 1.0))
        store = RowStore(self.tensors, self.tile, self.shared, at)
        with T.serial(-(-items // threads)) as turn:
            item = T.bind(turn * threads + thread)
            row = T.bind(tirx.floordiv(item, quads) * plan.split_keys + rank)
            column = T.bind(tirx.floormod(item, quads) * 4)
            own = T.bind(first + row)
            with when(tirx.all(row < height, own < to_int32(self.tensors.rows.count), column < width)):
                sums_at = T.bind(ptx.shared_address(self.shared.at((row * self.pitch + column) * 4)))
                facts_at = T.bind(ptx.shared_address(self.shared.at((height * self.pitch + row * 2) * 4)))
                for other in range(plan.split_keys):

                    def read(facts: Sequence[Expr], sums: Sequence[Expr], other: int = other) -> None:
                        for address, registers in ((facts_at, facts), (sums_at, sums)):
                            ptx.remote_address(remote[0], address, other)
                            ptx.load_remote(registers, remote[0])

                    parts.load(other, read)
                parts.add()
                total = parts.total
                T.buffer_store(factor, average_factor(parts.row_sum, problem.nan_to_zero), [0])
                for i in range(4):
                    T.buffer_store(total, averaged(total[i], factor[0], problem.nan_to_zero), [i])
                if result.is_contiguous("k") and width % 4 == 0 and result.alignment("k", 8) == 8:
                    pairs = local(2, "uint32")
                    for pair in range(2):
                        ptx.pack_pair(pairs[pair], total[2 * pair], total[2 * pair + 1], self.tensors.query.nominal)
                    place = {**at, "row": T.Cast("int64", own), "k": T.Cast("int64", column)}
                    ptx.store_global(T.address_of(result.data[result.address(place)]), [pairs[0], pairs[1]])
                else:
                    for i in range(4):
                        with when(column + i < width):
                            store.one(own, column + i, total[i])


REGISTERS = {1: (0, 0), 2: (40, 232), 3: (32, 160)}
"""Registers of producers and consumers, by warpgroups of consumers: no more in all than a launch gives, 168 a thread
to three warpgroups, 128 to four. For more, consumers would wait for ever."""


def unsupported_reason(problem: AttentionProblem, gpu: GpuTarget) -> str:
    """Why `wgmma_attention_kernel` cannot solve a problem; empty where it can."""
    if gpu.tensor != "wgmma":
        return f"{gpu.arch} lacks wgmma"
    return tensor_core_unsupported_reason(problem, gpu)


def wgmma_attention_kernel(
    problem: AttentionProblem, gpu: GpuTarget, plan: AttentionPlan | None = None
) -> tirx.PrimFunc:
    """The kernel of an attention for sm_90a, one launch; `AttentionProblem` says its parameters, it has no scratch.

    Parameters
    ----------
    plan : AttentionPlan, optional
        How work is cut; by default as `choose_plan` finds it.

    Raises
    ------
    EncodingError
        If `unsupported_reason` says why the problem is not one for this kernel.
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
    """State that the parts of a kernel share while it is written."""

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
        self.is_causal = bool(self.problem.causal)
        is_masked = self.is_causal or plan.split_keys > 1 or not (isinstance(n, int) and n % self.keys == 0)
        self.tile = ScoreTile(self.problem, tensors.masks, rows, self.keys, is_masked)

    def emit(self) -> None:
        """The launch."""
        plan, stages = self.plan, self.plan.stages
        height = plan.consumers * 64
        shared = self.shared = SharedMemory()
        self.q_at = shared.reserve(self.q.size * max(self.depth_steps, self.width_steps), SWIZZLED_ALIGN)
        self.k_size, self.v_size = self.k.size * self.depth_steps, self.v.size * self.width_steps
        self.k_at = shared.reserve(stages * self.k_size, SWIZZLED_ALIGN)
        self.v_at = shared.reserve(stages * self.v_size, SWIZZLED_ALIGN)
        if plan.split_keys > 1:
            # Sums of the blocks of a cluster take the place of all tiles.
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

    # -- which part of the work

    def _work(self, block: Expr) -> None:
        """All that a block does."""
        self._take(block if self.plan.split_keys == 1 else T.bind(T.truncdiv(block, self.plan.split_keys)))
        self._set_up()
        with T.If(self.thread < PRODUCERS):
            with T.Then():
                self._produce()
            with T.Else():
                self._consume()
        if self.plan.split_keys > 1:
            ptx.cluster_barrier()
            self.cluster_sums.put_together(self.thread, self.rank, self.row, self.at)
            ptx.cluster_barrier()

    def _take(self, tile: Expr) -> None:
        """Which rows and keys a tile of rows is of."""
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
        # One tile at least, of which no key counts.
        self.count = max(tiles, 1) if isinstance(tiles, int) else T.bind(T.max(tiles, 1))
        self.begin = begin
        own_end = (begin + tiles) * self.keys
        self.end = visible if plan.split_keys == 1 else T.bind(T.min(visible, own_end))
        if plan.split_keys == 1 and not isinstance(self.end, int):
            self.end = T.bind(self.end)

    @property
    def queries_there(self) -> Expr:
        """The barrier of queries that consumers wait for."""
        return self.shared.at(self.queries_at)

    def _set_up(self) -> None:
        with when(self.thread == 0):
            ptx.barrier_init(self.queries_there, PRODUCERS)
            self.key_ring.initialize()
            self.value_ring.initialize()
            ptx.barrier_init_fence()
        ptx.block_barrier()
        ptx.griddepcontrol_wait()
        ptx.launch_dependents()

    def _first_key(self, step: Expr) -> Expr:
        """The first key of the tile of a step, int32: from the last tile to the first."""
        return (self.begin + (self.count - 1) - step) * self.keys

    # -- producers

    def _produce(self) -> None:
        if self.plan.consumers > 1:
            ptx.set_max_registers(REGISTERS[self.plan.consumers][0], grows=False)
        row = T.bind(T.Cast("int64", self.row))
        for step in range(self.depth_steps):
            target = self.q_at + step * self.q.size
            self.q.load(self.shared, target, self.at, row, step, self.thread)
        self._arrive(self.q, self.queries_there)
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
                self._arrive(tile, ring.full(stage))

    def _arrive(self, tile: OperandTile, barrier: Expr) -> None:
        if tile.source is Source.GATHER:
            ptx.async_proxy_fence()
            ptx.barrier_arrive(barrier)
        else:
            ptx.barrier_arrive_after_copies(barrier)

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
        self.seen = local(2, "int32")
        self.base = local(3, "uint64")
        ptx.matrix_descriptor(
            self.base[0], self.shared.at(self.q_at + self.group * (64 * SWIZZLED_BYTES)), self.q.leading
        )
        ptx.matrix_descriptor(self.base[1], self.shared.at(self.k_at), self.k.leading)
        ptx.matrix_descriptor(self.base[2], self.shared.at(self.v_at), self.keys * SWIZZLED_BYTES // 16)
        self._attend()

    def _attend(self) -> None:
        """A warpgroup's rows: scores, softmax and sums of values, tile by tile."""
        tile, count, keys, values = self.tile, self.count, self.key_ring, self.value_ring
        row = T.bind(self.row + self.group * 64 + self.warp * 16 + tirx.floordiv(tile.lane, 4))
        for h in range(2):
            T.buffer_store(self.seen, self._seen(row + 8 * h), [h])
        least = self._seen(self.row + self.group * 64) if self.tensors.rows.heads_per_tile == 1 else self._seen(0)
        least = T.bind(least) if not isinstance(least, int) else least
        tile.begin(self.at, row, [self.seen[0], self.seen[1]], least)
        self.sums.fill(0)
        tile.load_masks(self._first_key(0))
        ptx.barrier_wait(self.queries_there, 0)
        self._wait_for((keys, 0))
        self._scores(0)
        ptx.wgmma_wait(0)
        self._release(keys, 0)
        tile.update(self._first_key(0))
        tile.pack(self.dtype)
        if not (isinstance(count, int) and count == 1):
            with T.serial(count - 1) as number:
                following = T.bind(number + 1)
                first = T.bind(self._first_key(following))
                if self.plan.consumers > 1:
                    # One stop for both: products follow each other without a gap.
                    self._wait_for((keys, following), (values, number))
                    self._scores(following)
                else:
                    self._wait_for((keys, following))
                    self._scores(following)
                    self._wait_for((values, number))
                self._values(number)
                tile.load_masks(first)
                ptx.wgmma_wait(1)
                self._release(keys, following)
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
        self._values(last)
        ptx.wgmma_wait(0)
        tile.softmax.finish()
        if self.plan.split_keys > 1:
            self.cluster_sums.share(self.sums, self.group, self.warp)
        else:
            self._store()

    def _seen(self, row: Expr) -> Expr:
        """How many keys a row sees, of those that the block has."""
        if not self.is_causal:
            return self.end
        return T.min(self.end, self.tensors.rows.query(row) + (1 + self.tensors.ahead))

    def _wait_for(self, *tiles: tuple[Ring, Expr]) -> None:
        """Wait for tiles of keys and values, each with its turn."""
        for ring, turn in tiles:
            ring.wait(turn)
        # What came by `copy_async` was written as by a thread, not as by wgmma's own kind of access.
        ptx.async_proxy_fence()

    def _scores(self, turn: Expr) -> None:
        """Issue the scores of a tile that is there."""
        stage = self.key_ring.stage(turn)
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

    def _values(self, turn: Expr) -> None:
        """Issue the sums of a tile's values, which are there."""
        stage = self.value_ring.stage(turn)
        values = T.bind(self.base[2] + T.Cast("uint64", stage) * T.uint64(self.v_size // 16))
        ptx.wgmma_fence()
        for i in range(self.keys // 16):
            ptx.wgmma_of_registers(
                self.sums.registers,
                [self.tile.weights[4 * i + r] for r in range(4)],
                values + T.uint64(i * 16 * SWIZZLED_BYTES // 16),
                (self.dtype, self.dtype),
                T.uint32(1),
                True,
            )
        ptx.wgmma_commit()

    def _release(self, ring: Ring, turn: Expr) -> None:
        """The stage of a tile of keys or values is free."""
        with when(self.member == 0):
            ring.release(turn)

    # -- results

    def _store(self) -> None:
        """Averages of the warpgroup's rows, by way of the queries' place in shared memory."""
        ptx.warpgroup_barrier(1 + self.group)  # all warps have read their queries
        within = T.bind(self.group * 64 + self.warp * 16)
        place = self.q_at + within * SWIZZLED_BYTES
        store = RowStore(self.tensors, self.tile, self.shared, self.at)
        store.emit(self.sums, self.row + within, place, self.q.rows * SWIZZLED_BYTES)
