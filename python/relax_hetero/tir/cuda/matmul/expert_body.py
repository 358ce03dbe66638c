"""Quantized products of a mixture of experts: each row, a pair of a token and one of its experts, has its own matrix.

Matrices follow each other, so an expert is an offset of column tiles. Which weights a block reads is known only when
the previous launch has ended. If pairs are few, a block has one of them (`ExpertBody`). From `MIN_GROUPED_PAIRS` on, it
has up to `GROUP_COLUMNS` of one expert, which the instruction multiplies at the cost of one (`GroupedBody`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.block_weights import FRAGMENT_COLUMNS
from ....encoding.problem import QuantizedMatmulProblem
from ....target.gpu_target import ALL_LANES, WARP, GpuTarget
from ...core.builder import Expr, ceil_div, int64, when
from ...core.view import Coordinates, extent_of
from ..core import ptx
from ..core.launch import local
from ..core.operand import GpuOperand
from ..tile.epilogue import EpilogueWriter
from ..tile.register_tile import add_lanes_before, reduce_lanes
from .block_body import BlockBody
from .block_fragments import WeightFragments
from .block_plan import GROUP_COLUMNS, PARTS, BlockPlan, BlockWork, SumPlan, expert_plan
from .block_rows import LeftRows

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

    # In straight code, ptxas moves each load of 16-bit weights to the product that reads it.
    _unrolls_k = False

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
            ptx.launch_dependents()
            ptx.griddepcontrol_wait()
        self._emit_tile()

    def _emit_tile(self) -> None:
        """Write the code after the wait for the previous launch."""
        self._expert = T.bind(self._expert_of(self.first_row))
        with when(self._expert >= 0):
            super()._emit_block()

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
        conditions = [self._is_first_chunk]
        if work.parts > 1:
            conditions.append(tirx.EQ(self.low, 0) if i % 2 == 0 else tirx.const(False))
        return T.Select(tirx.all(*conditions), bias, T.float32(0))

    @property
    def _is_first_chunk(self) -> Expr:
        """Predicate of a warp that multiplies the first chunk of k."""
        return tirx.EQ(self.warp, 0)

    def _load(self, slot: int, tile_of_block: Expr, index: Expr) -> None:
        super()._load(slot, self._first_tile + tile_of_block, index)


class SumWork(BlockWork):
    """`BlockWork` of a token, with a row in shared memory for each of its experts."""

    plan: SumPlan

    def __init__(self, problem: QuantizedMatmulProblem, plan: SumPlan) -> None:
        super().__init__(problem, plan, 1)
        self.held_rows = plan.used * self.parts


class _ExpertRows(LeftRows):
    """Rows of a token's experts, of which a warp multiplies one at a time."""

    work: SumWork
    number: Expr

    @property
    def _num_rows(self) -> Expr:
        return self.work.plan.used

    @property
    def _first_held(self) -> Expr:
        return self.number * self.work.parts

    @property
    def _rows_of_lanes(self) -> int:
        return self.work.parts


class SumBody(ExpertBody):
    """Writer of the code of a block with the pairs of a token, whose products it adds up, times their shares.

    The chunks of the pairs up to the last with an expert are dealt to the warps, whatever their number is: on a mesh, a
    device has some of a token's experts. Pairs of a negative index before it are skipped.
    """

    work: SumWork
    left: _ExpertRows

    def _work_of(self, problem: QuantizedMatmulProblem, plan: BlockPlan, m: Expr) -> BlockWork:
        assert isinstance(plan, SumPlan), "a block has all rows of a token"
        self._pairs = m  # of tokens and column tiles
        return SumWork(problem, plan)

    def _pair(self, row: Expr) -> Expr:
        return self.first_row * self.work.plan.used + row

    def _emit_tile(self) -> None:
        """Load the experts and shares of the pairs, one to a lane, and write the block."""
        work, plan = self.work, self.work.plan
        step = plan.warps * plan.ahead
        pair = T.bind(self._pair(T.min(self.lane, plan.used - 1)))
        self._experts, self._shares_of_lanes, last = local(1, "int32"), local(1, "float32"), local(1, "int32")
        T.buffer_store(self._experts, self._expert_of(pair), [0])
        T.buffer_store(self._shares_of_lanes, self._shares.data[pair], [0])
        T.buffer_store(last, T.Select(self._experts[0] < 0, 0, T.min(self.lane + 1, plan.used)), [0])
        reduce_lanes(last, 0, T.max)
        self._chunks = T.bind(last[0] * work.chunks)
        self._rounds = T.bind(T.truncdiv(self._chunks + (step - 1), step))
        # Of the chunk in each slot: number of its pair in the token (-1: no chunk), its own number in the pair, share.
        self._numbers, self._in_pair = local(plan.ahead, "int32"), local(plan.ahead, "int32")
        self._share, self._weighted = local(plan.ahead, "float32"), local(4, "float32")
        BlockBody._emit_block(self)

    def _open(self) -> None:
        self.weights = WeightFragments(self.work, self.packed, self.lane, self.high)
        self.left = _ExpertRows(self.work, _Rows(self), self.shared, self.thread, (self.low, self.high), int64(0))

    def _of_pair(self, registers: Any, number: Expr) -> Expr:
        """The value of a pair, which a lane has."""
        return T.bind(T.tvm_warp_shuffle(T.uint32(ALL_LANES), registers[0], number, WARP, WARP))

    def _load(self, slot: int, tile_of_block: Expr, index: Expr) -> None:
        work = self.work
        chunk = T.bind(index * work.plan.warps + self.warp)
        number = T.bind(T.truncdiv(chunk, work.chunks))
        expert = self._of_pair(self._experts, number)
        exists = T.bind(tirx.all(chunk < self._chunks, expert >= 0))
        T.buffer_store(self._numbers, T.Select(exists, number, -1), [slot])
        T.buffer_store(self._in_pair, chunk - number * work.chunks, [slot])
        T.buffer_store(self._share, self._of_pair(self._shares_of_lanes, number), [slot])
        with when(exists):
            tile = T.Cast("int64", expert) * work.column_tiles + tile_of_block
            self.weights.load(slot, tile, T.bind(T.Cast("int64", self._in_pair[slot])))

    def _tile(self, index: Expr, num_tiles: Expr, index_in_batch: Expr) -> None:
        work, ahead = self.work, self.work.plan.ahead
        tile = T.bind(self.first_block + index * work.stride)
        for i in range(4):
            T.buffer_store(self._weighted, T.float32(0), [i])
        with T.serial(self._rounds) as number:
            for slot in range(ahead):
                self._add_chunk(slot, tile)
                if work.is_persistent:
                    self._load_next(slot, (number, self._rounds), tile, index + 1 < num_tiles)
                else:
                    self._load(slot, tile, (number + 1) * ahead + slot)
        for i in range(4):
            T.buffer_store(self.totals, self._weighted[i], [i])
        self._stage_sums(index_in_batch)

    def _add_chunk(self, slot: int, tile: Expr) -> None:
        """Add the products of a slot's chunk, and the bias if it is the first of a pair, times the share."""
        self.left.number, self._chunk_in_pair = self._numbers[slot], self._in_pair[slot]
        with when(self.left.number >= 0):
            if self._biases:
                self._expert = self._of_pair(self._experts, self.left.number)
            for i in range(4):
                T.buffer_store(self.totals, self._initial(i, tile), [i])
            self._products(slot, 0)
            for i in range(4):
                T.buffer_store(self._weighted, self._weighted[i] + self.totals[i] * self._share[slot], [i])

    def _chunk_of(self, index: Expr) -> Expr:
        """The slot's chunk, in its pair."""
        return T.Cast("int64", self._chunk_in_pair)

    @property
    def _is_first_chunk(self) -> Expr:
        return tirx.EQ(self._chunk_in_pair, 0)


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
        self._first_pair = self._find_tile()
        with when(self._expert >= 0):
            BlockBody._emit_block(self)

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

    def _find_rows(self) -> None:
        """Store the pairs of the expert from the block's first one on, as many as a block has."""
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
        T.buffer_store(row, end[0] - count[0] - self._first_pair, [0])
        with when(count[0] > 0), self._each(self._pairs) as pair, when(self._is_own(pair)):
            with when(tirx.all(row[0] >= 0, row[0] < GROUP_COLUMNS)):
                self._store_word(work.pairs_at, row[0], T.Cast("uint32", pair))
            T.buffer_store(row, row[0] + 1, [0])
        ptx.block_barrier()

    def _is_own(self, pair: Expr) -> Expr:
        """Predicate of a pair of the block's expert."""
        return tirx.EQ(self._expert_of(pair), self._expert)
