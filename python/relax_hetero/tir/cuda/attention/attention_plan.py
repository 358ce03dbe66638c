"""Tilings of attention for wgmma: rows of a block, keys of a tile, stages, and splits of the keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....encoding.packed_layout import SWIZZLED_BYTES
from ....encoding.problem import AttentionProblem
from ....target.gpu_target import GpuTarget
from ...core.builder import ceil_div

WIDTH = SWIZZLED_BYTES // 2
"""Elements of a swizzled row."""
MAX_KEYS = 128
"""Maximum keys of a tile."""
MAX_KEYS_CROWDED = 64
"""Maximum keys of a tile if masks, or wide values, take registers."""
MAX_KEYS_WIDE = 80
"""Maximum keys of a tile with heads wider than 128 and several warpgroups: two stages fit shared memory."""
MAX_STAGES = {1: 3, 2: 2, 3: 2}
"""Maximum stages by consumer warpgroups: a third takes 4 % longer (H200, 64 heads, 4,096 keys of 128)."""
MAX_GROUPED_ROWS = 64
"""Maximum rows of a tile that combines heads with the same keys (grouped-query attention)."""
MANY_KEYS = 512
"""Keys from which several warpgroups, or splits of the keys, pay off."""
SYMBOLIC_EXTENT = 1024
"""Assumed value of symbolic extents."""


@dataclass(frozen=True)
class AttentionPlan:
    """Tiling of an attention.

    Attributes
    ----------
    consumers : int
        Consumer warpgroups, with 64 rows each: 1, 2 or 3.
    keys : int
        Keys of a tile; a multiple of 16.
    stages : int
        Stages of keys and values.
    split_keys : int
        Blocks of a cluster that split the keys (flash decoding): 1 to 8.
    heads_per_tile : int
        Heads whose queries are rows of one tile: see `heads.Rows`.
    overlaps_own_product : bool
        Whether the softmax of a warpgroup overlaps with its own product with values, or only with those of others.
    heads_per_group : int
        Heads that are rasterized together, longest rows first; 0: head by head.
    """

    consumers: int
    keys: int
    stages: int
    split_keys: int = 1
    heads_per_tile: int = 1
    overlaps_own_product: bool = True
    heads_per_group: int = 0


def choose_plan(problem: AttentionProblem, gpu: GpuTarget) -> AttentionPlan:
    """Choose a plan: as many rows per block as leave no multiprocessor idle."""
    sizes: dict[str, Any] = dict(problem.sizes)
    b, m, n = (sizes[name] if isinstance(sizes[name], int) else SYMBOLIC_EXTENT for name in "bmn")
    b = sizes["b"] if isinstance(sizes["b"], int) else 1
    h, d, e = sizes["h"], sizes["d"], sizes["e"]
    shared = h // sizes["g"]
    heads_per_tile = shared if shared > 1 and isinstance(sizes["m"], int) and m * shared <= MAX_GROUPED_ROWS else 1
    rows, groups = m * heads_per_tile, h // heads_per_tile * b
    max_width = max(ceil_div(d, WIDTH), ceil_div(e, WIDTH)) * WIDTH
    # Masks along queries and keys take a register per score.
    is_crowded = any({"m", "n"} <= set(operand.index_map) for operand in problem.scores.operands)
    consumers = 1
    if n >= MANY_KEYS:
        warpgroups = (3, 2, 1) if max_width <= WIDTH and not is_crowded else (2, 1)
        # More rows per block, if blocks with fewer rows would need several waves.
        larger = (c for c in warpgroups if c > 1 and ceil_div(rows, 64 * (c - 1)) * groups > gpu.multiprocessors)
        consumers = next(larger, 1)
    wide_keys = MAX_KEYS_WIDE if consumers > 1 else MAX_KEYS_CROWDED
    max_keys = MAX_KEYS_CROWDED if is_crowded else wide_keys if max_width > 128 else MAX_KEYS
    blocks = ceil_div(rows, 64 * consumers) * groups
    split_keys = 1
    if n >= MANY_KEYS and consumers == 1:
        splits = [s for s, limit in gpu.model.resident_blocks.items() if blocks * s <= limit and n >= s * 2 * max_keys]
        split_keys = max(splits, default=1)
    keys_per_split = ceil_div(n, split_keys)
    keys = max_keys
    if isinstance(sizes["n"], int) and split_keys == 1 and consumers == 1:
        keys = ceil_div(ceil_div(keys_per_split, ceil_div(keys_per_split, max_keys)), 16) * 16
    tile = (ceil_div(d, WIDTH) + ceil_div(e, WIDTH)) * SWIZZLED_BYTES * max(keys, 64)
    capacity = gpu.shared_bytes - consumers * 64 * max_width // WIDTH * SWIZZLED_BYTES - 2048
    stages = max(1, min(MAX_STAGES[consumers], capacity // tile))
    if isinstance(sizes["n"], int):
        stages = min(stages, max(1, ceil_div(keys_per_split, keys)))
    # Measured on an H200: overlap with the own product is 5 % slower with heads of 128, and faster with 64 and 256.
    overlaps_own_product = consumers == 1 or not WIDTH < max_width <= 2 * WIDTH
    heads_per_group = 0
    if problem.causal and consumers > 1:
        heads_per_group = min(groups, max(1, gpu.cache_bytes // 3 // (n * (d + e) * 2)) * (shared // heads_per_tile))
    return AttentionPlan(
        consumers,
        keys,
        stages,
        split_keys,
        heads_per_tile,
        overlaps_own_product=overlaps_own_product,
        heads_per_group=heads_per_group,
    )
