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

GROUP = 16
"""Rows of tiles that go over the columns together."""
STAGED_BYTES = 512
"""Of a row of the result, that a warp stages at a time: rows with more are stored in several turns."""
STAGING_PAD = 32
"""Bytes between staged rows, at most."""


TILE_ROWS = (64, 128)
TILE_COLUMNS = (64, 128, 192, 256)
SPLITS = (1, 2, 4, 8)
SYMBOLIC_EXTENT = 1024

# Of a multiprocessor, a cycle: products of 128 bytes of k (1,024 a cycle of 16 bits; the same of others, whose steps
# have more k at a higher rate), bytes that tiles bring, elements of the result, bytes of sums of other blocks.
MULTIPLIED = 32.0
LOADED = 64.0
STORED = 16.0
EXCHANGED = 32.0
# Of a step, of an exchange of sums, of a launch and its first loads.
STEP_CYCLES = 60.0
SPLIT_CYCLES = 1500.0
START_CYCLES = 3000.0


@dataclass(frozen=True)
class Tiling:
    """How a product is cut.

    Attributes
    ----------
    rows, columns : int
        Of a tile: 64 or 128 rows; columns a multiple of 64, up to 256.
    stages : int
        Of the ring of tiles in shared memory.
    blocks : int
        That are launched, a multiple of `split`.
    split : int
        Blocks of a cluster that share a tile, each with a part of k: 1, 2, 4 or 8.
    group : int
        Rows of tiles that go over the columns together.
    staged : int
        Columns of the result that a warp turns from fragments to rows at a time.
    """

    rows: int
    columns: int
    stages: int
    blocks: int
    split: int = 1
    group: int = GROUP
    staged: int = 64


def choose_tiling(
    problem: MatmulProblem, gpu: GpuTarget, sizes: tuple[Expr, Expr, Expr], counts: Sequence[Expr]
) -> Tiling:
    """The tiling of a problem whose m, n, k and batch extents are `sizes` and `counts`: the one of least `cycles`.

    Where extents are symbolic, that of a product with `SYMBOLIC_EXTENT` in their place.
    """
    m, n, k = (size if isinstance(size, int) else SYMBOLIC_EXTENT for size in sizes)
    batches = prod(count if isinstance(count, int) else 1 for count in counts)
    is_known = all(isinstance(size, int) for size in (*sizes, *counts))
    steps = ceil_div(k, SWIZZLED_BYTES // bytes_of(problem.lhs.dtype))
    best: tuple[float, int, int, int] | None = None
    for rows in TILE_ROWS:
        for columns in TILE_COLUMNS:
            for split in SPLITS if is_known else (1,):
                if split > 1 and (split > steps or columns // split % 16):
                    continue
                tiles = ceil_div(m, rows) * ceil_div(n, columns) * batches
                cost = cycles(rows, columns, split, tiles, steps, gpu.multiprocessors)
                if best is None or cost < best[0]:
                    best = cost, rows, columns, split
    assert best is not None
    _, rows, columns, split = best
    return tiling_of(problem, gpu, sizes, counts, (rows, columns), split)


def reads_rows(problem: MatmulProblem) -> bool:
    """Whether the epilogue reads operands as large as the result, which wants whole rows."""
    operands = problem.epilogue.operands if problem.epilogue else ()
    return problem.init is not None or any({"m", "n"} <= set(operand.index_map) for operand in operands)


def staged_element(problem: MatmulProblem) -> int:
    """Bytes of what warps turn from fragments to rows: results, or sums where the epilogue wants rows."""
    return 4 if reads_rows(problem) else bytes_of(problem.result.dtype)


def cycles(rows: int, columns: int, split: int, tiles: int, steps: int, multiprocessors: int) -> float:
    """About how many cycles of a multiprocessor a product takes."""
    # The tensor cores' rate, and that of loads: whichever is slower.
    step = max(rows * columns / MULTIPLIED, (rows + columns) * SWIZZLED_BYTES / LOADED) + STEP_CYCLES
    turns = ceil_div(tiles * split, multiprocessors)
    each = ceil_div(steps, split) * step + rows * columns / split / STORED
    if split > 1:
        each += SPLIT_CYCLES + rows * columns * 4 / EXCHANGED
    return START_CYCLES + turns * each


def tiling_of(
    problem: MatmulProblem,
    gpu: GpuTarget,
    sizes: tuple[Expr, Expr, Expr],
    counts: Sequence[Expr],
    tile: tuple[int, int],
    split: int = 1,
    most_stages: int = 8,
    staged_bytes: int = STAGED_BYTES,
    per_multiprocessor: int = 1,
    group: int = GROUP,
) -> Tiling:
    """The tiling with tiles of a size: as many stages as shared memory has room for, and blocks as there is work.

    Parameters
    ----------
    staged_bytes : int
        Of a row of the result, that a warp stages at a time.
    per_multiprocessor : int
        Blocks that share a multiprocessor.
    """
    m, n, k = sizes
    rows, columns = tile
    element = staged_element(problem)
    staged = columns // split
    while staged * element > staged_bytes:
        staged //= 2
    staging = rows * (staged * element + STAGING_PAD)
    # A kilobyte of every block is the system's, and some bytes are barriers.
    room = min(gpu.shared_bytes, gpu.shared_bytes_sm // per_multiprocessor - 1024) - staging - 256
    stages = room // ((rows + columns) * SWIZZLED_BYTES)
    if isinstance(k, int):
        steps = ceil_div(ceil_div(k, SWIZZLED_BYTES // bytes_of(problem.lhs.dtype)), split)
        stages = min(stages, max(2, steps))
    clusters = gpu.multiprocessors * per_multiprocessor // split
    if isinstance(m, int) and isinstance(n, int) and all(isinstance(count, int) for count in counts):
        tiles = ceil_div(m, rows) * ceil_div(n, columns) * prod(counts)
        clusters = tiles if split > 1 else min(tiles, clusters)  # blocks of a cluster have one tile
    blocks = clusters * split
    return Tiling(rows, columns, max(1, min(stages, most_stages)), blocks, split, group, staged)
