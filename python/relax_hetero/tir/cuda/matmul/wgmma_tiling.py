"""Tilings for wgmma: tiles, stages, grid and split-k."""

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
from ..tile.fragment_store import STAGING_PAD

RASTERIZATION_GROUP_M = 16
"""Row tiles that are rasterized together over the column tiles."""
STAGED_BYTES = 512
"""Maximum bytes of a row of the result that a warp stages in shared memory at a time."""
_STAGED_SIZES = (STAGED_BYTES, 256, 128)  # the largest that leaves `MIN_STAGES` stages is chosen
_SHORT_COLUMNS = 64
MAX_STAGES = 8
MIN_STAGES = 4
"""With fewer, 4096x1024x4096 takes 5 % longer: copies are as slow as a k-step, and two are in flight."""

SWAPPED_TILE_ROWS = {64: (160, 192), 128: (48, 64, 80, 96, 112), 256: (64, 80, 96, 112)}
"""Row extents of tiles with swapped operands, by their columns."""
TWO_BLOCK_TILES = (64, 128, False), (96, 64, True), (48, 128, True), (64, 128, True), (96, 128, True)
"""Rows, columns and `swap_ab` of tiles for two resident blocks per multiprocessor."""
CLUSTER_SPLITS = (1, 2, 4, 8)
"""Cluster sizes for split-k."""
MAX_SPLIT_TILE = 128 * 128
"""Maximum elements of a tile with split k: larger ones exchange too many accumulators."""


_RESERVED_BYTES = 1024
"""Bytes of a multiprocessor's shared memory that the system reserves per block."""


@dataclass(frozen=True)
class Tiling:
    """Tiling of a product."""

    # Rows and columns of a tile: 64 or 128 rows, or any multiple of 16 if `swap_ab`; columns a multiple of 64, up to
    # 256.
    rows: int
    columns: int
    stages: int  # stages of the pipeline in shared memory
    blocks: int  # grid size, a multiple of `cluster_split_k`; 0: a cluster per tile, with a symbolic number of tiles
    cluster_split_k: int = 1  # blocks of a cluster that split the k of a tile: 1, 2, 4 or 8
    # Columns of the result that a warp stages at a time; rows that a warpgroup stages if `swap_ab`.
    epilogue_columns: int = 64
    # Resident blocks of a multiprocessor: while one stores, or waits for its first loads, the other multiplies.
    blocks_per_sm: int = 1
    # Whether columns of the result are the M dimension of wgmma, which is always 64, so that the rows of a tile can be
    # chosen to balance the load of multiprocessors.
    swap_ab: bool = False

    @property
    def consumers(self) -> int:
        """Number of consumer warpgroups."""
        return consumers_of(self.rows, self.columns, self.swap_ab, self.blocks_per_sm)


def consumers_of(rows: int, columns: int, swap_ab: bool, blocks_per_sm: int) -> int:
    """Number of consumer warpgroups: with swapped operands two, or one if blocks share a multiprocessor."""
    return min(2 if blocks_per_sm == 1 else 1, columns // 64) if swap_ab else rows // 64


def choose_tiling(
    problem: MatmulProblem,
    gpu: GpuTarget,
    sizes: tuple[Expr, Expr, Expr],
    counts: Sequence[Expr],
    gathers: bool = False,
    may_swap: bool = False,
) -> Tiling:
    """Choose the tiling with the fewest estimated `cycles`.

    Parameters
    ----------
    sizes, counts : sequence of PrimExpr or int
        Extents of m, n and k, and of batch dimensions; symbolic ones take the tiling with the lowest regret over
        `EXTENTS`.
    gathers : bool
        Whether an operand is loaded through registers.
    may_swap : bool
        Whether operands may be swapped: k of the left one is contiguous, and the right one is packed.
    """
    batches = prod(count if isinstance(count, int) else 1 for count in counts)
    is_known = all(isinstance(size, int) for size in (*sizes, *counts))
    cases = cases_of(sizes, is_known)
    model = gpu.model
    factor, per_step = model.gathered_step_factor if gathers else 1, SWIZZLED_BYTES // bytes_of(problem.lhs.dtype)
    # 1-byte results would be staged one by one.
    may_swap = may_swap and is_known and not gathers and staged_element(problem) > 1
    max_split = ceil_div(cases[0][2], per_step) if isinstance(sizes[2], int) else 1
    options = [cut for cut in _options(model, may_swap, is_known and not gathers) if cut.cluster_split_k <= max_split]

    def cost(cut: TileOption, case: Sequence[int]) -> float:
        tiles = ceil_div(case[0], cut.rows) * ceil_div(case[1], cut.columns) * batches
        resident = model.resident_blocks[1]
        if cut.blocks_per_sm > 1 and not resident < tiles <= (cut.blocks_per_sm * resident if cut.swap_ab else tiles):
            # Multiprocessors would have one block, or blocks several tiles, for which half the registers are too few.
            return inf
        return cycles(cut, model, tiles, ceil_div(case[2], per_step), factor)

    cut = minimax_regret(options, cases, cost)
    steps = ceil_div(cases[-1][2], per_step)
    # With few k-steps, the epilogue dominates: staging runs of 128 bytes takes 16 % less time for 50,176 x 64 x 256.
    short_bytes = max(_STAGED_SIZES[-1], _SHORT_COLUMNS * staged_element(problem))
    epilogue_columns = _STAGED_SIZES if steps // cut.cluster_split_k >= MIN_STAGES or cut.swap_ab else (short_bytes,)
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
    min_stages = min(MIN_STAGES, steps // cut.cluster_split_k)
    return next((tiling for tiling in tilings if tiling.stages >= min_stages), max(tilings, key=lambda t: t.stages))


@dataclass(frozen=True)
class TileOption:
    """Tile shape and split for which `cycles` are estimated; attributes as in `Tiling`."""

    rows: int
    columns: int
    cluster_split_k: int = 1
    blocks_per_sm: int = 1
    swap_ab: bool = False

    def step_cycles(self, model: GpuModel) -> float:
        """Cycles of a k-step that is not bound by L2 bandwidth."""
        if not self.swap_ab:
            return model.step_cycles[self.rows, self.columns]
        start, per_tile, per_line, per_shared_line = model.swapped_step_cycles
        lines = self.rows + self.columns
        shared = per_shared_line * lines if consumers_of(self.rows, self.columns, True, self.blocks_per_sm) > 1 else 0
        return start + per_tile * self.rows * self.columns / 32 + per_line * lines + shared


@cache
def _options(model: GpuModel, may_swap: bool, may_share: bool) -> tuple[TileOption, ...]:
    """Candidates of `choose_tiling`."""
    tiles = [(*tile, False) for tile in model.step_cycles]
    tiles += [(rows, columns, True) for columns in SWAPPED_TILE_ROWS for rows in SWAPPED_TILE_ROWS[columns] if may_swap]
    options = [
        TileOption(rows, columns, cluster_split_k, 1, swap_ab)
        for rows, columns, swap_ab in tiles
        for cluster_split_k in CLUSTER_SPLITS
        if cluster_split_k == 1
        or (not swap_ab and rows * columns <= MAX_SPLIT_TILE and columns // cluster_split_k % 8 == 0)
    ]
    options += [TileOption(*tile[:2], 1, 2, tile[2]) for tile in TWO_BLOCK_TILES if may_share and tile[2] <= may_swap]
    return tuple(options)


def reads_rows(problem: MatmulProblem) -> bool:
    """Return whether the epilogue works on whole rows, for large operands and for results wider than float32."""
    operands = problem.epilogue.operands if problem.epilogue else ()
    reads = problem.init is not None or any({"m", "n"} <= set(operand.index_map) for operand in operands)
    return reads or bytes_of(problem.result.dtype) > bytes_of("float32")


def staged_element(problem: MatmulProblem) -> int:
    """Bytes of a staged element: a result, or an accumulator if the epilogue works on whole rows."""
    return 4 if reads_rows(problem) else bytes_of(problem.result.dtype)


def cycles(cut: TileOption, model: GpuModel, tiles: int, steps: int, factor: float = 1) -> float:
    """Estimate the cycles of a product with `tiles` tiles.

    Parameters
    ----------
    factor : float
        Factor of the cycles of a k-step.
    """
    blocks, sums = tiles * cut.cluster_split_k, cut.rows * cut.columns
    waves = ceil_div(blocks, model.resident_blocks[cut.cluster_split_k] * cut.blocks_per_sm)
    residents = min(cut.blocks_per_sm, ceil_div(blocks, model.resident_blocks[1]))
    loads = (cut.rows + cut.columns) * SWIZZLED_BYTES * (blocks / waves) / model.l2_bytes_per_cycle
    step = max(cut.step_cycles(model) * (1 + model.second_block_step_fraction * (residents - 1)), loads) * factor
    stored = model.store_cycles + sums / cut.cluster_split_k / model.stored_elements_per_cycle
    if cut.cluster_split_k > 1:
        exchange = model.cluster_cycles + model.cluster_block_cycles * (cut.cluster_split_k - 1)
        stored += exchange + sums * 4 * (1 - 1 / cut.cluster_split_k) / model.exchanged_bytes_per_cycle
    exposed_stores = waves if cut.blocks_per_sm == 1 else 1 + 0.3 * (waves - 1)
    return model.launch_cycles + waves * ceil_div(steps, cut.cluster_split_k) * step + exposed_stores * stored


def tiling_of(
    problem: MatmulProblem,
    gpu: GpuTarget,
    sizes: tuple[Expr, Expr, Expr],
    counts: Sequence[Expr],
    tile: tuple[int, int],
    cluster_split_k: int = 1,
    staged_bytes: int = STAGED_BYTES,
    blocks_per_sm: int = 1,
    swap_ab: bool = False,
) -> Tiling:
    """Tiling for a tile size, with as many stages as fit shared memory, and a persistent grid.

    Parameters
    ----------
    staged_bytes : int
        Maximum bytes of a row of the result that a warp stages at a time; if `swap_ab`, the fraction of `STAGED_BYTES`
        is that of the rows that are staged at a time.
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
    # 256 bytes are reserved for barriers.
    capacity = (gpu.shared_bytes + _RESERVED_BYTES) // blocks_per_sm - _RESERVED_BYTES - staging - 256
    stages = capacity // ((rows + columns) * SWIZZLED_BYTES)
    if isinstance(k, int):
        steps = ceil_div(ceil_div(k, SWIZZLED_BYTES // bytes_of(problem.lhs.dtype)), cluster_split_k)
        stages = min(stages, max(2, steps))
    clusters = gpu.multiprocessors * blocks_per_sm // cluster_split_k
    if isinstance(m, int) and isinstance(n, int) and all(isinstance(count, int) for count in counts):
        tiles = ceil_div(m, rows) * ceil_div(n, columns) * prod(counts)
        clusters = tiles if cluster_split_k > 1 else min(tiles, clusters)  # a cluster has one tile
    elif cluster_split_k > 1:
        clusters = 0
    blocks = clusters * cluster_split_k
    stages = max(1, min(stages, MAX_STAGES))
    return Tiling(rows, columns, stages, blocks, cluster_split_k, epilogue_columns, blocks_per_sm, swap_ab)
