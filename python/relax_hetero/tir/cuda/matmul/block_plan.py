"""How a kernel of a product with weights of 4 or 8 bits shares its work: among blocks, warps and turns of a warp."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd, prod

from ....encoding.block_weights import FRAGMENT_COLUMNS, chunk_of
from ....encoding.problem import QuantizedMatmulProblem
from ....target.gpu_target import GpuTarget
from ...core.builder import Expr

STEP = 16
"""Values of k that one instruction multiplies."""

GROUP_COLUMNS = 8
"""Rows of the left operand, or parts of them, that one instruction multiplies."""

PARTS = {"float16": 1, "bfloat16": 1, "float32": 3}
"""Rows of 16-bit floats that make one row of the left operand."""

MAX_WARPS = 8
"""Maximum number of warps of a block; `FEW_ROWS_WARPS` of one that has a multiprocessor for itself."""

MAX_CHUNKS_AHEAD = {1: 4, 2: 4, 4: 2}
"""Chunks of 512 bytes a fragment that a warp has asked for, by the fragments of a block.

A row by 4,096 columns of depth 14,336 takes 9.5 us of a decode step on an H200 where warps ask for 3 chunks at a time,
10.6 for 7 and 12.6 for 14: more registers for chunks leave fewer for the next launch.
"""

WARPS_PER_MULTIPROCESSOR = 32
"""Warps of persistent blocks on a multiprocessor."""

FEW_ROWS_WARPS = 16
"""The same of few rows: a thread has 128 registers. One row by 4,096 columns of 4 bits takes 3.9 us on an H200, with
24 warps 4.4; by 14,336 columns 10.3 and 11.3 us, and 9.5 us by one block of 16 warps in the place of two of 8: blocks
have equally many tiles where each has many. Zero points take more registers: by so many columns one block of 8 warps
takes 13.3 us, and two, which spill, 15.1."""

HELD_BYTES = 72 << 10
"""Maximum bytes of the left operand in shared memory."""

_PAD = 16  # words between held rows: neighbours begin in other banks
SUMS_BYTES = 64 << 10
"""Bytes of sums that wait in shared memory until those of several tiles are added up: warps go on without meeting.
Eight layers of 4,096 take 484 us with one row where tiles wait for each other, 509 where each is added up by itself."""


@dataclass(frozen=True)
class BlockPlan:
    """How a kernel shares its work.

    Attributes
    ----------
    fragments : int
        Number of fragments of 16 columns of a block.
    groups : int
        Number of groups of `GROUP_COLUMNS` rows (or parts of rows) of a block.
    warps : int
        Number of warps that cut k.
    ahead : int
        Chunks of k that a warp asks for at once.
    """

    fragments: int
    groups: int
    warps: int
    ahead: int

    @property
    def columns(self) -> int:
        """Number of columns of a block."""
        return self.fragments * FRAGMENT_COLUMNS


def block_plans(problem: QuantizedMatmulProblem, gpu: GpuTarget) -> list[BlockPlan]:
    """The plan of a problem; of one with a symbolic number of rows, that for few and that for more."""
    extents = problem.result.shape[:-1]
    in_group = GROUP_COLUMNS // PARTS[problem.lhs.dtype]
    if all(isinstance(extent, int) for extent in extents):
        plan = _plan_of(problem, prod(extent for extent in extents if isinstance(extent, int)))
        tiles = -(-problem.columns // FRAGMENT_COLUMNS)
        has_points = len(problem.weights) > 2
        if plan.groups == 1 and not has_points and tiles > gpu.multiprocessors * (FEW_ROWS_WARPS // plan.warps):
            plan = _plan_of(problem, 1, FEW_ROWS_WARPS)
        return [plan]
    # Both have the registers of one kernel: two blocks share a multiprocessor.
    return [_plan_of(problem, 1), replace(_plan_of(problem, 4 * in_group), fragments=2, ahead=1)]


def _plan_of(problem: QuantizedMatmulProblem, rows: int, max_warps: int = MAX_WARPS) -> BlockPlan:
    in_group = GROUP_COLUMNS // PARTS[problem.lhs.dtype]
    groups = min(4, max(1, -(-rows // in_group)))
    # Fragments share what is read of the left operand.
    fragments = {1: 1, 2: 2}.get(groups, 4)
    chunks = -(-problem.depth // chunk_of(problem.bits))
    own = -(-chunks // min(max_warps, chunks))
    warps = -(-chunks // own)
    most = MAX_CHUNKS_AHEAD[fragments]
    # Rounds of equal length: chunks that are not there cost as much as others.
    ahead = min(
        range(1, min(own, most) + 1),
        key=lambda count: (-(-own // count) * count if count * 2 > most else own + most, -count),
    )
    return BlockPlan(fragments, groups, warps, ahead)


class BlockWork:
    """A problem and a plan, in the units that the kernel counts in.

    Attributes
    ----------
    parts : int
        Rows of 16-bit floats that make one row of the left operand, and `type`, their element type.
    chunk : int
        Values of k that a warp asks for at once, of which the depth has `chunks`, and a warp `own`.
    steps : int
        Instructions that share a scale, within a chunk, which has `scaled` times as many.
    words : int
        Words of weights of a lane for an instruction.
    tiles : int
        Fragments of columns.
    rows : int
        Rows of the left operand of a block.
    batch : int
        Tiles of columns of a block whose sums are added up together.
    sum_rows : int
        Rows, or parts of them, whose sums the warps of a block bring together.
    held_rows : int
        Rows of 16-bit floats in shared memory, `pitch` words each; 0 where they are read from memory.
    """

    def __init__(self, problem: QuantizedMatmulProblem, plan: BlockPlan, m: Expr) -> None:
        self.problem, self.plan, self.m = problem, plan, m
        self.parts = PARTS[problem.lhs.dtype]
        self.type = "float16" if problem.lhs.dtype == "float16" else "bfloat16"
        self.chunk = chunk_of(problem.bits)
        self.words = problem.bits // 4
        self.chunks = -(-problem.depth // self.chunk)
        self.blocks = -(-problem.depth // problem.block)
        self.steps = gcd(problem.block, self.chunk) // STEP
        self.scaled = self.chunk // STEP // self.steps
        self.tiles = -(-problem.columns // FRAGMENT_COLUMNS)
        self.rows = plan.groups * (GROUP_COLUMNS // self.parts)
        self.own = -(-self.chunks // plan.warps)
        self.pitch = self.chunks * self.chunk // 2 + _PAD
        rows = min(m, self.rows) if isinstance(m, int) else self.rows
        self.held_rows = rows * self.parts if rows * self.parts * self.pitch * 4 <= HELD_BYTES else 0
        if self.parts > 1 and plan.groups > 1:
            self.held_rows = 0  # the parts of a row lie in one group of eight
        self.sum_rows = plan.groups * GROUP_COLUMNS
        if self.parts == 1 and isinstance(m, int):
            self.sum_rows = min(m, self.sum_rows)
        self.column_tiles = -(-self.tiles // plan.fragments)
        self.sums = plan.warps * plan.fragments * self.sum_rows * FRAGMENT_COLUMNS

    def share(self, gpu: GpuTarget, row_tiles: Expr, blocks_per_sm: int, has_points: int) -> None:
        """Share the work among blocks.

        Parameters
        ----------
        blocks_per_sm : int
            Blocks that share a multiprocessor's registers; 0: as is best.
        has_points : int
            Registers' worth of zero points: 0, 1 or 2.
        """
        plan = self.plan
        self.blocks_per_sm = blocks_per_sm or self._blocks_together(gpu, self.column_tiles * row_tiles, has_points)
        self.stride = self.column_tiles
        if isinstance(row_tiles, int):  # no more than run at once
            per = self.blocks_per_sm or max(1, WARPS_PER_MULTIPROCESSOR // plan.warps)
            self.stride = min(self.column_tiles, max(1, gpu.multiprocessors * per // row_tiles))
        held = self.held_rows * self.pitch * 4
        self.batch = self._batch(gpu.shared_bytes_sm // max(2, self.blocks_per_sm) - held)
        self.held_at = self.batch * self.sums * 4
        self.arrived_at = self.held_at + held
        self.shared_bytes = self.arrived_at + 8

    @property
    def is_persistent(self) -> bool:
        """True if a block has several tiles of columns."""
        return self.stride < self.column_tiles

    def _batch(self, room: int) -> int:
        """Tiles of columns whose sums are added up together, where there is so much shared memory for them."""
        if not self.is_persistent:
            return 1
        return min(-(-self.column_tiles // self.stride), max(1, min(SUMS_BYTES, room) // (self.sums * 4)))

    def _blocks_together(self, gpu: GpuTarget, blocks: Expr, has_points: int) -> int:
        if self.plan.groups > 1 or self.plan.fragments > 1 or not isinstance(blocks, int):
            return 0
        blocks_per_sm = max(1, FEW_ROWS_WARPS // self.plan.warps)
        return 1 if has_points and blocks > blocks_per_sm * gpu.multiprocessors else blocks_per_sm
