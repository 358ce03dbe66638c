"""Products of few rows by a packed weight on Hopper, at the rate of memory.

Each weight is read once and used for up to 64 rows, so that bytes on their way are all that counts. The tensor cores'
operands are swapped: 64 columns of the weight are wgmma's rows, and the rows of the left operand, rounded up to a
multiple of 8, its columns. A block has 64 columns, or twice as many, and a part of k. One thread asks for tiles of
weights by bulk copies, a ring of stages ahead, and for the first of them before the launch that writes the left operand
has ended (`ptx.griddepcontrol_wait`): launches in a row keep memory busy between them. The left operand follows by
asynchronous copies of all producers, in a ring of its own.

The blocks of a cluster have the parts of k of the same columns. Each writes its sums of a row to the shared memory of
the block that stores this row, which adds them in a fixed order. Writing takes one meeting of the blocks, at the end,
while reading the sums of others would take two, for no block may end before others have read its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from ..core.launch import SWIZZLED_ALIGN, SharedMemory, at_least_one, enable_pdl, launch, local
from ..core.operand import GlobalView
from ..tile.ring import Ring
from . import wgmma_matmul
from .operand_tiles import PACKED_ROWS, PRODUCERS, OperandTile, Source

MAX_ROWS = 64
"""Maximum number of rows of the left operand, which one tile has."""

WEIGHT_BYTES = PACKED_ROWS * SWIZZLED_BYTES
"""Bytes of a tile of weights."""

_LOADED_ROWS = 16  # of the left operand, that the producers copy at a time
_PAD = 4  # floats from a row of sums to the next: rows of a warp's fragment begin in other banks

# Stages of weights and of the left operand. For 1 to 16 rows four blocks of one kind, or three of the other, share a
# multiprocessor, those of the next launch among them. Measured on an H200: parts of 16 steps (4,096 columns) take
# 10.3 us with 76 KB of stages, 11.1 with 56 KB and 12.3 with 110 KB, which leave no room for the next launch; parts of
# 64 steps (14,336 columns) 35.5, 28.6 and 28.9 us. More rows want fewer parts, because all parts are added up, and
# more bytes, of which two blocks share a multiprocessor's; 64 rows by 14,336 columns take 31.0 us with 7 and 6 stages,
# 32.9 with 6 and 6, which in turn suit parts of k: by 4,096 columns 12.2 us, 13.0 with 8 and 5.
SHORT_STEPS = 16
SHORT_STAGES = (7, 7)
LONG_STAGES = (5, 5)
# In a decode step of an H200, products of one row by 4,096 x 14,336 take 26.9 to 28.5 us with 11 stages, 30.7 with 5;
# by 4,096 x 6,144 in two parts 13.0 and 16.9. In four parts, by 14,336 x 4,096, it is 40.9 and 31.1.
DEEP_STAGES = (11, 5)
DEEP_SPLIT = 2
"""Parts of k, at most, of a weight whose blocks all run at once with `DEEP_STAGES`."""
MANY_ROWS_STAGES = (6, 6)
MANY_ROWS_LONG_STAGES = (7, 6)
MIN_ROWS = 16
BLOCKS_PER_MULTIPROCESSOR = 2
"""At most where k is split, of blocks with no more than `MIN_ROWS`; one for others."""


@dataclass(frozen=True)
class SkinnyPlan:
    """How a kernel shares its work.

    Attributes
    ----------
    split : int
        Blocks of a cluster, each with a part of k: 1, 2, 4 or 8.
    stages : int
        Maximum stages of weights, 8 KB each for 64 columns, that a block asks for before it needs the first.
    row_stages : int
        Number of stages of the left operand.
    groups : int
        Number of groups of 64 columns of a block, with a warpgroup each.
    evicts_first : bool
        Whether weights are the first that make room in the second-level cache, which then keeps what else is read.
    """

    split: int
    stages: int
    row_stages: int
    groups: int = 1
    evicts_first: bool = False


def skinny_plan(problem: MatmulProblem, gpu: GpuTarget) -> SkinnyPlan:
    """The plan of a problem: parts of k until all multiprocessors have work, and room for the next launch."""
    element = bytes_of(problem.rhs.dtype)
    n, k = problem.rhs.size("n"), problem.rhs.size("k")
    assert isinstance(n, int) and isinstance(k, int), "packed weights are of known extents"
    batches = [e for name, e in zip(problem.rhs.index_map, problem.rhs.shape, strict=True) if name.startswith("b")]
    tiles = -(-n // PACKED_ROWS) * prod(e for e in batches if isinstance(e, int))
    steps = -(-k * element // SWIZZLED_BYTES)
    split = 1
    is_fewest = _rows(problem) <= MIN_ROWS
    most = gpu.multiprocessors * (BLOCKS_PER_MULTIPROCESSOR if is_fewest else 1)
    while split < 8 and tiles * split * 2 <= most and steps >= split * 2 * 4:
        split *= 2
    stages = SHORT_STAGES if steps <= split * SHORT_STEPS else LONG_STAGES
    if stages == LONG_STAGES and split <= DEEP_SPLIT and tiles * split <= most:
        stages = DEEP_STAGES
    if not is_fewest:
        stages = MANY_ROWS_STAGES if split > 1 else MANY_ROWS_LONG_STAGES
    # Where two such weights do not fit the cache, those of a model do not, and each is read from memory: 2 to 4 % less
    # time on an H200 for eight weights of 4,096 x 4,096. Weights that all fit would be lost again and again: 14 to 19 %
    # more time for 33 to 38 MB of small ones.
    evicts_first = tiles * steps * WEIGHT_BYTES * 2 > gpu.cache_bytes
    return SkinnyPlan(split, *stages, evicts_first=evicts_first)


def _rows(problem: MatmulProblem) -> int:
    """Rows that share the weight."""
    shared = problem.rhs.index_map
    sizes = [e for name, e in zip(problem.lhs.index_map, problem.lhs.shape, strict=True) if name not in ("k", *shared)]
    return prod(e for e in sizes if isinstance(e, int))


def unsupported_reason(problem: MatmulProblem, gpu: GpuTarget) -> str:
    """Why `skinny_gemm_kernel` cannot solve a problem; empty where it can. Any number of rows is right."""
    reason = wgmma_matmul.unsupported_reason(problem, gpu)
    if not reason and not problem.rhs.layout.inner_dims:
        return "the right operand is not packed"
    return reason


def skinny_gemm_kernel(problem: MatmulProblem, gpu: GpuTarget, plan: SkinnyPlan | None = None) -> tirx.PrimFunc:
    """The kernel of a product of few rows by a packed weight, one launch; `MatmulProblem` says its parameters.

    It may begin before the launch before it has ended, if the right operand is a constant.

    Raises EncodingError if `unsupported_reason` says why the problem is not one for this kernel.
    """
    reason = unsupported_reason(problem, gpu)
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
            _Kernel(lhs, rhs, writer, plan or skinny_plan(problem, gpu), (m, n, k), counts).emit()
    in_tile = [*([problem.init] if problem.init else []), *(problem.epilogue.operands if problem.epilogue else ())]
    return enable_pdl(tied_to(function.result, in_tile, 2, problem.result), [1])


class _Kernel:
    """The launch, and what a block of it does."""

    def __init__(
        self,
        lhs: GlobalView,
        rhs: GlobalView,
        writer: EpilogueWriter,
        plan: SkinnyPlan,
        sizes: tuple[Expr, Expr, Expr],
        counts: dict[str, Expr],
    ) -> None:
        self.lhs, self.rhs, self.writer, self.counts = lhs, rhs, writer, counts
        self.m, self.n, self.k = sizes
        self.types = (lhs.nominal, rhs.nominal)
        self.columns = PACKED_ROWS * plan.groups
        self.threads = PRODUCERS + WARPGROUP * plan.groups
        self.pitch = self.columns + _PAD
        self.sum_type = "int32" if lhs.nominal in ("int8", "uint8") else "float32"
        steps = -(-self.k // (SWIZZLED_BYTES // bytes_of(rhs.nominal)))
        # Every block has a step.
        while plan.split > steps:
            plan = replace(plan, split=plan.split // 2)
        self.plan, split = plan, plan.split
        # Steps of k of every block, and how many blocks have one more.
        self.base, self.more = divmod(steps, split)
        self.rows = self._rows()
        loaded = -(-self.rows // _LOADED_ROWS) * _LOADED_ROWS
        self.left = OperandTile.of(lhs, "m", loaded, self.m, self.k, may_transpose=False)
        self.right = replace(OperandTile.of(rhs, "n", self.columns, self.n, self.k), evicts_first=plan.evicts_first)
        most = -(-steps // split)
        self.stages = max(2, min(plan.stages, most))
        self.row_stages = max(2, min(plan.row_stages, most))
        self.own_rows = -(-self.rows // split)
        self.sums_size = self.own_rows * self.pitch * 4

    def _rows(self) -> int:
        """Rows of the left operand that a tile has, as wgmma counts columns."""
        rows = min(self.m, MAX_ROWS) if isinstance(self.m, int) else MAX_ROWS
        # Of integers, wgmma has no 40 and no 56 columns.
        unit = 16 if rows > 24 and self.sum_type == "int32" else 8
        return max(unit, -(-rows // unit) * unit)

    def emit(self) -> None:
        """Write the launch."""
        split, stages, row_stages = self.plan.split, self.stages, self.row_stages
        self.shared = SharedMemory()
        # Weights first, so that every tile begins at a multiple of the swizzle's period; at the end sums lie there.
        self.shared.take(stages * self.right.size, SWIZZLED_ALIGN)
        self.left_at = self.shared.take(row_stages * self.left.size, SWIZZLED_ALIGN)
        self.parts_at = self.shared.take((split - 1) * self.sums_size)
        self.weight_ring = Ring(self.shared, stages, producers=1)
        self.row_ring = Ring(self.shared, row_stages, PRODUCERS, self.plan.groups)
        row_tiles = ceil_div(self.m, MAX_ROWS)
        column_tiles = -(-self.n // self.columns)
        tiles: Expr = row_tiles * column_tiles
        for count in self.counts.values():
            tiles = tiles * count
        with launch(at_least_one(int64(tiles * split)), self.threads, split) as place:
            self.shared.open()
            self.rank, self.thread = place.rank, place.thread
            tile = T.bind(tirx.floordiv(T.Cast("int64", place.block), split))
            self.row = T.bind(tirx.floormod(tile, int64(row_tiles)) * MAX_ROWS)
            rest = tirx.floordiv(tile, int64(row_tiles))
            self.column = T.bind(tirx.floormod(rest, int64(column_tiles)) * self.columns)
            rest = tirx.floordiv(rest, int64(column_tiles))
            places = unravel(rest, list(self.counts.values())) if self.counts else []
            self.at: Coordinates = dict(zip(self.counts, places, strict=True))
            self.count: Expr = self.base
            if self.more:
                self.count = T.bind(self.base + T.Select(self.rank < self.more, 1, 0))
            self.first: Expr = T.bind(self.rank * self.base + T.min(self.rank, self.more))
            self._block()

    def _block(self) -> None:
        with when(self.thread == 0):
            self._begin()
        ptx.griddepcontrol_wait()
        ptx.launch_dependents()
        if self.plan.split > 1:
            ptx.cluster_arrive()
        ptx.block_barrier()
        with T.If(self.thread < PRODUCERS):
            with T.Then():
                self._produce()
                self._meet_first()
            with T.Else():
                sums = self._consume()
                self._meet_first()
                self._share(sums)
        if self.plan.split == 1:
            ptx.block_barrier()
        else:
            ptx.cluster_barrier()
        self._store()

    def _meet_first(self) -> None:
        """All blocks of the cluster have begun."""
        if self.plan.split > 1:
            ptx.cluster_wait()

    def _begin(self) -> None:
        """Before the launches before have ended: barriers, and weights, which are constants."""
        self.weight_ring.initialize()
        self.row_ring.initialize()
        ptx.barrier_init_fence()
        asked = min(self.stages, self.base)  # every block has so many steps
        for step in range(asked):
            self._ask(tirx.const(step, "int32"), tirx.const(step, "int32"))

    def _ask(self, step: Expr, stage: Expr) -> None:
        """Ask for the weights of a step; one thread does it."""
        full = self.weight_ring.full(stage)
        ptx.barrier_expect(full, self.right.size)
        self.right.load_bulk(self.shared, stage * self.right.size, self.at, self.column, self.first + step, full)

    def _bring(self, step: Expr, stage: Expr) -> None:
        """Ask for the left operand of a step; all producers do it."""
        full = self.row_ring.full(stage)
        target = self.left_at + stage * self.left.size
        self.left.load(self.shared, target, self.at, self.row, self.first + step, self.thread)
        if self.left.source is Source.GATHER:
            ptx.async_proxy_fence()
            ptx.barrier_arrive(full)
        else:
            ptx.barrier_arrive_after_copies(full)

    def _produce(self) -> None:
        begun, asked = min(self.row_stages, self.base), min(self.stages, self.base)
        with T.serial(tirx.const(begun, "int32")) as step:
            self._bring(step, step)
        if isinstance(self.count, int) and self.count == min(begun, asked):
            return
        with T.serial(self.count - min(begun, asked)) as number:
            # Stages are free when the step that had them has been multiplied.
            used = T.bind(number + max(begun - self.row_stages, asked - self.stages))
            with T.If(used >= 0), T.Then():
                ptx.barrier_wait(self.row_ring.empty(self.row_ring.stage(used)), self.row_ring.parity(used))
            # Weights first: the address of the left operand takes time, in which memory would have nothing to do.
            step = T.bind(number + asked)
            with T.If(tirx.all(self.thread == 0, step < self.count)), T.Then():
                self._ask(step, self.weight_ring.stage(step))
            step = T.bind(number + begun)
            with T.If(step < self.count), T.Then():
                self._bring(step, self.row_ring.stage(step))

    def _consume(self) -> Any:
        kind = "uint32" if self.sum_type == "int32" else "float32"
        registers = self.rows // 2
        sums, base = local(registers, kind), local(2, "uint64")
        group = T.bind(tirx.floordiv(self.thread, WARPGROUP) - PRODUCERS // WARPGROUP)
        self.member = T.bind(tirx.floormod(self.thread, WARPGROUP))
        self.first_column = group * PACKED_ROWS
        ptx.matrix_descriptor(base[0], self.shared.at(group * WEIGHT_BYTES))
        ptx.matrix_descriptor(base[1], self.shared.at(self.left_at))

        def multiply(step: Expr) -> None:
            stage, row_stage = self.weight_ring.wait(step), self.row_ring.wait(step)
            # What came by `copy_async` was written as by a thread, not as by wgmma's own kind of access.
            ptx.async_proxy_fence()
            weights = T.bind(base[0] + T.Cast("uint64", stage) * T.uint64(self.right.size // 16))
            rows = T.bind(base[1] + T.Cast("uint64", row_stage) * T.uint64(self.left.size // 16))
            ptx.wgmma_fence()
            for i in range(SWIZZLED_BYTES // ptx.CONTRACTION_BYTES):
                adds = T.uint32(1) if i else T.if_then_else(step > 0, T.uint32(1), T.uint32(0))
                forward = T.uint64(i * ptx.CONTRACTION_BYTES // 16)
                types = (self.types[1], self.types[0])
                ptx.wgmma([sums[r] for r in range(registers)], weights + forward, rows + forward, types, adds)
            ptx.wgmma_commit()

        last = tirx.const(self.count - 1, "int32") if isinstance(self.count, int) else T.bind(self.count - 1)
        if self.base + bool(self.more) > 1:
            with T.serial(last) as step:
                multiply(step)
                # The step before is complete then, and its stages free.
                ptx.wgmma_wait(1)
                with when(tirx.all(self.member == 0, step > 0)):
                    self.row_ring.release(step - 1)
        # Behind the loop: ptxas lets sums be read before it waits for products that a loop has begun.
        multiply(last)
        ptx.wgmma_wait(0)
        # All warps have read all stages: sums take their place.
        ptx.named_barrier(1, WARPGROUP * self.plan.groups)
        return sums

    def _share(self, sums: Any) -> None:
        """Give each row of sums to the block that stores it."""
        split = self.plan.split
        warp, lane = tirx.floordiv(self.member, WARP), T.bind(tirx.floormod(self.member, WARP))
        column = T.bind(self.first_column + warp * 16 + tirx.floordiv(lane, 4))
        remote = local(2, "uint32")
        for c in range(2):
            row = tirx.floormod(lane, 4) * 2 + c
            at = (tirx.floordiv(row, split) * self.pitch + column) * 4
            if split > 1:
                owner = T.bind(tirx.floormod(row, split))
                # Of the parts that come from others, the first is that of the block behind the owner.
                part = tirx.floormod(self.rank - owner - 1 + split, split)
                at = at + T.Select(owner == self.rank, 0, self.parts_at + part * self.sums_size)
                ptx.remote_address(remote[c], T.bind(ptx.shared_address(self.shared.at(at))), owner)
                at = 0
            for j in range(self.rows // 8):
                if isinstance(self.m, int) and j * 8 >= self.m:
                    continue
                for h in range(2):
                    value = sums[j * 4 + h * 2 + c]
                    bits = value if self.sum_type == "int32" else tirx.reinterpret("uint32", value)
                    forward = (j * 8 // split * self.pitch + h * 8) * 4
                    if split == 1:
                        ptx.store_shared(self.shared.at(at + forward), [bits])
                    else:
                        ptx.store_remote(remote[c] + T.uint32(forward), [bits])

    def _store(self) -> None:
        """Add the parts of the sums, in order, and store this block's rows; all threads take part."""
        split = self.plan.split
        vector = min(4, self.writer.result.vector("n")) if self.writer.result.is_contiguous("n") else 1
        per_row = self.columns // vector
        items = self.own_rows * per_row
        with T.serial(tirx.const(-(-items // self.threads), "int32")) as turn:
            item = T.bind(turn * self.threads + self.thread)
            index = T.bind(tirx.floordiv(item, per_row))
            row = T.bind(index * split + self.rank)
            column = T.bind(tirx.floormod(item, per_row) * vector)
            at = {
                **self.at,
                "m": T.bind(self.row + T.Cast("int64", row)),
                "n": T.bind(self.column + T.Cast("int64", column)),
            }
            with T.If(tirx.all(row < self.rows, at["m"] < self.m)), T.Then():
                totals = self._total(index, column, vector)
                end = None if self.n % self.columns == 0 else int64(self.n)
                self.writer.write([partial(getitem, totals, i) for i in range(vector)], at, "n", [], end)

    def _total(self, index: Expr, column: Expr, vector: int) -> Any:
        """Sums of `vector` neighbours of a row of this block: its own part, then those of the blocks behind it."""
        totals, part = local(vector, self.sum_type), local(vector, "uint32")
        own = T.bind((index * self.pitch + column) * 4)
        for number in range(self.plan.split):
            begin = own if number == 0 else own + (self.parts_at + (number - 1) * self.sums_size)
            ptx.load_shared([part[i] for i in range(vector)], self.shared.at(begin))
            for i in range(vector):
                value = tirx.reinterpret(self.sum_type, part[i])
                T.buffer_store(totals, value if number == 0 else totals[i] + value, [i])
        return totals
