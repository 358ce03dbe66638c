"""How an attention is cut for wgmma: rows of a block, keys of a tile, stages, parts of the keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....encoding.packed_layout import SWIZZLED_BYTES
from ....encoding.problem import AttentionProblem
from ....target.gpu_target import GpuTarget
from ...core.builder import ceil_div

WIDTH = SWIZZLED_BYTES // 2
"""Elements of a swizzled row."""
KEYS = 128
"""Number of keys of a tile."""
FEW_KEYS = 64
"""Number of keys of a tile where registers hold more for each key, or for wide values."""
KEYS_OF_WIDE = 80
"""Number of keys of a tile wider than 128 for several warpgroups: shared memory holds it twice."""
MAX_STAGES = {1: 3, 2: 2, 3: 2}
"""Maximum number of stages by warpgroups of consumers: a third takes 4 % longer (H200, 64 heads, 4,096 keys of 128)."""
FEW_ROWS = 64
"""Rows of a block that shares its keys with others."""
MANY_KEYS = 512
"""From here on a block gains by several warpgroups, and sharing out the keys costs less than it saves."""
SYMBOLIC = 1024
"""Assumed extent where only a call knows it."""


@dataclass(frozen=True)
class AttentionPlan:
    """How an attention is cut.

    Attributes
    ----------
    consumers : int
        Warpgroups that compute, each with 64 rows: 1, 2 or 3.
    keys : int
        Number of keys of a tile; a multiple of 16.
    stages : int
        Number of stages of the ring of tiles.
    split_keys : int
        Blocks of a cluster that share the keys: 1 to 8.
    heads_per_tile : int
        Heads whose queries are rows of one tile: see `heads.Rows`.
    overlaps_own_product : bool
        Whether a warpgroup computes powers beside its own product with values, or only beside those of others.
    heads_per_group : int
        Heads whose tiles of rows are taken together, those with the most keys first; 0: head by head.
    """

    consumers: int
    keys: int
    stages: int
    split_keys: int = 1
    heads_per_tile: int = 1
    overlaps_own_product: bool = True
    heads_per_group: int = 0


def choose_plan(problem: AttentionProblem, gpu: GpuTarget) -> AttentionPlan:
    """The plan of a problem: as many rows a block as leave no multiprocessor idle."""
    sizes: dict[str, Any] = dict(problem.sizes)
    b, m, n = (sizes[name] if isinstance(sizes[name], int) else SYMBOLIC for name in "bmn")
    b = sizes["b"] if isinstance(sizes["b"], int) else 1
    h, d, e = sizes["h"], sizes["d"], sizes["e"]
    shared = h // sizes["g"]
    heads_per_tile = shared if shared > 1 and isinstance(sizes["m"], int) and m * shared <= FEW_ROWS else 1
    rows, groups = m * heads_per_tile, h // heads_per_tile * b
    widest = max(ceil_div(d, WIDTH), ceil_div(e, WIDTH)) * WIDTH
    # Operands of the scores that run along queries and keys take a register for each score.
    is_crowded = any({"m", "n"} <= set(operand.index_map) for operand in problem.scores.operands)
    consumers = 1
    if n >= MANY_KEYS:
        most = (3, 2, 1) if widest <= WIDTH and not is_crowded else (2, 1)
        # More rows a block, as soon as blocks of fewer would be too many to run at once.
        crowded = (c for c in most if c > 1 and ceil_div(rows, 64 * (c - 1)) * groups > gpu.multiprocessors)
        consumers = next(crowded, 1)
    wide_keys = KEYS_OF_WIDE if consumers > 1 else FEW_KEYS
    max_keys = FEW_KEYS if is_crowded else wide_keys if widest > 128 else KEYS
    blocks = ceil_div(rows, 64 * consumers) * groups
    split_keys = 1
    if n >= MANY_KEYS and consumers == 1:
        fitting = [s for s, most in gpu.model.resident_blocks.items() if blocks * s <= most and n >= s * 2 * max_keys]
        split_keys = max(fitting, default=1)
    each = ceil_div(n, split_keys)
    keys = max_keys
    if isinstance(sizes["n"], int) and split_keys == 1 and consumers == 1:
        keys = ceil_div(ceil_div(each, ceil_div(each, max_keys)), 16) * 16
    tile = (ceil_div(d, WIDTH) + ceil_div(e, WIDTH)) * SWIZZLED_BYTES * max(keys, 64)
    room = gpu.shared_bytes - consumers * 64 * widest // WIDTH * SWIZZLED_BYTES - 2048
    stages = max(1, min(MAX_STAGES[consumers], room // tile))
    if isinstance(sizes["n"], int):
        stages = min(stages, max(1, ceil_div(each, keys)))
    # Measured on an H200: powers beside the own product take 5 % longer with heads of 128, less with 64 and 256.
    overlaps_own_product = consumers == 1 or not WIDTH < widest <= 2 * WIDTH
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
