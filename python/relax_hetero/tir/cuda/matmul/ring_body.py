"""Block of a quantized matrix product of one or two rows, whose weights come through a ring in shared memory (Hopper).

The blocks are persistent, one per multiprocessor. One warp issues bulk copies of the weights of a column tile, which
are contiguous, and of their scales; the others multiply. Weights in flight take no registers: a row by 32,000 columns
of depth 4,096 reads 4.4 TB/s of an H200's 4.6, 3.7 with weights in flight in registers.

A decode step through four layers of 4,096 (Q4_0, 32,000 words, 512 tokens in the cache) takes 229 us on an H200, 245
with weights in registers. What it depends on:

- With two resident blocks it takes 349 us: those of the next launch are placed where blocks of this one have ended, and
  then two of them share one multiprocessor while another has none. So a block reserves more than half of the shared
  memory.
- If the next launch fills rings of 130 to 220 KB before this one has ended, it takes 248 to 292 us: its copies delay
  the small kernels between both. So only `_EARLY_STAGES` are copied before the wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.block_weights import chunk_of
from ....encoding.problem import QuantizedMatmulProblem
from ....target.gpu_target import WARP, GpuTarget
from ...core.builder import Expr, int64, when
from ..core import ptx
from ..core.launch import SharedMemory
from ..tile.ring import BARRIER_BYTES, Ring
from .block_body import BlockBody
from .block_fragments import StagedFragments
from .block_plan import PARTS, BlockPlan, BlockWork
from .weight_parts import parts_of

_WARPS, _MAX_ROWS, _RUN = 16, 2, 2
_EARLY_STAGES = 2
"""Stages that are copied before the previous launch has ended."""
_MAX_SUMS_BYTES = 8 << 10
"""Maximum bytes of accumulators of column tiles that are reduced together."""
_CONSUMERS_BARRIER = 1


@dataclass(frozen=True)
class RingPlan(BlockPlan):
    """Plan with weights in a ring; `fragments`, `groups` and `ahead` are 1."""

    run: int = 1  # chunks of a stage that a warp multiplies
    stages: int = 2


def ring_plan(problem: QuantizedMatmulProblem, gpu: GpuTarget) -> RingPlan | None:
    """Plan of a problem of one or two rows; None if a ring does not apply."""
    extents = [extent for extent in problem.result.shape[:-1] if isinstance(extent, int)]
    rows, chunk = prod(extents), chunk_of(problem.bits)
    is_known = len(extents) == len(problem.result.shape) - 1 and 1 <= rows <= _MAX_ROWS
    fits = gpu.bulk_copies and gpu.overlaps_launches and PARTS[problem.lhs.dtype] == 1 and problem.columns > 0
    if not (is_known and fits) or problem.depth % chunk or problem.depth < chunk * _WARPS:
        return None
    run = min(_RUN, problem.depth // (chunk * _WARPS))
    if problem.bits == 16 or any(_WARPS * run * chunk % part.unit for part in parts_of(problem)):
        return None
    work = RingWork(problem, RingPlan(1, 1, _WARPS, 1, run, 0), rows)
    work.share(gpu, 1, 0, 0)
    stages = (_bytes_per_block(gpu) - work.shared_bytes) // (work.stage_bytes + 2 * BARRIER_BYTES)
    return RingPlan(1, 1, _WARPS, 1, run, stages) if stages >= 2 else None


def _bytes_per_block(gpu: GpuTarget) -> int:
    """Shared memory of a block: more than half of a multiprocessor's."""
    return gpu.shared_bytes_sm // 2 + (1 << 10)


class RingWork(BlockWork):
    """`BlockWork` with the bytes of a stage: weights, scales, and zero points.

    Attributes
    ----------
    stage_chunks : int
        Chunks of a column in a stage.
    stage_units : list of int
        Units of each part of a column in a stage.
    part_offsets : list of int
        Offsets of the parts in a stage, after its weights.
    pieces : int
        Stages of a column tile; the last one may have fewer chunks.
    """

    def __init__(self, problem: QuantizedMatmulProblem, plan: RingPlan, m: int) -> None:
        super().__init__(problem, plan, m)
        self.stages, self.run, self.held_rows = plan.stages, plan.run, m
        self.stage_chunks = plan.warps * plan.run
        self.pieces = -(-self.chunks // self.stage_chunks)
        self.stage_units = [self.stage_chunks * self.chunk // part.unit for part in self.part_list]
        self.part_offsets, self.stage_bytes = list[int](), self.stage_chunks * self.chunk_bytes
        for part, units in zip(self.part_list, self.stage_units, strict=True):
            self.part_offsets.append(self.stage_bytes)
            self.stage_bytes += units * part.unit_bytes

    def share(self, gpu: GpuTarget, row_tiles: Expr, blocks_per_sm: int, has_points: int) -> None:
        """See `BlockWork.share`."""
        self.blocks_per_sm = 1
        self.stride = min(self.column_tiles, gpu.multiprocessors)
        self.batch = self._batch(_MAX_SUMS_BYTES)
        self.stages_at = self.batch * self.sums * 4
        self.held_at = self.stages_at + self.stages * self.stage_bytes
        self.arrived_at = self.held_at + self.held_rows * self.pitch * 4
        self.shared_bytes = self.arrived_at + BARRIER_BYTES


class RingBody(BlockBody):
    """Writer of the code of a block with weights in a ring."""

    work: RingWork
    weights: StagedFragments

    def _work_of(self, problem: QuantizedMatmulProblem, plan: BlockPlan, m: Expr) -> BlockWork:
        assert isinstance(plan, RingPlan) and isinstance(m, int), "a ring needs a static number of rows"
        return RingWork(problem, plan, m)

    @property
    def threads(self) -> int:
        """See `BlockBody.threads`; the last warp issues copies."""
        return super().threads + WARP

    def reserve(self, shared: SharedMemory) -> None:
        """See `BlockBody.reserve`."""
        super().reserve(shared)
        self.ring = Ring(shared, self.work.stages, producers=1, consumers=self.work.plan.warps)
        shared.reserve(max(0, _bytes_per_block(self.gpu) - shared.size), 1)

    def _open(self) -> None:
        self.weights = StagedFragments(self.work, self.packed, self.lane, self.high)
        self.left = self._left_rows(self.lhs, self.first_row)

    def _barrier(self) -> None:
        ptx.named_barrier(tirx.const(_CONSUMERS_BARRIER, "int32"), super().threads)

    def _work(self) -> None:
        work, first_copier = self.work, super().threads
        num_tiles: Expr = int64(1)
        if work.is_persistent:
            num_tiles = T.bind(tirx.floordiv(work.column_tiles - 1 - self.first_block, work.stride) + 1)
        items = T.bind(T.Cast("int32", num_tiles * work.pieces))
        num_early = T.bind(T.min(items, min(work.stages, _EARLY_STAGES)))
        self._release()
        with when(tirx.EQ(self.thread, first_copier)):
            self.ring.initialize()
            ptx.barrier_init_fence()
            with T.serial(num_early) as item:
                self._copy(item)
        self.left.open_copies()
        ptx.griddepcontrol_wait()
        ptx.block_barrier()
        with T.If(self.thread < first_copier):
            with T.Then():
                self.left.hold()
                self._process(num_tiles)
            with T.Else(), when(tirx.EQ(self.lane, 0)):
                with T.serial(items - num_early) as number:
                    item = T.bind(num_early + number)
                    self.ring.acquire(item)
                    self._copy(item)

    def _stage(self, item: Expr) -> Expr:
        """Offset of an item's stage."""
        return T.bind(self.work.stages_at + self.ring.stage(item) * self.work.stage_bytes)

    def _copy(self, item: Expr) -> None:
        """Issue the copies of an item, a piece of a column tile, by one thread."""
        work = self.work
        tile = T.bind(self.first_block + T.Cast("int64", tirx.floordiv(item, work.pieces)) * work.stride)
        piece = T.bind(tirx.floormod(item, work.pieces))
        begin, barrier = self._stage(item), self.ring.full(self.ring.stage(item))

        def extent(of_stage: int, of_tile: int) -> Expr:
            """Extent of the piece; the last one of a tile may be shorter."""
            last = of_tile - (work.pieces - 1) * of_stage
            if last == of_stage:
                return tirx.const(of_stage, "int32")
            return T.bind(T.Select(tirx.EQ(piece, work.pieces - 1), last, of_stage))

        parts = list(zip(work.part_list, work.stage_units, work.part_offsets, self.weights.part_data, strict=True))
        chunks = extent(work.stage_chunks, work.chunks)
        units = [extent(of_stage, part.units) for part, of_stage, _, _ in parts]
        sizes = [count * part.unit_bytes for count, (part, *_) in zip(units, parts, strict=True)]
        ptx.barrier_expect(barrier, sum(sizes, chunks * work.chunk_bytes))
        first = T.bind((tile * work.chunks + piece * work.stage_chunks) * (work.chunk_bytes // 4))
        source = T.address_of(self.weights.weight[first])
        ptx.bulk_load(self.shared.at(begin), source, chunks * work.chunk_bytes, barrier, evicts_first=True)
        for size, (part, of_stage, offset, data) in zip(sizes, parts, strict=True):
            source = T.address_of(data[T.bind((tile * part.units + piece * of_stage) * (8 * part.width))])
            ptx.bulk_load(self.shared.at(begin + offset), source, size, barrier, evicts_first=True)

    def _tile(self, index: Expr, num_tiles: Expr, index_in_batch: Expr) -> None:
        work, plan = self.work, self.work.plan
        for number in range(4):
            T.buffer_store(self.totals, T.float32(0), [number])
        with T.serial(tirx.const(work.pieces, "int32")) as piece:
            item = T.bind(T.Cast("int32", index) * work.pieces + piece)
            self.ring.wait(item)
            begin = self._stage(item)
            for number in range(work.run):
                chunk = T.bind(number * plan.warps + self.warp)
                chunk_of_tile = T.bind(piece * work.stage_chunks + chunk)
                with when(work.chunks % work.stage_chunks == 0 or chunk_of_tile < work.chunks):
                    self.weights.load_chunk(self.shared, begin, chunk, work.part_offsets)
                    self._multiply_fragment(0, 0, T.bind(T.Cast("int64", chunk_of_tile) * work.chunk))
            ptx.warp_barrier()
            with when(tirx.EQ(self.lane, 0)):
                self.ring.release(item)
        self._stage_sums(index_in_batch)
