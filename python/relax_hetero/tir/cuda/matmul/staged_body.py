"""Block of a quantized matrix product of 17 to 32 rows: each warp has a cp.async pipeline of its own in shared memory.

Weights in flight take no registers, so that blocks of two launches share a multiprocessor: while one launch reduces
its last accumulators, the weights of the next arrive. The lanes of a warp copy its own contiguous part of k, so a
stage is free as soon as the warp has multiplied it, and barriers are needed only to reduce a column tile. Left rows
are staged with their weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.block_weights import FRAGMENT_COLUMNS, chunk_of, lane_words
from ....encoding.problem import QuantizedMatmulProblem
from ....target.gpu_target import WARP, GpuTarget
from ...core.builder import Expr, int64, minimum
from ..core import ptx
from ..tile.epilogue import where
from .block_body import BlockBody
from .block_fragments import StagedFragments
from .block_plan import GROUP_COLUMNS, PARTS, BlockPlan, BlockWork
from .block_rows import LeftRows

_COPY_BYTES = 16
"""Bytes of an asynchronous copy."""
_WARPS, _MAX_ROWS = 8, 32
_FRAGMENT_CHOICES, _MAX_PERSISTENT = (7, 4, 3, 2), 4

MIN_STAGED_ROWS = 17
"""Minimum rows for staged weights; with fewer, registers suffice for weights in flight. A decode step of 32 rows
through eight layers of 4,096 (4 bits) takes 929 us on an H200, 967 with at most four fragments, 1,447 with weights in
registers; one row takes 590 to 800 us instead of 478, because of waits for stages, and eight rows 547 to 830 instead of
582."""


@dataclass(frozen=True)
class StagedPlan(BlockPlan):
    """Plan with staged weights; `ahead` is 1."""

    stages: int = 2  # stages of a warp, of a chunk each


def staged_plan(problem: QuantizedMatmulProblem, gpu: GpuTarget) -> StagedPlan | None:
    """Plan of a problem of at least `MIN_STAGED_ROWS` rows that fit one block; None if staging does not apply."""
    extents = [extent for extent in problem.result.shape[:-1] if isinstance(extent, int)]
    rows, chunk = prod(extents), chunk_of(problem.bits)
    is_known = len(extents) == len(problem.result.shape) - 1 and MIN_STAGED_ROWS <= rows <= _MAX_ROWS
    fits = gpu.overlaps_launches and PARTS[problem.lhs.dtype] == 1 and problem.bits < 16 and chunk % problem.block == 0
    if not (is_known and fits) or problem.depth % (chunk * _WARPS):
        return None
    tiles, groups = -(-problem.columns // FRAGMENT_COLUMNS), -(-rows // GROUP_COLUMNS)

    def bytes_read(fragments: int) -> int:
        waves = -(-tiles // (fragments * gpu.multiprocessors))
        return waves * (fragments * WARP * lane_words(problem.bits) * 4 + rows * chunk * 2)

    # Fragments share rows, which every block loads from L2. The largest number takes all registers for accumulators,
    # and reuses the stages' shared memory for them, so blocks cannot be persistent.
    choices = [each for each in _FRAGMENT_CHOICES if each <= _MAX_PERSISTENT or tiles <= each * gpu.multiprocessors]
    for fragments in sorted(choices, key=bytes_read):
        for stages in (3, 2):
            plan = StagedPlan(fragments, groups, _WARPS, 1, stages)
            work = StagedWork(problem, plan, rows)
            work.share(gpu, 1, 0, 0)
            if work.shared_bytes <= gpu.shared_bytes:
                return plan
    return None


class StagedWork(BlockWork):
    """`BlockWork` with the bytes of a stage: fragments (weights, scales, and zero points), and rows."""

    def __init__(self, problem: QuantizedMatmulProblem, plan: StagedPlan, m: int) -> None:
        super().__init__(problem, plan, m)
        self.stages, self.staged_rows, self.held_rows = plan.stages, m, 0
        self.part_bytes = [self.units_of_chunk(part) * part.unit_bytes for part in self.part_list]
        self.row_bytes = self.chunk * 2  # of a chunk
        self.fragment_bytes = self.chunk_bytes + sum(self.part_bytes)
        self.rows_at = plan.fragments * self.fragment_bytes
        self.stage_bytes = self.rows_at + m * self.row_bytes

    def share(self, gpu: GpuTarget, row_tiles: Expr, blocks_per_sm: int, has_points: int) -> None:
        """See `BlockWork.share`."""
        self.blocks_per_sm = self.batch = 1
        self.stride = min(self.column_tiles, gpu.multiprocessors)
        # With a single column tile, accumulators reuse the memory of stages.
        self.stages_at = self.sums * 4 if self.is_persistent else 0
        self.shared_bytes = max(self.stages_at + self.plan.warps * self.stages * self.stage_bytes, self.sums * 4)

    def part_at(self, part: int) -> int:
        """Offset of scales (0) or zero points (1) of a fragment."""
        return self.chunk_bytes + sum(self.part_bytes[:part])


class _StagedRows(LeftRows):
    """Writer of copies and loads of staged left rows."""

    work: StagedWork

    @property
    def _swizzle(self) -> int:
        """XOR of the chunks of odd rows (swizzle), to avoid bank conflicts."""
        if self.work.row_bytes < 128:
            return 0
        return 4 if self.work.steps <= 2 else 1

    def copy(self, stage: Expr, chunk: Expr, lane: Expr) -> None:
        """Issue copies of the rows of a chunk, by all lanes of a warp."""
        work = self.work
        copies = work.row_bytes // _COPY_BYTES
        for first in range(0, work.staged_rows * copies, WARP):
            item = first + lane
            row, copy = tirx.floordiv(item, copies), tirx.floormod(item, copies)
            k = chunk * work.chunk + T.Cast("int64", copy * (_COPY_BYTES // 2))
            source = T.address_of(self.lhs.data[self.lhs.address({"m": T.Cast("int64", row), "k": k})])
            if self._swizzle:
                copy = T.bitwise_xor(copy, tirx.floormod(row, 2) * self._swizzle)
            target = self.shared.at(stage + (work.rows_at + (row * work.row_bytes + copy * _COPY_BYTES)))
            with where([None if first + WARP <= work.staged_rows * copies else item < work.staged_rows * copies]):
                ptx.copy_async(target, source, _COPY_BYTES)

    def load_fragment(self, stage: Expr) -> None:
        """Load the fragments of a chunk from a complete stage."""
        work = self.work
        words = 2 * work.steps
        width = min(4, words)
        for group in range(work.plan.groups):
            row = self.high + group * GROUP_COLUMNS
            begin = stage + work.rows_at + row * work.row_bytes
            with where([None if (group + 1) * GROUP_COLUMNS <= work.staged_rows else row < work.staged_rows]):
                for number in range(work.scaled):
                    for i in range(0, words, width):
                        offset = ((number * 4 + self.low) * words + i) * 4
                        if self._swizzle:
                            offset = T.bitwise_xor(offset, tirx.floormod(self.high, 2) * (self._swizzle * _COPY_BYTES))
                        first = group * self.steps * 2 + number * words + i
                        ptx.load_shared([self.words[first + j] for j in range(width)], self.shared.at(begin + offset))


class StagedBody(BlockBody):
    """Writer of a block's code with staged weights."""

    work: StagedWork
    weights: StagedFragments
    left: _StagedRows

    def _work_of(self, problem: QuantizedMatmulProblem, plan: BlockPlan, m: Expr) -> BlockWork:
        assert isinstance(plan, StagedPlan) and isinstance(m, int), "staged weights need a static number of rows"
        return StagedWork(problem, plan, m)

    def _open(self) -> None:
        lanes = self.low, self.high
        self.weights = StagedFragments(self.work, self.packed, self.lane, self.high)
        self.left = _StagedRows(self.work, self.lhs, self.shared, self.thread, lanes, self.first_row)

    def _work(self) -> None:
        work, plan = self.work, self.work.plan
        num_tiles: Expr = 1
        if work.is_persistent:
            num_tiles = T.bind(tirx.floordiv(work.column_tiles - 1 - self.first_block, work.stride) + 1)
        self.items = T.bind(T.Cast("int32", int64(num_tiles * work.own)))
        for stage in range(work.stages):
            self._if_item(stage, self._copy_weights)
        if self.gpu.overlaps_launches:
            ptx.launch_dependents()
            ptx.griddepcontrol_wait()
        for i in range(plan.groups * self.left.steps * 2):
            T.buffer_store(self.left.words, T.uint32(0), [i])
        # The first commit group contains the weights of all stages.
        for stage in range(work.stages):
            self._if_item(stage, self._copy_rows)
            ptx.copy_commit()
        with T.serial(int64(num_tiles)) as index:
            for number in range(plan.fragments * plan.groups * 4):
                T.buffer_store(self.totals, T.float32(0), [number])
            with T.serial(tirx.const(work.own, "int32")) as iteration:
                item = T.bind(T.Cast("int32", index) * work.own + iteration)
                self._multiply_stage(item)
                ptx.warp_barrier()
                next_item = T.bind(item + work.stages)
                self._if_item(next_item, self._copy_weights)
                self._if_item(next_item, self._copy_rows)
                ptx.copy_commit()
            if work.stages_at == 0:
                ptx.copy_wait(0)
                ptx.block_barrier()
            self._stage_sums(0)
            self._finish(index, 1)

    def _stage(self, stage: Expr) -> Expr:
        """Offset of a stage of the warp."""
        return self.work.stages_at + (self.warp * self.work.stages + stage) * self.work.stage_bytes

    def _if_item(self, item: Expr, write: Callable[[Any], None]) -> None:
        with T.If(item < self.items), T.Then():
            write(item)

    def _chunk_of_item(self, iteration: Expr) -> Expr:
        return T.bind(T.Cast("int64", self.warp) * self.work.own + T.Cast("int64", iteration))

    def _copy_weights(self, item: Expr) -> None:
        """Issue copies of the weights, scales and zero points of an item, by all lanes."""
        work, plan = self.work, self.work.plan
        item = item if isinstance(item, tirx.Var) else tirx.const(item, "int32")
        stage = T.bind(tirx.floormod(item, work.stages))
        tile = self.first_block + T.Cast("int64", tirx.floordiv(item, work.own)) * work.stride
        tile = T.bind(tile * plan.fragments)
        chunk = self._chunk_of_item(tirx.floormod(item, work.own))
        begin = T.bind(self._stage(stage))
        for fragment in range(plan.fragments):
            for first, count in work.planes:
                # Lanes copy 16 bytes each: of a plane of high bits, only the first lanes.
                source = (self._tile_of(tile, fragment) * work.chunks + chunk) * (WARP * work.lane_words)
                source = T.bind(source + T.Cast("int64", first * WARP + self.lane * 4))
                target = begin + fragment * work.fragment_bytes + first * WARP * 4 + self.lane * _COPY_BYTES
                with where([None if count == 4 else self.lane < WARP * count // 4]):
                    ptx.copy_async(self.shared.at(target), T.address_of(self.weights.weight[source]), _COPY_BYTES)
        parts = zip(work.part_list, work.part_bytes, self.weights.part_data, strict=True)
        for number, (part, size, data) in enumerate(parts):
            copies, unit = size // _COPY_BYTES, T.bind(tirx.floordiv(chunk * work.chunk, part.unit))
            for first in range(0, plan.fragments * copies, WARP):
                index = first + self.lane
                fragment, copy = tirx.floordiv(index, copies), tirx.floormod(index, copies)
                with T.If(index < plan.fragments * copies), T.Then():
                    of_tile = self._tile_of(tile, T.Cast("int64", fragment)) * part.units + unit
                    elements = 8 * part.width * _COPY_BYTES // part.unit_bytes  # of a copy
                    offset = T.bind(of_tile * (8 * part.width) + T.Cast("int64", copy * elements))
                    target = begin + (fragment * work.fragment_bytes + work.part_at(number) + copy * _COPY_BYTES)
                    ptx.copy_async(self.shared.at(target), T.address_of(data[offset]), _COPY_BYTES)

    def _tile_of(self, first: Expr, fragment: Expr) -> Expr:
        """Number of a fragment of 16 columns, clamped to the last one."""
        if self.work.tiles % self.work.plan.fragments:
            return minimum(first + fragment, int64(self.work.tiles - 1))
        return first + fragment

    def _copy_rows(self, item: Expr) -> None:
        work = self.work
        item = item if isinstance(item, tirx.Var) else tirx.const(item, "int32")
        stage = T.bind(tirx.floormod(item, work.stages))
        self.left.copy(T.bind(self._stage(stage)), self._chunk_of_item(tirx.floormod(item, work.own)), self.lane)

    def _multiply_stage(self, item: Expr) -> None:
        work, plan = self.work, self.work.plan
        stage = T.bind(tirx.floormod(item, work.stages))
        begin = T.bind(self._stage(stage))
        ptx.copy_wait(work.stages - 1)
        ptx.warp_barrier()
        self._load_weights(begin, 0)
        self.left.load_fragment(begin)
        for fragment in range(plan.fragments):
            if fragment + 1 < plan.fragments:
                self._load_weights(begin, fragment + 1)
            self._multiply_fragment(0, fragment)

    def _load_weights(self, stage: Expr, fragment: int) -> None:
        """Load a fragment from a complete stage."""
        work = self.work
        begin = stage + fragment * work.fragment_bytes
        parts = []
        for number, part in enumerate(work.part_list):
            units = range(work.units_of_chunk(part))
            parts.append([begin + (work.part_at(number) + unit * part.unit_bytes) for unit in units])
        self.weights.load_staged(self.shared, fragment, begin, parts)
