"""Matrix products on Hopper's tensor cores (wgmma): one definition for every type, layout, edge and epilogue.

A block has a warpgroup of producers and one or two of consumers. Producers bring tiles of both operands to shared
memory, a ring of stages ahead; each consumer multiplies 64 rows by all columns of the tile, or where operands are
swapped all rows by a part of the columns, then applies the epilogue and stores. Blocks are persistent: block b has the
tiles b, b + blocks, ..., in an order in which tiles that are computed at the same time share rows and columns, so that
the second-level cache has them.

Where tiles are too few for the GPU, the blocks of a cluster share one tile, each with its part of k. Their partial sums
are added in the order of the blocks, through the shared memory of all of them: equal inputs give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.packed_layout import CHUNK_BYTES, SWIZZLED_BYTES
from ....encoding.problem import MatmulProblem
from ....errors import EncodingError
from ....target.element_types import TF32, bytes_of
from ....target.gpu_target import WARP, WARPGROUP, GpuTarget
from ...core.builder import Expr, Function, ceil_div, int64, materialize, when
from ...core.view import Coordinates
from ...core.work_split import unravel
from ..core import ptx
from ..core.launch import SWIZZLED_ALIGN, SharedMemory, at_least_one, enable_pdl, launch, local, unrolled
from ..tile.ring import Ring
from .fragments import WARP_ROWS, FragmentStore, Staging, Team
from .operand_tiles import PACKED_ROWS, PRODUCERS, LeftTile, OperandTile, Source, source_of
from .product_parameters import ProductParameters
from .wgmma_tiling import Tiling, choose_tiling

# Epilogue of sums whose fragments have the result's columns as rows, and stores of the result's rows.
#
# Where the operands of tensor cores are swapped, warp w of a warpgroup holds 16 of 64 columns of the result, and rows
# of the result lie across its registers: lane l has, of every 8 rows, the pair ``2 * (l % 4)`` of columns ``l // 4``
# and ``l // 4 + 8``. What belongs to a column, such as a bias, is two values a lane. A warpgroup turns its fragments
# together in shared memory, some rows at a time, and stores 64 neighbours of each row.

COLUMNS = 64
"""Number of columns of the result that a warpgroup has at a time: the rows of one instruction."""


def staged_pitch(element: int) -> int:
    """Bytes from a staged row of `COLUMNS` to the next: rows of a warp's fragments begin in other banks each."""
    return COLUMNS * element + CHUNK_BYTES


class SwappedFragments:
    """Stores a tile of a product whose operands are swapped, as a `FragmentStore` does one that is not.

    Parameters
    ----------
    store : FragmentStore
        Opened: the epilogue and the result.
    shared : SharedMemory
    groups : int
        Warpgroups that store.
    rows : int
        Number of rows of the tile that the block stores: a multiple of 8.
    epilogue_columns : int
        Number of them that are staged at a time: all, or a divisor that is a multiple of 8.
    is_repeated : bool
        Whether the block stores several tiles.
    """

    def __init__(
        self,
        store: FragmentStore,
        shared: SharedMemory,
        groups: int,
        rows: int,
        epilogue_columns: int,
        is_repeated: bool,
    ) -> None:
        self.store, self.rows, self.is_repeated = store, rows, is_repeated
        pitch = staged_pitch(store.element)
        self.staging = Staging(shared, shared.take(groups * epilogue_columns * pitch), COLUMNS, pitch)
        self.team = Team(epilogue_columns, WARPGROUP)
        self._of_columns: list[dict[tuple[int, int], Expr]] = []
        self._fetched: list[Any] | None = None

    def fetch(self, blocks: int, at: Coordinates, first: tuple[Expr, Expr], member: Expr) -> None:
        """Begin to read operands for `emit` of the same tile, whose parameters these are; see `FragmentStore.fetch`."""
        if self.store.in_rows:
            self._fetched = self.store.fetch_rows(at, first, 0, COLUMNS, member, self.team)
            return
        self._of_columns = [self._column_operands(at, first, block, member) for block in range(blocks)]

    def emit(
        self, sums: Any, blocks: int, at: Coordinates, first: tuple[Expr, Expr], group: Expr, member: Expr
    ) -> None:
        """Store the rows of `blocks` times `COLUMNS` columns.

        Parameters
        ----------
        sums : Buffer
            Buffer of ``blocks * rows / 2`` registers.
        at : Coordinates
            Coordinates of the batch.
        first : tuple of PrimExpr
            int64: first row of the tile, first column of the warpgroup.
        group, member : PrimExpr
            Number of the warpgroup among those that store, and of the thread in it.
        """
        store, staging, epilogue_columns = self.store, self.staging, self.team.rows
        begin = T.bind(staging.offset + group * (epilogue_columns * staging.pitch))
        fetched, self._fetched = self._fetched, None
        for block in range(blocks):
            for skipped in range(0, self.rows, epilogue_columns):
                place = (first[0] + T.Cast("int64", tirx.const(skipped, "int32")), first[1] + int64(block * COLUMNS))
                if store.in_rows and (block or skipped):
                    fetched = store.fetch_rows(at, place, 0, COLUMNS, member, self.team)
                register = block * (self.rows // 2) + skipped // 2
                self._stage(sums, register, begin, at, place[0], block, member)
                ptx.named_barrier(group + 1, WARPGROUP)
                store.store_rows(staging, begin, at, place, 0, COLUMNS, member, fetched, self.team)
                is_last = block + 1 == blocks and skipped + epilogue_columns == self.rows
                if not is_last or self.is_repeated:
                    ptx.named_barrier(group + 1, WARPGROUP)

    def _column_operands(
        self, at: Coordinates, first: tuple[Expr, Expr], block: int, member: Expr
    ) -> dict[tuple[int, int], Expr]:
        """Elements of operands that are the same for all rows, of a lane's two columns."""
        column = T.bind(first[1] + T.Cast("int64", block * COLUMNS + member // WARP * WARP_ROWS + member % WARP // 4))
        found: dict[tuple[int, int], Expr] = {}
        for number, view in enumerate(self.store.views):
            if view.runs_along("m"):
                continue
            for h in range(2):
                if h and not view.runs_along("n"):
                    found[number, h] = found[number, 0]
                else:
                    found[number, h] = T.bind(self.store.load(view, at, int64(0), column + 8 * h))
        return found

    def _stage(
        self, sums: Any, register: int, begin: Expr, at: Coordinates, row: Expr, block: int, member: Expr
    ) -> None:
        """Rows from `register` on to shared memory, computed and rounded where that is not left for later."""
        store, pitch = self.store, self.staging.pitch
        warp, lane = member // WARP, member % WARP
        matrices = self.team.rows // 8
        if not store.is_packed:
            target = T.bind(begin + lane % 4 * (2 * pitch) + (warp * WARP_ROWS + lane // 4) * store.element)
            with unrolled(matrices) as j:
                for h in range(2):
                    pair = self._pair(sums, register + j * 4 + 2 * h, at, row + self._row(j, lane), block, h)
                    for c, word in enumerate(store.words(pair)):
                        place = target + j * (8 * pitch) + (c * pitch + h * 8 * store.element)
                        ptx.store_shared(self.staging.shared.at(place), [word], f"u{8 * store.element}")
            return
        # Of two matrices of 8 rows each, both of a lane's columns.
        target = T.bind(
            begin + (lane // 16 * 8 + lane % 8) * pitch + (warp * WARP_ROWS + lane // 8 % 2 * 8) * store.element
        )
        for first, count, per_store in ((0, matrices // 2, 2), (matrices // 2 * 2, matrices % 2, 1)):
            if count == 0:
                continue
            with unrolled(count) as number:
                packed = []
                for i in range(per_store):
                    j = first + number * per_store + i
                    for h in range(2):
                        pair = self._pair(sums, register + j * 4 + 2 * h, at, row + self._row(j, lane), block, h)
                        packed.append(store.packed(pair))
                place = target + (first + number * per_store) * (8 * pitch)
                ptx.store_matrices(self.staging.shared.at(place), packed, transposed=True)

    def _row(self, j: Expr, lane: Expr) -> Expr:
        """First row of a lane's pair of rows of matrix j, in the part that is staged."""
        return T.Cast("int64", j * 8 + lane % 4 * 2)

    def _pair(
        self, sums: Any, register: Expr, at: Coordinates, row: Expr, block: int, h: int
    ) -> list[tuple[Expr, list[Expr]]]:
        """Sums of two neighbouring rows of a column, and what the epilogue reads beside each."""
        store = self.store
        values = []
        for c in range(2):
            operands = []
            if not store.in_rows:
                for number, view in enumerate(store.views):
                    is_row = view.runs_along("m")
                    held = None if is_row else self._of_columns[block][number, h]
                    operands.append(store.load(view, at, row + c, int64(0)) if is_row else held)
            values.append((store.sum(sums[register + c]), operands))
        return values


# Sums of a tile whose k the blocks of a cluster share: each block gets its part of the tile, added up.
#
# Each block writes its sums of a part to the shared memory of the block that stores it: a store does not wait for its
# answer, as reading the sums of others would.


@dataclass(frozen=True)
class ClusterParts:
    """Where sums meet.

    Attributes
    ----------
    shared : SharedMemory
    offset : int
        Offset of memory for the sums of a whole tile, which nothing of the cluster uses any more when all its threads
        meet.
    cluster_split_k : int
        Blocks of the cluster.
    rank : PrimExpr
        Number of the block in it.
    groups : int
        Warpgroups of a block that have sums.
    """

    shared: SharedMemory
    offset: int
    cluster_split_k: int
    rank: Expr
    groups: int

    def add(self, sums: Any, extents: tuple[int, int], kind: str, group: Expr, member: Expr) -> Any:
        """Add the block's part, in the order of the blocks; threads without sums meet the others twice.

        Parameters
        ----------
        sums : Buffer
            Registers of a thread, in blocks of as many each; a part is so many neighbours of every block.
        extents : tuple of int
            Blocks of registers, and registers of each: a multiple of four for each part.
        kind : str
            "float32" or "uint32".
        group, member : PrimExpr
            Number of the warpgroup, and of the thread in it.
        """
        blocks, registers = extents
        count = registers // self.cluster_split_k
        pieces = [(block, quad) for block in range(blocks) for quad in range(count // 4)]
        each = len(pieces) * WARPGROUP * 16  # bytes of a warpgroup's sums of a part
        own, part = self.offset + group * each + member * 16, self.groups * each
        address = T.bind(ptx.shared_address(self.shared.at(own + self.rank * part)))
        remote = local(1, "uint32")
        ptx.cluster_barrier()
        for turn in range(self.cluster_split_k):
            # Every block begins with another one, and comes to itself last.
            for owner in range(self.cluster_split_k):
                with when(tirx.EQ(T.truncmod(self.rank + turn + 1, self.cluster_split_k), owner)):
                    ptx.remote_address(remote[0], address, owner)
                    for number, (block, quad) in enumerate(pieces):
                        first = block * registers + owner * count + 4 * quad
                        values = [_typed(sums[first + i], "uint32") for i in range(4)]
                        ptx.store_remote(remote[0] + T.uint32(number * WARPGROUP * 16), values)
        ptx.cluster_barrier()
        total, parts = local(blocks * count, kind), local(4, "uint32")
        for sender in range(self.cluster_split_k):
            for number in range(len(pieces)):
                source = own + sender * part + number * (WARPGROUP * 16)
                ptx.load_shared([parts[i] for i in range(4)], self.shared.at(source))
                for i in range(4):
                    value, register = _typed(parts[i], kind), 4 * number + i
                    T.buffer_store(total, value if sender == 0 else total[register] + value, [register])
        return total


def _typed(value: Expr, dtype: str) -> Expr:
    return value if str(value.ty.dtype) == dtype else tirx.reinterpret(dtype, value)


_BYTES = ("int8", "uint8")
_FEW_REGISTERS, _MANY_REGISTERS = 40, 232  # of producers and of consumers: 128 * 40 + 256 * 232 <= 65,536
_MAX_ROWS_AHEAD = 256
_MAX_BYTES_AHEAD = 6 << 20
"""Weights that a launch asks for before it waits: an eighth of the second-level cache. On an H200, BERT-base of 128
tokens in float16 takes 254 us with that, 264 without, and 286 where launches do not overlap."""
_BLOCK = PACKED_ROWS * SWIZZLED_BYTES  # bytes of the rows of an instruction
_UNROLLED_SUMS = 128  # registers of sums from which consumers need those of the producers


def unsupported_reason(problem: MatmulProblem, gpu: GpuTarget) -> str:
    """Why `wgmma_matmul_kernel` cannot solve a problem; empty where it can."""
    if gpu.tensor != "wgmma":
        return f"{gpu.arch} has no wgmma"
    return tensor_core_unsupported_reason(problem, gpu)


def tensor_core_unsupported_reason(problem: MatmulProblem, gpu: GpuTarget) -> str:
    """Why no kernel of tensor cores solves a problem; empty where they do."""
    left, right, acc = problem.lhs.dtype, problem.rhs.dtype, problem.acc_dtype
    rounded = {"float32": TF32} if problem.tf32 else {}
    if not gpu.multiplies(rounded.get(left, left), rounded.get(right, right), acc):
        return f"element types {left} * {right} -> {acc} are not multiplied by the tensor cores of {gpu.arch}"
    for operand, names in ((problem.lhs, "mk"), (problem.rhs, "kn"), (problem.result, "mn")):
        if not set(names) <= set(operand.index_map):
            return f"an operand has the dimensions {operand.index_map}, expected {tuple(names)} among them"
    if problem.rows is not None:
        return "work on rows behind the product is not computed"
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
    """The kernel of a matrix product for sm_90a; `MatmulProblem` says what its parameters are.

    Parameters
    ----------
    tiling : Tiling, optional
        Tiles, stages and blocks; by default as `choose_tiling` finds them.

    Raises
    ------
    EncodingError
        If `unsupported_reason` says why the problem is not one for this kernel.
    """
    reason = unsupported_reason(problem, gpu)
    if reason:
        raise EncodingError(f"matmul on {gpu.arch}: {reason}")
    function = Function("matmul", registers="local")
    with function:
        parameters = ProductParameters.declare(function, problem, gpu)
        sizes, counts, store = parameters.sizes, parameters.counts, parameters.store
        with function.body():
            parameters.open()
            lhs, rhs = parameters.lhs, parameters.rhs
            sources = source_of(lhs, "m")[0], source_of(rhs, "n")[0]
            may_swap = sources == (Source.LINES, Source.PACKED)
            tiling = tiling or choose_tiling(
                problem, gpu, sizes, list(counts.values()), Source.GATHER in sources, may_swap
            )
            left = OperandTile.of(lhs, "m", tiling.rows, sizes[0], sizes[2])
            right = OperandTile.of(rhs, "n", tiling.columns, sizes[1], sizes[2])
            product = WgmmaProduct(left, right, store, tiling, sizes, counts)
            product.emit()
    return enable_pdl(parameters.tied(function.result), product.read_early)


class WgmmaProduct:
    """The launch of a product: what its parts share while it is written.

    Parameters
    ----------
    left : LeftTile
    right : OperandTile
    store : FragmentStore
        Opened.
    tiling : Tiling
    sizes : tuple of PrimExpr or int
        Extents of m, n and k.
    counts : dict of str to (PrimExpr or int)
        Extents of the batch dimensions, outermost first.
    """

    def __init__(
        self,
        left: LeftTile,
        right: OperandTile,
        store: FragmentStore,
        tiling: Tiling,
        sizes: tuple[Expr, Expr, Expr],
        counts: dict[str, Expr],
    ) -> None:
        self.left, self.right, self.store, self.tiling, self.counts = left, right, store, tiling, counts
        store.is_cut_into(tiling.rows, tiling.columns)
        self.consumers = tiling.consumers
        self.swap_ab = tiling.swap_ab
        # Products of a consumer beside each other, and registers of each one's sums.
        self.blocks = tiling.columns // 64 // self.consumers if self.swap_ab else 1
        self.registers = (tiling.rows if self.swap_ab else tiling.columns) // 2
        # TVM has no wgmma of integers with 256 columns.
        is_integer = left.view.nominal in _BYTES
        self.issued = self.registers // 2 if is_integer and self.registers > 192 // 2 else self.registers
        if not right.is_swizzled and not tiling.swap_ab:
            # Packed tiles of so many rows lie after each other.
            self.issued = PACKED_ROWS // 2
        m, n, k = sizes
        self.row_tiles = _int32(ceil_div(m, tiling.rows))
        self.column_tiles = _int32(ceil_div(n, tiling.columns))
        # Where k may be 0, a step of zeros begins the sums.
        self.steps = ceil_div(k, left.step) if isinstance(k, int) else T.max(_int32(ceil_div(k, left.step)), 1)
        batches: Expr = 1
        for count in counts.values():
            batches = batches * count
        self.tiles = self.row_tiles * self.column_tiles * _int32(batches)
        self.first: tuple[Coordinates, Expr, Expr] | None = None
        self.asked = 0  # steps whose weights are asked for before the producers begin
        self.moves_registers = self.blocks * self.registers >= _UNROLLED_SUMS

    @property
    def read_early(self) -> list[int]:
        """The operand that blocks ask for before they wait for the launches before: weights of tiles that exist."""
        return [1] if self.right.source is Source.PACKED and isinstance(self.tiles, int) else []

    @property
    def asks_ahead(self) -> bool:
        """True if all weights of a tile are asked for then, and not only those of the first steps.

        With many rows the tensor cores need longer than memory, and what the launch before reads would have to wait.
        """
        rows = self.row_tiles * self.tiling.rows
        return bool(self.read_early) and self.right.is_swizzled and rows <= _MAX_ROWS_AHEAD

    @property
    def has_one_tile(self) -> bool:
        """True if every block has one tile, which it knows before it waits for the launches before."""
        return isinstance(self.tiles, int) and self.tiles == self.tiling.blocks // self.tiling.cluster_split_k

    def emit(self) -> None:
        """The launch."""
        tiling = self.tiling
        shared = self.shared = SharedMemory()
        stages = shared.take(tiling.stages * (self.left.size + self.right.size), SWIZZLED_ALIGN)
        self.left_at, self.right_at = stages, stages + tiling.stages * self.left.size
        if tiling.cluster_split_k > 1:
            # Partial sums take the place of the stages.
            shared.size = max(shared.size, stages + tiling.rows * tiling.columns * 4)
        part = (tiling.rows if self.swap_ab else tiling.columns) // tiling.cluster_split_k
        staging: Staging | SwappedFragments
        if self.swap_ab:
            staging = SwappedFragments(
                self.store, shared, self.consumers, part, tiling.epilogue_columns, not self.has_one_tile
            )
        else:
            staging = self.store.plan(shared, self.consumers * 4, tiling.epilogue_columns)
        # All producers arrive when their copies are complete, one more expects the bytes of bulk copies.
        producers = PRODUCERS + int(self.right.source is Source.PACKED)
        self.ring = Ring(shared, tiling.stages, producers, self.consumers)
        threads = PRODUCERS + self.consumers * WARPGROUP
        # 0 blocks: as many as there are tiles, which only a launch knows.
        blocks = tiling.blocks or at_least_one(int64(self.tiles)) * tiling.cluster_split_k
        blocks_per_sm = tiling.blocks_per_sm if tiling.blocks_per_sm > 1 else 0
        with launch(blocks, threads, tiling.cluster_split_k, self.moves_registers, blocks_per_sm) as place:
            self.block, self.rank, self.thread = place.block, place.rank, place.thread
            shared.open()
            if self.asks_ahead:
                self._ask_ahead()
            with when(place.thread == 0):
                self.ring.initialize()
                ptx.barrier_init_fence()
            ptx.block_barrier()
            if self.read_early:
                self._begin()
            # Operands, and what the result takes the place of, belong to launches before this one until here.
            ptx.griddepcontrol_wait()
            ptx.launch_dependents()
            with T.If(place.thread < PRODUCERS):
                with T.Then():
                    self._produce()
                with T.Else():
                    self._consume(staging, part)

    def _each_tile(self, body: Callable[[Expr, Coordinates, Expr, Expr], None]) -> None:
        """Write `body` for every tile of the block: its number among them, batch, first row and first column."""
        tiling, own = self.tiling, self._own_tile()
        clusters = tiling.blocks // tiling.cluster_split_k
        if clusters == 0:
            with when(_int32(own) < self.tiles):
                body(0, *self._begin_of(_int32(own)))
        elif self.has_one_tile:
            body(0, *(self.first or self._begin_of(own)))
        else:
            with T.serial(T.truncdiv(self.tiles - own + (clusters - 1), clusters)) as turn:
                body(turn, *self._begin_of(own + turn * clusters))

    def _own_tile(self) -> Expr:
        """The number of the block's first tile."""
        return self.block if self.tiling.cluster_split_k == 1 else self.block // self.tiling.cluster_split_k

    def _begin_of(self, tile: Expr) -> tuple[Coordinates, Expr, Expr]:
        """Batch, first row and first column of a tile."""
        at, row, column = self._place(T.bind(tile))
        # Not simply bound: TVM would write these divisions out wherever the place is used, in each step of k.
        at = {name: materialize(value) for name, value in at.items()}
        row, column = materialize(T.Cast("int64", row)), materialize(T.Cast("int64", column))
        # A product with the tile's size, so that accesses are known to be aligned.
        return at, row * self.tiling.rows, column * self.tiling.columns

    def _place(self, tile: Expr) -> tuple[Coordinates, Expr, Expr]:
        """Batch, row and column of a tile: a group of rows goes over all columns, its rows one after the other."""
        at: dict[str, Expr] = {}
        if self.counts:
            each = self.row_tiles * self.column_tiles
            places = unravel(T.Cast("int64", T.truncdiv(tile, each)), list(self.counts.values()))
            at = dict(zip(self.counts, places, strict=True))
            tile = T.truncmod(tile, each)
        if isinstance(self.row_tiles, int) and self.row_tiles <= self.tiling.rasterization_group_m:
            return at, tile % self.row_tiles, tile // self.row_tiles
        group = self.tiling.rasterization_group_m
        first = T.truncdiv(tile, self.column_tiles * group) * group
        within = T.truncmod(tile, self.column_tiles * group)
        height = T.min(self.row_tiles - first, group)
        return at, first + T.truncmod(within, height), T.truncdiv(within, height)

    def _own_steps(self) -> tuple[Expr, Expr]:
        """How many steps of k the block has of each tile, and the first."""
        cluster_split_k, steps = self.tiling.cluster_split_k, self.steps
        if cluster_split_k == 1:
            return steps, 0
        assert isinstance(steps, int) and steps >= cluster_split_k, "every block of a cluster has a part of a known k"
        base, more = divmod(steps, cluster_split_k)
        count = base if more == 0 else base + T.Select(self.rank < more, 1, 0)
        return count, self.rank * base + T.min(self.rank, more)

    def _each_step(
        self,
        position: Any,
        body: Callable[[Expr, Expr, Expr, Expr], None],
        end: Callable[[Expr, Expr, Expr], None] | None = None,
    ) -> None:
        """Write `body` for the block's steps of a tile: number, step of k, stage, and parity of the stage's phase.

        `position` is where the thread is in the ring of stages, and moves on.
        The last step is `end` where there is one, of the same but the step of k, behind the loop of the others.
        """
        count, first = self._own_steps()

        def visit(visitor: Callable[..., None], *step: Expr) -> None:
            visitor(*step, T.bind(position[0]), T.bind(position[1]))
            # Not found by division: that would take as long as the products of a small tile.
            following = T.bind(position[0] + 1)
            wraps = following == self.tiling.stages
            T.buffer_store(position, T.Select(wraps, 0, following), [0])
            T.buffer_store(position, T.bitwise_xor(position[1], T.Select(wraps, 1, 0)), [1])

        others = count - 1 if end else count
        if not isinstance(others, int) or others:
            with T.serial(others) as step:
                visit(body, step, first + step)
        if end:
            visit(end, others)

    @staticmethod
    def _first_position() -> Any:
        """The stage that a thread comes to, and the parity of its phase, from the first stage on."""
        position = local(2, "int32")
        for i in range(2):
            T.buffer_store(position, 0, [i])
        return position

    def _begin(self) -> None:
        """Load weights of the first steps, which need not wait for the launches before."""
        self.first = self._begin_of(self._own_tile())
        at, row, column = self.first
        if self.has_one_tile:
            self.left.begin(at, row, self.thread)
        count, first = self._own_steps()
        self.asked = min(self.tiling.stages, self.steps // self.tiling.cluster_split_k)
        with unrolled(self.asked) as step:
            self._load_packed(at, column, first + step, step)

    def _load_packed(self, at: Coordinates, column: Expr, k: Expr, stage: Expr, *conditions: Expr) -> None:
        """Ask for the weights of a step of k."""
        right, full = self.right, self.ring.full(stage)
        with when(tirx.all(self.thread == 0, *conditions)):
            ptx.barrier_expect(full, right.size)
        # A thread of each warp issues a copy: one after the other they would take long.
        with when(tirx.all(self.thread % WARP == 0, self.thread // WARP < right.blocks, *conditions)):
            right.load_block(
                self.shared, self.right_at + stage * right.size, at, (column, self.thread // WARP), k, full
            )

    def _ask_ahead(self) -> None:
        """Have the weights of the block's first tile brought to the second-level cache; those above others do it."""
        tiling, right = self.tiling, self.right
        own = self.block if tiling.cluster_split_k == 1 else T.bind(self.block // tiling.cluster_split_k)
        at, row, column = self._place(own)
        conditions = [tirx.EQ(row, 0), self.thread < right.blocks]
        conditions += [own < self.tiles] if tiling.blocks > self.tiles * tiling.cluster_split_k else []
        with when(tirx.all(*conditions)):
            block = T.Cast("int64", column * tiling.columns + self.thread * PACKED_ROWS)
            each = self.column_tiles * right.size  # bytes of a step of k
            most = max(1, _MAX_BYTES_AHEAD // each // tiling.cluster_split_k)
            right.prefetch(at, block, self._own_steps()[1], min(self.steps // tiling.cluster_split_k, most))

    def _produce(self) -> None:
        if self.moves_registers:
            ptx.set_max_registers(_FEW_REGISTERS, grows=False)
        left, right, thread, position = self.left, self.right, self.thread, self._first_position()

        count, _ = self._own_steps()

        def tile(turn: Expr, at: Coordinates, row: Expr, column: Expr) -> None:
            if not (self.first and self.has_one_tile):
                left.begin(at, row, thread)

            def step(own: Expr, k: Expr, stage: Expr, parity: Expr) -> None:
                ptx.barrier_wait(self.ring.empty(stage), T.bitwise_xor(parity, 1))
                left_to, right_to = self.left_at + stage * left.size, self.right_at + stage * right.size
                full = self.ring.full(stage)
                if right.source is Source.PACKED:
                    is_new = [turn * count + own >= self.asked] if self.asked else []
                    self._load_packed(at, column, k, stage, *is_new)
                left.load(self.shared, left_to, at, row, k, thread)
                right.load(self.shared, right_to, at, column, k, thread)
                if Source.GATHER in (left.source, right.source):
                    ptx.copy_commit()
                    ptx.copy_wait(0)
                    ptx.async_proxy_fence()
                    ptx.barrier_arrive(full)
                else:
                    ptx.barrier_arrive_after_copies(full)

            self._each_step(position, step)

            if self.tiling.cluster_split_k > 1:
                # With the consumers, who write each other's sums in between.
                for _ in range(2):
                    ptx.cluster_barrier()

        self._each_tile(tile)

    def _descriptors(self, group: Expr) -> tuple[list[Expr], list[Expr]]:
        """Descriptors of a warpgroup's operands in the first stage: the low words, which tiles move, and the rest."""
        base, left, right = local(2, "uint64"), self.left, self.right
        rows_at = group * (self.blocks * _BLOCK)
        left_begin = self.left_at + (0 if self.swap_ab else rows_at)
        right_begin = self.shared.at(self.right_at + (rows_at if self.swap_ab else 0))
        ptx.matrix_descriptor(base[int(self.swap_ab)], self.shared.at(left_begin), left.leading)
        of_right = base[int(not self.swap_ab)]
        ptx.matrix_descriptor(of_right, right_begin, right.leading, right.stride, right.is_swizzled)
        low = [T.bind(T.Cast("uint32", base[i])) for i in range(2)]
        high = [T.bind(T.shift_left(T.shift_right(base[i], T.uint64(32)), T.uint64(32))) for i in range(2)]
        return low, high

    def _consume(self, staging: Staging | SwappedFragments, part: int) -> None:
        if self.moves_registers:
            ptx.set_max_registers(_MANY_REGISTERS, grows=True)
        kind = "uint32" if self.left.view.nominal in _BYTES else "float32"
        sums = local(self.blocks * self.registers, kind)
        position = self._first_position()
        member = self.thread % WARPGROUP
        group = T.bind(self.thread // WARPGROUP - 1)
        warp, lane = T.bind(self.thread // WARP - PRODUCERS // WARP), T.bind(self.thread % WARP)
        first, second = (self.right, self.left) if self.swap_ab else (self.left, self.right)
        low, high = self._descriptors(group)

        def moved(operand: int, word: Expr) -> Expr:
            return T.bitwise_or(high[operand], T.Cast("uint64", word))

        def release(stage: Expr, *conditions: Expr) -> None:
            with when(tirx.all(member == 0, *conditions)):
                ptx.barrier_arrive(self.ring.empty(stage))

        def tile(turn: Expr, at: Coordinates, row: Expr, column: Expr) -> None:
            last = local(1, "int32")
            # With k split, this block's columns of the tile, or its rows.
            skipped: Expr = 0 if self.tiling.cluster_split_k == 1 else T.Cast("int64", self.rank * part)
            if isinstance(staging, SwappedFragments):
                own = row + skipped, column + T.Cast("int64", group * (self.blocks * PACKED_ROWS))
                staging.fetch(self.blocks, at, own, member)
            else:
                own = row + T.Cast("int64", warp * 16), column + skipped
                self.store.fetch(part, staging, at, own, lane)

            def multiply(number: Expr, stage: Expr, parity: Expr) -> None:
                ptx.barrier_wait(self.ring.full(stage), parity)
                # What came by `copy_async` was written as by a thread, not as by wgmma's own kind of access.
                ptx.async_proxy_fence()
                a = T.bind(low[0] + T.Cast("uint32", stage) * T.uint32(first.size // 16))
                b = T.bind(low[1] + T.Cast("uint32", stage) * T.uint32(second.size // 16))
                ptx.wgmma_fence()
                for i in range(SWIZZLED_BYTES // ptx.CONTRACTION_BYTES):
                    adds = T.uint32(1) if i else T.if_then_else(number > 0, T.uint32(1), T.uint32(0))
                    for block in range(self.blocks):
                        for begin in range(0, self.registers, self.issued):
                            # Columns of a second instruction are further rows of the right tile.
                            further = begin * 2 * SWIZZLED_BYTES // 16
                            ptx.wgmma(
                                [sums[block * self.registers + begin + r] for r in range(self.issued)],
                                moved(0, a + T.uint32(i * first.advance + block * _BLOCK // 16)),
                                moved(1, b + T.uint32(i * second.advance + further)),
                                (first.view.nominal, second.view.nominal),
                                adds,
                                (first.is_transposed, second.is_transposed),
                            )
                ptx.wgmma_commit()

            def step(number: Expr, _: Expr, stage: Expr, parity: Expr) -> None:
                multiply(number, stage, parity)
                # The step before is complete then, and its stage free.
                ptx.wgmma_wait(1)
                release(last[0], number > 0)
                T.buffer_store(last, stage, [0])

            def last_step(number: Expr, stage: Expr, parity: Expr) -> None:
                # Behind the loop: ptxas lets sums be read before it waits for products that a loop has begun.
                multiply(number, stage, parity)
                ptx.wgmma_wait(0)
                release(last[0], number > 0)
                release(stage)

            self._each_step(position, step, last_step)
            totals = sums
            if self.tiling.cluster_split_k > 1:
                parts = ClusterParts(self.shared, self.left_at, self.tiling.cluster_split_k, self.rank, self.consumers)
                totals = parts.add(sums, (self.blocks, self.registers), kind, group, member)
            if isinstance(staging, SwappedFragments):
                staging.emit(totals, self.blocks, at, own, group, member)
            else:
                self.store.emit(totals, part, staging, at, own, warp, lane)

        self._each_tile(tile)


def _int32(value: Expr) -> Expr:
    return value if isinstance(value, int) else T.Cast("int32", int64(value))
