"""How a product is cut for wgmma: tiles, stages, blocks, parts of k."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ....encoding.packed_layout import SWIZZLED_BYTES
from ....encoding.problem import MatmulProblem
from ....target.element_types import bytes_of
from ....target.gpu_target import GpuTarget
from ...core.builder import Expr, ceil_div
from ..core.least_loss import cases_of, least_loss

GROUP = 16
"""Rows of tiles that go over the columns together."""
STAGED_BYTES = 512
"""Of a row of the result, that a warp stages at a time: rows with more are stored in several turns."""
_STAGED = (STAGED_BYTES, 256, 128)  # the most that leaves room for so many stages:
_SHORT_RUN = 64  # columns
MANY_STAGES = 4
"""With fewer, 4096x1024x4096 takes 5 % longer: copies are as slow as a step, and two are under way."""
STAGING_PAD = 32
"""Bytes between staged rows, at most."""


# Cycles of a step of k, 128 bytes of it, by rows and columns of the tile, where loads do not take longer: fitted to
# convolutions and products of 100 to 50,000 rows on an H200.
STEP_CYCLES = {
    (64, 64): 370,
    (64, 128): 415,
    (64, 192): 600,
    (64, 256): 785,
    (128, 64): 540,
    (128, 128): 965,
    (128, 192): 1150,
    (128, 256): 1195,
}
LOADED = 5800
"""Bytes of tiles that all multiprocessors load in a cycle, from the second-level cache."""
SHARING = 64, 128
"""The tile of which two blocks may share a multiprocessor."""
GATHERED = 4
"""Times as long a step takes where operands come through registers."""

# Blocks that run at the same time, by the blocks of a cluster: those of one cluster share one of the GPU's parts, whose
# multiprocessors are no multiple of 4 or 8.
RUNNING = {1: 132, 2: 132, 4: 120, 8: 96}
START_CYCLES = 2350
"""Of a launch and its first loads."""
STORED = 7
"""Elements of the result that a block stores in a cycle."""
EXCHANGE_CYCLES = 700
"""Of the barriers of a cluster, for each doubling of its blocks."""
EXCHANGED = 28
"""Bytes of a tile's sums that blocks exchange in a cycle, of 64 columns: threads of wider tiles have more, in turn."""
MOST_SPLIT_COLUMNS = 128
"""Of a tile whose k is split: 256x4096x4096 took 1.6 times as long as cuBLAS in two parts of tiles of 64x256."""


_RESERVED = 1024
"""Bytes of a multiprocessor's shared memory that a block has besides its own."""


@dataclass(frozen=True)
class Tiling:
    """How a product is cut.

    Attributes
    ----------
    rows, columns : int
        Of a tile: 64 or 128 rows, where operands are swapped any multiple of 16; columns a multiple of 64, up to 256.
    stages : int
        Of the ring of tiles in shared memory.
    blocks : int
        That are launched, a multiple of `split`; 0: those of a cluster for each tile, which only a launch knows.
    split : int
        Blocks of a cluster that share a tile, each with a part of k: 1, 2, 4 or 8.
    together : int
        Blocks of a multiprocessor: while one stores, or waits for its first loads, the other multiplies.
    group : int
        Rows of tiles that go over the columns together.
    staged : int
        Columns of the result that a warp turns from fragments to rows at a time; where operands are swapped, rows that
        a warpgroup turns.
    swapped : bool
        Whether columns of the result are the tensor cores' rows, of which there are always 64, and so rows can be as
        few or many as give all multiprocessors the same work.
    """

    rows: int
    columns: int
    stages: int
    blocks: int
    split: int = 1
    group: int = GROUP
    staged: int = 64
    together: int = 1
    swapped: bool = False

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return consumers_of(self.rows, self.columns, self.swapped, self.together)


def consumers_of(rows: int, columns: int, swapped: bool, together: int) -> int:
    """Warpgroups that multiply: of swapped operands two, but one where blocks share a multiprocessor's registers."""
    return min(2 if together == 1 else 1, columns // 64) if swapped else rows // 64


def choose_tiling(
    problem: MatmulProblem,
    gpu: GpuTarget,
    sizes: tuple[Expr, Expr, Expr],
    counts: Sequence[Expr],
    gathers: bool = False,
) -> Tiling:
    """The tiling of a problem: the one of fewest estimated `cycles`.

    Parameters
    ----------
    sizes, counts : sequence of PrimExpr or int
        Extents of m, n and k, and of batch dimensions; where they are symbolic, the tiling loses little for any of
        `EXTENTS` in their place.
    gathers : bool
        Whether an operand comes through registers.
    """
    batches = prod(count if isinstance(count, int) else 1 for count in counts)
    is_known = all(isinstance(size, int) for size in (*sizes, *counts))
    cases = cases_of(sizes, is_known)
    slowness, per_step = GATHERED if gathers else 1, SWIZZLED_BYTES // bytes_of(problem.lhs.dtype)
    choices = [
        ((rows, columns), split, 1)
        for rows, columns in STEP_CYCLES
        for split in (RUNNING if isinstance(sizes[2], int) else (1,))
        if split <= ceil_div(cases[0][2], per_step)
        and (split == 1 or (columns <= MOST_SPLIT_COLUMNS and columns // split % 8 == 0))
    ]
    if is_known and not gathers:
        choices.append((SHARING, 1, 2))

    def cost(choice: tuple[tuple[int, int], int, int], case: Sequence[int]) -> float:
        (rows, columns), split, together = choice
        tiles = ceil_div(case[0], rows) * ceil_div(case[1], columns) * batches
        return cycles((rows, columns), split, tiles, ceil_div(case[2], per_step), slowness, together)

    tile, split, together = least_loss(choices, cases, cost)
    steps = ceil_div(cases[-1][2], per_step)
    # Of few steps, most of the work is to store: warps take turns in runs of 128 bytes of the result, which takes 16 %
    # less time for 50,176 x 64 x 256.
    short = max(_STAGED[-1], _SHORT_RUN * staged_element(problem))
    staged = _STAGED if steps // split >= MANY_STAGES else (short,)
    tilings = [
        tiling_of(problem, gpu, sizes, counts, tile, split, staged_bytes=size, together=together) for size in staged
    ]
    return next((tiling for tiling in tilings if tiling.stages >= MANY_STAGES), max(tilings, key=lambda t: t.stages))


def reads_rows(problem: MatmulProblem) -> bool:
    """Whether the epilogue reads operands as large as the result, or makes numbers wider than sums: by whole rows."""
    operands = problem.epilogue.operands if problem.epilogue else ()
    reads = problem.init is not None or any({"m", "n"} <= set(operand.index_map) for operand in operands)
    return reads or bytes_of(problem.result.dtype) > bytes_of("float32")


def staged_element(problem: MatmulProblem) -> int:
    """Bytes of what warps turn from fragments to rows: results, or sums where the epilogue wants rows."""
    return 4 if reads_rows(problem) else bytes_of(problem.result.dtype)


def cycles(tile: tuple[int, int], split: int, tiles: int, steps: int, slowness: int = 1, together: int = 1) -> float:
    """About how many cycles a product takes of which `tiles` tiles are cut into `split` parts of k.

    Parameters
    ----------
    slowness : int
        Times as long that a step takes.
    together : int
        Blocks of a multiprocessor: one stores while the other multiplies.
    """
    rows, columns = tile
    turns = ceil_div(tiles * split, RUNNING[split])
    shares = together > 1 and turns > 1
    loads = (rows + columns) * SWIZZLED_BYTES * (tiles * split / turns) / LOADED
    step = max(STEP_CYCLES[tile], loads) * slowness
    stored = rows * columns / split / STORED
    if split > 1:
        stored += EXCHANGE_CYCLES * (split.bit_length() - 1) + rows * columns * 4 / EXCHANGED * columns / 64
    return START_CYCLES + turns * ceil_div(steps, split) * step + (turns / together if shares else turns) * stored


def tiling_of(
    problem: MatmulProblem,
    gpu: GpuTarget,
    sizes: tuple[Expr, Expr, Expr],
    counts: Sequence[Expr],
    tile: tuple[int, int],
    split: int = 1,
    most_stages: int = 8,
    staged_bytes: int = STAGED_BYTES,
    group: int = GROUP,
    together: int = 1,
    swapped: bool = False,
) -> Tiling:
    """The tiling with tiles of a size: as many stages as shared memory has room for, and blocks as there is work.

    Parameters
    ----------
    staged_bytes : int
        Of a row of the result, that a warp stages at a time.
    """
    m, n, k = sizes
    rows, columns = tile
    element = staged_element(problem)
    if swapped:
        staged = rows // split
        staging = consumers_of(rows, columns, swapped, together) * staged * (64 * element + 16)
    else:
        staged = columns // split
        while staged * element > staged_bytes:
            staged //= 2
        staging = rows * (staged * element + STAGING_PAD)
    # Some bytes are barriers.
    room = (gpu.shared_bytes + _RESERVED) // together - _RESERVED - staging - 256
    stages = room // ((rows + columns) * SWIZZLED_BYTES)
    if isinstance(k, int):
        steps = ceil_div(ceil_div(k, SWIZZLED_BYTES // bytes_of(problem.lhs.dtype)), split)
        stages = min(stages, max(2, steps))
    clusters = gpu.multiprocessors * together // split
    if isinstance(m, int) and isinstance(n, int) and all(isinstance(count, int) for count in counts):
        tiles = ceil_div(m, rows) * ceil_div(n, columns) * prod(counts)
        clusters = tiles if split > 1 else min(tiles, clusters)  # blocks of a cluster have one tile
    elif split > 1:
        clusters = 0
    blocks = clusters * split
    stages = max(1, min(stages, most_stages))
    return Tiling(rows, columns, stages, blocks, split, group, staged, together, swapped)
