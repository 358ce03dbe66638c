"""Products of few rows by a packed weight on Hopper, at the rate of memory.

Each weight is read once and used for up to 64 rows, so that bytes on their way are all that counts. The tensor cores'
operands are swapped: 64 columns of the weight are wgmma's rows, and the rows of the left operand, rounded up to a
multiple of 8, its columns. A block has 64 columns and a part of k. One thread asks for tiles of weights by bulk copies
of 8 KB, a ring of stages ahead, and for the first of them before the launch that writes the left operand has ended
(`ptx.wait_for_launches_before`): launches in a row keep memory busy between them. The left operand follows by
asynchronous copies of all producers.

The blocks of a cluster have the parts of k of the same columns. Their sums are added in the order of the blocks,
through the shared memory of all of them, and each block stores its share of the rows.

Where the number of rows is symbolic, the kernel has a body for 8 rows and one for 64, and the blocks of a launch take
the first if no more are there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod
from operator import getitem
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.packed_layout import SWIZZLED_BYTES
from ....encoding.problem import MatmulProblem
from ....errors import EncodingError
from ....target.element_types import bytes_of
from ....target.gpu_target import WARP, WARPGROUP, GpuTarget
from ...core.builder import Expr, Function, ceil_div, int64, when
from ...core.ties import tied_to
from ...core.view import Coordinates, extent_of
from ...core.work_split import unravel
from ...matmul.matmul import merge_batches
from ..core import ptx
from ..core.epilogue import EpilogueWriter
from ..core.global_view import GlobalView
from ..core.launch import SWIZZLED_ALIGN, SharedMemory, launch, local, may_begin_early
from . import wgmma_matmul
from .operand_tiles import PACKED_ROWS, PRODUCERS, OperandTile, Source

MOST_ROWS = 64
"""Of the left operand, that one tile has."""

WEIGHT_BYTES = PACKED_ROWS * SWIZZLED_BYTES
"""Of a tile of weights."""

_LOADED_ROWS = 16  # of the left operand, that the producers copy at a time
_PITCH = PACKED_ROWS + 4  # floats from a row of sums to the next: rows of a warp's fragment begin in other banks
_THREADS = PRODUCERS + WARPGROUP

# Bytes of a block's stages, all measured on an H200. For 1 to 16 rows four blocks of one ring, or three of the other,
# share a multiprocessor, those of the next launch among them: parts of 16 steps (4,096 columns) take 10.3 us with 76 KB
# and 11.1 with 56 KB, 12.3 with 110 KB, which leave no room for the next launch; parts of 64 steps (14,336 columns)
# 35.5, 28.6 and 28.9 us. More rows want fewer parts, because all parts are added up, and more bytes: 64 rows by 4,096
# columns take 11.8 us in two parts with 110 KB, 14.0 in four with 76 KB.
RING_BYTES = 56 << 10
SHORT_RING_BYTES = 76 << 10
SHORT_STEPS = 16
MANY_ROWS_RING_BYTES = 110 << 10
FEWEST_ROWS = 16
BLOCKS_PER_MULTIPROCESSOR = 2
"""At most where k is split, of blocks with no more than `FEWEST_ROWS`; one for others."""


@dataclass(frozen=True)
class FewPlan:
    """How a kernel shares its work.

    Attributes
    ----------
    split : int
        Blocks of a cluster, each with a part of k: 1, 2, 4 or 8.
    ring : int
        Bytes of the stages, about.
    """

    split: int
    ring: int


def few_plan(problem: MatmulProblem, gpu: GpuTarget) -> FewPlan:
    """The plan of a problem: parts of k until all multiprocessors have work, and room for the next launch."""
    element = bytes_of(problem.rhs.dtype)
    n, k = problem.rhs.size("n"), problem.rhs.size("k")
    assert isinstance(n, int) and isinstance(k, int), "packed weights are of known extents"
    batches = [e for name, e in zip(problem.rhs.index_map, problem.rhs.shape, strict=True) if name.startswith("b")]
    tiles = -(-n // PACKED_ROWS) * prod(e for e in batches if isinstance(e, int))
    steps = -(-k * element // SWIZZLED_BYTES)
    split = 1
    is_fewest = _rows(problem) <= FEWEST_ROWS
    most = gpu.multiprocessors * (BLOCKS_PER_MULTIPROCESSOR if is_fewest else 1)
    while split < 8 and tiles * split * 2 <= most and steps >= split * 2 * 4:
        split *= 2
    if not is_fewest:
        return FewPlan(split, MANY_ROWS_RING_BYTES)
    return FewPlan(split, SHORT_RING_BYTES if steps <= split * SHORT_STEPS else RING_BYTES)


def _rows(problem: MatmulProblem) -> int:
    """Rows that share the weight; where a call decides, as of one row."""
    shared = problem.rhs.index_map
    sizes = [e for name, e in zip(problem.lhs.index_map, problem.lhs.shape, strict=True) if name not in ("k", *shared)]
    return prod(e for e in sizes if isinstance(e, int))


def misfit(problem: MatmulProblem, gpu: GpuTarget) -> str:
    """Why `few_rows_kernel` cannot solve a problem; empty where it can. Any number of rows is right."""
    reason = wgmma_matmul.misfit(problem, gpu)
    if not reason and not problem.rhs.layout.inner_dims:
        return "the right operand is not packed"
    return reason


def few_rows_kernel(problem: MatmulProblem, gpu: GpuTarget, plan: FewPlan | None = None) -> tirx.PrimFunc:
    """The kernel of a product of few rows by a packed weight, one launch; `MatmulProblem` says its parameters.

    It may begin before the launch before it has ended, if the right operand is a constant.

    Raises EncodingError if `misfit` says why the problem is not one for this kernel.
    """
    reason = misfit(problem, gpu)
    if reason:
        raise EncodingError(f"matmul of few rows on {gpu.arch}: {reason}")
    function = Function("matmul", registers="local")
    with function:
        lhs = GlobalView(function, "lhs", problem.lhs)
        rhs = GlobalView(function, "rhs", problem.rhs)
        writer = EpilogueWriter.of(function, problem)
        batch = merge_batches([lhs, rhs, *writer.operands], lhs, rhs, writer.result)  # type: ignore[arg-type]
        m, n, k = (extent_of([lhs, rhs, writer.result], name) for name in "mnk")
        counts = {name: extent_of([writer.result], name) for name in batch}
        with function.body():
            lhs.open(raw=True)
            rhs.open(raw=True)
            for view in writer.operands:
                view.open_for_gpu()
            _Kernel(lhs, rhs, writer, plan or few_plan(problem, gpu), (m, n, k), counts).emit()
    in_tile = [*([problem.init] if problem.init else []), *(problem.epilogue.operands if problem.epilogue else ())]
    return may_begin_early(tied_to(function.result, in_tile, 2, problem.result), [1])


class _Kernel:
    """The launch: which block has what."""

    def __init__(
        self,
        lhs: GlobalView,
        rhs: GlobalView,
        writer: EpilogueWriter,
        plan: FewPlan,
        sizes: tuple[Expr, Expr, Expr],
        counts: dict[str, Expr],
    ) -> None:
        self.lhs, self.rhs, self.writer, self.plan, self.counts = lhs, rhs, writer, plan, counts
        self.m, self.n, self.k = sizes
        self.types = (lhs.nominal, rhs.nominal)
        self.depth = SWIZZLED_BYTES // bytes_of(rhs.nominal)
        self.steps = -(-self.k // self.depth)

    def emit(self) -> None:
        """Write the launch."""
        split = self.plan.split
        bodies = [_Body(self, rows) for rows in self._row_forms()]
        shared = SharedMemory()
        shared.take(max(body.size for body in bodies), SWIZZLED_ALIGN)
        barriers = shared.take(2 * 8 * max(body.stages for body in bodies), 8)
        self.shared, self.barriers = shared, barriers
        row_tiles = ceil_div(self.m, MOST_ROWS)
        column_tiles = -(-self.n // PACKED_ROWS)
        tiles: Expr = row_tiles * column_tiles
        for count in self.counts.values():
            tiles = tiles * count
        with launch(int64(tiles * split), _THREADS, split) as place:
            shared.open()
            self.rank, self.thread = place.rank, place.thread
            tile = T.bind(tirx.floordiv(T.Cast("int64", place.block), split))
            self.row = T.bind(tirx.floormod(tile, int64(row_tiles)) * MOST_ROWS)
            rest = tirx.floordiv(tile, int64(row_tiles))
            self.column = T.bind(tirx.floormod(rest, int64(column_tiles)) * PACKED_ROWS)
            rest = tirx.floordiv(rest, int64(column_tiles))
            places = unravel(rest, list(self.counts.values())) if self.counts else []
            self.at: Coordinates = dict(zip(self.counts, places, strict=True))
            if len(bodies) == 1:
                bodies[0].emit()
            else:
                with T.If(self.m <= bodies[0].rows):
                    with T.Then():
                        bodies[0].emit()
                    with T.Else():
                        bodies[1].emit()

    def _row_forms(self) -> list[int]:
        """Rows of the left operand, by which bodies are written: one where their number is known."""
        if isinstance(self.m, int):
            rows = min(self.m, MOST_ROWS)
            # Of integers, wgmma has no 40 and no 56 columns.
            unit = 16 if rows > 24 and self.types[0] in ("int8", "uint8") else 8
            return [-(-rows // unit) * unit]
        return [8, MOST_ROWS]


class _Body:
    """What a block does for up to so many rows."""

    def __init__(self, kernel: _Kernel, rows: int) -> None:
        self.kernel, self.rows = kernel, rows
        loaded = -(-rows // _LOADED_ROWS) * _LOADED_ROWS
        self.left = OperandTile.of(kernel.lhs, "m", loaded, kernel.m, kernel.k, may_transpose=False)
        self.right = OperandTile.of(kernel.rhs, "n", PACKED_ROWS, kernel.n, kernel.k)
        stage = WEIGHT_BYTES + self.left.size
        split = kernel.plan.split
        self.stages = max(2, min(kernel.plan.ring // stage, -(-kernel.steps // split)))
        # Weights first, so that every tile begins at a multiple of the swizzle's period. Sums take their place.
        self.left_at = self.stages * WEIGHT_BYTES
        self.size = max(self.stages * stage, rows * _PITCH * 4)
        # Steps of k of every block, and how many blocks have one more.
        self.base, self.more = divmod(kernel.steps, split)

    def emit(self) -> None:
        """Write the block's work."""
        kernel = self.kernel
        rank, more = kernel.rank, self.more
        self.count: Expr = self.base if more == 0 else T.bind(self.base + T.Select(rank < more, 1, 0))
        self.first: Expr = T.bind(rank * self.base + T.min(rank, more))
        with when(kernel.thread == 0):
            for stage in range(self.stages):
                ptx.barrier_init(self._full(stage), PRODUCERS + 1)
                ptx.barrier_init(self._empty(stage), 1)
            ptx.barrier_init_fence()
        ptx.block_barrier()
        with T.If(kernel.thread < PRODUCERS):
            with T.Then():
                self._produce()
            with T.Else():
                self._consume()
        self._meet()
        self._store()

    def _full(self, stage: Expr) -> Expr:
        return self.kernel.shared.at(self.kernel.barriers + stage * 8)

    def _empty(self, stage: Expr) -> Expr:
        return self.kernel.shared.at(self.kernel.barriers + (self.stages + stage) * 8)

    def _produce(self) -> None:
        kernel, thread, stages = self.kernel, self.kernel.thread, self.stages
        waits = self.left.source is Source.GATHER

        def ask(step: Expr, stage: Expr) -> None:
            """Ask for the weights of a step."""
            with when(thread == 0):
                ptx.barrier_expect(self._full(stage), WEIGHT_BYTES)
                at = self.first + step
                self.right.load_bulk(
                    kernel.shared, stage * WEIGHT_BYTES, kernel.at, kernel.column, at, self._full(stage)
                )

        def bring(step: Expr, stage: Expr) -> None:
            """Ask for the left operand of a step."""
            target = self.left_at + stage * self.left.size
            self.left.load(kernel.shared, target, kernel.at, kernel.row, self.first + step, thread)
            if waits:
                ptx.async_proxy_fence()
                ptx.barrier_arrive(self._full(stage))
            else:
                ptx.barrier_arrive_after_copies(self._full(stage))

        ahead = min(stages, self.base)  # every block has so many steps
        for step in range(ahead):
            ask(step, step)
        ptx.wait_for_launches_before()
        ptx.let_next_launch_begin()
        with T.serial(tirx.const(ahead, "int32")) as step:
            bring(step, step)
        if isinstance(self.count, int) and self.count == ahead:
            return
        with T.serial(self.count - ahead) as more:
            step = T.bind(more + ahead)
            stage = T.bind(step % stages)
            ptx.barrier_wait(self._empty(stage), T.bitwise_xor(T.bitwise_and(step // stages, 1), 1))
            ask(step, stage)
            bring(step, stage)

    def _consume(self) -> None:
        kernel = self.kernel
        kind = "uint32" if kernel.types[0] in ("int8", "uint8") else "float32"
        registers = self.rows // 2
        sums, base = local(registers, kind), local(2, "uint64")
        member = T.bind(kernel.thread - PRODUCERS)
        ptx.matrix_descriptor(base[0], kernel.shared.at(0))
        ptx.matrix_descriptor(base[1], kernel.shared.at(self.left_at))
        if self.base == 0:  # a part of k may be empty
            for i in range(registers):
                T.buffer_store(sums, tirx.const(0, kind), [i])
        with T.serial(self.count) as step:
            stage = T.bind(step % self.stages)
            ptx.barrier_wait(self._full(stage), T.bitwise_and(step // self.stages, 1))
            # What came by `copy_async` was written as by a thread, not as by wgmma's own kind of access.
            ptx.async_proxy_fence()
            at_stage = T.Cast("uint64", stage)
            weights = T.bind(base[0] + at_stage * T.uint64(WEIGHT_BYTES // 16))
            rows = T.bind(base[1] + at_stage * T.uint64(self.left.size // 16))
            ptx.wgmma_fence()
            for i in range(SWIZZLED_BYTES // ptx.CONTRACTION_BYTES):
                adds = T.uint32(1) if i else T.if_then_else(step > 0, T.uint32(1), T.uint32(0))
                forward = T.uint64(i * ptx.CONTRACTION_BYTES // 16)
                types = (kernel.types[1], kernel.types[0])
                ptx.wgmma([sums[r] for r in range(registers)], weights + forward, rows + forward, types, adds)
            ptx.wgmma_commit()
            ptx.wgmma_wait(0)
            with when(member == 0):
                ptx.barrier_arrive(self._empty(stage))
        # All warps have read all stages: sums take their place.
        ptx.warpgroup_barrier(1)
        warp, lane = tirx.floordiv(member, WARP), T.bind(tirx.floormod(member, WARP))
        column = T.bind(warp * 16 + tirx.floordiv(lane, 4))
        for j in range(self.rows // 8):
            for h in range(2):
                for c in range(2):
                    row = j * 8 + tirx.floormod(lane, 4) * 2 + c
                    value = sums[j * 4 + h * 2 + c]
                    bits = value if kind == "uint32" else tirx.reinterpret("uint32", value)
                    target = kernel.shared.at((row * _PITCH + column + h * 8) * 4)
                    ptx.store_shared(target, [bits])

    def _meet(self) -> None:
        if self.kernel.plan.split == 1:
            ptx.block_barrier()
        else:
            ptx.cluster_arrive()
            ptx.cluster_wait()

    def _store(self) -> None:
        """Add the parts of the sums, in order, and store this block's rows; all threads take part."""
        kernel, split = self.kernel, self.kernel.plan.split
        vector = min(4, kernel.writer.result.vector("n")) if self._is_aligned else 1
        per_row = PACKED_ROWS // vector
        own = -(-self.rows // split)
        items = own * per_row
        with T.serial(tirx.const(-(-items // _THREADS), "int32")) as turn:
            item = T.bind(turn * _THREADS + kernel.thread)
            row = T.bind(tirx.floordiv(item, per_row) * split + kernel.rank)
            column = T.bind(tirx.floormod(item, per_row) * vector)
            at = {
                **kernel.at,
                "m": T.bind(kernel.row + T.Cast("int64", row)),
                "n": T.bind(kernel.column + T.Cast("int64", column)),
            }
            with T.If(tirx.all(row < self.rows, at["m"] < kernel.m)), T.Then():
                totals = self._total(row, column, vector)
                end = None if kernel.n % PACKED_ROWS == 0 else int64(kernel.n)
                kernel.writer.write([partial(getitem, totals, i) for i in range(vector)], at, "n", [], end)
        if split > 1:  # no block ends before others have read its sums
            ptx.cluster_arrive()
            ptx.cluster_wait()

    @property
    def _is_aligned(self) -> bool:
        return self.kernel.writer.result.is_contiguous("n")

    def _total(self, row: Expr, column: Expr, vector: int) -> Any:
        """Sums of `vector` neighbours of a row, over the blocks of the cluster."""
        kernel, split = self.kernel, self.kernel.plan.split
        kind = "int32" if kernel.types[0] in ("int8", "uint8") else "float32"
        totals, part, remote = local(vector, kind), local(vector, "uint32"), local(1, "uint32")
        pointer = kernel.shared.at((row * _PITCH + column) * 4)
        own = None if split == 1 else T.bind(ptx.shared_address(pointer))
        for rank in range(split):
            if split == 1:
                ptx.load_shared([part[i] for i in range(vector)], pointer)
            else:
                ptx.remote_address(remote[0], own, rank)
                ptx.load_remote([part[i] for i in range(vector)], remote[0])
            for i in range(vector):
                value = tirx.reinterpret(kind, part[i])
                T.buffer_store(totals, value if rank == 0 else totals[i] + value, [i])
        return totals
