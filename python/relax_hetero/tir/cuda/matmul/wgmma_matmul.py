"""Matrix products on Hopper's tensor cores (wgmma): one definition for all types, layouts, tails and epilogues.

A block has a producer warpgroup and one or two consumer warpgroups. Producers copy tiles of both operands to a
multistage pipeline in shared memory; each consumer multiplies 64 rows by all columns of the tile (with swapped operands
all rows by some columns), applies the epilogue and stores. Blocks are persistent: block b has the tiles b, b + blocks,
..., rasterized so that concurrent tiles share rows and columns in L2.

Where tiles are too few for the GPU, the blocks of a cluster split the k of a tile. Their accumulators are added in the
order of blocks through distributed shared memory, so results are deterministic.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.packed_layout import SWIZZLED_BYTES
from ....encoding.problem import MatmulProblem, SentSum
from ....errors import EncodingError
from ....target.element_types import TF32, bytes_of
from ....target.gpu_target import WARP, WARPGROUP, GpuTarget
from ...core.builder import Expr, Function, ceil_div, int64, materialize, when
from ...core.view import Coordinates
from ...core.work_split import unravel
from ..all_reduce import SENT_TILE, send_tile
from ..core import ptx
from ..core.launch import (
    LATE_WAIT,
    SWIZZLED_ALIGN,
    SharedMemory,
    at_least_one,
    enable_pdl,
    launch,
    local,
    to_int32,
    unrolled,
    wait_late,
)
from ..core.operand import GpuOperand
from ..tile.batches import Batches
from ..tile.cluster_reduction import ClusterReduction
from ..tile.fragment_store import SWAPPED_COLUMNS, FragmentStore
from ..tile.operand_tiles import (
    MIN_LINE_ALIGNMENT,
    PACKED_ROWS,
    PRODUCERS,
    OperandTile,
    Source,
    StageTile,
    arrive,
    source_of,
)
from ..tile.register_tile import WARP_ROWS, sums_dtype
from ..tile.ring import Ring, RingPosition
from .product_parameters import ProductParameters
from .wgmma_tiling import RASTERIZATION_GROUP_M, Tiling, choose_tiling, reads_rows

_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 40, 232  # per thread: 128 * 40 + 256 * 232 <= 65,536
_SENDING_REGISTERS = 72, 216
"""The same where some producers send tiles."""
_SENDERS = 64
"""Threads of the producer warpgroup that send tiles, where it does."""
_STORED_BARRIER = 8
"""Named barrier at which consumers and senders meet when a tile is stored."""
_MAX_PREFETCH_ROWS = 256
_MAX_PREFETCH_BYTES = 6 << 20
"""Bytes of weights that a launch prefetches into L2 before it waits for previous launches: an eighth of L2. On an H200,
BERT-base with 128 tokens in float16 takes 254 us with prefetching, 264 without, and 286 without dependent launch."""
_MIN_REALLOCATING_SUMS = 128  # accumulators per thread from which consumers take registers of the producers


def unsupported_reason(problem: MatmulProblem, gpu: GpuTarget) -> str:
    """Reason why `wgmma_matmul_kernel` does not support a problem; empty if it does."""
    if gpu.tensor != "wgmma":
        return f"{gpu.arch} lacks wgmma"
    return tensor_core_unsupported_reason(problem, gpu)


def tensor_core_unsupported_reason(problem: MatmulProblem, gpu: GpuTarget) -> str:
    """Reason why no tensor core kernel supports a problem; empty if one does."""
    left, right, acc = problem.lhs.dtype, problem.rhs.dtype, problem.acc_dtype
    rounded = {"float32": TF32} if problem.tf32 else {}
    if not gpu.multiplies(rounded.get(left, left), rounded.get(right, right), acc):
        return f"element types {left} * {right} -> {acc} are not multiplied by the tensor cores of {gpu.arch}"
    for operand, names in ((problem.lhs, "mk"), (problem.rhs, "kn"), (problem.result, "mn")):
        if not set(names) <= set(operand.index_map):
            return f"an operand has the dimensions {operand.index_map}, expected {tuple(names)} among them"
    if problem.rows is not None:
        return "the product is fused with a row program, which tensor core kernels do not support"
    if problem.lhs.layout.inner_dims or problem.result.layout.inner_dims:
        return f"left operand and result are row-major, found {problem.lhs.layout} and {problem.result.layout}"
    if 0 in (*problem.lhs.shape, *problem.rhs.shape):
        return "an extent is 0"
    layout = problem.rhs.layout
    if layout.inner_dims:
        tiled = [problem.rhs.index_map[d] for d in layout.inner_dims]
        tile = (PACKED_ROWS, SWIZZLED_BYTES // bytes_of(right))
        if tiled != ["n", "k"] or layout.inner_tiles != tile or not layout.swizzle:
            return f"right operand is stored as {layout}, expected tiles n:{tile[0]}, k:{tile[1]}, swizzled"
        if not isinstance(problem.rhs.size("n"), int) or not isinstance(problem.rhs.size("k"), int):
            return "a packed right operand has symbolic extents"
    return ""


def wgmma_matmul_kernel(problem: MatmulProblem, gpu: GpuTarget, tiling: Tiling | None = None) -> tirx.PrimFunc:
    """Kernel of a matrix product for sm_90a; `MatmulProblem` documents its parameters.

    Parameters
    ----------
    tiling : Tiling, optional
        Tiling, by default that of `choose_tiling`.

    Raises
    ------
    EncodingError
        If the kernel does not support the problem (`unsupported_reason`).
    """
    reason = unsupported_reason(problem, gpu)
    if reason:
        raise EncodingError(f"matmul on {gpu.arch}: {reason}")
    function = Function("matmul", registers="local")
    with function:
        parameters = ProductParameters.declare(function, problem)
        sizes, batches = parameters.sizes, parameters.batches
        with function.body():
            store = parameters.open(gpu)
            lhs, rhs = parameters.lhs, parameters.rhs
            sources = source_of(lhs, "m")[0], source_of(rhs, "n")[0]
            may_swap = sources == (Source.LINES, Source.PACKED)
            tiling = tiling or choose_tiling(
                problem, gpu, sizes, list(batches.extents.values()), Source.GATHER in sources, may_swap
            )
            senders = Senders.of(parameters)
            if senders and not _is_sent(tiling):
                raise EncodingError(f"matmul on {gpu.arch}: found {tiling}, expected tiles of {SENT_TILE} to be sent")
            producers = PRODUCERS - _SENDERS if senders else PRODUCERS
            left = OperandTile.of(lhs, "m", tiling.rows, sizes[0], sizes[2], producers)
            right = OperandTile.of(rhs, "n", tiling.columns, sizes[1], sizes[2], producers)
            product = WgmmaProduct(left, right, store, tiling, sizes, batches, reads_rows(problem), senders)
            product.emit()
    kernel = enable_pdl(parameters.tied(function.result), product.read_early)
    return kernel.with_attr(LATE_WAIT, [0, 1]) if product.may_wait_late else kernel


def sends_tiles(problem: MatmulProblem, gpu: GpuTarget) -> bool:
    """Return whether a product's kernel can send tiles of `SENT_TILE` to other GPUs while it computes other tiles."""
    lhs, rhs, result = problem.lhs, problem.rhs, problem.result
    sizes = lhs.size("m"), rhs.size("n"), lhs.size("k")
    if (lhs.index_map, result.index_map, result.dtype) != (("m", "k"), ("m", "n"), "float32"):
        return False
    is_static = all(isinstance(size, int) for size in sizes)
    if not is_static or not rhs.layout.inner_dims or unsupported_reason(problem, gpu):
        return False
    if sizes[2] * bytes_of(lhs.dtype) % MIN_LINE_ALIGNMENT:  # gathered operands have other tilings
        return False
    tiling = choose_tiling(problem, gpu, sizes, [], False, True)
    tiles = ceil_div(sizes[0], tiling.rows) * ceil_div(sizes[1], tiling.columns)
    return _is_sent(tiling) and tiling.blocks < tiles


def _is_sent(tiling: Tiling) -> bool:
    """Return whether tiles are those that senders send."""
    is_whole = not tiling.swap_ab and tiling.cluster_split_k == tiling.blocks_per_sm == 1
    return is_whole and (tiling.rows, tiling.columns) == SENT_TILE


class Senders:
    """Warps of the producer warpgroup that send tiles to other GPUs while the consumers compute the next ones.

    The tiles of this GPU's own rows, which it adds itself, are the last ones, apart from those of a group of row tiles
    (`RASTERIZATION_GROUP_M`) that has rows of both.

    Parameters
    ----------
    sent : SentSum
    shape : tuple of int
        Rows and columns of the result.
    result, addresses : GpuOperand
        Opened.
    """

    def __init__(self, sent: SentSum, shape: tuple[int, int], result: GpuOperand, addresses: GpuOperand) -> None:
        self._sent, self._shape, self._result, self._addresses = sent, shape, result, addresses
        self.group = shape[0] // sent.ranks // SENT_TILE[0]
        """Row tiles of a GPU's rows."""
        self.first_row_tile = (sent.rank + 1) * self.group
        """Row tile of the first tile: that after this GPU's rows."""

    @staticmethod
    def of(parameters: ProductParameters) -> Senders | None:
        """Senders of an opened kernel's parameters; None if it sends nothing."""
        sent, addresses, (m, n, _) = parameters.problem.sent, parameters.addresses, parameters.sizes
        if sent is None or addresses is None:
            return None
        addresses.open()
        return Senders(sent, (m, n), parameters.writer.result, addresses)

    def send(self, origin: tuple[Expr, Expr]) -> None:
        """Write that the threads send a tile."""
        pointers = T.address_of(self._result.data[int64(0)]), T.address_of(self._addresses.data[int64(0)])
        send_tile(self._sent, self._shape, pointers, origin)


class WgmmaProduct:
    """Writer of a product's launch.

    Parameters
    ----------
    left : StageTile
    right : OperandTile
    store : FragmentStore
        Opened.
    tiling : Tiling
    sizes : tuple of PrimExpr or int
        Extents of m, n and k.
    batches : Batches
    reads_rows : bool
        True if the epilogue reads an operand as large as the result.
    senders : Senders, optional
        Threads that send tiles to other GPUs.
    """

    def __init__(
        self,
        left: StageTile,
        right: OperandTile,
        store: FragmentStore,
        tiling: Tiling,
        sizes: tuple[Expr, Expr, Expr],
        batches: Batches,
        reads_rows: bool = False,
        senders: Senders | None = None,
    ) -> None:
        self.senders = senders
        self.left, self.right, self.store, self.tiling, self.batches = left, right, store, tiling, batches
        self.reads_rows = reads_rows
        self.consumers = tiling.consumers
        self.swap_ab = tiling.swap_ab
        # Column blocks of a consumer, and accumulators of each.
        self.blocks = tiling.columns // 64 // self.consumers if self.swap_ab else 1
        # Bytes of the rows of one instruction.
        self.block_bytes = PACKED_ROWS * (right.step_bytes if self.swap_ab else SWIZZLED_BYTES)
        self.registers = (tiling.rows if self.swap_ab else tiling.columns) // 2
        # TVM lacks integer wgmma with 256 columns.
        is_integer = sums_dtype(left.view.nominal) == "uint32"
        self.issued = self.registers // 2 if is_integer and self.registers > 192 // 2 else self.registers
        if not right.is_swizzled and not tiling.swap_ab:
            # Packed tiles have 64 rows each.
            self.issued = PACKED_ROWS // 2
        m, n, k = sizes
        self.row_tiles = to_int32(ceil_div(m, tiling.rows))
        self.column_tiles = to_int32(ceil_div(n, tiling.columns))
        # If k may be 0, one step of zeros initializes the accumulators.
        self.steps = ceil_div(k, left.step) if isinstance(k, int) else T.max(to_int32(ceil_div(k, left.step)), 1)
        self.tiles = self.row_tiles * self.column_tiles * to_int32(batches.count)
        self.first: tuple[Coordinates, Expr, Expr] | None = None
        self.num_early_steps = 0  # k-steps whose weights are loaded before the producers begin
        self.reallocates_registers = self.blocks * self.registers >= _MIN_REALLOCATING_SUMS

    @property
    def read_early(self) -> list[int]:
        """Operands loaded before previous launches have ended: packed weights, if a static grid has no empty blocks."""
        return [1] if self.right.source is Source.PACKED and isinstance(self.tiles, int) else []

    @property
    def may_wait_late(self) -> bool:
        """True if the kernel may wait for the previous launch in its epilogue, which reads a result of that.

        So a product whose left operand is older, such as the second of a gated feed-forward network, fills the
        multiprocessors that the last wave of tiles of the first product leaves idle.
        """
        return self.reads_rows and bool(self.read_early) and not self.has_one_tile and self.senders is None

    @property
    def prefetches(self) -> bool:
        """True if all weights of a tile are prefetched then, not only those of the first steps.

        Products with many rows are compute-bound, and prefetching would delay the loads of the previous launch.
        """
        rows = self.row_tiles * self.tiling.rows
        return bool(self.read_early) and self.right.is_swizzled and rows <= _MAX_PREFETCH_ROWS

    @property
    def has_one_tile(self) -> bool:
        """True if every block has exactly one tile."""
        return isinstance(self.tiles, int) and self.tiles == self.tiling.blocks // self.tiling.cluster_split_k

    def emit(self) -> None:
        """Write the launch."""
        tiling = self.tiling
        shared = self.shared = SharedMemory()
        stages = shared.reserve(tiling.stages * (self.left.size + self.right.size), SWIZZLED_ALIGN)
        self.left_at, self.right_at = stages, stages + tiling.stages * self.left.size
        if tiling.cluster_split_k > 1:
            # The cluster reduction reuses the memory of stages.
            shared.size = max(shared.size, stages + tiling.rows * tiling.columns * 4)
        part = (tiling.rows if self.swap_ab else tiling.columns) // tiling.cluster_split_k
        teams = self.consumers if self.swap_ab else self.consumers * (WARPGROUP // WARP)
        tile = (tiling.rows, tiling.columns)
        self.store.plan(shared, tile, teams, tiling.epilogue_columns, self.swap_ab, not self.has_one_tile)
        # All producers arrive when their copies are complete, and once more for the bytes of bulk copies.
        producers = self.left.threads + int(self.right.source is Source.PACKED)
        self.ring = Ring(shared, tiling.stages, producers, self.consumers)
        threads = PRODUCERS + self.consumers * WARPGROUP
        # 0 blocks: one cluster per tile of a symbolic number.
        blocks = tiling.blocks or at_least_one(int64(self.tiles)) * tiling.cluster_split_k
        blocks_per_sm = tiling.blocks_per_sm if tiling.blocks_per_sm > 1 else 0
        with launch(blocks, threads, tiling.cluster_split_k, self.reallocates_registers, blocks_per_sm) as place:
            self.block, self.rank, self.thread = place.block, place.rank, place.thread
            shared.open()
            if self.prefetches:
                self._prefetch()
            with when(place.thread == 0):
                self.ring.initialize()
                ptx.barrier_init_fence()
            ptx.block_barrier()
            if self.read_early:
                self._load_early()
            # Other operands, and the result's memory, may be in use by previous launches until here.
            ptx.griddepcontrol_wait()
            ptx.launch_dependents()
            with T.If(place.thread < PRODUCERS):
                with T.Then():
                    self._produce_and_send()
                with T.Else():
                    self._consume(part)

    def _each_tile(self, body: Callable[[Expr, Coordinates, Expr, Expr], None]) -> None:
        """Write `body` for every tile of the block: its index, batch, first row and first column."""
        tiling, first_tile = self.tiling, self._first_tile()
        clusters = tiling.blocks // tiling.cluster_split_k
        if clusters == 0:
            with when(to_int32(first_tile) < self.tiles):
                body(0, *self._tile_origin(to_int32(first_tile)))
        elif self.has_one_tile:
            body(0, *(self.first or self._tile_origin(first_tile)))
        else:
            with T.serial(T.truncdiv(self.tiles - first_tile + (clusters - 1), clusters)) as index:
                body(index, *self._tile_origin(first_tile + index * clusters))

    def _first_tile(self) -> Expr:
        """Number of the block's first tile."""
        return self.block if self.tiling.cluster_split_k == 1 else self.block // self.tiling.cluster_split_k

    def _tile_origin(self, tile: Expr) -> tuple[Coordinates, Expr, Expr]:
        """Batch, first row and first column of a tile."""
        at, row, column = self._rasterize(T.bind(tile))
        # Materialized, as TVM would repeat the divisions at every use, in each k-step.
        at = {name: materialize(value) for name, value in at.items()}
        row, column = materialize(T.Cast("int64", row)), materialize(T.Cast("int64", column))
        # Multiples of the tile's size, so that accesses are provably aligned.
        return at, row * self.tiling.rows, column * self.tiling.columns

    def _rasterize(self, tile: Expr) -> tuple[Coordinates, Expr, Expr]:
        """Batch, row tile and column tile of a tile number, rasterized in groups of rows."""
        at: dict[str, Expr] = {}
        if self.batches.extents:
            tiles_per_batch = self.row_tiles * self.column_tiles
            batch = T.Cast("int64", T.truncdiv(tile, tiles_per_batch))
            extents = self.batches.extents
            at = dict(zip(extents, unravel(batch, list(extents.values())), strict=True))
            tile = T.truncmod(tile, tiles_per_batch)
        group = RASTERIZATION_GROUP_M
        if self.senders is not None:
            _, row, column = self._in_groups(at, tile, min(group, self.senders.group))
            return at, T.truncmod(row + self.senders.first_row_tile, self.row_tiles), column
        if isinstance(self.row_tiles, int) and self.row_tiles <= group:
            return at, tile % self.row_tiles, tile // self.row_tiles
        return self._in_groups(at, tile, group)

    def _in_groups(self, at: Coordinates, tile: Expr, group: int) -> tuple[Coordinates, Expr, Expr]:
        first = T.truncdiv(tile, self.column_tiles * group) * group
        index_in_group = T.truncmod(tile, self.column_tiles * group)
        height = T.min(self.row_tiles - first, group)
        return at, first + T.truncmod(index_in_group, height), T.truncdiv(index_in_group, height)

    def _block_steps(self) -> tuple[Expr, Expr]:
        """Number of k-steps of the block in each tile, and the first one."""
        cluster_split_k, steps = self.tiling.cluster_split_k, self.steps
        if cluster_split_k == 1:
            return steps, 0
        assert isinstance(steps, int) and steps >= cluster_split_k, "only a static k is split"
        base, more = divmod(steps, cluster_split_k)
        count = base if more == 0 else base + T.Select(self.rank < more, 1, 0)
        return count, self.rank * base + T.min(self.rank, more)

    def _each_step(
        self,
        position: RingPosition,
        body: Callable[[Expr, Expr, Expr, Expr], None],
        end: Callable[[Expr, Expr, Expr], None] | None = None,
    ) -> None:
        """Write `body` for the block's k-steps of a tile, given its index, k-step, stage and phase parity.

        `position` is advanced. The last step calls `end`, if given, after the
        loop, without the k-step.
        """
        count, first = self._block_steps()

        def visit(visitor: Callable[..., None], *step: Expr) -> None:
            visitor(*step, T.bind(position.stage), T.bind(position.parity))
            # A division would take as long as the products of a small tile.
            position.advance()

        loop_count = count - 1 if end else count
        if not isinstance(loop_count, int) or loop_count:
            with T.serial(loop_count) as step:
                visit(body, step, first + step)
        if end:
            visit(end, loop_count)

    def _load_early(self) -> None:
        """Load weights of the first k-steps, before previous launches have ended."""
        self.first = self._tile_origin(self._first_tile())
        at, row, column = self.first
        if self.has_one_tile:
            self.left.begin(at, row, self.thread)
        count, first = self._block_steps()
        self.num_early_steps = min(self.tiling.stages, self.steps // self.tiling.cluster_split_k)
        with unrolled(self.num_early_steps) as step:
            self._load_packed(at, column, first + step, step)

    def _load_packed(self, at: Coordinates, column: Expr, k: Expr, stage: Expr, *conditions: Expr) -> None:
        """Issue bulk copies of the weights of a k-step."""
        right, full, warps = self.right, self.ring.full(stage), self.left.threads // WARP
        with when(tirx.all(self.thread == 0, *conditions)):
            ptx.barrier_expect(full, right.size)
        # One thread of each warp issues copies, as a single thread would take long.
        is_first = self.thread % WARP == 0
        for begin in range(0, right.blocks, warps):
            warp = self.thread // WARP
            is_used = warp < min(warps, right.blocks - begin)
            with when(tirx.all(is_first, is_used, *conditions)):
                right.load_block(self.shared, self.right_at + stage * right.size, at, (column, warp + begin), k, full)

    def _prefetch(self) -> None:
        """Prefetch the weights of the block's first tile into L2, by blocks of the first row tile."""
        tiling, right = self.tiling, self.right
        tile = self.block if tiling.cluster_split_k == 1 else T.bind(self.block // tiling.cluster_split_k)
        at, row, column = self._rasterize(tile)
        conditions = [tirx.EQ(row, 0), self.thread < right.blocks]
        conditions += [tile < self.tiles] if tiling.blocks > self.tiles * tiling.cluster_split_k else []
        with when(tirx.all(*conditions)):
            block = T.Cast("int64", column * tiling.columns + self.thread * PACKED_ROWS)
            step_bytes = self.column_tiles * right.size  # bytes of a k-step
            max_steps = max(1, _MAX_PREFETCH_BYTES // step_bytes // tiling.cluster_split_k)
            right.prefetch(at, block, self._block_steps()[1], min(self.steps // tiling.cluster_split_k, max_steps))

    def _produce_and_send(self) -> None:
        if self.reallocates_registers:
            ptx.set_max_registers(self._registers[0], grows=False)
        if self.senders is None:
            self._produce()
            return
        with T.If(self.thread < self.left.threads):
            with T.Then():
                self._produce()
            with T.Else():
                self._send(self.senders)

    def _produce(self) -> None:
        left, right, thread, position = self.left, self.right, self.thread, RingPosition(self.tiling.stages)

        count, _ = self._block_steps()

        def tile(tile_index: Expr, at: Coordinates, row: Expr, column: Expr) -> None:
            if not (self.first and self.has_one_tile):
                left.begin(at, row, thread)

            def step(step_index: Expr, k: Expr, stage: Expr, parity: Expr) -> None:
                ptx.barrier_wait(self.ring.empty(stage), T.bitwise_xor(parity, 1))
                left_offset, right_offset = self.left_at + stage * left.size, self.right_at + stage * right.size
                full = self.ring.full(stage)
                if right.source is Source.PACKED:
                    is_new = [tile_index * count + step_index >= self.num_early_steps] if self.num_early_steps else []
                    self._load_packed(at, column, k, stage, *is_new)
                left.load(self.shared, left_offset, at, row, k, thread)
                right.load(self.shared, right_offset, at, column, k, thread)
                is_gathered = Source.GATHER in (left.source, right.source)
                if is_gathered:
                    ptx.copy_commit()
                    ptx.copy_wait(0)
                arrive(full, is_gathered)

            self._each_step(position, step)

            if self.tiling.cluster_split_k > 1:
                # The barriers of the consumers' cluster reduction.
                for _ in range(2):
                    ptx.cluster_barrier()

        self._each_tile(tile)

    @property
    def _registers(self) -> tuple[int, int]:
        """Registers of producers and consumers, if they reallocate them."""
        return _SENDING_REGISTERS if self.senders else (_PRODUCER_REGISTERS, _CONSUMER_REGISTERS)

    def _send(self, senders: Senders) -> None:
        def tile(_: Expr, at: Coordinates, row: Expr, column: Expr) -> None:
            self._meet_when_stored()
            senders.send((row, column))

        self._each_tile(tile)

    def _meet_when_stored(self) -> None:
        """Write that consumers and senders meet: the tile is stored, and the one before is sent."""
        ptx.named_barrier(_STORED_BARRIER, self.consumers * WARPGROUP + _SENDERS)

    def _consume(self, part: int) -> None:
        """Write what consumers do with each tile: `part` rows (swapped operands) or columns of it are a block's own."""
        if self.reallocates_registers:
            ptx.set_max_registers(self._registers[1], grows=True)
        kind = sums_dtype(self.left.view.nominal)
        self.sums = local(self.blocks * self.registers, kind)
        position = RingPosition(self.tiling.stages)
        self.member = self.thread % WARPGROUP
        self.group = T.bind(self.thread // WARPGROUP - 1)
        self.warp, lane = T.bind(self.thread // WARP - PRODUCERS // WARP), T.bind(self.thread % WARP)
        self.low, self.high = self._descriptors()
        team, thread = (self.group, self.member) if self.swap_ab else (self.warp, lane)
        extents = self.blocks, part

        def tile(_: Expr, at: Coordinates, row: Expr, column: Expr) -> None:
            own = self._origin_of_sums(row, column, part)
            self._multiply_tile(position, lambda: self.store.fetch(extents, at, own, thread))
            totals = self.sums
            if self.tiling.cluster_split_k > 1:
                reduction = ClusterReduction(
                    self.shared, self.left_at, self.tiling.cluster_split_k, self.rank, self.consumers
                )
                totals = reduction.add(self.sums, (self.blocks, self.registers), kind, self.group, self.member)
            self.store.emit(totals, extents, at, own, team, thread)
            if self.senders is not None:
                self._meet_when_stored()

        self._each_tile(tile)

    def _descriptors(self) -> tuple[list[Expr], list[Expr]]:
        """Matrix descriptors of a warpgroup's operands in stage 0: their low words, which vary, and high words."""
        base, left, right = local(2, "uint64"), self.left, self.right
        rows_at = self.group * (self.blocks * self.block_bytes)
        left_begin = self.left_at + (0 if self.swap_ab else rows_at)
        right_begin = self.shared.at(self.right_at + (rows_at if self.swap_ab else 0))
        ptx.matrix_descriptor(base[int(self.swap_ab)], self.shared.at(left_begin), left.leading)
        right_descriptor = base[int(not self.swap_ab)]
        ptx.matrix_descriptor(right_descriptor, right_begin, right.leading, right.stride, right.is_swizzled)
        low = [T.bind(T.Cast("uint32", base[i])) for i in range(2)]
        high = [T.bind(T.shift_left(T.shift_right(base[i], T.uint64(32)), T.uint64(32))) for i in range(2)]
        return low, high

    def _origin_of_sums(self, row: Expr, column: Expr, part: int) -> tuple[Expr, Expr]:
        """First row and column of what a team stores of a tile: with split k, of this block's part."""
        part_offset: Expr = 0 if self.tiling.cluster_split_k == 1 else T.Cast("int64", self.rank * part)
        if self.swap_ab:
            return row + part_offset, column + T.Cast("int64", self.group * (self.blocks * SWAPPED_COLUMNS))
        return row + T.Cast("int64", self.warp * WARP_ROWS), column + part_offset

    def _multiply_tile(self, position: RingPosition, fetch: Callable[[], None]) -> None:
        """Write all k-steps of a tile, and `fetch`, which reads other operands of the epilogue."""
        last = local(1, "int32")

        def step(number: Expr, _: Expr, stage: Expr, parity: Expr) -> None:
            self._multiply_step(number, stage, parity)
            # The previous step is complete, and its stage free.
            ptx.wgmma_wait(1)
            self._release(last[0], number > 0)
            T.buffer_store(last, stage, [0])

        def last_step(number: Expr, stage: Expr, parity: Expr) -> None:
            # Outside the loop: ptxas may read accumulators before products issued in a loop are complete.
            if self.may_wait_late:
                wait_late()
                fetch()
            self._multiply_step(number, stage, parity)
            ptx.wgmma_wait(0)
            self._release(last[0], number > 0)
            self._release(stage)

        if not self.may_wait_late:
            fetch()
        self._each_step(position, step, last_step)

    def _multiply_step(self, number: Expr, stage: Expr, parity: Expr) -> None:
        """Wait for a stage, and issue its products as a group."""
        first, second = (self.right, self.left) if self.swap_ab else (self.left, self.right)

        def descriptor(operand: int, word: Expr) -> Expr:
            return T.bitwise_or(self.high[operand], T.Cast("uint64", word))

        ptx.barrier_wait(self.ring.full(stage), parity)
        # Writes of cp.async belong to the generic proxy, wgmma reads by the async proxy.
        ptx.async_proxy_fence()
        a = T.bind(self.low[0] + T.Cast("uint32", stage) * T.uint32(first.size // 16))
        b = T.bind(self.low[1] + T.Cast("uint32", stage) * T.uint32(second.size // 16))
        ptx.wgmma_fence()
        for i in range(self.right.step_bytes // ptx.CONTRACTION_BYTES):
            adds = T.uint32(1) if i else T.if_then_else(number > 0, T.uint32(1), T.uint32(0))
            for block in range(self.blocks):
                for begin in range(0, self.registers, self.issued):
                    # A second instruction multiplies further rows of the right tile.
                    column_offset = begin * 2 * self.right.step_bytes // 16
                    ptx.wgmma(
                        [self.sums[block * self.registers + begin + r] for r in range(self.issued)],
                        descriptor(0, a + T.uint32(i * first.advance + block * self.block_bytes // 16)),
                        descriptor(1, b + T.uint32(i * second.advance + column_offset)),
                        (first.view.nominal, second.view.nominal),
                        adds,
                        (first.is_transposed, second.is_transposed),
                    )
        ptx.wgmma_commit()

    def _release(self, stage: Expr, *conditions: Expr) -> None:
        """Give a stage back to the producers, by each warpgroup."""
        with when(tirx.all(self.member == 0, *conditions)):
            ptx.barrier_arrive(self.ring.empty(stage))
