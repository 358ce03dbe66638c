"""Quantized products of a mixture of experts: each row, a pair of a token and one of its experts, has its own matrix.

Matrices follow each other, so an expert is an offset of column tiles. Which weights a block reads is known only when
the previous launch has ended. If pairs are few, a block has one of them (`ExpertBody`). From `MIN_GROUPED_PAIRS` on, it
has up to `GROUP_COLUMNS` of one expert, which the instruction multiplies at the cost of one (`GroupedBody`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.block_weights import FRAGMENT_COLUMNS
from ....encoding.problem import QuantizedMatmulProblem
from ....target.gpu_target import ALL_LANES, WARP, GpuTarget
from ...core.builder import Expr, ceil_div, either, int64, when
from ...core.view import Coordinates, extent_of
from ..core import ptx
from ..core.launch import SharedMemory, local, wait_late
from ..core.operand import GpuOperand
from ..tile.epilogue import EpilogueWriter
from ..tile.register_tile import add_lanes_before, reduce_lanes
from .block_body import BlockBody
from ..tile.ring import Ring
from .block_fragments import StagedFragments, WeightFragments
from .block_plan import GROUP_COLUMNS, PARTS, BlockPlan, BlockWork, SumPlan, expert_plan
from .block_rows import LeftRows, RowSource

_LEFT_OUT = tirx.const(-math.inf, "float32")

STAGED = False
MAX_SUM_STAGES = 3
PREFETCH = False
SKIP = True
MIN_GROUPED_PAIRS = 256
"""Minimum pairs that are grouped by expert, which takes a block some microseconds."""


def expert_body(
    problem: QuantizedMatmulProblem,
    gpu: GpuTarget,
    plan: BlockPlan | None,
    lhs: GpuOperand,
    packed: list[GpuOperand],
    writer: EpilogueWriter,
    routes: list[GpuOperand],
    biases: list[GpuOperand],
) -> ExpertBody:
    """Body of a product with experts; the plan of `expert_plan` by default. Routes are the index and perhaps shares."""
    pairs = extent_of([writer.result], "m")
    # A row of float32 takes three of the instruction's eight.
    is_grouped = PARTS[problem.lhs_type] == 1 and isinstance(pairs, int) and pairs >= MIN_GROUPED_PAIRS
    is_few = isinstance(pairs, int) and pairs * problem.columns <= FRAGMENT_COLUMNS * gpu.multiprocessors
    if STAGED and is_few and gpu.bulk_copies and problem.shares is not None and isinstance(problem.shares.shape[1], int):
        plan = staged_sum_plan(problem, problem.shares.shape[1])
        return StagedSumBody(problem, gpu, plan, lhs, packed, writer, routes=routes, biases=biases)
    kind = SumBody if problem.shares is not None else GroupedBody if is_grouped and not problem.second else ExpertBody
    return kind(problem, gpu, plan or expert_plan(problem, gpu), lhs, packed, writer, routes=routes, biases=biases)


class _Rows:
    """Rows of the left operand that a block reads, by their number in the block."""

    def __init__(self, body: ExpertBody) -> None:
        self.data, self._body = body.lhs.data, body

    def address(self, at: Coordinates) -> Expr:
        """See `RowSource.address`."""
        return self._body.lhs.address({**at, "m": self._body.left_row(at["m"])})


class ExpertBody(BlockBody):
    """Writer of the code of a block with one pair."""

    def __init__(self, *arguments: Any, routes: list[GpuOperand], biases: list[GpuOperand]) -> None:
        super().__init__(*arguments)
        self._index, self._shares, self._biases = routes[0], routes[-1], biases

    def _work_of(self, problem: QuantizedMatmulProblem, plan: BlockPlan, m: Expr) -> BlockWork:
        self._pairs = m
        return BlockWork(problem, plan, 1)

    @property
    def row_step(self) -> int:
        """See `BlockBody.row_step`; row tiles are counted."""
        return 1

    def count_row_tiles(self) -> Expr:
        """Number of row tiles: pairs, or an upper bound of their groups."""
        return self._pairs

    def left_row(self, row: Expr) -> Expr:
        """Row of the left operand of a row of the block."""
        problem = self.work.problem
        assert problem.index is not None
        pair = self._pair(row)
        return pair if problem.has_row_per_expert else tirx.floordiv(pair, int64(problem.index.shape[1]))

    def _pair(self, row: Expr) -> Expr:
        """Pair of a row of the block, int64."""
        return self.first_row + row

    def _expert_of(self, pair: Expr) -> Expr:
        """Expert of a pair, int32; negative for a pair that is not multiplied."""
        return T.min(T.Cast("int32", self._index.data[pair]), self.work.problem.experts - 1)

    def _emit_block(self) -> None:
        if self.gpu.overlaps_launches:
            # In this order, the next launch may read the index before it waits.
            ptx.griddepcontrol_wait()
            ptx.launch_dependents()
        self._emit_tile()

    @property
    def waits_at_end(self) -> bool:
        """True if a late wait is that of the epilogue, as the previous launch may write one of its operands."""
        return any(view.runs_along("m") for view in self.writer.views)

    def _release(self) -> None:
        pass

    def _wait(self) -> None:
        if not self.waits_at_end:
            wait_late()

    def _load_operands(self) -> None:
        if not self.waits_at_end:
            super()._load_operands()

    def _finish(self, first_index: Expr, count: Expr) -> None:
        if self.waits_at_end:
            wait_late()
        super()._finish(first_index, count)

    def _emit_tile(self) -> None:
        """Write the code after the wait for the previous launch."""
        self._expert = T.bind(self._expert_of(self.first_row))
        either(self._expert >= 0, super()._emit_block, wait_late)

    def _open(self) -> None:
        self._first_tile = T.bind(T.Cast("int64", self._expert) * self.work.column_tiles)
        self.weights = WeightFragments(self.work, self.packed, self.lane, self.high)
        self.left = self._left_rows(_Rows(self), int64(0))

    def _initial(self, number: int, tile: Expr) -> Expr:
        """The bias of the row's expert, of the first of the warps that split k, and of the first part of the row."""
        if not self._biases:
            return super()._initial(number, tile)
        work, i = self.work, number % 4
        product, fragment = divmod(number // (work.plan.groups * 4), work.product_fragments)
        column = tile * work.product_columns + T.Cast("int64", fragment * FRAGMENT_COLUMNS + self.high + 8 * (i // 2))
        columns = work.problem.columns
        bias = self._biases[product].data[self._expert * columns + T.min(column, int64(columns - 1))]
        conditions = [tirx.EQ(self.k_warp, 0)]
        if work.parts > 1:
            conditions.append(tirx.EQ(self.low, 0) if i % 2 == 0 else tirx.const(False))
        return T.Select(tirx.all(*conditions), bias, T.float32(0))

    def _load(self, slot: int, tile_of_block: Expr, index: Expr) -> None:
        super()._load(slot, self._first_tile + tile_of_block, index)


class SumWork(BlockWork):
    """`BlockWork` of a token, with a row in shared memory for each of its experts."""

    plan: SumPlan

    def __init__(self, problem: QuantizedMatmulProblem, plan: SumPlan) -> None:
        super().__init__(problem, plan, 1)
        self.held_rows = plan.used * self.parts


class _ExpertRows(LeftRows):
    """Rows of a token's experts, of which a warp multiplies one."""

    work: SumWork
    expert: Expr

    @property
    def _num_rows(self) -> Expr:
        return self.work.plan.used

    @property
    def _first_held(self) -> Expr:
        return self.expert * self.work.parts

    @property
    def _rows_of_lanes(self) -> int:
        return self.work.parts


class SumBody(ExpertBody):
    """Writer of the code of a block with the pairs of a token, whose products it adds up, times their shares.

    Warps of an expert split k, and multiply their accumulators by its share before the reduction over all warps. Pairs
    of a negative index, whose rows may have any numbers, multiply the first expert, and add 0.
    """

    work: SumWork
    waits_at_end = False

    def _work_of(self, problem: QuantizedMatmulProblem, plan: BlockPlan, m: Expr) -> BlockWork:
        assert isinstance(plan, SumPlan), "warps belong to experts"
        self._pairs = m  # of tokens and column tiles
        return SumWork(problem, plan)

    def _pair(self, row: Expr) -> Expr:
        return self.first_row * self.work.plan.used + row

    def _emit_tile(self) -> None:
        plan = self.work.plan
        self.own = T.bind(tirx.floordiv(self.warp, plan.k_warps))
        self.k_warp = T.bind(tirx.floormod(self.warp, plan.k_warps))
        pair = T.bind(self._pair(self.own))
        expert = T.bind(self._expert_of(pair))
        self._expert = T.bind(T.max(expert, 0))
        # No share is negative: this one marks a pair that is left out, in the register that it has anyway.
        self._share = T.bind(T.Select(expert < 0, _LEFT_OUT, self._shares.data[pair]))
        if PREFETCH:
            self._prefetch()
        BlockBody._emit_block(self)

    def _prefetch(self) -> None:
        work = self.work
        own = work.chunks // work.plan.k_warps
        with when(tirx.all(tirx.EQ(self.lane, 0), tirx.NE(self._share, _LEFT_OUT))):
            tile = T.Cast("int64", self._expert) * work.column_tiles + self.first_block
            begin = (tile * work.chunks + self.k_warp * own) * (work.chunk_bytes // 4)
            ptx.prefetch_bulk(T.address_of(self.packed[0].data[begin]), own * work.chunk_bytes)

    def _load(self, slot: int, tile_of_block: Expr, index: Expr) -> None:
        if not SKIP:
            super()._load(slot, tile_of_block, index)
            return
        with when(tirx.NE(self._share, _LEFT_OUT)):
            super()._load(slot, tile_of_block, index)

    def _products(self, slot: int, index: Expr) -> None:
        if not SKIP:
            super()._products(slot, index)
            return
        with when(tirx.NE(self._share, _LEFT_OUT)):
            super()._products(slot, index)

    def _left_rows(self, lhs: RowSource, first: Expr) -> LeftRows:
        rows = _ExpertRows(self.work, lhs, self.shared, self.thread, (self.low, self.high), first)
        rows.expert = self.own
        return rows

    def _stage_sums(self, index_in_batch: Expr) -> None:
        for number in range(4):
            weighted = self.totals[number] * self._share
            T.buffer_store(self.totals, T.Select(tirx.EQ(self._share, _LEFT_OUT), T.float32(0), weighted), [number])
        super()._stage_sums(index_in_batch)


@dataclass(frozen=True)
class StagedSumPlan(SumPlan):
    """Plan of a block whose warps have stages of weights in shared memory; `fragments` and `ahead` are 1."""

    stage_chunks: int = 1  # chunks of a stage of a warp
    stages: int = 2


def staged_sum_plan(problem: QuantizedMatmulProblem, used: int) -> StagedSumPlan:
    work = BlockWork(problem, BlockPlan(1, 1, 1, 1), 1)
    counts = [
        count
        for count in range(1, work.chunks + 1)
        if work.chunks % count == 0 and all(count * work.chunk % part.unit == 0 for part in work.part_list)
    ]
    size = min(count for count in counts if count * work.chunk_bytes >= min(5 << 10, max(counts) * work.chunk_bytes))
    return StagedSumPlan(1, 1, used, 1, used, size, min(MAX_SUM_STAGES, work.chunks // size))


class StagedSumWork(SumWork):
    """`SumWork` with the bytes of a stage."""

    plan: StagedSumPlan

    def share(self, gpu: GpuTarget, row_tiles: Expr, blocks_per_sm: int, has_points: int) -> None:
        """See `BlockWork.share`."""
        plan, chunks = self.plan, self.plan.stage_chunks
        super().share(replace(gpu, multiprocessors=1 << 20), row_tiles, blocks_per_sm, has_points)  # a tile of columns
        self.blocks_per_sm = 1
        self.stage_units = [chunks * self.chunk // part.unit for part in self.part_list]
        self.part_offsets, self.stage_bytes = [], chunks * self.chunk_bytes
        for part, units in zip(self.part_list, self.stage_units, strict=True):
            self.part_offsets.append(self.stage_bytes)
            self.stage_bytes += units * part.unit_bytes
        self.stages_at = -(-self.shared_bytes // 16) * 16
        self.shared_bytes = self.stages_at + plan.warps * plan.stages * self.stage_bytes


class StagedSumBody(SumBody):
    """`SumBody` whose warps copy the weights of their expert to stages of their own in shared memory."""

    work: StagedSumWork
    weights: StagedFragments

    def _work_of(self, problem: QuantizedMatmulProblem, plan: BlockPlan, m: Expr) -> BlockWork:
        assert isinstance(plan, StagedSumPlan)
        self._pairs = m
        return StagedSumWork(problem, plan)

    def reserve(self, shared: SharedMemory) -> None:
        """See `BlockBody.reserve`."""
        super().reserve(shared)
        plan = self.work.plan
        self.ring = Ring(shared, plan.warps * plan.stages, producers=1)

    def _open(self) -> None:
        super()._open()
        self.weights = StagedFragments(self.work, self.packed, self.lane, self.high)

    @property
    def _is_own(self) -> Expr:
        return tirx.NE(self._share, _LEFT_OUT)

    def _work(self) -> None:
        plan = self.work.plan
        self._pieces = self.work.chunks // plan.stage_chunks
        with when(tirx.all(tirx.EQ(self.lane, 0), self._is_own)):
            for stage in range(plan.stages):
                ptx.barrier_init(self.ring.full(self.warp * plan.stages + stage), 1)
            ptx.barrier_init_fence()
            for piece in range(plan.stages):
                self._copy(piece)
        self._wait()
        self.left.hold()
        ptx.block_barrier()
        self._process(1)

    def _copy(self, piece: int) -> None:
        work, plan = self.work, self.work.plan
        stage = T.bind(self.warp * plan.stages + piece % plan.stages)
        full, begin = self.ring.full(stage), T.bind(work.stages_at + stage * work.stage_bytes)
        tile = self._first_tile + self.first_block
        ptx.barrier_expect(full, work.stage_bytes)
        source = (tile * work.chunks + piece * plan.stage_chunks) * (work.chunk_bytes // 4)
        address = T.address_of(self.weights.weight[source])
        ptx.bulk_load(self.shared.at(begin), address, plan.stage_chunks * work.chunk_bytes, full)
        parts = zip(work.part_list, work.stage_units, work.part_offsets, self.weights.part_data, strict=True)
        for part, units, offset, data in parts:
            address = T.address_of(data[(tile * part.units + piece * units) * (8 * part.width)])
            ptx.bulk_load(self.shared.at(begin + offset), address, units * part.unit_bytes, full)

    def _tile(self, index: Expr, num_tiles: Expr, index_in_batch: Expr) -> None:
        work, plan = self.work, self.work.plan
        tile = T.bind(self.first_block + 0)
        for number in range(4):
            T.buffer_store(self.totals, self._initial(number, tile), [number])
        with when(self._is_own):
            for piece in range(self._pieces):
                stage = T.bind(self.warp * plan.stages + piece % plan.stages)
                ptx.barrier_wait(self.ring.full(stage), piece // plan.stages % 2)
                begin = T.bind(work.stages_at + stage * work.stage_bytes)
                for chunk in range(plan.stage_chunks):
                    self._load_staged(begin, chunk)
                    self._multiply_fragment(0, 0, int64((piece * plan.stage_chunks + chunk) * work.chunk))
                if piece + plan.stages < self._pieces:
                    ptx.warp_barrier()
                    with when(tirx.EQ(self.lane, 0)):
                        self._copy(piece + plan.stages)
        self._stage_sums(index_in_batch)

    def _load_staged(self, stage: Expr, chunk: int) -> None:
        work = self.work
        parts = []
        for part, offset in zip(work.part_list, work.part_offsets, strict=True):
            units = work.units_of_chunk(part)
            numbers = ((chunk * work.chunk + i * (work.chunk // units)) // part.unit for i in range(units))
            parts.append([stage + (offset + number * part.unit_bytes) for number in numbers])
        self.weights.load_staged(self.shared, 0, stage + chunk * work.chunk_bytes, parts)


class GroupedWork(BlockWork):
    """`BlockWork` with shared memory for the pairs of a block: counts of experts, sums of warps, pairs."""

    def share(self, gpu: GpuTarget, row_tiles: Expr, blocks_per_sm: int, has_points: int) -> None:
        """See `BlockWork.share`."""
        super().share(gpu, row_tiles, blocks_per_sm, has_points)
        self.counts_at = self.shared_bytes
        self.warp_sums_at = self.counts_at + 4 * self.problem.experts
        self.pairs_at = self.warp_sums_at + 4 * self.plan.warps
        self.shared_bytes = self.pairs_at + 4 * GROUP_COLUMNS


class GroupedBody(ExpertBody):
    """Writer of the code of a block with pairs of one expert.

    Every block counts the pairs of each expert, finds the expert of its row tile, and those of its pairs that are its
    own: the order of an expert's pairs is that of threads, which is the same in all blocks.
    """

    work: GroupedWork

    def _work_of(self, problem: QuantizedMatmulProblem, plan: BlockPlan, m: Expr) -> BlockWork:
        self._pairs = m
        return GroupedWork(problem, plan, GROUP_COLUMNS)

    def count_row_tiles(self) -> Expr:
        """Upper bound of the number of row tiles, as those of an expert may not be full."""
        return self._pairs // GROUP_COLUMNS + min(self._pairs, self.work.problem.experts)

    def _pair(self, row: Expr) -> Expr:
        return T.Cast("int64", T.max(self._loaded_pair(row), 0))

    def _loaded_pair(self, row: Expr) -> Expr:
        """Pair of a row of the block, -1 for none."""
        return self._load_word(self.work.pairs_at, T.Cast("int32", row))

    def _result_row(self, row: Expr) -> tuple[Expr, list[Expr]]:
        pair = self._loaded_pair(row)
        return T.bind(T.Cast("int64", T.max(pair, 0))), [pair >= 0]

    def _load_word(self, offset: int, index: Expr) -> Expr:
        """Word of shared memory, as int32."""
        word = local(1, "uint32")
        ptx.load_shared([word[0]], self.shared.at(offset + index * 4))
        return T.bind(tirx.reinterpret("int32", word[0]))

    def _store_word(self, offset: int, index: Expr, value: Expr) -> None:
        ptx.store_shared(self.shared.at(offset + index * 4), [value])

    def _emit_tile(self) -> None:
        self._count_pairs()
        first = self._find_tile()

        def emit() -> None:
            self._collect_pairs(first)
            BlockBody._emit_block(self)

        either(self._expert >= 0, emit, wait_late)

    @contextmanager
    def _each(self, extent: int) -> Iterator[Expr]:
        """Context of a thread's loop over its share of a range, which yields the number in the range."""
        threads = self.work.plan.warps * WARP
        with T.serial(tirx.const(ceil_div(extent, threads), "int32")) as i:
            number = T.bind(i * threads + self.thread)
            with when(number < extent):
                yield number

    def _count_pairs(self) -> None:
        work, experts = self.work, self.work.problem.experts
        with self._each(experts) as expert:
            self._store_word(work.counts_at, expert, T.uint32(0))
        with when(self.thread < GROUP_COLUMNS):
            self._store_word(work.pairs_at, self.thread, T.uint32(0xFFFFFFFF))
        ptx.block_barrier()
        with self._each(self._pairs) as pair:
            expert = T.bind(self._expert_of(pair))
            with when(expert >= 0):
                ptx.add_shared(self.shared.at(work.counts_at + expert * 4), T.uint32(1))
        ptx.block_barrier()

    def _find_tile(self) -> Expr:
        """Find the expert of the block's row tile, -1 for none; the number of its first pair among the expert's."""
        work, experts = self.work, self.work.problem.experts
        tile = T.bind(T.Cast("int32", self.first_row))
        found, begin, end = local(2, "int32"), local(1, "int32"), local(1, "int32")
        T.buffer_store(found, T.int32(-1), [0])
        T.buffer_store(found, T.int32(-1), [1])
        T.buffer_store(begin, T.int32(0), [0])
        for first in range(0, experts, WARP):
            expert = T.bind(first + self.lane)
            count = self._load_word(work.counts_at, T.min(expert, experts - 1))
            tiles = T.bind(T.Select(expert < experts, T.truncdiv(count + (GROUP_COLUMNS - 1), GROUP_COLUMNS), 0))
            T.buffer_store(end, tiles, [0])
            add_lanes_before(end, self.lane)
            in_expert = T.bind(tile - (begin[0] + end[0] - tiles))
            with when(tirx.all(in_expert >= 0, in_expert < tiles)):
                T.buffer_store(found, expert, [0])
                T.buffer_store(found, in_expert * GROUP_COLUMNS, [1])
            last = T.tvm_warp_shuffle(T.uint32(ALL_LANES), end[0], WARP - 1, WARP, WARP)
            T.buffer_store(begin, begin[0] + last, [0])
        for i in range(2):
            reduce_lanes(found, i, T.max)
        self._expert = T.bind(found[0])
        return T.bind(found[1])

    def _collect_pairs(self, first: Expr) -> None:
        """Store the pairs of the expert from number `first` on, as many as a block has."""
        work = self.work
        count, end = local(1, "int32"), local(1, "int32")
        T.buffer_store(count, T.int32(0), [0])
        with self._each(self._pairs) as pair, when(self._is_own(pair)):
            T.buffer_store(count, count[0] + 1, [0])
        T.buffer_store(end, count[0], [0])
        add_lanes_before(end, self.lane)
        with when(self.lane == WARP - 1):
            self._store_word(work.warp_sums_at, self.warp, T.Cast("uint32", end[0]))
        ptx.block_barrier()
        for warp in range(work.plan.warps - 1):
            before = self._load_word(work.warp_sums_at, tirx.const(warp, "int32"))
            T.buffer_store(end, end[0] + T.Select(warp < self.warp, before, 0), [0])
        row = local(1, "int32")
        T.buffer_store(row, end[0] - count[0] - first, [0])
        with when(count[0] > 0), self._each(self._pairs) as pair, when(self._is_own(pair)):
            with when(tirx.all(row[0] >= 0, row[0] < GROUP_COLUMNS)):
                self._store_word(work.pairs_at, row[0], T.Cast("uint32", pair))
            T.buffer_store(row, row[0] + 1, [0])
        ptx.block_barrier()

    def _is_own(self, pair: Expr) -> Expr:
        """Predicate of a pair of the block's expert."""
        return tirx.EQ(self._expert_of(pair), self._expert)
