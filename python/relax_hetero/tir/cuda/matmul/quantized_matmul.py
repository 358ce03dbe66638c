"""Products with weights of 4 or 8 bits on tensor cores: weights go to registers, and become fragments there.

A lane reads 16 bytes, its part of 16 columns and 64 k (32 of bytes), laid out for it
(`encoding.block_weights.pack_fragments`): a fragment of ``mma.sync`` for each 16 k. The columns of the product are the
instruction's rows and the rows of the left operand its columns, so that one to eight rows cost the same. Scales are
applied to the sums of a block of weights.

The warps of a kernel's block share its columns and cut k. Each asks for several of its weights at once, before it waits
for the launch that writes the left operand, and holds them in registers. Blocks are persistent: while one adds up the
sums of its warps, through shared memory, the weights of its next columns are on their way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.block_weights import FRAGMENT_COLUMNS, chunk_of
from ....encoding.expression import Expression
from ....encoding.problem import QuantizedMatmulProblem
from ....errors import EncodingError
from ....target.element_types import bytes_of
from ....target.gpu_target import WARP, GpuTarget
from ...core.builder import Expr, Function, ceil_div, int64, minimum
from ..core import ptx
from ..core.epilogue import EpilogueWriter
from ..core.launch import SharedMemory, enable_pdl, launch, local
from ..core.operand import GpuOperand
from .block_body import BlockBody
from .block_fragments import WeightFragments
from .block_plan import GROUP_COLUMNS, PARTS, STEP, BlockPlan, BlockWork, block_plans
from .block_rows import LeftRows

# Products with weights of 4 or 8 bits whose weights come to shared memory by copies, a ring of stages a warp.
#
# What is on its way takes no registers, so that the blocks of two launches share a multiprocessor: while one launch
# adds up its last sums, the weights of the next arrive. A lane of each warp asks for the warp's own neighbours along
# k, which lie in one stretch; nobody else reads them, so that a stage is free as soon as the warp has multiplied it,
# and warps meet only where their sums of a tile of columns are added up.
#
# Few rows of the left operand wait in shared memory. More rows follow their weights, stage by stage, by asynchronous
# copies of the warp's lanes.

_CHUNK_BYTES = 512
"""Bytes of weights of 16 columns."""
_PIECE = 16
"""Bytes of an asynchronous copy."""
_WARPS, _MAX_ROWS, _FRAGMENTS, _MAX_PERSISTENT = 8, 32, (7, 4, 3, 2), 4

MIN_ROWS = 17
"""From so many rows on registers are short of room for weights on their way. A decode step of 32 rows through eight
layers of 4,096 (4 bits) takes 929 us on an H200, 967 with four fragments at most, 1,447 with weights in registers; one
row takes 590 to 800 us and not 478, because stages are waited for, and eight rows 547 to 830 instead of 582."""


@dataclass(frozen=True)
class StagedPlan(BlockPlan):
    """A plan whose weights come by stages; `ahead` is 1.

    Attributes
    ----------
    run : int
        Chunks of k of a stage.
    stages : int
        Number of stages of a warp.
    blocks_per_sm : int
        Blocks, of this launch and of the next, that share a multiprocessor's registers.
    blocks : int
        Number of blocks of this launch on a multiprocessor.
    holds_rows : bool
        Whether the left operand waits in shared memory, whole.
    """

    run: int = 1
    stages: int = 2
    blocks_per_sm: int = 1
    blocks: int = 1
    holds_rows: bool = True


def staged_plan(problem: QuantizedMatmulProblem, gpu: GpuTarget) -> StagedPlan | None:
    """The plan of a problem of `MIN_ROWS` rows or more that fit one block; None where another kernel is for it."""
    extents = [extent for extent in problem.result.shape[:-1] if isinstance(extent, int)]
    rows, chunk = prod(extents), chunk_of(problem.bits)
    is_known = len(extents) == len(problem.result.shape) - 1 and MIN_ROWS <= rows <= _MAX_ROWS
    fits = gpu.overlaps_launches and PARTS[problem.lhs.dtype] == 1 and chunk % problem.block == 0
    if not (is_known and fits) or problem.depth % (chunk * _WARPS):
        return None
    tiles, groups = -(-problem.columns // FRAGMENT_COLUMNS), -(-rows // GROUP_COLUMNS)

    def bytes_read(fragments: int) -> int:
        turns = -(-tiles // (fragments * gpu.multiprocessors))
        return turns * (fragments * _CHUNK_BYTES + rows * chunk * 2)

    # Fragments share the rows, which every block reads from the second-level cache. The most have sums that take all
    # registers, and lie where stages were.
    choices = [each for each in _FRAGMENTS if each <= _MAX_PERSISTENT or tiles <= each * gpu.multiprocessors]
    for fragments in sorted(choices, key=bytes_read):
        for stages in (3, 2):
            plan = StagedPlan(fragments, groups, _WARPS, 1, run=1, stages=stages, holds_rows=False)
            work = StagedWork(problem, plan, rows)
            work.share(gpu, 1, 0, 0)
            if work.shared_bytes <= gpu.shared_bytes:
                return plan
    return None


class StagedWork(BlockWork):
    """The same units, and the bytes of a stage: first weights, then scales, zero points, and rows."""

    def __init__(self, problem: QuantizedMatmulProblem, plan: StagedPlan, m: int) -> None:
        super().__init__(problem, plan, m)
        self.staged = plan
        self.held_rows = min(m, self.rows) * self.parts if plan.holds_rows else 0
        self.rounds = self.own // plan.run
        self.run_blocks = plan.run * self.chunk // problem.block
        self.weight_bytes = plan.run * _CHUNK_BYTES
        self.part_bytes = [
            self.run_blocks * FRAGMENT_COLUMNS * bytes_of(operand.dtype) for operand in problem.weights[1:]
        ]
        self.row_bytes = self.chunk * 2  # of a chunk
        self.staged_rows = 0 if plan.holds_rows else m
        self.fragment_bytes = self.weight_bytes + sum(self.part_bytes)
        self.rows_at = plan.fragments * self.fragment_bytes
        self.stage_bytes = self.rows_at + self.staged_rows * plan.run * self.row_bytes

    def share(self, gpu: GpuTarget, row_tiles: Expr, blocks_per_sm: int, has_points: int) -> None:
        """See `BlockWork.share`."""
        plan = self.staged
        self.blocks_per_sm = plan.blocks_per_sm
        self.stride = min(self.column_tiles, gpu.multiprocessors * plan.blocks)
        self.batch = 1
        # Of a single tile of columns, sums lie where stages were.
        self.held_at = self.sums * 4 if self.is_persistent or self.held_rows else 0
        self.stages_at = self.held_at + self.held_rows * self.pitch * 4
        stages = self.stages_at + plan.warps * plan.stages * self.stage_bytes
        self.shared_bytes = max(stages, self.sums * 4)

    def part_at(self, part: int) -> int:
        """Where scales (0) or zero points (1) of a fragment begin."""
        return self.weight_bytes + sum(self.part_bytes[:part])


class _StagedFragments(WeightFragments):
    """Weights of a chunk, from a stage to registers."""

    work: StagedWork

    def __init__(self, work: StagedWork, packed: list, lane: Expr, high: Expr) -> None:
        super().__init__(work, packed, lane, high)
        self.types = [operand.nominal for operand in packed[1:]]
        count = work.plan.fragments * work.scaled
        self.words = [
            local(count * max(1, bytes_of(dtype) // 2), "uint32" if bytes_of(dtype) > 1 else "uint16")
            for dtype in self.types
        ]

    def take(self, shared: SharedMemory, stage: Expr, chunk: int, fragment: int) -> None:
        """Load a fragment of a chunk of a stage that has arrived."""
        work = self.work
        begin = fragment * work.fragment_bytes
        at = stage + (begin + chunk * _CHUNK_BYTES) + self.lane * 16
        ptx.load_shared([self.bits[fragment * 4 + i] for i in range(4)], shared.at(at))
        for part, dtype in enumerate(self.types):
            size = bytes_of(dtype)
            for number in range(work.scaled):
                block = (chunk * work.chunk + number * work.steps * STEP) // work.problem.block
                at = stage + (begin + work.part_at(part) + block * FRAGMENT_COLUMNS * size) + self.high * (2 * size)
                per = max(1, size // 2)
                first = (fragment * work.scaled + number) * per
                targets = [self.words[part][first + i] for i in range(per)]
                ptx.load_shared(targets, shared.at(at), "u16" if size == 1 else "u32")

    def _number(self, part: int, at: int) -> Expr:
        dtype, words = self.types[part], self.words[part]
        if bytes_of(dtype) == 4:
            return T.reinterpret(dtype, words[at])
        word, half = words[at // 2], at % 2
        if bytes_of(dtype) == 1:
            return T.Cast("uint8", word >> T.uint16(8)) if half else T.Cast("uint8", word & T.uint16(255))
        bits = T.Cast("uint16", word >> T.uint32(16)) if half else T.Cast("uint16", word & T.uint32(0xFFFF))
        return T.reinterpret(dtype, bits)

    def _scale(self, at: int) -> Expr:
        return self._number(0, at)

    def _point(self, at: int) -> Expr:
        return self._number(1, at)


class _StagedRows(LeftRows):
    """Rows of the left operand that follow their weights."""

    work: StagedWork

    @property
    def _flip(self) -> int:
        """Bits by which odd rows' pieces are swapped, so that a quarter of a warp reads all banks."""
        if self.work.row_bytes < 128:
            return 0
        return 4 if self.work.steps <= 2 else 1

    def bring(self, stage: Expr, chunk: Expr, lane: Expr) -> None:
        """Ask for the rows of the chunks from `chunk` on; all lanes of a warp do it."""
        work = self.work
        pieces = work.row_bytes // _PIECE
        for number in range(work.staged.run):
            for first in range(0, work.staged_rows * pieces, WARP):
                item = first + lane
                row, piece = tirx.floordiv(item, pieces), tirx.floormod(item, pieces)
                place = {
                    "m": T.Cast("int64", row),
                    "k": (chunk + number) * work.chunk + T.Cast("int64", piece * (_PIECE // 2)),
                }
                if self._flip:
                    piece = T.bitwise_xor(piece, tirx.floormod(row, 2) * self._flip)
                at = number * work.staged_rows * work.row_bytes + row * work.row_bytes + piece * _PIECE
                target = self.shared.at(stage + (work.rows_at + at))
                source = T.address_of(self.lhs.data[self.lhs.address(place)])
                if first + WARP <= work.staged_rows * pieces:
                    ptx.copy_async(target, source, _PIECE)
                else:
                    with T.If(item < work.staged_rows * pieces), T.Then():
                        ptx.copy_async(target, source, _PIECE)

    def take(self, stage: Expr, chunk: int) -> None:
        """Load the fragments of a chunk of a stage that has arrived."""
        work = self.work
        words = 2 * work.steps
        width = min(4, words)
        for group in range(work.plan.groups):
            row = self.high + group * GROUP_COLUMNS
            if (group + 1) * GROUP_COLUMNS <= work.staged_rows:
                self._take(stage, chunk, group, row, words, width)
            else:
                with T.If(row < work.staged_rows), T.Then():
                    self._take(stage, chunk, group, row, words, width)

    def _take(self, stage: Expr, chunk: int, group: int, row: Expr, words: int, width: int) -> None:
        work = self.work
        begin = stage + (work.rows_at + chunk * work.staged_rows * work.row_bytes) + row * work.row_bytes
        for number in range(work.scaled):
            for i in range(0, words, width):
                at = ((number * 4 + self.low) * words + i) * 4
                if self._flip:
                    at = T.bitwise_xor(at, tirx.floormod(self.high, 2) * (self._flip * _PIECE))
                first = group * self.steps * 2 + number * words + i
                ptx.load_shared([self.words[first + j] for j in range(width)], self.shared.at(begin + at))


class StagedBody(BlockBody):
    """Code of a block, while it is written."""

    work: StagedWork
    weights: _StagedFragments
    left: _StagedRows

    def _work_of(self, problem: QuantizedMatmulProblem, plan: BlockPlan, m: Expr) -> BlockWork:
        assert isinstance(plan, StagedPlan) and isinstance(m, int), "stages are for known numbers of rows"
        return StagedWork(problem, plan, m)

    def _open(self) -> None:
        lanes = self.low, self.high
        self.weights = _StagedFragments(self.work, self.packed, self.lane, self.high)
        self.left = _StagedRows(self.work, self.lhs, self.shared, self.thread, lanes, self.first_row)

    def _work(self) -> None:
        work, plan = self.work, self.work.staged
        turns: Expr = 1
        if work.is_persistent:
            turns = T.bind(tirx.floordiv(work.column_tiles - 1 - self.first_block, work.stride) + 1)
        self.items = T.bind(T.Cast("int32", int64(turns * work.rounds)))
        for stage in range(plan.stages):
            self._if_item(stage, self._ask)
            if work.held_rows:
                ptx.copy_commit()
        if self.gpu.overlaps_launches:
            ptx.launch_dependents()
            ptx.griddepcontrol_wait()
        if work.held_rows:
            self.left.hold()
            ptx.block_barrier()
        else:
            for i in range(plan.groups * self.left.steps * 2):
                T.buffer_store(self.left.words, T.uint32(0), [i])
            # The first group has the weights of all stages.
            for stage in range(plan.stages):
                self._if_item(stage, self._bring)
                ptx.copy_commit()
        with T.serial(int64(turns)) as turn:
            for number in range(plan.fragments * plan.groups * 4):
                T.buffer_store(self.totals, T.float32(0), [number])
            with T.serial(tirx.const(work.rounds, "int32")) as part:
                item = T.bind(T.Cast("int32", turn) * work.rounds + part)
                self._multiply_stage(item, part)
                ptx.warp_barrier()
                following = T.bind(item + plan.stages)
                self._if_item(following, self._ask)
                if not work.held_rows:
                    self._if_item(following, self._bring)
                ptx.copy_commit()
            if work.stages_at == 0:
                ptx.copy_wait(0)
                ptx.block_barrier()
            self._stage_sums(0)
            self._finish(turn, 1)

    def _stage(self, stage: Expr) -> Expr:
        """Where a stage of the warp begins."""
        return self.work.stages_at + (self.warp * self.work.staged.stages + stage) * self.work.stage_bytes

    def _if_item(self, item: Expr, act: Callable[[Any], None]) -> None:
        with T.If(item < self.items), T.Then():
            act(item)

    def _first_chunk(self, part: Expr) -> Expr:
        return T.bind(T.Cast("int64", self.warp) * self.work.own + T.Cast("int64", part) * self.work.staged.run)

    def _ask(self, item: Expr) -> None:
        """Ask for the weights of an item, and what belongs to them; all lanes do it."""
        work, plan = self.work, self.work.staged
        item = item if isinstance(item, tirx.Var) else tirx.const(item, "int32")
        stage = T.bind(tirx.floormod(item, plan.stages))
        tile = self.first_block + T.Cast("int64", tirx.floordiv(item, work.rounds)) * work.stride
        tile = T.bind(tile * plan.fragments)
        chunk = self._first_chunk(tirx.floormod(item, work.rounds))
        block = T.bind(tirx.floordiv(chunk * work.chunk, work.problem.block))
        begin = T.bind(self._stage(stage))
        for fragment in range(plan.fragments):
            at = T.bind(
                (self._tile_of(tile, fragment) * work.chunks + chunk) * (WARP * 4) + T.Cast("int64", self.lane * 4)
            )
            for number in range(plan.run):
                target = begin + (fragment * work.fragment_bytes + number * _CHUNK_BYTES) + self.lane * _PIECE
                source = T.address_of(self.weights.weight[at + number * (WARP * 4)])
                ptx.copy_async(self.shared.at(target), source, _PIECE)
        parts = [self.weights.scales, self.weights.zeros]
        for part, (data, size) in enumerate(zip(parts, work.part_bytes, strict=False)):
            pieces, element = size // _PIECE, size // (work.run_blocks * FRAGMENT_COLUMNS)
            for first in range(0, plan.fragments * pieces, WARP):
                number = first + self.lane
                fragment, piece = tirx.floordiv(number, pieces), tirx.floormod(number, pieces)
                with T.If(number < plan.fragments * pieces), T.Then():
                    at = (self._tile_of(tile, T.Cast("int64", fragment)) * work.blocks + block) * FRAGMENT_COLUMNS
                    source = T.address_of(data[T.bind(at + T.Cast("int64", piece * (_PIECE // element)))])
                    target = begin + (fragment * work.fragment_bytes + work.part_at(part) + piece * _PIECE)
                    ptx.copy_async(self.shared.at(target), source, _PIECE)

    def _tile_of(self, first: Expr, fragment: Expr) -> Expr:
        """A fragment of 16 columns; the last one for those that are none."""
        if self.work.tiles % self.work.plan.fragments:
            return minimum(first + fragment, int64(self.work.tiles - 1))
        return first + fragment

    def _bring(self, item: Expr) -> None:
        work, plan = self.work, self.work.staged
        item = item if isinstance(item, tirx.Var) else tirx.const(item, "int32")
        stage = T.bind(tirx.floormod(item, plan.stages))
        self.left.bring(T.bind(self._stage(stage)), self._first_chunk(tirx.floormod(item, work.rounds)), self.lane)

    def _multiply_stage(self, item: Expr, part: Expr) -> None:
        work, plan = self.work, self.work.staged
        stage = T.bind(tirx.floormod(item, plan.stages))
        begin = T.bind(self._stage(stage))
        ptx.copy_wait(plan.stages - 1)
        ptx.warp_barrier()
        first = self._first_chunk(part)
        for chunk in range(plan.run):
            self.weights.take(self.shared, begin, chunk, 0)
            if work.held_rows:
                self.left.load_held(T.bind((first + chunk) * work.chunk), range(work.scaled))
            else:
                self.left.take(begin, chunk)
            for fragment in range(plan.fragments):
                if fragment + 1 < plan.fragments:
                    self.weights.take(self.shared, begin, chunk, fragment + 1)
                for number in range(work.scaled):
                    self.weights.begin(0, fragment, number)
                    for step in range(work.steps):
                        self._multiply(0, fragment, number * work.steps + step, step > 0)
                    self._add_scaled(0, fragment, number)


_TOGETHER = 2  # blocks of a kernel with two bodies that share a multiprocessor's registers


def quantized_matmul_kernel(
    problem: QuantizedMatmulProblem, gpu: GpuTarget, plan: BlockPlan | None = None
) -> tirx.PrimFunc:
    """The kernel of a product with weights of 4 or 8 bits, one launch; `QuantizedMatmulProblem` says its parameters.

    Raises EncodingError for a GPU without tensor cores of 16-bit floats, and for blocks that are no multiple of 16.
    """
    dtype = problem.lhs.dtype
    if gpu.tensor == "" or dtype not in PARTS:
        raise EncodingError(f"block_matmul: found a left operand of {dtype} on {gpu.arch}, which no kernel multiplies")
    if problem.block % STEP:
        raise EncodingError(f"block_matmul: found blocks of {problem.block}, expected a multiple of {STEP}")
    function = Function("block_product", registers="local")
    with function:
        lhs = GpuOperand(function, "lhs", problem.lhs)
        packed = [
            GpuOperand(function, name, operand)
            for name, operand in zip(("weight", "scales", "zeros"), problem.weights, strict=False)
        ]
        epilogue = problem.epilogue
        views = tuple(
            GpuOperand(function, f"x{i + 1}", operand)
            for i, operand in enumerate(epilogue.operands if epilogue else ())
        )
        result = GpuOperand(function, "result", problem.result)
        expression = epilogue.expression if epilogue else Expression.operand(0)
        writer = EpilogueWriter(expression, None, views, result, "float32")
        for name in reversed([name for name in result.index_map if name.startswith("b")]):
            for view in (lhs, *views, result):
                view.merge(name, "m")
        with function.body():
            for view in (*views, result):
                view.open_for_gpu()
            lhs.open(raw=True)
            for view in packed:
                view.open()
            staged = None if plan else staged_plan(problem, gpu)
            plans = [plan] if plan else [staged] if staged else block_plans(problem, gpu)
            kinds = [StagedBody if isinstance(one, StagedPlan) else BlockBody for one in plans]
            _launch([kind(problem, gpu, one, lhs, packed, writer) for kind, one in zip(kinds, plans, strict=True)])
    if not gpu.overlaps_launches:
        return function.result
    return enable_pdl(function.result, range(1, 1 + len(problem.weights)))


def _launch(bodies: list[BlockBody]) -> None:
    """Write the launch of a body; or of two, of which the first is for as few rows as it has."""
    last = bodies[-1]
    m, threads = last.work.m, last.work.plan.warps * WARP
    if 0 in (m, last.work.problem.columns):
        with launch(1, WARP):
            # The launch behind this one waits for this one alone.
            if last.gpu.overlaps_launches:
                ptx.griddepcontrol_wait()
            T.evaluate(0)
        return
    is_one = len(bodies) == 1
    row_tiles = ceil_div(m, last.work.rows)
    last.prepare(row_tiles, 0 if is_one else _TOGETHER)
    blocks = int64(last.work.stride * row_tiles)
    if not is_one:
        bodies[0].prepare(1, _TOGETHER)
        blocks = tirx.Select(m <= bodies[0].work.rows, int64(bodies[0].work.stride), blocks)
    shared = SharedMemory()
    shared.take(max(body.work.shared_bytes for body in bodies))
    with launch(blocks, threads, min_blocks_per_sm=last.work.blocks_per_sm) as place:
        shared.open()
        if is_one:
            last.emit(place, shared)
            return
        with T.If(m <= bodies[0].work.rows):
            with T.Then():
                bodies[0].emit(place, shared)
            with T.Else():
                last.emit(place, shared)
