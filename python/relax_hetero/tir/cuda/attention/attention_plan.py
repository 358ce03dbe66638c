"""Tilings of attention by tensor cores: rows of a block, keys of a tile, stages, and splits of the keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ....encoding.packed_layout import SWIZZLED_BYTES
from ....encoding.pages import PAGE, page_bytes
from ....encoding.problem import AttentionProblem, CachedAttentionProblem, Dim
from ....errors import EncodingError
from ....target.element_types import bytes_of
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
WARP_ROWS = 16
"""Rows of a warp, and of a tile whose keys the warps split."""
MMA_WARPS = 4
"""Warps of a block of `mma_attention` with dense keys, and of decoding."""
MAX_MMA_ROW_BYTES = 256
"""Maximum bytes of a head for which tiles of `mma_attention` have 64 keys; else 32."""
MAX_NARROW = 128
"""Maximum head size for which registers suffice for eight warps per block, and for wgmma's scores over pages."""
MIN_WGMMA_CHUNK = 128
"""Minimum rows of a chunk for wgmma, those of two warpgroups."""
TEAM_WARPS = 4
"""Warps that share 16 rows, and have a part of the columns of values each, where keys are the values."""
TEAMS = 2
"""Teams of warps of a block: of different rows of a chunk, or of halves of the keys of a page."""
MAX_SPLIT = 8
DECODE_BLOCKS_PER_SM = 2
MAX_DECODE_STAGES = 3
MIN_DECODE_STAGES = 2
DECODE_TEAMS = 2
"""Teams of warps that split the pages of a block, each in half of a multiprocessor's memory.

They save time if most multiprocessors have no block (`MIN_IDLE`), and take longer with more blocks.
"""
MIN_IDLE = 4
"""Minimum multiprocessors per block with teams."""
PARTIAL_BYTES = 32
"""Bytes of a block's result for four columns: accumulators, maximum score and row sum."""
_RESERVED = 2 << 10
"""Bytes of shared memory for barriers, alignment, and the system's reservation per block."""


@dataclass(frozen=True)
class AttentionPlan:
    """Tiling of an attention."""

    rows: int  # rows of a block: 16 per warp, so 64 per warpgroup; 16 if the warps split the keys of a tile
    keys: int  # keys of a tile; a multiple of 16
    stages: int = 1  # stages of keys and values
    # Blocks of a cluster that split the keys (flash decoding): 1 to 8. A GPU holds fewer blocks of large clusters.
    split_keys: int = 1
    heads_per_tile: int = 1  # heads whose queries are rows of one tile: see `heads.Rows`
    # Whether the softmax of a warpgroup overlaps with its own product with values, or only with those of others.
    overlaps_own_product: bool = True
    # Teams of warps of a block that decodes: they split the pages of the block.
    teams: int = 1
    heads_per_group: int = 0  # heads that are rasterized together, longest rows first; 0: head by head

    @property
    def warpgroups(self) -> int:
        """Warpgroups of consumers."""
        return self.rows // 64


def grouped_heads(problem: AttentionProblem, max_rows: int = MAX_GROUPED_ROWS) -> int:
    """Heads per tile: all that share a key head if their queries are at most `max_rows`, else one."""
    sizes: dict[str, Any] = dict(problem.sizes)
    shared, m = sizes["h"] // sizes["g"], sizes["m"]
    return shared if isinstance(m, int) and m * shared <= max_rows else 1


def wgmma_plan(problem: AttentionProblem, gpu: GpuTarget) -> AttentionPlan:
    """Plan of `wgmma_attention` for dense keys: as many rows per block as leave no multiprocessor idle."""
    sizes: dict[str, Any] = dict(problem.sizes)
    b, m, n = (sizes[name] if isinstance(sizes[name], int) else SYMBOLIC_EXTENT for name in "bmn")
    b = sizes["b"] if isinstance(sizes["b"], int) else 1
    h, d, e = sizes["h"], sizes["d"], sizes["e"]
    shared = h // sizes["g"]
    heads_per_tile = grouped_heads(problem)
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
        64 * consumers,
        keys,
        stages,
        split_keys,
        heads_per_tile,
        overlaps_own_product=overlaps_own_product,
        heads_per_group=heads_per_group,
    )


def mma_plan(problem: AttentionProblem) -> AttentionPlan:
    """Plan of `mma_attention` for dense keys: small blocks, several of which a multiprocessor holds."""
    sizes = dict(problem.sizes)
    row_bytes = max(int(sizes["d"]), int(sizes["e"])) * bytes_of(problem.query.dtype)
    keys = 64 if row_bytes <= MAX_MMA_ROW_BYTES else 32
    return AttentionPlan(MMA_WARPS * WARP_ROWS, keys, heads_per_tile=grouped_heads(problem))


# Pages: a tile is a page.


def paged_extents(problem: CachedAttentionProblem) -> tuple[int, int, int]:
    """Rows, slots of the table, and pages of a slot.

    Raises
    ------
    EncodingError
        If one is symbolic.
    """

    def static(extent: Dim, name: str) -> int:
        if isinstance(extent, int):
            return extent
        raise EncodingError(f"cached_attention on GPUs: found {extent!r} {name}, expected a number")

    rows, (slots, max_pages) = problem.operands[0].shape[0], problem.operands[2].shape
    return static(rows, "rows"), static(slots, "slots of the table"), static(max_pages, "pages of a slot")


def chunk_plan(problem: CachedAttentionProblem, gpu: GpuTarget) -> AttentionPlan:
    """Plan of `mma_attention` for a chunk.

    Blocks have more rows, which share loads of pages, if blocks with fewer need several waves.
    """
    rows = paged_extents(problem)[0]
    is_large = ceil_div(rows, 64) * problem.heads > gpu.multiprocessors and problem.size <= MAX_NARROW
    height = 128 if is_large else 64
    capacity = gpu.shared_bytes - height * problem.size * 2 - 1024
    return paged_plan(problem, height, max(1, min(2, capacity // page_bytes(1, problem.size, problem.page_type))))


def wgmma_chunk_plan(problem: CachedAttentionProblem, gpu: GpuTarget) -> AttentionPlan:
    """Plan of `wgmma_attention` for a chunk: three warpgroups if they occupy the GPU, else two.

    A prefill of 2,048 tokens through eight layers (32 heads of 128) takes 12.9 ms on an H200 with three, 13.2 with two.
    """
    if ceil_div(paged_extents(problem)[0], 192) * problem.heads >= gpu.multiprocessors:
        return paged_plan(problem, 192, 3)
    capacity = gpu.shared_bytes - 128 * problem.size * 2 - 1024
    return paged_plan(problem, 128, max(2, min(4, capacity // page_bytes(1, problem.size, problem.page_type))))


def decode_plan(problem: CachedAttentionProblem, gpu: GpuTarget) -> AttentionPlan:
    """Plan of `decode_attention`: as many blocks as are resident, if sequences may have as many pages."""
    rows, _, max_pages = paged_extents(problem)
    blocks = rows * problem.kv_heads
    num_pages = _num_pages(problem, max_pages)

    def fits(split: int) -> bool:
        resident = gpu.model.resident_blocks[split] * gpu.multiprocessors // gpu.model.resident_blocks[1]
        return blocks * split <= resident * DECODE_BLOCKS_PER_SM

    split = next((count for count in range(min(MAX_SPLIT, max(num_pages, 1)), 1, -1) if fits(count)), 1)
    teams = DECODE_TEAMS if blocks * split * MIN_IDLE <= gpu.multiprocessors and num_pages > split else 1
    other_bytes = WARP_ROWS * problem.size * 2 + problem.group * problem.size // 4 * PARTIAL_BYTES + _RESERVED
    capacity = gpu.shared_bytes_sm // DECODE_BLOCKS_PER_SM - other_bytes
    # At most the pages of a block: the remaining shared memory lets a block of the previous launch be resident, too.
    max_stages = min(MAX_DECODE_STAGES if teams == 1 else MIN_DECODE_STAGES, ceil_div(num_pages, split * teams))
    stages = max(MIN_DECODE_STAGES, min(max_stages, capacity // page_bytes(1, problem.size, problem.page_type)))
    if teams * (stages * page_bytes(1, problem.size, problem.page_type) + other_bytes) > gpu.shared_bytes:
        teams = 1
    return replace(paged_plan(problem, WARP_ROWS, stages, split), teams=teams)


def shared_values_plan(problem: CachedAttentionProblem, gpu: GpuTarget) -> AttentionPlan:
    """Plan of `shared_values_attention`: a block per multiprocessor, whose shared memory has two pages."""
    rows, _, max_pages = paged_extents(problem)
    if not problem.is_decode:
        return paged_plan(problem, TEAMS * WARP_ROWS, 2)
    blocks = rows * problem.heads // decode_heads(problem)
    splits = (count for count in range(MAX_SPLIT, 1, -1) if blocks * count <= gpu.model.resident_blocks[count])
    split_keys = min(next(splits, 1), _num_pages(problem, max_pages))
    return paged_plan(problem, WARP_ROWS, 2, split_keys)


def decode_heads(problem: CachedAttentionProblem) -> int:
    """Heads of a token in a tile of decoding: all that share keys, or where keys are the values a divisor of these."""
    if not problem.shared_values:
        return problem.group
    return next(count for count in range(WARP_ROWS, 0, -1) if problem.group % count == 0)


def _num_pages(problem: CachedAttentionProblem, max_pages: int) -> int:
    """Maximum pages that a token sees."""
    return min(max_pages, ceil_div(problem.window, PAGE) + 1) if problem.window else max_pages


def paged_plan(problem: CachedAttentionProblem, rows: int, stages: int, split_keys: int = 1) -> AttentionPlan:
    """Plan for pages, with given rows of a block, pages in flight, and blocks that split the pages of a sequence.

    All heads of a tile of rows are neighbours, as those that share keys read the same pages. The rows of a tile of
    decoding are heads of a token that share keys.
    """
    if problem.is_decode:
        return AttentionPlan(rows, PAGE, stages, split_keys, decode_heads(problem))
    # Overlap with the own product is slower with dense heads of 128; it hides the tanh of a softcap.
    overlaps = bool(problem.softcap)
    return AttentionPlan(rows, PAGE, stages, overlaps_own_product=overlaps, heads_per_group=problem.heads)
