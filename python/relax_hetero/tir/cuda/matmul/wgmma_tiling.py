"""How a product is cut for wgmma: tiles, stages, blocks, parts of k."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import inf, prod

from ....encoding.packed_layout import SWIZZLED_BYTES
from ....encoding.problem import MatmulProblem
from ....target.element_types import bytes_of
from ....target.gpu_target import GpuModel, GpuTarget
from ...core.builder import Expr, ceil_div
from ..core.minimax_regret import cases_of, minimax_regret

RASTERIZATION_GROUP_M = 16
"""Rows of tiles that go over the columns together."""
STAGED_BYTES = 512
"""Bytes of a row of the result that a warp stages at a time: rows with more are stored in several turns."""
_STAGED = (STAGED_BYTES, 256, 128)  # the most that leaves room for so many stages:
_SHORT_RUN = 64  # columns
MANY_STAGES = 4
"""With fewer, 4096x1024x4096 takes 5 % longer: copies are as slow as a step, and two are under way."""
STAGING_PAD = 32
"""Bytes between staged rows, at most."""

SWAPPED_ROWS = {64: (160, 192), 128: (48, 64, 80, 96, 112), 256: (64, 80, 96, 112)}
"""Rows of tiles whose operands are swapped, by their columns."""
SHARING = (64, 128, False), (96, 64, True), (48, 128, True), (64, 128, True), (96, 128, True)
"""Rows and columns of tiles of which two blocks may share a multiprocessor, and whether operands are swapped."""
SPLITS = (1, 2, 4, 8)
"""Blocks of a cluster that share a tile."""
MAX_SPLIT = 128 * 128
"""Elements of a tile whose k is split: larger ones give each other too much."""


_RESERVED = 1024
"""Bytes of a multiprocessor's shared memory that a block has besides its own."""


@dataclass(frozen=True)
class Tiling:
    """How a product is cut.

    Attributes
    ----------
    rows, columns : int
        Rows and columns of a tile: 64 or 128 rows, where operands are swapped any multiple of 16; columns a multiple of
        64, up to 256.
    stages : int
        Number of stages of the ring of tiles in shared memory.
    blocks : int
        Number of blocks that are launched, a multiple of `cluster_split_k`; 0: those of a cluster for each tile, which
        only a launch knows.
    cluster_split_k : int
        Blocks of a cluster that share a tile, each with a part of k: 1, 2, 4 or 8.
    blocks_per_sm : int
        Blocks of a multiprocessor: while one stores, or waits for its first loads, the other multiplies.
    rasterization_group_m : int
        Rows of tiles that go over the columns together.
    epilogue_columns : int
        Columns of the result that a warp turns from fragments to rows at a time; where operands are swapped, rows that
        a warpgroup turns.
    swap_ab : bool
        Whether columns of the result are the tensor cores' rows, of which there are always 64, and so rows can be as
        few or many as give all multiprocessors the same work.
    """

    rows: int
    columns: int
    stages: int
    blocks: int
    cluster_split_k: int = 1
    rasterization_group_m: int = RASTERIZATION_GROUP_M
    epilogue_columns: int = 64
    blocks_per_sm: int = 1
    swap_ab: bool = False

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return consumers_of(self.rows, self.columns, self.swap_ab, self.blocks_per_sm)


def consumers_of(rows: int, columns: int, swap_ab: bool, blocks_per_sm: int) -> int:
    """Warpgroups that multiply: of swapped operands two, but one where blocks share a multiprocessor's registers."""
    return min(2 if blocks_per_sm == 1 else 1, columns // 64) if swap_ab else rows // 64


def choose_tiling(
    problem: MatmulProblem,
    gpu: GpuTarget,
    sizes: tuple[Expr, Expr, Expr],
    counts: Sequence[Expr],
    gathers: bool = False,
    may_swap: bool = False,
) -> Tiling:
    """The tiling of a problem: the one of fewest estimated `cycles`.

    Parameters
    ----------
    sizes, counts : sequence of PrimExpr or int
        Extents of m, n and k, and of batch dimensions; where they are symbolic, the tiling loses little for any of
        `EXTENTS` in their place.
    gathers : bool
        Whether an operand comes through registers.
    may_swap : bool
        Whether operands may be swapped: the left one lies in lines of k, and the right one is packed.
    """
    batches = prod(count if isinstance(count, int) else 1 for count in counts)
    is_known = all(isinstance(size, int) for size in (*sizes, *counts))
    cases = cases_of(sizes, is_known)
    model = gpu.model
    slowness, per_step = model.gathered_step_factor if gathers else 1, SWIZZLED_BYTES // bytes_of(problem.lhs.dtype)
    # Single bytes would be staged one by one.
    may_swap = may_swap and is_known and not gathers and staged_element(problem) > 1
    max_split = ceil_div(cases[0][2], per_step) if isinstance(sizes[2], int) else 1
    choices = [cut for cut in _cuts(model, may_swap, is_known and not gathers) if cut.cluster_split_k <= max_split]

    def cost(cut: Cut, case: Sequence[int]) -> float:
        tiles = ceil_div(case[0], cut.rows) * ceil_div(case[1], cut.columns) * batches
        resident = model.resident_blocks[1]
        if cut.blocks_per_sm > 1 and not resident < tiles <= (cut.blocks_per_sm * resident if cut.swap_ab else tiles):
            # Nothing shares, or blocks have several tiles, for which half the registers are too few.
            return inf
        return cycles(cut, model, tiles, ceil_div(case[2], per_step), slowness)

    cut = minimax_regret(choices, cases, cost)
    steps = ceil_div(cases[-1][2], per_step)
    # Of few steps, most of the work is to store: warps take turns in runs of 128 bytes of the result, which takes 16 %
    # less time for 50,176 x 64 x 256.
    short = max(_STAGED[-1], _SHORT_RUN * staged_element(problem))
    epilogue_columns = _STAGED if steps // cut.cluster_split_k >= MANY_STAGES or cut.swap_ab else (short,)
    tilings = [
        tiling_of(
            problem,
            gpu,
            sizes,
            counts,
            (cut.rows, cut.columns),
            cut.cluster_split_k,
            staged_bytes=size,
            blocks_per_sm=cut.blocks_per_sm,
            swap_ab=cut.swap_ab,
        )
        for size in epilogue_columns
    ]
    most = min(MANY_STAGES, steps // cut.cluster_split_k)
    return next((tiling for tiling in tilings if tiling.stages >= most), max(tilings, key=lambda t: t.stages))


@dataclass(frozen=True)
class Cut:
    """Problem and tiling that `cycles` are estimated of; attributes as in `Tiling`."""

    rows: int
    columns: int
    cluster_split_k: int = 1
    blocks_per_sm: int = 1
    swap_ab: bool = False

    def step_cycles(self, model: GpuModel) -> float:
        """Cycles of a step of k, where loads from L2 do not take longer."""
        if not self.swap_ab:
            return model.step_cycles[self.rows, self.columns]
        start, per_tile, per_line, per_shared_line = model.swapped_step_cycles
        lines = self.rows + self.columns
        shared = per_shared_line * lines if consumers_of(self.rows, self.columns, True, self.blocks_per_sm) > 1 else 0
        return start + per_tile * self.rows * self.columns / 32 + per_line * lines + shared


@cache
def _cuts(model: GpuModel, may_swap: bool, may_share: bool) -> tuple[Cut, ...]:
    """All that there are to choose from."""
    tiles = [(*tile, False) for tile in model.step_cycles]
    tiles += [(rows, columns, True) for columns in SWAPPED_ROWS for rows in SWAPPED_ROWS[columns] if may_swap]
    cuts = [
        Cut(rows, columns, cluster_split_k, 1, swap_ab)
        for rows, columns, swap_ab in tiles
        for cluster_split_k in SPLITS
        if cluster_split_k == 1 or (not swap_ab and rows * columns <= MAX_SPLIT and columns // cluster_split_k % 8 == 0)
    ]
    cuts += [Cut(*tile[:2], 1, 2, tile[2]) for tile in SHARING if may_share and tile[2] <= may_swap]
    return tuple(cuts)


def reads_rows(problem: MatmulProblem) -> bool:
    """True if the epilogue reads operands as large as the result, or makes numbers wider than sums: by whole rows."""
    operands = problem.epilogue.operands if problem.epilogue else ()
    reads = problem.init is not None or any({"m", "n"} <= set(operand.index_map) for operand in operands)
    return reads or bytes_of(problem.result.dtype) > bytes_of("float32")


def staged_element(problem: MatmulProblem) -> int:
    """Bytes of what warps turn from fragments to rows: results, or sums where the epilogue wants rows."""
    return 4 if reads_rows(problem) else bytes_of(problem.result.dtype)


def cycles(cut: Cut, model: GpuModel, tiles: int, steps: int, slowness: float = 1) -> float:
    """About how many cycles a product of `tiles` tiles takes.

    Parameters
    ----------
    slowness : float
        How many times as long a step takes.
    """
    blocks, sums = tiles * cut.cluster_split_k, cut.rows * cut.columns
    turns = ceil_div(blocks, model.resident_blocks[cut.cluster_split_k] * cut.blocks_per_sm)
    residents = min(cut.blocks_per_sm, ceil_div(blocks, model.resident_blocks[1]))
    loads = (cut.rows + cut.columns) * SWIZZLED_BYTES * (blocks / turns) / model.l2_bytes_per_cycle
    step = max(cut.step_cycles(model) * (1 + model.second_block_step_fraction * (residents - 1)), loads) * slowness
    stored = model.store_cycles + sums / cut.cluster_split_k / model.stored_elements_per_cycle
    if cut.cluster_split_k > 1:
        meeting = model.cluster_cycles + model.cluster_block_cycles * (cut.cluster_split_k - 1)
        stored += meeting + sums * 4 * (1 - 1 / cut.cluster_split_k) / model.exchanged_bytes_per_cycle
    stores = turns if cut.blocks_per_sm == 1 else 1 + 0.3 * (turns - 1)
    return model.launch_cycles + turns * ceil_div(steps, cut.cluster_split_k) * step + stores * stored


def tiling_of(
    problem: MatmulProblem,
    gpu: GpuTarget,
    sizes: tuple[Expr, Expr, Expr],
    counts: Sequence[Expr],
    tile: tuple[int, int],
    cluster_split_k: int = 1,
    max_stages: int = 8,
    staged_bytes: int = STAGED_BYTES,
    rasterization_group_m: int = RASTERIZATION_GROUP_M,
    blocks_per_sm: int = 1,
    swap_ab: bool = False,
) -> Tiling:
    """The tiling with tiles of a size: as many stages as shared memory has room for, and blocks as there is work.

    Parameters
    ----------
    staged_bytes : int
        Bytes of a row of the result that a warp stages at a time; where operands are swapped, `STAGED_BYTES` for all
        rows of a tile at a time, and fewer for a part of them.
    """
    m, n, k = sizes
    rows, columns = tile
    element = staged_element(problem)
    if swap_ab:
        epilogue_columns = rows // cluster_split_k
        if epilogue_columns * staged_bytes // STAGED_BYTES % 8 == 0:
            epilogue_columns = epilogue_columns * staged_bytes // STAGED_BYTES
        staging = consumers_of(rows, columns, swap_ab, blocks_per_sm) * epilogue_columns * (64 * element + 16)
    else:
        epilogue_columns = columns // cluster_split_k
        while epilogue_columns * element > staged_bytes:
            epilogue_columns //= 2
        staging = rows * (epilogue_columns * element + STAGING_PAD)
    # Some bytes are barriers.
    room = (gpu.shared_bytes + _RESERVED) // blocks_per_sm - _RESERVED - staging - 256
    stages = room // ((rows + columns) * SWIZZLED_BYTES)
    if isinstance(k, int):
        steps = ceil_div(ceil_div(k, SWIZZLED_BYTES // bytes_of(problem.lhs.dtype)), cluster_split_k)
        stages = min(stages, max(2, steps))
    clusters = gpu.multiprocessors * blocks_per_sm // cluster_split_k
    if isinstance(m, int) and isinstance(n, int) and all(isinstance(count, int) for count in counts):
        tiles = ceil_div(m, rows) * ceil_div(n, columns) * prod(counts)
        clusters = tiles if cluster_split_k > 1 else min(tiles, clusters)  # blocks of a cluster have one tile
    elif cluster_split_k > 1:
        clusters = 0
    blocks = clusters * cluster_split_k
    stages = max(1, min(stages, max_stages))
    return Tiling(
        rows, columns, stages, blocks, cluster_split_k, rasterization_group_m, epilogue_columns, blocks_per_sm, swap_ab
    )
