"""Tilings for ``mma.sync``: block tiles, warp tiles and stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ....encoding.packed_layout import SWIZZLED_BYTES
from ....encoding.problem import MatmulProblem
from ....target.element_types import bytes_of
from ....target.gpu_target import WARP, GpuTarget
from ...core.builder import Expr, ceil_div
from ..core.minimax_regret import cases_of, minimax_regret
from ..tile.fragment_store import STAGING_PAD
from .wgmma_tiling import STAGED_BYTES, staged_element

MAX_STAGES = 4


@dataclass(frozen=True)
class MmaTiling:
    """Tiling of a product."""

    # Rows and columns of a block tile, multiples of 64.
    rows: int
    columns: int
    # Rows and columns of a warp tile, multiples of 16.
    warp_rows: int
    warp_columns: int
    stages: int  # stages of the pipeline in shared memory, at least 2
    epilogue_columns: int  # columns of the result that a warp stages in shared memory at a time

    @property
    def threads(self) -> int:
        """Number of threads of a block."""
        return (self.rows // self.warp_rows) * (self.columns // self.warp_columns) * WARP


# Block tile, warp tile, and the fraction of the tensor cores' peak rate that shared memory traffic leaves: large warp
# tiles load the fewest fragments per product.
_TILES = (
    (128, 256, 64, 64, 1.0),
    (128, 128, 64, 64, 0.9),
    (128, 64, 64, 32, 0.7),
    (64, 128, 32, 64, 0.7),
    (64, 64, 32, 32, 0.5),
)


def choose_mma_tiling(
    problem: MatmulProblem, gpu: GpuTarget, sizes: tuple[Expr, Expr, Expr], counts: Sequence[Expr]
) -> MmaTiling:
    """Tiling with the lowest estimated time for m, n, k `sizes` and batch extents `counts`.

    Symbolic extents take the tiling with the lowest regret over `EXTENTS`.
    """
    is_known = all(isinstance(size, int) for size in (*sizes, *counts))
    batches = prod(count if isinstance(count, int) else 1 for count in counts)
    cases = cases_of(sizes, is_known)
    per_step = SWIZZLED_BYTES // bytes_of(problem.lhs.dtype)
    steps = ceil_div(cases[-1][2], per_step)
    choices = []
    for rows, columns, warp_rows, warp_columns, rate_fraction in _TILES:
        tiling = mma_tiling_of(problem, gpu, (rows, columns), (warp_rows, warp_columns), steps)
        choices += [(tiling, rate_fraction)] if tiling else []
    assert choices, "two stages of the smallest tiles fit every GPU that has tensor cores"

    def cost(choice: tuple[MmaTiling, float], case: Sequence[int]) -> float:
        tiling, rate_fraction = choice
        tiles = batches * ceil_div(case[0], tiling.rows) * ceil_div(case[1], tiling.columns)
        elements = tiling.rows * tiling.columns
        tile_cycles = elements / rate_fraction * ceil_div(case[2], per_step) + 20000 + 30 * elements // 64
        return ceil_div(tiles, gpu.multiprocessors) * tile_cycles

    return minimax_regret(choices, cases, cost)[0]


def mma_tiling_of(
    problem: MatmulProblem, gpu: GpuTarget, tile: tuple[int, int], warp: tuple[int, int], steps: int
) -> MmaTiling | None:
    """Tiling for a tile size with as many stages as fit; None if two stages do not."""
    rows, columns = tile
    element = staged_element(problem)
    epilogue_columns = warp[1]
    while epilogue_columns * element > STAGED_BYTES:
        epilogue_columns //= 2
    warps = (rows // warp[0]) * (columns // warp[1])
    staging = warps * 16 * (epilogue_columns * element + STAGING_PAD)
    stage = (rows + columns) * SWIZZLED_BYTES
    # Small tiles leave shared memory for a second resident block, which hides latency.
    usable = gpu.shared_bytes if rows * columns > 128 * 128 else min(gpu.shared_bytes, gpu.shared_bytes_sm // 2 - 1024)
    stages = (usable - staging - SWIZZLED_BYTES * 8) // stage
    if stages < 2:
        stages = (gpu.shared_bytes - staging - SWIZZLED_BYTES * 8) // stage
    stages = min(stages, MAX_STAGES, max(2, steps))
    return None if stages < 2 else MmaTiling(rows, columns, *warp, stages, epilogue_columns)
