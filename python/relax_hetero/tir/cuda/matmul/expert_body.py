"""Quantized products of a mixture of experts: each row, a pair of a token and one of its experts, has its own matrix.

Matrices follow each other, so an expert is an offset of column tiles. Which weights a block reads is known only when
the previous launch has ended. If pairs are few, a block has one of them (`ExpertBody`). From `MIN_GROUPED_PAIRS` on, it
has up to `GROUP_COLUMNS` of one expert, which the instruction multiplies at the cost of one (`GroupedBody`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
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
from ..tile.ring import Ring
from .block_body import BlockBody
from .block_fragments import StagedFragments, WeightFragments
from .block_plan import GROUP_COLUMNS, PARTS, BlockPlan, BlockWork, StagedSumPlan, SumPlan, expert_plan
from .block_rows import LeftRows, RowSource

_LEFT_OUT = tirx.const(-math.inf, "float32")
_LOADS_IN_FLIGHT = 4
"""Loads of its row that a lane issues at a time."""

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
    plan = plan or expert_plan(problem, gpu)
    kind = GroupedBody if is_grouped and not problem.second else ExpertBody
    if isinstance(plan, SumPlan):
        kind = StagedSumBody if isinstance(plan, StagedSumPlan) else SumBody
    return kind(problem, gpu, plan, lhs, packed, writer, routes=routes, biases=biases)


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
        BlockBody._emit_block(self)

    def _load_operands(self) -> None:
        """Load nothing yet: weights in flight take all registers."""

    @property
    def _is_own(self) -> Expr:
        """Predicate of a warp's pair that is not left out."""
        return tirx.NE(self._share, _LEFT_OUT)

    def _left_rows(self, lhs: RowSource, first: Expr) -> LeftRows:
        rows = _ExpertRows(self.work, lhs, self.shared, self.thread, (self.low, self.high), first)
        rows.expert = self.own
        return rows

    def _stage_sums(self, index_in_batch: Expr) -> None:
        for number in range(4):
            weighted = T.Select(self._is_own, self.totals[number] * self._share, T.float32(0))
            T.buffer_store(self.totals, weighted, [number])
        super()._stage_sums(index_in_batch)


class StagedSumWork(SumWork):
    """`SumWork` with the stages of its warps, which hold weights of 16 bits."""

    plan: StagedSumPlan

    def share(self, gpu: GpuTarget, row_tiles: Expr, blocks_per_sm: int, has_points: int) -> None:
        """See `BlockWork.share`; a block has one column tile."""
        super().share(gpu, row_tiles, 1, has_points)
        self.stage_bytes = self.plan.stage_chunks * self.chunk_bytes
        self.stages_at = ceil_div(self.shared_bytes, 16) * 16
        self.shared_bytes = self.stages_at + self.plan.warps * self.plan.stages * self.stage_bytes


class _WarpRows(_ExpertRows):
    """Rows of a token's experts, each of which its warp loads for itself."""

    def hold(self) -> None:
        """Load the warp's row into shared memory."""
        for i in range(self.steps * 2):
            T.buffer_store(self.words, T.uint32(0), [i])
        depth, lane, registers = self.work.problem.depth, self.thread % WARP, local(4 * _LOADS_IN_FLIGHT, "uint32")
        count = ceil_div(depth, 8 * WARP)
        for first in range(0, count, _LOADS_IN_FLIGHT):
            numbers = range(count)[first : first + _LOADS_IN_FLIGHT]
            loads = [T.bind((number * WARP + lane) * 8) for number in numbers]
            for i, k in enumerate(loads):
                self._load_halves(registers, int64(self.expert), T.Cast("int64", k), k < depth, 4 * i, 8)
            for i, k in enumerate(loads):
                with when(k < depth):
                    self._store_held([registers[4 * i + j] for j in range(4)], self._first_held, k, 4)
        ptx.warp_barrier()


class StagedSumBody(SumBody):
    """`SumBody` whose warps, one of each expert, copy weights of 16 bits to stages of their own in shared memory.

    Weights in flight take no registers, so that blocks are resident beside those of the launch before, the products of
    gate and up, and load while these end. Warps of pairs of a negative index load nothing, and add 0.
    """

    work: StagedSumWork
    weights: StagedFragments

    def _work_of(self, problem: QuantizedMatmulProblem, plan: BlockPlan, m: Expr) -> BlockWork:
        assert isinstance(plan, StagedSumPlan), "warps have stages"
        self._pairs = m
        return StagedSumWork(problem, plan)

    def reserve(self, shared: SharedMemory) -> None:
        """See `BlockBody.reserve`."""
        super().reserve(shared)
        self.ring = Ring(shared, self.work.plan.warps * self.work.plan.stages, producers=1)

    def _open(self) -> None:
        super()._open()
        self.weights = StagedFragments(self.work, self.packed, self.lane, self.high)

    def _left_rows(self, lhs: RowSource, first: Expr) -> LeftRows:
        rows = _WarpRows(self.work, lhs, self.shared, self.thread, (self.low, self.high), first)
        rows.expert = self.own
        return rows

    def _work(self) -> None:
        plan = self.work.plan
        with when(tirx.all(tirx.EQ(self.lane, 0), self._is_own)):
            for stage in range(plan.stages):
                ptx.barrier_init(self.ring.full(self.warp * plan.stages + stage), 1)
            ptx.barrier_init_fence()
            for piece in range(plan.stages):
                self._copy(piece)
        self._wait()
        BlockBody._load_operands(self)
        self._tile(0, 1, 0)
        self._finish(int64(0), 1)

    def _stage(self, piece: int) -> Expr:
        """Stage of a piece of the warp's column tile."""
        return T.bind(self.warp * self.work.plan.stages + piece % self.work.plan.stages)

    def _copy(self, piece: int) -> None:
        """Issue the copies of a piece, by one thread."""
        work, chunks, stage = self.work, self.work.plan.stage_chunks, self._stage(piece)
        tile, full = T.bind(self._first_tile + self.first_block), self.ring.full(stage)
        begin = T.bind(work.stages_at + stage * work.stage_bytes)
        ptx.barrier_expect(full, work.stage_bytes)
        source = T.address_of(self.weights.weight[(tile * work.chunks + piece * chunks) * (work.chunk_bytes // 4)])
        ptx.bulk_load(self.shared.at(begin), source, work.stage_bytes, full)

    def _tile(self, index: Expr, num_tiles: Expr, index_in_batch: Expr) -> None:
        work, plan = self.work, self.work.plan
        # Those of even and of odd chunks do not wait for each other.
        totals, odd_totals = self.totals, local(4, "float32")
        for number in range(4):
            T.buffer_store(totals, self._initial(number, self.first_block), [number])
            T.buffer_store(odd_totals, T.float32(0), [number])
        pieces = work.chunks // plan.stage_chunks
        with when(self._is_own):
            self.left.hold()
            for piece in range(pieces):
                stage = self._stage(piece)
                ptx.barrier_wait(self.ring.full(stage), piece // plan.stages % 2)
                begin = T.bind(work.stages_at + stage * work.stage_bytes)
                first = piece * plan.stage_chunks
                for chunk in range(plan.stage_chunks):
                    self.totals = odd_totals if chunk % 2 else totals
                    self.weights.load_staged(self.shared, 0, begin + chunk * work.chunk_bytes, [])
                    self._multiply_fragment(0, 0, int64((first + chunk) * work.chunk))
                if piece + plan.stages < pieces:
                    ptx.warp_barrier()
                    with when(tirx.EQ(self.lane, 0)):
                        self._copy(piece + plan.stages)
        self.totals = totals
        for number in range(4):
            T.buffer_store(totals, totals[number] + odd_totals[number], [number])
        self._stage_sums(index_in_batch)


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
