"""Distribution of quantized matrix products among blocks and warps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd, prod

from ....encoding.block_weights import FRAGMENT_COLUMNS, NARROW_PLANES, chunk_of, lane_words
from ....encoding.problem import QuantizedMatmulProblem
from ....target.gpu_target import WARP, GpuTarget
from ...core.builder import Expr
from .weight_parts import Part, parts_of, point_registers

STEP = 16
"""Extent of k of one mma instruction."""

GROUP_COLUMNS = 8
"""Rows of the left operand (or their bfloat16 parts) that one mma instruction multiplies: its n dimension."""

PARTS = {"float16": 1, "bfloat16": 1, "float32": 3}
"""Rows of 16-bit floats that represent one row of the left operand, by its type."""

MAX_WARPS = 8
"""Maximum warps of a block; `FEW_ROWS_WARPS` if it is alone on a multiprocessor."""

MAX_CHUNKS_AHEAD = {1: 4, 2: 4, 4: 2}
"""Maximum chunks (512 bytes per fragment) that a warp has in flight, by the fragments of a block.

A row by 4,096 columns of depth 14,336 takes 9.5 us of a decode step on an H200 with 3 chunks in flight, 10.6 with 7 and
12.6 with 14: more registers for chunks leave fewer for the next launch.
"""

WARPS_PER_MULTIPROCESSOR = 32
"""Resident warps of persistent blocks per multiprocessor."""

FEW_ROWS_WARPS = 16
"""Resident warps with few rows (128 registers per thread). One row by 4,096 columns of 4 bits takes 3.9 us on an H200,
with 24 warps 4.4; by 14,336 columns 10.3 and 11.3 us, and 9.5 us with one block of 16 warps instead of two of 8, as
larger numbers of tiles per block are better balanced. Zero points take more registers: by 14,336 columns one block of 8
warps takes 13.3 us, and two, which spill, 15.1."""

MAX_LEFT_BYTES = 72 << 10
"""Maximum bytes of left rows kept in shared memory."""

MIN_STAGE_BYTES = 6 << 10
"""Minimum bytes of weights in a stage of a warp."""
MAX_STAGED_FRACTION = 0.65
"""Maximum fraction of a multiprocessor's shared memory for the stages of a block, beside blocks of other launches."""

_PAD_WORDS = 16  # between left rows in shared memory, to avoid bank conflicts
_OTHER_BYTES = 2 << 10  # shared memory of a block for barriers
MAX_SUMS_BYTES = 64 << 10
"""Maximum bytes of warps' accumulators in shared memory that are reduced together, so that barriers are rare. Eight
layers of 4,096 take 484 us with one row if several tiles are reduced together, 509 if each is."""


@dataclass(frozen=True)
class BlockPlan:
    """Distribution of work among blocks and warps.

    Attributes
    ----------
    fragments : int
        Fragments of 16 columns of a block.
    groups : int
        Groups of `GROUP_COLUMNS` rows (or parts of rows) of a block.
    warps : int
        Warps that split k.
    ahead : int
        Chunks of k that a warp has in flight.
    """

    fragments: int
    groups: int
    warps: int
    ahead: int

    @property
    def columns(self) -> int:
        """Number of columns of a block."""
        return self.fragments * FRAGMENT_COLUMNS

    @property
    def k_warps(self) -> int:
        """Number of warps that split k."""
        return self.warps


@dataclass(frozen=True)
class SumPlan(BlockPlan):
    """Plan of a block that adds up the rows of a token's experts: each has as many of its warps.

    Attributes
    ----------
    used : int
        Number of experts of a token.
    """

    used: int = 1

    @property
    def k_warps(self) -> int:
        """See `BlockPlan.k_warps`."""
        return self.warps // self.used


@dataclass(frozen=True)
class StagedSumPlan(SumPlan):
    """Plan of a block whose warps have one expert each, with weights in stages; `fragments` and `ahead` are 1."""

    stage_chunks: int = 1  # chunks of a stage
    stages: int = 1  # stages of a warp


def block_plans(problem: QuantizedMatmulProblem, gpu: GpuTarget) -> list[BlockPlan]:
    """Plan of a problem; two plans, for few and for more rows, if their number is symbolic."""
    extents = problem.result.shape[:-1]
    in_group = GROUP_COLUMNS // PARTS[problem.lhs_type]
    if all(isinstance(extent, int) for extent in extents):
        plan = _plan_of(problem, prod(extent for extent in extents if isinstance(extent, int)))
        tiles = -(-problem.columns // FRAGMENT_COLUMNS)
        is_wide = tiles > gpu.multiprocessors * (FEW_ROWS_WARPS // plan.warps)
        if plan.groups == 1 and is_wide and not point_registers(problem):
            plan = _plan_of(problem, 1, FEW_ROWS_WARPS)
        return [plan]
    # Both are code of one kernel, and share its register limit of two blocks per multiprocessor.
    return [_plan_of(problem, 1), replace(_plan_of(problem, 4 * in_group), fragments=2, ahead=1)]


def expert_plan(problem: QuantizedMatmulProblem, gpu: GpuTarget) -> BlockPlan:
    """Plan of a product with experts, whose blocks have one row each.

    Blocks have several fragments, of one expert, if there are blocks for all multiprocessors: depths of experts are
    short, so that few chunks of one fragment are in flight.
    """
    pairs = prod(extent for extent in problem.result.shape[:-1] if isinstance(extent, int))
    tiles = -(-problem.columns // FRAGMENT_COLUMNS)

    def fits(fragments: int) -> bool:
        return tiles % fragments == 0 and pairs * tiles >= fragments * gpu.multiprocessors

    if problem.shares is not None:
        used = problem.shares.shape[1]
        assert isinstance(used, int), "a token has a known number of experts"
        staged = _staged_sum_plan(problem, gpu, used)
        if staged is not None:
            return staged
        plan = _plan_of(problem, 1, FEW_ROWS_WARPS // used, 1)
        return SumPlan(1, 1, plan.warps * used, plan.ahead, used)
    if problem.second:
        return _plan_of(problem, 1, fragments=2)
    return _plan_of(problem, 1, fragments=next((count for count in (4, 2) if fits(count)), 1))


def _staged_sum_plan(problem: QuantizedMatmulProblem, gpu: GpuTarget, used: int) -> StagedSumPlan | None:
    """Plan with weights in stages, if each multiprocessor has at most one block; None if stages do not apply.

    In a decode step of a mixture on an H200 (Qwen3-30B-A3B, one text, 16 bits), "down" of eight experts takes 7.0 us
    after gate and up, 10.7 with weights in registers; on each of two GPUs 4.2 and 8.0. In 4 bits (Q4_K) it takes 8.9 us
    by stages, as many instructions unpack weights after the wait, and 4.7 with weights in registers.
    """
    chunk, extents = chunk_of(problem.bits), problem.result.shape[:-1]
    blocks = -(-problem.columns // FRAGMENT_COLUMNS) * prod(extent for extent in extents if isinstance(extent, int))
    is_few = all(isinstance(extent, int) for extent in extents) and blocks <= gpu.multiprocessors
    if not (is_few and gpu.bulk_copies and gpu.overlaps_launches and PARTS[problem.lhs_type] == 1):
        return None
    if problem.bits < 16 or used > FEW_ROWS_WARPS or problem.rounded or problem.depth % chunk:
        return None
    chunks, chunk_bytes = problem.depth // chunk, WARP * lane_words(problem.bits) * 4
    choices = (n for n in range(1, chunks) if chunks % n == 0 and n * chunk_bytes >= MIN_STAGE_BYTES)
    stage_chunks = next(choices, chunks)
    row_bytes = used * 2 * (problem.depth + 2 * _PAD_WORDS) + used * 4 * FRAGMENT_COLUMNS * GROUP_COLUMNS
    capacity = min(int(MAX_STAGED_FRACTION * gpu.shared_bytes_sm), gpu.shared_bytes - _OTHER_BYTES - row_bytes)
    stages = min(chunks // stage_chunks, capacity // (used * stage_chunks * chunk_bytes))
    return StagedSumPlan(1, 1, used, 1, used, stage_chunks, stages) if stages > 0 else None


def _plan_of(problem: QuantizedMatmulProblem, rows: int, max_warps: int = MAX_WARPS, fragments: int = 0) -> BlockPlan:
    in_group = GROUP_COLUMNS // PARTS[problem.lhs_type]
    groups = min(4, max(1, -(-rows // in_group)))
    # Fragments share loads of the left operand.
    fragments = fragments or {1: 1, 2: 2}.get(groups, 4)
    chunks = -(-problem.depth // chunk_of(problem.bits))
    own = -(-chunks // min(max_warps, chunks))
    warps = -(-chunks // own)
    most = MAX_CHUNKS_AHEAD[fragments]
    # Iterations of equal length, as missing chunks cost as much as others.
    ahead = min(
        range(1, min(own, most) + 1),
        key=lambda count: (-(-own // count) * count if count * 2 > most else own + most, -count),
    )
    return BlockPlan(fragments, groups, warps, ahead)


class BlockWork:
    """Sizes of a problem and a plan, in the kernel's units.

    Attributes
    ----------
    product_fragments, product_columns : int
        Fragments and columns of a block in each product of its rows.
    parts : int
        Rows of 16-bit floats (of element type `type`) per row of the left operand.
    chunk : int
        Extent of k of a chunk; k has `chunks`, and a warp `own` of them.
    steps : int
        Instructions of a chunk that share a scale; a chunk has `scaled` scales per column.
    words, lane_words : int
        Words of a lane's weights per instruction, without high bits, and of a chunk, with them.
    planes : list of (int, int)
        First word and number of words of a lane's neighbours in memory: all of them, or the low bits and the high ones.
    tiles : int
        Fragments of columns.
    rows : int
        Left rows of a block.
    batch : int
        Column tiles of a block whose accumulators are reduced together.
    sum_rows : int
        Rows, or parts of them, whose accumulators are reduced over warps.
    high_bits : int
        Bits of a weight beyond 4, if they are in a plane of their own.
    part_list : list of Part
        Scales, and zero points or factors of superblocks.
    held_rows : int
        Rows of 16-bit floats in shared memory, `pitch` words each; 0 if they are loaded from global memory.
    """

    def __init__(self, problem: QuantizedMatmulProblem, plan: BlockPlan, m: Expr) -> None:
        self.problem, self.plan, self.m = problem, plan, m
        self.parts = PARTS[problem.lhs_type]
        self.type = "float16" if problem.lhs_type == "float16" else "bfloat16"
        self.chunk = chunk_of(problem.bits)
        self.is_plain = problem.bits == 16
        self.words, self.lane_words = max(1, problem.bits // 4), lane_words(problem.bits)
        counts = NARROW_PLANES.get(problem.bits) or [4, self.lane_words - 4]
        self.planes = [(sum(counts[:i]), count) for i, count in enumerate(counts) if count]
        self.high_bits = max(0, problem.bits - 4) if problem.bits < 8 else 0
        self.chunk_bytes = WARP * self.lane_words * 4
        self.chunks = -(-problem.depth // self.chunk)
        self.steps = 1 if self.is_plain else gcd(problem.block, self.chunk) // STEP
        self.scaled = self.chunk // STEP // self.steps
        self.tiles = -(-problem.columns // FRAGMENT_COLUMNS)
        self.rows = plan.groups * (GROUP_COLUMNS // self.parts)
        self.own = -(-self.chunks // plan.k_warps)
        self.pitch = self.chunks * self.chunk // 2 + _PAD_WORDS
        rows = min(m, self.rows) if isinstance(m, int) else self.rows
        self.held_rows = rows * self.parts if rows * self.parts * self.pitch * 4 <= MAX_LEFT_BYTES else 0
        if self.parts > 1 and plan.groups > 1:
            self.held_rows = 0  # parts of a row must be in one group of eight
        self.sum_rows = plan.groups * GROUP_COLUMNS
        if self.parts == 1 and isinstance(m, int):
            self.sum_rows = min(m, self.sum_rows)
        self.product_fragments = plan.fragments // problem.products
        self.product_columns = self.product_fragments * FRAGMENT_COLUMNS
        self.column_tiles = -(-self.tiles // self.product_fragments)
        self.part_list = parts_of(problem)
        self.sums = plan.warps * plan.fragments * self.sum_rows * FRAGMENT_COLUMNS

    def units_of_chunk(self, part: Part) -> int:
        """Units of a part that a chunk reads: one for each scale, if it has more than one unit."""
        return self.scaled if part.unit % self.chunk else 1

    def share(self, gpu: GpuTarget, row_tiles: Expr, blocks_per_sm: int, has_points: int) -> None:
        """Distribute the work among blocks.

        Parameters
        ----------
        blocks_per_sm : int
            Resident blocks per multiprocessor; 0: chosen here.
        has_points : int
            Registers of zero points: 0, 1 or 2.
        """
        plan = self.plan
        self.blocks_per_sm = blocks_per_sm or self._resident_blocks(gpu, self.column_tiles * row_tiles, has_points)
        self.stride = self.column_tiles
        if isinstance(row_tiles, int):  # at most the resident blocks
            resident_blocks = self.blocks_per_sm or max(1, WARPS_PER_MULTIPROCESSOR // plan.warps)
            self.stride = min(self.column_tiles, max(1, gpu.multiprocessors * resident_blocks // row_tiles))
        left_bytes = self.held_rows * self.pitch * 4
        self.batch = self._batch(gpu.shared_bytes_sm // max(2, self.blocks_per_sm) - left_bytes)
        self.held_at = self.batch * self.sums * 4
        self.arrived_at = self.held_at + left_bytes
        self.shared_bytes = self.arrived_at + 8

    @property
    def is_persistent(self) -> bool:
        """True if a block has several column tiles."""
        return self.stride < self.column_tiles

    def _batch(self, capacity: int) -> int:
        """Column tiles whose accumulators are reduced together, given `capacity` bytes of shared memory."""
        if not self.is_persistent:
            return 1
        return min(-(-self.column_tiles // self.stride), max(1, min(MAX_SUMS_BYTES, capacity) // (self.sums * 4)))

    def _resident_blocks(self, gpu: GpuTarget, blocks: Expr, has_points: int) -> int:
        if self.plan.groups > 1 or self.plan.fragments > 1 or not isinstance(blocks, int):
            return 0
        blocks_per_sm = max(1, FEW_ROWS_WARPS // self.plan.warps)
        return 1 if has_points and blocks > blocks_per_sm * gpu.multiprocessors else blocks_per_sm
